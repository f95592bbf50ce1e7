"""Attention over a paged KV cache, as one function that transformers' attention modules call.

Flow of one layer (all rows of a step are packed in one sequence of T tokens)::

    q [1, Hq, T, D], k, v [1, Hkv, T, D]   after rotary embedding, from the model's attention module
      |  write: k, v of token t go to block write_blocks[t], place write_offsets[t] of this layer's cache
      |  rows with one token: gather their blocks, one SDPA over all of a group (query heads packed as query rows)
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
- Rejected: flex_attention and a C++ kernel (34 and 72 s to compile, no gain for what CPUs are for here); a
  [blocks, block, Hkv, D] layout (index_select of whole ``block x D`` pieces gives [B, Hkv, S, D] in one copy only with
  heads outside).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "drumline"
"""Name of this attention implementation in transformers."""

QUERY_ROWS = 256
"""Queries of one piece of a prefill over earlier context."""

MAX_GATHER_BYTES = 64 << 20
"""Most bytes of keys that a group of decode rows gathers at once."""

Ints = npt.NDArray[np.int32]


class KVCache:
    """Keys and values of this rank's layers: ``data[layer, 0 or 1]`` is [blocks, Hkv, block, D].

    On the CPU it is private anonymous memory without huge pages: blocks that were never used cost nothing.
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
    ) -> None:
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.data = (
            _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        )
        self.keys = [layer[0] for layer in self.data]
        self.values = [layer[1] for layer in self.data]

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero newly given blocks: masked places are added to and multiplied too, so no inf or NaN may stay there."""
        self.data.index_fill_(2, blocks, 0)


def _lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize).view(shape)


@dataclass(frozen=True)
class DecodeGroup:
    """Rows with one query each, of similar length."""

    tokens: torch.Tensor
    """[B] places in the packed sequence."""
    gather: torch.Tensor
    """[B x Hkv x N] rows of the cache seen as [blocks x Hkv, block x D]."""
    max_len: int
    """Longest context in tokens, its own token included."""
    mask: torch.Tensor | None
    """[B, 1, 1, max_len] True where there is context; None if all are as long as the longest."""


@dataclass(frozen=True)
class PrefillRow:
    """A row with several queries."""

    start: int
    """Place of its first token in the packed sequence."""
    length: int
    """Number of its tokens in this step."""
    context: int
    """Number of its tokens before this step."""
    gather: torch.Tensor | None
    """[Hkv x N] rows of the cache; None if there is no context."""


@dataclass
class AttentionBatch:
    """Where a step's tokens are, on the model's device. Made once a step, used by every layer."""

    cache: KVCache | None
    """None: nothing is written (a dummy batch)."""
    write_blocks: torch.Tensor | None = None
    """[T] block of each token."""
    write_offsets: torch.Tensor | None = None
    """[T] place in that block."""
    decodes: list[DecodeGroup] = field(default_factory=list)
    prefills: list[PrefillRow] = field(default_factory=list)
    causal: torch.Tensor | None = None
    """[QUERY_ROWS, longest + QUERY_ROWS]: slices of it are the masks of all prefill pieces (:func:`_piece_mask`)."""


def make_batch(
    cache: KVCache,
    tables: Ints,
    num_computed: Ints,
    num_tokens: Ints,
    num_kv_heads: int,
    device: torch.device,
) -> AttentionBatch:
    """The attention side of a step. ``tables`` [B, N] block ids; the tokens of row b begin at ``num_computed[b]``."""
    size = cache.block_size
    starts = np.cumsum(num_tokens) - num_tokens
    rows = np.repeat(np.arange(len(num_tokens)), num_tokens)
    positions = np.arange(len(rows)) - starts[rows] + num_computed[rows]
    batch = AttentionBatch(
        cache=cache,
        write_blocks=_tensor(tables[rows, positions // size], device),
        write_offsets=_tensor(positions % size, device),
    )
    lengths = num_computed + num_tokens
    block_bytes = num_kv_heads * cache.data[0, 0, 0, 0].nbytes
    for group in _group_by_length(np.flatnonzero(num_tokens == 1), -(-lengths // size), block_bytes):
        batch.decodes.append(_decode_group(group, starts, tables, lengths, size, num_kv_heads, device))
    for row in np.flatnonzero(num_tokens > 1):
        context = int(num_computed[row])
        blocks = tables[row : row + 1, : -(-int(lengths[row]) // size)]
        gather = _gather_rows(blocks, num_kv_heads, device) if context else None
        batch.prefills.append(PrefillRow(int(starts[row]), int(num_tokens[row]), context, gather))
    longest = max((row.context + row.length for row in batch.prefills if row.context), default=0)
    if longest:
        width = longest + QUERY_ROWS
        ahead = torch.arange(width, device=device) - longest
        batch.causal = ahead[None, :] <= torch.arange(QUERY_ROWS, device=device)[:, None]
    return batch


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


def _decode_group(
    rows: npt.NDArray[np.int64],
    starts: npt.NDArray[Any],
    tables: Ints,
    lengths: Ints,
    block_size: int,
    num_kv_heads: int,
    device: torch.device,
) -> DecodeGroup:
    lens = lengths[rows]
    longest = int(lens.max())
    blocks = tables[rows, : -(-longest // block_size)]
    used = -(-lens // block_size)
    blocks = np.where(np.arange(blocks.shape[1]) < used[:, None], blocks, blocks[:, :1])
    mask = None
    if int(lens.min()) != longest:
        mask = torch.from_numpy(np.arange(longest) < lens[:, None])[:, None, None, :].to(device)
    return DecodeGroup(_tensor(starts[rows], device), _gather_rows(blocks, num_kv_heads, device), longest, mask)


def dummy_batch(num_tokens: int) -> AttentionBatch:
    """One row of new tokens that touches no cache."""
    return AttentionBatch(cache=None, prefills=[PrefillRow(0, num_tokens, 0, None)])


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    ctx: AttentionBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls; shapes in the module's docstring."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q = query[0].transpose(0, 1)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if ctx.cache is not None:
        places = (ctx.write_blocks, slice(None), ctx.write_offsets)
        ctx.cache.keys[layer][places] = key[0].transpose(0, 1)
        ctx.cache.values[layer][places] = value[0].transpose(0, 1)
        for group in ctx.decodes:
            out[group.tokens] = _decode(q[group.tokens], ctx.cache, layer, group, scaling)
    for row in ctx.prefills:
        tokens = slice(row.start, row.start + row.length)
        if row.context:
            out[tokens] = _prefill_after_context(query[0, :, tokens], ctx, layer, row, scaling)
        else:
            keys, values = key[0, :, tokens], value[0, :, tokens]
            out[tokens] = _by_kv_head(query[0, :, tokens], keys, values, scaling, is_causal=True)
    return out[None], None


def _decode(q: torch.Tensor, cache: KVCache, layer: int, group: DecodeGroup, scaling: float) -> torch.Tensor:
    """[B, Hq, D] queries, one for each row of the group."""
    rows, _, dim = q.shape
    heads = cache.keys[layer].shape[1]
    keys = _gathered(cache.keys[layer], group.gather, rows)[:, :, : group.max_len]
    values = _gathered(cache.values[layer], group.gather, rows)[:, :, : group.max_len]
    packed = q.reshape(rows, heads, -1, dim)
    out = functional.scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scaling)
    return out.reshape(rows, -1, dim)


def _gathered(cache: torch.Tensor, gather: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, Hkv, N x block, D] in one copy."""
    blocks, heads, size, dim = cache.shape
    return cache.view(blocks * heads, size * dim).index_select(0, gather).view(rows, heads, -1, dim)


