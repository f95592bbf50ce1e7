from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import (
    CacheConfig,
    Device,
    DeviceTable,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ProcessConfig,
    SchedulerConfig,
    ServerConfig,
    choose_backend,
)
from drumline.errors import ConfigError
from drumline.llm.options import make_config

CPU = DeviceTable(platform="cpu", accelerator=False)


def gpus(count: int) -> DeviceTable:
    devices = tuple(Device(index=index, name="Made-up GPU") for index in range(count))
    return DeviceTable(platform="cuda", accelerator=True, devices=devices)


@pytest.mark.parametrize(
    "kind", [ParallelConfig, ProcessConfig, ModelConfig, CacheConfig, SchedulerConfig, EngineConfig]
)
def test_defaults_are_fine_and_travel_as_data(kind: type[Any]) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kind()), type=kind) == kind()


@pytest.mark.parametrize(
    ("kind", "field", "value", "says"),
    [
        (ParallelConfig, "tensor_parallel_size", 0, "--tensor-parallel-size"),
        (ParallelConfig, "pipeline_parallel_size", -1, "--pipeline-parallel-size"),
        (ParallelConfig, "tp_weights", (1, 2), r"--tp-weights\) 1,2 has 2 numbers, but --tensor-parallel-size is 1"),
        (ParallelConfig, "tp_weights", (0,), r"each at least 1, one for each TP rank, or auto, not \(0,\)"),
        (ParallelConfig, "tp_weights", "2,1", "or auto, not '2,1'"),
        (ParallelConfig, "pp_layer_partition", (1, 2), r"--pp-layer-partition\) 1,2 has 2 numbers"),
        (ParallelConfig, "pp_layer_partition", (0,), r"each at least 1, not \(0,\)"),
        (ParallelConfig, "pp_layer_partition", "10", "one for each stage, not '10'"),
        (ParallelConfig, "prefill_context_parallel_size", 0, "--prefill-context-parallel-size"),
        (ParallelConfig, "decode_context_parallel_size", 0, "--decode-context-parallel-size"),
        (ParallelConfig, "decode_context_parallel_size", 2, "must divide --tensor-parallel-size"),
        (ParallelConfig, "data_parallel_size", 0, "--data-parallel-size"),
        (ParallelConfig, "data_parallel_rank", 1, "must be below --data-parallel-size 1"),
        (ParallelConfig, "data_parallel_rank", -1, "--data-parallel-rank"),
        (ParallelConfig, "data_parallel_size_local", 0, "--data-parallel-size-local"),
        (ParallelConfig, "nnodes", 0, "--nnodes"),
        (ParallelConfig, "node_rank", 1, "must be below --nnodes 1"),
        (ParallelConfig, "nnodes", 2, "--master-addr"),
        (ParallelConfig, "master_port", 70000, "--master-port"),
        (ParallelConfig, "tensor_parallel_size", "2", "whole number, at least 1, not '2'"),
        (ParallelConfig, "tensor_parallel_size", True, "not True"),
        (ParallelConfig, "distributed_timeout_s", 0, "--distributed-timeout"),
        (ProcessConfig, "threads_per_worker", -1, "--threads-per-worker"),
        (ProcessConfig, "mq_slots", 1, "--mq-slots"),
        (ProcessConfig, "mq_slot_bytes", 1, "--mq-slot-bytes"),
        (ProcessConfig, "mq_answer_slots", 0, "--mq-answer-slots"),
        (ProcessConfig, "start_timeout_s", float("inf"), "--start-timeout"),
        (ProcessConfig, "stop_timeout_s", -1.0, "--stop-timeout"),
        (ProcessConfig, "log_level", "loud", "debug, info, warning"),
        (ModelConfig, "dtype", "int7", "auto, float32, bfloat16, float16, not 'int7'"),
        (ModelConfig, "load_format", "gguf", "auto, safetensors, dummy"),
        (ModelConfig, "max_model_len", 0, "--max-model-len"),
        (ModelConfig, "max_model_len", 1, "leaves no room for any request"),
        (CacheConfig, "block_size", 0, "--block-size"),
        (CacheConfig, "gpu_memory_utilization", 1.5, "at most 1"),
        (CacheConfig, "gpu_memory_utilization", 0.0, "--gpu-memory-utilization"),
        (CacheConfig, "kv_cache_memory_bytes", 0, "--kv-cache-memory-bytes"),
        (CacheConfig, "num_gpu_blocks_override", -4, "--num-gpu-blocks-override"),
        (SchedulerConfig, "max_num_seqs", 0, "--max-num-seqs"),
        (SchedulerConfig, "max_num_batched_tokens", 0, "--max-num-batched-tokens"),
        (ServerConfig, "port", 65536, "--port"),
        (ServerConfig, "api_server_count", -1, "--api-server-count"),
        (ServerConfig, "drain_lag_s", -1.0, "--drain-lag"),
        (ServerConfig, "shutdown_timeout_s", float("inf"), "--shutdown-timeout"),
        (ServerConfig, "shutdown_timeout_s", float("nan"), "--shutdown-timeout"),
    ],
)
def test_a_value_that_cannot_work_names_the_option(kind: type[Any], field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kind(**{field: value})


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="--tensor-parallel-size"):
        ParallelConfig(tensor_parallel_size=0)


