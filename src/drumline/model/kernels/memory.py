"""Words that other processes write to, and the order in which memory takes what is written."""

from __future__ import annotations

from platform import machine
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import get_or_insert_function
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


_PAUSES: dict[str, tuple[str, list[int]]] = {
    "x86_64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.hint", [1]),
}
"""By machine, the instruction for the body of a loop that watches a word, and its arguments."""


@intrinsic  # type: ignore[untyped-decorator]
def pause(typingctx: Any) -> Any:
    """Tell the processor that a loop watches a word: less power, and more for the core's other thread."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if machine() in _PAUSES:
            name, numbers = _PAUSES[machine()]
            kind = ir.FunctionType(ir.VoidType(), [_WORD] * len(numbers))
            builder.call(get_or_insert_function(builder.module, kind, name), [ir.Constant(_WORD, n) for n in numbers])
        return context.get_dummy_value()

    return types.void(), codegen
