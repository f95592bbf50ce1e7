"""The lean forward gives the logits of transformers: every architecture, TP, stages; layouts of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from drumline.model import lean, linears
from drumline.model.lean import LeanForward
from drumline.model.linears import BlockedWeights, HalfWeights, Linear, PlainWeights, lay_out, narrow_storage
from drumline.parallel.shards import Range
from tests.model import test_architectures
from tests.model.test_architectures import Split, check

Tiny = Callable[[str], tuple[Path, Any]]


@pytest.fixture(autouse=True)
def _lean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_architectures, "ModuleForward", lambda model: LeanForward(model, 256))


@pytest.mark.parametrize("tp", [1, 2])
def test_logits(tiny: Tiny, flat_shape: str, tp: int) -> None:
    folder, model = tiny(flat_shape)
    check(model, Split(folder, tp))


def test_stages(tiny: Tiny, flat_shape: str) -> None:
    folder, model = tiny(flat_shape)
    check(model, Split(folder, 2, [Range(0, 1), Range(1, 3)]))


def test_without_complex_numbers(tiny: Tiny, flat_shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other devices: the rotary embedding and norms in plain operations, plain linears."""
    rotate, order = lean._rotate, lean._Order
    monkeypatch.setattr(lean, "_rotate", lambda x, table, _: rotate(x, table, False))
    monkeypatch.setattr(lean, "_Order", lambda dim, made, _: order(dim, made, False))
    monkeypatch.setattr(lean, "_complex", lambda table: table)
    monkeypatch.setattr(lean, "_rms_norm", lean._rms_norm_in_float)
    monkeypatch.setattr(lean, "lay_out", lambda parts: None)
    folder, model = tiny(flat_shape)
    check(model, Split(folder, 1))


@pytest.mark.parametrize("features", [1, 131, 640, 700, 1376])
@pytest.mark.parametrize("rows", [1, 2, 7, 70])
def test_layouts(features: int, rows: int) -> None:
    torch.manual_seed(features)
    x, weight = torch.randn(rows, 96), torch.randn(features, 96)
    blocked = BlockedWeights(weight)
    torch.testing.assert_close(blocked.product(x), functional.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert torch.equal(blocked.rows(torch.arange(features)), weight)
    narrow = weight.bfloat16().float() * 1e-3
    half = HalfWeights.of(narrow, table=True)
    if half is not None:  # a machine without FBGEMM
        torch.testing.assert_close(half.product(x), functional.linear(x, narrow), atol=1e-5, rtol=1e-5)
        assert torch.equal(half.rows(torch.arange(features)), narrow)


def laid_out(weight: torch.Tensor) -> Linear:
    linear = Linear(weight, torch.ones(len(weight)))
    before = linear(torch.ones(2, weight.shape[1]).to(weight.dtype))
    linear.lay_out()
    torch.testing.assert_close(linear(torch.ones(2, weight.shape[1]).to(weight.dtype)), before)
    return linear


def test_choice_of_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 32)
    assert isinstance(laid_out(weight).weights, BlockedWeights)
    assert isinstance(laid_out(weight.bfloat16()).weights, PlainWeights)
    if linears._has_kernel():
        for exact in (weight.bfloat16().float(), weight.half().float() * 2**-20, weight.bfloat16().float() * 2**40):
            assert isinstance(laid_out(exact).weights, HalfWeights)
        assert laid_out(weight.half().float()).weights.nbytes == 64 * 32 * 2
    assert isinstance(laid_out(torch.zeros(4, 4)).weights, BlockedWeights)
    monkeypatch.setattr(linears, "_has_kernel", lambda: False)
    assert isinstance(laid_out(weight.bfloat16().float()).weights, BlockedWeights)


def test_layouts_change_beside_the_work() -> None:
    linears_ = [Linear(torch.randn(64, 32)) for _ in range(3)]
    thread = lay_out(linears_, budget_s=0.0)
    assert thread is not None
    thread.join(timeout=20)
    assert not any(isinstance(linear.weights, PlainWeights) for linear in linears_)
    assert lay_out(linears_) is None


def test_tables_are_narrow_only_where_nothing_is_lost() -> None:
    table = torch.randn(5, 4)
    assert narrow_storage(table) is table
    assert narrow_storage(table.bfloat16().float()).dtype == torch.bfloat16
    assert narrow_storage(table.half().float()).dtype == torch.float16
