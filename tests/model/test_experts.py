"""Experts against the formula, over any routing and any split; where their weights come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from drumline.errors import ConfigError
from drumline.model.expert_spec import ExpertShare
from drumline.model.expert_weights import expert_pieces
from drumline.model.experts import Experts, gating_of
from drumline.model.loader import load_model
from drumline.model.spec import read_spec
from drumline.model.weights import DummyWeights, Piece, SafetensorsWeights, WeightSource
from drumline.parallel.shards import WIDTH_MULTIPLE, Range, width_shards
from tests.model.test_architectures import Split, ThreadGroup, check
from tests.model.test_loader import fused
from tests.model.tiny import make_tiny

HIDDEN, WIDTH = 6, 5


def gating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def make_experts(gate_up: torch.Tensor, down: torch.Tensor) -> Experts:
    """Experts with these weights."""
    made = Experts(len(down), HIDDEN, down.shape[-1], gating, torch.float32)
    made.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
    made.down_proj = nn.Parameter(down, requires_grad=False)
    return made


def formula(
    hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, row in enumerate(hidden.double()):
        for expert, weight in zip(index[token].tolist(), weights[token].double(), strict=True):
            gate, up = (gate_up[expert].double() @ row).split(WIDTH)
            out[token] += weight * (down[expert].double() @ gating(gate, up))
    return out


@given(st.integers(1, 9), st.integers(0, 20), st.data())
def test_any_routing_and_any_split(num_experts: int, tokens: int, data: st.DataObject) -> None:
    """Ranks' parts add up to the formula; experts that nobody chose are not looked at."""
    top_k = data.draw(st.integers(1, min(num_experts, 4)))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    index = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)] or [torch.zeros(top_k).long()])
    index = index[:tokens]
    hidden, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, top_k)
    gate_up, down = torch.randn(num_experts, 2 * WIDTH, HIDDEN), torch.randn(num_experts, HIDDEN, WIDTH)
    expected = formula(hidden, index, weights, gate_up, down)
    unused = [expert for expert in range(num_experts) if expert not in index]
    gate_up[unused] = float("nan")
    size = data.draw(st.integers(1, WIDTH))
    parts = []
    for rank in range(size):
        columns = width_shards(WIDTH, size, WIDTH_MULTIPLE)[rank].as_slice()
        gate, up = gate_up.chunk(2, 1)
        mine = make_experts(torch.cat([gate[:, columns], up[:, columns]], 1), down[:, :, columns].contiguous())
        parts.append(mine(hidden, index, weights))
    total = torch.stack(parts).sum(0)
    assert total.shape == hidden.shape
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-4)


