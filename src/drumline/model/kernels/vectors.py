"""Parts of kernels that are written in LLVM's vectors of 16 floats.

What plain loops become depends on LLVM's mood: it takes half of this machine's vectors (256 bits) and no loop of
several sums at once. The few inner loops that matter are therefore spelled out, as functions that build instructions
(:func:`instructions`); the rest of a kernel stays Python. 16 floats are one register with AVX-512, and LLVM cuts them
in two or four elsewhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WIDTH = 16

INT = ir.IntType(64)
FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, WIDTH)
LANES = ir.VectorType(ir.IntType(32), WIDTH)
MASK = ir.VectorType(ir.IntType(1), WIDTH)
POINTER = ir.PointerType()


def instructions(result: types.Type, *parameters: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """A function for kernels whose body is what ``build(builder, *arguments)`` emits."""

    def decorate(build: Callable[..., Any]) -> Any:
        def typed(typingctx: Any, *arguments: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                made = build(builder, *values)
                return context.get_dummy_value() if result is types.void else made

            return result(*parameters), emit

        typed.__signature__ = inspect.signature(build)  # type: ignore[attr-defined]
        typed.__name__ = typed.__qualname__ = build.__name__
        typed.__doc__ = build.__doc__
        typed.__module__ = build.__module__
        return intrinsic(typed)

    return decorate


def integer(value: int) -> ir.Constant:
    """A constant."""
    return ir.Constant(INT, value)


def splat(value: float) -> ir.Constant:
    """The same constant in all lanes."""
    return ir.Constant(VECTOR, [value] * WIDTH)


def spread(builder: ir.IRBuilder, scalar: Any, vector: ir.VectorType = VECTOR) -> Any:
    """A scalar in all lanes."""
    zero = ir.Constant(ir.IntType(32), 0)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, zero)
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), ir.Constant(LANES, [0] * WIDTH))


def call(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: Sequence[Any]) -> Any:
    """Call an intrinsic function of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    found = builder.module.globals.get(name)
    return builder.call(found or ir.Function(builder.module, kind, name), arguments)


