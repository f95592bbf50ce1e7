from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from drumline.cli.plan import auxiliary_table, main, plan_text, process_table
from drumline.config import (
    Device,
    DeviceTable,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ProcessConfig,
    ServerConfig,
    choose_backend,
)
from drumline.worker.segment import SegmentLayout

CPU = DeviceTable(platform="cpu", accelerator=False, cores=2, memory=24 << 30)


def gpus(count: int) -> DeviceTable:
    devices = tuple(Device(index=index, name="H200", uuid=f"GPU-{index}") for index in range(count))
    return DeviceTable(platform="cuda", accelerator=True, devices=devices, cores=32)


def counts(parallel: ParallelConfig, server: ServerConfig | None = None) -> dict[str, int]:
    server = server or ServerConfig()
    return {row.role: len(row.names) for row in process_table(parallel, server, choose_backend(parallel, CPU))}


def test_tp_4_makes_6_processes() -> None:
    found = counts(ParallelConfig(tensor_parallel_size=4))
    assert found == {"API server": 1, "engine core": 1, "worker": 4}
    assert sum(found.values()) == 6


def test_tp_2_dp_4_makes_17_processes() -> None:
    found = counts(ParallelConfig(tensor_parallel_size=2, data_parallel_size=4))
    assert found == {"API server": 4, "engine core": 4, "worker": 8, "DP coordinator": 1}
    assert sum(found.values()) == 17


def test_one_rank_lives_in_its_engine_core() -> None:
    assert counts(ParallelConfig()) == {"API server": 1, "engine core": 1, "worker": 0}


def test_api_servers_can_be_chosen() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=4)
    assert counts(parallel, ServerConfig(api_server_count=1))["API server"] == 1
    assert [row.role for row in auxiliary_table(parallel, ServerConfig(api_server_count=1))] == ["fork server"]
    assert [row.role for row in auxiliary_table(parallel, ServerConfig())] == ["fork server", "supervisor"]


def test_names_of_all_workers() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    (names,) = [row.names for row in process_table(parallel, ServerConfig(), "mp") if row.role == "worker"]
    assert names == tuple(f"Worker_DP{dp}_PP{pp}_TP{tp}" for dp in range(2) for pp in range(2) for tp in range(2))


def test_the_command_prints_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-tp", "4"]) == 0
    out = capsys.readouterr().out
    assert "processes: 6" in out
    assert "Worker_TP3" in out


def test_ranks_and_groups() -> None:
    text = plan_text(
        EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=4)), devices=CPU
    )
    assert "[0,1] [2,3] [4,5] [6,7]" in text
    assert "[0,2,4,6] [1,3,5,7]" in text
    assert "the output rank is 6" in text
    assert "Worker_PP3_TP1" in text


def test_dcp_groups() -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, prefill_context_parallel_size=2, decode_context_parallel_size=4)
    assert "[0,4,1,5] [2,6,3,7]" in plan_text(EngineConfig(parallel=parallel), devices=CPU)


def test_devices_of_ranks() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)
    rows = [line.split() for line in plan_text(EngineConfig(parallel=parallel), devices=gpus(4)).splitlines()]
    devices = {
        row[-1]: row[-3]
        for row in rows
        if row and row[-1].startswith("Worker_DP") and row[0].isdigit() and "H200" in row
    }
    assert devices == {
        "Worker_DP0_TP0": "cuda:0",
        "Worker_DP0_TP1": "cuda:1",
        "Worker_DP1_TP0": "cuda:2",
        "Worker_DP1_TP1": "cuda:3",
    }


def test_too_few_devices_are_said_but_the_plan_is_shown() -> None:
    text = plan_text(EngineConfig(parallel=ParallelConfig(tensor_parallel_size=4)), devices=gpus(2))
    assert "processes: 6" in text
    assert "cuda:3 (not here)" in text
    assert "serve would refuse this here: the world size 4" in text


def test_several_machines() -> None:
    parallel = ParallelConfig(tensor_parallel_size=4, nnodes=2, master_addr="h")
    text = plan_text(EngineConfig(parallel=parallel), devices=CPU)
    table = [
        line.split() for line in text.splitlines() if line.endswith(("TP0", "TP1", "TP2", "TP3")) and "cpu" in line
    ]
    assert [(row[3], row[4]) for row in table] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]


def test_queue_sizes_are_those_of_the_segment() -> None:
    process = ProcessConfig(mq_slots=16, mq_slot_bytes=1 << 20)
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2), process=process)
    assert SegmentLayout.of(2, process).calls.total_bytes >> 20 == 16
    text = plan_text(config, devices=CPU)
    assert "queues of each engine core: 57 MiB" in text  # 16 for calls, 1 for answers, 40 for large buffers
    small = ProcessConfig(mq_slots=16, mq_slot_bytes=1 << 20, mq_arena_bytes=0)
    assert "queues of each engine core: 17 MiB" in plan_text(
        EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2), process=small), devices=CPU
    )
    assert "engine core to 2 readers" in text
    assert "queues: none" in plan_text(EngineConfig(), devices=CPU)


