"""Matrix products ``out = x w^T`` of one thread, for any number of rows: weights in panels, a register tile per panel.

A panel is :data:`PANEL` output columns, stored ``[K, PANEL]``: a product reads the weights once and in the order in
which they lie in memory, and holds a tile of up to :data:`TILE` rows times one panel in registers over the whole of K.
Weights that fit bfloat16 or float16 exactly are stored so and widened in registers; arithmetic is float32 always. Where
the processor has a matrix unit, products of some rows with bfloat16 weights are that unit's (``amx``).

What it rests on, measured on one core (peak 190 GFLOPS, 31 GB/s from the last cache, 16 GB/s from memory):

- The tile is written as LLVM vectors: LLVM's own vectoriser takes half of AVX-512's registers here. Each number of rows
  has its own code, whose rows are addressed by three offsets that LLVM cannot see through; it otherwise keeps a pointer
  a row, spills, and loses half the speed at 12 rows.
- Weights are fetched ahead by :data:`amx.AHEAD` bytes, all lines: 20 us instead of 30 for 512 x 256 and 12 rows, since
  the processor's own guess ends at each page. Where several tiles share a panel, each fetches its part of the next one.
- x is packed tile by tile, so that a tile reads one stream. Large x passes in blocks (80 GFLOPS instead of 150
  otherwise at K = 8192).
- Huge pages: a tenth of the time of one row.

Beside the best of torch and FBGEMM: 0.65 to 0.95 of the time for one row, 0.3 to 0.6 for 8, 0.25 to 0.5 for 32, 0.85
for 256 (0.3 by the matrix unit); ``bench/products.py``.

Rejected: fetching into the first cache, 1, 2, 4 or 16 KiB ahead, or every second line (none faster from the last cache,
up to a quarter slower from memory); bfloat16 columns in pairs instead of inputs (as fast, but not the unit's order).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch.nn import functional

from drumline.model.kernels import amx
from drumline.model.kernels.jit import floats, inlined, int32s, kernel

_FEATURES = llvmlite.binding.get_host_cpu_features()
_WIDE = bool(_FEATURES.get("avx512f"))

LANES = 16 if _WIDE else 8 if _FEATURES.get("avx") else 4
"""Floats in a register."""
HALVES = bool(_FEATURES.get("f16c")) or platform.machine() not in ("x86_64", "AMD64")
"""Whether float16 is widened by the processor."""
PANEL = 2 * LANES
"""Columns of a panel."""
TILE = 12 if _WIDE or LANES == 4 else 6
"""Most rows of a tile: two accumulators a row leave a few of the 32 (or 16) registers for what is multiplied."""
CHUNK = 4
"""Unrolled steps along K; rows are packed in chunks of as many."""

FLOAT32, BFLOAT16, FLOAT16, MATRIX_UNIT = 0, 1, 2, 3
"""How weights are stored; bfloat16 where this process may use the matrix unit for them (see ``amx``)."""

UNIT_ROWS = 8
"""From so many rows the matrix unit is faster."""
MOST_ROWS = {FLOAT32: TILE, BFLOAT16: UNIT_ROWS - 1 if amx.COMPILED else TILE, FLOAT16: 4}
"""Of a tile by storage. More rows than are worth code of their own have their panel widened first."""
BLOCK_ROWS, BLOCK_INPUTS = 20 * TILE, 1024
"""Of x that passes all panels before the next block: it, a panel and the next panel stay in the second cache."""
WIDEN_ROWS = {kind: 3 * TILE if most == TILE else most for kind, most in MOST_ROWS.items()}
WIDEN_BFLOAT16, WIDEN_FLOAT16 = WIDEN_ROWS[BFLOAT16], WIDEN_ROWS[FLOAT16]
"""With more rows a panel is widened once, not in each tile."""
UNIT_BLOCK_ROWS = 128
CHUNK_BYTES = 32 << 20
"""Of memory that weights are put into."""

PIECE = 1 << 18
"""Elements that are looked at together, so that they stay in the cache."""


class Panels:
    """Weights [N, K] as panels [ceil(N / PANEL), K, PANEL]; columns after the last are zero.

    16-bit numbers are stored in pairs, [ceil(N / PANEL), K / 2, PANEL, 2]: one shift or one mask widens each, and it is
    the order of the matrix unit. K is filled up to whole tiles of that with zeros.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        weight = weight.detach()
        self.features, self.inputs = weight.shape
        dtype = _storage(weight)
        self.kind = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}[dtype]
        if self.kind == BFLOAT16 and amx.allowed():
            self.kind = MATRIX_UNIT
        words = self.inputs if self.kind == FLOAT32 else _padded_inputs(self.inputs) // 2
        count = -(-self.features // PANEL)
        self._memory = _memory(4 * count * words * PANEL)
        self.address = self._memory.ctypes.data
        self.nbytes = self._memory.nbytes
        at_once = max(1, PIECE // max(1, PANEL * self.inputs))
        for first in range(0, count, at_once):
            rows = weight[first * PANEL : (first + at_once) * PANEL].to(dtype)
            if self.kind != FLOAT32:
                rows = functional.pad(rows, (0, 2 * words - self.inputs))
            rows = rows.contiguous()
            _lay_out(rows.data_ptr(), len(rows), words, self.address + 4 * first * PANEL * words)


_chunk = np.empty(0, np.uint8)


def _memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Part of a large piece of memory: numpy asks for huge pages there, which spare a tenth of reading weights."""
    global _chunk
    needed = -(-nbytes // 64) * 64
    if len(_chunk) < needed:
        _chunk = np.empty(max(CHUNK_BYTES, needed + 64), np.uint8)
        _chunk = _chunk[-_chunk.ctypes.data % 64 :]
    part, _chunk = _chunk[:nbytes], _chunk[needed:]
    return part


def _storage(weight: torch.Tensor) -> torch.dtype:
    """The narrowest type that loses nothing."""
    if weight.dtype == torch.bfloat16 or (weight.dtype == torch.float16 and HALVES):
        return weight.dtype
    if weight.dtype != torch.float32:
        return torch.float32
    if not any(np.bitwise_or.reduce(piece.view(torch.int32).numpy(), axis=None) & 0xFFFF for piece in _pieces(weight)):
        return torch.bfloat16
    if HALVES and all(torch.equal(piece.half().float(), piece) for piece in _pieces(weight)):
        return torch.float16
    return torch.float32


def _pieces(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    rows = max(1, PIECE // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows):
        yield weight[start : start + rows]


@kernel
def _lay_out(weight: int, rows: int, words: int, panels: int) -> None:
    """Rows of a matrix as panels: a few words at a time, so that what is written stays in the first cache."""
    for first in range(0, rows, PANEL):
        to = int32s(panels + 4 * first * words)
        for start in range(0, words, 16):
            end = min(start + 16, words)
            for column in range(PANEL):
                row = first + column
                source = int32s(weight + 4 * min(row, rows - 1) * words)
                mask = np.int32(-1 if row < rows else 0)
                for k in range(start, end):
                    to[k * PANEL + column] = source[k] & mask


def _padded_inputs(inputs: int) -> int:
    return (inputs + 31) // 32 * 32


_padded = inlined(_padded_inputs)


_I32, _I64, _POINTER = ir.IntType(32), ir.IntType(64), ir.PointerType()
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_ITEMSIZE = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}


def _ahead(builder: ir.IRBuilder, address: ir.Value, offset: ir.Value | int) -> ir.Value:
    """An address so many bytes further."""
    offset = _I64(offset) if isinstance(offset, int) else offset
    return builder.gep(address, [offset], source_etype=ir.IntType(8))


def _opaque(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The value, in a register of its own."""
    return builder.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)


def _load(builder: ir.IRBuilder, address: ir.Value, kind: int, steps: int) -> list[list[ir.Value]]:
    """The two vectors of each of a panel's next rows."""
    if kind == FLOAT32:
        places = [[_ahead(builder, address, (2 * step + half) * LANES * 4) for half in (0, 1)] for step in range(steps)]
        return [[builder.load(place, align=4, typ=_VECTOR) for place in row] for row in places]
    rows = []
    words = ir.VectorType(_I32, LANES)
    for pair in range(-(-steps // 2)):
        places = [_ahead(builder, address, (2 * pair + half) * LANES * 4) for half in (0, 1)]
        pairs = [builder.load(place, align=4, typ=words) for place in places]
        rows.append([_widened(builder, value, kind, 0) for value in pairs])
        if 2 * pair + 1 < steps:
            rows.append([_widened(builder, value, kind, 1) for value in pairs])
    return rows


def _widened(builder: ir.IRBuilder, pairs: ir.Value, kind: int, place: int) -> ir.Value:
    """The low or high halves as float32."""
    bits = ir.Constant(pairs.type, [16] * LANES)
    if kind == BFLOAT16:
        mask = ir.Constant(pairs.type, [0xFFFF0000] * LANES)
        return builder.bitcast(builder.and_(pairs, mask) if place else builder.shl(pairs, bits), _VECTOR)
    if not HALVES:
        return ir.Constant(_VECTOR, ir.Undefined)
    short = builder.trunc(builder.lshr(pairs, bits) if place else pairs, ir.VectorType(ir.IntType(16), LANES))
    return builder.fpext(builder.bitcast(short, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)


def _bit(builder: ir.IRBuilder, value: ir.Value, number: int) -> ir.Value:
    return builder.and_(builder.ashr(value, _I64(number)), _I64(1))


def _spread(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """One float in all lanes."""
    empty = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(empty, builder.load(address, align=4, typ=ir.FloatType()), _I32(0))
    return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _tile_function(module: ir.Module, kind: int, rows: int) -> ir.Function:
    """Code for so many rows, strides in bytes:
    (x, row stride, chunk stride, panel, K, out, out stride, mode, fetched ahead, its stride)."""
    name = f"drumline_tile_{kind}_{rows}"
    if name in module.globals:
        return module.globals[name]
    parameters = [_POINTER, _I64, _I64, _POINTER, _I64, _POINTER, _I64, _I64, _POINTER, _I64]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    x, x_stride, chunk_stride, panel, inputs, out, out_stride, mode, ahead, ahead_stride = function.args
    fmuladd = cgutils.get_or_insert_function(
        module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    row_bytes = PANEL * _ITEMSIZE[kind]
    # An instruction's result is awaited for 4 cycles, in which 8 can start: few rows take turns between several sums.
    sets = -(-8 // (2 * rows)) if rows < 4 else 1
    # Rows by few registers: a base each four rows, and three offsets that the compiler cannot take apart.
    offsets = [_I64(0), *[_opaque(builder, builder.mul(x_stride, _I64(i))) for i in (1, 2, 3)]]
    bases = [x]
    while 4 * len(bases) < rows:
        bases.append(_ahead(builder, bases[-1], _opaque(builder, builder.mul(x_stride, _I64(4)))))

    def loop(
        count: ir.Value, places: list[ir.Value], strides: list[ir.Value], sums: list[ir.Value], steps: int
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        before = builder.block
        body, after = function.append_basic_block("loop"), function.append_basic_block("after")
        builder.cbranch(builder.icmp_signed(">", count, _I64(0)), body, after)
        builder.position_at_end(body)
        start = [count, *places, *sums]
        now = [builder.phi(value.type) for value in start]
        left, places_now, new = now[0], now[1 : 1 + len(places)], now[1 + len(places) :]
        panel, ahead, *bases = places_now
        for step, weights in enumerate(_load(builder, panel, kind, steps)):
            base = (step % sets) * rows * 2
            if steps == CHUNK:
                for line in range(0, row_bytes, 64):
                    amx.prefetch(builder, _ahead(builder, ahead, step * row_bytes + line))
            for row in range(rows):
                address = _ahead(builder, bases[row // 4], offsets[row % 4])
                value = _spread(builder, _ahead(builder, address, 4 * step))
                for half in (0, 1):
                    index = base + row * 2 + half
                    new[index] = builder.call(fmuladd, [value, weights[half], new[index]])
        following = [
            builder.sub(left, _I64(1)),
            *[_ahead(builder, place, stride) for place, stride in zip(places_now, strides, strict=True)],
            *new,
        ]
        builder.cbranch(builder.icmp_signed(">", following[0], _I64(0)), body, after)
        for phi, first, later in zip(now, start, following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, body)
        builder.position_at_end(after)
        ends = [builder.phi(value.type) for value in start]
        for phi, first, later in zip(ends, start, following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, body)
        return ends[1 : 1 + len(places)], ends[1 + len(places) :]

    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    chunks = builder.ashr(inputs, _I64(2))
    sums = [zero] * (2 * rows * sets)
    places = [panel, ahead, *bases]
    strides = [_I64(CHUNK * row_bytes), ahead_stride, *[chunk_stride] * len(bases)]
    places, sums = loop(chunks, places, strides, sums, CHUNK)
    for steps in (1,) if kind == FLOAT32 else (2, 1):
        strides = [_I64(steps * row_bytes), _I64(0), *[_I64(4 * steps)] * len(bases)]
        count = builder.and_(inputs, _I64(3)) if kind == FLOAT32 else _bit(builder, inputs, steps - 1)
        places, sums = loop(count, places, strides, sums, steps)
    while len(sums) > 2 * rows:
        half = len(sums) // 2
        sums = [builder.fadd(a, b) for a, b in zip(sums[:half], sums[half:], strict=True)]
    plain, more = function.append_basic_block("plain"), function.append_basic_block("more")
    builder.cbranch(builder.icmp_signed("==", mode, _I64(0)), plain, more)
    for block, adds in ((plain, False), (more, True)):
        builder.position_at_end(block)
        to = out
        for row in range(rows):
            for half in (0, 1):
                address = _ahead(builder, to, half * LANES * 4)
                value = sums[2 * row + half]
                if adds:
                    value = builder.fadd(value, builder.load(address, align=4, typ=_VECTOR))
                builder.store(value, address, align=4)
            to = _ahead(builder, to, out_stride)
        builder.ret_void()
    return function


def _tiles(kind: int) -> Any:
    def tiles(
        typingctx: Any,
        rows: Any,
        x: Any,
        x_stride: Any,
        chunk_stride: Any,
        panel: Any,
        inputs: Any,
        out: Any,
        out_stride: Any,
        mode: Any,
        ahead: Any,
        ahead_stride: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows, x, x_stride, chunk_stride, panel, inputs, out, out_stride, mode, ahead, ahead_stride = args
            call = [
                builder.inttoptr(x, _POINTER),
                builder.mul(x_stride, _I64(4)),
                builder.mul(chunk_stride, _I64(4)),
                builder.inttoptr(panel, _POINTER),
                inputs,
                builder.inttoptr(out, _POINTER),
                builder.mul(out_stride, _I64(4)),
                mode,
                builder.inttoptr(ahead, _POINTER),
                ahead_stride,
            ]
            end = builder.append_basic_block("end")
            switch = builder.switch(rows, end)
            for count in range(1, MOST_ROWS[kind] + 1):
                block = builder.append_basic_block(f"rows{count}")
                switch.add_case(count, block)
                builder.position_at_end(block)
                builder.call(_tile_function(builder.module, kind, count), call)
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    tiles.__name__ = tiles.__qualname__ = f"tiles_{kind}"
    return intrinsic(tiles)


_tiles_32 = _tiles(FLOAT32)
_tiles_b16 = _tiles(BFLOAT16)
_tiles_h16 = _tiles(FLOAT16)


def _widening(kind: int) -> Any:
    def widen(typingctx: Any, panel: Any, inputs: Any, to: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            panel, inputs, to = args
            panel, to = builder.inttoptr(panel, _POINTER), builder.inttoptr(to, _POINTER)
            with cgutils.for_range(builder, builder.ashr(builder.add(inputs, _I64(1)), _I64(1))) as loop:
                source = _ahead(builder, panel, builder.mul(loop.index, _I64(PANEL * 4)))
                target = _ahead(builder, to, builder.mul(loop.index, _I64(PANEL * 8)))
                for step, row in enumerate(_load(builder, source, kind, 2)):
                    for half, value in enumerate(row):
                        builder.store(value, _ahead(builder, target, (2 * step + half) * LANES * 4), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    widen.__name__ = widen.__qualname__ = f"widen_{kind}"
    return intrinsic(widen)


_widen_b16 = _widening(BFLOAT16)
_widen_h16 = _widening(FLOAT16)


@inlined
def tile(x: int, x_stride: int, rows: int, panel: int, inputs: int, out: int, out_stride: int, mode: int) -> None:
    """out[r, c] (=, or += in mode 1) the sum over k of x[r, k] * panel[k, c], for all c < PANEL; the panel is float32.

    Any number of rows, with any stride, contiguous in k.
    """
    tiles = (rows + TILE - 1) // TILE
    first = 0
    for number in range(tiles):
        count = rows // tiles + (1 if number < rows % tiles else 0)
        source, to = x + 4 * first * x_stride, out + 4 * first * out_stride
        _tiles_32(count, source, x_stride, CHUNK, panel, inputs, to, out_stride, mode, panel, 0)
        first += count


def scratch_floats(rows: int, inputs: int) -> int:
    """Floats that :func:`product` may write to in ``scratch``."""
    packed = min(rows, BLOCK_ROWS) * min(inputs + CHUNK, BLOCK_INPUTS) if rows > TILE else rows * (inputs + CHUNK)
    needed = packed + min(inputs + 1, BLOCK_INPUTS) * PANEL + TILE * PANEL + 32
    return max(needed, amx.scratch_floats(min(rows, UNIT_BLOCK_ROWS), min(inputs, BLOCK_INPUTS)))


@inlined
def _pack(x: int, x_stride: int, rows: int, inputs: int, to: int) -> None:
    """Rows of a tile as chunks [ceil(K / CHUNK), rows, CHUNK]: a tile reads one stream."""
    whole = inputs // CHUNK
    for row in range(rows):
        source = floats(x + 4 * row * x_stride)
        place = floats(to + 4 * row * CHUNK)
        for chunk in range(whole):
            a, b = source[chunk * CHUNK], source[chunk * CHUNK + 1]
            c, d = source[chunk * CHUNK + 2], source[chunk * CHUNK + 3]
            at = chunk * CHUNK * rows
            place[at], place[at + 1], place[at + 2], place[at + 3] = a, b, c, d
        for k in range(whole * CHUNK, inputs):
            place[whole * CHUNK * rows + k - whole * CHUNK] = source[k]


@inlined
def _block(
    x: int,
    x_stride: int,
    rows: int,
    panels: int,
    panel_bytes: int,
    kind: int,
    widens: bool,
    features: int,
    inputs: int,
    out: int,
    out_stride: int,
    mode: int,
    rest: int,
    widened: int,
    packed: int,
) -> None:
    """A product of which x fits the second cache; panels are ``panel_bytes`` apart."""
    padded = (inputs + CHUNK - 1) // CHUNK * CHUNK
    tiles = (rows + TILE - 1) // TILE
    each, more = rows // tiles, rows % tiles
    row_stride, packs = x_stride, rows > 2
    if packs:
        row_stride = CHUNK
        first = 0
        for number in range(tiles):
            height = each + (1 if number < more else 0)
            _pack(x + 4 * first * x_stride, x_stride, height, inputs, packed + 4 * first * padded)
            first += height
        x = packed
    for column in range(0, features, PANEL):
        panel = panels + column // PANEL * panel_bytes
        partial = column + PANEL > features
        # Cold weights: one tile fetches ahead in its own panel, several share the next panel among them.
        ahead, ahead_stride = panel + amx.AHEAD, CHUNK * PANEL * (4 if kind == FLOAT32 else 2)
        if tiles > 1:
            ahead = panel + panel_bytes
            ahead_stride = (ahead_stride // tiles + 63) // 64 * 64
        if widens:
            if kind == BFLOAT16:
                _widen_b16(panel, inputs, widened)
            else:
                _widen_h16(panel, inputs, widened)
            panel = widened
        first = 0
        for number in range(tiles):
            height = each + (1 if number < more else 0)
            chunk_stride = CHUNK * height if packs else CHUNK
            source = x + 4 * first * padded
            to = out + 4 * (first * out_stride + column)
            to_stride, adds = out_stride, mode
            if partial:
                to, to_stride, adds = rest, PANEL, 0
            if kind == FLOAT32 or widens:
                _tiles_32(
                    height, source, row_stride, chunk_stride, panel, inputs, to, to_stride, adds, ahead, ahead_stride
                )
            elif kind == BFLOAT16:
                _tiles_b16(
                    height, source, row_stride, chunk_stride, panel, inputs, to, to_stride, adds, ahead, ahead_stride
                )
            else:
                _tiles_h16(
                    height, source, row_stride, chunk_stride, panel, inputs, to, to_stride, adds, ahead, ahead_stride
                )
            if partial:
                for row in range(height):
                    target = floats(out + 4 * ((first + row) * out_stride + column))
                    for c in range(features - column):
                        value = floats(rest)[row * PANEL + c]
                        target[c] = target[c] + value if mode == 1 else value
            first += height
            ahead += ahead_stride * (inputs // CHUNK)


@inlined
def product(
    x: int,
    x_stride: int,
    rows: int,
    panels: int,
    kind: int,
    features: int,
    inputs: int,
    out: int,
    out_stride: int,
    mode: int,
    scratch: int,
) -> None:
    """out[r, n] (=, or += in mode 1) the sum over k of x[r, k] * w[n, k]; ``scratch``: :func:`scratch_floats`."""
    itemsize = 4 if kind == FLOAT32 else 2
    size = PANEL * itemsize * (inputs if kind == FLOAT32 else _padded(inputs))
    if kind == MATRIX_UNIT:
        if rows >= UNIT_ROWS:
            for start in range(0, rows, UNIT_BLOCK_ROWS):
                for k in range(0, inputs, BLOCK_INPUTS):
                    amx.block(
                        x + 4 * (start * x_stride + k),
                        x_stride,
                        min(rows - start, UNIT_BLOCK_ROWS),
                        panels + k * PANEL * itemsize,
                        size,
                        features,
                        min(inputs - k, BLOCK_INPUTS),
                        out + 4 * start * out_stride,
                        out_stride,
                        mode if k == 0 else 1,
                        scratch,
                    )
            return
        kind = BFLOAT16
    widens = (kind == BFLOAT16 and rows > WIDEN_BFLOAT16) or (kind == FLOAT16 and rows > WIDEN_FLOAT16)
    deep = inputs if rows <= TILE and not widens else min(inputs, BLOCK_INPUTS)
    at_once = min(rows, BLOCK_ROWS)
    rest = scratch
    widened = rest + 4 * TILE * PANEL
    packed = widened + 4 * min(inputs + 1, BLOCK_INPUTS) * PANEL
    for start in range(0, rows, at_once):
        count = min(rows - start, at_once)
        for k in range(0, inputs, deep):
            _block(
                x + 4 * (start * x_stride + k),
                x_stride,
                count,
                panels + k * PANEL * itemsize,
                size,
                kind,
                widens,
                features,
                min(deep, inputs - k),
                out + 4 * start * out_stride,
                out_stride,
                mode if k == 0 else 1,
                rest,
                widened,
                packed,
            )


@kernel
def product_once(
    x: int,
    x_stride: int,
    rows: int,
    panels: int,
    kind: int,
    features: int,
    inputs: int,
    out: int,
    out_stride: int,
    mode: int,
    scratch: int,
) -> None:
    """:func:`product`, for tests and benchmarks."""
    product(x, x_stride, rows, panels, kind, features, inputs, out, out_stride, mode, scratch)
