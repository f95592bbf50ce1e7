"""What is refused before any process exists."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from drumline.config import (
    CacheConfig,
    Device,
    DeviceTable,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ProcessConfig,
)
from drumline.engine.checks import check_machine, check_model
from drumline.errors import ConfigError

CPU = DeviceTable(platform="cpu", accelerator=False)
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 99,
    "max_position_embeddings": 512,
}


def asked(process: dict[str, Any] | None = None, **parallel: Any) -> EngineConfig:
    return EngineConfig(parallel=ParallelConfig(**parallel), process=ProcessConfig(**(process or {})))


@pytest.mark.parametrize(
    ("backend", "kind", "words"),
    [
        ("foo", ConfigError, "must be one of uni, mp"),
        ("nope.Executor", ConfigError, "No module named 'nope'"),
        ("json.JSONDecoder", TypeError, "must be a subclass of Executor"),
        (3, TypeError, "must be a subclass of Executor"),
        ("ray", ConfigError, "not built yet"),
        ("uni", ConfigError, "uni runs one worker, but the world size is 2"),
    ],
)
def test_backends(backend: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        check_machine(asked(distributed_executor_backend=backend, tensor_parallel_size=2), CPU)


def test_too_many_workers() -> None:
    with pytest.raises(ConfigError, match="at most 255 workers"):
        check_machine(asked(tensor_parallel_size=256), CPU)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope:No", "there is no module 'nope'"),
        ("nope.deeper:No", "there is no module 'nope'"),
        ("mailbox.deeper:No", "there is no module 'mailbox.deeper'"),
        ("email.nope.No", "there is no module 'email.nope'"),
        ("NoModule", "no dotted name"),
        ("json:", "no dotted name"),
        ("json:No", "has no attribute 'No'"),
        ("json.loads", "must be a class"),
    ],
)
@pytest.mark.parametrize("option", ["worker_cls", "worker_extension_cls"])
def test_worker_classes(option: str, name: str, words: str) -> None:
    flag = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} .*{words}"):
        check_machine(asked({option: name}), CPU)


def test_worker_classes_are_looked_for_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "users_package" / "inner"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "workers.py"):  # inner is a namespace package
        path.write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("users_package.inner.workers:Own", "users_package.Own", "__main__:Own"):
        check_machine(asked({"worker_cls": name}), CPU)
    assert "users_package" not in sys.modules
    with pytest.raises(ConfigError, match=r"there is no module 'users_package\.inner\.nope'"):
        check_machine(asked({"worker_cls": "users_package.inner.nope:Own"}), CPU)


def test_what_fits_passes() -> None:
    process = {"worker_extension_cls": "tests.llm.extension:Extension"}
    assert check_machine(asked(process, tensor_parallel_size=2), CPU).platform == "cpu"


def test_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def check(worker_cls: str = "auto", max_model_len: int | None = None, **parallel: Any) -> None:
        model = ModelConfig(path=str(tmp_path), max_model_len=max_model_len)
        check_model(asked({"worker_cls": worker_cls}, **parallel).with_(model=model))

    check(tensor_parallel_size=6, max_model_len=512)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 9 is more than the model's 8 query heads"):
        check(tensor_parallel_size=9)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 7 is more than the model's width of 6"):
        check(tensor_parallel_size=7)
    with pytest.raises(ConfigError, match=r"would hold different KV heads .* Sizes that work here: 1;"):
        check(tensor_parallel_size=2, decode_context_parallel_size=2)
    check(tensor_parallel_size=2, prefill_context_parallel_size=2, decode_context_parallel_size=2)
    with pytest.raises(ConfigError, match="--max-model-len 100000 must be between 2 and the model's 512"):
        check(max_model_len=100000)
    check("own:Worker", max_model_len=100000, tensor_parallel_size=9)


def test_experts(tmp_path: Path) -> None:
    def check(redundant: int = 0, **parallel: Any) -> None:
        more = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": redundant}} if redundant else {}
        config = asked(enable_expert_parallel=True, **more, **parallel)
        check_model(config.with_(model=ModelConfig(path=str(tmp_path))))

    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no experts .*leave --enable-expert-parallel out"):
        check(tensor_parallel_size=2)
    experts = MODEL | {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 3}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    check(tensor_parallel_size=4)  # wider than an expert, which is not split
    check(tensor_parallel_size=6, redundant=2)
    with pytest.raises(ConfigError, match=r"over 5 ranks .* more than the model's 4 experts"):
        check(tensor_parallel_size=5)
    with pytest.raises(ConfigError, match=r"over 6 ranks .* more than the model's 4 experts"):
        check(tensor_parallel_size=2, data_parallel_size=3)
    with pytest.raises(ConfigError, match=r"num_redundant_experts 5 .* is more than 4"):
        check(tensor_parallel_size=2, redundant=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 1}, r"--tensor-parallel-size 2 is more than the model's vocabulary of 1 ids \(vocab_size\)"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts: 0, but 2 layers are made of experts"),
        ({"model_type": "gpt_oss", "num_local_experts": -1}, "num_local_experts: -1, but 2 layers"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step: 0; .* it is 1 at least"),
    ],
)
def test_numbers_of_a_model_that_cannot_be(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | changes))
    with pytest.raises(ConfigError, match=words):
        check_model(asked(tensor_parallel_size=2).with_(model=ModelConfig(path=str(tmp_path))))


def test_a_model_made_for_experts_may_have_none(tmp_path: Path) -> None:
    """Of Qwen3-MoE 0 means layers without experts; of others it is no model."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"model_type": "qwen3_moe", "num_experts": 0}))
    check_model(asked(tensor_parallel_size=2).with_(model=ModelConfig(path=str(tmp_path))))


