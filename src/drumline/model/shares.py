"""How many bytes of weights each rank holds, before anything is loaded: from names and shapes in the weights' headers.

What ``loader`` does with the modules of a model, done with the names of its tensors: linears are split by rows or
columns, between heads; embedding and head by vocabulary; norms over all heads like the heads; the rest is on every rank
of a stage. Of experts each rank has a range of the width, or some of them whole. So a tensor's share follows from its
name, its shape and the spec. No torch, no transformers; tests compare it with what workers hold. All parameters are in
the compute type, but for routers that stay in float32.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from drumline.config import ParallelConfig
from drumline.model.expert_spec import name_of_today
from drumline.model.spec import DTYPE_BYTES, ModelSpec
from drumline.parallel.experts import Placement
from drumline.parallel.shards import Range

Shapes = Mapping[str, tuple[int, ...]]
"""Of the tensors of a checkpoint, by name."""
Held = Sequence[Sequence[int]]
"""Of each TP rank the experts of a layer that it holds whole; empty: it holds a part of all."""

_EMBEDDINGS = frozenset({"embed_tokens", "embed_in"})
_HEADS = frozenset({"lm_head", "embed_out"})
_COLUMNS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_b_proj", "kv_b_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", *_EMBEDDINGS, *_HEADS}
)
"""Modules whose weights and biases are split in their first dimension."""
_ROWS = frozenset({"o_proj", "dense", "down_proj", "dense_4h_to_h"})
"""Modules whose weights are split in their second dimension; biases are whole."""
_STACKS = frozenset({"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"})
"""Tensors over all experts of a layer."""
_BUFFERS = frozenset({"rotary_emb", "attention"})
"""Modules of which old checkpoints have tensors that are no parameters."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LONGEST_HEADER = 100_000_000


