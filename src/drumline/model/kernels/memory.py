"""Words that other processes write to, and the order in which memory takes what is written."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_WORD = ir.IntType(32)


@intrinsic  # type: ignore[untyped-decorator]
def load_word(typingctx: Any, address: Any) -> Any:
    """The uint32 at an address, read anew each time."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _WORD.as_pointer())
        return builder.zext(builder.load_atomic(place, "acquire", 4), ir.IntType(64))

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def store_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Write a uint32 to an address, after all that was written before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _WORD.as_pointer())
        builder.store_atomic(builder.trunc(args[1], _WORD), place, "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fence(typingctx: Any) -> Any:
    """Nothing passes here, in either direction: a full barrier."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