def test_prompts_must_be_computable_without_chunked_prefill() -> None:
    scheduler = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=100)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens\) 100 must be at least --max-model-len 101"):
        EngineConfig(model=ModelConfig(max_model_len=101), scheduler=scheduler)
    EngineConfig(model=ModelConfig(max_model_len=100), scheduler=scheduler)
    for tokens in (2, 1):
        scheduler = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=tokens)
        with (
            contextlib.nullcontext()
            if tokens == 2
            else pytest.raises(ConfigError, match="1 must be at least 2 without")
        ):
            EngineConfig(scheduler=scheduler)


@pytest.mark.parametrize("backend", ["ray", "my.module.Executor"])
def test_several_machines_refuse_backends_that_place_workers_themselves(backend: str) -> None:
    with pytest.raises(ConfigError, match="needs --distributed-executor-backend mp, uni or external_launcher"):
        ParallelConfig(tensor_parallel_size=2, nnodes=2, master_addr="h", distributed_executor_backend=backend)
    ParallelConfig(tensor_parallel_size=2, nnodes=2, master_addr="h", distributed_executor_backend="mp")


def test_the_world_must_divide_over_the_machines() -> None:
    with pytest.raises(ConfigError, match=r"world size 3 .* cannot be split over 2 machines"):
        ParallelConfig(tensor_parallel_size=3, nnodes=2, master_addr="h")


def test_machines_of_one_dp_rank() -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=4, data_parallel_size=2, data_parallel_size_local=1, nnodes=4, node_rank=3, master_addr="h"
    )
    assert (parallel.nnodes_within_dp, parallel.node_rank_within_dp, parallel.local_world_size) == (2, 1, 2)
    assert parallel.local_devices == 2
    whole = ParallelConfig(tensor_parallel_size=4, data_parallel_size=2, nnodes=2, master_addr="h")
    assert (whole.nnodes_within_dp, whole.local_world_size, whole.local_devices) == (2, 2, 4)
    with pytest.raises(ConfigError, match=r"--nnodes 3 must be a multiple of .* = 2 / 1 = 2"):
        ParallelConfig(
            tensor_parallel_size=4, data_parallel_size=2, data_parallel_size_local=1, nnodes=3, master_addr="h"
        )
    with pytest.raises(ConfigError, match="must divide --data-parallel-size 3"):
        ParallelConfig(data_parallel_size=3, data_parallel_size_local=2)


def test_too_few_devices_are_refused_with_what_to_change() -> None:
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
    with pytest.raises(ConfigError) as caught:
        config.checked(gpus(3))
    for part in ("world size 4", "which has 3", "--nnodes", "ray", "cuda"):
        assert part in str(caught.value)
    assert config.checked(gpus(4)).platform == "cuda"
    assert config.checked(CPU).platform == "cpu"


def test_dp_ranks_of_this_machine_count() -> None:
    config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=4))
    with pytest.raises(ConfigError, match="for each of 4 DP ranks needs 8 cuda devices"):
        config.checked(gpus(7))
    config.checked(gpus(8))
    spread = ParallelConfig(tensor_parallel_size=2, data_parallel_size=4, data_parallel_size_local=2)
    EngineConfig(parallel=spread).checked(gpus(4))


def test_ray_and_custom_executors_are_not_held_to_this_machine() -> None:
    for backend in ("ray", "external_launcher", "my.Executor"):
        parallel = ParallelConfig(tensor_parallel_size=4, distributed_executor_backend=backend)
        EngineConfig(parallel=parallel).checked(gpus(1))
    parallel = ParallelConfig(tensor_parallel_size=4, distributed_executor_backend="mp")
    with pytest.raises(ConfigError):
        EngineConfig(parallel=parallel).checked(gpus(1))