def _prefill_after_context(
    q: torch.Tensor, ctx: AttentionBatch, layer: int, row: PrefillRow, scaling: float
) -> torch.Tensor:
    """[length, Hq, D] for queries [Hq, length, D] that see the context in the cache and each other."""
    assert ctx.cache is not None
    assert row.gather is not None
    assert ctx.causal is not None
    keys = _gathered(ctx.cache.keys[layer], row.gather, 1)[0]
    values = _gathered(ctx.cache.values[layer], row.gather, 1)[0]
    pieces = []
    for first in range(0, row.length, QUERY_ROWS):
        count = min(QUERY_ROWS, row.length - first)
        before = row.context + first
        seen = before + count
        mask = _piece_mask(ctx.causal, before, count)
        piece = q[:, first : first + count]
        pieces.append(_by_kv_head(piece, keys[:, :seen], values[:, :seen], scaling, mask=mask))
    return torch.cat(pieces)


def _piece_mask(causal: torch.Tensor, before: int, count: int) -> torch.Tensor:
    """[count, before + count] mask of a piece with ``before`` keys ahead of its first query.

    Query i sees keys 0 .. before + i; column c of ``causal`` stands for key c - longest + before.
    """
    longest = causal.shape[1] - QUERY_ROWS
    return causal[:count, longest - before : longest + count]


def _by_kv_head(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """[T, Hq, D] for q [Hq, T, D] over keys, values [Hkv, S, D], each KV head expanded over its query heads."""
    num_q, count, dim = q.shape
    heads, length, _ = keys.shape
    group = num_q // heads
    grouped = q.reshape(heads, group, count, dim)
    keys = keys[:, None].expand(heads, group, length, dim)
    values = values[:, None].expand(heads, group, length, dim)
    out = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling
    )
    return out.reshape(num_q, count, dim).transpose(0, 1)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Masks are made here, from lengths; transformers need not build any."""


def register() -> None:
    """Make the implementation known to transformers under :data:`NAME`. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
