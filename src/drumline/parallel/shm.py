"""Collectives through shared memory, for ranks of one machine whose tensors are on the CPU.

gloo is made for networks: an all-reduce of one hidden state takes it 0.6 to 3.6 ms here, it listens on a port without
authentication, and a thread of it looks around a hundred times a second for ever. Ranks that share memory need none of
it. The memory is a memfd that whoever starts the ranks has made (:mod:`drumline.parallel.rendezvous`); what lies where
in it: :mod:`drumline.parallel.boxes`. Each rank maps it once (:class:`World`).

**A turn.** Each rank of a group has a sequence word, which only it writes, and two slots. All operations are made of
turns; turn k uses slot k % 2 of everybody::

    copy what I show into my slot
    meet:  fence; my word = next number; futex(WAKE) on my word
           until every other word has come to that number: futex(WAIT) on it; fence
    read the others' slots

**Why one meeting a turn is enough.** Let rank a write its slot in turn k while rank b is still reading it. b reads
a's slot of that parity in turn k-2 at the latest. But a is in turn k, so it has left the meeting of turn k-1, so b has
entered it, and what b read in turn k-2 it read before that (its fence at the start of a meeting keeps it so). With one
slot a would be stopped by nothing: after the meeting of turn k-1 it may begin turn k at once, with b still reading.
A turn may have more than one meeting (the two-shot below); the argument holds for the first of each.

**Everybody gets the same bits.** The sum is ((x0 + x1) + x2) + ..., in rank order, whoever computes it; 16-bit types
are summed in float32 and rounded once. So the result depends neither on the rank nor on the size of the tensor, and
the choice of tokens rests on it. *One-shot*, for small tensors and for two ranks: each rank computes the whole sum
from all slots, one meeting. *Two-shot*: each computes its share of the elements from all slots into its own slot,
second meeting, each copies all shares; reads 2 tensors' worth of memory where one-shot reads as many as there are
ranks. Nobody but its owner reads a share's place in the owner's slot before the second meeting.

**Waiting.** A wait watches the other's word for a short time if there are enough cores for all ranks, then sleeps in
the kernel, which compares the word under its own lock, so no wake is lost. The sleep is cut every second, since a
signal that comes between Python's last look and the system call is handled only then (its handler may raise, which
ends the wait); then it is also looked whether the one waited for is still alive. The deadline is the group's timeout.
Numbers are modulo 2^32 and compared by difference: nobody can be further ahead than one turn.

A rank that dies while others wait for it ends their wait by itself after a second (or by whoever supervises them,
earlier), one that closes its groups ends it at once, one that is stopped or hangs when the timeout is over. The error
says who is missing.

Rejected: one counter per group that all ranks add to (Python has no atomic add on shared memory); POSIX semaphores
and barriers of the C library (a rank that dies inside leaves them broken, and no deadline on a barrier); a pointer to
each other's tensors by process_vm_readv (a system call per peer, as dear as the meeting); vLLM's kernels for it (a
compiler at install time, spinning without end).

One thread at a time may use a group. A forked child must not go on with its parent's.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import pickle
import select
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drumline.errors import ChannelClosedError, CollectiveError, ConfigError
from drumline.parallel.boxes import SLOT_BYTES, Boxes
from drumline.parallel.layout import GroupKind
from drumline.platforms import host
from drumline.transport.doorbell import futex_number
from drumline.transport.fence import fence
from drumline.transport.memory import SharedMemory

ONE_SHOT_BYTES = 64 << 10
"""With three ranks and more, tensors up to this size are summed by every rank, larger ones by shares. Two ranks gain
nothing by shares at any size: each reads the other's tensor once, one way or the other."""
SPIN_NS = 100_000
"""How long a rank watches a word before it sleeps, if each rank has a core of its own."""
RECHECK_S = 1.0
"""Longest sleep before a rank looks again, at signals and at whether the one it waits for still lives."""

_MASK = 0xFFFFFFFF
_BEHIND = 0x80000000
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF
_QUIET = frozenset({errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})
_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_HALVES = (torch.bfloat16, torch.float16)
_PLANS = 1024
"""Number of shapes of which views are kept."""
_LENGTH = struct.Struct("Q")
_PID, _LEFT, _NAMESPACE = 0, 1, 2  # words of a member line


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


# Arguments are ctypes objects made beforehand: half the time of converting them in each call. Waking never blocks, so
# it keeps the GIL.
_wait_call = ctypes.CDLL(None, use_errno=True).syscall
_wait_call.restype = ctypes.c_long
_wake_call = ctypes.PyDLL(None).syscall
_wake_call.restype = ctypes.c_long


