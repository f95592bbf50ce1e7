"""A loaded decoder model of transformers as flat layers: what fast forwards are made of.

The module tree is read once (:func:`read_model`). A layer is a handful of matrices and norms; query, key and value are
one matrix, gate and up another. What a layer has (norms before, after or both; query and key norms; gated or plain MLP;
parallel residual; sliding windows, soft caps, layers without rope) is read off the modules of model types in
:data:`KNOWN`. The matrices are the model's own parameters where they can be; the modules give theirs up as they are
read, so that laying them out anew frees the old ones: the module tree cannot run any more afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drumline.model.layers import RowParallelLinear, SplitRMSNorm, TPGroup, VocabParallelEmbedding
from drumline.model.slices import slice_of
from drumline.parallel.shards import Range

KNOWN = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "olmo2", "smollm3"}
)
"""Model types that can be read."""


@dataclass
class Matrix:
    """Weights of a product [T, K] to [T, N]."""

    weight: torch.Tensor
    """[N, K]."""
    bias: torch.Tensor | None = None
    """[N]; added after the sum over the group."""
    group: TPGroup | None = None
    """If the inputs are split: products are summed over this group."""


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension."""

    weight: torch.Tensor | None
    """[width]; for norms of each head [heads, D]. RMS norms: what is multiplied by (Gemma's 1 + weight is in it)."""
    bias: torch.Tensor | None
    eps: float
    rms: bool = True
    """Else a layer norm: less the mean, by the standard deviation."""
    split: SplitRMSNorm | None = None
    """Over more heads than this rank has: that module does it."""


@dataclass(frozen=True)
class Embedding:
    """Rows of the embedding."""

    weight: torch.Tensor
    """[this rank's ids, H]."""
    scale: float | None
    ids: Range | None = None
    """Ids of the rows, if ranks have different ones: rows are summed over the group."""
    group: TPGroup | None = None


@dataclass
class Layer:
    """One decoder layer. Norms are None where the architecture has none."""

    before_attention: Norm | None
    qkv: Matrix
    """Query heads, key heads, value heads."""
    head_norms: Norm | None
    """Of queries and keys, each head for itself."""
    query_norm: Norm | None
    """Over all queries of a token; then ``key_norm`` over its keys."""
    key_norm: Norm | None
    rope: str | None
    """Which table; None: no rotary embedding."""
    scaling: float
    window: int | None
    softcap: float | None
    out: Matrix
    after_attention: Norm | None
    before_mlp: Norm | None
    gate_up: Matrix
    gated: bool
    """The first half of what ``gate_up`` gives is a gate."""
    activation: nn.Module
    down: Matrix
    after_mlp: Norm | None


@dataclass
class Model:
    """A whole model or a stage of it, this rank's part."""

    layers: list[Layer]
    head_dim: int
    q_heads: int
    kv_heads: int
    hidden: int
    """Width of hidden states."""
    parallel: bool
    """Attention and MLP both read what the layer before left."""
    rope: dict[str, torch.Tensor]
    """By layer type (one of no name if all are alike) [length, 2, R] cosines and sines of the rotated R of D; both
    halves of R have the same."""
    embedding: Embedding | None
    """None on stages after the first."""
    head: Matrix | None
    """None on stages before the last."""
    tied: bool
    """The head's weights are the embedding's."""
    norm: Norm | None
    """Before the head."""
    final_softcap: float | None
    dtype: torch.dtype
    device: torch.device


