"""The processes of one engine as the front end has them: started, watched, ended. Used by both clients.

Life: :meth:`EngineProcesses.start` (returns at once), :meth:`~EngineProcesses.wait_ready`, serving, and
:meth:`~EngineProcesses.shutdown`. A failure is noticed by the supervisor's thread; it is kept as ``failure``, told to
``on_failure`` once, and whatever is left is ended in the background, so that nothing stays behind even if the program
that holds the client never looks at it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import msgspec

from drumline.config import EngineConfig
from drumline.engine.core_watch import APART_S, CoreLooks, CoreWatch
from drumline.engine.kept import KeptMemory, ranks_to_keep
from drumline.engine.protocol import (
    Beat,
    BeatRequest,
    CoreStart,
    EngineInfo,
    LiveAnswer,
    LiveRequest,
    ProcessState,
    Stalling,
    ToFront,
)
from drumline.engine.starts import StartMarks
from drumline.errors import ChannelClosedError, EngineDeadError, FailureReport, StartupError, remedy
from drumline.executor import Executor
from drumline.model.spec import MODULES_OF_ANY, preload_modules, read_spec
from drumline.parallel.layout import device_index
from drumline.platforms import resolve_platform
from drumline.platforms.numa import Place, union
from drumline.processes import (
    EventKind,
    ForkServer,
    LogConfig,
    Member,
    MemberEvent,
    ProcessSpec,
    State,
    Supervisor,
    engine_core_name,
    without_outer_job,
)
from drumline.processes.linux import STATES, cpu_ticks, process_state
from drumline.processes.live import LiveReport, innermost, look_at, own_stacks
from drumline.processes.reports import span
from drumline.processes.start_methods import asked_for, cluster_environment

log = logging.getLogger(__name__)

LIVE_WAIT_S = 2.5
"""How long the engine core may take to say what its workers are doing."""
HANG_WAIT_S = 1.2
"""The same if it hangs, or seems to: its thread may still answer."""
LEAST_SPARE_S = 5.0
"""A spare fork server that ended sooner is not made again."""
CORE_SLACK_S = 0.5
"""What the engine core has, after its workers have ended or been killed, to end itself."""


class EngineProcesses:
    """See the module's text. Thread-safe.

    Args:
        config: ``model.path`` is set.
        role: what reports and the process table call this process.
        on_failure: called once, in the supervisor's thread, when the engine is dead. Must not block.
        keep: if the engine dies once it was ready, or while it takes the place of one that was, its fork server is
            kept for those that come after (the imports are most of a start), and if that is what died, a spare copy of
            it takes its place; :meth:`close` ends both.
        before: the processes of the engine in whose place these come; they have been shut down.
        trusted: keys and values of that engine may be used (``engine.kept``).
        waits: whether somebody waits for something of the engine core, which is then watched (:meth:`expect`).

    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        role: str,
        on_failure: Callable[[FailureReport], None],
        keep: bool = False,
        before: EngineProcesses | None = None,
        trusted: bool = False,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self.failure: FailureReport | None = None
        """Root cause, once the engine is dead."""
        self._role = role
        self._on_failure = on_failure
        self._phase = "starting"
        self._keep = keep
        self._again = before is not None
        self._log_dir: str = before._log_dir if before is not None else config.process.log_dir
        self._forkserver: ForkServer | None = None if before is None else before._take_forkserver()
        self._spare: ForkServer | None = None if before is None else before._take_spare()
        self._spare_since = 0.0
        self._kept = False
        self._memory: KeptMemory | None = None if before is None else before._take_memory()
        self._trusted = trusted
        self._supervisor: Supervisor | None = None
        self._core: Member | None = None
        self._workers: dict[int, ProcessState] = {}
        self._marks = StartMarks()
        """In time.monotonic()."""
        self._lock = threading.Lock()
        self._stopping = False
        self._stopped = threading.Event()
        self._waits = waits
        self._watch: CoreWatch | None = None
        self._ranks_stall = self._core_stalls = ""
        self._decode = msgspec.msgpack.Decoder(ToFront).decode
        self._live_lock = threading.Lock()
        self._live_number = 0
        self._answered = threading.Condition()
        self._answer: LiveAnswer | None = None

    def start(self, door: int) -> None:
        """Start fork server and engine core; returns before they have done anything. ConfigError if that is known to
        be in vain. ``door``: descriptor that leads the engine core to the front end's socket."""
        self._marks.mark("start", time.monotonic())
        process = self.config.process
        place = core_place(self.config)
        # Under ``fork`` workers are copies of the engine core, and that comes from the fork server as ever.
        executed = asked_for(process.worker_start_method, os.environ) in ("spawn", "plain")
        preload = () if executed else process.preload or preload_of(self.config)
        level = process.log_level
        self._choose_memory()
        with self._lock:
            if self._stopping:
                raise self._stopped_error()
            if self._forkserver is None:
                self._forkserver = self._use_spare()
            if self._forkserver is None:
                logs = LogConfig.create(level=level, dir=self._log_dir)
                self._log_dir = logs.dir
                env = {**without_outer_job(os.environ), **cluster_environment()}
                self._forkserver = ForkServer.start(preload, env, logs, role=self._role)
            ladder_s = process.stop_timeout_s + process.terminate_timeout_s
            # The engine core climbs that ladder with its workers, so it gets longer before it is killed itself.
            self._supervisor = Supervisor(
                on_event=self._on_event, rung_s=ladder_s + CORE_SLACK_S, term_s=process.terminate_timeout_s
            )
            kept_fds = self._memory.hand_over() if self._memory is not None else ()
            incarnation = self._memory.incarnation if self._memory is not None else 0
            try:
                self._core = self._forkserver.spawn(
                    ProcessSpec(
                        role=engine_core_name(self.config.parallel.data_parallel_rank),
                        target="drumline.engine.main:main",
                        payload=cloudpickle.dumps(CoreStart(config=self.config, incarnation=incarnation)),
                        threads=core_threads(self.config),
                        fds=(door, *kept_fds),
                        forkserver_access=True,
                        fresh=executed,
                        cpus=place.cpus,
                        numa_node=place.node,
                    )
                )
            finally:
                if self._memory is not None:
                    self._memory.handed_over()
            self._supervisor.add(self._core)
            if preload:
                self._make_spare()  # after the engine core, and while that starts

    def _choose_memory(self) -> None:
        """That of the engine before, if it is to be trusted and nobody can write there any more; else new memory."""
        memory = self._take_memory()
        if memory is not None and not (self._trusted and memory.is_free()):
            memory.close()
            memory = None
        if memory is None and self._keep and (ranks := ranks_to_keep(self.config)):
            memory = KeptMemory(ranks)
        with self._lock:
            if not self._stopping:
                self._memory, memory = memory, None
        if memory is not None:
            memory.close()

    def _take_memory(self) -> KeptMemory | None:
        """For its next user, who closes it."""
        with self._lock:
            memory, self._memory = self._memory, None
            return memory

    def wait_ready(self) -> EngineInfo:
        """Wait until the engine core is ready. StartupError with the root cause; everything has been ended then."""
        supervisor, core = self._supervisor, self._core
        assert supervisor is not None
        assert core is not None
        try:
            supervisor.wait_all_ready([core], self.config.process.start_timeout_s, deputies_s=10.0)
        except StartupError as error:
            self._note_failure(error.report)
            self.shutdown()
            raise
        with self._lock:
            if self._stopping:
                raise self._stopped_error()
            self._start_watch(core)
        self._phase = "ready"
        self._marks.mark("ready", time.monotonic())
        return msgspec.msgpack.decode(core.info, type=EngineInfo)

    # The engine core itself: see core_watch.py.

    @property
    def stalling(self) -> str:
        """Who makes no progress, once half of the stall timeout is over without any, or is stopped; else empty."""
        return self._core_stalls or self._ranks_stall or self._stopped_now()

    def _stopped_now(self) -> str:
        """Engine core and workers that somebody has stopped (SIGSTOP): also while nobody waits for them."""
        if self._phase != "ready":
            return ""
        rows = [(row.name, row.pid) for _, row in sorted(self._workers.items())]
        if self._core is not None:
            rows.insert(0, (self._core.name, self._core.pid))
        stopped = {pid: name for name, pid in rows if process_state(pid) == "T"}
        return ", ".join(f"{name} (pid {pid}) is stopped (T)" for pid, name in stopped.items())

    def expect(self) -> None:
        """Somebody waits for something of the engine core from now on. Any thread; cheap."""
        if self._watch is not None:
            self._watch.arm()

    def _start_watch(self, core: Member) -> None:
        process = self.config.process
        ticks_s = 1 / os.sysconf("SC_CLK_TCK")

        def ask(number: int) -> None:
            with contextlib.suppress(ChannelClosedError, TimeoutError):
                core.send(msgspec.msgpack.encode(BeatRequest(number)), timeout_s=0.0)

        self._watch = CoreWatch(
            CoreLooks(process.stall_timeout_s, process.execute_timeout_s),
            min(APART_S, process.stall_timeout_s / 8),
            waits=self._waits,
            ask=ask,
            computed=lambda: cpu_ticks(core.pid) * ticks_s,
            on_look=lambda found: self._on_look(core, found),
        )

    def _on_look(self, core: Member, found: tuple[float, bool] | None) -> None:
        if found is None or self.failure is not None or self._stopping:
            self._core_stalls = ""
            return
        seconds, over = found
        state = STATES.get(process_state(core.pid), "")
        said = f"no sign of progress for {span(seconds)} while somebody waits"
        self._core_stalls = f"{said}: {core.name} (pid {core.pid}, {state})"
        if not over:
            return
        live = self.live_report(self._core_stalls, HANG_WAIT_S)
        if (folder := self.report_folder) is not None:
            live.write(folder, "hang")
        stacks = next((one.stacks for one in live.processes if one.pid == core.pid), "")
        lines = [f"{said} (--stall-timeout {self.config.process.stall_timeout_s:g})", *live.summary().splitlines()]
        if frames := innermost(stacks):
            lines += ["it stands in:", frames]
        self._note_failure(
            FailureReport(
                role=core.name,
                host=live.host,
                pid=core.pid,
                phase="serving",
                what="hang",
                message="\n".join(lines),
                stacks=live.text(),
                stacks_file=live.file,
                log_file=core.log_file,
            )
        )

    def raise_if_dead(self) -> None:
        """EngineDeadError with the root cause, if the engine is dead or was shut down."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        if self._stopping:
            raise EngineDeadError(self._stop_report())

    def processes(self) -> list[ProcessState]:
        """All processes, this one first."""
        rows = [ProcessState(name=self._role, pid=os.getpid(), phase=self._phase)]
        if self._forkserver is not None:
            rows.append(ProcessState(name="ForkServer", pid=self._forkserver.pid, phase=self._forkserver.phase))
        if self._core is not None:
            rows.append(ProcessState(name=self._core.name, pid=self._core.pid, phase=self._core.phase))
        return rows + [self._workers[rank] for rank in sorted(self._workers)]

    def start_seconds(self) -> dict[str, float]:
        """Seconds of the start by phase, once it is ready. They add up to the whole."""
        return self._marks.seconds()

    def live_report(self, cause: str, wait_s: float = LIVE_WAIT_S) -> LiveReport:
        """What every process is doing. Blocks for up to ``wait_s`` and a second more; any thread."""
        with self._live_lock:
            report = LiveReport(cause=cause, processes=[])
            mine = look_at(self._role, os.getpid(), doing=self._phase)
            report.processes.append(mine)
            server, core, supervisor = self._forkserver, self._core, self._supervisor
            if server is not None and server.pid:
                report.processes.append(look_at("ForkServer", server.pid, doing=server.phase, log_file=server.log_file))
                report.processes[-1].stacks = "(it only forks and reaps; it is not asked)"
            if core is not None and supervisor is not None and core.pid:
                self._look_at_core(report, core, supervisor, wait_s)
            mine.stacks = own_stacks()
            return report

    def _look_at_core(self, report: LiveReport, core: Member, supervisor: Supervisor, wait_s: float) -> None:
        """Its stacks are had of it in any case, also if nothing of it answers any more."""
        process = look_at(core.name, core.pid, doing=core.phase, log_file=core.log_file)
        report.processes.append(process)
        self._live_number += 1
        answer = None
        if core.state is State.READY:
            if process.state in tuple("RSDI"):  # a stopped one would answer later, to nobody
                with contextlib.suppress(ChannelClosedError, TimeoutError):
                    core.send(msgspec.msgpack.encode(LiveRequest(self._live_number)), timeout_s=0.5)
                    answer = self._wait_answer(self._live_number, wait_s)
            if answer is None:
                report.remarks.append(f"{core.name} (pid {core.pid}) does not answer")
        process.stacks = supervisor.stacks([core])[core.key]
        if answer is not None:
            process.doing = answer.doing
            report.remarks += answer.workers.remarks
            report.odd = answer.workers.odd
            report.processes += [one for one in answer.workers.processes if one.pid != core.pid]
            return
        report.processes += [
            look_at(row.name, row.pid, rank=row.rank, doing=row.phase) for _, row in sorted(self._workers.items())
        ]

    def _wait_answer(self, number: int, wait_s: float) -> LiveAnswer | None:
        deadline = time.monotonic() + wait_s
        with self._answered:
            while self._answer is None or self._answer.number != number:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._answered.wait(left)
            return self._answer

    @property
    def report_folder(self) -> Path | None:
        """Where this run's log files are; None before there are any."""
        return Path(self._forkserver.log_file).parent if self._forkserver is not None else None

    def shutdown(self) -> None:
        """End all processes: ladder, then the fork server. Idempotent, bounded; other callers wait for the first."""
        with self._lock:
            first, self._stopping = not self._stopping, True
        if not first:
            self._stopped.wait(30.0)
            return
        try:
            if self._watch is not None:
                self._watch.close()
            self._kept = self._may_keep()
            if self._supervisor is not None:
                self._supervisor.close(force=self.failure is not None)
            if not self._may_go_on() and (spare := self._take_spare()) is not None:
                spare.close()  # before the one that it is a copy of, which reaps it
            if not self._may_go_on() and (memory := self._take_memory()) is not None:
                memory.close()
            if self._forkserver is not None and not self._kept:
                self._forkserver.close()
        finally:
            self._phase = "stopped"
            self._stopped.set()

    def _may_keep(self) -> bool:
        """All of a dead engine is gone but the fork server, which works."""
        if not self._may_go_on():
            return False
        assert self._supervisor is not None
        assert self._forkserver is not None
        self._supervisor.shutdown(force=True)
        return self._forkserver.clear()

    def _may_go_on(self) -> bool:
        """It died, once it was ready or while it took the place of one that was, and others may come in its place."""
        return self._keep and self.failure is not None and (self._again or "ready" in self._marks)

    def _make_spare(self) -> None:
        """If there is none. The lock is held."""
        server = self._forkserver
        if not self._keep or self._spare is not None or server is None:
            return
        server.on_spare_ended = self._on_spare_ended
        self._spare_since = time.monotonic()
        self._spare = server.spare()

    def _on_spare_ended(self, pid: int) -> None:
        """Somebody killed it (the supervisor's thread). It is made again, unless it cannot live."""
        with self._lock:
            spare = self._spare
            if self._stopping or self.failure is not None or spare is None:
                return
            spare.meet(0.0)
            if spare.pid not in (0, pid):
                return  # that was an earlier one
            self._spare = None
            spare.close()
            lived_s = time.monotonic() - self._spare_since
            again = lived_s > LEAST_SPARE_S
            log.warning(
                "the spare fork server (pid %d) has ended after %s%s",
                pid,
                span(lived_s),
                "; another one is made" if again else ": without one, the death of the fork server costs its imports",
            )
            if again:
                self._make_spare()

    def _use_spare(self) -> ForkServer | None:
        """The copy of a fork server that died, if there is one and it works. The lock is held."""
        spare, self._spare = self._spare, None
        if spare is None or spare.meet():
            return spare
        spare.close()
        return None

    def _take_spare(self) -> ForkServer | None:
        with self._lock:
            spare, self._spare = self._spare, None
            return spare

    def _take_forkserver(self) -> ForkServer | None:
        """The one that was kept, if there is one, for its next user."""
        with self._lock:
            kept, self._kept = self._kept, False
            return self._forkserver if kept else None

    def close(self) -> None:
        """:meth:`shutdown`, and the fork server that was kept and the spare are ended too, and the kept memory is given
        back. Idempotent, bounded."""
        self.shutdown()
        if (memory := self._take_memory()) is not None:
            memory.close()
        for server in (self._take_spare(), self._take_forkserver()):
            if server is not None:
                server.close()

    # events: the supervisor's thread

    def _on_event(self, event: MemberEvent) -> None:
        if event.kind is EventKind.MESSAGE:
            self._on_word(self._decode(event.data))
        elif event.kind is EventKind.PHASE:
            phase = event.phase if event.member is not None else f"fork server: {event.phase}"
            self._marks.mark(phase, time.monotonic())
        elif event.kind is EventKind.FAILURE and event.report is not None:
            self._note_failure(event.report)

    def _on_word(self, message: ToFront) -> None:
        match message:
            case ProcessState():
                rank = message.rank or 0
                self._workers[rank] = message
                if message.phase != "ready":  # the engine is, later
                    self._marks.mark_rank(rank, message.phase, time.monotonic())
            case Stalling():
                self._ranks_stall = message.text
            case Beat():
                if self._watch is not None:
                    self._watch.on_beat(message)
            case LiveAnswer():
                with self._answered:
                    self._answer = message
                    self._answered.notify_all()

    def give_up(self, report: FailureReport) -> None:
        """The engine is of no use to its client any more: end it as if it had died of this."""
        self._note_failure(report)

    def _note_failure(self, report: FailureReport) -> None:
        with self._lock:
            if self.failure is not None or self._stopping:
                return
            self.failure = report
        self._phase = "failed"
        self._on_failure(report)
        try:
            threading.Thread(target=self.shutdown, name="drumline-cleanup", daemon=True).start()
        except RuntimeError as error:  # whoever waits for the engine shuts it down
            log.warning("%s: %s", error, remedy(error))

    def _stop_report(self) -> FailureReport:
        return FailureReport(role=self._role, pid=os.getpid(), phase=self._phase, what="was shut down")

    def _stopped_error(self) -> StartupError:
        return StartupError(self._stop_report())