def test_the_gating_of_gpt_oss() -> None:
    """Against its module in transformers, with numbers that are clamped."""
    config = transformers.GptOssConfig(hidden_size=4, intermediate_size=3, num_local_experts=1)
    theirs = GptOssExperts(config)
    both = torch.randn(50, 6) * 6
    torch.testing.assert_close(gating_of(theirs)(both[:, ::2], both[:, 1::2]), theirs._apply_gate(both))
    with pytest.raises(ValueError, match="Linear: unknown experts"):
        gating_of(nn.Linear(1, 1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_biases_are_added_once(tmp_path: Path, size: int) -> None:
    """The down projection's bias is on one rank alone, that of gate and up with its columns."""
    make_tiny(tmp_path, "gpt_oss")
    whole = load_file(tmp_path / "model.safetensors")
    blocks = [model.model.layers[0].mlp for model in Split(tmp_path, size).models]
    stored = {leaf: whole[f"model.layers.0.mlp.experts.{leaf}"] for leaf in ("gate_up_proj_bias", "down_proj_bias")}
    assert [block.experts.down_proj_bias is None for block in blocks] == [False] + [True] * (size - 1)
    assert blocks[0].experts.down_proj_bias.equal(stored["down_proj_bias"])
    halves = [torch.cat([block.experts.gate_up_proj_bias.chunk(2, 1)[i] for block in blocks], 1) for i in (0, 1)]
    assert halves[0].equal(stored["gate_up_proj_bias"][:, ::2])
    assert halves[1].equal(stored["gate_up_proj_bias"][:, 1::2])


def test_the_router_of_deepseek_stays_in_float32(tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek_v3")
    group = ThreadGroup(1).member(0)
    model: Any = load_model(
        read_spec(tmp_path), tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"), group=group
    )
    block = model.model.layers[1].mlp
    assert block.gate.weight.dtype == block.gate.e_score_correction_bias.dtype == torch.float32
    assert block.experts.down_proj.dtype == block.shared_experts.up_proj.weight.dtype == torch.bfloat16
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert block.gate.e_score_correction_bias.equal(stored)
    assert block(torch.randn(1, 3, 52, dtype=torch.bfloat16)).dtype == torch.bfloat16


SHARES = {
    "columns": ExpertShare(Range(0, 8), Range(5, 21)),
    "whole experts": ExpertShare(Range(3, 6), Range(0, 37)),
    "both": ExpertShare(Range(7, 8), Range(30, 37)),
}


def read(pieces: list[Piece], source: WeightSource, share: ExpertShare, hidden: int) -> dict[str, torch.Tensor]:
    """What the pieces make up."""
    count, width = share.experts.size, share.columns.size
    made = {
        "x.gate_up_proj": torch.full((count, 2 * width, hidden), float("nan")),
        "x.down_proj": torch.full((count, hidden, width), float("nan")),
    }
    for piece in pieces:
        place: Any = ... if piece.index is None else piece.index
        made[piece.target][place] = source.read(piece.source, piece.shape, piece.part)
    return made


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("form", ["each", "fused", "dummy"])
def test_a_share_is_read_from_every_form(tmp_path: Path, form: str, share: ExpertShare) -> None:
    make_tiny(tmp_path, "qwen3_moe")
    spec, file, stored = read_spec(tmp_path), tmp_path / "model.safetensors", "model.layers.2.mlp.experts"
    whole = fused(load_file(file))
    if form == "fused":
        save_file({name: tensor.contiguous() for name, tensor in whole.items()}, file)
    source: WeightSource = DummyWeights(1) if form == "dummy" else SafetensorsWeights(tmp_path)
    all_of_it = ExpertShare(Range(0, 8), Range(0, 37))
    pieces = expert_pieces("x", stored, all_of_it, spec, source)
    assert len(pieces) == (24 if form == "each" else 2)
    everything = read(pieces, source, all_of_it, 44)
    if form != "dummy":
        assert everything["x.gate_up_proj"].equal(whole[f"{stored}.gate_up_proj"])
        assert everything["x.down_proj"].equal(whole[f"{stored}.down_proj"])
    mine = read(expert_pieces("x", stored, share, spec, source), source, share, 44)
    some, columns = share.experts.as_slice(), share.columns.as_slice()
    gate, up = everything["x.gate_up_proj"][some].chunk(2, 1)
    assert mine["x.gate_up_proj"].equal(torch.cat([gate[:, columns], up[:, columns]], 1))
    assert mine["x.down_proj"].equal(everything["x.down_proj"][some][:, :, columns])


@pytest.mark.parametrize("shape", ["qwen3_moe", "mixtral"])
def test_a_fused_checkpoint(tmp_path: Path, shape: str) -> None:
    """As transformers has experts in memory; others have a tensor for each matrix."""
    model = make_tiny(tmp_path, shape)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(".experts.0." in name for name in tensors)
    save_file({name: tensor.contiguous() for name, tensor in fused(tensors).items()}, file)
    check(model, Split(tmp_path, 2))


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    make_tiny(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"lack model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight"):
        Split(tmp_path, 1)


def test_too_wide_a_group_for_the_experts(tmp_path: Path) -> None:
    """Said before anything is loaded (``engine.checks``), and again by the loader."""
    make_tiny(tmp_path, "qwen3_moe", moe_intermediate_size=3)
    spec = read_spec(tmp_path)
    assert spec.mlp_widths == (67, 3)
    assert replace(spec, experts=None).mlp_widths == (67,)
    with pytest.raises(ConfigError, match="more than the model's width of 3"):
        Split(tmp_path, 5)
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM has no experts"):
        replace(spec, experts=None).expert_share(0, 1)
