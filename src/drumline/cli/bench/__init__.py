"""``drumline bench``: load against a server, or against the library in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from drumline.errors import ExitCode

COMMANDS = {
    "serve": "load against any server of the OpenAI API: latencies, tokens/s, errors",
    "offline": "throughput and latency of the library in this process, without HTTP",
}


def main(argv: Sequence[str]) -> int:
    """Run ``drumline bench``."""
    name = argv[0] if argv else ""
    if name == "serve":
        from drumline.cli.bench import serve

        return serve.main(argv[1:])
    if name == "offline":
        from drumline.cli.bench import offline

        return offline.main(argv[1:])
    if name in ("", "-h", "--help"):
        print("usage: drumline bench COMMAND [flags]\n\ncommands:")
        print("\n".join(f"  {command:9}{text}" for command, text in COMMANDS.items()))
        print("\n'drumline bench COMMAND --help' lists the flags of each.")
        return ExitCode.OK
    print(f"drumline bench: error: {_unknown(name)}\nTry: drumline bench --help", file=sys.stderr)
    return ExitCode.USAGE


def _unknown(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    what = "flag" if name.startswith("-") else "command"
    return f"unknown {what} {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; {', '.join(COMMANDS)}")