KERNELS = "drumline.model.kernels.ready"
"""Module whose import makes what workers on CPUs run ready."""
OWN_MODULES = ("drumline.engine.main", "drumline.worker.main", "drumline.transport.compiled")
"""What the fork server imports of drumline for any engine."""


def preload_of(config: EngineConfig) -> tuple[str, ...]:
    """What the fork server imports: what workers of this model need, and the engine core."""
    own = config.process.worker_cls != "auto"
    workers = ("torch",) if own else preload_modules(read_spec(config.model.path))
    return (*workers, *OWN_MODULES, *(() if own else _kernels(config.platform)))


def preload_of_any(platform: str = "auto") -> tuple[str, ...]:
    """The part of :func:`preload_of` that is the same for all models with workers of drumline's own."""
    return (*MODULES_OF_ANY, *OWN_MODULES, *_kernels(platform))


def _kernels(platform: str) -> tuple[str, ...]:
    return (KERNELS,) if resolve_platform(platform).device_type == "cpu" else ()


def core_place(config: EngineConfig) -> Place:
    """Where the engine core belongs: near its workers; it may have their CPUs, since it waits while they compute."""
    process, parallel = config.process, config.parallel
    if not process.numa:
        return Place()
    platform = resolve_platform(config.platform)
    alone = Executor.get_class(config).worker_in_process  # else the executor says what is wrong
    places = platform.numa_places(process, platform.device_table(), parallel.local_devices, warn=alone)
    first = device_index(parallel, 0)
    return union(places[first : first + parallel.local_world_size])


def core_threads(config: EngineConfig) -> int:
    """Compute threads of the engine core if the worker lives in it (``uni``). Else 0: it computes nothing, and its
    environment must stay the user's, since the executor reads OMP_NUM_THREADS there for the workers."""
    platform = resolve_platform(config.platform)
    if not Executor.get_class(config).worker_in_process:
        platform.user_threads(os.environ)  # what it refuses is known before anything is started
        return 0
    return platform.threads_per_worker(config.process.threads_per_worker, config.parallel.local_devices, os.environ)
