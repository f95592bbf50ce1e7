"""Build a transformers model that holds only this rank's share, and fill it from safetensors.

1. The model class is built on the meta device (shapes, no memory); layers of other pipeline stages are taken out
   (``slices``).
2. The model's own tensor-parallel plan (``base_model_tp_plan`` of its configuration, ``_tp_plan`` of its class) says
   which linears are split by rows or columns; ``parallel.shards`` and the linear's name say where. Column-parallel
   linears just become smaller. Row-parallel ones become :class:`RowParallelLinear` (all-reduce, then bias). Packed
   linears (Phi-3's query, key and value in one) become smaller in each of their pieces. A norm over the width of all
   heads (OLMo 2) becomes :class:`SplitRMSNorm`. Embedding and head are split by vocabulary, whatever the plan says, so
   that no rank holds a whole one; the head's logits stay split (``sampling``). Blocks of experts become
   :class:`MoeBlock`, with experts that each rank has a part of (``expert_weights``).
3. Each parameter is read by ``safe_open(...).get_slice(name)[range]``: a tensor that is to be split is not read whole.
   Experts are many tensors of a checkpoint and one here, so what is read are pieces of parameters.
4. Buffers that are not in checkpoints (rotary frequencies) are made by building their module anew.

Plans of transformers gather the output of some linears (packed ones; OLMo 2's, for its norms), since its own tensor
parallelism cuts without knowing of heads. Here cuts are between heads, so these linears are split like any other.

Rejected: transformers' own tensor parallelism (cannot split heads unevenly, DTensors swapped in each call), forward
hooks (a hook cannot add the bias after the sum).
"""

from __future__ import annotations

import copy
import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.errors import ConfigError, UnsupportedModelError
from drumline.model import attention
from drumline.model.architectures import ARCHITECTURES
from drumline.model.expert_parallel import ExpertSharing
from drumline.model.expert_spec import ExpertShare
from drumline.model.expert_weights import expert_pieces, put_experts
from drumline.model.experts import Experts
from drumline.model.layers import RowParallelLinear, SplitRMSNorm, TPGroup, VocabParallelEmbedding
from drumline.model.slices import Slice, checkpoint_name, cut
from drumline.model.spec import ModelSpec
from drumline.model.weights import DummyWeights, Part, Piece, SafetensorsWeights, WeightSource
from drumline.parallel.shards import Range

log = logging.getLogger(__name__)

Progress = Callable[[float], None]
"""Gets the part that is done, 0 .. 1."""

_COLUMN_STYLES = frozenset({"colwise", "colwise_rep", "colwise_gather_output"})
_ROW_STYLES = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input"})
_WHOLE_STYLES = frozenset({"replicated_with_grad_allreduce"})
_HEAD = "lm_head.weight"
_ROWS_AT_ONCE = 4096
"""Rows of head and embedding that are compared at once, since comparing may convert them."""


def load_model(
    spec: ModelSpec,
    folder: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: TPGroup,
    layers: Range | None = None,
    max_model_len: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    experts: ExpertSharing | None = None,
    progress: Progress = lambda done: None,
) -> nn.Module:
    """The model of ``folder`` with this rank's share of the weights, in eval mode, on ``device``.

    ``layers``: only these layers of the whole model, as a pipeline stage; which module that is: ``slices``. Ask
    ``slices.slice_of(model)``; ``forward.ModuleForward`` runs each.
    ``max_model_len``: the longest sequence that will be served, which decides between the frequencies of a rotary
    embedding that has two sets (None: ``spec.default_max_model_len``).
    ``load_format`` ``dummy`` makes weights that are a pure function of (seed, parameter name, full shape), so every
    TP size and every stage is of the same model. ``experts``: how those are shared, if not over the TP group like
    everything else. Raises ConfigError if the checkpoint does not fit the configuration.
    """
    attention.register()
    part = Slice.of(layers, spec.num_layers)
    model = _build(spec, folder, dtype)
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    cut(model, part)
    shares = put_experts(model, spec, dtype, group, experts)
    parts = _split(model, spec, part, dtype, group)
    source: WeightSource = (
        DummyWeights(seed) if load_format == "dummy" else SafetensorsWeights(Path(folder), model.base_model_prefix)
    )
    tie_here = spec.tied and part.first and part.last and _is_tied(source, model, f"{embedding}.weight", parts, dtype)
    if tie_here:
        _tie(model)
    elif spec.tied and part.first and part.last:
        _untie(model)
        if group.rank_in_group == 0:
            log.warning("config.json ties the head to the embedding, but the weights have another head: it is taken")
    names = {name: checkpoint_name(name, part) for name in _stored_names(model)}
    if spec.tied:
        names |= _tied_names(source, f"{embedding}.weight", names)
    pieces = _pieces(model, spec, names, parts, shares, source)
    source.check([piece.source for piece in pieces], f"{folder}")
    _fill(model, pieces, source, device, progress)
    if tie_here:
        _tie(model)
    _rebuild_buffers(model, device, max_model_len or spec.default_max_model_len)
    if spec.latent is not None and group.rank_in_group == 0:
        _log_latent(spec)
    loaded: nn.Module = model.eval().requires_grad_(False)
    return loaded


