"""The ``drumline`` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from drumline.cli.args import Parser, add_flags, configs, parse, refuse_unbuilt
from drumline.errors import ConfigError, ExitCode

SUBCOMMANDS = {
    "serve": "serve a model: OpenAI API and a chat page",
    "chat": "talk to a running server",
    "plan": "show processes, ranks, groups and queues for given flags; starts nothing",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
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
            return int(_RUN[name](given[1:]))
        if name and not name.startswith("-"):
            parser.error(_unknown_command(name))
        namespace = parse(parser, given)
        if namespace.version:
            from drumline import __version__

            print(f"drumline {__version__}")
            return ExitCode.OK
        parser.print_help()
        return ExitCode.OK if not given else ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except ConfigError as e:
        print(f"drumline {name}: error: {e}", file=sys.stderr)
        return ExitCode.USAGE


def _unknown_command(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
    return f"unknown command {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; {', '.join(SUBCOMMANDS)}")


def _serve(argv: Sequence[str]) -> int:
    parser = Parser(prog="drumline serve", usage="drumline serve [MODEL] [flags]", description="Serve a model.")
    add_flags(parser)
    namespace = parse(parser, argv)
    config, server = configs(namespace)
    refuse_unbuilt(namespace, config, server)
    from drumline.server.run import serve

    return serve(config, server)


def _chat(argv: Sequence[str]) -> int:
    from drumline.cli import chat

    return chat.main(argv)


def _plan(argv: Sequence[str]) -> int:
    from drumline.cli import plan

    return plan.main(argv)


_RUN = {"serve": _serve, "chat": _chat, "plan": _plan}

if __name__ == "__main__":
    sys.exit(main())
