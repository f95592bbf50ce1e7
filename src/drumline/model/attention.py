"""Attention over a paged KV cache, as one function that transformers' attention modules call.

Flow of one layer (all rows of a step are packed in one sequence of T tokens)::

    q [1, Hq, T, D], k, v [1, Hkv, T, D]   after rotary embedding, from the model's attention module
      |  write: k, v of token t go to block write_blocks[t], place write_offsets[t] of this layer's cache
      |  rows that decode: one SDPA over the copies of neighbouring rows (``model.rows``), on the CPU
      |  other rows with one token: gather their blocks, one SDPA over all of a group (query heads packed as query rows)
      |  rows with more: one SDPA a row (over its own k, v if nothing came before, else over gathered blocks)
      v
    out [1, T, Hq, D]

What it rests on: ``AttentionInterface`` and ``AttentionMaskInterface`` of transformers (5.17 to 5.24) hand keyword
arguments of the model's forward through untouched; ours is ``ctx``, the :class:`AttentionBatch` of the step. Queries of
one KV head always are consecutive, and every rank has a whole multiple of its KV heads (``parallel.shards``).

- Query heads of one KV head are packed as query rows ``[B, Hkv, G, D]`` for decoding: K and V are never repeated.
  For prefill they are a second head axis and K, V are expanded with stride 0, which the CPU flash kernel takes as is.
- Decode rows are grouped by similar length, so that padding stays below a third; a group gathers at most
  ``MAX_GATHER_BYTES`` at once. Padding repeats a row's own first block, never another request's, and is masked.
- Prefill over earlier context goes in pieces of ``QUERY_ROWS`` queries, each over just the keys it may see, so that
  masks are a slice of one small matrix instead of T x S.
- Sliding windows: the cache keeps all tokens; what a window does not reach is not gathered, and the rest of the first
  block is masked. Gathers and masks are made once for each step and window size (:meth:`AttentionBatch.view`).
- Soft caps (Gemma 2) and sinks (GPT-OSS: one more logit a query head, which takes weight and gives no value): no kernel
  of torch has them; matmul and softmax, in pieces like prefill over context.
- Rejected: flex_attention and a C++ kernel (34 and 72 s to compile, no gain for what CPUs are for here); a
  [blocks, block, Hkv, D] layout (index_select of whole ``block x D`` pieces gives [B, Hkv, S, D] in one copy only with
  heads outside).
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from drumline.model.rows import RowCopies

if TYPE_CHECKING:
    from drumline.model.context_parallel import Exchange, Owners
    from drumline.model.spread import Spread

NAME = "drumline"
"""Name of this attention implementation in transformers."""

QUERY_ROWS = 256
"""Queries of one piece of a prefill over earlier context."""

MAX_GATHER_BYTES = 64 << 20
"""Most bytes of keys that a group of decode rows gathers at once."""

COPIES_SHARE = 0.25
"""Memory of the copies of decoding rows, as a share of the cache's, at most."""

AHEAD_BYTES = 4 << 20
"""Of blocks that were never used, at most so much is touched in advance: 3 ms of an idle worker at most."""

TOUCH_BYTES = 64 << 10
"""Touched at once, of one layer's keys or values."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux (uapi/asm-generic/mman-common.h), which the mmap module does not name."""

PADDING = 64
"""Tokens of padding a row that cost less than another call."""

log = logging.getLogger(__name__)

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Scoring:
    """How the scores of a layer become weights."""

    scaling: float
    """Scores are products of queries and keys, times this."""
    softcap: float | None = None
    """Then they become cap x tanh(score / cap)."""
    sinks: torch.Tensor | None = None
    """[Hq] scores of no key, one more of each query in the softmax."""

    @property
    def plain(self) -> bool:
        """A softmax over the scores, as fused kernels have it."""
        return self.softcap is None and self.sinks is None


_CPU = torch.device("cpu")


