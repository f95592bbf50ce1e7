"""Attention of a step's rows over the paged cache of one layer, as one compiled function.

Keys and values stay where they are: [blocks, Hkv, block, D], the layout of ``attention.KVCache``.
"""

from __future__ import annotations

import math

from drumline.model.kernels.jit import floats, inlined, int32s, int64s

PIECE = 256
"""Keys whose scores are held at once."""


def scratch_floats(kv_heads: int, group: int, dim: int) -> int:
    """Scratch that :func:`attend` needs, whatever the rows are, in floats."""
    return kv_heads * group * (PIECE + dim + 2)


@inlined
def attend(
    q,
    q_stride,
    num_rows,
    first,
    count,
    computed,
    tables,
    table_stride,
    keys,
    values,
    block,
    kv_heads,
    group,
    dim,
    scaling,
    window,
    softcap,
    out,
    out_stride,
    scratch,
):
    """Query i of row b sees its keys up to ``computed[b] + i``, the last ``window`` of them if that is not 0."""
    scores = floats(scratch)
    for row in range(num_rows):
        start, context = int64s(first)[row], int64s(computed)[row]
        table = int32s(tables + 4 * row * table_stride)
        for i in range(int64s(count)[row]):
            end = context + i + 1
            begin = max(end - window, 0) if window > 0 else 0
            for head in range(kv_heads * group):
                query = floats(q + 4 * ((start + i) * q_stride + head * dim))
                result = floats(out + 4 * ((start + i) * out_stride + head * dim))
                for d in range(dim):
                    result[d] = 0
                largest, total = -math.inf, 0.0
                for low in range(begin, end, PIECE):
                    high = min(low + PIECE, end)
                    before = largest
                    for place in range(low, high):
                        at = (table[place // block] * kv_heads + head // group) * block
                        key = floats(keys + 4 * (at + place % block) * dim)
                        dot = 0.0
                        for d in range(dim):
                            dot += query[d] * key[d]
                        dot *= scaling
                        if softcap > 0:
                            dot = math.tanh(dot / softcap) * softcap
                        scores[place - low] = dot
                        largest = max(largest, dot)
                    scale = math.exp(before - largest)
                    total *= scale
                    for d in range(dim):
                        result[d] *= scale
                    for place in range(low, high):
                        weight = math.exp(scores[place - low] - largest)
                        total += weight
                        at = (table[place // block] * kv_heads + head // group) * block
                        value = floats(values + 4 * (at + place % block) * dim)
                        for d in range(dim):
                            result[d] += weight * value[d]
                for d in range(dim):
                    result[d] /= total
