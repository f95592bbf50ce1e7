"""Matrix products of the forward, each with its weights laid out for the machine that runs it.

What one thread takes for ``[M, K] x [K, N]`` on a CPU depends on the layout of the weights far more than on arithmetic:
reading them is the cost up to M of about 16. Layouts:

- :class:`HalfWeights`: float32 arithmetic over weights that are *stored* in 16 bits, where that loses nothing. A
  checkpoint in bfloat16 or float16 has at most 11 significant bits; scaled by a power of two it fits float16 exactly,
  and FBGEMM's kernel widens it in registers. Half the bytes, so 2 to 3 times the speed, and half the memory.
- :class:`BlockedWeights`: any other float32 weights on the CPU, as blocks of about 256 columns of the transposed matrix
  ``[blocks, K, 256]``. One column block stays in the cache while all rows of the input pass it. As fast as plain
  ``F.linear`` for one row, 1.4 to 2.4 times as fast for 4 to 32.
- :class:`PlainWeights`: everything else (other devices, half types), and all weights at first: ``F.linear``.

FBGEMM packs 25 million numbers a second, so a server would start seconds later. Therefore a :class:`Linear` is ready at
once and :func:`lay_out` changes layouts: for a moment while the model is loaded, the rest in a thread of low priority
that ends when all is done. A layout is exchanged by one assignment; the old one is freed, so at most one matrix is held
twice. Which layout a product had shows in the last bits of a float32 at most.

Rejected: one transposed matrix (as good while N is below about 600, 1.6 times slower than ``F.linear`` at N = 3072 and
M = 8, since each of its rows is a page of its own), oneDNN's packed weights (1.3 to 2 times slower for one row), MKL's
(not reachable without a private tensor type), ``quantized.linear_dynamic_fp16`` (twice the time of the same kernel).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch.nn import functional

log = logging.getLogger(__name__)

BLOCK = 256
"""Columns of one block."""
WHOLE = 640
"""Up to so many output features one block is as good as several."""


LAY_OUT_S = 0.3
"""Time that loading a model spends on layouts; the rest is done beside the first steps."""

PIECE = 1 << 18
"""Elements that are looked at together, so that they stay in the cache."""


class Weights(Protocol):
    """A matrix [N, K] in some layout."""

    nbytes: int
    """Memory that it takes."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[T, K] to [T, N], a new tensor."""

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows [T, K] by number, a new tensor."""


class Linear:
    """[T, K] to [T, N]; its weights change their layout while it is in use.

    ``table``: its rows are looked up too (an embedding that is also the head).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, table: bool = False) -> None:
        self.bias = bias
        self._table = table
        self.weights: Weights = PlainWeights(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The product, bias included; a new tensor."""
        out = self.weights.product(x)
        return out if self.bias is None else out.add_(self.bias)

    @property
    def nbytes(self) -> int:
        """Memory that the weights take."""
        return self.weights.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows [T, K] of the weights by number."""
        return self.weights.rows(numbers)

    def lay_out(self) -> None:
        """Take the best layout for the weights and their device."""
        plain = self.weights
        if not isinstance(plain, PlainWeights):
            return
        weight = plain.weight
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            self.weights = HalfWeights.of(weight, table=self._table) or BlockedWeights(weight)


class Table:
    """Rows of an embedding that is no head."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self._dtype = table.dtype

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self._table.nbytes

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows [T, K] by number, a new tensor."""
        return functional.embedding(numbers, self._table).to(self._dtype)

    def lay_out(self) -> None:
        """In 16 bits where that loses nothing."""
        self._table = narrow_storage(self._table)


class PlainWeights:
    """As they come."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.nbytes = weight.nbytes

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Weights`."""
        return functional.linear(x, self.weight)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """See :class:`Weights`."""
        return functional.embedding(numbers, self.weight)


class BlockedWeights:
    """Blocks of columns of the transposed matrix; the last may be padded with zeros."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._features, inputs = weight.shape
        count = 1 if self._features <= WHOLE else round(self._features / BLOCK)
        width = -(-self._features // count)
        if count > 1:
            width = -(-width // 16) * 16
        self._blocks = torch.zeros(count, inputs, width, dtype=weight.dtype)
        for number, block in enumerate(self._blocks):
            rows = weight[number * width : (number + 1) * width]
            block[:, : len(rows)] = rows.t()
        self._whole = self._blocks[0] if count == 1 else None
        self.nbytes = self._blocks.nbytes

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Weights`."""
        if self._whole is not None:
            return torch.mm(x, self._whole)
        count, _, width = self._blocks.shape
        rows = x.shape[0]
        out = torch.bmm(x.expand(count, rows, x.shape[1]), self._blocks)
        out = out.view(1, -1) if rows == 1 else out.transpose(0, 1).reshape(rows, count * width)
        return out if self._features == count * width else out[:, : self._features]

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """See :class:`Weights`."""
        width = self._blocks.shape[2]
        if len(numbers) == 1:
            block, column = divmod(int(numbers[0]), width)
            return self._blocks[block, :, column].clone(memory_format=torch.contiguous_format)[None]
        return self._blocks[numbers // width, :, numbers % width]


class HalfWeights:
    """float16 weights that equal the float32 ones but for a power of two."""

    def __init__(self, packed: torch.Tensor, scale: float, shape: torch.Size, table: torch.Tensor | None) -> None:
        self._packed, self._table = packed, table
        self._scale = torch.tensor(scale)  # a number would be made a tensor of another type in each call
        self.nbytes = 2 * shape.numel() + (0 if table is None else table.nbytes)

    @classmethod
    def of(cls, weight: torch.Tensor, *, table: bool = False) -> HalfWeights | None:
        """None if the weights do not fit, or torch has no such kernel for this machine."""
        if not _has_kernel():
            return None
        largest = max(float(piece.abs().max()) for piece in _pieces(weight))
        if not 0 < largest < float("inf"):
            return None
        # Scaled so that the largest is just below 2^14: what is then too small for float16 is below 2^-38 of it.
        exponent = 14 - int(torch.tensor(largest).frexp().exponent.item())
        for piece in _pieces(weight):
            scaled = piece * 2.0**exponent
            if float((scaled.half().float() - scaled).abs().max()) > 2.0**-25:
                return None
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight * 2.0**exponent)
        return cls(packed, 2.0**-exponent, weight.shape, narrow_storage(weight) if table else None)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Weights`."""
        out: torch.Tensor = torch.fbgemm_linear_fp16_weight_fp32_activation(x, self._packed, None)
        return out.mul_(self._scale)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """See :class:`Weights`."""
        assert self._table is not None
        return functional.embedding(numbers, self._table).float()


@functools.cache
def _has_kernel() -> bool:
    """Whether torch has FBGEMM's functions (not on other processors; marked as deprecated, without a successor)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said once in a process
            packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(8, 8))
            out = torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 8), packed, None)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool((out == 8).all())


class LaidOut(Protocol):
    """Something with a layout."""

    def lay_out(self) -> None:
        """Take the best one."""


def lay_out(parts: Sequence[LaidOut], budget_s: float = LAY_OUT_S) -> threading.Thread | None:
    """Change layouts; what is left after ``budget_s`` is done by the thread that is returned."""
    _has_kernel()
    deadline = time.monotonic() + budget_s
    left = list(parts)
    while left and time.monotonic() < deadline:
        left.pop(0).lay_out()
    if not left:
        return None
    thread = threading.Thread(target=_lay_out_rest, args=(left,), name="weights", daemon=True)
    thread.start()
    return thread


def _lay_out_rest(parts: list[LaidOut]) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread, on Linux
    except (AttributeError, OSError):
        pass
    try:
        with torch.inference_mode():
            while parts:
                parts.pop(0).lay_out()
    except Exception:
        log.exception("Weights keep the layout they were loaded in")


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its elements, a cache-full at a time."""
    flat = tensor.view(-1)
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]


def narrow_storage(table: torch.Tensor) -> torch.Tensor:
    """A table of float32 on the CPU in 16 bits where that loses nothing, else as it is."""
    if table.device.type == "cpu" and table.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if all(torch.equal(piece.to(dtype).float(), piece) for piece in _pieces(table)):
                return table.to(dtype)
    return table
