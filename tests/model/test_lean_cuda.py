"""The lean forward on a GPU gives what the modules give there. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.model.attention import KVCache, make_batch
from drumline.model.forward import Forward, ModuleForward
from drumline.model.lean import LeanForward
from drumline.model.loader import load_model
from drumline.model.spec import ModelSpec, read_spec
from tests.model.equality import TIE
from tests.model.test_architectures import ThreadGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

BLOCK = 16


@torch.inference_mode()
def logits(forward: Forward, spec: ModelSpec, dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    """[T, vocabulary] for a prompt in chunks, the last ones of single tokens."""
    device = ids.device
    cache = KVCache(
        num_layers=spec.num_layers,
        num_blocks=16,
        num_kv_heads=spec.num_kv_heads,
        block_size=BLOCK,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=device,
    )
    tables = np.random.default_rng(0).permutation(16).astype(np.int32)[None]
    pieces, done = [], 0
    for count in (41, 15, 1, 1, 1):
        places = torch.arange(done, done + count, device=device)
        now = np.array([done], dtype=np.int32), np.array([count], dtype=np.int32)
        batch = make_batch(cache, tables[:, : -(-(done + count) // BLOCK)], *now, device)
        pieces.append(forward(ids[places], places, batch, torch.arange(count, device=device)))
        done += count
    return torch.cat(pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(tiny: Callable[[str], tuple[Path, Any]], flat_shape: str, dtype: torch.dtype) -> None:
    folder, model = tiny(flat_shape)
    device = torch.device("cuda")
    spec = read_spec(folder)
    ids = torch.randint(3, model.config.vocab_size, (59,), device=device)
    got = []
    for kind in (ModuleForward, lambda made: LeanForward(made, 256)):
        made = load_model(spec, folder, dtype=dtype, device=device, group=ThreadGroup(1).member(0))
        got.append(logits(kind(made), spec, dtype, ids))
    worst = float((got[0] - got[1]).abs().max() / got[0].std())
    # In bfloat16: 8 bits through three layers of large random weights.
    assert worst < (TIE if dtype == torch.float32 else 0.6), worst
