"""The draw of a random token on a CPU, as ``model.noise`` describes it: one pass over a row's logits.

Hashes and bounds of a few dozen ids are compared at once, in registers; only where an id of these passes the bound do
they get their exact values, one after the other. What an id must reach is raised as soon as a better one is found.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from drumline.model.kernels.jit import exactly, floats, inlined, int64s, kernel
from drumline.model.kernels.numbers import exp

IDS = 64
"""Ids that are compared at once."""

_U = np.uint64
_GOLDEN, _MIX_1, _MIX_2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)
_30, _27, _31, _32, _11 = _U(30), _U(27), _U(31), _U(32), _U(11)
_LOG_2_32 = float(np.log(2.0**32 * 1.001))


@inlined
def _hashed(x: Any) -> Any:
    """One round of splitmix64."""
    x = x + _GOLDEN
    x = (x ^ (x >> _30)) * _MIX_1
    x = (x ^ (x >> _27)) * _MIX_2
    return x ^ (x >> _31)


@exactly
def _gumbel(hashed: Any) -> float:
    uniform = (float(hashed >> _11) + 0.5) * 2.0**-53
    return -math.log(-math.log(uniform))


@exactly
def _score(logit: Any, temperature: float, noise: float) -> float:
    return float(logit) / temperature + noise


@inlined
def _passes(hashed: Any, logit: Any, largest: Any, scale: Any, shift: Any) -> Any:
    """Whether ``1 - u``, as the upper 32 bits of the inverted hash, is within the bound."""
    left = np.float32(np.uint32(~hashed >> _32))
    return left <= exp((logit - largest) * scale + shift) + np.float32(1)


@kernel
def draw(
    logits: int,
    width: int,
    rows: int,
    first: int,
    temperatures: Any,
    seeds: Any,
    indices: Any,
    values: Any,
    places: int,
) -> None:
    """First largest ``logit / temperature + noise`` of each row, and its place.

    ``logits``: address of [rows, width]; ids begin with ``first``. Arrays of [rows]: ``temperatures`` and ``values``
    float64, ``seeds`` and ``indices`` (of outputs) int64; ``places``: address of int64, at first the places of the
    largest logits.
    """
    found = int64s(places)
    for row in range(rows):
        logit = floats(logits + 4 * row * width)
        temperature = temperatures[row]
        key = _hashed(_hashed(_U(seeds[row])) ^ _U(indices[row]))
        top = found[row]
        largest = logit[top]
        best = _score(largest, temperature, _gumbel(_hashed(_U(first + top) ^ key)))
        chosen = top
        scale = np.float32(1.0 / temperature)
        # what is added to (logit - largest) / temperature, so that e to the power of it is a bound of 32 bits
        shift = np.float32(_LOG_2_32 - (best - float(largest) / temperature))
        for begin in range(0, width, IDS):
            end = min(begin + IDS, width)
            passed = 0
            for place in range(begin, end):
                passed += _passes(_hashed(_U(first + place) ^ key), logit[place], largest, scale, shift)
            if not passed:
                continue
            for place in range(begin, end):
                hashed = _hashed(_U(first + place) ^ key)
                if _passes(hashed, logit[place], largest, scale, shift):
                    score = _score(logit[place], temperature, _gumbel(hashed))
                    if score > best or (score == best and place < chosen):
                        best, chosen = score, place
            shift = np.float32(_LOG_2_32 - (best - float(largest) / temperature))
        values[row] = best
        found[row] = chosen


SIGNATURE = numba.void(
    numba.int64,
    numba.int64,
    numba.int64,
    numba.int64,
    numba.float64[::1],
    numba.int64[::1],
    numba.int64[::1],
    numba.float64[::1],
    numba.int64,
)
"""Of :func:`draw`, to compile it ahead of the first step."""
