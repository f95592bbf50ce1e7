"""The ``drumline`` command. Each subcommand imports what it needs when it runs.

Nothing is imported before ctrl-C and the standard descriptors are taken care of: an interrupt during the imports is no
traceback, and no file or socket gets the number of a standard descriptor that was closed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

SUBCOMMANDS = {
    "serve": "serve a model: OpenAI API and a chat page",
    "chat": "talk to a running server",
    "plan": "show processes, ranks, groups and queues for given flags; starts nothing",
    "doctor": "look at this machine before weights load, or at a running server (--live)",
    "bench": "measure: load against a server, or the library offline",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    global _began
    _began = time.monotonic()
    before = _quiet_interrupt()
    if argv is None:  # whoever starts the command may have blocked what ends it, and that is inherited
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    _open_standard_descriptors()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"]:
        _quiet_sigterm()
    try:
        return _main(given)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        # The command itself keeps the quiet handler while the interpreter ends.
        if argv is not None and before is not None:
            signal.signal(signal.SIGINT, before)


_began = 0.0
"""time.monotonic() when the command began, its interpreter started."""
_INTERRUPTED = 130  # ExitCode.INTERRUPTED, which is not imported yet


def _quiet_interrupt() -> Any:
    """Ctrl-C ends the process without a word. The handler that was there; None if it stays (ignored, or not ours)."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            return signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
    except ValueError:  # not in the main thread
        pass
    return None


def _quiet_sigterm() -> None:
    """SIGTERM ends a server that has not begun as it does one that has, until ``server.run`` takes it over."""
    try:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _not_begun)
    except ValueError:  # not in the main thread
        pass


def _not_begun(number: int, frame: Any) -> None:
    os._exit(0)  # ExitCode.OK


def _open_standard_descriptors() -> None:
    """What was closed (``2>&-``) is /dev/null from now on."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(fd, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def _main(given: list[str]) -> int:
    import argparse
    import errno

    from drumline.cli.args import Parser, parse
    from drumline.errors import ConfigError, ExitCode, remedy

    parser = Parser(prog="drumline", description="Run one language model on many worker processes as if it were one.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    listed = "\n".join(f"  {name:8}{text}" for name, text in SUBCOMMANDS.items())
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.usage = "drumline COMMAND [flags]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"commands:\n{listed}\n\n'drumline COMMAND --help' lists the flags of each."
    name = given[0] if given else ""
    try:
        if name in SUBCOMMANDS:
            code = int(_RUN[name](given[1:]))
            if name != "serve":
                sys.stdout.flush()
            return code
        if name and not name.startswith("-"):
            parser.error(_unknown_command(name))
        namespace = parse(parser, given)
        if namespace.version:
            from drumline import __version__

            print(f"drumline {__version__}")
            return ExitCode.OK
        parser.print_help()
        return ExitCode.OK if not given else ExitCode.USAGE
    except ConfigError as e:
        print(f"drumline {name}: error: {e}", file=sys.stderr)
        return ExitCode.USAGE
    except (OSError, RuntimeError) as e:
        if advice := remedy(e):
            print(f"drumline {name}: error: {getattr(e, 'strerror', None) or e}: {advice}", file=sys.stderr)
            return ExitCode.START_FAILED
        if not isinstance(e, OSError):
            raise
        if name == "serve" or e.filename is not None or e.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        return _lost_output(name, e)


def _lost_output(name: str, error: OSError) -> int:
    """Nobody reads what is printed any more, which is nobody's mistake, or there is no room for it."""
    from drumline.errors import ExitCode

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer is written when the interpreter ends
    if isinstance(error, BrokenPipeError):
        return ExitCode.OK
    print(f"drumline {name}: error: standard output: {error.strerror}", file=sys.stderr)
    return ExitCode.USAGE


def _unknown_command(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
    return f"unknown command {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; {', '.join(SUBCOMMANDS)}")


def _serve(argv: Sequence[str]) -> int:
    from drumline.errors import ConfigError, ExitCode, remedy
    from drumline.processes.logs import console_as_stderr

    with console_as_stderr():
        try:
            code = _serve_on_console(argv)
        except ConfigError as e:  # as main does, but on a console that may be full
            print(f"drumline serve: error: {e}", file=sys.stderr)
            if advice := remedy(e):
                print(advice, file=sys.stderr)
                return ExitCode.START_FAILED
            return ExitCode.USAGE
        finally:
            if signal.getsignal(signal.SIGTERM) is _not_begun:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
    from drumline.server.run import wait_for_threads

    if wait_for_threads(0):
        os._exit(code)  # the interpreter would wait for them
    return code


def _serve_on_console(argv: Sequence[str]) -> int:
    from drumline.cli.args import Parser, add_flags, configs, parse, refuse_unbuilt

    parser = Parser(prog="drumline serve", usage="drumline serve [MODEL] [flags]", description="Serve a model.")
    add_flags(parser)
    namespace = parse(parser, argv)
    config, server = configs(namespace)
    refuse_unbuilt(namespace, config, server)
    from drumline.server.run import serve

    return serve(config, server, _began)


def _chat(argv: Sequence[str]) -> int:
    from drumline.cli import chat

    quiet = signal.getsignal(signal.SIGINT)
    if callable(quiet):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ctrl-C ends an answer there, not the chat
    try:
        return chat.main(argv)
    finally:
        if callable(quiet):
            signal.signal(signal.SIGINT, quiet)


def _plan(argv: Sequence[str]) -> int:
    from drumline.cli import plan

    return plan.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from drumline.cli import doctor

    return doctor.main(argv)


def _bench(argv: Sequence[str]) -> int:
    from drumline.cli import bench

    if argv[:1] == ["offline"] and callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ctrl-C ends the rounds, not the report
    return bench.main(argv)


_RUN = {"serve": _serve, "chat": _chat, "plan": _plan, "doctor": _doctor, "bench": _bench}

if __name__ == "__main__":
    sys.exit(main())
