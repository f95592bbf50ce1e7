"""Processes: fork server, control connections, supervision, failure reports, titles and logs.

Use it like this::

    log = LogConfig.create(level="info")                       # folder of this run; old runs are pruned
    server = ForkServer.start(preload=("torch",), log=log, role="APIServer_0")     # returns at once
    supervisor = Supervisor(server, on_event=handle)           # one thread; handle(MemberEvent) runs in it
    members = []
    for rank in range(2):                                      # all are made before any is waited for
        spec = ProcessSpec(role=starting_worker_name(rank), target="pkg.mod:main", payload=b"...", rank=rank,
                           env={}, threads=1, fds=(ring_fd, doorbell_fd), forkserver_access=False)
        member = server.spawn(spec)                            # returns at once
        supervisor.add(member)
        members.append(member)
    supervisor.wait_all_ready(members, no_progress_timeout=600)        # StartupError has the root cause in its text
    members[0].info                                            # bytes that it gave to ready()
    members[0].send(b"...")                                    # its listen() callback gets it
    supervisor.close()                                         # ladder for all members, ends the thread
    server.close()

The child (``pkg/mod.py``)::

    def main(context: ChildContext, payload: bytes) -> None:
        context.set_phase("load_model")                        # progress; shown, and resets the start timeout
        context.set_name("Worker_TP1")                         # title, log prefix, log file, reports
        context.on_stop(doorbell.ring)                         # in the child's supervisor thread; also if owner is gone
        context.listen(lambda data: ...)                       # what the owner sends
        context.ready(b"info")                                 # until here a stop raises StopRequested in main
        while not context.stopping:
            ...                                                # wait on something that on_stop rings
        # an exception that leaves the target becomes the failure report; context.fail(exc, phase, step) does it earlier
        context.send(b"...")                                   # MESSAGE event at the owner
        context.forkserver.spawn(...)                          # with forkserver_access; give it a Supervisor here too

Events (``EventKind``): PHASE (``member`` None: of the fork server), READY, MESSAGE for each member; GONE when a process
has ended (``member.exit`` has code or signal); FAILURE once for everything that failed within 150 ms, with the root
cause first and the rest folded under it. The end of a member that nobody asked to stop is a failure even with exit
code 0. ``on_event`` must not block and must not call ``shutdown`` or ``wait_all_ready`` (it runs in the thread that
they wait for): ``request_stop`` is for it.

``OwnChildren("spawn", log)`` (or ``"fork"``) stands for the fork server where this process itself is to make children.

A fork server serves one Supervisor in each process at a time. Descriptors in ``ProcessSpec.fds`` are duplicated by
``spawn``: the caller closes its own when it likes. No child gets any descriptor beyond its connection, these, and files
that preloaded modules have open.
"""

from __future__ import annotations

from drumline.processes.child import ChildContext, StopRequested
from drumline.processes.client import ForkServer, Member, ProcessSpec
from drumline.processes.core import Exit, State
from drumline.processes.environment import without_outer_job
from drumline.processes.logs import LogConfig
from drumline.processes.own import OwnChildren
from drumline.processes.reports import exit_report, fold, make_report, print_report
from drumline.processes.supervisor import EventKind, MemberEvent, Supervisor
from drumline.processes.titles import (
    api_server_name,
    engine_core_name,
    set_title,
    starting_worker_name,
    worker_name,
)

__all__ = [
    "ChildContext",
    "EventKind",
    "Exit",
    "ForkServer",
    "LogConfig",
    "Member",
    "MemberEvent",
    "OwnChildren",
    "ProcessSpec",
    "State",
    "StopRequested",
    "Supervisor",
    "api_server_name",
    "engine_core_name",
    "exit_report",
    "fold",
    "make_report",
    "print_report",
    "set_title",
    "starting_worker_name",
    "without_outer_job",
    "worker_name",
]
