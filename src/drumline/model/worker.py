"""ModelWorker: the language model's worker (``worker/protocol.py``), one for each rank."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from drumline.errors import ConfigError, UnsupportedError
from drumline.model import spec as specs
from drumline.model.attention import KVCache
from drumline.model.choose import make_forward
from drumline.model.context_parallel import ContextParallel, PartForward, make_sampler
from drumline.model.expert_balance import ExpertBalancer
from drumline.model.expert_parallel import ExpertSharing, ParallelExperts
from drumline.model.forward import Forward, ModuleForward
from drumline.model.loader import load_model, parameter_bytes
from drumline.model.memory import Use, kv_room, warm_up
from drumline.model.pipeline import make_stage
from drumline.model.runner import ModelRunner
from drumline.model.stages import stage_layers
from drumline.parallel.context import check_same_heads
from drumline.parallel.groups import Groups, Timeouts, init_groups
from drumline.parallel.layout import Layout, device_index, global_rank, worker_places
from drumline.plan.kv import KVConfig, KVSpec
from drumline.plan.memory import StepCosts
from drumline.plan.step import StepOutput, StepPlan
from drumline.platforms import host
from drumline.platforms.resolve import resolve_platform
from drumline.processes.titles import worker_name
from drumline.worker.protocol import WorkerContext

log = logging.getLogger(__name__)

VALUE_BYTES = 160
"""Of one log-probability in an answer: two numbers of Python's in lists, and their message."""
CPU_KV_SHARE = 0.25
"""Share of the host's available memory that the KV pools of one machine's workers take at most, unless told."""