def read_shapes(folder: Path) -> Shapes:
    """Shapes of all tensors of a folder's safetensors files, by their headers; empty if one cannot be read."""
    found: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length <= _LONGEST_HEADER else {}
            found |= {
                name_of_today(name): tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return found


def held_experts(spec: ModelSpec, parallel: ParallelConfig, pcp: int = 0) -> Held:
    """Whole experts of each TP rank of a PCP place of this engine, as they are placed at first
    (``parallel.experts``)."""
    if spec.experts is None or not parallel.enable_expert_parallel:
        return ()
    redundant, tp = parallel.eplb_config.num_redundant_experts, parallel.tensor_parallel_size
    placement = Placement.linear(spec.experts.num_experts, redundant, parallel.expert_parallel_size)
    first = (parallel.data_parallel_rank * parallel.prefill_context_parallel_size + pcp) * tp
    return [placement.of_rank(first + rank) for rank in range(tp)]


def rank_bytes(
    spec: ModelSpec, shapes: Shapes, stages: Sequence[Range], tp_size: int, dtype: str, held: Held = ()
) -> tuple[tuple[int, ...], ...]:
    """Bytes of the weights of each rank: for each pipeline stage those of its TP ranks.

    ``spec.tied`` must be what the weights say (``resolve.has_own_head``): tied ones are one tensor, or one on the first
    and one on the last stage.
    """
    totals = [[0] * tp_size for _ in stages]
    for name, shape in shapes.items():
        routes = spec.experts is not None and spec.experts.float_router and name.endswith(".mlp.gate.weight")
        width = DTYPE_BYTES["float32" if routes else dtype]
        for stage in _stages_of(name, spec, shapes, stages):
            for rank, size in enumerate(_sizes(name, shape, spec, tp_size, held)):
                totals[stage][rank] += size * width
    return tuple(map(tuple, totals))


def estimated_bytes(
    spec: ModelSpec, stages: Sequence[Range], tp_size: int, dtype: str, held: Held = ()
) -> tuple[tuple[int, ...], ...]:
    """The same without weights to look at: of the matrices only (norms and biases are less than a hundredth)."""
    found = []
    for stage, layers in enumerate(stages):
        first, last = stage == 0, stage == len(stages) - 1
        tables = int(first) + int(last) - int(first and last and spec.tied)
        found.append(
            tuple(
                DTYPE_BYTES[dtype]
                * (
                    sum(_layer_matrices(spec, layer, rank, tp_size, held) for layer in range(*layers))
                    + tables * ids.size * spec.hidden_size
                )
                for rank, ids in enumerate(spec.vocabulary(tp_size))
            )
        )
    return tuple(found)


def _layer_matrices(spec: ModelSpec, layer: int, rank: int, tp_size: int, held: Held) -> int:
    """Elements of the matrices of one layer that a TP rank holds."""
    hidden, heads = spec.hidden_size, spec.heads(tp_size)[rank]
    if spec.latent is not None:
        attention = spec.latent.weights(hidden, heads.q.size)
    else:
        attention = hidden * 2 * (heads.q.size + heads.kv.size) * spec.head_dim
    if spec.experts is None or layer not in spec.experts.layers:
        width = spec.widths(spec.intermediate_size, tp_size)[rank].size
        return attention + hidden * (3 if spec.gated_mlp else 2) * width
    shared = spec.experts.shared_width and spec.widths(spec.experts.shared_width, tp_size)[rank].size
    if held:
        routers, expert = hidden * spec.experts.num_experts, 3 * hidden * spec.experts.width
        return attention + routers + len(held[rank]) * expert + 3 * hidden * shared
    mine = replace(spec.experts, width=spec.expert_share(rank, tp_size).columns.size, shared_width=shared)
    return attention + mine.weights(hidden)


def _module(name: str) -> tuple[str, str]:
    """Last part of the name of a tensor's module, and what the tensor is there."""
    module, _, kind = name.rpartition(".")
    return module.rpartition(".")[2], kind


def _stages_of(name: str, spec: ModelSpec, shapes: Shapes, stages: Sequence[Range]) -> list[int]:
    """Pipeline stages that hold a tensor."""
    leaf, kind = _module(name)
    stacked = leaf == "experts" and kind in _STACKS
    if not (kind in ("weight", "bias", "sinks") or stacked) or leaf in _BUFFERS:
        return []
    if layer := _LAYER.search(name):
        return [stage for stage, layers in enumerate(stages) if int(layer[1]) in range(*layers)]
    last = len(stages) - 1
    if leaf in _EMBEDDINGS:
        return sorted({0, last}) if spec.tied else [0]
    if leaf in _HEADS and spec.tied:
        # One tensor: counted where the embedding is, unless only the head is in the files.
        return [] if any(_module(other)[0] in _EMBEDDINGS for other in shapes) else sorted({0, last})
    return [last]


def _sizes(name: str, shape: tuple[int, ...], spec: ModelSpec, tp_size: int, held: Held) -> tuple[int, ...]:
    """Elements of a tensor that each TP rank holds."""
    leaf, kind = _module(name)
    elements = math.prod(shape)
    if not elements:  # as of shared experts that there are none of
        return (0,) * tp_size
    if held and spec.experts is not None:
        if leaf == "experts":
            return tuple(elements // spec.experts.num_experts * len(mine) for mine in held)
        if expert := _EXPERT.search(name):
            return tuple(elements * (int(expert[1]) in mine) for mine in held)
    if kind == "sinks":
        return tuple(head.q.size for head in spec.heads(tp_size))
    if leaf == "experts" and spec.experts is not None:
        if kind == "down_proj_bias":  # the parts of ranks are summed
            return (elements, *(0,) * (tp_size - 1))
        width = spec.experts.width
        return tuple(elements // width * part.size for part in spec.widths(width, tp_size))
    normed = spec.norms_all_heads and leaf in ("q_norm", "k_norm")
    if tp_size == 1 or not (leaf in _COLUMNS or normed or (leaf in _ROWS and kind == "weight")):
        return (elements,) * tp_size
    extent = shape[1 if leaf in _ROWS else 0]
    return tuple(elements // extent * size for size in _extents(leaf, extent, spec, tp_size))


def _extents(leaf: str, extent: int, spec: ModelSpec, tp_size: int) -> list[int]:
    """Of the dimension that is split, what each TP rank has."""
    dim, heads, latent = spec.head_dim, spec.heads(tp_size), spec.latent
    match leaf:
        case "q_proj" | "q_b_proj" if latent is not None:
            return [head.q.size * latent.key for head in heads]
        case "kv_b_proj" if latent is not None:
            return [head.q.size * (latent.nope + latent.value) for head in heads]
        case "o_proj" if latent is not None:
            return [head.q.size * latent.value for head in heads]
        case "q_proj" | "o_proj" | "dense" | "q_norm":
            return [head.q.size * dim for head in heads]
        case "k_proj" | "v_proj" | "k_norm":
            return [head.kv.size * dim for head in heads]
        case "qkv_proj":
            return [(head.q.size + 2 * head.kv.size) * dim for head in heads]
        case "query_key_value":
            return [3 * head.q.size * dim for head in heads]
        case "gate_up_proj":
            return [2 * part.size for part in spec.widths(extent // 2, tp_size)]
        case _ if leaf in _EMBEDDINGS | _HEADS:
            return [part.size for part in spec.vocabulary(tp_size)]
        case _:
            return [part.size for part in spec.widths(extent, tp_size)]
