"""Configuration: frozen keyword-only dataclasses, each checked once, when it is made.

``ParallelConfig`` and ``ProcessConfig`` are all that the executor needs; ``ModelConfig``, ``CacheConfig`` and
``SchedulerConfig`` belong to the language-model server. ``EngineConfig`` holds all of them. Checks that depend on the
machine get a :class:`DeviceTable` as an argument (``EngineConfig.checked(devices)``), so that they can be tried with
made-up machines. All of it is data (msgspec encodes it) and travels to the processes as such.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from drumline.errors import ConfigError

log = logging.getLogger(__name__)

BACKENDS = ("uni", "mp", "ray", "external_launcher")
"""Names of the executor backends; a dotted name or an Executor subclass stands for any other."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"float": "float32", "half": "float16"}
"""Other names of these, as torch and vLLM have them."""
LOAD_FORMATS = ("auto", "safetensors", "dummy")
MODEL_IMPLS = ("auto", "transformers")
START_METHODS = ("forkserver", "spawn", "fork", "plain")
"""How worker processes come to be; see ``processes.start_methods``."""
POLICIES = ("fcfs", "priority")
"""In which order requests are served."""
CPU_PREFILL_TOKENS = 128
"""Most prompt tokens in a step that has other rows, on CPUs: enough for the matrix products to be at full speed."""
ALL2ALL = ("auto", "all_to_all", "allgather_reducescatter")
"""How tokens come to experts on other ranks; see ``parallel.experts``."""
SWITCH = ("on", "off")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


_FLAGS = {"execute_timeout_s": "execute-model-timeout", "platform": "device"}
"""Fields whose flag has another name."""


def flag_of(name: str) -> str:
    """Flag of the command line that fills a field."""
    return "--" + _FLAGS.get(name, name.removesuffix("_s").replace("_", "-"))


def option(name: str) -> str:
    """How messages name a field: as Python users know it and as the command line does."""
    return f"{name} ({flag_of(name)})"


LEAST_MODEL_LEN = 2
"""Tokens that a request has at least: one of its prompt, one of its output."""


def _whole(config: Any, names: Iterable[str], least: int = 1) -> None:
    """Check that fields are whole numbers, not below ``least``."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{option(name)} must be a whole number, at least {least}, not {value!r}")


def _positive(config: Any, names: Iterable[str]) -> None:
    """Check that fields are numbers above 0 (and below infinity: every wait has an end)."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{option(name)} must be a number above 0, not {value!r}")


