"""The compiled forward gives the logits of transformers: every architecture, TP, stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.model.compiled import CompiledForward
from drumline.parallel.shards import Range
from tests.model import test_architectures
from tests.model.test_architectures import Split, check

Tiny = Callable[[str], tuple[Path, Any]]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_architectures, "ModuleForward", lambda model: CompiledForward(model, 256))


@pytest.mark.parametrize("tp", [1, 2])
def test_logits(tiny: Tiny, shape: str, tp: int) -> None:
    folder, model = tiny(shape)
    check(model, Split(folder, tp))


def test_stages(tiny: Tiny, shape: str) -> None:
    folder, model = tiny(shape)
    check(model, Split(folder, 2, [Range(0, 1), Range(1, 3)]))