class KVCache:
    """Keys and values of this rank's layers: ``data[layer, 0 or 1]`` is [blocks, Hkv, block, D].

    On the CPU it is anonymous memory without huge pages, or that of a memory file (``memory_fd``), which outlives the
    process, and whose content stays if it has the size of this cache already. Blocks that were never used cost nothing,
    but for a few (``AHEAD_BYTES``) that are touched in advance, while nobody waits (:meth:`touch_ahead`): the first
    touch of a page takes 1 to 3 us, which is 0.4 ms of a prompt of 128 tokens in a small model. That relies on pools
    giving out new blocks in ascending order; otherwise it gains less.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        memory_fd: int = -1,
        ranks: int = 1,
    ) -> None:
        """``ranks``: that share out the tokens of a sequence; ``block_size``: tokens of a block on this rank."""
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        self.block_size = block_size
        self.span = block_size * ranks
        """Tokens of a sequence that a block of its table stands for, on all ranks together."""
        self.num_blocks = num_blocks
        self.num_kv_heads = num_kv_heads
        self.block_bytes = num_kv_heads * block_size * head_dim * dtype.itemsize
        """Of one layer's keys or values."""
        self._memory: mmap.mmap | None = None
        if device.type == "cpu":
            self._memory, self.data = _lazy_zeros(shape, dtype, memory_fd)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._used = 0
        """Blocks below were given out."""
        self._touched = 0
        """Blocks below were touched, or given out ..."""
        self._areas = 0
        """... and those of the next piece in so many layers' keys or values."""
        self.layers = list(self.data)
        self.keys = [layer[0] for layer in self.data]
        self.values = [layer[1] for layer in self.data]
        self.copies: RowCopies | None = None
        """Copies of decoding rows (:meth:`keep_copies`)."""

    def keep_copies(self, num_rows: int, max_tokens: int, share: float = COPIES_SHARE) -> None:
        """Keep decoding rows in one piece each as well, in memory of at most this share of the cache's. CPU only."""
        if self.data.device.type != "cpu" or not self.data.numel():
            return
        try:
            self.copies = RowCopies(self.data, num_rows, max_tokens, int(share * self.data.nbytes))
        except OSError as error:
            log.info("Decoding rows are gathered in each step: no address space for copies of them (%s)", error)

    def give_out(self, highest: int) -> None:
        """Blocks up to this one are in use from now on, or have been."""
        if highest >= self._used:
            self._used = highest + 1

    def touch_ahead(self) -> bool:
        """Touch some pages (for less than 0.1 ms) of blocks that have never been given out. False: none are left to."""
        if self._memory is None:
            return False
        if self._used > self._touched:
            self._touched, self._areas = self._used, 0
        areas = self.data.shape[0] * self.data.shape[1]
        ahead = AHEAD_BYTES // max(areas * self.block_bytes, 1)
        piece = max(min(TOUCH_BYTES // self.block_bytes, ahead // 2), 1)
        count = min(piece, self.num_blocks - self._touched)
        if count < 1 or self._touched + count > self._used + ahead:
            return False
        begin = (self._areas * self.num_blocks + self._touched) * self.block_bytes
        page = begin - begin % mmap.PAGESIZE
        try:
            self._memory.madvise(_POPULATE_WRITE, page, begin + count * self.block_bytes - page)
        except OSError:  # a kernel before 5.14, or no memory: they are touched when they are used
            self._memory = None
            return False
        self._areas += 1
        if self._areas == areas:
            self._touched, self._areas = self._touched + count, 0
        return True

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero newly given blocks: masked places are added to and multiplied too, so no inf or NaN may stay there."""
        self.data.index_fill_(2, blocks, 0)


def _lazy_zeros(shape: Sequence[int], dtype: torch.dtype, memory_fd: int) -> tuple[mmap.mmap, torch.Tensor]:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = _map_file(memory_fd, nbytes) if memory_fd >= 0 and nbytes else None
    if memory is None:
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages
    return memory, torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize).view(shape)


def _map_file(fd: int, nbytes: int) -> mmap.mmap | None:
    """A memory file of that size. It is empty and None is given where there may be none (a limit on files, say)."""
    try:
        if os.fstat(fd).st_size != nbytes:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    except OSError as error:
        log.info("The KV cache does not outlive this process: no memory file of %d MiB (%s)", nbytes >> 20, error)
        os.ftruncate(fd, 0)
        return None


@dataclass(frozen=True)
class DecodeGroup:
    """Rows with one query each, of similar length."""

    tokens: torch.Tensor | None
    """[B] places in the packed sequence; None if the step is just these rows, in order."""
    gather: torch.Tensor
    """[B x Hkv x N] rows of the cache seen as [blocks x Hkv, block x D]."""
    max_len: int
    """Keys that are looked at: the longest row's, its own token included."""
    mask: torch.Tensor | None
    """[B, 1, 1, max_len] what it sees (:func:`_mask`); None if all see all keys."""


@dataclass(frozen=True)
class PlacedGroup:
    """Rows with one query each, of similar length, in neighbouring places of the copies (``model.rows``)."""

    tokens: torch.Tensor | None
    """[B] places in the packed sequence; None if the step is just these rows, in order."""
    places: slice
    reach: slice
    """Tokens that are looked at: from the first that a window reaches to the longest row's own."""
    keys: Sequence[torch.Tensor]
    """Of each layer [B, Hkv, reach, D]."""
    values: Sequence[torch.Tensor]
    mask: torch.Tensor | None
    """[B, 1, 1, reach] as in :class:`DecodeGroup`."""


@dataclass(frozen=True)
class PrefillRow:
    """A row with several queries."""

    start: int
    """Place of its first token in the packed sequence."""
    length: int
    """Number of its tokens in this step."""
    context: int
    """Number of keys before them that are looked at (all there are, or what a window reaches)."""
    gather: torch.Tensor | None
    """[Hkv x N] rows of the cache; None if there is no context."""
    skip: int = 0
    """Keys at the head of the first gathered block that are out of the window's reach."""


@dataclass
class WindowView:
    """A step as layers with one reach see it: what to gather and what to mask."""

    placed: list[PlacedGroup] = field(default_factory=list)
    decodes: list[DecodeGroup] = field(default_factory=list)
    prefills: list[PrefillRow] = field(default_factory=list)
    window: int | None = None
    _mask: torch.Tensor | None = None

    def piece_mask(self, before: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """[count, before + count] mask (:func:`_mask`) of ``count`` queries with ``before`` keys ahead of the first.

        All are slices of one: its column c stands for key c - longest + before, where query i sees keys up to
        before + i. Made when the first layer asks.
        """
        if self._mask is None:
            longest = max(row.context + row.length for row in self.prefills)
            self._mask = _prefill_mask(longest, self.window, like.dtype, like.device)
        longest = self._mask.shape[1] - QUERY_ROWS
        return self._mask[:count, longest - before : longest + count]


@dataclass
class AttentionBatch:
    """Where a step's tokens are, on the model's device. Made once a step, used by every layer."""

    cache: KVCache | None
    """None: nothing is written (a dummy batch)."""
    tables: Ints
    """[B, N] block ids."""
    num_computed: Ints
    """[B] tokens before this step."""
    num_tokens: Ints
    """[B] tokens in this step."""
    dtype: torch.dtype
    device: torch.device
    write_blocks: torch.Tensor | None = None
    """[T] block of each token."""
    write_offsets: torch.Tensor | None = None
    """[T] place in that block."""
    copies: RowCopies | None = None
    places: npt.NDArray[np.int64] | None = None
    """[B] place of each row in the copies; -1: none."""
    write_places: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None = None
    """Of tokens that go to the copies: which (None: all), place, position."""
    targets: list[Sequence[torch.Tensor]] | None = None
    """For a step of one token, instead of the indices above: of each layer [2, Hkv, D], in the cache and the copies."""
    exchange: Exchange | None = None
    """Context parallelism (``model.context_parallel``): whose keys and values come from and go to where."""
    spread: Spread | None = None
    """Decode context parallelism: attention over keys that lie on several ranks."""
    owners: Owners | None = None
    """Prefill context parallelism: who computes which tokens of the step; None: this rank computes all."""
    _views: dict[int | None, WindowView] = field(default_factory=dict)

    def view(self, window: int | None) -> WindowView:
        """The step as layers see it whose queries reach ``window`` tokens (their own included); None: all."""
        if window is not None and not (self.num_computed + self.num_tokens > window).any():
            window = None
        found = self._views.get(window)
        if found is None:
            found = self._views[window] = _make_view(self, window)
        return found


def make_batch(
    cache: KVCache,
    tables: Ints,
    num_computed: Ints,
    num_tokens: Ints,
    device: torch.device,
    decoding: tuple[Ints, npt.NDArray[np.int64], npt.NDArray[np.bool_]] | None = None,
) -> AttentionBatch:
    """The attention side of a step. ``tables`` [B, N] block ids; the tokens of row b begin at ``num_computed[b]``.

    ``decoding``: slots of the rows [B], lives of all slots, and which rows [B] continue what earlier steps computed.
    These get places in the cache's copies.
    """
    size = cache.block_size
    if len(num_tokens) and int(num_tokens.max()) == 1:
        rows, positions = np.arange(len(num_tokens)), num_computed
    else:
        starts = np.cumsum(num_tokens) - num_tokens
        rows = np.repeat(np.arange(len(num_tokens)), num_tokens)
        positions = np.arange(len(rows)) - starts[rows] + num_computed[rows]
    batch = AttentionBatch(
        cache=cache,
        tables=tables,
        num_computed=num_computed,
        num_tokens=num_tokens,
        dtype=cache.data.dtype,
        device=device,
        write_blocks=_tensor(tables[rows, positions // size], device),
        write_offsets=_tensor(positions % size, device),
    )
    if decoding is not None and cache.copies is not None:
        _place_rows(batch, cache.copies, *decoding)
    if len(rows) == 1:
        position = int(positions[0])
        block = int(tables[0, position // size])
        batch.targets = [cache.data[:, :, block, :, position % size].unbind()]
        if batch.copies is not None and batch.places is not None:
            batch.targets.append(batch.copies.data[int(batch.places[0]), :, :, :, position].unbind())
    return batch


def _place_rows(
    batch: AttentionBatch,
    copies: RowCopies,
    slots: Ints,
    lives: npt.NDArray[np.int64],
    continues: npt.NDArray[np.bool_],
) -> None:
    rows = np.flatnonzero(continues & (batch.num_tokens == 1))
    if not len(rows):
        return
    computed = batch.num_computed[rows]
    found = copies.places(slots[rows], lives, batch.tables[rows], computed)
    held = found >= 0
    if not held.any():
        return
    batch.copies = copies
    batch.places = np.full(len(batch.num_tokens), -1, dtype=np.int64)
    batch.places[rows] = found
    tokens = None
    if len(rows) != len(batch.num_tokens) or not held.all():
        tokens = _tensor((np.cumsum(batch.num_tokens) - 1)[rows[held]], batch.device)
    batch.write_places = tokens, _tensor(found[held], batch.device), _tensor(computed[held], batch.device)


def dummy_batch(num_tokens: int, dtype: torch.dtype = torch.float32, device: torch.device = _CPU) -> AttentionBatch:
    """One row of new tokens that touches no cache."""
    none, count = np.zeros(1, dtype=np.int32), np.full(1, num_tokens, dtype=np.int32)
    return AttentionBatch(None, np.zeros((1, 0), dtype=np.int32), none, count, dtype, device)


def _make_view(batch: AttentionBatch, window: int | None) -> WindowView:
    view = WindowView(window=window)
    starts = np.cumsum(batch.num_tokens) - batch.num_tokens
    lengths = batch.num_computed + batch.num_tokens
    # The first key that the first query of each row sees.
    firsts = np.zeros_like(lengths) if window is None else np.maximum(batch.num_computed + 1 - window, 0)
    single = batch.num_tokens == 1
    if batch.cache is None:
        single = np.zeros_like(single)
    else:
        gathered = single
        if batch.places is not None:
            gathered = single & (batch.places < 0)
            for rows in _neighbours(np.flatnonzero(batch.places >= 0), batch.places, lengths - firsts):
                view.placed.append(_placed_group(batch, rows, starts, firsts))
        size = batch.cache.block_size
        num_blocks = -(-lengths // size) - firsts // size
        for rows in _group_by_length(np.flatnonzero(gathered), num_blocks, batch.cache.block_bytes):
            view.decodes.append(_decode_group(batch, rows, starts, firsts))
    for row in np.flatnonzero(~single):
        view.prefills.append(_prefill_row(batch, int(row), int(starts[row]), int(firsts[row])))
    return view


def _tensor(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def _gather_rows(blocks: Ints, num_kv_heads: int, device: torch.device) -> torch.Tensor:
    """Block ids [B, N] to rows of the cache seen as [blocks x Hkv, block x D], in the order [B, Hkv, N]."""
    heads = np.arange(num_kv_heads, dtype=np.int64)
    return _tensor((blocks[:, None, :].astype(np.int64) * num_kv_heads + heads[None, :, None]).ravel(), device)


def _group_by_length(rows: npt.NDArray[np.int64], num_blocks: Ints, block_bytes: int) -> list[npt.NDArray[np.int64]]:
    """Cut rows, longest first, where padding would pass a third or a group would gather too much."""
    if not len(rows):
        return []
    longest, total = int(num_blocks[rows].max()), len(rows)
    if total * longest * block_bytes <= MAX_GATHER_BYTES and 3 * (int(num_blocks[rows].min()) + 2) >= 2 * longest:
        return [rows]
    rows = rows[np.argsort(-num_blocks[rows], kind="stable")]
    groups: list[npt.NDArray[np.int64]] = []
    first = 0
    for end in range(1, len(rows) + 1):
        longest = int(num_blocks[rows[first]])
        full = (end - first + 1) * longest * block_bytes > MAX_GATHER_BYTES
        if end == len(rows) or full or 3 * (int(num_blocks[rows[end]]) + 2) < 2 * longest:
            groups.append(rows[first:end])
            first = end
    return groups


def _neighbours(
    rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], lengths: Ints
) -> list[npt.NDArray[np.int64]]:
    """Rows in the order of their places, cut where places are not neighbours or padding would cost more than a cut."""
    order = rows[np.argsort(places[rows])] if len(rows) > 1 else rows
    where, sizes = places[order], lengths[order]
    if int(where[-1] - where[0]) + 1 == len(order) and _padding_pays(sizes):
        return [order]
    groups: list[npt.NDArray[np.int64]] = []
    first = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or where[end] != where[end - 1] + 1 or not _padding_pays(sizes[first : end + 1]):
            groups.append(order[first:end])
            first = end
    return groups


def _padding_pays(lengths: Ints) -> bool:
    """Whether one call over rows of these lengths, all as long as the longest, is cheaper than several."""
    total = int(lengths.sum())
    padding = int(lengths.max()) * len(lengths) - total
    return padding <= max(total // 3, PADDING * len(lengths))


def _tokens_of(batch: AttentionBatch, rows: npt.NDArray[np.int64], starts: npt.NDArray[Any]) -> torch.Tensor | None:
    """Where rows with one token are in the packed sequence; None if they are all of it, in order."""
    if len(rows) == len(batch.num_tokens) and bool((rows == np.arange(len(rows))).all()):
        return None
    return _tensor(starts[rows], batch.device)


def _decode_mask(
    batch: AttentionBatch, ends: npt.NDArray[Any], skipped: npt.NDArray[Any], longest: int
) -> torch.Tensor | None:
    """[B, 1, 1, longest]: row b sees keys ``skipped[b] .. ends[b] - 1``; None if all see all."""
    if not skipped.any() and int(ends.min()) == longest:
        return None
    keys = np.arange(longest)
    seen = torch.from_numpy((keys < ends[:, None]) & (keys >= skipped[:, None]))
    return _mask(seen.to(batch.device), batch.dtype)[:, None, None, :]


def _placed_group(
    batch: AttentionBatch, rows: npt.NDArray[np.int64], starts: npt.NDArray[Any], firsts: Ints
) -> PlacedGroup:
    assert batch.places is not None
    ends, reached = batch.num_computed[rows] + 1, firsts[rows]
    first, last = int(reached.min()), int(ends.max())
    place = int(batch.places[rows[0]])
    mask = _decode_mask(batch, ends - first, reached - first, last - first)
    places, reach = slice(place, place + len(rows)), slice(first, last)
    assert batch.copies is not None
    keys, values = batch.copies.data[places, :, :, :, reach].unbind(2)
    return PlacedGroup(_tokens_of(batch, rows, starts), places, reach, keys.unbind(1), values.unbind(1), mask)


def _decode_group(
    batch: AttentionBatch, rows: npt.NDArray[np.int64], starts: npt.NDArray[Any], firsts: Ints
) -> DecodeGroup:
    """Rows with one token; each sees its keys from ``firsts`` on."""
    assert batch.cache is not None
    size = batch.cache.block_size
    first_blocks = firsts[rows] // size
    skipped = firsts[rows] - first_blocks * size
    ends = batch.num_computed[rows] + 1 - first_blocks * size
    longest = int(ends.max())
    nth = np.arange(-(-longest // size))
    # Padding repeats a row's own first block.
    columns = np.where(nth * size < ends[:, None], nth, 0) + first_blocks[:, None]
    blocks = batch.tables[rows[:, None], columns]
    mask = _decode_mask(batch, ends, skipped, longest)
    gather = _gather_rows(blocks, batch.cache.num_kv_heads, batch.device)
    return DecodeGroup(_tokens_of(batch, rows, starts), gather, longest, mask)


def _prefill_row(batch: AttentionBatch, row: int, start: int, first: int) -> PrefillRow:
    length, computed = int(batch.num_tokens[row]), int(batch.num_computed[row])
    if not computed or batch.cache is None:
        return PrefillRow(start, length, 0, None)
    size = batch.cache.block_size
    blocks = batch.tables[row : row + 1, first // size : -(-(computed + length) // size)]
    gather = _gather_rows(blocks, batch.cache.num_kv_heads, batch.device)
    return PrefillRow(start, length, computed - first, gather, first % size)


def _prefill_mask(longest: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    ahead = torch.arange(longest + QUERY_ROWS, device=device)[None, :] - longest
    query = torch.arange(QUERY_ROWS, device=device)[:, None]
    seen = ahead <= query
    if window is not None:
        seen &= ahead > query - window
    return _mask(seen, dtype)


def _mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """On the CPU 0 where ``seen``, else -inf: the kernel would convert a mask of bools in every layer.

    Other devices convert bools to what suits their kernels (memory that is aligned, which slices are not).
    """
    if seen.device.type != "cpu":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    ctx: AttentionBatch,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; shapes in the module's docstring."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    width = v.shape[-1]
    if width != k.shape[-1]:  # latent attention: scores do not change, what comes of the padding of values is cut off
        q, k, v = (functional.pad(x, (0, max(width, k.shape[-1]) - x.shape[-1])) for x in (q, k, v))
    keys_values = torch.stack([k, v], 1)
    write(ctx, layer, keys_values)
    out = attend(ctx, layer, q, keys_values, scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    return out[None, ..., :width], None


def write(ctx: AttentionBatch, layer: int, keys_values: torch.Tensor) -> None:
    """Put the step's keys and values [T, 2, Hkv, D] into the cache, and into the copies of rows that have one."""
    if ctx.cache is None:
        return
    if ctx.exchange is not None:
        keys_values = ctx.exchange.written(keys_values)
    if ctx.targets is not None:  # plain copies take a third of the time of indexing by tensors
        for target in ctx.targets:
            target[layer].copy_(keys_values[0])
        return
    ctx.cache.layers[layer][:, ctx.write_blocks, :, ctx.write_offsets] = keys_values
    if ctx.write_places is not None and ctx.copies is not None:
        tokens, places, positions = ctx.write_places
        chosen = keys_values if tokens is None else keys_values.index_select(0, tokens)
        ctx.copies.layers[layer][places, :, :, positions] = chosen


def attend(
    ctx: AttentionBatch,
    layer: int,
    q: torch.Tensor,
    keys_values: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, Hq, D] for queries [T, Hq, D]; the step's own keys and values [T, 2, Hkv, D] are in the cache already.

    ``window``: a query sees so many keys at most, its own included. ``softcap``, ``sinks``: see :class:`Scoring`.
    """
    if ctx.spread is not None:
        return ctx.spread.attend(layer, q, scaling=scaling, window=window, softcap=softcap, sinks=sinks)
    view, scoring = ctx.view(window), Scoring(scaling, softcap, sinks)
    if len(view.placed) == 1 and view.placed[0].tokens is None:
        return _decode_placed(q, layer, view.placed[0], scoring)
    if len(view.decodes) == 1 and view.decodes[0].tokens is None:
        return _decode(q, ctx, layer, view.decodes[0], scoring)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for placed in view.placed:
        out[placed.tokens] = _decode_placed(q[placed.tokens], layer, placed, scoring)
    for group in view.decodes:
        out[group.tokens] = _decode(q[group.tokens], ctx, layer, group, scoring)
    for row in view.prefills:
        tokens = slice(row.start, row.start + row.length)
        keys, values = keys_values[tokens].permute(1, 2, 0, 3)
        if row.gather is not None:
            assert ctx.cache is not None
            keys = _gathered(ctx.cache.keys[layer], row.gather, 1)[0, :, row.skip :]
            values = _gathered(ctx.cache.values[layer], row.gather, 1)[0, :, row.skip :]
        queries = q[tokens].transpose(0, 1)
        reached = view.window is None or row.length <= view.window
        if row.gather is None and reached and scoring.plain:
            out[tokens] = _by_kv_head(queries, keys, values, scoring, is_causal=True)
        else:
            out[tokens] = _in_pieces(queries, keys, values, row.context, view, scoring)
    return out


def _decode(q: torch.Tensor, ctx: AttentionBatch, layer: int, group: DecodeGroup, scoring: Scoring) -> torch.Tensor:
    """[B, Hq, D] for queries [B, Hq, D], one for each row of the group."""
    assert ctx.cache is not None
    rows = q.shape[0]
    keys = _gathered(ctx.cache.keys[layer], group.gather, rows)[:, :, : group.max_len]
    values = _gathered(ctx.cache.values[layer], group.gather, rows)[:, :, : group.max_len]
    return _decode_over(q, keys, values, group.mask, scoring)


def _decode_placed(q: torch.Tensor, layer: int, group: PlacedGroup, scoring: Scoring) -> torch.Tensor:
    """[B, Hq, D] for queries [B, Hq, D], one for each row of the group."""
    return _decode_over(q, group.keys[layer], group.values[layer], group.mask, scoring)


def _decode_over(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
) -> torch.Tensor:
    """[B, Hq, D] for queries [B, Hq, D] over [B, Hkv, S, D]; the query heads of a KV head are packed as query rows."""
    rows, _, dim = q.shape
    packed = q.reshape(rows, keys.shape[1], -1, dim)
    if scoring.plain:
        out = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scoring.scaling)
    else:
        sinks = None if scoring.sinks is None else scoring.sinks.view(keys.shape[1], -1, 1)
        out = _by_formula(packed, keys, values, mask, scoring, sinks)
    return out.reshape(rows, -1, dim)


def _gathered(cache: torch.Tensor, gather: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, Hkv, N x block, D] in one copy."""
    blocks, heads, size, dim = cache.shape
    return cache.view(blocks * heads, size * dim).index_select(0, gather).view(rows, heads, -1, dim)


def _in_pieces(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: int,
    view: WindowView,
    scoring: Scoring,
) -> torch.Tensor:
    """[length, Hq, D] for queries [Hq, length, D] that see ``context`` keys before them and each other."""
    length = q.shape[1]
    pieces = []
    for start in range(0, length, QUERY_ROWS):
        count = min(QUERY_ROWS, length - start)
        end = context + start + count
        first = 0 if view.window is None else max(context + start + 1 - view.window, 0)
        mask = view.piece_mask(end - count, count, q)[:, first:]
        piece = q[:, start : start + count]
        pieces.append(_by_kv_head(piece, keys[:, first:end], values[:, first:end], scoring, mask=mask))
    return torch.cat(pieces)


def _by_kv_head(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scoring: Scoring,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """[T, Hq, D] for q [Hq, T, D] over keys, values [Hkv, S, D], each KV head expanded over its query heads."""
    num_q, count, dim = q.shape
    heads, length, _ = keys.shape
    group = num_q // heads
    grouped = q.reshape(heads, group, count, dim)
    if not scoring.plain:
        sinks = None if scoring.sinks is None else scoring.sinks.view(heads, group, 1, 1)
        out = _by_formula(grouped, keys[:, None], values[:, None], mask, scoring, sinks)
        return out.reshape(num_q, count, dim).transpose(0, 1)
    keys = keys[:, None].expand(heads, group, length, dim)
    values = values[:, None].expand(heads, group, length, dim)
    out = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=is_causal, scale=scoring.scaling
    )
    return out.reshape(num_q, count, dim).transpose(0, 1)


def _by_formula(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention by matrix products, softmax in float32: with soft caps and sinks, which no fused kernel of torch has.

    ``sinks``: those of ``scoring`` in a shape that fits the scores, whose last dimension is keys.
    """
    cap = 1.0 if scoring.softcap is None else scoring.softcap
    scores = (q * (scoring.scaling / cap)) @ keys.transpose(-1, -2)
    if scoring.softcap is not None:
        scores = scores.tanh_().mul_(cap)
    if mask is not None:
        scores = scores.add_(mask) if mask.dtype != torch.bool else scores.masked_fill_(~mask, float("-inf"))
    count = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1, dtype=torch.float32)[..., :count].to(q.dtype) @ values


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Masks are made here, from lengths; transformers need not build any."""


def register() -> None:
    """Make the implementation known to transformers under :data:`NAME`. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