def fma(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``."""
    return call(builder, "llvm.fma.v16f32", VECTOR, [a, b, c])


def pointer(builder: ir.IRBuilder, address: Any, floats: Any) -> Any:
    """To the float at this index behind an address."""
    return builder.gep(builder.inttoptr(address, POINTER), [floats], source_etype=FLOAT)


def load(builder: ir.IRBuilder, place: Any, mask: Any = None) -> Any:
    """Sixteen floats; zero where the mask is off, which reads nothing there."""
    if mask is None:
        return builder.load(place, align=4, typ=VECTOR)
    align = ir.Constant(ir.IntType(32), 4)
    return call(builder, "llvm.masked.load.v16f32.p0", VECTOR, [place, align, mask, splat(0.0)])


def store(builder: ir.IRBuilder, value: Any, place: Any, mask: Any = None) -> None:
    """Sixteen floats, or those where the mask is on."""
    if mask is None:
        builder.store(value, place, align=4)
    else:
        align = ir.Constant(ir.IntType(32), 4)
        call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), [value, place, align, mask])


def below(builder: ir.IRBuilder, limit: Any) -> Any:
    """A mask of the first ``limit`` lanes."""
    counted = ir.Constant(LANES, list(range(WIDTH)))
    return builder.icmp_signed("<", counted, spread(builder, builder.trunc(limit, ir.IntType(32)), LANES))


def prefetch(builder: ir.IRBuilder, place: Any, locality: int = 3) -> None:
    """Ask for a cache line; any address will do. Locality 3: into all caches; 2: not into the first."""
    constants = [ir.Constant(ir.IntType(32), value) for value in (0, locality, 1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *constants])


def loop(
    builder: ir.IRBuilder,
    first: Any,
    end: Any,
    step: Any,
    state: Sequence[Any],
    body: Callable[[Any, Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """Emit ``for i in range(first, end, step): state = body(i, state)``; the state it ends with."""
    before = builder.block
    head, inside, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(first.type)
    index.add_incoming(first, before)
    phis = [builder.phi(value.type) for value in state]
    for phi, value in zip(phis, state, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    new = body(index, phis)
    index.add_incoming(builder.add(index, step), builder.block)
    for phi, value in zip(phis, new, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return phis


def sums(builder: ir.IRBuilder, vectors: Sequence[Any]) -> Any:
    """Lane i: the sum of the lanes of ``vectors[i]``, of sixteen.

    Two vectors become one in each step, with two shuffles (which keep to 128 bits at first, as these are quickest).
    """
    for low, high in (
        ([0, 16, 1, 17], [2, 18, 3, 19]),
        ([0, 1, 16, 17], [2, 3, 18, 19]),
    ):
        firsts, seconds = ([part + lane for part in (0, 4, 8, 12) for lane in lanes] for lanes in (low, high))
        vectors = _halved(builder, vectors, firsts, seconds)
    for first, second in (((0, 1, 4, 5), (2, 3, 6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))):
        firsts, seconds = ([4 * part + lane for part in parts for lane in range(4)] for parts in (first, second))
        vectors = _halved(builder, vectors, firsts, seconds)
    return vectors[0]


def transposed(builder: ir.IRBuilder, rows: Sequence[Any]) -> list[Any]:
    """Sixteen vectors to their columns."""

    def pairs(low: Any, high: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(low, high, ir.Constant(LANES, lanes))

    def quarters(*parts: int) -> list[int]:
        return [4 * part + lane for part in parts for lane in range(4)]

    def within(*lanes: int) -> list[int]:
        return [part + lane for part in (0, 4, 8, 12) for lane in lanes]

    fours = []
    for i in range(0, WIDTH, 4):  # fours[i][c]: columns c, c + 4, c + 8, c + 12 of four rows, in turn
        a, b, c, d = rows[i : i + 4]
        low, high = within(0, 16, 1, 17), within(2, 18, 3, 19)
        ab, cd = (pairs(a, b, low), pairs(a, b, high)), (pairs(c, d, low), pairs(c, d, high))
        low, high = within(0, 1, 16, 17), within(2, 3, 18, 19)
        fours.append([pairs(ab[half], cd[half], lanes) for half in (0, 1) for lanes in (low, high)])
    columns: list[Any] = [None] * WIDTH
    for c in range(4):
        for half, lanes in enumerate((quarters(0, 1, 4, 5), quarters(2, 3, 6, 7))):
            low, high = pairs(fours[0][c], fours[1][c], lanes), pairs(fours[2][c], fours[3][c], lanes)
            columns[8 * half + c] = pairs(low, high, quarters(0, 2, 4, 6))
            columns[8 * half + 4 + c] = pairs(low, high, quarters(1, 3, 5, 7))
    return columns


def _halved(builder: ir.IRBuilder, vectors: Sequence[Any], first: list[int], second: list[int]) -> list[Any]:
    low, high = ir.Constant(LANES, first), ir.Constant(LANES, second)
    return [
        builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
        for a, b in zip(vectors[::2], vectors[1::2], strict=True)
    ]


_POWERS = (
    1.0000000716546849,
    0.6931469670647619,
    0.24022119723840019,
    0.055507132734962675,
    0.009675541334453436,
    0.0013276471993007577,
)


def power_of_two(builder: ir.IRBuilder, x: Any) -> Any:
    """2 to the power of x, which is below 128: within 2 units in the last place, 0 up to -127, NaN for NaN.

    2^n * 2^f with f from -0.5 to 0.5; 2^f as the polynomial whose largest relative error (7.5e-8) is smallest.
    """
    x = builder.select(builder.fcmp_ordered("<", x, splat(-127.0)), splat(-127.0), x)
    n = call(builder, "llvm.rint.v16f32", VECTOR, [x])
    f = builder.fsub(x, n)
    p = splat(_POWERS[-1])
    for c in _POWERS[-2::-1]:
        p = fma(builder, p, f, splat(c))
    exponent = builder.add(builder.fptosi(n, LANES), ir.Constant(LANES, [127] * WIDTH))
    return builder.fmul(p, builder.bitcast(builder.shl(exponent, ir.Constant(LANES, [23] * WIDTH)), VECTOR))


def tanh(builder: ir.IRBuilder, x: Any) -> Any:
    """Hyperbolic tangent: Cephes' polynomial for small x, else by :func:`power_of_two`."""
    size = call(builder, "llvm.fabs.v16f32", VECTOR, [x])
    clipped = builder.select(builder.fcmp_ordered(">", size, splat(10.0)), splat(10.0), size)
    grown = power_of_two(builder, builder.fmul(clipped, splat(2 * math.log2(math.e))))
    large = builder.fsub(splat(1.0), builder.fdiv(splat(2.0), builder.fadd(grown, splat(1.0))))
    large = call(builder, "llvm.copysign.v16f32", VECTOR, [large, x])
    square = builder.fmul(x, x)
    p = splat(-5.70498872745e-3)
    for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = fma(builder, p, square, splat(c))
    small = fma(builder, builder.fmul(p, square), x, x)
    return builder.select(builder.fcmp_ordered("<", size, splat(0.625)), small, large)
