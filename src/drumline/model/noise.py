"""Random numbers of sampling: Gumbel noise as a pure function of (seed, output index, vocabulary id).

A counter-based hash (three rounds of splitmix64) and no generator with a state, so the same token comes out after a
preemption, in another batch, with look-ahead, at any TP size; and a rank makes the noise of its own vocabulary slice
only. A 53-bit uniform number u and float64 keep the tails right: with 24 bits every token of a probability near 1e-7
would tie. The noise is ``-log(-log(u))``.

**Drawing on a CPU.** The token is the first largest ``s + noise`` with ``s = logit / temperature``. Two logarithms in
float64 for each id of the vocabulary took 0.7 ms a row at 49152 ids; what is here takes a fifth, and draws the same
token. Let t be the id with the largest s, and B its ``s + noise``. Another id wins only if its noise is at least
``B - s``, that is if ``-log(u) <= w`` with ``w = exp(s - B)``; and as ``1 - u <= -log(u)``, only if ``1 - u <= w``. So
the hash of all ids is compared with a float32 exponential, and the few ids that pass (about e^-noise(t) over the
probability of t) get their exact float64 value. If many pass, as in a flat distribution, B is raised to the best of a
few hundred. The comparison has more slack (0.1 %) than float32 has error. Rows are computed in blocks that stay in the
processor's cache: 32 rows at once take twice as long as one after the other.

Rejected: noise for the ids above a bound on the largest noise possible, 37.4 (at temperature 1 that is nearly all).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.parallel.shards import Range

BLOCK = 1 << 16
"""Logits that one block of rows has at most, unless a single row has more: half a megabyte of hashes."""

MANY = 512
"""Ids of a row that pass the bound, from which on it is made tighter."""

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]

_U = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)
_LOG_2_32 = float(np.log(2.0**32 * 1.001))


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
        self._row_ids = np.arange(ids.start, ids.stop, dtype=np.uint64)
        block = max(BLOCK // max(ids.size, 1), 1)
        self._hash: npt.NDArray[Any] = np.empty((2, block, ids.size), dtype=np.uint64)
        self._bound: npt.NDArray[Any] = np.empty((2, block, ids.size), dtype=np.float32)

    def draw(
        self, logits: torch.Tensor, temperature: Floats, seed: Longs, output_index: Longs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Noise.draw`."""
        table, count = logits.numpy(), len(logits)
        values, places = np.empty(count), np.empty(count, dtype=np.int64)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            keys = _keys(seed, output_index)
            for part in row_blocks(count, table.shape[1]):
                values[part], places[part] = self._draw(table[part], temperature[part], keys[part])
        return torch.from_numpy(values), torch.from_numpy(places)

    def _draw(self, logits: npt.NDArray[Any], temperature: Floats, keys: npt.NDArray[Any]) -> tuple[Floats, Longs]:
        """One block of rows."""
        rows = np.arange(len(logits))
        top = logits.argmax(axis=1)
        largest = logits[rows, top]
        hashes, work = self._hash[0, : len(logits)], self._hash[1, : len(logits)]
        np.bitwise_xor(self._row_ids, keys[:, None], out=hashes)
        _hash_in_place(hashes, work)
        # Bound: exp(s - B), scaled to 32 bits; the noise of the top ids is in B.
        bound, left = self._bound[0, : len(logits)], self._bound[1, : len(logits)]
        np.subtract(logits, largest[:, None], out=bound)
        np.multiply(bound, (1 / temperature).astype(np.float32)[:, None], out=bound)
        np.add(bound, (_LOG_2_32 - _gumbel(hashes[rows, top])).astype(np.float32)[:, None], out=bound)
        torch.exp(torch.from_numpy(bound), out=torch.from_numpy(bound))
        np.add(bound, np.float32(1), out=bound)
        # 1 - u, as the upper 32 bits of the inverted hash
        np.invert(hashes, out=work)
        np.copyto(left, work.view(np.uint32).reshape(len(logits), -1, 2)[:, :, _UPPER], casting="unsafe")
        passed = left <= bound
        passed[rows, top] = True
        found = np.flatnonzero(passed)
        if len(found) > MANY * len(rows):
            found = _narrowed(found, logits, temperature, hashes, left, bound, top)
        row, place = np.divmod(found, logits.shape[1])
        scores = logits[row, place].astype(np.float64) / temperature[row] + _gumbel(hashes[row, place])
        begins = np.searchsorted(row, rows)
        best = np.maximum.reduceat(scores, begins)
        first = np.where(scores == best[row], place, logits.shape[1] - 1)
        return best, np.minimum.reduceat(first, begins)


def _narrowed(
    found: Longs,
    logits: npt.NDArray[Any],
    temperature: Floats,
    hashes: npt.NDArray[Any],
    left: npt.NDArray[Any],
    bound: npt.NDArray[Any],
    top: Longs,
) -> Longs:
    """Those of many ids that passed (a flat distribution) that also pass a bound made of some of them."""
    width = logits.shape[1]
    rows = np.arange(len(logits))
    row, place = np.divmod(found[:: len(found) // (MANY * len(rows)) + 1], width)
    scores = logits[row, place].astype(np.float64) / temperature[row] + _gumbel(hashes[row, place])
    before = logits[rows, top].astype(np.float64) / temperature + _gumbel(hashes[rows, top])
    best = before.copy()
    np.maximum.at(best, row, scores)
    tighter = np.exp(before - best).astype(np.float32)
    row = found // width
    stays = left.reshape(-1)[found] <= bound.reshape(-1)[found] * tighter[row] + np.float32(1)
    # The top one of each row stays in any case, so that no row is empty.
    stays |= found == (rows * width + top)[row]
    narrowed: Longs = found[stays]
    return narrowed


_UPPER = int(np.array([1], dtype=np.uint64).view(np.uint32)[0])


def _hash_in_place(x: npt.NDArray[Any], work: npt.NDArray[Any]) -> None:
    np.add(x, _GOLDEN, out=x)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, None)):
        np.right_shift(x, _U(shift), out=work)
        np.bitwise_xor(x, work, out=x)
        if factor is not None:
            np.multiply(x, factor, out=x)


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