def _log_latent(spec: ModelSpec) -> None:
    assert spec.latent is not None
    latent, padded = spec.latent, 2 * spec.head_dim * spec.num_heads
    log.info(
        "keys and values are cached as they are expanded for each head, %d numbers for a token and layer (%d of keys, "
        "%d of values, the rest padding); the latent that they are made from has %d",
        padded,
        spec.num_heads * latent.key,
        spec.num_heads * latent.value,
        latent.kv_rank + latent.rope,
    )


def vocab_range(spec: ModelSpec, group: TPGroup) -> Range:
    """Vocabulary ids whose embedding rows and logits this rank has."""
    return spec.vocabulary(group.size)[group.rank_in_group]


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters that have memory; one that has two names (tied) counts once."""
    parameters = (parameter for parameter in model.parameters() if not parameter.is_meta)
    return sum({parameter.data_ptr(): parameter.nbytes for parameter in parameters}.values())


def _build(spec: ModelSpec, folder: str | Path, dtype: torch.dtype) -> Any:
    modeling = importlib.import_module(spec.modeling_module)
    model_class = getattr(modeling, spec.architecture)
    config = model_class.config_class.from_pretrained(str(folder), local_files_only=True)
    if getattr(config, "sliding_window", None) == 0:
        config.sliding_window = None  # what the masks take for no window
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # for training: they would be kept for a loss
    with torch.device("meta"):
        return model_class._from_config(config, attn_implementation=attention.NAME, dtype=dtype)


def _tie(model: Any) -> None:
    """Head and embedding are one tensor (both split by the same vocabulary ranges)."""
    model.get_output_embeddings().weight = model.get_input_embeddings().weight


def _untie(model: Any) -> None:
    """Head and embedding are two tensors, whatever the model's class made of them."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)


def _is_tied(source: WeightSource, model: Any, embedding: str, parts: Mapping[str, Part], dtype: torch.dtype) -> bool:
    """Whether a checkpoint of a configuration that ties them has no head that differs from the embedding.

    transformers takes a head that differs. Each rank looks at its own rows: where these are equal it makes no
    difference whether they are one tensor.
    """
    if not (source.has(_HEAD) and source.has(embedding)):
        return True
    shape = tuple(model.get_input_embeddings().weight.shape)
    one, other = (source.read(name, shape, parts.get(embedding)) for name in (embedding, _HEAD))
    rows = [slice(start, start + _ROWS_AT_ONCE) for start in range(0, shape[0], _ROWS_AT_ONCE)]
    return all(one[some].to(dtype).equal(other[some].to(dtype)) for some in rows)


def _tied_names(source: WeightSource, embedding: str, names: Mapping[str, str]) -> dict[str, str]:
    """Where head and embedding are read from if the configuration ties them: of either the one that there is."""
    other = {embedding: _HEAD, _HEAD: embedding}
    return {name: other[name] for name in names if name in other and not source.has(name) and source.has(other[name])}


# --- parallel layers -------------------------------------------------------------------------------------------------


