"""Random numbers of sampling: Gumbel noise as a pure function of (seed, output index, vocabulary id).

A counter-based hash (three rounds of splitmix64) and no generator with a state, so the same token comes out after a
preemption, in another batch, with look-ahead, at any TP size; and a rank makes the noise of its own vocabulary slice
only. A 53-bit uniform number u and float64 keep the tails right: with 24 bits every token of a probability near 1e-7
would tie. The noise is ``-log(-log(u))``.

**Drawing on a CPU.** The token is the first largest ``s + noise`` with ``s = logit / temperature``. Two logarithms in
float64 for each id of the vocabulary took 0.7 ms a row at 49152 ids; what is here takes a tenth (``kernels.draw``), and
draws the same token. Let t be the id with the largest s, and B its ``s + noise``. Another id wins only if its noise is
at least ``B - s``, that is if ``-log(u) <= w`` with ``w = exp(s - B)``; and as ``1 - u <= -log(u)``, only if ``1 - u <=
w``. So the hash of each id is compared with a float32 exponential, and the few ids that pass (about e^-noise(t) over
the probability of t) get their exact float64 value; the best so far is the next B. The comparison has more slack
(0.1 %) than float32 has error.

Rejected: noise for the ids above a bound on the largest noise possible, 37.4 (at temperature 1 that is nearly all); the
same in numpy, row after row in blocks (five times slower).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.parallel.shards import Range

BLOCK = 1 << 16
"""Logits that one block of rows has at most, unless a single row has more."""

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

_U = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


def row_blocks(rows: int, width: int, block: int = BLOCK) -> Iterator[slice]:
    """Rows of a table in blocks that stay in a CPU's cache."""
    step = max(block // max(width, 1), 1)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def _signed(value: np.uint64) -> int:
    return int(value.astype(np.int64))


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    """One round of splitmix64 over int64 (torch wraps around, and shifts keep the sign, so it is masked off)."""
    x = x + _signed(_GOLDEN)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def noise_at(seed: Longs, output_index: Longs, ids: Any) -> Any:
    """Noise of ``ids`` [rows, n] (or [1, n]) int64 for rows of (``seed``, ``output_index``) [rows]: [rows, n] float64.

    ``ids`` are a numpy array or a tensor on any device, and so is what comes.
    """
    if isinstance(ids, np.ndarray):
        return _gumbel(_hashed(ids.astype(np.uint64) ^ _keys(seed, output_index)[:, None]))
    key = torch.from_numpy(_keys(seed, output_index).astype(np.int64)).to(ids.device)[:, None]
    uniform = (((_splitmix(key ^ ids) >> 11) & ((1 << 53) - 1)).to(torch.float64) + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _keys(seed: Longs, output_index: Longs) -> npt.NDArray[Any]:
    return _hashed(_hashed(seed.astype(np.uint64)) ^ output_index.astype(np.uint64))


class Noise:
    """Noise of one rank's slice of the vocabulary on its device, and the draw."""

    def __init__(self, ids: Range) -> None:
        self._ids = ids

    def draw(
        self, logits: torch.Tensor, temperature: Floats, seed: Longs, output_index: Longs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest ``logit / temperature + noise`` of each row and its first place: [rows] float64 and int64.

        ``logits`` [rows, size of the slice] float32, -inf where a token is out of the question. Places count from the
        slice's beginning.
        """
        ids = torch.arange(self._ids.start, self._ids.stop, dtype=torch.int64, device=logits.device)[None]
        scores = noise_at(seed, output_index, ids)
        scores += logits.to(torch.float64) / torch.from_numpy(temperature).to(logits.device)[:, None]
        values, places = scores.max(dim=1)
        return values, places


class CpuNoise(Noise):
    """The same, by the bound that the module's text describes."""

    def __init__(self, ids: Range) -> None:
        super().__init__(ids)
        from drumline.model.kernels.draw import draw  # here, since GPUs do not need it

        self._kernel = draw

    def draw(
        self, logits: torch.Tensor, temperature: Floats, seed: Longs, output_index: Longs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Noise.draw`."""
        table = np.ascontiguousarray(logits.numpy())
        rows, width = table.shape
        values, places = np.empty(rows), table.argmax(axis=1)
        self._kernel(
            table.ctypes.data,
            width,
            rows,
            self._ids.start,
            temperature,
            seed,
            output_index,
            values,
            places.ctypes.data,
        )
        return torch.from_numpy(values), torch.from_numpy(places)


def _hashed(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One round, in new memory."""
    x = x + _GOLDEN
    x = (x ^ (x >> _U(30))) * _MIX_1
    x = (x ^ (x >> _U(27))) * _MIX_2
    found: npt.NDArray[Any] = x ^ (x >> _U(31))
    return found


def _gumbel(hashes: npt.NDArray[Any]) -> Floats:
    uniform = ((hashes >> _U(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: Floats = -np.log(-np.log(uniform))
    return noise
