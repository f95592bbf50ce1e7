"""Compiled matrix products against numpy in float64: all sizes, strides, storages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.kernels import amx, products
from drumline.model.kernels.jit import kernel
from drumline.model.kernels.products import (
    BFLOAT16,
    BLOCK_INPUTS,
    BLOCK_ROWS,
    FLOAT16,
    FLOAT32,
    MATRIX_UNIT,
    PANEL,
    TILE,
    UNIT_BLOCK_ROWS,
    Panels,
    product_once,
    scratch_floats,
)

DTYPES = {
    FLOAT32: torch.float32,
    BFLOAT16: torch.bfloat16,
    FLOAT16: torch.float16,
    MATRIX_UNIT: torch.bfloat16,
}
KINDS = [kind for kind in DTYPES if {MATRIX_UNIT: amx.allowed(), FLOAT16: products.HALVES}.get(kind, True)]


@kernel
def tile_once(x: int, x_stride: int, rows: int, panel: int, inputs: int, out: int, out_stride: int, mode: int) -> None:
    products.tile(x, x_stride, rows, panel, inputs, out, out_stride, mode)


def spread(rows: int, columns: int, gap: int, seed: int) -> torch.Tensor:
    """A matrix whose rows have NaN between them, and after the last."""
    memory = torch.full((rows, columns + gap), float("nan"))
    memory[:, :columns] = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return memory


def matrix(features: int, inputs: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of float32, but exact in ``dtype``."""
    weight = torch.randn(features, inputs, generator=torch.Generator().manual_seed(seed))
    if dtype == torch.float16:
        weight[0, 0] = 1 + 2**-10  # not a bfloat16
    return weight.to(dtype).float()


def check(rows: int, features: int, inputs: int, kind: int, mode: int = 0, gap: int = 3, seed: int = 0) -> None:
    weight = matrix(features, inputs, DTYPES[kind], seed)
    panels = Panels(weight)
    assert panels.kind == kind or {panels.kind, kind} == {MATRIX_UNIT, BFLOAT16}
    x = spread(rows, inputs, gap, seed + 1)
    out = spread(rows, features, gap, seed + 2)
    floats = scratch_floats(rows, inputs)
    scratch = torch.full((floats + 16,), float("nan"))
    expected = x[:, :inputs].double() @ weight.double().t()
    if mode == 1:
        expected += out[:, :features].double()
    product_once(
        x.data_ptr(),
        x.stride(0),
        rows,
        panels.address,
        kind,
        panels.features,
        panels.inputs,
        out.data_ptr(),
        out.stride(0),
        mode,
        scratch.data_ptr(),
    )
    torch.testing.assert_close(out[:, :features].double(), expected, rtol=1e-5, atol=5e-6 * inputs**0.5)
    assert out[:, features:].isnan().all()
    assert scratch[floats:].isnan().all()


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 3 * TILE + 3),
    features=st.integers(1, 3 * PANEL + 5),
    inputs=st.integers(1, 150),
    kind=st.sampled_from(KINDS),
    mode=st.integers(0, 1),
    gap=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_sizes(rows: int, features: int, inputs: int, kind: int, mode: int, gap: int, seed: int) -> None:
    check(rows, features, inputs, kind, mode, gap, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", range(1, TILE + 2))
def test_every_tile(rows: int, kind: int) -> None:
    check(rows, PANEL + 1, 64, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("rows", [1, 7, 8, 20, UNIT_BLOCK_ROWS + 17, BLOCK_ROWS + 5])
def test_several_blocks(rows: int, mode: int, kind: int) -> None:
    check(rows, PANEL + 3, 2 * BLOCK_INPUTS + 7, kind, mode)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3 * TILE),
    inputs=st.integers(1, 70),
    gap=st.integers(0, 5),
    mode=st.integers(0, 1),
    seed=st.integers(0, 1000),
)
def test_tile(rows: int, inputs: int, gap: int, mode: int, seed: int) -> None:
    x = spread(rows, inputs, gap, seed)
    panel = torch.randn(inputs, PANEL, generator=torch.Generator().manual_seed(seed + 1))
    out = spread(rows, PANEL, gap, seed + 2)
    expected = x[:, :inputs].double() @ panel.double()
    if mode == 1:
        expected += out[:, :PANEL].double()
    tile_once(x.data_ptr(), x.stride(0), rows, panel.data_ptr(), inputs, out.data_ptr(), out.stride(0), mode)
    torch.testing.assert_close(out[:, :PANEL].double(), expected, rtol=1e-5, atol=3e-5)
    assert out[:, PANEL:].isnan().all()


@pytest.mark.parametrize("dtype", [DTYPES[kind] for kind in KINDS if kind != MATRIX_UNIT])
@pytest.mark.parametrize("narrow", [False, True])
def test_storage(dtype: torch.dtype, narrow: bool) -> None:
    """Narrow where that loses nothing, whatever type the tensor comes in."""
    weight = matrix(PANEL + 1, 64, dtype, 0)
    panels = Panels(weight.to(dtype) if narrow else weight)
    assert DTYPES[panels.kind] == dtype
    assert (panels.kind == MATRIX_UNIT) == (dtype == torch.bfloat16 and amx.allowed())
    assert (panels.features, panels.inputs) == weight.shape
    assert panels.nbytes == 2 * 64 * PANEL * dtype.itemsize


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("value", [float("nan"), -0.0, 1e-40, 65504.0 * 4, 2.0**-120])
def test_odd_weights(value: float, rows: int) -> None:
    """One number among the weights comes out as it went in (infinity only as not finite: of the unit it is NaN)."""
    weight = torch.zeros(3, 4)
    weight[1, 2] = value
    out = torch.empty(rows, 3)
    x = torch.zeros(rows, 4)
    x[:, 2] = 1
    multiply(Panels(weight), x, out)
    np.testing.assert_array_equal(out.numpy(), [[0, np.float32(value), 0]] * rows)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3.4e38, 1 / 3, -1e-20])
def test_odd_inputs(value: float, rows: int) -> None:
    """Of x too, by weights that are exact in 16 bits: a number times one is itself, to the last bit."""
    x = torch.zeros(rows, 4)
    x[:, 2] = value
    out = torch.empty(rows, 2)
    multiply(Panels(torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 0.5, 2.0]])), x, out)
    np.testing.assert_array_equal(out.numpy(), [[np.float32(value), np.float32(value) / 2]] * rows)


def multiply(panels: Panels, x: torch.Tensor, out: torch.Tensor) -> None:
    scratch = torch.empty(scratch_floats(len(x), panels.inputs))
    address, kind, features, inputs = panels.address, panels.kind, panels.features, panels.inputs
    product_once(
        x.data_ptr(), inputs, len(x), address, kind, features, inputs, out.data_ptr(), features, 0, scratch.data_ptr()
    )


def test_rows_of_a_larger_matrix() -> None:
    """Weights that are a view."""
    whole = torch.randn(40, 30)
    ours, copied = Panels(whole[3:17, 2:9]), Panels(whole[3:17, 2:9].contiguous())
    size = ours.nbytes // 4
    first, second = (
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * size).from_address(panels.address))
        for panels in (ours, copied)
    )
    np.testing.assert_array_equal(first, second)
