"""What a configuration can be refused for before any process exists. ``LLM``, ``serve`` and ``plan`` ask here.

Nothing here needs torch, and no code of the user's is imported except an executor class, which this process needs as a
class in any case. Worker classes are only looked for: they are imported in the workers, once each.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

from drumline.config import DeviceTable, EngineConfig, ParallelConfig, choose_backend
from drumline.engine.capacity import memory_text
from drumline.errors import ConfigError
from drumline.executor.base import Executor
from drumline.model.spec import ModelSpec, kv_spec, read_spec, resolve_dtype, resolve_max_model_len
from drumline.model.stages import stage_layers
from drumline.parallel.context import check_same_heads
from drumline.parallel.experts import expert_slots
from drumline.parallel.layout import Coordinates, Layout
from drumline.parallel.shards import auto_weights, ease_weights
from drumline.platforms import device_table

log = logging.getLogger(__name__)

LARGEST_MP = 255
"""Most workers of one machine."""


def check_machine(config: EngineConfig, devices: DeviceTable) -> EngineConfig:
    """The configuration for the platform of ``devices``, before the model is known.

    ConfigError for too few devices, an unknown backend, a backend that cannot have this world size, and worker classes
    in modules that do not exist. TypeError for an executor backend that is no Executor.
    """
    config = config.checked(devices)
    Executor.get_class(config, devices)
    backend, world = choose_backend(config.parallel, devices), config.parallel.world_size
    if backend == "uni" and world != 1:
        raise ConfigError(f"--distributed-executor-backend uni runs one worker, but the world size is {world}: use mp")
    if backend == "mp" and world > LARGEST_MP:
        raise ConfigError(f"mp runs at most {LARGEST_MP} workers on one machine, the world size is {world}")
    if config.process.worker_cls != "auto":
        _check_class_name(config.process.worker_cls, "--worker-cls")
    if config.process.worker_extension_cls:
        _check_class_name(config.process.worker_extension_cls, "--worker-extension-cls")
    return config


def check_model(config: EngineConfig, devices: DeviceTable | None = None) -> EngineConfig:
    """The configuration for the resolved model (``config.model.path``); ConfigError if it cannot be split and served
    as asked. ``--tp-weights auto`` becomes numbers, by the free memory of ``devices`` (default: this machine's).

    A worker class of the user's own decides all that itself.
    """
    if config.process.worker_cls != "auto":
        return config
    spec, size = read_spec(config.model.path), config.parallel.tensor_parallel_size
    config = with_weights(config, spec, devices)
    spec = spec.weighted(config.parallel)
    check_same_heads(Layout.of(config.parallel), spec.heads(size), spec.tp_weights)
    spec.vocabulary(size)
    stage_layers(spec, config.parallel)
    _check_experts(spec, config.parallel)
    _check_pool(config, spec, devices)
    resolve_max_model_len(config.model.max_model_len, spec)
    return config


def with_weights(config: EngineConfig, spec: ModelSpec, devices: DeviceTable | None = None) -> EngineConfig:
    """The configuration with numbers for ``--tp-weights auto``: such with which every rank has heads, if there are."""
    if config.parallel.tp_weights != "auto":
        return config
    weights = ease_weights(spec.num_heads, spec.num_kv_heads, free_weights(config, devices))
    log.info("--tp-weights auto: %s", ",".join(map(str, weights)) or "evenly")
    return config.with_(parallel=replace(config.parallel, tp_weights=weights))


def free_weights(config: EngineConfig, devices: DeviceTable | None = None) -> tuple[int, ...]:
    """What ``--tp-weights auto`` means: weights of the TP places by the free memory of their devices; of a place that
    several ranks of this machine have (stages, engines), the one with the least. Empty: evenly, as where they share
    one memory (CPUs) or it is not known."""
    devices = device_table(config.platform) if devices is None else devices
    parallel, layout = config.parallel, Layout.of(config.parallel)
    if not devices.accelerator:
        return ()
    free: list[list[int]] = [[] for _ in range(layout.tp)]
    for number, place in enumerate(_local_places(parallel, layout)):
        for device in devices.devices[number : number + 1]:
            free[place.tp].append(device.free or device.memory)
    return auto_weights([min(one, default=0) for one in free])


def _check_pool(config: EngineConfig, spec: ModelSpec, devices: DeviceTable | None) -> None:
    """Whether KV pools of a given size fit into this machine, where they are in its own memory: it is taken as the
    pools are used, so nothing else would be said before the kernel kills a worker."""
    cache, parallel = config.cache, config.parallel
    blocks, given = cache.num_gpu_blocks_override, cache.kv_cache_memory_bytes
    if blocks is None and given is None:
        return
    devices = device_table(config.platform) if devices is None else devices
    if devices.accelerator or not devices.memory:
        return
    workers = parallel.local_devices
    if blocks is None:
        assert given is not None
        flag, number, each = "--kv-cache-memory-bytes", given, workers
    else:
        flag, number, each = "--num-gpu-blocks-override", blocks, sum(_block_bytes(config, spec))
    if number * each > devices.memory:
        raise ConfigError(
            f"{flag} {number}: the KV caches of the {workers} workers on this machine would take "
            f"{memory_text(number * each)} together, and it has {memory_text(devices.memory)} of memory: use at most "
            f"{devices.memory // each}"
        )


def _block_bytes(config: EngineConfig, spec: ModelSpec) -> list[int]:
    """What one block takes on each worker of this machine, on a CPU."""
    parallel, layout = config.parallel, Layout.of(config.parallel)
    stages, dtype = stage_layers(spec, parallel), resolve_dtype(config.model.dtype, spec, "cpu")
    found = []
    for place in _local_places(parallel, layout):
        block = kv_spec(
            spec,
            tp_rank=place.tp,
            tp_size=layout.tp,
            dtype=dtype,
            block_size=config.cache.block_size,
            num_layers=stages[place.pp].size,
        )
        found.append(block.bytes_per_block)
    return found


def _local_places(parallel: ParallelConfig, layout: Layout) -> list[Coordinates]:
    """Places of this machine's workers in the worlds of their engines, in the order of their devices."""
    first, count = parallel.node_rank_within_dp * parallel.local_world_size, parallel.local_world_size
    return [layout.coordinates(first + place % count) for place in range(parallel.local_devices)]


def _check_experts(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Whether MLPs and experts can be split."""
    whole = parallel.enable_expert_parallel
    if whole and spec.experts is None:
        raise ConfigError(
            f"{spec.architecture} has no experts to spread over ranks: leave --enable-expert-parallel out"
        )
    for width in spec.widths_beside_experts if whole else spec.mlp_widths:
        spec.widths(width, parallel.tensor_parallel_size)
    if whole and spec.experts is not None:
        redundant = parallel.eplb_config.num_redundant_experts
        expert_slots(spec.experts.num_experts, redundant, parallel.expert_parallel_size)


def _check_class_name(name: str, option: str) -> None:
    """ConfigError if the module of a dotted name does not exist, or is loaded here and lacks the class."""
    module, colon, path = name.partition(":")
    if not colon:
        module, _, path = name.rpartition(".")
    if not module or not path:
        raise ConfigError(f"{option} {name}: is no dotted name such as package.module:Class")
    loaded = sys.modules.get(module)
    if loaded is None:
        if missing := _missing_module(module):
            raise ConfigError(f"{option} {name}: there is no module {missing!r}")
        return
    # A module that is still being executed (the program itself, mostly) may get the class later.
    if module != "__main__" and not getattr(loaded.__spec__, "_initializing", False):
        _check_attributes(loaded, path, f"{option} {name}")


def _check_attributes(found: Any, path: str, what: str) -> None:
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ConfigError(f"{what}: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{what}: must be a class. Got {found!r}")


def _missing_module(name: str) -> str:
    """The first part of a module's name that does not exist; empty: all do. Imports nothing, not even packages."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):  # ValueError: loaded without a spec, as __main__ is
        return "" if top in sys.modules else top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        if spec.loader is not None and not hasattr(spec.loader, "path"):
            return ""  # made by an importer of its own, which knows its submodules when it is imported
        top += f".{part}"
        # By its last name alone: for the whole name of a namespace package its parent would have to be imported.
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    else:
        return "" if spec is not None else top
    return top if spec is None else name
