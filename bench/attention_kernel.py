"""Time of the compiled attention on this machine, all layers of a step, without a model.

    OMP_NUM_THREADS=1 python bench/attention_kernel.py [--decode 1x200 32x200] [--prompts 128 1024] [--models tiny]

Decoding rows come from memory as in a real step: several sets of rows take turns, so that none finds its keys in the
second cache. Blocks are shuffled. Prints the best of many calls, GB/s of keys and values (decoding) or GFLOPS (prompts,
counting what a causal mask leaves), and torch's SDPA over contiguous keys of the same rows, all rows of a layer in one
call (prompts: one call for each prompt).
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from drumline.model.kernels.attention import attend, scratch_floats
from drumline.model.kernels.jit import kernel

MODELS = {"tiny": (4, 4, 2, 32), "default": (30, 3, 3, 64)}
"""Layers, KV heads, query heads of each, head dimension."""
BLOCK = 16
COLD_BYTES = 24 << 20
"""Keys and values that are read before the same ones are read again."""


@kernel
def layers(
    number: int, layer_bytes: int, q: int, q_stride: int, rows: int, first: int, count: int, computed: int,
    tables: int, table_stride: int, cache: int, kv_heads: int, group: int, dim: int, out: int, scratch: int,
) -> None:  # fmt: skip
    for layer in range(number):
        keys = cache + 2 * layer * layer_bytes
        attend(
            q, q_stride, rows, first, count, computed, tables, table_stride, keys, keys + layer_bytes, BLOCK, kv_heads,
            group, dim, dim**-0.5, 0, 0.0, out, q_stride, scratch,
        )  # fmt: skip


def best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the quickest call."""
    call()
    times, ends = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < ends:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(model: str, rows: int, tokens: int, new: int, seconds: float) -> None:
    number, kv_heads, group, dim = MODELS[model]
    width = -(-tokens // BLOCK)
    row_bytes = 2 * number * rows * width * BLOCK * kv_heads * dim * 4
    sets = max(1, -(-COLD_BYTES // row_bytes)) if new == 1 else 1
    num_blocks = sets * rows * width
    layer_bytes = num_blocks * BLOCK * kv_heads * dim * 4
    memory = mmap.mmap(-1, 2 * number * layer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    cache = np.frombuffer(memory, dtype=np.float32)
    rng = np.random.default_rng(0)
    cache[:] = rng.standard_normal(1 << 16, dtype=np.float32).repeat(-(-len(cache) >> 16))[: len(cache)]
    tables = rng.permutation(num_blocks).astype(np.int32).reshape(sets, rows, width)
    heads = kv_heads * group
    q = rng.standard_normal((rows * new, heads * dim), dtype=np.float32)
    out = np.empty_like(q)
    first = np.arange(rows, dtype=np.int64) * new
    count, computed = np.full(rows, new), np.full(rows, tokens - new)
    scratch = np.empty(scratch_floats(kv_heads, group, dim), dtype=np.float32)
    turns = cycle([table.ctypes.data for table in tables])

    before = number, layer_bytes, q.ctypes.data, heads * dim, rows, *(x.ctypes.data for x in (first, count, computed))
    after = width, cache.ctypes.data, kv_heads, group, dim, out.ctypes.data, scratch.ctypes.data

    def ours() -> None:
        layers(*before, next(turns), *after)

    contiguous = torch.from_numpy(cache)[: sets * 2 * number * rows * kv_heads * tokens * dim]
    kept = cycle(contiguous.view(sets, number, 2, rows, kv_heads, tokens, dim).unbind())
    packed = torch.randn(rows, kv_heads, group * new, dim) if new == 1 else torch.randn(kv_heads, group, new, dim)

    def torchs() -> None:
        for keys, values in next(kept):
            if new == 1:
                scaled_dot_product_attention(packed, keys, values)
            else:
                keys, values = (x[0, :, None].expand(kv_heads, group, tokens, dim) for x in (keys, values))
                scaled_dot_product_attention(packed, keys, values, is_causal=True)

    mine, theirs = best(ours, seconds), best(torchs, seconds)
    if new == 1:
        speed = f"{2 * number * rows * tokens * kv_heads * dim * 4 / mine / 1e9:6.1f} GB/s"
    else:
        speed = f"{2 * number * heads * dim * tokens * (tokens + 1) / mine / 1e9:6.1f} GFLOPS"
    print(
        f"{model:8} {rows:3} x {tokens:5}, {new:5} new: {1e6 * mine:9.0f} us {speed}, SDPA {1e6 * theirs:9.0f} us",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", nargs="*", default=["1x200", "8x200", "32x200", "1x4096"])
    parser.add_argument("--prompts", nargs="*", type=int, default=[128, 256, 1024, 8192])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for model in options.models:
        for case in options.decode:
            rows, tokens = map(int, case.split("x"))
            measure(model, rows, tokens, 1, options.seconds)
        for tokens in options.prompts:
            measure(model, 1, tokens, tokens, options.seconds)


if __name__ == "__main__":
    main()