def read_model(model: Any, max_model_len: int, rope_dtype: torch.dtype | None = None) -> Model:
    """Read a loaded model (``loader.load_model``), whole or a stage. ValueError for types that are not KNOWN.

    ``rope_dtype``: of the tables; None: that of the weights.
    """
    base, config = model.base_model, model.config
    if config.model_type not in KNOWN:
        raise ValueError(f"model type {config.model_type} is not known as flat layers")
    part = slice_of(model)
    attention = _attention(base.layers[0])
    dim: int = getattr(attention, "head_dim", None) or attention.head_size
    q_heads, kv_heads = _heads(attention, dim)
    weight = next(base.layers[0].parameters())
    tables = _rope_tables(base, max_model_len, weight, rope_dtype or weight.dtype)
    head = model.get_output_embeddings() if part.last else None
    tied = head is not None and part.first and head.weight is model.get_input_embeddings().weight
    norm = next((getattr(base, name) for name in ("norm", "final_layer_norm") if hasattr(base, name)), None)
    return Model(
        embedding=_embedding(model.get_input_embeddings()) if part.first else None,
        head=None if head is None else _take(head),
        layers=[_read_layer(layer, dim, tables) for layer in base.layers],
        head_dim=dim,
        q_heads=q_heads,
        kv_heads=kv_heads,
        hidden=config.hidden_size,
        parallel=bool(getattr(base.layers[0], "use_parallel_residual", False)),
        rope=tables,
        tied=tied,
        norm=_norm(norm) if part.last else None,
        final_softcap=getattr(config, "final_logit_softcapping", None),
        dtype=weight.dtype,
        device=weight.device,
    )


def _attention(layer: Any) -> Any:
    return layer.self_attn if hasattr(layer, "self_attn") else layer.attention


def _heads(attention: Any, dim: int) -> tuple[int, int]:
    """Query and KV heads of this rank."""
    out = attention.o_proj if hasattr(attention, "o_proj") else attention.dense
    queries = out.weight.shape[1] // dim
    if hasattr(attention, "k_proj"):
        return queries, attention.k_proj.weight.shape[0] // dim
    packed = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.query_key_value
    return queries, (packed.weight.shape[0] // dim - queries) // 2


def _read_layer(layer: Any, dim: int, tables: dict[str, torch.Tensor]) -> Layer:
    attention, mlp = _attention(layer), layer.mlp
    heads = _heads(attention, dim)
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    after = sandwich or hasattr(layer, "post_feedforward_layernorm")
    after_attention = layer.post_attention_layernorm if after else None
    before_mlp = layer.pre_feedforward_layernorm if sandwich else None if after else layer.post_attention_layernorm
    window = attention.sliding_window if hasattr(attention, "sliding_window") else _window_for_all(attention.config)
    softcap = attention.config.attn_logit_softcapping if attention.config.model_type == "gemma2" else None
    head_norms, query_norm, key_norm = _query_norms(attention, dim, *heads)
    gate_up, gated = _gate_up(mlp)
    rope = next(iter(tables)) if len(tables) == 1 else attention.layer_type
    return Layer(
        before_attention=_norm(getattr(layer, "input_layernorm", None)),
        qkv=_qkv(attention, dim),
        head_norms=head_norms,
        query_norm=query_norm,
        key_norm=key_norm,
        rope=rope if getattr(attention, "use_rope", True) else None,
        scaling=float(attention.scaling),
        window=window,
        softcap=softcap,
        out=_take(attention.o_proj if hasattr(attention, "o_proj") else attention.dense),
        after_attention=_norm(after_attention),
        before_mlp=_norm(before_mlp),
        gate_up=gate_up,
        gated=gated,
        activation=next(getattr(mlp, name) for name in ("act_fn", "activation_fn", "act") if hasattr(mlp, name)),
        down=_take(mlp.down_proj if hasattr(mlp, "down_proj") else mlp.dense_4h_to_h),
        after_mlp=_norm(layer.post_feedforward_layernorm if after else None),
    )


def _window_for_all(config: Any) -> int | None:
    """Models whose attention modules pass the configuration's window in every layer."""
    return config.sliding_window if config.model_type in ("mistral", "phi3") else None


def _release(*modules: Any) -> None:
    """Give up the parameters of modules whose content lives elsewhere now."""
    for module in modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))