class World:
    """One rank's mapping of its world's memory, and what the groups in it share.

    ``fd`` stays the caller's, who may close it right after. ConfigError if the memory is of another world.
    """

    def __init__(self, fd: int, ranks: int, rank: int, timeout_s: float) -> None:
        self.boxes = Boxes(ranks)
        self.rank = rank
        self.timeout_s = timeout_s
        try:
            self._memory = SharedMemory.attach(fd, self.boxes.total_bytes)
        except ChannelClosedError as error:
            raise ConfigError(f"the memory of the rendezvous is not that of {ranks} ranks: {error}") from None
        self.buf = self._memory.buf
        self.words = self.buf[: self.boxes.slot_at(next(iter(GroupKind)), 0, 0)].cast("I")
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(self._memory.mapping(), dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self.spin_ns = SPIN_NS if host.cores() >= ranks else 0
        self.number = ctypes.c_long(futex_number())
        self._groups: list[ShmGroup] = []
        self._closed = False
        self._namespace = Path("/proc/self/ns/pid").stat().st_ino & _MASK
        self._enter()

    def _enter(self) -> None:
        line = self.boxes.member_at(self.rank) // 4
        if self.words[line + _PID]:
            raise ConfigError("a rendezvous is good for one world only: this rank has been here before")
        self.words[line + _NAMESPACE] = self._namespace
        self.words[line + _PID] = os.getpid()

    def group(self, kind: GroupKind, ranks: Sequence[int]) -> ShmGroup:
        """This rank's side of its group of this kind."""
        group = ShmGroup(self, kind, ranks)
        self._groups.append(group)
        return group

    def gone(self, rank: int, *, look: bool) -> str:
        """Why a rank will not come any more; empty if it may. With ``look`` the kernel is asked."""
        line = self.boxes.member_at(rank) // 4
        if self.words[line + _LEFT]:
            return "has left the group"
        pid = self.words[line + _PID]
        if look and pid and self.words[line + _NAMESPACE] == self._namespace and not _alive(pid):
            return f"(pid {pid}) has died"
        return ""

    def close(self) -> None:
        """Tell the others, and let go of the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.words[self.boxes.member_at(self.rank) // 4 + _LEFT] = 1
        fence()
        for group in self._groups:
            group.close()
        self._groups.clear()
        self.words.release()
        del self.bytes
        self._memory.close()


def _alive(pid: int) -> bool:
    """Whether a process of this PID namespace runs; a zombie does not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # no descriptors left, or not allowed: then only the deadline tells
        return True
    try:
        return not select.select([fd], [], [], 0)[0]
    finally:
        os.close(fd)


class _Views(NamedTuple):
    """The members' slots of one parity, seen as tensors of one shape."""

    own: torch.Tensor
    all: list[torch.Tensor]
    first: torch.Tensor
    second: torch.Tensor
    rest: list[torch.Tensor]
    scratch: torch.Tensor | None
    """float32, for sums of more than two 16-bit tensors."""


class _Shares(NamedTuple):
    """The members' slots of one parity, for a two-shot of a one-dimensional tensor."""

    sizes: list[int]
    own: torch.Tensor
    """This rank's whole slot."""
    column: _Views
    """This rank's share, in everybody's slot."""
    results: list[torch.Tensor]
    """Each member's share, in its own slot."""


class ShmGroup:
    """The ranks of one group, as one of them sees it. What the operations do: ``GroupCoordinator``."""

    def __init__(self, world: World, kind: GroupKind, ranks: Sequence[int]) -> None:
        self._world = world
        self._name = f"{kind.value} group {tuple(ranks)}"
        self._ranks = tuple(ranks)
        self._rank = world.rank
        self._place = self._ranks.index(world.rank)
        self._size = len(self._ranks)
        boxes, words = world.boxes, world.words
        word_at = [boxes.word_at(kind, rank) for rank in ranks]
        slot_at = [[boxes.slot_at(kind, rank, parity) for rank in ranks] for parity in (0, 1)]
        self._words = words
        self._own = word_at[self._place] // 4
        self._others = [at // 4 for place, at in enumerate(word_at) if place != self._place]
        own_word = ctypes.c_void_p(world.address + 4 * self._own)
        self._wake = (world.number, own_word, ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_EVERYBODY))
        self._spin_ns = world.spin_ns
        self._one_shot_bytes = SLOT_BYTES if self._size == 2 else ONE_SHOT_BYTES
        self._reduce_piece = self._one_shot if self._size == 2 else self._two_shot
        self._sequence = words[self._own]
        self._turn = 0
        self._slots = [[world.bytes[at : at + SLOT_BYTES] for at in row] for row in slot_at]
        self._buffers = [[world.buf[at : at + SLOT_BYTES] for at in row] for row in slot_at]
        self._views: dict[Any, tuple[_Views, _Views] | None] = {}
        self._shares: dict[Any, tuple[_Shares, _Shares]] = {}
        self._scratch: torch.Tensor | None = None

    # Operations.

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce in place."""
        if tensor.requires_grad:
            tensor = tensor.detach()
        function = _reduction(op)
        views = self._views_of(tensor.shape, tensor.dtype)
        if views is None:
            self._reduce_large(tensor, function)
            return
        self._turn = turn = self._turn ^ 1
        mine = views[turn]
        mine.own.copy_(tensor)
        self._meet("all_reduce")
        _reduce(function, mine, tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """All tensors along ``dim``, in new memory."""
        key = (tensor.shape, tensor.dtype, dim, *sizes)
        views = self._cached(key, lambda: self._uneven(tensor, dim, sizes))
        if views is None:
            return torch.cat(self._gather_large(tensor, dim, sizes), dim)
        self._turn = turn = self._turn ^ 1
        views[turn].own.copy_(tensor.detach())
        self._meet("all_gather")
        return torch.cat(views[turn].all, dim)

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather equal tensors into ``output`` [size, ...]."""
        flat, rows = tensor.detach().reshape(-1), output.view(self._size, -1)
        for start, stop in _pieces(flat.numel(), flat.element_size()):
            self._turn = turn = self._turn ^ 1
            views = self._of(flat[start:stop])[turn]
            views.own.copy_(flat[start:stop])
            self._meet("all_gather")
            torch.stack(views.all, out=rows[:, start:stop])

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Member ``src``'s values, in place."""
        tensor = tensor.detach()
        flat = tensor.reshape(-1)
        for start, stop in _pieces(flat.numel(), flat.element_size()):
            self._turn = turn = self._turn ^ 1
            piece = flat[start:stop]
            views = self._of(piece)[turn]
            if src == self._place:
                views.own.copy_(piece)
            self._meet("broadcast")
            if src != self._place:
                piece.copy_(views.all[src])
        if src != self._place and not tensor.is_contiguous():
            tensor.copy_(flat.view_as(tensor))

    def barrier(self) -> None:
        """Wait for all."""
        self._turn ^= 1
        self._meet("barrier")

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Member ``src``'s object, pickled."""
        data = self._exchange("broadcast_object", pickle.dumps(value, protocol=5) if src == self._place else b"")[src]
        return value if src == self._place else pickle.loads(data)

    def all_gather_object(self, value: Any) -> list[Any]:
        """All objects, pickled."""
        return [pickle.loads(data) for data in self._exchange("all_gather_object", pickle.dumps(value, protocol=5))]

    def close(self) -> None:
        """Wake whoever waits for this rank, who has been marked as gone, and drop all views of the memory."""
        if not self._slots:
            return
        _wake_call(*self._wake)
        self._slots = []
        self._views.clear()
        self._shares.clear()
        for row in self._buffers:
            for buffer in row:
                buffer.release()

    # Meeting.

    def _meet(self, operation: str) -> None:
        """Tell the others that I am here, and wait until they are."""
        self._sequence = target = (self._sequence + 1) & _MASK
        words = self._words
        fence()
        words[self._own] = target
        _wake_call(*self._wake)
        for at in self._others:
            if (words[at] - target) & _BEHIND:
                self._wait(at, target, operation)
        fence()

    def _wait(self, at: int, target: int, operation: str) -> None:
        """Until word ``at`` has come to ``target``."""
        words = self._words
        if self._spin_ns:
            until = time.perf_counter_ns() + self._spin_ns
            while time.perf_counter_ns() < until:
                os.sched_yield()  # the one waited for may have no core but this one
                if not (words[at] - target) & _BEHIND:
                    return
        rank = self._rank_of(at)
        deadline = time.monotonic() + self._world.timeout_s
        look = False
        while True:
            gone = self._world.gone(rank, look=look)
            fence()  # whoever is gone has told before how far it came
            value = words[at]
            if not (value - target) & _BEHIND:
                return
            left = deadline - time.monotonic()
            if gone or left <= 0:
                raise CollectiveError(self._missing(operation, target, rank, gone))
            look = not self._sleep(at, value, min(left, RECHECK_S))

    def _sleep(self, at: int, value: int, seconds: float) -> bool:
        """Sleep while a word has this value; False if the time is over. EINTR and spurious wakes: True."""
        whole = int(seconds)
        timeout = _Timespec(whole, int((seconds - whole) * 1e9))
        word = ctypes.c_void_p(self._world.address + 4 * at)
        number = self._world.number
        if _wait_call(number, word, _FUTEX_WAIT, ctypes.c_uint32(value), ctypes.byref(timeout), None, 0) == -1:
            code = ctypes.get_errno()
            if code not in _QUIET:
                raise OSError(code, f"futex wait: {os.strerror(code)}")
            return code != errno.ETIMEDOUT
        return True

    def _rank_of(self, at: int) -> int:
        return [rank for rank in self._ranks if rank != self._rank][self._others.index(at)]

    def _missing(self, operation: str, target: int, rank: int, gone: str) -> str:
        where = f"{operation} of {self._name} on rank {self._rank}"
        if gone:
            return f"{where}: rank {rank} {gone}"
        behind = [self._rank_of(at) for at in self._others if (self._words[at] - target) & _BEHIND]
        ranks = ", ".join(map(str, behind))
        return f"{where}: no sign of rank{'s' * (len(behind) > 1)} {ranks} within {self._world.timeout_s:g} s"

    # Views.

    def _cached(self, key: Any, make: Callable[[], tuple[_Views, _Views] | None]) -> tuple[_Views, _Views] | None:
        try:
            return self._views[key]
        except KeyError:
            pass
        if len(self._views) >= _PLANS:
            self._views.clear()
        with torch.inference_mode(False):  # or they could not be written to outside of inference mode
            self._views[key] = views = make()
        return views

    def _views_of(self, shape: torch.Size, dtype: torch.dtype) -> tuple[_Views, _Views] | None:
        """The slots as tensors of this shape; None if it is too large for one-shot."""
        key = (shape, dtype)
        try:
            return self._views[key]
        except KeyError:
            pass

        def make() -> tuple[_Views, _Views] | None:
            if shape.numel() * dtype.itemsize > self._one_shot_bytes:
                return None
            return self._make_views([shape] * self._size, dtype)

        return self._cached(key, make)

    def _of(self, piece: torch.Tensor) -> tuple[_Views, _Views]:
        """The slots as tensors like this one, which fits."""
        key = ("piece", piece.numel(), piece.dtype)
        views = self._cached(key, lambda: self._make_views([piece.shape] * self._size, piece.dtype))
        assert views is not None
        return views

    def _uneven(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> tuple[_Views, _Views] | None:
        """The slots as the members' tensors of a gather along ``dim``; None if one does not fit."""
        shapes = [_with_extent(tensor.shape, dim, size) for size in sizes]
        if max(shape.numel() for shape in shapes) * tensor.element_size() > SLOT_BYTES:
            return None
        return self._make_views(shapes, tensor.dtype)

    def _make_views(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> tuple[_Views, _Views]:
        if not self._slots:
            raise ChannelClosedError(f"{self._name} is closed")

        def make(row: list[torch.Tensor]) -> _Views:
            pairs = zip(row, shapes, strict=True)
            return self._views_over(
                [slot[: shape.numel() * dtype.itemsize].view(dtype).view(shape) for slot, shape in pairs]
            )

        return make(self._slots[0]), make(self._slots[1])

    def _views_over(self, members: list[torch.Tensor]) -> _Views:
        own, scratch = members[self._place], None
        if own.dtype in _HALVES and self._size > 2:
            if self._scratch is None:
                self._scratch = torch.empty(SLOT_BYTES // 2, dtype=torch.float32)
            scratch = self._scratch[: own.numel()].view(own.shape)
        return _Views(own, members, members[0], members[1], members[2:], scratch)

    # Large tensors.

    def _reduce_large(self, tensor: torch.Tensor, function: Callable[..., torch.Tensor]) -> None:
        flat = tensor.reshape(-1)
        for start, stop in _pieces(flat.numel(), flat.element_size()):
            self._reduce_piece(flat[start:stop], function)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view_as(tensor))

    def _one_shot(self, piece: torch.Tensor, function: Callable[..., torch.Tensor]) -> None:
        self._turn = turn = self._turn ^ 1
        views = self._of(piece)[turn]
        views.own.copy_(piece)
        self._meet("all_reduce")
        _reduce(function, views, piece)

    def _two_shot(self, piece: torch.Tensor, function: Callable[..., torch.Tensor]) -> None:
        self._turn = turn = self._turn ^ 1
        sizes, own, column, results = self._shares_of(piece)[turn]
        parts = torch.split_with_sizes(piece, sizes)
        own.copy_(piece)
        self._meet("all_reduce")
        if self._place < 2:  # what is in my slot is read before the result goes there
            _reduce(function, column, column.own)
        else:
            _reduce(function, column, parts[self._place])
            column.own.copy_(parts[self._place])
        self._meet("all_reduce")
        for part, result in zip(parts, results, strict=True):
            part.copy_(result)

    def _shares_of(self, piece: torch.Tensor) -> tuple[_Shares, _Shares]:
        key = (piece.numel(), piece.dtype)
        found = self._shares.get(key)
        if found is None:
            if len(self._shares) >= _PLANS:
                self._shares.clear()
            with torch.inference_mode(False):
                self._shares[key] = found = self._make_shares(*key)
        return found

    def _make_shares(self, numel: int, dtype: torch.dtype) -> tuple[_Shares, _Shares]:
        edges = [numel * place // self._size for place in range(self._size + 1)]
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]

        def make(row: list[torch.Tensor]) -> _Shares:
            slots = [slot[: numel * dtype.itemsize].view(dtype) for slot in row]
            cut = [torch.split_with_sizes(slot, sizes) for slot in slots]
            column = self._views_over([parts[self._place] for parts in cut])
            return _Shares(sizes, slots[self._place], column, [parts[place] for place, parts in enumerate(cut)])

        return make(self._slots[0]), make(self._slots[1])

    def _gather_large(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        """All members' tensors, in pieces of a slot at most; shorter ones show nothing in the last turns."""
        flat = tensor.detach().reshape(-1)
        whole = [tensor.new_empty(_with_extent(tensor.shape, dim, size)) for size in sizes]
        for start, stop in _pieces(max(target.numel() for target in whole), flat.element_size()):
            self._turn = turn = self._turn ^ 1
            slots = [slot.view(tensor.dtype) for slot in self._slots[turn]]
            mine = flat[start:stop]
            slots[self._place][: mine.numel()].copy_(mine)
            self._meet("all_gather")
            for slot, target in zip(slots, whole, strict=True):
                piece = target.view(-1)[start:stop]
                piece.copy_(slot[: piece.numel()])
        return whole

    def _exchange(self, operation: str, data: bytes) -> list[bytearray]:
        """Everybody's bytes. The first turn carries the lengths, from which all know how many turns there are."""
        data = _LENGTH.pack(len(data)) + data
        found: list[bytearray] = [bytearray() for _ in self._ranks]
        lengths = [0] * self._size
        done = 0
        while not done or done < max(lengths):
            self._turn = turn = self._turn ^ 1
            piece = data[done : done + SLOT_BYTES]
            buffers = self._buffers[turn]
            buffers[self._place][: len(piece)] = piece
            self._meet(operation)
            if not done:
                lengths = [_LENGTH.size + _LENGTH.unpack_from(buffer)[0] for buffer in buffers]
            for buffer, into, length in zip(buffers, found, lengths, strict=True):
                into += buffer[: max(0, min(length - done, SLOT_BYTES))]
            done += SLOT_BYTES
        for into in found:
            del into[: _LENGTH.size]
        return found


def _reduction(op: str) -> Callable[..., torch.Tensor]:
    try:
        return _REDUCTIONS[op]
    except KeyError:
        raise ValueError(f"{op!r} is no reduction; there are {', '.join(_REDUCTIONS)}") from None


def _reduce(function: Callable[..., torch.Tensor], views: _Views, out: torch.Tensor) -> None:
    """The members' tensors in rank order into ``out``, which may be the first or the second of them."""
    if views.scratch is not None and function is torch.add:
        scratch = views.scratch
        scratch.copy_(views.first)
        scratch.add_(views.second)
        for other in views.rest:
            scratch.add_(other)
        out.copy_(scratch)
        return
    function(views.first, views.second, out=out)
    for other in views.rest:
        function(out, other, out=out)


def _with_extent(shape: torch.Size, dim: int, extent: int) -> torch.Size:
    return torch.Size((*shape[:dim], extent, *shape[dim + 1 :]))


def _pieces(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements that fit in a slot."""
    step = SLOT_BYTES // itemsize
    for start in range(0, numel, step):
        yield start, min(start + step, numel)
