"""``drumline plan``: what given flags mean, without starting anything: processes, ranks, devices, groups, queues.

All of it comes from the same pure functions that the running system uses. No torch, no transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from drumline.cli.args import Parser, add_flags, configs, parse
from drumline.config import DeviceTable, EngineConfig, ParallelConfig, ServerConfig, choose_backend
from drumline.engine.checks import check_machine, check_model, with_weights
from drumline.errors import ConfigError, ExitCode
from drumline.model.expert_spec import ExpertsSpec
from drumline.model.resolve import check_weights, has_own_head
from drumline.model.shares import Shapes, estimated_bytes, held_experts, rank_bytes, read_shapes
from drumline.model.spec import DTYPE_BYTES, ModelSpec, kv_spec, read_spec, resolve_dtype
from drumline.model.stages import stage_layers, stage_weights
from drumline.parallel.boxes import MAIL_BYTES
from drumline.parallel.experts import Placement
from drumline.parallel.layout import (
    GroupKind,
    Layout,
    device_index,
    global_rank,
    local_rank_of,
    node_of,
    worker_places,
)
from drumline.parallel.shards import Range
from drumline.platforms import device_table
from drumline.processes.titles import DP_COORDINATOR, FORK_SERVER, api_server_name, engine_core_name, worker_name
from drumline.transport.doorbell import DOORBELL_BYTES
from drumline.worker.segment import SegmentLayout

EXPERTS_ONLY = (GroupKind.DP, GroupKind.EP, GroupKind.EPLB)
"""Groups that exist only where the ranks of several engines or of a stage share experts."""


class Row(NamedTuple):
    """One kind of process."""

    role: str
    names: tuple[str, ...]
    note: str = ""


def main(argv: Sequence[str]) -> int:
    """``drumline plan [MODEL] [flags]``: print the plan. Exit code 0 also where ``serve`` would refuse: it says so."""
    parser = Parser(
        prog="drumline plan",
        usage="drumline plan [MODEL] [flags]",
        description="Show processes, ranks, groups and queues for the flags of serve. Starts nothing.",
    )
    add_flags(parser)
    config, server = configs(parse(parser, argv))
    sys.stdout.write(plan_text(config, server, device_table(config.platform)))
    return ExitCode.OK


def plan_text(config: EngineConfig, server: ServerConfig | None = None, devices: DeviceTable | None = None) -> str:
    """The whole plan as text. ``devices``: what the machine has; by default this machine is asked."""
    server = server or ServerConfig()
    devices = devices or device_table(config.platform)
    parallel = config.parallel
    refused = _refused(config, devices)
    try:
        backend = choose_backend(parallel, devices)
    except ConfigError:
        backend = "mp"
    blocks = [
        _head(parallel, backend, devices),
        _processes(parallel, server, backend),
        _ranks(parallel, devices),
        _groups(parallel),
        _queues(config, backend),
        _shares(config, devices),
        f"serve would refuse this here: {refused}" if refused else "",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _refused(config: EngineConfig, devices: DeviceTable) -> str:
    """Why ``serve`` would not begin on this machine; empty: it would. What is not built yet is planned all the same."""
    if config.parallel.distributed_executor_backend in ("ray", "external_launcher"):
        return ""
    try:
        check_machine(config, devices)
    except (ConfigError, TypeError) as error:
        return str(error)
    return ""


def process_table(parallel: ParallelConfig, server: ServerConfig, backend: object) -> list[Row]:
    """Processes of ``drumline serve`` by role; auxiliary ones (:func:`auxiliary_table`) are not among them."""
    ranks = [(_of_engine(parallel, dp), rank) for dp in _engines(parallel) for rank in range(parallel.world_size)]
    workers = tuple(worker_title(engine, rank) for engine, rank in ranks)
    if backend == "uni":
        worker = Row("worker", (), "the only worker lives in its engine core (uni)")
    else:
        worker = Row("worker", workers)
    rows = [
        Row("API server", tuple(api_server_name(index) for index in range(server.api_servers(parallel)))),
        Row("engine core", tuple(engine_core_name(dp) for dp in _engines(parallel))),
        worker,
    ]
    if parallel.data_parallel_size > 1:
        rows.append(Row("DP coordinator", (DP_COORDINATOR,)))
    return rows


def auxiliary_table(parallel: ParallelConfig, server: ServerConfig) -> list[Row]:
    """Processes beside the table: they neither serve nor compute."""
    rows = [Row("fork server", (FORK_SERVER,), "imports the libraries once, forks engine cores and workers")]
    if server.api_servers(parallel) > 1:
        rows.append(Row("supervisor", ("Supervisor",), "the root, owns the port when there are several API servers"))
    return rows


def worker_title(parallel: ParallelConfig, rank: int) -> str:
    """Title of a worker once its groups exist."""
    return worker_name(**worker_places(parallel, rank), expert_parallel=parallel.enable_expert_parallel)


def _engines(parallel: ParallelConfig) -> range:
    return range(parallel.data_parallel_size)


def _of_engine(parallel: ParallelConfig, dp_rank: int) -> ParallelConfig:
    return replace(parallel, data_parallel_rank=dp_rank)


def _head(parallel: ParallelConfig, backend: object, devices: DeviceTable) -> str:
    sizes = (
        f"TP {parallel.tensor_parallel_size} x PP {parallel.pipeline_parallel_size} x "
        f"PCP {parallel.prefill_context_parallel_size}"
    )
    found = f", {len(devices.devices)} devices" if devices.accelerator else ""
    return (
        f"world size {parallel.world_size} ({sizes}), DP {parallel.data_parallel_size}, "
        f"DCP {parallel.decode_context_parallel_size}, backend {_backend_name(backend)}\n"
        f"this machine: platform {devices.platform}{found}, {devices.cores} cores, {_bytes(devices.memory)} memory\n"
        f"the output rank is {Layout.of(parallel).output_rank}, driver ranks are those whose TP place is 0"
    )


def _backend_name(backend: object) -> str:
    return backend if isinstance(backend, str) else str(getattr(backend, "__qualname__", backend))


def _processes(parallel: ParallelConfig, server: ServerConfig, backend: object) -> str:
    rows = process_table(parallel, server, backend)
    beside = auxiliary_table(parallel, server)
    lines = [f"processes: {sum(len(row.names) for row in rows)}"]
    lines += [_process_line(row) for row in rows]
    lines.append(f"beside them, not counted: {sum(len(row.names) for row in beside)}")
    lines += [_process_line(row) for row in beside]
    return "\n".join(lines)


def _process_line(row: Row) -> str:
    names = row.names if len(row.names) <= 4 else (*row.names[:2], "...", row.names[-1])
    return (
        f"  {len(row.names):3}  {row.role:15} {' '.join(names)}{' ' if names and row.note else ''}{row.note}".rstrip()
    )


def _ranks(parallel: ParallelConfig, devices: DeviceTable) -> str:
    layout = Layout.of(parallel)
    table = [("DP", "rank", "global", "node", "local", "PP", "PCP", "TP", "device", "name")]
    for dp in _engines(parallel):
        engine = _of_engine(parallel, dp)
        for rank in range(parallel.world_size):
            place, local = layout.coordinates(rank), local_rank_of(engine, rank)
            numbers = (dp, rank, global_rank(engine, rank), _node(engine, rank), local, place.pp, place.pcp, place.tp)
            device = _device(devices, device_index(engine, local))
            table.append((*map(str, numbers), device, worker_title(engine, rank)))  # type: ignore[arg-type]
    return "ranks\n" + _table(table)


def _node(parallel: ParallelConfig, rank: int) -> int:
    """Machine of a rank, counted over all machines of the run."""
    if parallel.nnodes == 1:
        return 0
    local = parallel.data_parallel_size_local or parallel.data_parallel_size
    return parallel.data_parallel_rank // local * parallel.nnodes_within_dp + node_of(parallel, rank)


def _device(devices: DeviceTable, index: int) -> str:
    if not devices.accelerator:
        return devices.platform
    if index >= len(devices.devices):
        return f"{devices.platform}:{index} (not here)"
    return f"{devices.platform}:{index} {devices.devices[index].name}"


def _groups(parallel: ParallelConfig) -> str:
    layout = Layout.of(parallel, span_engines=True)
    table = [("kind", "size", "groups (global ranks)", "")]
    for kind, groups in layout.groups.items():
        size = layout.group_size(kind)
        shown = " ".join(f"[{','.join(map(str, group))}]" for group in groups) if size > 1 else "each rank alone"
        note = ""
        made = parallel.enable_eplb if kind is GroupKind.EPLB else parallel.enable_expert_parallel
        if size > 1 and not made:
            if kind in EXPERTS_ONLY:
                note = f"with {'--enable-eplb' if kind is GroupKind.EPLB else '--enable-expert-parallel'} only"
            elif kind is GroupKind.WORLD and parallel.data_parallel_size > 1:
                note = "without it each engine is a world of its own"
        table.append((kind.name, str(size), shown, note))
    return "groups\n" + _table(table)


def _queues(config: EngineConfig, backend: object) -> str:
    process, local = config.process, config.parallel.local_world_size
    if backend != "mp":
        return f"queues: none of drumline's own between engine core and workers with backend {_backend_name(backend)}"
    layout = SegmentLayout.of(local, process)
    bells = (local + 1) * DOORBELL_BYTES
    readers = f"{local} reader{'s' if local > 1 else ''}"
    table = [
        ("queue", "count", "slots", "slot", "bytes", ""),
        (
            "calls",
            "1",
            str(process.mq_slots),
            _bytes(process.mq_slot_bytes),
            _bytes(layout.calls.total_bytes),
            f"engine core to {readers}, messages up to {_bytes(layout.calls.largest_message)}",
        ),
        (
            "answers",
            str(local),
            str(process.mq_answer_slots),
            _bytes(process.mq_answer_slot_bytes),
            _bytes(local * layout.answers.total_bytes),
            f"one from each worker, messages up to {_bytes(layout.answers.largest_message)}",
        ),
        (
            "arena",
            "1" if layout.arena else "0",
            "",
            "",
            _bytes(layout.arena.total_bytes if layout.arena else 0),
            "large buffers of calls, read where they lie",
        ),
        ("doorbells", str(local + 1), "", "", _bytes(bells), "one for each that waits"),
    ]
    stages = config.parallel.pipeline_parallel_size
    if stages > 1:
        text = "beside these: from each worker to the next stage, and from the last back to the first"
        table.append(("stages", str(local), "", "", _bytes(local * MAIL_BYTES), text))
    total = layout.shared_bytes + bells
    return f"queues of each engine core: {_bytes(total)} of shared memory, taken as it is touched\n" + _table(table)


def _shares(config: EngineConfig, devices: DeviceTable) -> str:
    """Shares of the model, if it is a folder of this machine."""
    folder = config.model.path or config.model.model
    if not folder or not Path(folder).is_dir():
        return ""
    refusal = "serve would refuse this model: "
    config = replace(config, model=replace(config.model, path=folder))
    dummy = config.model.load_format == "dummy"
    try:
        spec = read_spec(folder)
        if spec.tied and not dummy:
            spec = replace(spec, tied=not has_own_head(Path(folder)))
        config = with_weights(config, spec, devices)
        shares = _share_tables(spec.weighted(config.parallel), config, devices)
    except ConfigError as error:
        return f"{refusal}{error}"
    try:
        check_model(config)
        if not dummy:
            check_weights(Path(folder))
    except ConfigError as error:
        return f"{shares}\n\n{refusal}{error}"
    return shares


def _share_tables(spec: ModelSpec, config: EngineConfig, devices: DeviceTable) -> str:
    tp = config.parallel.tensor_parallel_size
    dtype = resolve_dtype(config.model.dtype, spec, "cpu" if not devices.accelerator else devices.platform)
    experts = spec.experts
    columns = {"MLP columns": spec.widths(spec.intermediate_size, tp)} if spec.has_mlp else {}
    whole = config.parallel.enable_expert_parallel
    if experts is not None and not whole:
        columns["columns of each expert"] = tuple(spec.expert_share(rank, tp).columns for rank in range(tp))
    table = [("TP", "query heads", "KV heads", *columns, "vocabulary")]
    for rank, (heads, *widths, vocab) in enumerate(
        zip(spec.heads(tp), *columns.values(), spec.vocabulary(tp), strict=True)
    ):
        table.append((str(rank), *map(_range, (heads.q, heads.kv, *widths, vocab))))
    weights = f", in the proportions {','.join(map(str, spec.tp_weights))}" if spec.tp_weights else ""
    mixture = f", {experts.num_experts} experts ({experts.top_k} a token) in {len(experts.layers)}" if experts else ""
    return (
        f"shares of the model ({spec.architecture}: {spec.num_layers} layers{mixture}, {spec.num_heads} query and "
        f"{spec.num_kv_heads} KV heads, vocabulary {spec.vocab_size}{weights})\n{_table(table)}\n"
        f"{_expert_table(experts, config.parallel) if experts and whole else ''}"
        f"{_stage_table(spec, config, dtype)}\n\n{_memory_table(spec, config, dtype)}"
    )


def _expert_table(experts: ExpertsSpec, parallel: ParallelConfig) -> str:
    """Whole experts of each rank of an EP group, as they are at first."""
    redundant, ranks = parallel.eplb_config.num_redundant_experts, parallel.expert_parallel_size
    placement = Placement.linear(experts.num_experts, redundant, ranks)
    table = [("EP", "experts of each layer" + (", at first" if parallel.enable_eplb else ""))]
    for rank in range(ranks):
        held = placement.of_rank(rank)
        first = held.index(0) if 0 in held else 0  # behind the last expert comes the first one again
        runs = [Range(run[0], run[-1] + 1) for run in (held[:first], held[first:]) if run]
        table.append((str(rank), ", ".join(map(_range, runs))))
    return f"{_table(table)}\n"


def _stage_table(spec: ModelSpec, config: EngineConfig, dtype: str) -> str:
    """Layers, names and memory of each pipeline stage."""
    parallel, tp = config.parallel, config.parallel.tensor_parallel_size
    table = [("PP", "layers", "beside them", "weights of its ranks", "KV of a token on a rank", "workers")]
    stages, layout = stage_layers(spec, parallel), Layout.of(parallel)
    for stage, (layers, weights) in enumerate(zip(stages, stage_weights(spec, parallel), strict=True)):
        beside = [name for name, has in (("embedding", stage == 0), ("head", stage == len(stages) - 1)) if has]
        dcp = parallel.decode_context_parallel_size
        kv = [
            kv_spec(spec, tp_rank=rank, tp_size=tp, dtype=dtype, block_size=1, num_layers=layers.size).bytes_per_block
            for rank in range(tp)
        ]
        names = [
            worker_title(parallel, rank) for rank in range(layout.world_size) if layout.coordinates(rank).pp == stage
        ]
        table.append(
            (
                str(stage),
                _range(layers),
                ", ".join(beside) or "-",
                f"about {_bytes(weights * DTYPE_BYTES[dtype])}",
                f"up to {_bytes(max(kv))}{f', of one token in {dcp}' if dcp > 1 else ''}",
                " ".join(names if len(names) <= 4 else (*names[:2], "...", names[-1])),
            )
        )
    return _table(table)


def _weights_of(
    spec: ModelSpec, shapes: Shapes, stages: Sequence[Range], parallel: ParallelConfig, dtype: str, pcp: int
) -> tuple[tuple[int, ...], ...]:
    """Bytes of the weights of a PCP place: for each stage those of its TP ranks."""
    tp, held = parallel.tensor_parallel_size, held_experts(spec, parallel, pcp)
    if shapes:
        return rank_bytes(spec, shapes, stages, tp, dtype, held)
    return estimated_bytes(spec, stages, tp, dtype, held)


def _memory_table(spec: ModelSpec, config: EngineConfig, dtype: str) -> str:
    """What each rank holds, to the byte."""
    parallel, tp = config.parallel, config.parallel.tensor_parallel_size
    stages, layout, block_size = stage_layers(spec, parallel), Layout.of(parallel), config.cache.block_size
    dcp = layout.dcp
    shapes = {} if config.model.load_format == "dummy" else read_shapes(Path(config.model.path))
    about = "" if shapes else "about "
    weights = [_weights_of(spec, shapes, stages, parallel, dtype, pcp) for pcp in range(layout.pcp)]
    of = f" (of {block_size * dcp}, over {dcp} ranks)" if dcp > 1 else ""
    table = [("worker", "weights", f"KV of a block of {block_size} tokens{of}")]
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        layers = stages[place.pp].size
        kv = kv_spec(spec, tp_rank=place.tp, tp_size=tp, dtype=dtype, block_size=block_size, num_layers=layers)
        mine = weights[place.pcp][place.pp][place.tp]
        table.append((worker_title(parallel, rank), f"{about}{mine:,}", f"{kv.bytes_per_block:,}"))
    return f"bytes of each rank, in {dtype}\n{_table(table)}"


def _range(part: Range) -> str:
    return f"{part.start}..{part.stop - 1} ({part.size})"


def _bytes(number: int) -> str:
    """1536 -> ``1.5 KiB``."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".rstrip("0").rstrip(".") + f" {unit}"


def _table(rows: Iterable[Sequence[str]]) -> str:
    """Columns under a first row of titles, indented by two."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)