def tp_plan(model: Any, more: Mapping[str, str]) -> dict[str, str]:
    """Module name pattern (``*`` stands for a layer number) to style, from the model's configuration and class;
    ``more`` is added to that of the configuration."""
    prefix = model.base_model_prefix
    base: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    own: Mapping[str, str] = getattr(type(model), "_tp_plan", None) or {}
    return {f"{prefix}.{name}": style for name, style in (dict(base) | dict(more)).items()} | dict(own)


def _split(model: Any, spec: ModelSpec, part: Slice, dtype: torch.dtype, group: TPGroup) -> dict[str, Part]:
    """Put parallel layers in; what part of which parameter this rank has. Parameters that are not split are absent."""
    if group.size == 1:
        return {}
    parts: dict[str, Part] = {}
    styles = tp_plan(model, ARCHITECTURES[spec.model_type].plan)
    plan = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in styles.items()}
    if not plan:
        raise UnsupportedModelError(f"{spec.architecture} has no tensor-parallel plan: use --tensor-parallel-size 1")
    embedding = model.get_input_embeddings()
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
        if style is None or style in _WHOLE_STYLES or module is embedding or isinstance(module, nn.Identity | Experts):
            continue  # the embedding is split by vocabulary below; plans of some versions name it, of some not
        if isinstance(module, nn.Linear) and not module.weight.numel():
            continue  # of shared experts that there are none of: zero wide, which cannot be shared out
        if not isinstance(module, nn.Linear) or style not in _COLUMN_STYLES | _ROW_STYLES:
            raise UnsupportedModelError(f"{spec.architecture}: cannot split {name} as the model's plan says ({style})")
        ranges = _ranges_of(name, module, spec, group)
        if style in _COLUMN_STYLES:
            parts |= _split_columns(model, name, module, ranges, dtype)
        else:
            parts |= _split_rows(model, name, module, ranges, dtype, group)
    parts |= _split_norms(model, spec, dtype, group) | _split_sinks(model, spec, dtype, group)
    _tell_heads(model, spec, group)
    return parts | (_split_embedding(model, spec, dtype, group) if part.first else {})


