"""Collectives through shared memory, for ranks of one machine whose tensors are on the CPU.

gloo is made for networks: an all-reduce of one hidden state takes it 0.6 to 3.6 ms here, it listens on a port without
authentication, and a thread of it looks around a hundred times a second for ever. Ranks that share memory need none of
it. The memory is a memfd that whoever starts the ranks has made (:mod:`drumline.parallel.rendezvous`); what lies where
in it: :mod:`drumline.parallel.boxes`. Each rank maps it once (:class:`World`).

**A turn.** Each rank of a group has two slots. All operations are made of turns; turn k uses slot k % 2 of everybody::

    copy what I show into my slot
    meet: tell the others, wait until all have told (drumline.parallel.meeting)
    read the others' slots

**Why one meeting a turn is enough.** Let rank a write its slot in turn k while rank b is still reading it. b reads
a's slot of that parity in turn k-2 at the latest. But a is in turn k, so it has left the meeting of turn k-1, so b has
entered it, and what b read in turn k-2 it read before that (the fence at the start of a meeting keeps it so). With one
slot a would be stopped by nothing: after the meeting of turn k-1 it may begin turn k at once, with b still reading.
A turn may have more than one meeting (the two-shot below); the argument holds for the first of each.

**Everybody gets the same bits.** The sum is ((x0 + x1) + x2) + ..., in rank order, whoever computes it; 16-bit types
are summed in float32 and rounded once. So the result depends neither on the rank nor on the size of the tensor, and
the choice of tokens rests on it. *One-shot*, for small tensors and for two ranks: each rank computes the whole sum
from all slots, one meeting. *Two-shot*: each computes its share of the elements from all slots into its own slot,
second meeting, each copies all shares; reads 2 tensors' worth of memory where one-shot reads as many as there are
ranks. Nobody but its owner reads a share's place in the owner's slot before the second meeting.

Little Python in each call: views of the slots are kept for each shape and type, and nothing is allocated.

Rejected: reading each other's tensors by process_vm_readv (a system call for each peer, as dear as the meeting, and
not allowed everywhere); vLLM's kernels for it (a compiler at install time).

One thread at a time may use a group. A forked child must not go on with its parent's.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from drumline.errors import ChannelClosedError
from drumline.parallel.boxes import SLOT_BYTES
from drumline.parallel.layout import GroupKind
from drumline.parallel.mail import Mail
from drumline.parallel.meeting import Meeting, Members

ONE_SHOT_BYTES = 64 << 10
"""With three ranks and more, tensors up to this size are summed by every rank, larger ones by shares. Two ranks gain
nothing by shares at any size: each reads the other's tensor once, one way or the other."""

_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_HALVES = (torch.bfloat16, torch.float16)
_PLANS = 1024
"""Number of shapes of which views are kept."""
_LENGTH = struct.Struct("Q")


class World:
    """One rank's mapping of its world's memory, and its groups.

    ``fd`` stays the caller's, who may close it right after. ConfigError if the memory is of another world.
    """

    def __init__(self, fd: int, ranks: int, rank: int, timeout_s: float) -> None:
        self._members = Members(fd, ranks, rank, timeout_s)
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self._members.memory.mapping(), dtype=torch.uint8)
        self._groups: list[ShmGroup | Mail] = []
        self._closed = False

    @property
    def spins(self) -> bool:
        """Whether waiting ranks watch for a while before they sleep."""
        return self._members.spin_ns > 0

    def group(self, kind: GroupKind, ranks: Sequence[int]) -> ShmGroup:
        """This rank's side of its group of this kind."""
        group = ShmGroup(self._members, self._bytes, kind, ranks)
        self._groups.append(group)
        return group

    def mail(self, ranks: Sequence[int]) -> Mail:
        """This rank's messages from and to its neighbours in its pipeline group."""
        mail = Mail(self._members, ranks)
        self._groups.append(mail)
        return mail

    def close(self) -> None:
        """Tell the others, and let go of the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._members.leave()
        for group in self._groups:
            group.close()
        self._groups.clear()
        del self._bytes
        self._members.close()


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

    def __init__(self, members: Members, memory: torch.Tensor, kind: GroupKind, ranks: Sequence[int]) -> None:
        self._size = len(ranks)
        self._place = tuple(ranks).index(members.rank)
        self._meeting = Meeting(members, kind, ranks)
        self._meet = self._meeting.meet
        self._one_shot_bytes = SLOT_BYTES if self._size == 2 else ONE_SHOT_BYTES
        self._reduce_piece = self._one_shot if self._size == 2 else self._two_shot
        self._turn = 0
        slots = [[members.boxes.slot_at(kind, rank, parity) for rank in ranks] for parity in (0, 1)]
        self._slots = [[memory[at : at + SLOT_BYTES] for at in row] for row in slots]
        self._buffers = [[members.memory.buf[at : at + SLOT_BYTES] for at in row] for row in slots]
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
        self._meeting.wake()
        self._slots = []
        self._views.clear()
        self._shares.clear()
        for row in self._buffers:
            for buffer in row:
                buffer.release()

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
            raise ChannelClosedError(f"{self._meeting.name} is closed")

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
        found: list[bytearray] = [bytearray() for _ in range(self._size)]
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
