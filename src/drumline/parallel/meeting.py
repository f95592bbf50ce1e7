"""Where ranks of one machine wait for each other, in shared memory: the turns of :mod:`drumline.parallel.shm`.

Each rank of a group has a sequence word, which only it writes, a word that says whether it sleeps, and the group has a
gate. To meet is to put the next number into one's own word, and to wait until every other word has come to that number.
Whoever finds all there at once has come last; if somebody sleeps, it puts the number into the gate and wakes all who
sleep there::

    come: my word = number; fence; all there, and somebody sleeps? gate = number, futex(WAKE) on the gate
    wait: while a word is behind number: I sleep = operation; fence; gate; words; futex(WAIT) on the gate; I sleep = 0

What a rank has written before a meeting, every rank sees after it; what a rank has read before it, nobody overwrites
who writes only after it.

**Nobody oversleeps.** Of all who come, the last one (in the order in which memory takes the words in) finds all words
there, since each looks after a fence that is after its own word. Two may both find it so, and both wake all. If it
finds that a rank does not sleep which is about to, that rank says so after this look, so its own look at the words,
which comes after a fence, finds all there. Else it changes the gate, and the kernel lets nobody sleep on a gate that is
not as it was before that look. So a rank sleeps at most once a meeting, one system call wakes all, and there is none if
all have watched: with more ranks than cores, where each wake for nothing is two switches of a core, a meeting of four
takes half of what it takes if each rank wakes all others.

**Waiting.** A wait watches the others' words for a short time (not at all if there are more ranks than cores), then
sleeps in the kernel, which compares the gate under its own lock, so no wake is lost. The sleep is cut every second,
since a signal that comes between Python's last look and the system call is handled only then (its handler may raise,
which ends the wait); then it is also looked whether those waited for are still alive. The deadline is the world's
timeout. Numbers are modulo 2^32 and compared by difference: nobody can be further ahead than two meetings.

A rank that dies while others wait for it ends their wait after a second, unless whoever supervises them was faster;
one that closes its groups ends it at once; one that is stopped or hangs, when the timeout is over. The error says who
is missing.

Rejected: one counter per group that all ranks add to (Python has no atomic add on shared memory); semaphores and
barriers of the C library (a rank that dies inside leaves them broken, and a barrier takes no deadline); watching
without end, as vLLM's collectives for CPUs do; ``sched_yield`` while watching: since Linux 6.18 each call forfeits what
is left of the slice, so a rank that watches beside any busy process (another server, a client) owes it seconds. Two
ranks of a server stood still for 0.67 s in a step of 10 ms of work, with five switches; without yields none did, and
all-reduces cost the same but for small ones of more ranks than cores (4 on 2 cores, 4 KiB: 27 us with, 70 without).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import time
from collections.abc import Sequence
from pathlib import Path

from drumline.errors import ChannelClosedError, CollectiveError, ConfigError
from drumline.parallel.boxes import MARKS, OTHER, Boxes
from drumline.parallel.layout import GroupKind
from drumline.platforms import host
from drumline.transport.doorbell import futex_number
from drumline.transport.fence import fence, order
from drumline.transport.memory import SharedMemory

SPIN_NS = 100_000
"""How long a rank watches the words before it sleeps, if two cores are left for whoever feeds the ranks."""
TIGHT_SPIN_NS = 30_000
"""And if each rank has a core, which it shares with those. Tokens/s of the tiny Llama at TP 2 on 2 cores, one stream:
760 to 940 with 100 us, 610 to 1,010 with 30, 640 to 900 with 10, 530 to 680 with 2."""
CROWDED_SPIN_NS = 0
"""And if not: who watches keeps the core from the one it waits for."""
RECHECK_S = 1.0
"""Longest sleep before a rank looks again, at signals and at whether the one it waits for still lives."""

_MASK = 0xFFFFFFFF
_BEHIND = 0x80000000
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF
_QUIET = frozenset({errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})
_PID, _LEFT, _NAMESPACE, _CROWDED = 0, 1, 2, 3  # words of a member line


WakeArguments = tuple[ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


# Arguments are ctypes objects, most of them made beforehand: half the time of having them converted in each call.
# Waking never blocks, so it keeps the GIL.
_wait_call = ctypes.CDLL(None, use_errno=True).syscall
_wait_call.restype = ctypes.c_long
_wake_call = ctypes.PyDLL(None).syscall
_wake_call.restype = ctypes.c_long


class Members:
    """One rank's mapping of its world's memory, and who else has come.

    ``fd`` stays the caller's, who may close it right after. ConfigError if the memory is of another world.
    """

    def __init__(self, fd: int, ranks: int, rank: int, timeout_s: float) -> None:
        self.boxes = Boxes(ranks)
        self.rank = rank
        self.timeout_s = timeout_s
        self.number = ctypes.c_long(futex_number())
        try:
            self.memory = SharedMemory.attach(fd, self.boxes.total_bytes)
        except ChannelClosedError as error:
            raise ConfigError(f"the memory of the rendezvous is not that of {ranks} ranks: {error}") from None
        anchor = ctypes.c_char.from_buffer(self.memory.mapping())
        self.address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping from closing; the address stays good until then
        self.words = self.memory.buf[: self.boxes.control_bytes].cast("I")
        spare = host.cores() - ranks
        self._is_crowded = spare < 0
        self.spin_ns = CROWDED_SPIN_NS if spare < 0 else SPIN_NS if spare > 1 else TIGHT_SPIN_NS
        self._namespace = Path("/proc/self/ns/pid").stat().st_ino & _MASK
        self._come()

    def _come(self) -> None:
        line = self._line(self.rank)
        if self.words[line + _PID]:
            raise ConfigError("a rendezvous is good for one world only: this rank has been here before")
        self.words[line + _NAMESPACE] = self._namespace
        self.words[line + _CROWDED] = self._is_crowded
        self.words[line + _PID] = os.getpid()

    def leave(self) -> None:
        """Mark this rank as gone; then wake those who wait for it (:meth:`Meeting.wake`)."""
        self.words[self._line(self.rank) + _LEFT] = 1

    def crowded(self, ranks: Sequence[int]) -> bool:
        """Whether one of these ranks, who have all come, has found fewer cores than ranks. All get the same answer."""
        return any(self.words[self._line(rank) + _CROWDED] for rank in ranks)

    def gone(self, rank: int, *, ask: bool) -> str:
        """Why a rank will not come any more; empty if it may. The kernel is asked only if wanted: a system call."""
        line = self._line(rank)
        if self.words[line + _LEFT]:
            return "has left the group"
        pid = self.words[line + _PID]
        if ask and pid and self.words[line + _NAMESPACE] == self._namespace and not _alive(pid):
            return f"(pid {pid}) has died"
        return ""

    def wake_arguments(self, word: int) -> WakeArguments:
        """What :meth:`wake` wants, for whoever sleeps on this word."""
        return self.number, self._address(word), ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_EVERYBODY)

    @staticmethod
    def wake(arguments: WakeArguments) -> None:
        """Wake whoever sleeps on a word."""
        _wake_call(*arguments)

    def sleep(self, at: int, value: int, seconds: float) -> bool:
        """Sleep while a word has this value; True if the time is over. Signals and spurious wakes end it early."""
        whole = int(seconds)
        timeout = _Timespec(whole, int((seconds - whole) * 1e9))
        word, expected = self._address(at), ctypes.c_uint32(value)
        if _wait_call(self.number, word, ctypes.c_int(_FUTEX_WAIT), expected, ctypes.byref(timeout), None, 0) == -1:
            code = ctypes.get_errno()
            if code not in _QUIET:
                raise OSError(code, f"futex wait: {os.strerror(code)}")
            return code == errno.ETIMEDOUT
        return False

    def close(self) -> None:
        """Let go of the memory."""
        self.words.release()
        self.memory.close()

    def _address(self, word: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address + 4 * word)

    def _line(self, rank: int) -> int:
        return self.boxes.member_at(rank) // 4


def _alive(pid: int) -> bool:
    """Whether a process of this PID namespace runs; a zombie does not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # no descriptors left, or a kernel without it: then only the deadline tells
        return True
    try:
        return not select.select([fd], [], [], 0)[0]
    finally:
        os.close(fd)