def test_an_accelerator_without_devices_serves_nobody() -> None:
    with pytest.raises(ConfigError, match="needs 1 cuda devices on this machine, which has 0"):
        EngineConfig().checked(gpus(0))


def test_backend_when_none_is_given() -> None:
    tp4 = ParallelConfig(tensor_parallel_size=4)
    assert choose_backend(ParallelConfig(), CPU, in_ray_placement_group=True) == "uni"
    assert choose_backend(ParallelConfig(data_parallel_size=2), CPU) == "mp"
    assert choose_backend(tp4, CPU) == "mp"
    assert choose_backend(tp4, gpus(4)) == "mp"
    assert choose_backend(tp4, gpus(4), in_ray_placement_group=True) == "ray"
    several = ParallelConfig(tensor_parallel_size=4, nnodes=2, master_addr="h")
    assert choose_backend(several, gpus(1), in_ray_placement_group=True) == "mp"
    with pytest.raises(ConfigError, match="--distributed-executor-backend ray"):
        choose_backend(tp4, gpus(2), in_ray_placement_group=True)


def test_a_given_backend_is_taken_as_it_is() -> None:
    class Own: ...

    for backend in ("mp", "external_launcher", "a.b", Own):
        assert choose_backend(ParallelConfig(distributed_executor_backend=backend), CPU) is backend


def test_api_servers() -> None:
    parallel = ParallelConfig(data_parallel_size=4)
    assert ServerConfig().api_servers(parallel) == 4
    assert ServerConfig(api_server_count=2).api_servers(parallel) == 2


def test_checked_keeps_everything_else() -> None:
    config = EngineConfig(model=ModelConfig(model="x"), platform="cpu")
    assert config.checked(CPU) is config
    assert config.with_(platform="auto").checked(CPU) == config


sizes = st.integers(-1, 9)


@given(tp=sizes, pp=sizes, pcp=sizes, dcp=sizes, dp=sizes, local=st.none() | sizes, nodes=sizes, node=sizes)
def test_a_configuration_is_refused_or_consistent(
    tp: int, pp: int, pcp: int, dcp: int, dp: int, local: int | None, nodes: int, node: int
) -> None:
    try:
        parallel = ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            data_parallel_size=dp,
            data_parallel_size_local=local,
            nnodes=nodes,
            node_rank=node,
            master_addr="h",
        )
    except ConfigError:
        return
    assert parallel.world_size == tp * pp * pcp >= 1
    assert parallel.local_world_size * parallel.nnodes_within_dp == parallel.world_size
    assert 0 <= parallel.node_rank_within_dp < parallel.nnodes_within_dp <= nodes
    assert 0 <= parallel.data_parallel_rank_local < (local or dp)


def test_dtypes_by_other_names() -> None:
    class Dtype:
        """As torch's: known by what it prints."""

        def __repr__(self) -> str:
            return "torch.bfloat16"

    for name, dtype in (
        ("half", "float16"),
        ("float", "float32"),
        ("torch.float16", "float16"),
        (Dtype(), "bfloat16"),
    ):
        assert ModelConfig(dtype=name).dtype == dtype  # type: ignore[arg-type]
    for wrong in ("double", None, ["half"]):
        with pytest.raises(ConfigError, match="must be one of auto, float32"):
            ModelConfig(dtype=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"numa_bind_nodes": 0}, {"numa_bind_nodes": ("0",)}, {"numa_bind_cpus": "0-3"}, {"numa_bind_cpus": (0,)}]
)
def test_nodes_and_cpus_are_lists(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one for each worker of this machine"):
        ProcessConfig(**given)


def test_lists_of_nodes_and_cpus_become_tuples() -> None:
    config = ProcessConfig(numa_bind_nodes=[0, 1], numa_bind_cpus=["0-3", "4"])  # type: ignore[arg-type]
    assert (config.numa_bind_nodes, config.numa_bind_cpus) == ((0, 1), ("0-3", "4"))


@pytest.mark.parametrize("value", ["a,b", "1.5,1.5", "", [1.5, 1.5], [2, True], ["1", "2"], 3])
def test_layers_of_stages_by_keyword(value: Any) -> None:
    """``LLM(pp_layer_partition=...)``: nothing is rounded or taken for a number."""
    with pytest.raises(ConfigError, match="pp-layer-partition"):
        make_config(pipeline_parallel_size=2, pp_layer_partition=value)


@pytest.mark.parametrize("value", ["1,2", [1, 2], (1, 2)])
def test_layers_of_stages(value: Any) -> None:
    made = make_config(pipeline_parallel_size=2, pp_layer_partition=value)
    assert made.parallel.pp_layer_partition == (1, 2)
