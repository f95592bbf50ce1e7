"""Kernels are compiled once: what is made ready is what calls ask for."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from drumline.model.kernels import draw, ready, step  # noqa: F401  ready compiles them, or finds them on disk
from drumline.model.kernels.jit import kernel

LONGS, DOUBLES = np.zeros(4, dtype=np.int64), np.zeros(4)
RUN = (np.zeros((1, step.WIDTH), dtype=np.int64), np.zeros((1, 2)), LONGS, 0)
DRAW = (0, 0, 0, 0, DOUBLES, LONGS, LONGS, DOUBLES, 0)


@pytest.mark.parametrize(("function", "arguments"), [(step.run, RUN), (draw.draw, DRAW)], ids=["run", "draw"])
def test_a_call_finds_on_disk_what_was_made_ready(function: Any, arguments: tuple[Any, ...]) -> None:
    again = kernel(function.py_func)
    again.compile(tuple(numba.typeof(argument) for argument in arguments))
    assert sum(again.stats.cache_hits.values()) == 1
    assert not again.stats.cache_misses
