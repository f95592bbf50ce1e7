"""The one shared-memory segment between an executor and its workers on one machine. The layout is pure arithmetic.

::

    progress of rank 0 | progress of rank 1 | ...      a cache line each, written by that rank
    broadcast ring     executor -> all workers         calls
    answer ring 0      worker 0 -> executor            answers
    answer ring 1 ...

A progress line has eight 64-bit words: the id of the last call that the rank has ended (well or not), how many failures
it has sent over its control connection, the id of the last call that it has begun, and when (CLOCK_MONOTONIC, ns). The
executor reads the first two only after a failure, to find out whether all ranks have ended the call that failed and
whether it has heard of all failures; the others to say what a rank is doing that has not answered. Three more are
beats: how far the loop is with its call, how far the output thread is, how many phases were told. The last one is how
long the worker says that it has been busy (ns). Any change of the line is a heartbeat: it moves before a call, after
it, after its answer is serialised, and with each phase, and rests while the rank waits for a call. Nobody rings for it:
the executor's keeper compares lines while calls are in flight (:mod:`drumline.executor.stalls`).

Large buffers of calls have an arena of their own (:mod:`drumline.transport.arena`), since readers map it read-only and
views of it may outlive the rest. The doorbells lie in memory of their own, 64 bytes each (the executor's may be shared
with other things it waits for).
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic_ns

from drumline.config import ProcessConfig
from drumline.transport.arena import ArenaLayout
from drumline.transport.fence import fence, order
from drumline.transport.ring import LINE, RingLayout

_WORDS = LINE // 8

RETURNED, SERIALISED = 1, 2
"""Stages of a call on a rank: its method has returned; its answer is bytes."""


@dataclass(frozen=True)
class SegmentLayout:
    """Where everything is, in bytes."""

    world_size: int
    calls: RingLayout
    """The broadcast ring."""
    answers: RingLayout
    """Each of the answer rings."""
    arena: ArenaLayout | None = None
    """The arena for large buffers of calls, which is not a part of the segment."""

    @classmethod
    def of(cls, world_size: int, process: ProcessConfig) -> SegmentLayout:
        """Layout for a number of workers on this machine."""
        return cls(
            world_size,
            RingLayout(process.mq_slot_bytes, process.mq_slots, world_size),
            RingLayout(process.mq_answer_slot_bytes, process.mq_answer_slots, 1),
            ArenaLayout(process.mq_arena_bytes, world_size) if process.mq_arena_bytes else None,
        )

    @property
    def progress_bytes(self) -> int:
        """Bytes of all progress lines; they come first."""
        return self.world_size * LINE

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole segment. Memory is taken as it is touched, and never more than this."""
        return self.progress_bytes + self.calls.total_bytes + self.world_size * self.answers.total_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of segment and arena together."""
        return self.total_bytes + (self.arena.total_bytes if self.arena is not None else 0)

    def init(self, buf: memoryview) -> None:
        """Write the control lines of all rings. Done once, before anybody attaches."""
        self.calls.init(self.calls_of(buf))
        for rank in range(self.world_size):
            self.answers.init(self.answers_of(buf, rank))

    def calls_of(self, buf: memoryview) -> memoryview:
        """The broadcast ring's part of the segment."""
        return buf[self.progress_bytes : self.progress_bytes + self.calls.total_bytes]

    def answers_of(self, buf: memoryview, rank: int) -> memoryview:
        """The part of a rank's answer ring."""
        at = self.progress_bytes + self.calls.total_bytes + rank * self.answers.total_bytes
        return buf[at : at + self.answers.total_bytes]

    def progress_of(self, buf: memoryview) -> Progress:
        """The progress words of all ranks."""
        return Progress(buf[: self.progress_bytes])


class Progress:
    """Progress words of all ranks. Each rank writes its own."""

    def __init__(self, buf: memoryview) -> None:
        self._words = buf.cast("Q")
        self._ranks = range(0, len(self._words), _WORDS)

    def begin(self, rank: int, call_id: int) -> None:
        """This rank begins this call. For texts only: in no order with anything else."""
        at = rank * _WORDS
        words = self._words
        words[at + 3] = monotonic_ns()
        words[at + 2] = call_id

    def beat(self, rank: int, call_id: int, stage: int) -> None:
        """The loop has come so far with this call: ``RETURNED``, ``SERIALISED``."""
        self._words[rank * _WORDS + 4] = call_id << 2 | stage

    def beat_output(self, rank: int, call_id: int, stage: int) -> None:
        """The same of the output thread: a word has one writer."""
        self._words[rank * _WORDS + 5] = call_id << 2 | stage

    def beat_phase(self, rank: int) -> None:
        """A phase was told. One thread at a time."""
        self._words[rank * _WORDS + 6] += 1

    def set_busy(self, rank: int, busy_ns: int) -> None:
        """The worker has been busy for so long since it was made, in ns."""
        self._words[rank * _WORDS + 7] = busy_ns

    def busy(self) -> list[int]:
        """For each rank, in ns; 0 where workers do not say."""
        return [self._words[at + 7] for at in self._ranks]

    def end(self, rank: int, call_id: int) -> None:
        """This rank has ended this call, and everything that it had to say about it has been said."""
        order()
        self._words[rank * _WORDS] = call_id

    def count_failure(self, rank: int) -> None:
        """This rank is about to send a failure."""
        self._words[rank * _WORDS + 1] += 1

    def ended(self) -> list[int]:
        """For each rank the last call that it has ended; 0: none yet."""
        ended = [self._words[at] for at in self._ranks]
        fence()
        return ended

    def seen(self) -> list[tuple[int, int, int]]:
        """For each rank: the last call that it has begun (0: none), when (ns), the last that it has ended."""
        words = self._words
        return [(words[at + 2], words[at + 3], words[at]) for at in self._ranks]

    def stage(self, rank: int, call_id: int) -> int:
        """How far a rank is with a call that it has begun and not ended: 0 (running it), RETURNED, SERIALISED."""
        at = rank * _WORDS
        stages = [word & 3 for word in self._words[at + 4 : at + 6] if word >> 2 == call_id]
        return max(stages, default=0)

    def lines(self) -> list[bytes]:
        """Each rank's line: a rank whose line is as it was has shown no sign of life since."""
        words = self._words
        return [words[at : at + _WORDS].tobytes() for at in self._ranks]

    def failures(self) -> list[int]:
        """For each rank the number of failures that it has sent or is about to send."""
        return [self._words[at + 1] for at in self._ranks]

    def close(self) -> None:
        """Let go of the segment."""
        self._words.release()
