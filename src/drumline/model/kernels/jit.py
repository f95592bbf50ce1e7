"""How kernels are compiled: numba, ahead of the first step, and kept on disk.

A step of a small model on a CPU is dozens of operations of a few microseconds each, and torch's cost two to seven times
their arithmetic there (docs/performance.md). Kernels are Python functions that numba compiles for this machine; they
work on plain addresses (``int64``) so that a call unboxes nothing, and without the interpreter's lock.

Conventions: all arrays are float32 unless a name says otherwise, sizes and strides are counted in elements, and a
kernel allocates nothing. An address must stay valid while the kernel runs: whoever passes it keeps the array alive.

``reassoc`` and ``contract`` let sums be vectorised; NaN and infinity keep their meaning (masks use -inf).
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}

log = logging.getLogger(__name__)


def kernel(function: F) -> F:
    """A compiled function that Python calls: compiled when it is first called, kept on disk."""
    compiled = inlined(function)
    try:
        compiled._cache = _Cache(function)  # type: ignore[attr-defined]
    except (RuntimeError, OSError) as error:
        log.info("Kernels are compiled anew by each process: no folder to keep them in (%s)", error)
    return compiled


def inlined(function: F) -> F:
    """A compiled part of kernels. Not kept by itself: whoever calls it has it inside."""
    compiled: F = numba.njit(nogil=True, fastmath=FASTMATH, error_model="numpy")(function)
    return compiled


def exactly(function: F) -> F:
    """A compiled part of kernels whose operations keep their order (rounding errors that cancel, on purpose)."""
    compiled: F = numba.njit(nogil=True, fastmath={"contract", "nsz"}, error_model="numpy")(function)
    return compiled


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's, but valid for one state of all kernels: its own looks at the file of the outermost function only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path, filename_base=self._impl.filename_base, source_stamp=_sources()
        )


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _pointer_to(element: types.Type, name: str) -> Any:
    def pointer(typingctx: Any, address: Any) -> Any:
        signature = types.CPointer(element)(types.int64)  # type: ignore[attr-defined]

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, codegen

    pointer.__name__ = pointer.__qualname__ = name
    return intrinsic(pointer)


floats = _pointer_to(types.float32, "floats")
"""Address to a pointer that is indexed: ``floats(address)[3]``."""
int32s = _pointer_to(types.int32, "int32s")
int64s = _pointer_to(types.int64, "int64s")
halves = _pointer_to(types.uint16, "halves")