def _not_negative(config: Any, names: Iterable[str]) -> None:
    """Check that fields are numbers from 0 on, below infinity."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{option(name)} must be a number, at least 0, not {value!r}")


def _one_of(config: Any, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{option(name)} must be one of {', '.join(choices)}, not {value!r}")


def _several(config: Any, name: str, kind: type, what: str) -> None:
    """Check that a field is a tuple (or list) of things of a kind."""
    given = getattr(config, name)
    whole = not isinstance(given, str) and isinstance(given, Iterable)
    values = tuple(given) if whole else ()
    if not whole or not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
        raise ConfigError(f"{option(name)} must be {what}, one for each worker of this machine, not {given!r}")
    object.__setattr__(config, name, values)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of this machine."""

    index: int
    """Place in the platform's own order, as the user counts (after CUDA_VISIBLE_DEVICES and the like)."""
    name: str
    uuid: str = ""
    """Name that stays the same whatever the order; passed through untouched."""
    memory: int = 0
    """Total memory in bytes; 0: unknown."""
    free: int = 0
    """Bytes that nobody uses, at the time of the table; 0: unknown."""
    bus: str = ""
    """Address on the PCI bus, such as ``0000:3b:00.0``; empty: unknown."""
    numa_node: int | None = None
    """NUMA node of the host that it hangs on; None: unknown."""


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
class EPLBConfig:
    """Expert load balancing. Names and defaults are vLLM's."""

    window_size: int = 1000
    """Steps whose load counts."""
    step_interval: int = 3000
    """Every so many steps experts may move."""
    num_redundant_experts: int = 0
    """Slots beyond the number of experts, on all ranks together: they hold copies of the busiest experts."""
    log_balancedness: bool = False
    """Mean load of a rank over that of the busiest one goes to the log each time."""

    def __post_init__(self) -> None:
        for name, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{name} of {option('eplb_config')} must be a whole number, at least {least}, not {value!r}"
                )
        if not isinstance(self.log_balancedness, bool):
            raise ConfigError(
                f"log_balancedness of {option('eplb_config')} must be true or false, not {self.log_balancedness!r}"
            )

    @classmethod
    def of(cls, given: Any) -> EPLBConfig:
        """What was given as one, as a mapping, or as JSON. ConfigError for what it does not have."""
        if isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"{option('eplb_config')} is no JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"""{option("eplb_config")} must be JSON such as '{{"num_redundant_experts": 4}}', not {given!r}"""
            )
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name == "use_async" and not value:
                continue
            if name not in known:
                raise ConfigError(f"{option('eplb_config')} has no {name}; there are {', '.join(known)}")
        return cls(**{name: value for name, value in given.items() if name in known})


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one model is spread over ranks. World size = TP x PP x PCP; DP multiplies engines, not the world."""

    tensor_parallel_size: int = 1
    tp_weights: tuple[int, ...] | str = ()
    """In what proportions the TP ranks share heads, MLP widths and vocabulary: a whole number for each, such as 2, 1, 1
    for unlike devices; ``auto``: from the free memory of the devices; empty: evenly."""
    pipeline_parallel_size: int = 1
    pp_layer_partition: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: split so that the slowest stage is as fast as can be."""
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_size_local: int | None = None
    """DP ranks whose workers this machine has; None: all of them."""
    enable_expert_parallel: bool = False
    """Each rank has some experts whole, in place of a part of all. Only for models with experts."""
    all2all_backend: str = "auto"
    """How tokens come to experts on other ranks: ``auto``, ``all_to_all``, ``allgather_reducescatter``."""
    enable_eplb: bool = False
    """Load of experts is counted, and experts move between ranks to even it out."""
    eplb_config: EPLBConfig = field(default_factory=EPLBConfig)
    distributed_executor_backend: Any = None
    """``uni``, ``mp``, ``ray``, ``external_launcher``, a dotted name, an Executor subclass, or None: chosen."""
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 29501
    disable_custom_all_reduce: bool = False
    distributed_timeout_s: float = 600.0
    """Timeout of collectives of device and CPU groups in seconds."""
    cpu_distributed_timeout_s: float | None = None
    """Timeout of those of CPU groups alone (objects, barriers, CPU tensors); None: the same."""

    def __post_init__(self) -> None:
        _whole(
            self,
            (
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "decode_context_parallel_size",
                "data_parallel_size",
                "nnodes",
            ),
        )
        _whole(self, ("data_parallel_rank", "node_rank"), least=0)
        _positive(self, ("distributed_timeout_s",))
        if self.cpu_distributed_timeout_s is not None:
            _positive(self, ("cpu_distributed_timeout_s",))
        if not 0 < self.master_port < 65536:
            raise ConfigError(f"{option('master_port')} must be between 1 and 65535, not {self.master_port}")
        self._check_weights()
        self._check_experts()
        self._check_partition()
        self._check_decode_context()
        self._check_data_parallel()
        self._check_nodes()

    def _check_weights(self) -> None:
        """Whether each rank gets a head is known once there is a model (``parallel.shards``)."""
        given: Any = self.tp_weights
        if given == "auto":
            return
        kind = "whole numbers, each at least 1, one for each TP rank, or auto"
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(f"{option('tp_weights')} must be {kind}, not {given!r}")
        weights = tuple(given)
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in weights):
            raise ConfigError(f"{option('tp_weights')} must be {kind}, not {given!r}")
        if weights and len(weights) != self.tensor_parallel_size:
            raise ConfigError(
                f"{option('tp_weights')} {','.join(map(str, weights))} has {len(weights)} numbers, but "
                f"--tensor-parallel-size is {self.tensor_parallel_size}: give one for each rank"
            )
        object.__setattr__(self, "tp_weights", weights)

    def _check_partition(self) -> None:
        """Whether it adds up to the model's layers is known once there is a model (``parallel.shards``)."""
        given: Any = self.pp_layer_partition
        stages = self.pipeline_parallel_size
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ConfigError(
                f"{option('pp_layer_partition')} must be whole numbers, one for each stage, not {given!r}"
            )
        sizes = tuple(given)
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes):
            raise ConfigError(f"{option('pp_layer_partition')} must be whole numbers, each at least 1, not {given!r}")
        if sizes and len(sizes) != stages:
            raise ConfigError(
                f"{option('pp_layer_partition')} {','.join(map(str, sizes))} has {len(sizes)} numbers, but "
                f"--pipeline-parallel-size is {stages}: give one for each stage"
            )
        object.__setattr__(self, "pp_layer_partition", sizes)

    def _check_experts(self) -> None:
        _one_of(self, "all2all_backend", ALL2ALL)
        object.__setattr__(self, "eplb_config", EPLBConfig.of(self.eplb_config))
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ConfigError(
                f"{option('enable_eplb')} moves whole experts between ranks: add --enable-expert-parallel"
            )
        if self.enable_eplb and self.expert_parallel_size == 1:
            raise ConfigError(
                f"{option('enable_eplb')} needs several ranks to balance: set --tensor-parallel-size above 1, or leave "
                "it out"
            )
        if self.eplb_config != EPLBConfig() and not self.enable_eplb:
            default, given = EPLBConfig(), self.eplb_config
            names = [one.name for one in fields(given) if getattr(given, one.name) != getattr(default, one.name)]
            raise ConfigError(
                f"{', '.join(names)} of {option('eplb_config')} {'do' if len(names) > 1 else 'does'} nothing without "
                "balancing: add --enable-eplb"
            )
        if self.all2all_backend != "auto" and not self.enable_expert_parallel:
            raise ConfigError(
                f"{option('all2all_backend')} {self.all2all_backend} does nothing while each rank has a part of all "
                "experts: add --enable-expert-parallel"
            )

    def _check_decode_context(self) -> None:
        tp, pcp, dcp = self.tensor_parallel_size, self.prefill_context_parallel_size, self.decode_context_parallel_size
        if (tp * pcp) % dcp:
            raise ConfigError(
                f"{option('decode_context_parallel_size')} {dcp} must divide --tensor-parallel-size x "
                f"--prefill-context-parallel-size = {tp} x {pcp}: DCP ranks are those of one pipeline stage"
            )

    def _check_data_parallel(self) -> None:
        size, local = self.data_parallel_size, self.data_parallel_size_local
        if self.data_parallel_rank >= size:
            raise ConfigError(
                f"{option('data_parallel_rank')} {self.data_parallel_rank} must be below --data-parallel-size {size}"
            )
        if local is not None:
            _whole(self, ("data_parallel_size_local",))
            if size % local:
                raise ConfigError(
                    f"{option('data_parallel_size_local')} {local} must divide --data-parallel-size {size}"
                )

    def _check_nodes(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"{option('node_rank')} {self.node_rank} must be below --nnodes {self.nnodes}")
        if self.nnodes == 1:
            return
        if not self.master_addr:
            raise ConfigError("--nnodes > 1 needs --master-addr: the address of the machine with --node-rank 0")
        if self.distributed_executor_backend not in (None, "uni", "mp", "external_launcher"):
            raise ConfigError(
                f"--nnodes {self.nnodes} needs --distributed-executor-backend mp, uni or external_launcher, not "
                f"{self.distributed_executor_backend!r}: ray and custom executors place their workers themselves, so "
                "leave --nnodes at 1 there"
            )
        groups = self.data_parallel_size // self._dp_local
        if self.nnodes % groups:
            raise ConfigError(
                f"--nnodes {self.nnodes} must be a multiple of --data-parallel-size / --data-parallel-size-local = "
                f"{self.data_parallel_size} / {self._dp_local} = {groups}"
            )
        if self.world_size % self.nnodes_within_dp:
            raise ConfigError(
                f"the world size {self.world_size} (TP x PP x PCP) cannot be split over {self.nnodes_within_dp} "
                "machines: change --nnodes or one of the parallel sizes so that it divides"
            )

    @property
    def world_size(self) -> int:
        """Ranks of one executor: TP x PP x PCP."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Ranks over which the experts of a layer are spread: DP x PCP x TP; 1 without expert parallelism."""
        if not self.enable_expert_parallel:
            return 1
        return self.data_parallel_size * self.prefill_context_parallel_size * self.tensor_parallel_size

    @property
    def spans_engines(self) -> bool:
        """Whether ranks of different engines talk, so that WORLD is that of all of them."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def _dp_local(self) -> int:
        return self.data_parallel_size_local or self.data_parallel_size

    @property
    def nnodes_within_dp(self) -> int:
        """Machines that one executor spans."""
        return 1 if self.nnodes == 1 else self.nnodes // (self.data_parallel_size // self._dp_local)

    @property
    def node_rank_within_dp(self) -> int:
        """Place of this machine among those that its executor spans; 0 leads."""
        return self.node_rank % self.nnodes_within_dp

    @property
    def local_world_size(self) -> int:
        """Ranks of one executor that run on this machine."""
        return self.world_size // self.nnodes_within_dp

    @property
    def data_parallel_rank_local(self) -> int:
        """Place of this DP rank among those of this machine; picks its devices."""
        return self.data_parallel_rank % self._dp_local

    @property
    def local_devices(self) -> int:
        """Devices that all workers of this machine take together, one each."""
        return self.local_world_size * self._dp_local


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """How worker processes are made and talked to."""

    worker_cls: str = "auto"
    """Dotted name (``module:Class`` or ``module.Class``) of the worker class; ``auto``: the model worker."""
    worker_extension_cls: str = ""
    """Dotted name of a class that is mixed into the worker class; its methods can be called through the RPC."""
    worker_start_method: str = "auto"
    """``forkserver``: copies of a process that has the imports; ``spawn``: fresh processes, made by the one that has
    the executor; ``fork``: copies of that one; ``plain``: fresh ones, made by a helper process; ``auto``: what
    DRUMLINE_WORKER_START_METHOD says, else ``forkserver``."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports before it forks."""
    threads_per_worker: int = 0
    """Compute threads of one worker; 0: OMP_NUM_THREADS of the user, else cores / workers of this machine."""
    cpu_bind: bool = True
    """Several workers that compute on CPUs get cores of their own, an even part of them each, if there are enough."""
    numa_bind: bool = False
    """Each worker runs on the CPUs of its device's NUMA node and takes memory from there."""
    numa_bind_nodes: tuple[int, ...] = ()
    """The node of each worker of this machine, all DP ranks, in order; empty: found by the device's PCI path."""
    numa_bind_cpus: tuple[str, ...] = ()
    """The CPUs of each worker of this machine (``0-3,8``); empty: those of its node."""
    mq_slot_bytes: int = 65536
    """Bytes of one slot of the broadcast ring."""
    mq_slots: int = 64
    """Slots of the broadcast ring. A message may wrap over several slots, never be larger than the ring."""
    mq_answer_slot_bytes: int = 16384
    """Bytes of one slot of each answer ring."""
    mq_answer_slots: int = 32
    """Slots of each answer ring."""
    mq_arena_bytes: int = 41943040
    """Bytes of the arena for large buffers that go to all workers (numpy arrays and the like); 0: they go through the
    broadcast ring."""
    mq_largest_bytes: int = 1 << 32
    """Most bytes of a call or an answer. What does not fit into ring and arena goes in pieces."""
    start_timeout_s: float = 600.0
    """Longest time without any progress of any rank during the start, in seconds."""
    rpc_backlog_bytes: int = 1 << 30
    """Most bytes that calls which wait for room and answers that nobody has taken may hold in the executor's process;
    past that, a call that is not waited for is refused (RPCBacklogError)."""
    execute_timeout_s: float = 300.0
    """Deadline of execute_model, sample_tokens, draft and dummy calls in seconds."""
    long_wait_s: float = 60.0
    """A wait for workers that takes longer is explained in the log: who is late, and what it is doing."""
    stall_timeout_s: float = 60.0
    """A rank that makes no progress for so long while work is outstanding hangs: stacks of all ranks are written, then
    the executor fails. Calls with an ``expected_s`` or a deadline of their own that is longer may take that long."""
    failure_grace_s: float = 1.0
    """After a failed call: how long all ranks have to end it before the executor counts as broken, in seconds."""
    stop_timeout_s: float = 2.0
    """Ladder of a stop: time a worker has between being asked to end and SIGTERM, in seconds."""
    log_level: str = "info"
    log_dir: str = ""
    """Folder of this run's log files, one for each process; empty: a new one in the user's state folder."""

    def __post_init__(self) -> None:
        _whole(self, ("threads_per_worker",), least=0)
        _whole(self, ("mq_slot_bytes", "mq_answer_slot_bytes"), least=64)
        _whole(self, ("mq_slots", "mq_answer_slots"), least=2)
        _whole(self, ("mq_arena_bytes",), least=0)
        _whole(self, ("mq_largest_bytes", "rpc_backlog_bytes"))
        _positive(
            self,
            (
                "start_timeout_s",
                "execute_timeout_s",
                "stall_timeout_s",
                "failure_grace_s",
                "stop_timeout_s",
                "long_wait_s",
            ),
        )
        _one_of(self, "log_level", LOG_LEVELS)
        _several(self, "numa_bind_nodes", int, "whole numbers, such as 0, 0, 1, 1")
        _several(self, "numa_bind_cpus", str, "texts, such as '0-3', '4-7'")
        _one_of(self, "worker_start_method", ("auto", *START_METHODS))

    @property
    def numa(self) -> bool:
        """Whether processes are bound to NUMA nodes: nodes or CPUs that are given ask for that, too."""
        return self.numa_bind or bool(self.numa_bind_nodes) or bool(self.numa_bind_cpus)

    @property
    def terminate_timeout_s(self) -> float:
        """Ladder of a stop: from SIGTERM, which ends what can still be interrupted, to SIGKILL."""
        return self.stop_timeout_s / 4


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
    """Longest prompt plus output in tokens; None: what the model's config says (with longrope: the length of its first
    training)."""
    load_format: str = "auto"
    """``auto``, ``safetensors``, or ``dummy`` (random weights from the config alone)."""
    model_impl: str = "auto"
    """``auto``: the fastest way to run the model; ``transformers``: its modules as they are, whose weights can be
    looked at and changed (``LLM.apply_model``)."""
    trust_remote_code: bool = False
    """Known to vLLM's users: accepted with a warning and set back, since no such code is ever run."""
    seed: int = 0
    served_model_name: tuple[str, ...] = ()
    """Names under which the API knows the model; empty: ``model``."""
    chat_template: str = ""
    """File with, or text of, a chat template that replaces the model's."""
    skip_tokenizer_init: bool = False
    max_logprobs: int = 20
    """Most log-probabilities that a request may ask for at each position; -1: as many as there are tokens."""
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if self.trust_remote_code:
            log.warning(
                "%s has no effect: models are built from transformers' own classes, never from code that comes with "
                "them",
                option("trust_remote_code"),
            )
            object.__setattr__(self, "trust_remote_code", False)
        dtype = str(self.dtype).removeprefix("torch.")  # torch's own are known by name: torch is not imported here
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(dtype, dtype))
        _one_of(self, "dtype", DTYPES)
        _one_of(self, "load_format", LOAD_FORMATS)
        _one_of(self, "model_impl", MODEL_IMPLS)
        if self.max_model_len is not None:
            _whole(self, ("max_model_len",))
            if self.max_model_len < LEAST_MODEL_LEN:
                raise ConfigError(
                    f"{option('max_model_len')} {self.max_model_len} leaves no room for any request, which has a token "
                    f"of its prompt and one of its output at least. Give {LEAST_MODEL_LEN} or more, or leave it out"
                )
        _whole(self, ("seed",), least=-(2**63))
        _whole(self, ("max_logprobs",), least=-1)


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

    def __post_init__(self) -> None:
        _whole(self, ("block_size",))
        _whole(self, [n for n in ("kv_cache_memory_bytes", "num_gpu_blocks_override") if getattr(self, n) is not None])
        _positive(self, ("gpu_memory_utilization",))
        if self.gpu_memory_utilization > 1:
            raise ConfigError(
                f"{option('gpu_memory_utilization')} is a share of the device's memory, at most 1, not "
                f"{self.gpu_memory_utilization}"
            )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step."""

    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step; longer prompts are split into chunks."""
    enable_chunked_prefill: bool = True
    max_num_prefill_tokens: int | None = None
    """Most prompt tokens in a step, unless it has one prompt alone; 0: no limit; None: 256 on cpu, where more would
    hold up running streams for long, and no limit elsewhere."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step while there are other requests; 0: no limit."""
    scheduling_policy: str = "fcfs"
    """``fcfs``: in order of arrival; ``priority``: requests with a lower ``priority`` first, then by arrival."""
    async_scheduling: bool | None = None
    """One step of look-ahead: plan n + 1 is sent before the answer of plan n is known. None: where the executor class
    can; True: a class that cannot is refused."""

    def __post_init__(self) -> None:
        _whole(self, ("max_num_seqs", "max_num_batched_tokens"))
        _whole(self, ("long_prefill_token_threshold",), least=0)
        if self.max_num_prefill_tokens is not None:
            _whole(self, ("max_num_prefill_tokens",), least=0)
        _one_of(self, "scheduling_policy", POLICIES)

    def prefill_tokens(self, platform: str) -> int:
        """``max_num_prefill_tokens`` on a platform; 0: no limit."""
        if self.max_num_prefill_tokens is not None:
            return self.max_num_prefill_tokens
        return CPU_PREFILL_TOKENS if platform == "cpu" else 0


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What becomes of an engine that dies once it was ready. It is its front end that starts it again."""

    recovery: str = "on"
    """``on``: when processes of the engine die, all of it is started again and the requests go on; ``off``: the server
    ends (``LLM``, ``AsyncLLM``: calls raise EngineDeadError)."""
    recovery_restarts: int = 3
    """Most restarts within ``recovery_window_s``; the death after these is final."""
    recovery_window_s: float = 600.0
    recovery_backoff_s: float = 1.0
    """Wait before the second restart of a window, in seconds; doubled for each further one."""

    def __post_init__(self) -> None:
        _one_of(self, "recovery", SWITCH)
        _whole(self, ("recovery_restarts",))
        _positive(self, ("recovery_window_s", "recovery_backoff_s"))


@dataclass(frozen=True, kw_only=True)
class ServerConfig(RecoveryConfig):
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_server_count: int = 0
    """Processes that speak HTTP; 0: one for each DP rank."""
    drain_lag_s: float | None = None
    """After SIGTERM: how long new requests are still served, in seconds. None: 5 if a load balancer watches (two or
    more of ``/readyz``, ``/health`` and ``/ping`` were answered with 200, the last one within a minute), else 0."""
    shutdown_timeout_s: float = 20.0
    """After the lag: how long running requests may go on, in seconds; those that are left get an error then."""

    def api_servers(self, parallel: ParallelConfig) -> int:
        """How many processes speak HTTP."""
        return self.api_server_count or parallel.data_parallel_size

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole(self, ("api_server_count",), least=0)
        _not_negative(
            self, ("shutdown_timeout_s",) if self.drain_lag_s is None else ("drain_lag_s", "shutdown_timeout_s")
        )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"{option('port')} must be between 0 (any free port) and 65535, not {self.port}")


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

    def __post_init__(self) -> None:
        length, step = self.model.max_model_len, self.scheduler.max_num_batched_tokens
        if not self.scheduler.enable_chunked_prefill and step < (length or LEAST_MODEL_LEN):
            least = f"--max-model-len {length}" if length else f"{LEAST_MODEL_LEN}"
            raise ConfigError(
                f"{option('max_num_batched_tokens')} {step} must be at least {least} without chunked prefill, or the "
                "longest prompts could never be computed"
            )

    def with_(self, **changes: Any) -> EngineConfig:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def checked(self, devices: DeviceTable) -> EngineConfig:
        """This configuration with ``platform`` set to the table's, once it is known to fit the machine.

        ConfigError, before any process exists, if the platform gives each worker a device and this machine has too
        few. Backends that place workers themselves (``ray``, a custom one) are not held to this machine's devices.
        """
        if self.parallel.distributed_executor_backend in (None, *BACKENDS[:2]):
            _check_devices(self.parallel, devices)
        return self if self.platform == devices.platform else replace(self, platform=devices.platform)


def _check_devices(parallel: ParallelConfig, devices: DeviceTable) -> None:
    needed, found = parallel.local_devices, len(devices.devices)
    if not devices.accelerator or found >= needed:
        return
    several = f" for each of {parallel.data_parallel_size} DP ranks" if parallel.data_parallel_size > 1 else ""
    raise ConfigError(
        f"the world size {parallel.world_size} (TP {parallel.tensor_parallel_size} x PP "
        f"{parallel.pipeline_parallel_size} x PCP {parallel.prefill_context_parallel_size}){several} needs {needed} "
        f"{devices.platform} devices on this machine, which has {found}. Use smaller parallel sizes, spread the "
        "workers over several machines with --nnodes (and --node-rank, --master-addr), or let Ray place them with "
        "--distributed-executor-backend ray"
    )


def choose_backend(parallel: ParallelConfig, devices: DeviceTable, *, in_ray_placement_group: bool = False) -> Any:
    """The backend when none is given; one that was given is returned as it is. ``Executor.get_class`` uses this.

    In this order: world size 1 and DP 1: ``uni``; several machines: ``mp``; an accelerator platform with fewer
    devices than workers: ConfigError; inside a Ray placement group: ``ray``; else ``mp``.
    """
    if parallel.distributed_executor_backend is not None:
        return parallel.distributed_executor_backend
    if parallel.world_size == 1 and parallel.data_parallel_size == 1:
        return "uni"
    if parallel.nnodes > 1:
        return "mp"
    _check_devices(parallel, devices)
    return "ray" if in_ray_placement_group else "mp"
