"""The ``mp`` backend: one process for each worker, all on this machine.

::

    this process                                         fork server (*)        worker process r
    ------------                                         -----------            ----------------
    ForkServer.spawn x N  ----------------------------->  fork  ------------->  worker.main: start, READY
    caller's thread: collective_rpc
      CallTable.begin, broadcast ring  --- segment ----------------------->     loop: run
      sleeps on the executor's waiter  <-- segment, doorbell --------------     answer ring r
    supervisor thread: on_event        <-- control connection, pidfd ------     CallFailed, death
      CallTable.failed -> grace thread: have all ranks ended the call?
      death -> CallTable.close -> failure thread: kills the rest, calls the failure callbacks

(*) or, with the start methods ``spawn`` and ``fork``, a thread of this process (``processes.own``).

A call for which the broadcast ring has no room waits in the outbox, in order, encoded; whoever next waits for an
answer, or else the keeper, sends it once there is room. So nobody ever waits with a lock held, a call that is not
waited for returns at once, and a deadline or a death ends it in the outbox like anywhere else.

Locks. ``_send_lock`` makes "take the next id" and "write into the ring, or else the outbox" one act. ``CallTable.lock``
may be taken while it is held, never the other way round. Both are held for moments only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.config import EngineConfig, ProcessConfig
from drumline.errors import DrumlineError, FailureReport, MessageTooLargeError, RPCBacklogError
from drumline.executor.base import STEP_METHODS, Executor, Method, WorkerState, method_name
from drumline.executor.calls import CLOSE_WAIT_S, CallTable
from drumline.executor.explain import Doing, current
from drumline.executor.future import Aggregator, Call
from drumline.executor.grace import Grace
from drumline.executor.keeper import KeeperSettings
from drumline.executor.outbox import Outbox
from drumline.executor.stalls import RankFacts, Seen, Stall, StallWatch, odd_ranks
from drumline.parallel.layout import device_index, global_rank, local_rank_of
from drumline.parallel.rendezvous import create_rendezvous
from drumline.parallel.standing import Standings
from drumline.platforms.numa import Place
from drumline.processes import (
    EventKind,
    ForkServer,
    LogConfig,
    Member,
    MemberEvent,
    OwnChildren,
    ProcessSpec,
    State,
    Supervisor,
    fold,
    starting_worker_name,
    without_outer_job,
)
from drumline.processes.linux import cpu_ticks, process_state
from drumline.processes.live import LiveReport, innermost, look_at
from drumline.processes.reports import span
from drumline.processes.start_methods import choose
from drumline.transport import (
    ArenaWriter,
    Part,
    QueueWriter,
    RingReader,
    RingWriter,
    SharedMemory,
    Waiter,
    create_arena,
    deadline_after,
)
from drumline.worker.main import WorkerTask
from drumline.worker.rehearse import rehearse_answer
from drumline.worker.segment import SegmentLayout
from drumline.worker.wire import (
    ALL_RANKS,
    ANSWER_BYTES,
    CallEncoder,
    EncodedCall,
    call_parts,
    decode_failure,
    make_codec,
    read_answer,
)
from drumline.worker.wrapper import DEFAULT_WORKER

log = logging.getLogger(__name__)


class MultiprocExecutor(Executor):
    """One worker process for each rank of this machine."""

    supports_pp = True
    supports_async_scheduling = True
    keeps_memory = True

    def _check(self) -> None:
        super()._check()
        if self.parallel.nnodes > 1:
            self._refuse("several machines (--nnodes > 1) are not built yet: use one")
        if self.world_size > 255:
            self._refuse(f"mp runs at most 255 workers on one machine, the world size is {self.world_size}")

    # Start.

    def _start(self) -> None:
        self.codec = make_codec()
        self._encoder = CallEncoder(self.codec)
        self._table = CallTable(
            self.waiter,
            self._drain,
            self.output_rank,
            self.world_size,
            pump=self._pump,
            look=self._look,
            keeper=KeeperSettings(
                role="executor",
                long_wait_s=self.process.long_wait_s,
                queue=self._queue_text,
                patrol=self._patrol,
                rest=self._rest,
            ),
        )
        self._watch = StallWatch(self.process.stall_timeout_s)
        self._cpu_is_progress = self.platform.device_type == "cpu" and self.parallel.tensor_parallel_size == 1
        self._standings: Standings | None = None
        self._all_ranks = range(self.world_size)
        self._one_rank = tuple((rank,) for rank in self._all_ranks)
        self._send_lock = threading.Lock()
        self._outbox = Outbox(self.process.rpc_backlog_bytes, self.process.mq_largest_bytes)
        self._members: list[Member] = []
        self._suspect = 0
        """Calls with ids below may have lost an answer; 0: none has."""
        self._make_channels()
        self._method = choose(self.process.worker_start_method, numa=self.process.numa)
        maker = self._maker()
        rung_s, term_s = self.process.stop_timeout_s, self.process.terminate_timeout_s
        self._supervisor = Supervisor(maker, on_event=self._on_event, rung_s=rung_s, term_s=term_s)
        self._cleanup.callback(lambda: self._supervisor.close(force=self.is_failed))
        self._cleanup.callback(self._table.close, None, self._ended)
        self._spawn_all(maker)
        self._supervisor.wait_all_ready(self._members, self.process.start_timeout_s)

    def _maker(self) -> ForkServer:
        """Who makes the workers: a fork server (one's own, or that of the engine), or this process itself."""
        given, method = self._forkserver, self._method.method
        if given is not None and method not in ("spawn", "fork"):
            return given
        log_config = given.log if given is not None else None
        if log_config is None:
            log_config = LogConfig.create(self.process.log_level, self.process.log_dir)
        env = without_outer_job(os.environ)
        if method in ("spawn", "fork"):
            maker: ForkServer = OwnChildren(method, log_config, env, trusted=given is not None)
        else:
            preload = preload_of(self.process) if method == "forkserver" else ()
            maker = ForkServer.start(preload, env, log_config, role="Executor")
        self._cleanup.callback(maker.close)
        return maker

    def _make_channels(self) -> None:
        layout = SegmentLayout.of(self.world_size, self.process)
        self._channels = contextlib.ExitStack()
        """Closes what is made here, as far as it was."""
        self._segment = SharedMemory.create(layout.total_bytes, "drumline-executor")
        self._channels.callback(self._segment.close)
        buf = self._segment.buf
        self._progress = layout.progress_of(buf)
        self._channels.callback(self._progress.close)
        self._grace = Grace(
            self._progress,
            self.world_size,
            self.process.failure_grace_s,
            closing=self._closing,
            settle=self._table.settle,
            give_up=self._on_grace_over,
        )
        self._answers: list[RingReader] = []
        self._arena = None
        self._cleanup.callback(self._close_channels)
        if layout.arena is not None:
            self._arena = create_arena("executor-arena", layout.arena.data_bytes, self.world_size)
            self._channels.callback(self._arena.close)
        self._cleanup.callback(lambda: self._table.keeper.join(CLOSE_WAIT_S))
        self._cleanup.callback(self._table.close, None, self._ended)
        self._table.keeper.start()
        layout.init(buf)
        computing = 1 + self.parallel.local_devices
        self.waiter.share_cores(computing)
        self.waiter.rehearse(rehearse_answer(self.codec, self._decode_answer))
        self._worker_waiters, bells = [], []
        for rank in self._all_ranks:
            self._worker_waiters.append(Waiter.create(f"worker-{rank}", computing))
            self._channels.callback(self._worker_waiters[rank].close)
            bells.append(self._worker_waiters[rank].ringer(1))
            self._channels.callback(bells[rank].close)
        names = [f"worker {rank}" for rank in self._all_ranks]
        arena = ArenaWriter(self._arena, names) if self._arena is not None else None
        self._calls = QueueWriter(RingWriter(layout.calls_of(buf), arena=arena), bells)
        self._measured = self.process.mq_largest_bytes < layout.calls.total_bytes + self.process.mq_arena_bytes
        """What fits into ring and arena may be larger than a call may be."""
        self._channels.callback(self._calls.close)
        self._answers = [RingReader(layout.answers_of(buf, rank), 0, bells[rank].ring) for rank in self._all_ranks]
        for reader in self._answers:
            self._channels.callback(reader.close)
            reader.on_due = self.waiter.expect

    def _spawn_all(self, maker: ForkServer) -> None:
        """All workers are asked for before any is waited for: their start has collectives in it."""
        config = portable(self.config)
        one_machine = self.parallel.nnodes == 1
        environment: dict[str, str | None] = {
            **without_outer_job(os.environ),
            **self._method.env,
            **self.platform.worker_environment(os.environ, one_machine=one_machine),
        }
        threads = self.platform.threads_per_worker(
            self.process.threads_per_worker, self.parallel.local_devices, os.environ
        )
        places = self._places(threads)
        rendezvous = create_rendezvous(self.world_size, tcp=self.platform.needs_tcp_store)
        arena_fds = (self._arena.fd,) if self._arena is not None else ()
        try:
            self._standings = Standings(rendezvous.memory, self.layout)
            self._channels.callback(self._standings.close)
            for rank in self._all_ranks:
                local_rank = local_rank_of(self.parallel, rank)
                device = self._device_text(local_rank)
                kept_fds = self._kept_fds[local_rank] if self._kept_fds else ()
                task = WorkerTask(
                    config=config,
                    rank=rank,
                    local_rank=local_rank,
                    device=device,
                    owner_pid=os.getpid(),
                    kept=len(kept_fds),
                )
                spec = ProcessSpec(
                    role=starting_worker_name(global_rank(self.parallel, rank)),
                    target="drumline.worker.main:main",
                    payload=pickle.dumps(task, protocol=5),
                    rank=rank,
                    env=environment,
                    threads=threads,
                    cpus=places[local_rank].cpus,
                    numa_node=places[local_rank].node,
                    fresh=self._method.method == "plain",
                    fds=(
                        self._segment.fd,
                        self.waiter.fd,
                        self._worker_waiters[rank].fd,
                        *arena_fds,
                        *kept_fds,
                        *rendezvous.fds,
                    ),
                )
                member = maker.spawn(spec)
                self._members.append(member)
                self._supervisor.add(member)
                if not self.platform.starts_concurrently:
                    self._supervisor.wait_alive(member, self.process.start_timeout_s)
        finally:
            rendezvous.close()

    def _places(self, threads: int) -> list[Place]:
        """Where each worker of this executor belongs, by local rank."""
        first, workers = device_index(self.parallel, 0), self.parallel.local_devices
        if self.process.numa:
            places = self.platform.numa_places(self.process, self.devices, workers)
            return places[first : first + self.parallel.local_world_size]
        own = range(first, first + self.parallel.local_world_size)
        if not self.process.cpu_bind:
            return [Place() for _ in own]
        return [Place(cpus=self.platform.cpus_of_worker(index, workers, threads)) for index in own]

    def workers(self) -> list[WorkerState]:
        """All workers in rank order."""
        over = self._stopped.is_set()
        states = [(state_of(member), over or member.state is State.GONE) for member in self._members]
        return [replace(state, phase="ended") if ended else state for state, ended in states]

    # Calls.

    def collective_rpc(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        reply_rank: int | None = None,
        non_block: bool = False,
        *,
        rank_args: Sequence[Sequence[Any]] | None = None,
        aggregators: Sequence[Aggregator] = (),
        expected_s: float = 0.0,
    ) -> Any:
        """See :meth:`Executor.collective_rpc`."""
        if self._failure is not None or self._stopping:
            self._raise_if_failed()
        table = self._table
        if table._aggregator_thread is not None:
            table.refuse_aggregator()
        reply_rank = self._check_call(reply_rank, args, kwargs, rank_args, aggregators, expected_s)
        if non_block and self._outbox.past_limit(table.held):
            self._refuse_backlog(method)
        deadline = None if timeout is None else deadline_after(timeout)
        message = self._encoder.encode(method, args, kwargs, rank_args)
        if reply_rank is None or aggregators:
            ranks: Sequence[int] = self._all_ranks
            replying = ALL_RANKS
        else:
            ranks = self._one_rank[reply_rank]
            replying = reply_rank
        with self._send_lock:
            call, call_id, written = None, table.next_id, self._calls.written
            try:
                call = table.begin(
                    method if isinstance(method, str) else method_name(method),
                    ranks,
                    single=reply_rank is not None or bool(aggregators),
                    deadline=deadline,
                    aggregators=aggregators,
                    expected_s=expected_s,
                    waits=not non_block,
                )
                if expected_s or (timeout is not None and timeout > self._watch.limit_s):
                    self._be_patient(call.id, call.method, timeout, expected_s)
                self._send(call, message, replying, copy=non_block)
            except BaseException as exc:
                self._take_back(call, call_id, written, exc)
                raise
        return call if non_block else call.result()

    def _send(self, call: Call, encoded: EncodedCall, replying: int, *, copy: bool) -> None:
        """Into the ring, or into the outbox (``copy``: the caller may change the buffers). ``_send_lock`` is held."""
        parts, buffers = call_parts(encoded, call.id, replying), encoded[-1]
        if self._measured:
            self._outbox.check(parts, buffers)
        if not self._outbox and self._sent_in_one_piece(parts, buffers):
            return
        call.sent = False
        self._outbox.put(call, parts, buffers, copy=copy)
        self._table.unsent = len(self._outbox)
        self._table.keeper.wake()

    def _take_back(self, call: Call | None, call_id: int, written: int, error: BaseException) -> None:
        """``collective_rpc`` raises instead of sending. A signal handler may raise anywhere, so also after the call was
        written: then it is run and answered, and only its future has ended. ``_send_lock`` is held.

        ``written``: slots of the ring that were, before.
        """
        if call is None:
            self._table.forget(call_id, error)
        elif self._calls.written != written:
            self._table.abandon(call, error)
        elif self._outbox.has(call):  # it has ended, so it is dropped there when its turn comes
            self._table.abandon(call, error)
            self._table.unsent = len(self._outbox)
            self._table.keeper.wake()
        else:
            self._table.withdraw(call, error)

    def _sent_in_one_piece(self, parts: Sequence[Part], buffers: Sequence[Part]) -> bool:
        try:
            return self._calls.try_write(parts, 0, buffers)
        except MessageTooLargeError:
            return False

    def _pump(self) -> None:
        """Send what waits for room, as far as there is some."""
        now = time.monotonic()
        with self._send_lock:
            if self._stopping or self._failure is not None:
                self._outbox.clear()
            while self._outbox and self._pump_one(now):
                pass
            self._table.unsent = len(self._outbox)

    def _pump_one(self, now: float) -> bool:
        """Send the oldest call of the outbox, or drop it if it has ended. False if there is no room."""
        unsent = self._outbox.first()
        call = unsent.call
        if call.deadline is not None and call.deadline <= now:
            self._table.expire(now, call)
        if not call.done_already:
            if not unsent.go_on(self._calls, self.process.mq_arena_bytes, now):
                return False
            call.sent = True
        self._outbox.drop_first()
        if not call.sent:
            self._table.withdraw(call, None)
        return True

    def _refuse_backlog(self, method: Method) -> None:
        held = self._table.recount()
        if self._outbox.past_limit(held):
            raise RPCBacklogError(
                f"RPC call to {method_name(method)} refused: {len(self._outbox)} calls wait for room "
                f"({self._outbox.bytes} bytes) and answers that nobody has taken hold {held} bytes, together more than "
                f"rpc_backlog_bytes ({self._outbox.limit}). Take results or let go of their futures, or raise "
                "--rpc-backlog-bytes"
            )

    # What workers are doing, for texts.

    def _look(self, ranks: Iterable[int]) -> Sequence[Doing]:
        seen = self._progress.seen()
        doings = []
        for rank in ranks:
            member = self._members[rank]
            call_id, since_ns, ended = seen[rank]
            doings.append(
                Doing(
                    rank=rank,
                    name=member.name,
                    pid=member.pid,
                    state=process_state(member.pid),
                    call_id=call_id,
                    since=since_ns / 1e9 if call_id > ended else None,
                )
            )
        return doings

    # The watchdog: the keeper's thread, while calls are in flight.

    def _patrol(self, now: float) -> None:
        stall = self._watch.look(self._seen(), self._table.last_sent(), self._patience, now)
        if stall is None:
            self._tell_stall("")
        elif not stall.over:
            self._tell_stall(self._stall_text(stall))
        elif self._failure is None and not self._stopping:
            self._on_stall(stall, now)

    def _rest(self) -> None:
        self._watch.rest()
        self._tell_stall("")

    def _seen(self) -> list[Seen]:
        seen, lines = self._progress.seen(), self._progress.lines()
        return [Seen(begun, ended, self._sign(rank, begun, lines[rank])) for rank, (begun, _, ended) in enumerate(seen)]

    def _sign(self, rank: int, begun: int, line: bytes) -> tuple[bytes, bytes, int]:
        """Changes when a rank does anything. Where no collective moves within a step on CPUs, the time that it computes
        counts: up to the step's deadline."""
        words = self._standings.words(rank) if self._standings is not None else b""
        computes = self._cpu_is_progress and self._table.name_of(begun) in STEP_METHODS
        return line, words, cpu_ticks(self._members[rank].pid) if computes else 0

    def _stall_text(self, stall: Stall) -> str:
        doings = self._look(stall.ranks)
        now = time.monotonic()
        ranks = "; ".join(f"{doing.who()}: {current(doing, self._table.name_of, now)}" for doing in doings)
        return f"no progress for {span(stall.seconds)} with work outstanding: {ranks}"

    def _on_stall(self, stall: Stall, now: float) -> None:
        """Ranks hang. All is written down before anything is killed; who has gone on meanwhile did not hang."""
        before = {rank: seen.sign for rank, seen in enumerate(self._seen()) if rank in stall.ranks}
        live = self._live_report(self._stall_text(stall), stalled=True)
        file = live.write(Path(self.report_folder or Path(self._members[0].log_file).parent), "hang")
        after = self._seen()
        # Without the time that it computes, which writing the stacks took too.
        if any(after[rank].sign[:2] != sign[:2] for rank, sign in before.items()):
            log.warning("%s; it goes on now. Stacks of that moment: %s", live.cause, file or "(not written)")
            self._watch.rest()
            return
        self._fail(self._hang_report(stall, live))

    def _hang_report(self, stall: Stall, live: LiveReport) -> FailureReport:
        rank = live.odd[0] if live.odd else stall.ranks[0]
        member, process = self._members[rank], live.processes[rank]
        oldest = self._table.oldest()
        phase = self._table.name_of(oldest[0]) if oldest is not None else ""
        lines = [f"no progress for {span(stall.seconds)} with work outstanding ({self._stall_limit(phase)})"]
        lines += live.summary().splitlines()
        if frames := innermost(process.stacks):
            lines += [f"rank {rank} stands in:", frames]
        return FailureReport(
            role=member.name,
            rank=rank,
            host=live.host,
            pid=member.pid,
            phase=phase,
            what="hang",
            message="\n".join(lines),
            stacks=live.text(),
            stacks_file=live.file,
            log_file=member.log_file,
        )

    def live_report(self, cause: str = "asked for") -> LiveReport:
        """See :meth:`Executor.live_report`. Of ranks that go on, the one that others wait for is another one each
        moment: nobody is called odd, unless a process is stopped or gone."""
        if self._forked:
            raise self._ended()
        try:
            return self._live_report(cause, stalled=bool(self._stall))
        except ValueError:  # the memory shared with the workers was let go of
            if not self._stopping:
                raise
            raise self._ended() from None

    def _live_report(self, cause: str, *, stalled: bool) -> LiveReport:
        members = self._members
        now = time.monotonic()
        doings = self._look(self._all_ranks)  # before the stacks, which take their time
        standings = self._standings.read() if self._standings is not None else []
        seen = self._seen()
        processes = []
        for rank, (member, doing) in enumerate(zip(members, doings, strict=True)):
            process = look_at(member.name, member.pid, rank=rank, log_file=member.log_file)
            process.doing = self._doing_text(member, doing, now)
            process.collectives = [one.text() for one in standings if one.rank == rank]
            if seen[rank].begun > seen[rank].ended:
                process.heartbeat_s = self._watch.quiet_s(rank, now)
            processes.append(process)
        facts = [
            RankFacts(
                rank=rank,
                state=processes[rank].state,
                begun=seen[rank].begun,
                ended=seen[rank].ended,
                waits_for=tuple(other for one in standings if one.rank == rank for other in one.waits_for),
                waits_in=next((one.text() for one in standings if one.rank == rank and one.waits_for), ""),
            )
            for rank in self._all_ranks
        ]
        stacks = self._supervisor.stacks(members)
        for member, process in zip(members, processes, strict=True):
            process.stacks = stacks[member.key]
        odd = odd_ranks(facts if stalled else [one for one in facts if one.state in ("", "T")])
        return LiveReport(
            cause=cause,
            processes=processes,
            odd=[rank for rank, _ in odd],
            remarks=[f"rank {rank} ({members[rank].name}, pid {members[rank].pid}) {why}" for rank, why in odd],
        )

    def _doing_text(self, member: Member, doing: Doing, now: float) -> str:
        if member.state is not State.READY:
            return member.phase
        stage = self._progress.stage(doing.rank, doing.call_id) if doing.since is not None else 0
        stages = ("", ", its method has returned", ", its answer is serialised")
        return current(doing, self._table.name_of, now) + stages[stage]

    def _queue_text(self) -> str:
        """Who keeps calls from being sent."""
        waiting = self._table.unsent
        if not waiting:
            return ""
        with self._send_lock:
            backlog = self._calls.backlog()
        slots = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(backlog))
        return f" {waiting} calls wait for room in the broadcast queue; slots not read yet: {slots}."

    def _drain(self) -> None:
        """Take all answers that have arrived. The table's lock is held."""
        owing = self._table.owing
        try:
            if self._suspect:
                self._find_lost()
            for rank, reader in enumerate(self._answers):
                while owing[rank]:
                    found = reader.receive(self._decode_answer)
                    if found is None:
                        break
                    call_id, size, value, error = found[0]
                    if error is None:
                        self._table.answer(rank, call_id, value, size)
                    else:
                        self._table.unreadable(rank, call_id, error)
        except BaseException:  # of a signal handler: an answer may be out of its ring and not in the table
            self._suspect = self._table.next_id
            raise

    def _find_lost(self) -> None:
        """After :meth:`_drain` was interrupted: end calls whose answers were lost, or all later ones would wait for
        them. An answer is lost if its rank has ended the call, its ring is empty and no failure is on its way."""
        suspect, self._suspect = self._suspect, 0
        ended = self._progress.ended()
        all_heard = self._grace.has_heard_all()
        self._drain()
        if not self._table.end_lost(suspect, ended if all_heard else [0] * self.world_size):
            self._suspect = max(self._suspect, suspect)

    def _decode_answer(
        self, _: int, data: memoryview, buffers: Sequence[memoryview]
    ) -> tuple[int, int, Any, Exception | None]:
        """Which call an answer belongs to, how many bytes it has, its value, or why that cannot be made."""
        call_id, kind = read_answer(data)
        size = len(data)
        for buffer in buffers:
            size += len(buffer)
        try:
            return call_id, size, self.codec.decode(kind, data[ANSWER_BYTES:], buffers), None
        except Exception as exc:  # noqa: BLE001  a class that only the worker has, say: the caller's to see
            return call_id, size, None, exc

    # News from the workers: the supervisor's thread.

    def _on_event(self, event: MemberEvent) -> None:
        member = event.member
        if event.kind is EventKind.MESSAGE and member is not None and member.rank is not None:
            self._on_call_failed(member.rank, event.data)
        elif event.kind is EventKind.FAILURE and event.report is not None:
            self._on_death(event.report)
        elif event.kind in (EventKind.PHASE, EventKind.READY) and member is not None:
            self._on_phase(state_of(member))

    def _on_death(self, report: FailureReport) -> None:
        """Something died for good. Exceptions that ranks told of just before may be its cause."""
        running, failures = self._table.in_flight()
        if report.phase == "ready":
            report.phase = running or "waiting for a call"
        self._fail(fold([report, *failures]))

    def _on_call_failed(self, rank: int, data: bytes) -> None:
        failure = decode_failure(data)
        carrier = self._table.failed(failure.call_id, failure.report, rank if failure.owed else None)
        self._grace.failed(rank, failure.call_id, failure.report, carrier)

    def _on_grace_over(self, report: FailureReport, late: Sequence[int]) -> None:
        _, failures = self._table.in_flight()
        report = fold([report, *failures])
        ranks = ", ".join(map(str, late))
        grace = self.process.failure_grace_s
        self._fail(report, f"Ranks that did not end the call within {grace:g} s of its failure: {ranks}.")

    def busy_ns(self) -> list[int]:
        """Read from shared memory; empty after the shutdown."""
        try:
            return self._progress.busy()
        except ValueError:  # it was let go of
            return []

    # Failure and end.

    def _after_fork(self) -> None:
        super()._after_fork()
        if "_table" in self.__dict__:  # else the fork was in the middle of the start
            self._table.after_fork(self._ended)

    def _close_calls(self, report: FailureReport | None, error: Callable[[], DrumlineError]) -> None:
        self._table.close(report, error)

    def _kill(self) -> None:
        self._supervisor.request_stop(self._members, force=True)

    def _close_channels(self) -> None:
        """Let go of the segment, once no other thread is inside. All calls have ended, so none stays there for long."""
        self._grace.join()
        locks = (self._send_lock, self._table.lock)
        held = [lock for lock in locks if lock.acquire(timeout=CLOSE_WAIT_S)]
        if len(held) < len(locks):
            log.error("an aggregator does not return; memory shared with the workers stays until it does")
            for lock in held:
                lock.release()
            threading.Thread(target=self._release_channels, name="drumline-release", daemon=True).start()
            return
        for lock in reversed(held):
            lock.release()
        self._release_channels()

    def _release_channels(self) -> None:
        with self._send_lock, self._table.lock:
            self._outbox.clear()
            self._answers = []
            self._channels.close()


def preload_of(process: ProcessConfig) -> tuple[str, ...]:
    """What a fork server of our own imports before it forks."""
    model = (DEFAULT_WORKER.partition(":")[0],) if process.worker_cls == "auto" else ()
    return ("drumline.worker.main", "drumline.transport.compiled", *(process.preload or model))


def portable(config: EngineConfig) -> EngineConfig:
    """The configuration as workers get it: an executor class that only this process may have goes by its name."""
    backend = config.parallel.distributed_executor_backend
    if backend is None or isinstance(backend, str):
        return config
    name = f"{backend.__module__}:{backend.__qualname__}"
    return replace(config, parallel=replace(config.parallel, distributed_executor_backend=name))


def state_of(member: Member) -> WorkerState:
    """A member as the process table shows it."""
    return WorkerState(rank=member.rank or 0, name=member.name, pid=member.pid, phase=member.phase)
