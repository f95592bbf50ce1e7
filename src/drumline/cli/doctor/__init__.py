"""``drumline doctor``: what this machine has for a server with given flags, before any weights load; or, with
``--live``, what the processes of a running server are doing.

::

    collect.collect(config, server) -> facts.Facts -> findings.findings(...) -> text or JSON
    live.report(url or pid)         -> GET /debug/report -> text or JSON

Collecting is the only part that touches the machine; judging is pure. No torch, and an end within two seconds: whatever
may hang (drivers, name servers, file systems) is asked in threads that are waited for only so long.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from drumline.cli.args import Parser, add_flags, configs, parse, refuse_unbuilt
from drumline.errors import ExitCode


def main(argv: Sequence[str]) -> int:
    """Run ``drumline doctor``. Exit code 0: nothing that would keep ``serve`` from working; 3: something would."""
    began = time.monotonic()
    parser = Parser(
        prog="drumline doctor",
        usage=(
            "drumline doctor [MODEL] [flags of serve] [--json]\n"
            "       drumline doctor --live [--url URL | --pid PID] [--json]"
        ),
        description="Look at this machine before weights load, or at a running server (--live). Starts nothing.",
    )
    own = parser.add_argument_group("doctor")
    own.add_argument("--json", action="store_true", help="machine-readable")
    own.add_argument("--live", action="store_true", help="what a running server's processes are doing, with stacks")
    own.add_argument("--url", help="of the running server ($DRUMLINE_URL, else --host and --port)", metavar="URL")
    own.add_argument("--pid", type=int, help="of any process of the running server", metavar="PID")
    add_flags(parser)
    namespace = parse(parser, argv)
    if namespace.live or namespace.url or namespace.pid:
        from drumline.cli.doctor import live

        return live.main(namespace)
    config, server = configs(namespace)
    from drumline.cli.doctor.collect import collect
    from drumline.cli.doctor.findings import Level, findings

    facts = collect(config, server, lambda: refuse_unbuilt(namespace, config, server))
    found = findings(facts)
    ok = all(one.level is not Level.ERROR for one in found)
    if namespace.json:
        seconds = round(time.monotonic() - began, 3)
        made = {"ok": ok, "findings": [asdict(one) for one in found], "facts": asdict(facts), "seconds": seconds}
        sys.stdout.write(json.dumps(made, indent=2, default=str) + "\n")
    else:
        sys.stdout.write("".join(one.text() + "\n" for one in found))
    return ExitCode.OK if ok else ExitCode.START_FAILED
