"""Compiled matrix products against numpy in float64: all sizes, strides, storages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.kernels import products
from drumline.model.kernels.jit import kernel
from drumline.model.kernels.products import (
    BFLOAT16,
    BLOCK_INPUTS,
    BLOCK_ROWS,
    FLOAT16,
    FLOAT32,
    PANEL,
    TILE,
    Panels,
    product_once,
    scratch_floats,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [FLOAT32, BFLOAT16, FLOAT16]


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


def check(
    rows: int, features: int, inputs: int, dtype: torch.dtype, mode: int = 0, gap: int = 3, seed: int = 0
) -> None:
    weight = matrix(features, inputs, dtype, seed)
    panels = Panels(weight)
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
        panels.kind,
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
    dtype=st.sampled_from(DTYPES),
    mode=st.integers(0, 1),
    gap=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_sizes(rows: int, features: int, inputs: int, dtype: torch.dtype, mode: int, gap: int, seed: int) -> None:
    check(rows, features, inputs, dtype, mode, gap, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", range(1, TILE + 2))
def test_every_tile(rows: int, dtype: torch.dtype) -> None:
    check(rows, PANEL + 1, 64, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("rows", [1, 7, 20, BLOCK_ROWS + 5])
def test_several_blocks(rows: int, mode: int, dtype: torch.dtype) -> None:
    check(rows, PANEL + 3, 2 * BLOCK_INPUTS + 7, dtype, mode)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("narrow", [False, True])
def test_storage(dtype: torch.dtype, narrow: bool) -> None:
    """Narrow where that loses nothing, whatever type the tensor comes in."""
    weight = matrix(PANEL + 1, 5, dtype, 0)
    panels = Panels(weight.to(dtype) if narrow else weight)
    assert panels.kind == KINDS[DTYPES.index(dtype)]
    assert (panels.features, panels.inputs) == weight.shape
    assert panels.nbytes == 2 * 5 * PANEL * dtype.itemsize


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, 1e-40, 65504.0 * 4])
def test_odd_values(value: float) -> None:
    """One number among the weights comes out as it went in."""
    weight = torch.zeros(3, 4)
    weight[1, 2] = value
    panels = Panels(weight)
    x, out = torch.zeros(1, 4), torch.empty(1, 3)
    x[0, 2] = 1
    scratch = torch.empty(scratch_floats(1, 4))
    product_once(x.data_ptr(), 4, 1, panels.address, panels.kind, 3, 4, out.data_ptr(), 3, 0, scratch.data_ptr())
    np.testing.assert_array_equal(out.numpy(), [[0, np.float32(value), 0]])


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
