"""Products of many rows with bfloat16 weights by the matrix unit of newer Intel processors (AMX), exact as in float32.

The unit multiplies bfloat16 and sums in float32. A float32 is the sum of three bfloat16 numbers of eight bits each, so
three products of the unit are one whose only rounding is that of float32 sums; parts below 2^-126 count as zero. (An
infinite weight gives NaN, since it meets parts that are zero.)

One core: 490 GFLOPS with 256 rows, three times what vector registers give; with 8 to 32 rows the cost is reading the
weights. Two tiles of 16 rows times a panel of 32 columns stay in the unit, a third of its registers passes x and w.

Rejected: pairs of weights that are brought in order for each product (half the time with 32 rows; panels are stored in
the unit's order instead), fetching into the first cache or half the lines ahead (a tenth slower from memory).
Not tried: float32 weights in three parts too, which by arithmetic (six to nine products) is no faster than vectors.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from drumline.model.kernels.jit import floats, inlined, int32s, int64s

_FEATURES = llvmlite.binding.get_host_cpu_features()
COMPILED = all(_FEATURES.get(name) for name in ("amx-tile", "amx-bf16", "avx512f"))
"""Whether this processor has the unit; else nothing here does anything."""

ROWS, INPUTS, PARTS = 16, 32, 3
"""Of a tile; parts of a number."""
TILE_BYTES = 1024
AHEAD = 8192
"""Bytes by which weights are fetched before they are used."""


@functools.cache
def allowed() -> bool:
    """Whether this process may use the unit: Linux grants its large registers to who asks. Children inherit it."""
    if not COMPILED or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


_intrinsic: Callable[[Any], Any] = intrinsic
_I8, _I16, _I32, _I64, _POINTER = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.PointerType())


def _call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _ahead(builder: ir.IRBuilder, address: ir.Value, offset: ir.Value | int) -> ir.Value:
    offset = _I64(offset) if isinstance(offset, int) else offset
    return builder.gep(address, [offset], source_etype=_I8)


@_intrinsic
def _configure(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if COMPILED:
            _call(builder, "ldtilecfg", builder.inttoptr(args[0], _POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@_intrinsic
def _release(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if COMPILED:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _multiplying(strips: int) -> Any:
    def multiply(
        typingctx: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        count: Any,
        c: Any,
        c_stride: Any,
        mode: Any,
        ahead: Any,
        ahead_stride: Any,
    ) -> Any:
        """Tiles of rows, ``a_stride`` bytes apart, times a panel; tiles of c: 0 1 / 2 3, of a: 4 5, of b: 6 7."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if not COMPILED:
                return context.get_dummy_value()
            a, a_stride, b, count, c, c_stride, mode, ahead, ahead_stride = args
            a, b, c, ahead = (builder.inttoptr(value, _POINTER) for value in (a, b, c, ahead))
            below = _ahead(builder, c, builder.mul(c_stride, _I64(ROWS)))
            corners = [_ahead(builder, row, column) for row in (c, below)[:strips] for column in (0, 64)]
            with builder.if_else(builder.icmp_signed("==", mode, _I64(0))) as (new, more):
                with new:
                    for tile in range(2 * strips):
                        _call(builder, "tilezero", _I8(tile))
                with more:
                    for tile, corner in enumerate(corners):
                        _call(builder, "tileloadd64", _I8(tile), corner, c_stride)
            with cgutils.for_range(builder, count) as loop:
                b_now = _ahead(builder, b, builder.mul(loop.index, _I64(2 * TILE_BYTES)))
                ahead_now = _ahead(builder, ahead, builder.mul(loop.index, ahead_stride))
                a_now = _ahead(builder, a, builder.mul(loop.index, _I64(PARTS * TILE_BYTES)))
                a_rows = [a_now, _ahead(builder, a_now, a_stride)][:strips]
                for half in (0, 1):
                    _call(builder, "tileloadd64", _I8(6 + half), _ahead(builder, b_now, 64 * half), _I64(128))
                lines = iter(range(0, 2 * TILE_BYTES, 64))
                for part in range(PARTS):
                    for strip, row in enumerate(a_rows):
                        _call(builder, "tileloadd64", _I8(4 + strip), _ahead(builder, row, part * TILE_BYTES), _I64(64))
                    for tile in range(2 * strips):
                        _call(builder, "tdpbf16ps", _I8(tile), _I8(4 + tile // 2), _I8(6 + tile % 2))
                        for line in itertools.islice(lines, -(-32 // (2 * strips * PARTS))):
                            prefetch(builder, _ahead(builder, ahead_now, line))
            for tile, corner in enumerate(corners):
                _call(builder, "tilestored64", _I8(tile), corner, c_stride)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    multiply.__name__ = multiply.__qualname__ = f"multiply_{strips}"
    return intrinsic(multiply)


_multiply_1, _multiply_2 = _multiplying(1), _multiplying(2)


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Fetch a line into the second cache."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [address, _I32(0), _I32(2), _I32(1)])


@_intrinsic
def _split(typingctx: Any, x: Any, to: Any) -> Any:
    """16 floats in three parts, each the next eight bits, a tile apart. Of infinity the first part is all."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, to = (builder.inttoptr(value, _POINTER) for value in args)
        wide, words = ir.VectorType(ir.FloatType(), 16), ir.VectorType(_I32, 16)
        left = builder.load(x, align=4, typ=wide)
        for part in range(PARTS):
            bits = builder.and_(builder.bitcast(left, words), ir.Constant(words, [0xFFFF0000] * 16))
            short = builder.trunc(builder.lshr(bits, ir.Constant(words, [16] * 16)), ir.VectorType(_I16, 16))
            builder.store(short, _ahead(builder, to, part * TILE_BYTES), align=2)
            left = builder.fsub(left, builder.bitcast(bits, wide))
            ordered = builder.fcmp_ordered("ord", left, left)
            left = builder.select(ordered, left, ir.Constant(wide, [0.0] * 16))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def scratch_floats(rows: int, inputs: int) -> int:
    """Floats that :func:`block` may write to."""
    return 32 * 32 + 64 + -(-rows // ROWS) * -(-inputs // INPUTS) * PARTS * TILE_BYTES // 4


@inlined
def block(
    x: int,
    x_stride: int,
    rows: int,
    panels: int,
    panel_bytes: int,
    features: int,
    inputs: int,
    out: int,
    out_stride: int,
    mode: int,
    scratch: int,
) -> None:
    """As products._block, for bfloat16 panels. ``scratch``: :func:`scratch_floats`."""
    count = (inputs + INPUTS - 1) // INPUTS
    strip = count * PARTS * TILE_BYTES
    strips = (rows + ROWS - 1) // ROWS
    configuration = (scratch + 63) // 64 * 64
    tail = configuration + 64
    rest = tail + 64
    a = rest + 4 * 32 * 32
    # Palette 1; at byte 16 the bytes of a row of each tile, at byte 48 its rows.
    for i in range(8):
        int64s(configuration)[i] = 0
    int32s(configuration)[0] = 1
    for i in range(4):
        int32s(configuration)[4 + i] = 64 | 64 << 16
    for i in range(2):
        int32s(configuration)[12 + i] = 0x10101010
    for row in range(strips * ROWS):
        to = a + row // ROWS * strip + row % ROWS * 64
        for k in range(0, count * INPUTS, 16):
            source = x + 4 * (row * x_stride + k)
            if row >= rows or k + 16 > inputs:
                for i in range(16):
                    floats(tail)[i] = floats(source)[i] if row < rows and k + i < inputs else 0.0
                source = tail
            _split(source, to + k // INPUTS * PARTS * TILE_BYTES + k % INPUTS * 2)
    _configure(configuration)
    passes = (strips + 1) // 2
    for column in range(0, features, 32):
        b = panels + column // 32 * panel_bytes
        # As in products: one pass fetches ahead in its own panel, several share the next panel among them.
        ahead, ahead_stride = b + AHEAD, 2 * TILE_BYTES
        if passes > 1:
            ahead, ahead_stride = b + panel_bytes, (2 * TILE_BYTES // passes + 63) // 64 * 64
        for first in range(0, rows, 32):
            target = out + 4 * (first * out_stride + column)
            whole = first + 32 <= rows and column + 32 <= features
            to, to_stride, adds = target, 4 * out_stride, mode
            if not whole:
                to, to_stride, adds = rest, 128, 0
            source = a + first // ROWS * strip
            if first + ROWS < rows:
                _multiply_2(source, strip, b, count, to, to_stride, adds, ahead, ahead_stride)
            else:
                _multiply_1(source, strip, b, count, to, to_stride, adds, ahead, ahead_stride)
            ahead += ahead_stride * count
            if not whole:
                for row in range(min(32, rows - first)):
                    line = floats(target + 4 * row * out_stride)
                    for c in range(min(32, features - column)):
                        value = floats(rest)[row * 32 + c]
                        line[c] = line[c] + value if mode == 1 else value
    _release()
