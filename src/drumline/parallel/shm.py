"""Collectives through shared memory, for ranks of one machine whose tensors are on the CPU.

gloo is made for networks: an all-reduce of one hidden state takes it 0.6 to 3.6 ms here, it listens on a port without
authentication, and a thread of it looks around a hundred times a second for ever. Ranks that share memory need none of
it. The memory is a memfd that whoever starts the ranks has made (:mod:`drumline.parallel.rendezvous`); what lies where
in it: :mod:`drumline.parallel.boxes`. Each rank maps it once (:class:`World`).

**A turn.** Each rank of a group has three slots. All operations are made of turns; turn k uses slot k % 3 of each::

    copy what I show into my slot
    come: tell the others (drumline.parallel.meeting)
    wait until all others have come
    read the others' slots

**Ahead of the others.** Large tensors go in pieces, a turn each, and a rank shows the next piece before it reads this
one::

    copy 0, come 0
    wait 0, copy 1, come 1, read 0
    wait 1, copy 2, come 2, read 1 ...

By the time it has read a piece the others have mostly come with the next one, so a rank that is a little late costs
nobody anything, and what crosses from core to core is fresh in a cache.

**Why three slots are enough.** Let rank a write its slot in turn k while rank b is still reading it: as it was in turn
k-3, or longer ago. a is in turn k, so it has waited for turn k-1, so b has come to it. By then b had read all of turn
k-3 (all of k-2, in operations of one piece; the fence in ``come`` keeps it so). With two slots a might overtake a b
that still reads turn k-2. More slots are slower: less of them is in a cache. A turn may have more than one meeting (the
two-shot below); the argument holds for the first of each.

**Everybody gets the same bits.** The sum is ((x0 + x1) + x2) + ..., in rank order, whoever computes it; 16-bit types
are summed in float32 and rounded once. So the result depends neither on the rank nor on the size of the tensor, and
the choice of tokens rests on it. *One-shot*, for small tensors and for two ranks: each rank computes the whole sum
from all slots, one meeting. *Two-shot*: each computes its share of the elements from all slots into its own slot,
second meeting, each copies all shares; reads 2 tensors' worth of memory where one-shot reads as many as there are
ranks. Nobody but its owner touches a share's place in the owner's slot before the second meeting. A rank's own values
are taken from its tensor, not from its slot, and sums are made in place where their order allows it: a third of the
memory traffic less.

Little Python in each call: views of the slots are kept for each shape and type, and nothing is allocated.

Rejected: reading each other's tensors by process_vm_readv (a system call for each peer, as dear as the meeting, and
not allowed everywhere); vLLM's kernels for it (a compiler at install time).

One thread at a time may use a group. A forked child must not go on with its parent's.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from drumline.errors import ChannelClosedError, CollectiveError
from drumline.parallel.boxes import SLOT_BYTES, SLOTS
from drumline.parallel.layout import GroupKind
from drumline.parallel.mail import Mail
from drumline.parallel.meeting import Meeting, Members, Numbers

ONE_SHOT_BYTES = 128 << 10
"""With three ranks and more, tensors up to this size are summed by every rank, larger ones by shares. Two ranks gain
nothing by shares at any size: each reads the other's tensor once, one way or the other."""
CROWDED_ONE_SHOT_BYTES = 256 << 10
"""The same with more ranks than cores, where a second meeting costs more than the sums."""

LOOK_NS = 40
"""About what it takes to look at a word and to pause: 20 to 50 ns by processor."""

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
    def spin_ns(self) -> int:
        """How long ranks that wait watch for the others before they sleep."""
        return self._members.spin_ns

    def group(self, kind: GroupKind, ranks: Sequence[int], timeout_s: float | None = None) -> ShmGroup:
        """This rank's side of its group of this kind. ``timeout_s``: of its operations; None: the world's."""
        group = ShmGroup(self._members, self._bytes, kind, ranks, timeout_s)
        self._groups.append(group)
        return group

    def mail(self, ranks: Sequence[int], timeout_s: float | None = None) -> Mail:
        """This rank's messages from and to its neighbours in its pipeline group."""
        mail = Mail(self._members, ranks, timeout_s)
        self._groups.append(mail)
        return mail

    def numbers(self, kind: GroupKind) -> Numbers:
        """Numbers this rank's collectives on the device in its group of this kind."""
        return Numbers(self._members, kind)

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


