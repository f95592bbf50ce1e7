"""Functions of one number that loops over them can be vectorised with, and numbers of 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from drumline.model.kernels.jit import exactly


@intrinsic  # type: ignore[untyped-decorator]
def float_of_bits(typingctx: Any, bits: Any) -> Any:
    """An int32 as the float32 of the same bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def float_of_bfloat16(typingctx: Any, bits: Any) -> Any:
    """The bits of a bfloat16 (uint16) as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def float_of_float16(typingctx: Any, bits: Any) -> Any:
    """The bits of a float16 (uint16) as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@exactly
def exp(x: Any) -> Any:
    """e to the power of a float32, within 2 units of the last place; 0 below -87, and 2^127 or so above 88.

    x = n ln 2 + r with |r| <= ln 2 / 2 (Cody and Waite: ln 2 in two parts), Taylor's polynomial of degree 6 for e^r
    (its error is below 2^-24 there), and n goes into the exponent.
    """
    bounded = min(max(x, np.float32(-87.3)), np.float32(88.0))
    n = np.floor(bounded * np.float32(1.4426950408889634) + np.float32(0.5))
    r = bounded - n * np.float32(0.693359375)
    r = r + n * np.float32(2.12194440e-4)
    p = np.float32(1.0 / 5040)
    p = p * r + np.float32(1.0 / 720)
    p = p * r + np.float32(1.0 / 120)
    p = p * r + np.float32(1.0 / 24)
    p = p * r + np.float32(1.0 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    power = float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return p * power