def _ranges_of(name: str, module: nn.Linear, spec: ModelSpec, group: TPGroup) -> tuple[Range, ...]:
    """This rank's ranges of the split dimension of a linear: by heads in attention, by vocabulary in the head."""
    rank, size, dim, latent = group.rank_in_group, group.size, spec.head_dim, spec.latent
    heads = spec.heads(size)[rank]
    match name.rpartition(".")[2]:
        case "q_proj" | "q_b_proj" if latent is not None:
            return (heads.q.scaled(latent.key),)
        case "kv_b_proj" if latent is not None:  # of each head its key and value
            return (heads.q.scaled(latent.nope + latent.value),)
        case "o_proj" if latent is not None:
            return (heads.q.scaled(latent.value),)
        case "q_proj" | "o_proj" | "dense":
            return (heads.q.scaled(dim),)
        case "k_proj" | "v_proj":
            return (heads.kv.scaled(dim),)
        case "qkv_proj":
            keys, values = spec.num_heads * dim, (spec.num_heads + spec.num_kv_heads) * dim
            mine = heads.kv.scaled(dim)
            return heads.q.scaled(dim), mine.shifted(keys), mine.shifted(values)
        case "query_key_value":  # of each head its query, key and value
            return (heads.q.scaled(3 * dim),)
        case "gate_up_proj":
            gate = spec.widths(module.out_features // 2, size)[rank]
            return gate, gate.shifted(module.out_features // 2)
        case "lm_head":
            return (vocab_range(spec, group),)
        case leaf:
            rows = leaf in ("down_proj", "dense_4h_to_h")
            return (spec.widths(module.in_features if rows else module.out_features, size)[rank],)


def _split_columns(
    model: Any, name: str, module: nn.Linear, ranges: tuple[Range, ...], dtype: torch.dtype
) -> dict[str, Part]:
    part = Part((module.out_features, module.in_features), 0, ranges)
    bias = module.bias is not None
    model.set_submodule(name, nn.Linear(module.in_features, part.shape[0], bias=bias, device="meta", dtype=dtype))
    parts = {f"{name}.weight": part}
    if bias:
        parts[f"{name}.bias"] = Part((module.out_features,), 0, ranges)
    return parts


def _split_rows(
    model: Any, name: str, module: nn.Linear, ranges: tuple[Range, ...], dtype: torch.dtype, group: TPGroup
) -> dict[str, Part]:
    part = Part((module.out_features, module.in_features), 1, ranges)
    small: nn.Module
    if name.endswith(".shared_experts.down_proj"):  # their block sums over the group
        small = nn.Linear(part.shape[1], module.out_features, bias=False, device="meta", dtype=dtype)
    else:
        small = RowParallelLinear(part.shape[1], module.out_features, module.bias is not None, dtype, group)
    model.set_submodule(name, small)
    return {f"{name}.weight": part}


def _split_norms(model: Any, spec: ModelSpec, dtype: torch.dtype, group: TPGroup) -> dict[str, Part]:
    """Query and key norms over the width of all heads. Those over one head are on every rank as they are."""
    parts: dict[str, Part] = {}
    if not spec.norms_all_heads:
        return parts
    shards, rank = spec.heads(group.size), group.rank_in_group
    first_of_head = next(place for place, shard in enumerate(shards) if shard.kv == shards[rank].kv)
    for name, norm in list(model.named_modules()):
        leaf = name.rpartition(".")[2]
        if leaf not in ("q_norm", "k_norm"):
            continue
        range_ = (shards[rank].q if leaf == "q_norm" else shards[rank].kv).scaled(spec.head_dim)
        width = norm.weight.shape[0]
        counts = leaf == "q_norm" or first_of_head == rank
        model.set_submodule(name, SplitRMSNorm(range_.size, width, norm.variance_epsilon, counts, dtype, group))
        parts[f"{name}.weight"] = Part((width,), 0, (range_,))
    return parts


def _split_sinks(model: Any, spec: ModelSpec, dtype: torch.dtype, group: TPGroup) -> dict[str, Part]:
    """Attention sinks, one number a query head."""
    heads = spec.heads(group.size)[group.rank_in_group].q
    parts: dict[str, Part] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            module.sinks = nn.Parameter(torch.empty(heads.size, dtype=dtype, device="meta"), requires_grad=False)
            parts[f"{name}.sinks"] = Part((spec.num_heads,), 0, (heads,))
    return parts


def _tell_heads(model: Any, spec: ModelSpec, group: TPGroup) -> None:
    """Attention that cuts a packed projection by head counts gets those of this rank."""
    heads = spec.heads(group.size)[group.rank_in_group]
    for module in model.modules():
        if hasattr(module, "qkv_proj"):
            module.config = copy.copy(module.config)
            module.config.num_attention_heads = heads.q.size
            module.num_key_value_heads = heads.kv.size


def _split_embedding(model: Any, spec: ModelSpec, dtype: torch.dtype, group: TPGroup) -> dict[str, Part]:
    whole = model.get_input_embeddings()
    ids = vocab_range(spec, group)
    scale = getattr(whole, "scalar_embed_scale", None)
    model.set_input_embeddings(VocabParallelEmbedding(ids, whole.embedding_dim, dtype, group, scale))
    name = next(name for name, module in model.named_modules() if isinstance(module, VocabParallelEmbedding))
    return {f"{name}.weight": Part((spec.vocab_size, whole.embedding_dim), 0, (ids,))}


# --- content ---------------------------------------------------------------------------------------------------------


def _stored_names(model: Any) -> list[str]:
    """Parameters and buffers that checkpoints have; shared ones once."""
    stored = model.state_dict(keep_vars=True)
    return [name for name, _ in [*model.named_parameters(), *model.named_buffers()] if name in stored]


def _pieces(
    model: Any,
    spec: ModelSpec,
    names: Mapping[str, str],
    parts: Mapping[str, Part],
    shares: Mapping[str, ExpertShare],
    source: WeightSource,
) -> list[Piece]:
    """Where everything comes from. ``names``: of each parameter or buffer its name in the source."""
    tensors = model.state_dict(keep_vars=True)
    pieces, done = [], set()
    for name, stored in names.items():
        module = name.rpartition(".")[0]
        if module not in shares:
            pieces.append(Piece(name, stored, tuple(tensors[name].shape), parts.get(name)))
        elif module not in done:
            done.add(module)
            of_experts = expert_pieces(module, stored.rpartition(".")[0], shares[module], spec, source)
            pieces += [piece for piece in of_experts if piece.target in tensors]
    return pieces


def _fill(model: Any, pieces: Sequence[Piece], source: WeightSource, device: torch.device, progress: Progress) -> None:
    """Give every parameter (and buffer of checkpoints) memory and content, in the type that it has already."""
    wanted = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta}
    total = sum(wanted[name].numel() for name in {piece.target for piece in pieces})
    done, reported = 0, 0.0
    by_source = {piece.source: piece for piece in pieces}
    for name in source.order(list(by_source)):
        done += _put(model, by_source[name], wanted[by_source[name].target], source, device)
        if done / total >= reported + 0.05 or done == total:
            reported = done / total
            progress(reported)


def _put(model: Any, piece: Piece, wanted: torch.Tensor, source: WeightSource, device: torch.device) -> int:
    """Read a piece and put it in its place; how many numbers it has. ``wanted``: its target, without memory."""
    tensor = source.read(piece.source, piece.shape, piece.part)
    if piece.arrange is not None:
        tensor = piece.arrange(tensor)
    like = wanted if piece.index is None else wanted[piece.index]
    if tensor.shape != like.shape:
        raise ConfigError(f"{piece.source}: got {list(tensor.shape)} where {list(like.shape)} is needed")
    module_name, _, leaf = piece.target.rpartition(".")
    module = model.get_submodule(module_name)
    if piece.index is None:
        # A copy in any case: a view would keep the file mapped, and break if somebody rewrites it.
        own = tensor.to(device=device, dtype=wanted.dtype, copy=True, memory_format=torch.contiguous_format)
        _register(module, leaf, own)
    else:
        if getattr(module, leaf).is_meta:
            _register(module, leaf, torch.empty(wanted.shape, dtype=wanted.dtype, device=device))
        getattr(module, leaf)[piece.index].copy_(tensor)
    return tensor.numel()


def _register(module: nn.Module, leaf: str, tensor: torch.Tensor) -> None:
    if leaf in dict(module.named_buffers(recurse=False)):
        module.register_buffer(leaf, tensor)
    else:
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def _rebuild_buffers(model: Any, device: torch.device, max_model_len: int) -> None:
    """Modules with buffers that no checkpoint has (rotary embeddings) are built anew off the meta device."""
    for name, module in list(model.named_modules()):
        if not any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            continue
        if hasattr(module, "scalar_embed_scale"):
            scale = torch.tensor(module.scalar_embed_scale, device=device)
            module.register_buffer("embed_scale", scale, persistent=False)
        else:
            rotary = type(module)(config=model.config)
            _choose_frequencies(rotary, model.config, max_model_len)
            model.set_submodule(name, rotary.to(device))
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise UnsupportedModelError(f"{type(model).__name__}: nothing says how to fill {', '.join(left[:5])}")


def _choose_frequencies(rotary: Any, config: Any, max_model_len: int) -> None:
    """Of a ``longrope`` embedding take one of its two sets of frequencies for good.

    transformers takes the long set in each call that has a position beyond the length of the original training, for
    all sequences in it: an answer would depend on its neighbours, and cached keys would be rotated otherwise than new
    ones. Here the longest sequence to be served decides, as in vLLM.
    """
    if getattr(rotary, "rope_type", None) != "longrope":
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    first = config.rope_parameters["original_max_position_embeddings"]
    if max_model_len <= first:
        log.info("sequences have up to %d tokens: all take the short set of rotary frequencies", max_model_len)
    else:
        log.info(
            "sequences may have up to %d tokens, more than the %d of the model's first training: all take the "
            "long set of rotary frequencies. --max-model-len %d takes the short set, which is better for short ones",
            max_model_len,
            first,
            first,
        )
    frequencies, rotary.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=max_model_len)
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
    rotary.rope_type = "default"  # no update in the forward