def buffer_address(buffer: memoryview) -> int:
    """Where a writable buffer is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


# Moves bytes without fetching the lines that it overwrites, which the others have read last: a fifth faster than torch.
# It keeps the GIL: waiting for it afterwards would cost more than the move.
_move = ctypes.PyDLL(None).memmove
_move.restype = None


class _Views(NamedTuple):
    """The members' slots of one number, seen as tensors of one shape."""

    own: torch.Tensor
    at: ctypes.c_void_p
    """Where ``own`` is."""
    size: ctypes.c_size_t
    """Its bytes."""
    all: list[torch.Tensor]
    scratch: torch.Tensor | None
    """float32, for sums of more than two 16-bit tensors."""

    def show(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of this shape into this rank's slot."""
        if tensor.is_contiguous() and not tensor.is_neg():
            _move(self.at, ctypes.c_void_p(tensor.data_ptr()), self.size)
        else:
            self.own.copy_(tensor)


class _Shares(NamedTuple):
    """The members' slots of one number, for a two-shot of a one-dimensional tensor."""

    sizes: list[int]
    outside: list[tuple[slice, torch.Tensor]]
    """What is not this rank's share: where in the tensor, and its place in this rank's slot."""
    column: _Views
    """This rank's share, in everybody's slot."""
    results: list[tuple[int, torch.Tensor]]
    """Each other member's share, in its own slot."""


class _Columns(NamedTuple):
    """The members' slots of one number, for a reduce-scatter: each slot has a piece for each member."""

    outgoing: list[tuple[int, torch.Tensor]]
    """Each other member's piece, in this rank's slot."""
    mine: _Views
    """This rank's piece, in everybody's slot."""


class OneShot:
    """One-shot sums of float32 by compiled code, in step with those of :class:`ShmGroup`: the same turns, slots,
    meetings and order of additions, so that it does not matter to a rank which of the two its neighbours use.

    Whoever sums takes ``state`` before, and hands it back changed: each sum is one turn and one meeting. To come to a
    meeting is: own word = number; fence; if all others are there and a mark is set, :meth:`wake`.
    """

    def __init__(
        self, group: ShmGroup, place: int, own: int, others: Sequence[int], slots: Sequence[Sequence[int]]
    ) -> None:
        self._group = group
        self.place = place
        """Of this rank among the members."""
        self.own = own
        """Address of this rank's word (uint32)."""
        self.others = tuple(others)
        """And of those of the others. Behind each word (4 bytes on) is the mark of one who sleeps."""
        self.slots = tuple(tuple(row) for row in slots)
        """Addresses of slots: of each turn, all members'."""
        self.most_bytes = 0
        """Largest tensor that is summed in one shot. Known when all ranks have come: see ``state``."""
        self.looks = 0
        """How often to look at the others' words, with a pause after each, before :meth:`wait`."""

    @property
    def state(self) -> tuple[int, int]:
        """The slot of the last turn and the number of the last meeting."""
        if not self.most_bytes:
            self.most_bytes = self._group._most_in_one_shot()
            self.looks = self._group._members.spin_ns // LOOK_NS
        return self._group._turn, self._group._meeting.number

    @state.setter
    def state(self, state: tuple[int, int]) -> None:
        self._group._turn, self._group._meeting.number = state

    def wake(self, number: int) -> None:
        """Wake those who sleep until meeting ``number``; all have come."""
        self._group._meeting.open_gate(number)

    def wait(self, number: int) -> None:
        """Wait until all have come to meeting ``number``. Errors as ``Meeting.meet``."""
        self._group._meeting.wait(number, "all_reduce")


class ShmGroup:
    """The ranks of one group, as one of them sees it. What the operations do: ``GroupCoordinator``."""

    def __init__(
        self,
        members: Members,
        memory: torch.Tensor,
        kind: GroupKind,
        ranks: Sequence[int],
        timeout_s: float | None = None,
    ) -> None:
        self._size = len(ranks)
        self._place = tuple(ranks).index(members.rank)
        self._meeting = Meeting(members, kind, ranks, timeout_s)
        self._meet = self._meeting.meet
        self._members = members
        self._ranks = tuple(ranks)
        self._turn = 0
        slots = [[members.boxes.slot_at(kind, rank, number) for rank in ranks] for number in range(SLOTS)]
        self._slots = [[memory[at : at + SLOT_BYTES] for at in row] for row in slots]
        self._buffers = [[members.memory.buf[at : at + SLOT_BYTES] for at in row] for row in slots]
        self._views: dict[Any, tuple[_Views, ...] | None] = {}
        self._shares: dict[Any, tuple[_Shares, ...]] = {}
        self._columns: dict[Any, tuple[_Columns, ...]] = {}
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
        mine = views[self._next_turn()]
        mine.show(tensor)
        self._meet("all_reduce")
        self._sum(function, mine, tensor, True)

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """All tensors along ``dim``, in new memory."""
        key = (tensor.shape, tensor.dtype, dim, *sizes)
        views = self._cached(key, lambda: self._uneven(tensor, dim, sizes))
        if views is None:
            return torch.cat(self._gather_large(tensor, dim, sizes), dim)
        mine = views[self._next_turn()]
        mine.own.copy_(tensor.detach())
        self._meet("all_gather")
        return torch.cat(mine.all, dim)

    def gather(self, tensor: torch.Tensor, dst: int, dim: int, sizes: Sequence[int]) -> torch.Tensor | None:
        """All tensors along ``dim``, in new memory, on member ``dst``; None elsewhere."""
        here = dst == self._place
        key = (tensor.shape, tensor.dtype, dim, *sizes)
        views = self._cached(key, lambda: self._uneven(tensor, dim, sizes))
        if views is None:
            found = self._gather_large(tensor, dim, sizes, "gather", here)
            return torch.cat(found, dim) if here else None
        mine = views[self._next_turn()]
        if not here:
            mine.own.copy_(tensor.detach())
        self._meet("gather")
        if not here:
            return None
        return torch.cat([tensor if place == dst else view for place, view in enumerate(mine.all)], dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int], op: str) -> torch.Tensor:
        """This member's part along ``dim`` of what all_reduce would give, bit for bit, in new memory."""
        function, place = _reduction(op), self._place
        cut = torch.split_with_sizes(tensor.detach(), list(sizes), dim)
        result = cut[place].clone(memory_format=torch.contiguous_format)
        parts = [part.reshape(-1) if other != place else result.view(-1) for other, part in enumerate(cut)]
        step = max(1, SLOT_BYTES // tensor.element_size() // self._size)
        for start in range(0, max(part.numel() for part in parts), step):
            pieces = [part[start : start + step] for part in parts]
            columns = self._columns_of([piece.numel() for piece in pieces], tensor.dtype)[self._next_turn()]
            for other, slot in columns.outgoing:
                slot.copy_(pieces[other])
            self._meet("reduce_scatter")
            self._sum(function, columns.mine, pieces[place], False)
        return result

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather equal tensors into ``output`` [size, ...]."""
        flat, rows = tensor.detach().reshape(-1), output.view(self._size, -1)
        for start, stop in _pieces(flat.numel(), flat.element_size()):
            views = self._of(flat[start:stop])[self._next_turn()]
            views.own.copy_(flat[start:stop])
            self._meet("all_gather")
            torch.stack(views.all, out=rows[:, start:stop])

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Rows to and from each member.

        What a rank shows is one stream of bytes, in pieces of a slot: how many rows it sends to each member, then the
        rows, but for its own. So all know after the first turn how many there are, and where theirs begin.
        """
        rows = tensor.detach().contiguous()
        output = rows.new_empty((sum(receives), *rows.shape[1:]))
        width = rows.shape[1:].numel() * rows.element_size()
        source, target = _as_bytes(rows), _as_bytes(output)
        ends = [0, *itertools.accumulate(size * width for size in sends)]
        into = [0, *itertools.accumulate(size * width for size in receives)]
        place = self._place
        target[into[place] : into[place + 1]].copy_(source[ends[place] : ends[place + 1]])
        counts = torch.tensor([0 if member == place else size for member, size in enumerate(sends)])
        shown = [_as_bytes(counts), source[: ends[place]], source[ends[place + 1] :]]
        targets = [target[start:stop] for start, stop in itertools.pairwise(into)]
        self._trade(shown, targets, width)
        return output

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Member ``src``'s values, in place."""
        tensor = tensor.detach()
        flat = tensor.reshape(-1)
        for start, stop in _pieces(flat.numel(), flat.element_size()):
            piece = flat[start:stop]
            views = self._of(piece)[self._next_turn()]
            if src == self._place:
                views.own.copy_(piece)
            self._meet("broadcast")
            if src != self._place:
                piece.copy_(views.all[src])
        if src != self._place and not tensor.is_contiguous():
            tensor.copy_(flat.view_as(tensor))

    def barrier(self) -> None:
        """Wait for all."""
        self._check_open()
        self._next_turn()
        self._meet("barrier")

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Member ``src``'s object, pickled. The first turn has its length, from which all know how many there are."""
        self._check_open()
        here = src == self._place
        data = memoryview(pickle.dumps(value, protocol=5) if here else b"")
        done, head, length = 0, _LENGTH.size, len(data)
        while head or done < length:
            buffer = self._buffers[self._next_turn()][src]
            if here:
                if head:
                    _LENGTH.pack_into(buffer, 0, length)
                piece = data[done : done + SLOT_BYTES - head]
                buffer[head : head + len(piece)] = piece
            self._meet("broadcast_object")
            if head and not here:
                length = _LENGTH.unpack_from(buffer)[0]
                if head + length <= SLOT_BYTES:
                    return pickle.loads(buffer[head : head + length])
                data = memoryview(bytearray(length))
            size = min(length - done, SLOT_BYTES - head)
            if not here:
                data[done : done + size] = buffer[head : head + size]
            done, head = done + size, 0
        return value if here else pickle.loads(data)

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
        self._columns.clear()
        for row in self._buffers:
            for buffer in row:
                buffer.release()

    def one_shot(self) -> OneShot | None:
        """What code that runs without Python needs to sum by itself. None if the group is closed."""
        if not self._slots:
            return None
        base = self._members.address
        own, others = self._meeting.words()
        slots = [[buffer_address(buffer) for buffer in row] for row in self._buffers]
        return OneShot(self, self._place, base + 4 * own, [base + 4 * word for word in others], slots)

    def _check_open(self) -> None:
        if not self._slots:
            raise ChannelClosedError(f"{self._meeting.name} is closed")

    # Views.

    def _next_turn(self) -> int:
        self._turn = turn = (self._turn + 1) % SLOTS
        return turn

    def _cached(self, key: Any, make: Callable[[], tuple[_Views, ...] | None]) -> tuple[_Views, ...] | None:
        try:
            return self._views[key]
        except KeyError:
            pass
        if len(self._views) >= _PLANS:
            self._views.clear()
        with torch.inference_mode(False):  # or they could not be written to outside of inference mode
            self._views[key] = views = make()
        return views

    def _views_of(self, shape: torch.Size, dtype: torch.dtype) -> tuple[_Views, ...] | None:
        """The slots as tensors of this shape; None if it is too large for one-shot."""
        key = (shape, dtype)
        try:
            return self._views[key]
        except KeyError:
            pass

        def make() -> tuple[_Views, ...] | None:
            if shape.numel() * dtype.itemsize > self._most_in_one_shot():
                return None
            return self._make_views([shape] * self._size, dtype)

        return self._cached(key, make)

    def _most_in_one_shot(self) -> int:
        """Bytes; the same on all ranks. They have all come: WORLD's first barrier has waited for them."""
        if self._size == 2:
            return SLOT_BYTES
        return CROWDED_ONE_SHOT_BYTES if self._members.crowded(self._ranks) else ONE_SHOT_BYTES

    def _of(self, piece: torch.Tensor) -> tuple[_Views, ...]:
        """The slots as tensors like this one, which fits."""
        key = ("piece", piece.numel(), piece.dtype)
        views = self._cached(key, lambda: self._make_views([piece.shape] * self._size, piece.dtype))
        assert views is not None
        return views

    def _uneven(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> tuple[_Views, ...] | None:
        """The slots as the members' tensors of a gather along ``dim``; None if one does not fit."""
        shapes = [_with_extent(tensor.shape, dim, size) for size in sizes]
        if max(shape.numel() for shape in shapes) * tensor.element_size() > SLOT_BYTES:
            return None
        return self._make_views(shapes, tensor.dtype)

    def _make_views(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> tuple[_Views, ...]:
        self._check_open()

        def make(row: list[torch.Tensor]) -> _Views:
            pairs = zip(row, shapes, strict=True)
            return self._views_over(
                [slot[: shape.numel() * dtype.itemsize].view(dtype).view(shape) for slot, shape in pairs]
            )

        return tuple(map(make, self._slots))

    def _views_over(self, members: list[torch.Tensor]) -> _Views:
        own, scratch = members[self._place], None
        if own.dtype in _HALVES and self._size > 2:
            if self._scratch is None:
                self._scratch = torch.empty(SLOT_BYTES // 2, dtype=torch.float32)
            scratch = self._scratch[: own.numel()].view(own.shape)
        size = own.numel() * own.element_size()
        return _Views(own, ctypes.c_void_p(own.data_ptr()), ctypes.c_size_t(size), members, scratch)

    # Sums.

    def _sum(self, function: Callable[..., torch.Tensor], views: _Views, mine: torch.Tensor, shown: bool) -> None:
        """The sum of all members' tensors into ``mine``, which has this one's.

        ``shown``: so has this one's slot, where the others read it. Else the slot is free until the sum is there.
        """
        if self._size == 2 and function is torch.add:  # either order gives the same bits
            mine.add_(views.all[1 - self._place])
            return
        place, values = self._place, list(views.all)
        out = mine
        if place < 2 or not shown:
            values[place] = mine
        if place > 1 and not shown:
            out = views.own
        if views.scratch is not None and function is torch.add:
            out = views.scratch
            out.copy_(values[0])
            out.add_(values[1])
        else:
            function(values[0], values[1], out=out)
        for value in values[2:]:
            function(out, value, out=out)
        if out is not mine:
            mine.copy_(out)

    def _reduce_large(self, tensor: torch.Tensor, function: Callable[..., torch.Tensor]) -> None:
        flat = tensor.reshape(-1)
        pieces = torch.split(flat, SLOT_BYTES // flat.element_size())
        if self._size == 2:
            self._in_one_shot(pieces, function)
        else:
            self._in_two_shots(pieces, function)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view_as(tensor))

    def _in_one_shot(self, pieces: Sequence[torch.Tensor], function: Callable[..., torch.Tensor]) -> None:
        come, wait = self._meeting.come, self._meeting.wait

        def show(piece: torch.Tensor) -> tuple[_Views, int]:
            views = self._of(piece)[self._next_turn()]
            views.show(piece)
            return views, come()

        views, number = show(pieces[0])
        for piece, following in itertools.zip_longest(pieces, pieces[1:]):
            wait(number, "all_reduce")
            shown = views
            if following is not None:
                views, number = show(following)
            self._sum(function, shown, piece, True)

    def _in_two_shots(self, pieces: Sequence[torch.Tensor], function: Callable[..., torch.Tensor]) -> None:
        come, wait, place = self._meeting.come, self._meeting.wait, self._place

        def show(piece: torch.Tensor) -> tuple[_Shares, int]:
            shares = self._shares_of(piece)[self._next_turn()]
            for where, slot in shares.outside:
                slot.copy_(piece[where])
            return shares, come()

        shares, number = show(pieces[0])
        for piece, following in itertools.zip_longest(pieces, pieces[1:]):
            sizes, _, column, results = shares
            parts = piece.split_with_sizes(sizes)
            wait(number, "all_reduce")
            self._sum(function, column, parts[place], False)
            column.own.copy_(parts[place])
            done = come()
            if following is not None:
                shares, number = show(following)
            wait(done, "all_reduce")
            for other, result in results:
                parts[other].copy_(result)

    def _shares_of(self, piece: torch.Tensor) -> tuple[_Shares, ...]:
        key = (piece.numel(), piece.dtype)
        found = self._shares.get(key)
        if found is None:
            if len(self._shares) >= _PLANS:
                self._shares.clear()
            with torch.inference_mode(False):
                self._shares[key] = found = self._make_shares(*key)
        return found

    def _make_shares(self, numel: int, dtype: torch.dtype) -> tuple[_Shares, ...]:
        edges = [numel * place // self._size for place in range(self._size + 1)]
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        around = [slice(0, edges[self._place]), slice(edges[self._place + 1], numel)]

        def make(row: list[torch.Tensor]) -> _Shares:
            slots = [slot[: numel * dtype.itemsize].view(dtype) for slot in row]
            cut = [torch.split_with_sizes(slot, sizes) for slot in slots]
            column = self._views_over([parts[self._place] for parts in cut])
            outside = [(where, slots[self._place][where]) for where in around if where.start < where.stop]
            results = [(place, parts[place]) for place, parts in enumerate(cut) if place != self._place]
            return _Shares(sizes, outside, column, results)

        return tuple(map(make, self._slots))

    def _columns_of(self, counts: Sequence[int], dtype: torch.dtype) -> tuple[_Columns, ...]:
        """Places for pieces of these many elements, one behind the other."""
        key = (dtype, *counts)
        found = self._columns.get(key)
        if found is None:
            self._check_open()
            if len(self._columns) >= _PLANS:
                self._columns.clear()
            with torch.inference_mode(False):
                self._columns[key] = found = self._make_columns(counts, dtype)
        return found

    def _make_columns(self, counts: Sequence[int], dtype: torch.dtype) -> tuple[_Columns, ...]:
        used = sum(counts) * dtype.itemsize

        def make(row: list[torch.Tensor]) -> _Columns:
            cut = [torch.split_with_sizes(slot[:used].view(dtype), list(counts)) for slot in row]
            outgoing = [(other, piece) for other, piece in enumerate(cut[self._place]) if other != self._place]
            return _Columns(outgoing, self._views_over([pieces[self._place] for pieces in cut]))

        return tuple(map(make, self._slots))

    def _gather_large(
        self, tensor: torch.Tensor, dim: int, sizes: Sequence[int], operation: str = "all_gather", here: bool = True
    ) -> list[torch.Tensor]:
        """All members' tensors, in pieces of a slot at most; shorter ones show nothing in the last turns.

        Who is not ``here`` shows its own, and gets nothing.
        """
        self._check_open()
        flat = tensor.detach().reshape(-1)
        whole = [tensor.new_empty(_with_extent(tensor.shape, dim, size)) for size in sizes]
        for start, stop in _pieces(max(target.numel() for target in whole), flat.element_size()):
            slots = [slot.view(tensor.dtype) for slot in self._slots[self._next_turn()]]
            mine = flat[start:stop]
            slots[self._place][: mine.numel()].copy_(mine)
            self._meet(operation)
            for slot, target in zip(slots, whole if here else (), strict=here):
                piece = target.view(-1)[start:stop]
                piece.copy_(slot[: piece.numel()])
        return whole

    def _trade(self, shown: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], width: int) -> None:
        """The turns of :meth:`all_to_all`: show a stream of bytes, and take from each of the others' what is for this
        rank. ``width``: bytes of a row."""
        self._check_open()
        head, own = self._size * _LENGTH.size, sum(map(len, shown))
        start, longest, places = 0, own, [(0, 0)] * self._size
        while start < longest:
            slots = self._slots[self._next_turn()]
            _copy_window(slots[self._place], start, shown)
            self._meet("all_to_all")
            if not start:
                tables = [slot[:head].view(torch.int64).tolist() for slot in slots]
                longest = head + max(sum(table) for table in tables) * width
                places = [self._found(table, head, width) for table in tables]
                self._check_traded(tables, targets, width)
            for member, (slot, (begin, end), target) in enumerate(zip(slots, places, targets, strict=True)):
                first, last = max(begin, start), min(end, start + SLOT_BYTES)
                if member != self._place and first < last:
                    target[first - begin : last - begin].copy_(slot[first - start : last - start])
            start += SLOT_BYTES

    def _found(self, table: Sequence[int], head: int, width: int) -> tuple[int, int]:
        """Where in a member's stream the rows for this rank are."""
        begin = head + sum(table[: self._place]) * width
        return begin, begin + table[self._place] * width

    def _check_traded(self, tables: Sequence[Sequence[int]], targets: Sequence[torch.Tensor], width: int) -> None:
        for member, (table, target) in enumerate(zip(tables, targets, strict=True)):
            if member != self._place and table[self._place] * width != len(target):
                raise CollectiveError(
                    f"all_to_all of {self._meeting.name} on rank {self._members.rank}: rank {self._ranks[member]} "
                    f"sends {table[self._place]} rows, not the {len(target) // width} that are expected"
                )

    def _exchange(self, operation: str, data: bytes) -> list[memoryview]:
        """Everybody's bytes. The first turn carries the lengths, from which all know how many turns there are."""
        self._check_open()
        mine = memoryview(data)
        found = [memoryview(b"")] * self._size
        done, head, longest = 0, _LENGTH.size, len(data)
        while head or done < longest:
            buffers = self._buffers[self._next_turn()]
            if head:
                _LENGTH.pack_into(buffers[self._place], 0, len(mine))
            piece = mine[done : done + SLOT_BYTES - head]
            buffers[self._place][head : head + len(piece)] = piece
            self._meet(operation)
            if head:
                found = [memoryview(bytearray(_LENGTH.unpack_from(buffer)[0])) for buffer in buffers]
                longest = max(map(len, found))
            for buffer, into in zip(buffers, found, strict=True):
                size = max(0, min(len(into) - done, SLOT_BYTES - head))
                into[done : done + size] = buffer[head : head + size]
            done, head = done + SLOT_BYTES - head, 0
        return found


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as its bytes."""
    return tensor.view(-1).view(torch.uint8)


def _copy_window(slot: torch.Tensor, start: int, parts: Sequence[torch.Tensor]) -> None:
    """Fill a slot with what comes from byte ``start`` on in a stream of bytes that is in several parts."""
    at = 0
    for part in parts:
        first, last = max(at, start), min(at + len(part), start + len(slot))
        if first < last:
            slot[first - start : last - start].copy_(part[first - at : last - at])
        at += len(part)


def _reduction(op: str) -> Callable[..., torch.Tensor]:
    try:
        return _REDUCTIONS[op]
    except KeyError:
        raise ValueError(f"{op!r} is no reduction; there are {', '.join(_REDUCTIONS)}") from None


def _with_extent(shape: torch.Size, dim: int, extent: int) -> torch.Size:
    return torch.Size((*shape[:dim], extent, *shape[dim + 1 :]))


def _pieces(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements that fit in a slot."""
    step = SLOT_BYTES // itemsize
    for start in range(0, numel, step):
        yield start, min(start + step, numel)