def test_kv_pools_larger_than_the_machine(tmp_path: Path) -> None:
    """On CPUs; of accelerators the workers know better."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    cpu = DeviceTable(platform="cpu", accelerator=False, memory=1 << 20)

    def check(devices: DeviceTable = cpu, **cache: Any) -> None:
        config = asked(tensor_parallel_size=2, data_parallel_size=2)
        check_model(config.with_(model=ModelConfig(path=str(tmp_path)), cache=CacheConfig(**cache)), devices)

    # keys and values of 2 layers, 8 heads of 4 numbers, 16 tokens: 8 KiB a block over two ranks, of two engines
    check(num_gpu_blocks_override=64)
    words = (
        r"^--num-gpu-blocks-override 65: the KV caches of the 4 workers on this machine would take 1\.0 MiB together, "
        r"and it has 1\.0 MiB of memory: use at most 64$"
    )
    with pytest.raises(ConfigError, match=words):
        check(num_gpu_blocks_override=65)
    check(kv_cache_memory_bytes=1 << 18)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 1048576: .* take 4\.0 MiB .* at most 262144"):
        check(kv_cache_memory_bytes=1 << 20)
    check(kv_cache_memory_bytes=1 << 20, num_gpu_blocks_override=1)
    check(DeviceTable(platform="cpu", accelerator=False), num_gpu_blocks_override=1 << 40)
    check(DeviceTable(platform="cuda", accelerator=True, memory=1 << 20), num_gpu_blocks_override=1 << 40)


def test_weights_that_context_parallelism_cannot_have(tmp_path: Path) -> None:
    """Given or found, they are named as the cause, if they are."""
    config = MODEL | {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    free = [80 << 30, 20 << 30, 20 << 30, 20 << 30]
    devices = tuple(Device(index=i, name="x", memory=80 << 30, free=one) for i, one in enumerate(free))
    table = DeviceTable(platform="cuda", accelerator=True, devices=devices)

    def check(weights: Any, dcp: int = 2) -> None:
        config = asked(tensor_parallel_size=4, decode_context_parallel_size=dcp, tp_weights=weights)
        check_model(config.with_(model=ModelConfig(path=str(tmp_path))), table)

    check(())
    check((2, 2, 1, 1))
    for weights in ("auto", (4, 1, 1, 1)):
        with pytest.raises(
            ConfigError, match=r"^--tp-weights 4,1,1,1 does not go with .*-size 2: .* leave --tp-weights"
        ):
            check(weights)
    with pytest.raises(ConfigError, match=r"^--decode-context-parallel-size 4: with --tensor-parallel-size 4"):
        check((4, 1, 1, 1), dcp=4)


def test_weights_from_free_memory(tmp_path: Path) -> None:
    """--tp-weights auto: the least of the devices of a TP place, and such that the model can be split so."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_key_value_heads": 4, "intermediate_size": 64}))
    gib = 1 << 30

    def weights(free: list[int], **parallel: Any) -> Any:
        table = DeviceTable(
            platform="cuda",
            accelerator=True,
            devices=tuple(Device(index=i, name="x", memory=90 * gib, free=one * gib) for i, one in enumerate(free)),
        )
        config = asked(tp_weights="auto", **parallel).with_(model=ModelConfig(path=str(tmp_path)))
        return check_model(config, table).parallel.tp_weights

    assert weights([80, 40], tensor_parallel_size=2) == (2, 1)
    assert weights([0, 45], tensor_parallel_size=2) == (2, 1)  # unknown: all of its memory
    assert weights([40, 41], tensor_parallel_size=2) == ()
    # 4 KV heads cannot be shared 16 to 1: the nearest weights that leave both one
    assert weights([80, 5], tensor_parallel_size=2) == (16 + 2, 1 + 2)
    # stages: place 0 has devices 0 and 2, place 1 devices 1 and 3
    assert weights([80, 40, 20, 40], tensor_parallel_size=2, pipeline_parallel_size=2) == (1, 2)
    given = asked(tp_weights="auto", tensor_parallel_size=2).with_(model=ModelConfig(path=str(tmp_path)))
    assert check_model(given, CPU).parallel.tp_weights == ()
    own = asked({"worker_cls": "own:Worker"}, tp_weights="auto").with_(model=ModelConfig(path="/nowhere"))
    assert check_model(own, CPU) == own


def test_weights_that_the_model_cannot_have(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"num_key_value_heads": 2}))
    config = asked(tp_weights=(9, 1), tensor_parallel_size=2).with_(model=ModelConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match="--tp-weights 9,1 leaves TP rank 1 nothing: its part of 2 KV heads"):
        check_model(config)