@pytest.mark.parametrize("backend", ["ray", "external_launcher", "tests.executor.test_select.Recording"])
def test_other_backends_have_queues_of_their_own(backend: str) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend=backend)
    text = plan_text(EngineConfig(parallel=parallel), devices=gpus(1))
    assert f"queues: none of drumline's own between engine core and workers with backend {backend}" in text
    assert "refuse" not in text


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("foo", "must be one of uni, mp"),
        ("my.module.Executor", "No module named 'my'"),
        ("json.JSONDecoder", "must be a subclass of Executor"),
        ("uni", "uni runs one worker, but the world size is 2"),
    ],
)
def test_a_backend_that_serve_would_refuse(backend: str, words: str) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend=backend)
    text = plan_text(EngineConfig(parallel=parallel), devices=CPU)
    assert "serve would refuse this here: " in text
    assert words in text


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_counts_unless_the_weights_have_another_one(tmp_path: Path, equal: bool) -> None:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    model = {"model_type": "llama", **dict.fromkeys(names, 4), "vocab_size": 1 << 18, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(model))
    embedding = np.zeros((1 << 18, 4), np.float32)
    head = embedding.copy()
    head[-1, -1] = 0 if equal else 1  # the last of all that are compared
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "model-1.safetensors")
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)))
    assert "about 4 MiB" in plan_text(config, devices=CPU)
    save_file({"lm_head.weight": head}, tmp_path / "model-2.safetensors")
    assert ("about 4 MiB" if equal else "about 8 MiB") in plan_text(config, devices=CPU)


def test_experts_count(tmp_path: Path) -> None:
    """Stages are balanced by what their layers weigh, with all experts of them."""
    model = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "moe_intermediate_size": 100,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "mlp_only_layers": [0, 1, 2, 3],
        "num_attention_heads": 8,
        "head_dim": 32,
        "vocab_size": 1000,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    given = ModelConfig(model=str(tmp_path), load_format="dummy", dtype="float32")
    parallel = ParallelConfig(tensor_parallel_size=3, pipeline_parallel_size=2)
    text = plan_text(EngineConfig(model=given, parallel=parallel), devices=CPU)
    assert "(Qwen3MoeForCausalLM: 8 layers, 64 experts (4 a token) in 4, 8 query and 4 KV heads" in text
    assert all(columns in text for columns in ("0..47 (48)", "48..79 (32)", "80..99 (20)"))
    attention, dense, experts = 2 * 12 * 32 * 256, 3 * 1024 * 256, 256 * 64 * (1 + 300)
    stages = [4 * (attention + dense) + attention + experts, 3 * (attention + experts) + 1000 * 256]
    stages[0] += 1000 * 256
    for weights in stages:
        assert f"about {weights * 4 / (1 << 20):.1f} MiB" in text
    whole = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}}
    text = plan_text(EngineConfig(model=given, parallel=replace(parallel, **whole)), devices=CPU)
    assert "columns of all experts" not in text
    assert [line.split(None, 1)[1] for line in text.splitlines() if "(22)" in line or "(20)," in line] == [
        "0..21 (22)",
        "22..43 (22)",
        "44..63 (20), 0..1 (2)",
    ]
    refused = EngineConfig(model=given, parallel=ParallelConfig(tensor_parallel_size=8)).with_(
        model=ModelConfig(model=str(tmp_path), load_format="dummy")
    )
    (tmp_path / "config.json").write_text(json.dumps(model | {"moe_intermediate_size": 6}))
    assert "serve would refuse this model: --tensor-parallel-size 8 is more than the model's width of 6" in plan_text(
        refused, devices=CPU
    )


def test_shares_of_a_model_folder(tmp_path: Path) -> None:
    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)), parallel=ParallelConfig(tensor_parallel_size=2))
    text = plan_text(config, devices=CPU)
    assert "9 query and 3 KV heads" in text
    assert "0..5 (6)" in text
    assert "2..2 (1)" in text
    refused = config.with_(parallel=ParallelConfig(tensor_parallel_size=10))
    assert "serve would refuse this model: --tensor-parallel-size 10" in plan_text(refused, devices=CPU)
    long = config.with_(model=ModelConfig(model=str(tmp_path), max_model_len=8193, load_format="dummy"))
    assert "serve would refuse this model: --max-model-len 8193 must be between 2 and" in plan_text(long, devices=CPU)
    assert "has no weights" in text
    dummy = config.with_(model=ModelConfig(model=str(tmp_path), load_format="dummy"))
    assert "refuse" not in plan_text(dummy, devices=CPU)
    staged = plan_text(
        dummy.with_(parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)), devices=CPU
    )
    rows = [line.split() for line in staged.splitlines() if line.endswith(("Worker_PP0_TP1", "Worker_PP1_TP1"))]
    assert [row[:4] for row in rows if "about" in row] == [
        ["0", "0..17", "(18)", "embedding"],  # the head weighs as much as five and a half layers with their KV
        ["1", "18..29", "(12)", "head"],
    ]
    spread = ParallelConfig(prefill_context_parallel_size=2, decode_context_parallel_size=2)
    text = plan_text(dummy.with_(parallel=spread), devices=CPU)
    assert "up to 45 KiB, of one token in 2" in text
    assert "Worker_PCP0_DCP0 Worker_PCP1_DCP1" in text
    kv_heads = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    assert "refuse this model: --decode-context-parallel-size 2" in plan_text(
        dummy.with_(parallel=kv_heads), devices=CPU
    )
    given = ParallelConfig(pipeline_parallel_size=3, pp_layer_partition=(10, 10, 9))
    assert "adds up to 29 layers, but the model has 30" in plan_text(dummy.with_(parallel=given), devices=CPU)
    too_many = ParallelConfig(pipeline_parallel_size=31)
    assert "--pipeline-parallel-size 31 is more than" in plan_text(dummy.with_(parallel=too_many), devices=CPU)
    (tmp_path / "config.json").write_text("{}")
    assert "serve would refuse this model: " in plan_text(dummy, devices=CPU)
