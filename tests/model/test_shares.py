"""What ``drumline plan`` says that each rank holds is what it holds, to the byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.cli.plan import plan_text
from drumline.config import CacheConfig, DeviceTable, EngineConfig, ParallelConfig
from drumline.errors import ConfigError
from drumline.model.expert_parallel import ExpertSharing
from drumline.model.loader import load_model, parameter_bytes
from drumline.model.shares import estimated_bytes, held_experts, rank_bytes, read_shapes
from drumline.model.spec import read_spec
from drumline.model.stages import stage_layers
from drumline.model.worker import ModelWorker
from drumline.worker.protocol import WorkerContext
from tests.model.conftest import engine_config
from tests.model.ranks import RankHost
from tests.model.test_architectures import Split, check
from tests.model.test_loader import Place
from tests.model.tiny import make_tiny

Tiny = Callable[[str], tuple[Path, Any]]
CPU = DeviceTable(platform="cpu", accelerator=False, cores=2, memory=24 << 30)


def weighted(folder: Path, weights: tuple[int, ...], tp: int, pp: int = 1, **model: Any) -> EngineConfig:
    config = engine_config(folder, tp, pp, **model)
    return config.with_(parallel=replace(config.parallel, tp_weights=weights), cache=CacheConfig(block_size=4))


def planned(config: EngineConfig) -> dict[str, tuple[int, int]]:
    """By name of a worker the bytes that the text of the plan has for it: of weights, and of a block."""
    rows = re.findall(r"^  (Worker\S*) +([\d,]+) +([\d,]+)$", plan_text(config, devices=CPU), re.MULTILINE)
    return {name: (int(weights.replace(",", "")), int(kv.replace(",", ""))) for name, weights, kv in rows}


@pytest.mark.parametrize(("weights", "pp"), [((), 1), ((2, 1), 3), ((1, 1, 1, 1, 2), 1)])
def test_of_every_architecture(tiny: Tiny, shape: str, weights: tuple[int, ...], pp: int) -> None:
    """Loading needs no other ranks, so all of them are loaded here, one after the other, whole and in stages."""
    folder, _ = tiny(shape)
    tp = len(weights) or 1
    config = weighted(folder, weights, tp, pp)
    spec = read_spec(folder).weighted(config.parallel)
    stages = stage_layers(spec, config.parallel)
    plan = rank_bytes(spec, read_shapes(folder), stages, tp, "bfloat16")
    about = estimated_bytes(spec, stages, tp, "bfloat16")
    for stage, layers in enumerate(stages):
        for rank in range(tp):
            model = load_model(
                spec, folder, dtype=torch.bfloat16, device=torch.device("cpu"), group=Place(rank, tp), layers=layers
            )
            assert parameter_bytes(model) == plan[stage][rank], (stage, rank)
            assert 0.8 < about[stage][rank] / plan[stage][rank] <= 1.001  # norms and biases of tiny models


@pytest.mark.parametrize(("shape", "redundant"), [("qwen3_moe", 4), ("gpt_oss", 0), ("deepseek_v3", 1)])
def test_of_whole_experts(tiny: Tiny, shape: str, redundant: int) -> None:
    """With experts in several slots, and a checkpoint of which a rank reads the end and the beginning."""
    folder, _ = tiny(shape)
    balancing = {"enable_eplb": redundant > 0, "eplb_config": {"num_redundant_experts": redundant}}
    parallel = ParallelConfig(tensor_parallel_size=3, enable_expert_parallel=True, **balancing)
    spec = read_spec(folder)
    assert spec.experts is not None
    stages, held = stage_layers(spec, parallel), held_experts(spec, parallel)
    assert sum(map(len, held)) == spec.experts.num_experts + redundant
    plan = rank_bytes(spec, read_shapes(folder), stages, 3, "float32", held)[0]
    about = estimated_bytes(spec, stages, 3, "float32", held)[0]
    for rank in range(3):
        place = Place(rank, 3)
        sharing = ExpertSharing.of(spec.experts, place, rank, 3, redundant=redundant, how="auto", counts=False)
        model = load_model(spec, folder, dtype=torch.float32, device=torch.device("cpu"), group=place, experts=sharing)
        assert parameter_bytes(model) == plan[rank]
        assert 0.5 < about[rank] / plan[rank] < 2


@pytest.mark.parametrize(
    ("shape", "tp", "pp", "weights"),
    [("llama", 2, 2, (2, 1)), ("qwen2", 3, 1, (4, 2, 1)), ("llama-tied", 3, 1, ())],
)
def test_of_workers(rank_host: RankHost, tiny: Tiny, shape: str, tp: int, pp: int, weights: tuple[int, ...]) -> None:
    """Real processes, and the text of ``drumline plan``."""
    folder, _ = tiny(shape)
    config = weighted(folder, weights, tp, pp, model_impl="transformers")
    names = rank_host.start(config, num_blocks=24, block_size=4)
    held = rank_host.call("held")
    plan = planned(config)
    assert list(plan) == names
    for name, (parameters, told, cache) in zip(names, held, strict=True):
        assert (parameters, told, cache) == (plan[name][0], plan[name][0], 24 * plan[name][1])
    blocks = [spec.bytes_per_block for spec in rank_host.call("get_kv_cache_spec")]
    assert blocks == [kv for _, kv in plan.values()]
    if shape == "llama":  # 3 KV heads by 2 to 1
        assert [blocks[0], blocks[2]] == [2 * blocks[1], 2 * blocks[3]]
    if weights:
        assert plan[names[0]][0] > 1.3 * plan[names[1]][0]


def test_a_head_of_its_own_counts_beside_the_embedding(tiny: Tiny) -> None:
    folder, _ = tiny("llama-tied")
    spec, shapes = read_spec(folder), dict(read_shapes(folder))
    both = shapes | {"lm_head.weight": shapes["model.embed_tokens.weight"]}
    only_head = {name: shape for name, shape in both.items() if "embed_tokens" not in name}
    stages = stage_layers(spec, engine_config(folder).parallel)
    (tied,), (untied,), (head,) = (
        rank_bytes(replace(spec, tied=is_tied), found, stages, 1, "float32")
        for is_tied, found in ((True, both), (False, both), (True, only_head))
    )
    assert tied == rank_bytes(spec, shapes, stages, 1, "float32")[0] == head
    assert untied[0] - tied[0] == 4 * 263 * 40


def test_tensors_that_are_no_parameters(tiny: Tiny) -> None:
    folder, _ = tiny("gpt_neox")
    spec, shapes = read_spec(folder), dict(read_shapes(folder))
    stages = stage_layers(spec, engine_config(folder).parallel)
    plain = rank_bytes(spec, shapes, stages, 1, "float32")
    old = {
        "gpt_neox.layers.0.attention.bias": (1, 1, 256, 256),
        "gpt_neox.layers.0.attention.masked_bias": (),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (6,),
        "gpt_neox.layers.3.mlp.dense_h_to_4h.weight": (103, 60),  # a layer that the configuration has not
    }
    assert rank_bytes(spec, shapes | old, stages, 1, "float32") == plain


def test_a_plan_without_weights_says_about(tiny: Tiny) -> None:
    folder, _ = tiny("llama")
    text = plan_text(weighted(folder, (2, 1), 2, load_format="dummy"), devices=CPU)
    assert re.search(r"Worker_TP0 +about [\d,]+ +[\d,]+\n", text)
    assert "in the proportions 2,1" in text


def test_a_worker_wants_numbers(tiny: Tiny) -> None:
    config = engine_config(tiny("llama")[0])
    config = config.with_(parallel=replace(config.parallel, tp_weights="auto"))
    with pytest.raises(ConfigError, match="--tp-weights auto is found before workers are started"):
        ModelWorker(WorkerContext(config=config, rank=0, local_rank=0, distributed_init_method="", is_driver=True))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_without_shared_experts(tmp_path: Path) -> None:
    """Their linears are zero wide then, and on every rank as they are; the ranks together compute the model."""
    whole = make_tiny(tmp_path, "deepseek_v3", n_shared_experts=0)
    spec = read_spec(tmp_path)
    shapes = read_shapes(tmp_path)
    assert (0, 52) in shapes.values()
    split = Split(tmp_path, 2)
    plan = rank_bytes(spec, shapes, stage_layers(spec, ParallelConfig()), 2, "float32")[0]
    assert tuple(map(parameter_bytes, split.models)) == plan
    check(whole, split)
