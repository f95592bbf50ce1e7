"""Keys and values of decoding rows in one piece each, beside the paged cache, so that a step gathers nothing.

Gathering a row's blocks reads its keys and values, writes them and reads them again, in every step and layer: two to
three times what attention itself takes on a CPU. Here a row that decodes has a *place*: its keys and values as
``[layers, 2, heads, tokens, D]``, filled from its blocks when it is first seen and continued by one token a step. Rows
in neighbouring places are one strided tensor for the attention kernel, without a copy.

- Places are lazy memory: each costs what was written to it. All have room for the same number of tokens, which grows
  with the longest row (``ROOM``, doubled): room that is not used spreads the used pages, which made attention over 32
  rows up to 2 times slower.
- Huge pages where all places fit into the budget at once. Between two looks at a row's keys all weights pass through
  the caches, so each page costs a walk of cold page tables: with small pages attention over 32 rows of a 5 M model
  takes a fifth longer. They are not lazy within a place, hence the condition.
- All places together may take ``budget`` bytes. Rows that do not fit are gathered as before. Places that are not in
  use give their memory back when others need it.
- The paged cache stays the truth: everything is written there too, so prefixes are shared and slots preempted without
  asking this module. A place belongs to one life of a slot; keys and values of a position never change in it.

Rejected: contiguous blocks by allocation (cannot be held up with shared prefixes and eviction by last use); attention
block by block over the physical cache (matrix products of 3 x 16 cost more than the copy); gathering a few rows at a
time to stay in the cache (saves a third at best).
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

ROOM = 320
"""Tokens that a place has room for at first."""

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class RowCopies:
    """Places of decoding rows. ``data`` [places, layers, 2, heads, tokens, D]."""

    def __init__(self, cache: torch.Tensor, num_places: int, max_tokens: int, budget: int) -> None:
        """``cache``: the paged one, [layers, 2, blocks, heads, block, D]. OSError if there is no address space."""
        layers, two, _, heads, _, dim = cache.shape
        self._cache = cache
        self._num_places, self._max_tokens = num_places, max_tokens
        line = dim * cache.dtype.itemsize
        self._token_bytes = layers * two * heads * line
        self._page_tokens = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, line)
        self._budget = budget
        self._reserve(ROOM)
        self._slot = np.full(num_places, -1, dtype=np.int64)
        """Slot in each place; -1: free."""
        self._life = np.zeros(num_places, dtype=np.int64)
        self._length = np.zeros(num_places, dtype=np.int64)
        """Tokens that are right."""
        self._touched = np.zeros(num_places, dtype=np.int64)
        """Tokens whose memory is in use."""
        self._place_of = np.full(64, -1, dtype=np.int64)
        self._last: tuple[Ints, Longs, Longs] | None = None
        """Slots, places and lives of the last step, if all had one: mostly the next step has the same."""

    def _reserve(self, tokens: int) -> None:
        """Places with room for so many tokens, in whole pages. OSError if there is no address space."""
        layers, two, _, heads, _, dim = self._cache.shape
        room = -(-min(tokens, self._max_tokens) // self._page_tokens) * self._page_tokens
        shape = (self._num_places, layers, two, heads, room, dim)
        self._room = room
        self._place_bytes = self._token_bytes * room
        self._memory = mmap.mmap(
            -1, self._place_bytes * self._num_places, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        )
        self._huge = self._place_bytes * self._num_places <= self._budget
        advice = getattr(mmap, "MADV_HUGEPAGE" if self._huge else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            try:
                self._memory.madvise(advice)
            except OSError:
                self._huge = False  # a kernel without transparent huge pages
        self.data = torch.frombuffer(self._memory, dtype=self._cache.dtype, count=math.prod(shape)).view(shape)
        self.layers = list(self.data.unbind(1))
        """Of each layer [places, 2, heads, tokens, D]."""

    def _grow(self, tokens: int) -> None:
        """Room for so many tokens in each place, if they may be had and the budget allows for such a row."""
        room, size = self._room, self._place_bytes
        while room < tokens:
            room *= 2
        old, memory = self.data, self._memory
        if tokens * self._token_bytes > self._budget:
            return
        try:
            self._reserve(room)
        except OSError:
            return
        self._touched[self._slot < 0] = 0
        for place in np.flatnonzero(self._slot >= 0):
            count = int(self._length[place])
            self.data[place, :, :, :, :count] = old[place, :, :, :, :count]
            self._touched[place] = count
            memory.madvise(mmap.MADV_DONTNEED, int(place) * size, size)

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        if self._huge:
            return int((self._touched > 0).sum()) * self._place_bytes
        pages = -(-self._touched // self._page_tokens)
        return int(pages.sum()) * self._page_tokens * self._token_bytes

    def places(self, slots: Ints, lives: Longs, tables: Ints, computed: Ints) -> Longs:
        """Place of each of these rows, with its first ``computed`` tokens; -1 where it has none. Each adds one token.

        ``lives``: of all slots by number. ``tables`` [B, N]: blocks of the rows.
        """
        if self._last is not None and np.array_equal(slots, self._last[0]):
            _, found, life = self._last
            grown = computed + 1
            if (
                int(grown.max()) <= self._room
                and (lives[slots] == life).all()
                and (self._length[found] == computed).all()
            ):
                self._length[found] = grown
                self._touched[found] = np.maximum(self._touched[found], grown)
                if self.nbytes <= self._budget:
                    return found
        self._last = None
        found = self._find(slots, lives, tables, computed)
        if (found >= 0).all():
            self._last = slots.copy(), found, lives[slots]
        return found

    def _find(self, slots: Ints, lives: Longs, tables: Ints, computed: Ints) -> Longs:
        self._free_ended(lives)
        if len(lives) > len(self._place_of):
            self._place_of = np.pad(self._place_of, (0, len(lives) - len(self._place_of)), constant_values=-1)
        if int(computed.max()) >= self._room:
            self._grow(int(computed.max()) + 1)
        found = self._place_of[slots]
        for row in np.flatnonzero((found < 0) | (self._length[found] < computed)):
            slot, done = int(slots[row]), int(computed[row])
            found[row] = self._fill(int(found[row]), slot, int(lives[slot]), tables[row], done)
        found[computed >= self._room] = -1
        held = found >= 0
        places = found[held]
        self._length[places] = computed[held] + 1
        self._touched[places] = np.maximum(self._touched[places], self._length[places])
        if self.nbytes > self._budget:
            self._shrink()
            found[held] = self._place_of[slots[held]]
        return found

    def _free_ended(self, lives: Longs) -> None:
        used = np.flatnonzero(self._slot >= 0)
        ended = used[lives[self._slot[used]] != self._life[used]]
        if len(ended):
            self._place_of[self._slot[ended]] = -1
            self._slot[ended] = -1

    def _fill(self, place: int, slot: int, life: int, table: Ints, count: int) -> int:
        """Bring a row's first ``count`` tokens into its place, or a new one. -1 if there is no room."""
        if count >= self._room:
            return -1
        first = 0
        if place >= 0:
            first = int(self._length[place])
        else:
            free = np.flatnonzero(self._slot < 0)
            if not len(free) or not self._make_room(int(free[0]), count):
                return -1
            place = int(free[0])
            self._slot[place], self._life[place], self._place_of[slot] = slot, life, place
        size = self._cache.shape[4]
        begin, blocks = first // size, -(-count // size)
        target = self.data[place]
        if begin < blocks:
            index = torch.from_numpy(table[begin:blocks].astype(np.int64))
            piece = self._cache.index_select(2, index).transpose(2, 3).flatten(3, 4)
            target[:, :, :, begin * size : count] = piece[:, :, :, : count - begin * size]
        if self._touched[place] > count:  # what an earlier row left may not even be a number
            target[:, :, :, count : int(self._touched[place])] = 0
        self._touched[place] = max(int(self._touched[place]), count + 1)
        return place

    def _make_room(self, place: int, tokens: int) -> bool:
        """Whether so many tokens fit in a free place; others' unused memory is given back for it."""
        pages = -(-(tokens + 1) // self._page_tokens) + int(-self._touched[place] // self._page_tokens)
        more = max(pages, 0) * self._page_tokens * self._token_bytes
        if self.nbytes + more <= self._budget:
            return True
        for other in np.flatnonzero((self._slot < 0) & (self._touched > 0)):
            if other != place:
                self._give_back(int(other))
        return self.nbytes + more <= self._budget

    def _shrink(self) -> None:
        """Give memory back until the budget holds: of free places first, then of the longest rows."""
        order = np.lexsort((-self._touched, self._slot >= 0))
        for place in order[self._touched[order] > 0]:
            if self.nbytes <= self._budget:
                return
            if self._slot[place] >= 0:
                self._place_of[self._slot[place]] = -1
                self._slot[place] = -1
            self._give_back(int(place))

    def _give_back(self, place: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, place * self._place_bytes, self._place_bytes)
        self._touched[place] = 0
        self._length[place] = 0