class Numbers:
    """Numbers the collectives that this rank gives to its device in its group of one kind: for reports, which read them
    from outside (:mod:`drumline.parallel.standing`). Two words are written, a tenth of a microsecond."""

    def __init__(self, members: Members, kind: GroupKind) -> None:
        self._words = members.words
        self._at = members.boxes.device_at(kind, members.rank) // 4

    def __call__(self, mark: int) -> None:
        """One more; ``mark``: which, of ``boxes.MARKS``."""
        words, at = self._words, self._at
        words[at + 1] = mark
        words[at] = (words[at] + 1) & _MASK


class Meeting:
    """Where the ranks of one group meet, as one of them sees it."""

    def __init__(self, members: Members, kind: GroupKind, ranks: Sequence[int], timeout_s: float | None = None) -> None:
        self.name = f"{kind.value} group {tuple(ranks)}"
        self._members = members
        self._timeout_s = members.timeout_s if timeout_s is None else timeout_s
        self._words = members.words
        self._spin_ns = members.spin_ns
        at = {rank: members.boxes.word_at(kind, rank) // 4 for rank in ranks}
        self._own = at.pop(members.rank)
        self._others = tuple(at.values())
        self._ranks = {word: rank for rank, word in at.items()}
        self.number = self._words[self._own]
        self._sleep_marks = tuple(word + 1 for word in self._others)
        self._gate = members.boxes.gate_at(kind, ranks[0]) // 4
        self._wake = members.wake_arguments(self._gate)

    def meet(self, operation: str) -> None:
        """Say that I am here, and wait until all others are. ``operation`` is for the error.

        CollectiveError if a rank is gone or does not come in time; what a signal handler raises.
        """
        self.wait(self.come(), operation)

    def come(self) -> int:
        """Say that I am here. The number of this meeting, for :meth:`wait`."""
        self.number = number = (self.number + 1) & _MASK
        words = self._words
        order()
        words[self._own] = number
        fence()
        for at in self._others:
            if (words[at] - number) & _BEHIND:
                return number
        for at in self._sleep_marks:
            if words[at]:
                self.open_gate(number)
                break
        return number

    def open_gate(self, number: int) -> None:
        """Wake those who sleep: all have come to meeting ``number``."""
        self._words[self._gate] = number
        order()
        _wake_call(*self._wake)

    def words(self) -> tuple[int, tuple[int, ...]]:
        """Numbers of this rank's word and of the others'; each is before its owner's mark."""
        return self._own, self._others

    def wait(self, number: int, operation: str) -> None:
        """Wait until all others have come to a meeting, or further. Errors as :meth:`meet`."""
        words = self._words
        for at in self._others:
            if (words[at] - number) & _BEHIND:
                self._wait(number, operation)
                break
        order()

    def wake(self) -> None:
        """Wake whoever waits for this rank, to look whether it is gone."""
        fence()
        _wake_call(*self._wake)

    def _behind(self, number: int) -> list[int]:
        """Words that have not come to ``number``."""
        words = self._words
        return [at for at in self._others if (words[at] - number) & _BEHIND]

    def _wait(self, number: int, operation: str) -> None:
        """Until all words have come to ``number``."""
        if self._watch(number):
            return
        self._words[self._own + 1] = MARKS.get(operation, OTHER)
        try:
            self._wait_asleep(number, operation)
        finally:
            self._words[self._own + 1] = 0

    def _wait_asleep(self, number: int, operation: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        overslept = False
        while True:
            gone = ""
            for at in self._behind(number):
                gone = gone or self._members.gone(self._ranks[at], ask=overslept)
            fence()  # that this one sleeps is told before it looks; who is gone has told before how far it came
            value = self._words[self._gate]
            order()
            behind = self._behind(number)
            if not behind:
                return
            left = deadline - time.monotonic()
            if gone or left <= 0:
                raise CollectiveError(self._missing(operation, number, behind))
            overslept = self._members.sleep(self._gate, value, min(left, RECHECK_S))

    def _watch(self, number: int) -> bool:
        """Look for a while; whether all have come."""
        words, until = self._words, time.perf_counter_ns() + self._spin_ns
        for at in self._others:
            while (words[at] - number) & _BEHIND:
                if time.perf_counter_ns() > until:
                    return False
        return True

    def _missing(self, operation: str, number: int, behind: Sequence[int]) -> str:
        where = f"{operation} of {self.name} on rank {self._members.rank}"
        for rank in (self._ranks[at] for at in behind):
            if gone := self._members.gone(rank, ask=True):
                return f"{where}: rank {rank} {gone}"
        ranks = ", ".join(str(self._ranks[at]) for at in behind)
        return f"{where}: no sign of rank{'s' * (len(behind) > 1)} {ranks} within {self._timeout_s:g} s"
