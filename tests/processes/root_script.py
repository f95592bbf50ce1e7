"""A root: fork server, one middle owner with two workers, and a spare fork server once the middle owner is ready.

Prints pids as JSON, then its report, exits with 4.

Arguments: target of the workers, log folder. Ends without an error when its stdin ends.
"""

from __future__ import annotations

import json
import queue
import sys
import threading

from drumline.processes import EventKind, ForkServer, LogConfig, MemberEvent, ProcessSpec, Supervisor, print_report
from tests.processes.targets import TARGETS


def main() -> int:
    worker, folder = sys.argv[1:]
    events: queue.Queue[MemberEvent | None] = queue.Queue()
    server = ForkServer.start(log=LogConfig.create(dir=folder), role="APIServer_0")
    supervisor = Supervisor(server, events.put, rung_s=0.5)
    spec = ProcessSpec(
        role="EngineCore_DP0",
        target=f"{TARGETS}:core",
        payload=json.dumps({"worker": worker}).encode(),
        forkserver_access=True,
    )
    member = server.spawn(spec)
    supervisor.add(member)
    threading.Thread(target=lambda: (sys.stdin.read(), events.put(None)), daemon=True).start()
    code = 0
    spare: ForkServer | None = None
    while True:
        event = events.get(timeout=60)
        if event is None:
            break
        if event.kind is EventKind.FAILURE:
            assert event.report is not None
            supervisor.close(force=True)
            print_report(event.report)
            code = 4
            break
        if event.kind is EventKind.READY and spare is None:
            spare = server.spare()
            assert spare is not None
            assert spare.meet()
        if event.kind in (EventKind.PHASE, EventKind.READY):
            print(json.dumps({"kind": event.kind.value, "phase": event.phase, "core": member.pid}), flush=True)
    supervisor.close()
    server.close()
    if spare is not None:
        spare.close()
    return code


if __name__ == "__main__":
    sys.exit(main())