class ModelWorker:
    """Owns one device and one rank: weights, KV cache, slots.

    Life: made, ``init_device``, ``load_model``, ``get_kv_cache_spec``, ``determine_available_memory``,
    ``initialize_from_config``, ``compile_or_warm_up_model``, then steps, then ``shutdown``.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.config = context.config
        self.rank = context.rank
        self.layout = Layout.of(self.config.parallel)
        if not self.config.model.path:
            raise ConfigError("the model was not resolved to a local folder (drumline.model.resolve)")
        self.spec = specs.read_spec(self.config.model.path).weighted(self.config.parallel)
        if self.layout.dcp > 1:
            check_same_heads(self.layout, self.spec.heads(self.layout.tp), self.spec.tp_weights)
        self.max_model_len = specs.resolve_max_model_len(self.config.model.max_model_len, self.spec)
        self.platform = resolve_platform(self.config.platform)
        self.layers = stage_layers(self.spec, self.config.parallel)[self.layout.coordinates(self.rank).pp]
        """Layers of this rank's pipeline stage."""
        self.device_index = device_index(self.config.parallel, context.local_rank)
        self.dtype_name = specs.resolve_dtype(self.config.model.dtype, self.spec, self.platform.device_type)
        self.dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.groups: Groups | None = None
        self.device = torch.device("cpu")
        self.model: torch.nn.Module | None = None
        self.weight_bytes = 0
        """Of this rank's weights in the compute type, as ``drumline plan`` tells them. How they are laid out after that
        is the forward's business: in fewer bytes where that loses nothing."""
        self.cache: KVCache | None = None
        self._context_parallel: ContextParallel | None = None
        self._runner: ModelRunner | None = None
        self._balancer: ExpertBalancer | None = None
        self._opened = 0
        """Bytes of the device that were free before this process opened it; 0: unknown."""
        self._warm: Use | None = None
        """Of the device before the weights."""

    @property
    def runner(self) -> ModelRunner:
        """The runner; RuntimeError before ``load_model``."""
        if self._runner is None:
            raise RuntimeError("the model is not loaded")
        return self._runner

    def init_output_thread(self) -> None:
        """The current device belongs to a thread."""
        self.platform.set_device(self.device_index)

    def init_device(self) -> None:
        """Open the device, join the groups and use them once; then the worker has its name.

        What libraries and communicators keep is taken before there are weights and counted (``model.memory``).
        """
        self._opened = self.platform.free_before_use(self.device_index)
        self.device = self.platform.set_device(self.device_index)
        parallel = self.config.parallel
        spans = parallel.spans_engines
        self.groups = init_groups(
            Layout.of(parallel, span_engines=spans),
            global_rank(parallel, self.rank) if spans else self.rank,
            self.context.distributed_init_method,
            self.platform.collective_backend,
            Timeouts(parallel.distributed_timeout_s, parallel.cpu_distributed_timeout_s),
            device=self.device,
            one_machine=(parallel.nnodes if spans else parallel.nnodes_within_dp) == 1,
            expert_parallel=parallel.enable_expert_parallel,
            expert_balancing=parallel.enable_eplb,
            custom_all_reduce=not parallel.disable_custom_all_reduce,
        )
        warm_up(self.device, self.groups, self.dtype)
        self._warm = self._use()
        places = worker_places(parallel, self.rank)
        self.context.set_name(worker_name(**places, expert_parallel=parallel.enable_expert_parallel))

    def load_model(self) -> None:
        """Load this rank's share of the weights."""
        groups = self._groups()
        group, pipeline = groups.tp, groups.pp
        model = self.config.model
        if pipeline.size > 1:
            stage, last = pipeline.rank_in_group, self.layers.stop - 1
            log.info("pipeline stage %d of %d: layers %d to %d", stage, pipeline.size, self.layers.start, last)
        self.model = load_model(
            self.spec,
            model.path,
            dtype=self.dtype,
            device=self.device,
            group=group,
            layers=self.layers,
            max_model_len=self.max_model_len,
            load_format=model.load_format,
            seed=model.seed,
            experts=self._expert_sharing(groups),
            progress=lambda done: self.context.set_phase(f"load_model {done:.0%}"),
        )
        self.weight_bytes = parameter_bytes(self.model)
        log.debug("the weights of this rank have %d bytes", self.weight_bytes)
        if self.config.parallel.enable_eplb:
            layers = [module for module in self.model.modules() if isinstance(module, ParallelExperts)]
            self._balancer = ExpertBalancer(layers, groups.eplb, self.config.parallel.eplb_config) if layers else None
        ids = self.spec.vocabulary(group.size)
        sampler = make_sampler(ids, group, groups.pcp, wants_logprobs=self._is_output_rank)
        self._context_parallel = self._join_context(groups)
        self._runner = ModelRunner(
            self._forward(self.model, groups),
            sampler,
            num_kv_heads=self.spec.heads(group.size)[group.rank_in_group].kv.size,
            max_model_len=self.max_model_len,
            device=self.device,
            dtype=self.dtype,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            stage=make_stage(
                self.config,
                pipeline,
                pipeline.rank_in_group,
                width=self.spec.hidden_size,
                dtype=self.dtype,
                device=self.device,
            ),
            context=self._context_parallel,
        )
        if self.device.type == "cpu":
            gc.collect()
            host.give_back_memory()  # of the weights as they were loaded: they have been laid out anew

    def _expert_sharing(self, groups: Groups) -> ExpertSharing | None:
        parallel = self.config.parallel
        if not parallel.enable_expert_parallel or self.spec.experts is None:
            return None
        sharing = ExpertSharing.of(
            self.spec.experts,
            groups.ep,
            groups.tp.rank_in_group,
            groups.tp.size,
            redundant=parallel.eplb_config.num_redundant_experts,
            how=parallel.all2all_backend,
            counts=parallel.enable_eplb,
        )
        slots = sharing.slots
        log.info(
            "experts of each layer: slots %d to %d of %d are here, and tokens come to them by %s",
            slots.start,
            slots.stop - 1,
            len(sharing.placement.experts),
            sharing.way,
        )
        return sharing

    @property
    def _is_output_rank(self) -> bool:
        return self.rank == self.layout.output_rank

    def get_kv_cache_spec(self) -> KVSpec:
        """What one block of KV costs on this rank."""
        group = self._groups().tp
        return specs.kv_spec(
            self.spec,
            tp_rank=group.rank_in_group,
            tp_size=group.size,
            dtype=self.dtype_name,
            block_size=self.config.cache.block_size,
            num_layers=self.layers.size,
            dcp_size=self.layout.dcp,
        )

    def determine_available_memory(self) -> int:
        """Bytes for this rank's KV pool.

        ``kv_cache_memory_bytes`` if given. Else on the CPU the smaller of what ``max_num_seqs`` sequences of
        ``max_model_len`` need and a quarter of the host's available memory over the workers of this machine; on other
        devices ``gpu_memory_utilization`` of the device less what this process uses at the peak of a step of the
        largest size, and never more than is free.
        """
        cache = self.config.cache
        if cache.kv_cache_memory_bytes is not None:
            return cache.kv_cache_memory_bytes
        if self.device.type != "cpu":
            return self._free_device_memory()
        spec = self.get_kv_cache_spec()
        blocks = -(-self.max_model_len // spec.block_size) * self.config.scheduler.max_num_seqs
        workers = max(self.config.parallel.local_devices, 1)
        need = blocks * spec.bytes_per_block
        available = host.memory_available()
        return min(need, int(CPU_KV_SHARE * available / workers)) if available else need

    def _free_device_memory(self) -> int:
        """What is left of this engine's share of the device after a step of the largest size."""
        stats = torch.get_device_module(self.device)
        self.platform.synchronize()
        self.platform.empty_cache()
        stats.reset_peak_memory_stats(self.device)
        tokens, rows = self.config.scheduler.max_num_batched_tokens, self.config.scheduler.max_num_seqs
        self._run_dummy(tokens, min(tokens, rows))
        self.platform.synchronize()
        peak: int = stats.max_memory_reserved(self.device)
        if self._context_parallel is not None:
            peak += self._context_parallel.step_bytes(tokens, self.max_model_len, self.spec.head_dim)
        self.platform.empty_cache()
        after = self._use()
        assert after is not None
        assert self._warm is not None
        room = kv_room(self._opened, self._warm, after, peak, self.config.cache.gpu_memory_utilization)
        log.info("memory of the device: %s", room)
        return room.kv

    def _use(self) -> Use | None:
        """Of the device now; None on CPUs, whose memory is the host's."""
        if self.device.type == "cpu":
            return None
        free, total = self.platform.memory(self.device_index)
        reserved = torch.get_device_module(self.device).memory_reserved(self.device)
        return Use(free, total, reserved, self.platform.own_memory(self.device_index))

    def initialize_from_config(self, kv_configs: list[KVConfig]) -> None:
        """Allocate the KV pool; ``kv_configs[rank]`` is this rank's."""
        mine = kv_configs[self.rank]
        spec = self.get_kv_cache_spec()
        self.cache = KVCache(
            num_layers=spec.num_layers,
            num_blocks=mine.num_blocks,
            num_kv_heads=spec.num_kv_heads,
            block_size=mine.block_size // self.layout.dcp,
            head_dim=spec.head_dim,
            dtype=self.dtype,
            device=self.device,
            memory_fd=self.context.kv_fd,
            ranks=self.layout.dcp,
        )
        self.runner.set_cache(self.cache)

    def compile_or_warm_up_model(self) -> None:
        """Run a small forward, so that the first request does not pay for what is set up at first use."""
        self._run_dummy(2)

    def step_costs(self) -> StepCosts:
        """See ``plan.memory``. A row: its logits and two things of their size, as they are compared, summed, sorted
        (two more where PCP places put theirs together). A value: on its way between ranks, as numbers of Python's in
        the answer, and in the message."""
        group = self._groups().tp
        ids = self.spec.vocabulary(group.size)[group.rank_in_group]
        logits = 3 if self.layout.pcp == 1 else 5
        return StepCosts(row_bytes=logits * 4 * ids.size, value_bytes=VALUE_BYTES + 16 * group.size)

    def reserve_memory(self, nbytes: int) -> None:
        """Take so much and let go of it: it stays in the device's allocator. On CPUs the machine is asked too, since
        the kernel promises more than it has."""
        if self.device.type == "cpu":
            workers = max(self.config.parallel.local_devices, 1)
            available = host.memory_available()
            if available and nbytes > available // workers:
                raise MemoryError(
                    f"{nbytes >> 20} MiB are needed on each of {workers} ranks, {available >> 20} MiB are left on this "
                    "machine"
                )
            try:
                np.empty(nbytes, dtype=np.uint8)
            except MemoryError as error:  # numpy's own class
                raise MemoryError(str(error)) from None
            return
        torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def execute_model(self, plan: StepPlan) -> StepOutput | None:
        """Run one step. None if ``plan.defer_sampling``, or if another stage samples."""
        output = self.runner.execute(plan)
        if self._balancer is not None:
            self._balancer.after_step()
        return output

    def sample_tokens(self, step: int, grammar: Any = None) -> StepOutput | None:
        """Sample the step that execute_model left unsampled. None if another stage does."""
        if grammar is not None:
            raise NotImplementedError("grammar masks are not built yet")
        return self.runner.sample(step)

    def execute_dummy_batch(self) -> None:
        """An empty forward that joins the collectives of the others: a step that computes nothing."""
        self._run_dummy(1)
        if self._balancer is not None:
            self._balancer.after_step()

    def _run_dummy(self, num_tokens: int, num_rows: int = 0) -> None:
        with self._balancer.not_counting() if self._balancer is not None else nullcontext():
            self.runner.run_dummy(num_tokens, num_rows)

    def while_idle(self) -> bool:
        """Prepare memory for prompts to come, a little at a time. False: nothing is left to do."""
        return self.cache is not None and self.cache.touch_ahead()

    def busy_ns(self) -> int:
        """How long this pipeline stage has computed; 0 where there is one alone, and before there is a model."""
        return 0 if self._runner is None else self._runner.busy_ns()

    def check_health(self) -> None:
        """Raise if the device does not work any more."""
        self.platform.synchronize()

    def _forward(self, model: torch.nn.Module, groups: Groups) -> Forward:
        if self.config.model.model_impl == "transformers":
            forward: Forward = ModuleForward(model)
        else:
            forward = make_forward(model, self.max_model_len, gathers=self._is_context_parallel)
        return PartForward(forward, groups.pcp, groups.pp.is_last) if groups.pcp.size > 1 else forward

    @property
    def _is_context_parallel(self) -> bool:
        return self.layout.pcp > 1 or self.layout.dcp > 1

    def _join_context(self, groups: Groups) -> ContextParallel | None:
        if not self._is_context_parallel:
            return None
        # Where groups span engines, so do their ranks: those of this engine's layout are others.
        heads = self.spec.heads(self.layout.tp)
        return ContextParallel(groups.layout, groups.pcp, groups.dcp, groups.dcp.ranks, heads)

    def apply_model(self, func: Callable[[Any], Any]) -> Any:
        """What ``func`` gives for this rank's part of the model. UnsupportedError if its weights are elsewhere."""
        forward = self.runner.forward
        if not isinstance(forward.inner if isinstance(forward, PartForward) else forward, ModuleForward):
            raise UnsupportedError(
                "the weights were laid out anew for this machine, so the model's modules have none: start with "
                "--model-impl transformers (model_impl='transformers') to look at them or change them"
            )
        return func(self.model)

    def shutdown(self) -> None:
        """Free weights, cache and groups. Idempotent."""
        self._runner = self._balancer = None
        self.model = None
        self.cache = None
        if self.groups is not None:
            self.groups.close()
            self.groups = None

    def _groups(self) -> Groups:
        if self.groups is None:
            raise RuntimeError("the device is not initialised")
        return self.groups
