"""The forward of decoder models of transformers without its Python: the same weights and the same arithmetic.

A step on a CPU with a small model is mostly overhead: in transformers' modules one decoder layer is some 60 operations
and 40 Python calls between them. Here the module tree is read once (:func:`_read_layer`) into flat layers, and a step
walks those:

- query, key and value are one product, gate and up another; weights are laid out for the machine (``linears``);
- RMS norms are 4 small operations (torch's own takes 9 on CPUs, 26 us against 5);
- in float32 the rotary embedding is one complex multiplication in place: rows of the query and key weights are
  reordered, so that the two numbers that are rotated together are neighbours. Scores do not change, as queries and
  keys are reordered alike; the KV cache then holds keys in this order;
- cosines and sines come from a table made by the model's own rotary module.

What a layer is (norms before, after or both; query and key norms; gated or plain MLP; parallel residual; sliding
windows, soft caps, layers without rope) is read off the modules of model types in :data:`KNOWN`, each of which is
tested to give what ``forward.ModuleForward`` gives. The model's parameters are given up as they are laid out anew: the
module tree cannot run any more afterwards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from drumline.model.attention import AttentionBatch, attend, write
from drumline.model.forward import Forward, ModuleForward
from drumline.model.layers import RowParallelLinear, SplitRMSNorm, TPGroup, VocabParallelEmbedding
from drumline.model.linears import Linear, Table, lay_out
from drumline.model.slices import slice_of
from drumline.parallel.shards import Range

KNOWN = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "olmo2", "smollm3"}
)
"""Model types that run lean."""

log = logging.getLogger(__name__)

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Layer:
    """One decoder layer, flat. Norms are None where the architecture has none."""

    before_attention: Function | None
    qkv: Linear
    query_norm: Function | None
    """Over [T, query and key heads x D] or, per head, [T, query and key heads, D]."""
    rope: str | None
    """Which table; None: no rotary embedding."""
    scaling: float
    window: int | None
    softcap: float | None
    out: Linear
    after_attention: Function | None
    before_mlp: Function | None
    gate_up: Linear
    gated: bool
    activation: Function
    down: Linear
    after_mlp: Function | None


class LeanForward:
    """Runs a loaded model (``loader.load_model``), whole or a stage. Takes its parameters over."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        base, config = model.base_model, model.config
        if config.model_type not in KNOWN:
            raise ValueError(f"model type {config.model_type} does not run lean")
        part = slice_of(model)
        self._first, self._last = part.first, part.last
        attention = _attention(base.layers[0])
        self._head_dim: int = getattr(attention, "head_dim", None) or attention.head_size
        self._q_heads, self._kv_heads = _heads(attention, self._head_dim)
        self._parallel = bool(getattr(base.layers[0], "use_parallel_residual", False))
        weight = next(base.layers[0].parameters())
        self._complex = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._tables = _rope_tables(base, max_model_len, weight, self._complex)
        head = model.get_output_embeddings() if self._last else None
        tied = head is not None and self._first and head.weight is model.get_input_embeddings().weight
        self._head = None if head is None else _take(head, table=tied)
        self._embed = _Embedding(model.get_input_embeddings(), self._head if tied else None) if self._first else None
        order = _Order(self._head_dim, self._tables, self._complex)
        self._layers = [_read_layer(layer, self._head_dim, order) for layer in base.layers]
        norm = next((getattr(base, name) for name in ("norm", "final_layer_norm") if hasattr(base, name)), None)
        self._norm = _norm(norm) if self._last else None
        self._final_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.laying_out = lay_out(self._matrices())
        """Thread that is still changing layouts of weights; None if there was nothing left to do."""

    def _matrices(self) -> list[Linear | Table]:
        matrices: list[Linear | Table] = []
        for layer in self._layers:
            matrices += layer.qkv, layer.out, layer.gate_up, layer.down
        if self._head is not None:
            matrices.append(self._head)
        if self._embed is not None and self._embed.source is not self._head:
            matrices.append(self._embed.source)
        return matrices

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices."""
        return sum(matrix.nbytes for matrix in self._matrices())

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`drumline.model.forward.Forward`."""
        x = ids.clone() if self._embed is None else self._embed(ids)
        rope = {name: table.index_select(0, positions).unsqueeze(1) for name, table in self._tables.items()}
        for number, layer in enumerate(self._layers):
            h = x if layer.before_attention is None else layer.before_attention(x)
            attended = layer.out(self._attention(h, number, layer, rope, batch))
            if layer.after_attention is not None:
                attended = layer.after_attention(attended)
            if not self._parallel:
                x += attended
            h = x if layer.before_mlp is None else layer.before_mlp(x)
            h = layer.gate_up(h)
            if layer.gated:
                width = h.shape[1] // 2
                h = layer.activation(h[:, :width]).mul_(h[:, width:])
            else:
                h = layer.activation(h)
            h = layer.down(h)
            if layer.after_mlp is not None:
                h = layer.after_mlp(h)
            x += h
            if self._parallel:
                x += attended
        return x if not self._last else self._logits(x, keep)

    def _attention(
        self, h: torch.Tensor, number: int, layer: _Layer, rope: dict[str, torch.Tensor], batch: AttentionBatch
    ) -> torch.Tensor:
        """[T, query heads x D]."""
        tokens, rotated = h.shape[0], self._q_heads + self._kv_heads
        qkv = layer.qkv(h).view(tokens, -1, self._head_dim)
        if layer.query_norm is not None:
            qkv[:, :rotated] = layer.query_norm(qkv[:, :rotated])
        if layer.rope is not None:
            _rotate(qkv[:, :rotated], rope[layer.rope], self._complex)
        keys_values = qkv[:, self._q_heads :].view(tokens, 2, -1, self._head_dim)
        write(batch, number, keys_values)
        out = attend(
            batch,
            number,
            qkv[:, : self._q_heads],
            keys_values,
            scaling=layer.scaling,
            window=layer.window,
            softcap=layer.softcap,
        )
        return out.reshape(tokens, -1)

    def _logits(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        assert self._norm is not None
        assert self._head is not None
        logits = self._head(self._norm(x.index_select(0, keep)))
        if self._final_softcap is not None:
            logits = torch.tanh(logits / self._final_softcap) * self._final_softcap
        return logits.float()


# --- reading the module tree -----------------------------------------------------------------------------------------


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


def _read_layer(layer: Any, dim: int, order: _Order) -> _Layer:
    attention, mlp = _attention(layer), layer.mlp
    q_heads, kv_heads = _heads(attention, dim)
    rotary = getattr(attention, "use_rope", True)
    weight, bias = _qkv(attention, dim)
    if rotary:
        weight, bias = order.rows(weight, q_heads + kv_heads), order.rows(bias, q_heads + kv_heads)
    gate_up, gated = _gate_up(mlp)
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    after = sandwich or hasattr(layer, "post_feedforward_layernorm")
    after_attention = layer.post_attention_layernorm if after else None
    before_mlp = layer.pre_feedforward_layernorm if sandwich else None if after else layer.post_attention_layernorm
    window = attention.sliding_window if hasattr(attention, "sliding_window") else _window_for_all(attention.config)
    softcap = attention.config.attn_logit_softcapping if attention.config.model_type == "gemma2" else None
    return _Layer(
        before_attention=_norm(getattr(layer, "input_layernorm", None)),
        qkv=Linear(weight, bias),
        query_norm=_query_norm(attention, dim, q_heads, kv_heads, order if rotary else None),
        rope=order.table_of(attention) if rotary else None,
        scaling=float(attention.scaling),
        window=window,
        softcap=softcap,
        out=_take(attention.o_proj if hasattr(attention, "o_proj") else attention.dense),
        after_attention=_norm(after_attention),
        before_mlp=_norm(before_mlp),
        gate_up=gate_up,
        gated=gated,
        activation=_activation(mlp),
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


def _stack(*modules: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and biases of linears over each other; the linears give theirs up."""
    weight = torch.cat([module.weight for module in modules])
    bias = torch.cat([module.bias for module in modules]) if modules[0].bias is not None else None
    _release(*modules)
    return weight, bias


def _qkv(attention: Any, dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One matrix: query heads, key heads, value heads."""
    if hasattr(attention, "q_proj"):
        return _stack(attention.q_proj, attention.k_proj, attention.v_proj)
    if hasattr(attention, "qkv_proj"):
        return _stack(attention.qkv_proj)
    weight, bias = _stack(attention.query_key_value)  # of each head its query, key and value

    def sorted_(rows: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, 3, dim, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    return sorted_(weight), None if bias is None else sorted_(bias)


def _gate_up(mlp: Any) -> tuple[Linear, bool]:
    """The product before the activation, and whether half of it is a gate."""
    if hasattr(mlp, "gate_proj"):
        return Linear(*_stack(mlp.gate_proj, mlp.up_proj)), True
    if hasattr(mlp, "gate_up_proj"):
        return Linear(*_stack(mlp.gate_up_proj)), True
    return Linear(*_stack(mlp.dense_h_to_4h)), False


def _activation(mlp: Any) -> Function:
    act: Any = next(getattr(mlp, name) for name in ("act_fn", "activation_fn", "act") if hasattr(mlp, name))
    if type(act).__name__ in ("SiLU", "SiLUActivation"):
        return functional.silu
    found: Function = act
    return found


class _RowParallel(Linear):
    """A product whose inputs are split over the group."""

    def __init__(self, module: RowParallelLinear) -> None:
        super().__init__(module.weight.detach(), None if module.bias is None else module.bias.detach())
        self._group = module._group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Linear`."""
        out = self._group.all_reduce(self.weights.product(x))
        return out if self.bias is None else out.add_(self.bias)


def _take(module: Any, *, table: bool = False) -> Linear:
    """A linear module's product; the module gives its weights up."""
    if isinstance(module, RowParallelLinear):
        linear: Linear = _RowParallel(module)
    else:
        bias = None if module.bias is None else module.bias.detach()
        linear = Linear(module.weight.detach(), bias, table=table)
    _release(module)
    return linear


class _Embedding:
    """Rows of the embedding; with several ranks each adds those that it has.

    If the head is the same matrix, its rows are taken.
    """

    def __init__(self, module: Any, head: Linear | None) -> None:
        weight = module.weight.detach()
        self.source = head or Table(weight)
        self._scale = _embedding_scale(module, weight.dtype)
        split = isinstance(module, VocabParallelEmbedding) and module._group.size > 1
        self._group: TPGroup | None = module._group if split else None
        self._ids: Range | None = module._ids if split else None
        _release(module)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._group is None or self._ids is None:
            x = self.source.rows(ids)
        else:
            local = ids - self._ids.start
            outside = (local < 0) | (local >= self._ids.size)
            rows = self.source.rows(local.masked_fill_(outside, 0))
            x = self._group.all_reduce(rows.masked_fill_(outside[:, None], 0))
        return x if self._scale is None else x.mul_(self._scale)


def _embedding_scale(module: Any, dtype: torch.dtype) -> float | None:
    if isinstance(module, VocabParallelEmbedding):
        return module.scale
    scale = getattr(module, "scalar_embed_scale", None)
    return None if scale is None else float(torch.tensor(scale).to(dtype))


# --- norms -----------------------------------------------------------------------------------------------------------


def _norm_weight(module: Any) -> tuple[torch.Tensor, float]:
    """What an RMS norm multiplies by, and its epsilon."""
    if hasattr(module, "variance_epsilon"):
        return module.weight.detach(), float(module.variance_epsilon)
    return 1.0 + module.weight.detach().float(), float(module.eps)  # Gemma's


def _norm(module: Any) -> Function | None:
    if module is None:
        return None
    if isinstance(module, nn.LayerNorm):
        shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda x: functional.layer_norm(x, shape, weight, bias, eps)
    return _rms_norm(*_norm_weight(module))


def _rms_norm(weight: torch.Tensor, eps: float) -> Function:
    """Over the last dimension; ``weight`` [..., D]."""
    plain = _rms_norm_in_float(weight, eps)
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return plain
    # x / sqrt(|x|^2 / D + eps) is x * sqrt(D) / hypot(|x|, sqrt(D * eps))
    width = weight.shape[-1]
    scaled, floor = weight * width**0.5, torch.tensor((width * eps) ** 0.5)
    nothing = torch.zeros(width)

    def normed(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            return plain(x)
        if x.dim() == 2 and len(x) == 1:  # one token: two operations less
            flat = x.view(-1)
            mean = float(torch.dot(flat, flat)) / width + eps
            return torch.addcmul(nothing, x, weight, value=mean**-0.5 if mean > 0 else math.inf)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, torch.hypot(size, floor)).mul_(scaled)

    return normed


def _rms_norm_in_float(weight: torch.Tensor, eps: float) -> Function:
    shape = (weight.shape[-1],)
    flat = weight if weight.dim() == 1 else None

    def normed(x: torch.Tensor) -> torch.Tensor:
        if flat is not None and x.dtype == flat.dtype:
            return functional.rms_norm(x, shape, flat, eps)
        return (functional.rms_norm(x.float(), shape, None, eps) * weight).to(x.dtype)

    return normed


def _query_norm(attention: Any, dim: int, q_heads: int, kv_heads: int, order: _Order | None) -> Function | None:
    """Norms of queries and keys, over [T, query and key heads, D]."""
    if not hasattr(attention, "q_norm"):
        return None
    norms = (attention.q_norm, attention.k_norm)
    if order is not None:
        for norm in norms:
            norm.weight = nn.Parameter(order.rows(norm.weight, norm.weight.shape[0] // dim), requires_grad=False)
    if not isinstance(norms[0], SplitRMSNorm) and norms[0].weight.shape[0] == dim:
        (query, eps), (key, _) = map(_norm_weight, norms)
        return _rms_norm(torch.cat([query.expand(q_heads, dim), key.expand(kv_heads, dim)]), eps)
    over_all: list[Any] = [norm if isinstance(norm, SplitRMSNorm) else _norm(norm) for norm in norms]

    def normed(x: torch.Tensor) -> torch.Tensor:
        parts = x[:, :q_heads], x[:, q_heads:]
        return torch.cat([norm(part.flatten(1)) for norm, part in zip(over_all, parts, strict=True)], 1).view(x.shape)

    return normed


# --- rotary embedding ------------------------------------------------------------------------------------------------


def _rope_tables(base: Any, length: int, like: torch.Tensor, as_complex: bool) -> dict[str, torch.Tensor]:
    """By layer type (one of no name if all are alike): complex [length, R / 2], or [length, 2, R] cosines and sines."""
    positions = torch.arange(length, device=like.device)[None]
    probe = torch.empty(1, dtype=torch.float32 if as_complex else like.dtype, device=like.device)
    rotary = base.rotary_emb
    names = getattr(rotary, "layer_types", None)
    calls = {"": (probe, positions)} if names is None else {name: (probe, positions, name) for name in names}
    tables = {}
    for name, call in calls.items():
        cos, sin = rotary(*call)
        half = cos.shape[-1] // 2
        tables[name] = (
            torch.complex(cos[0, :, :half], sin[0, :, :half]) if as_complex else torch.stack([cos[0], sin[0]], 1)
        )
    return tables


def _rotate(x: torch.Tensor, table: torch.Tensor, as_complex: bool) -> None:
    """Rotate [T, heads, D] in place; ``table`` [T, 1, ...]: the rows of these tokens."""
    if as_complex:
        width = 2 * table.shape[-1]
        pairs = x if width == x.shape[-1] else x[..., :width]
        torch.view_as_complex(pairs.view(*pairs.shape[:-1], -1, 2)).mul_(table)
        return
    cos, sin = table[:, :, 0], table[:, :, 1]
    rotated = x[..., : cos.shape[-1]]
    first, second = rotated.chunk(2, dim=-1)
    rotated.copy_(rotated * cos + torch.cat((-second, first), dim=-1) * sin)


class _Order:
    """The order of numbers inside a head: with complex tables those rotated together become neighbours."""

    def __init__(self, dim: int, tables: dict[str, torch.Tensor], as_complex: bool) -> None:
        self._names = list(tables)
        self._index: torch.Tensor | None = None
        if as_complex:
            half = next(iter(tables.values())).shape[-1]
            pairs = torch.arange(2 * half).view(2, half).t().reshape(-1)
            self._index = torch.cat([pairs, torch.arange(2 * half, dim)])

    def table_of(self, attention: Any) -> str:
        """Name of the table of a layer."""
        return self._names[0] if len(self._names) == 1 else attention.layer_type

    def rows(self, rows: Any, heads: int) -> Any:
        """``rows`` [heads x D or more, ...] with the first ``heads`` heads in order."""
        if rows is None or self._index is None:
            return rows
        dim = len(self._index)
        ordered = rows.detach().clone()
        front = rows[: heads * dim].view(heads, dim, *rows.shape[1:])
        ordered[: heads * dim] = front.index_select(1, self._index).reshape(heads * dim, *rows.shape[1:])
        return ordered


def make_forward(model: Any, max_model_len: int) -> Forward:
    """The fastest forward for a loaded model. A lean one takes its parameters over."""
    if model.config.model_type in KNOWN:
        return LeanForward(model, max_model_len)
    log.info(
        "Models of type %s run on the modules of transformers: no lean forward knows them", model.config.model_type
    )
    return ModuleForward(model)