def _stack(*modules: Any) -> Matrix:
    """Weights and biases of linears over each other; the linears give theirs up."""
    weights = [module.weight.detach() for module in modules]
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    _release(*modules)
    if len(modules) == 1:
        return Matrix(weights[0], biases[0] if biases else None)
    return Matrix(torch.cat(weights), torch.cat(biases) if biases else None)


def _qkv(attention: Any, dim: int) -> Matrix:
    """One matrix: query heads, key heads, value heads."""
    if hasattr(attention, "q_proj"):
        return _stack(attention.q_proj, attention.k_proj, attention.v_proj)
    if hasattr(attention, "qkv_proj"):
        return _stack(attention.qkv_proj)
    packed = _stack(attention.query_key_value)  # of each head its query, key and value

    def in_order(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, 3, dim, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    return Matrix(in_order(packed.weight), None if packed.bias is None else in_order(packed.bias))


def _gate_up(mlp: Any) -> tuple[Matrix, bool]:
    """The product before the activation, and whether half of it is a gate."""
    if hasattr(mlp, "gate_proj"):
        return _stack(mlp.gate_proj, mlp.up_proj), True
    if hasattr(mlp, "gate_up_proj"):
        return _stack(mlp.gate_up_proj), True
    return _stack(mlp.dense_h_to_4h), False


def _take(module: Any) -> Matrix:
    """A linear module's matrix; the module gives its weights up."""
    bias = None if module.bias is None else module.bias.detach()
    group = module._group if isinstance(module, RowParallelLinear) else None
    matrix = Matrix(module.weight.detach(), bias, group)
    _release(module)
    return matrix


def _embedding(module: Any) -> Embedding:
    weight = module.weight.detach()
    scale = _embedding_scale(module, weight.dtype)
    split = isinstance(module, VocabParallelEmbedding) and module._group.size > 1
    _release(module)
    return Embedding(weight, scale, module._ids if split else None, module._group if split else None)


def _embedding_scale(module: Any, dtype: torch.dtype) -> float | None:
    if isinstance(module, VocabParallelEmbedding):
        return module.scale
    scale = getattr(module, "scalar_embed_scale", None)
    return None if scale is None else float(torch.tensor(scale).to(dtype))


def _norm(module: Any) -> Norm | None:
    if module is None:
        return None
    if isinstance(module, nn.LayerNorm):
        bias = None if module.bias is None else module.bias.detach()
        return Norm(module.weight.detach(), bias, float(module.eps), rms=False)
    if isinstance(module, SplitRMSNorm):
        return Norm(module.weight.detach(), None, float(module.variance_epsilon), split=module)
    if hasattr(module, "variance_epsilon"):
        return Norm(module.weight.detach(), None, float(module.variance_epsilon))
    return Norm(1.0 + module.weight.detach().float(), None, float(module.eps))  # Gemma's


def _query_norms(attention: Any, dim: int, q_heads: int, kv_heads: int) -> tuple[Norm | None, Norm | None, Norm | None]:
    """Of each head, of all queries, of all keys."""
    if not hasattr(attention, "q_norm"):
        return None, None, None
    query, key = _norm(attention.q_norm), _norm(attention.k_norm)
    assert query is not None
    assert key is not None
    if query.split is None and query.weight is not None and query.weight.shape[0] == dim:
        assert key.weight is not None
        both = torch.cat([query.weight.expand(q_heads, dim), key.weight.expand(kv_heads, dim)])
        return Norm(both, None, query.eps), None, None
    return None, query, key


def _rope_tables(base: Any, length: int, like: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    positions = torch.arange(length, device=like.device)[None]
    probe = torch.empty(1, dtype=dtype, device=like.device)
    rotary = base.rotary_emb
    names = getattr(rotary, "layer_types", None)
    calls = {"": (probe, positions)} if names is None else {name: (probe, positions, name) for name in names}
    return {name: torch.stack([part[0] for part in rotary(*call)], 1) for name, call in calls.items()}
