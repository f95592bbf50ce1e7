"""Configuration: frozen keyword-only dataclasses, each checked once, when it is made.

``ParallelConfig`` and ``ProcessConfig`` are all that the executor needs; ``ModelConfig``, ``CacheConfig`` and
``SchedulerConfig`` belong to the language-model server. ``EngineConfig`` holds all of them. Checks that depend on the
machine get a :class:`DeviceTable` as an argument (``EngineConfig.checked(devices)``), so that they can be tried with
made-up machines. All of it is data (msgspec encodes it) and travels to the processes as such.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of this machine."""

    index: int
    """Place in the platform's own order, as the user counts (after CUDA_VISIBLE_DEVICES and the like)."""
    name: str
    uuid: str = ""
    """Name that stays the same whatever the order; passed through untouched."""
    memory: int = 0
    """Total memory in bytes."""


@dataclass(frozen=True, kw_only=True)
class DeviceTable:
    """What a platform found on this machine without importing torch."""

    platform: str
    """``cpu``, ``cuda`` or the entry-point name of another platform."""
    accelerator: bool
    """False where workers need no device of their own (cpu): any world size fits."""
    devices: tuple[Device, ...] = ()
    memory: int = 0
    """Host memory in bytes that processes of this machine may use (cgroup limits counted in)."""
    cores: int = 1
    """CPU cores that processes of this machine may use."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one model is spread over ranks. World size = TP x PP x PCP; DP multiplies engines, not the world."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    enable_expert_parallel: bool = False
    distributed_executor_backend: Any = None
    """``uni``, ``mp``, ``ray``, ``external_launcher``, a dotted name, an Executor subclass, or None: chosen."""
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 29501
    disable_custom_all_reduce: bool = False
    distributed_timeout_s: float = 600.0
    """Timeout of collectives of device and CPU groups in seconds."""

    @property
    def world_size(self) -> int:
        """Ranks of one executor: TP x PP x PCP."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def local_world_size(self) -> int:
        """Ranks of one executor that run on this machine."""
        return self.world_size // self.nnodes


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """How worker processes are made and talked to."""

    worker_cls: str = "auto"
    """Dotted name (``module:Class`` or ``module.Class``) of the worker class; ``auto``: the model worker."""
    worker_extension_cls: str = ""
    """Dotted name of a class that is mixed into the worker class; its methods can be called through the RPC."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports before it forks."""
    threads_per_worker: int = 0
    """Compute threads of one worker; 0: OMP_NUM_THREADS of the user, else cores / workers of this machine."""
    mq_slot_bytes: int = 65536
    """Bytes of one slot of the broadcast ring."""
    mq_slots: int = 64
    """Slots of the broadcast ring. A message may wrap over several slots, never be larger than the ring."""
    mq_answer_slot_bytes: int = 16384
    """Bytes of one slot of each answer ring."""
    mq_answer_slots: int = 32
    """Slots of each answer ring."""
    start_timeout_s: float = 600.0
    """Longest time without any progress of any rank during the start, in seconds."""
    execute_timeout_s: float = 300.0
    """Deadline of execute_model and sample_tokens in seconds."""
    failure_grace_s: float = 1.0
    """After a failed call: how long all ranks have to end it before the executor counts as broken, in seconds."""
    shutdown_timeout_s: float = 2.0
    """Rungs of the shutdown ladder: time between asking and SIGTERM, and again to SIGKILL, in seconds."""
    log_level: str = "info"
    log_dir: str = ""
    """Folder of this run's log files, one for each process; empty: a new one in the user's state folder."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, in which form."""

    model: str = ""
    """Local Hugging Face folder or hub name; empty: the embedded default model."""
    path: str = ""
    """Local folder that ``model`` was resolved to; set by ``drumline.model.resolve``."""
    tokenizer: str = ""
    """Folder or hub name of the tokenizer, if it is not the model's."""
    revision: str | None = None
    dtype: str = "auto"
    """``auto`` (float32 on cpu, else the checkpoint's), ``float32``, ``bfloat16``, ``float16``."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: what the model's config says."""
    load_format: str = "auto"
    """``auto``, ``safetensors``, or ``dummy`` (random weights from the config alone)."""
    trust_remote_code: bool = False
    seed: int = 0
    served_model_name: tuple[str, ...] = ()
    """Names under which the API knows the model; empty: ``model``."""
    chat_template: str = ""
    """File with, or text of, a chat template that replaces the model's."""
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens of one block."""
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    """Share of the device's memory that one engine may use."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV pool of one worker; None: from memory."""
    num_gpu_blocks_override: int | None = None
    """Blocks of the pool, whatever the memory; None: from memory."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step; longer prompts are split into chunks."""
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    """One step of look-ahead: plan n + 1 is sent before the answer of plan n is known."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_server_count: int = 1


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that one engine needs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    platform: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or the entry-point name of another platform."""

    def with_(self, **changes: Any) -> EngineConfig:
        """A copy with some fields replaced."""
        return replace(self, **changes)
