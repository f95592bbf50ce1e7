"""The forward of decoder models of transformers without its Python, in torch's operations: the same weights and the
same arithmetic.

In transformers' modules one decoder layer is some 60 operations and 40 Python calls between them. Here a step walks
flat layers (``model.flat``):

- query, key and value are one product, gate and up another; weights are laid out for the machine (``linears``);
- RMS norms are 4 small operations (torch's own takes 9 on CPUs, 26 us against 5);
- in float32 the rotary embedding is one complex multiplication in place: rows of the query and key weights are
  reordered, so that the two numbers that are rotated together are neighbours. Scores do not change, as queries and
  keys are reordered alike; the KV cache then holds keys in this order.

Each model type of ``flat.KNOWN`` is tested to give what ``forward.ModuleForward`` gives. CPUs with one thread have a
faster forward, ``model.compiled``; this one serves GPUs, 16-bit arithmetic and several threads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from drumline.model import flat
from drumline.model.attention import AttentionBatch, attend, write
from drumline.model.layers import TPGroup
from drumline.model.linears import Linear, Table, lay_out
from drumline.parallel.shards import Range

Function = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Layer:
    """One decoder layer (``flat.Layer``), ready to run."""

    before_attention: Function | None
    qkv: Linear
    query_norm: Function | None
    """Over [T, query and key heads, D]."""
    rope: str | None
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

    gathers = True

    def __init__(self, model: Any, max_model_len: int) -> None:
        weight = next(model.base_model.layers[0].parameters())
        self._complex = weight.device.type == "cpu" and weight.dtype == torch.float32
        read = flat.read_model(model, max_model_len)
        self._head_dim, self._q_heads, self._kv_heads = read.head_dim, read.q_heads, read.kv_heads
        self._parallel = read.parallel
        self._tables = {name: _complex(table) if self._complex else table for name, table in read.rope.items()}
        self._head = None if read.head is None else _linear(read.head, table=read.tied)
        self._embed = None
        if read.embedding is not None:
            self._embed = _Embedding(read.embedding, self._head if read.tied else None)
        order = _Order(self._head_dim, self._tables, self._complex)
        self._layers = [_ready(layer, read, order) for layer in read.layers]
        self._norm = _norm(read.norm)
        self._final_softcap = read.final_softcap
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
        return x if self._head is None else self._logits(x, keep)

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


# --- from flat layers ------------------------------------------------------------------------------------------------


def _ready(layer: flat.Layer, model: flat.Model, order: _Order) -> _Layer:
    rotated = model.q_heads + model.kv_heads
    if layer.rope is not None:
        layer.qkv.weight = order.rows(layer.qkv.weight, rotated)
        layer.qkv.bias = order.rows(layer.qkv.bias, rotated)
    return _Layer(
        before_attention=_norm(layer.before_attention),
        qkv=_linear(layer.qkv),
        query_norm=_query_norm(layer, model.q_heads, order if layer.rope is not None else None),
        rope=layer.rope,
        scaling=layer.scaling,
        window=layer.window,
        softcap=layer.softcap,
        out=_linear(layer.out),
        after_attention=_norm(layer.after_attention),
        before_mlp=_norm(layer.before_mlp),
        gate_up=_linear(layer.gate_up),
        gated=layer.gated,
        activation=_activation(layer.activation),
        down=_linear(layer.down),
        after_mlp=_norm(layer.after_mlp),
    )


def _activation(module: nn.Module) -> Function:
    if type(module).__name__ in ("SiLU", "SiLUActivation"):
        return functional.silu
    found: Function = module
    return found


class _RowParallel(Linear):
    """A product whose inputs are split over the group."""

    def __init__(self, matrix: flat.Matrix, group: TPGroup) -> None:
        super().__init__(matrix.weight, matrix.bias)
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Linear`."""
        out = self._group.all_reduce(self.weights.product(x))
        return out if self.bias is None else out.add_(self.bias)


def _linear(matrix: flat.Matrix, *, table: bool = False) -> Linear:
    if matrix.group is not None:
        return _RowParallel(matrix, matrix.group)
    return Linear(matrix.weight, matrix.bias, table=table)


class _Embedding:
    """Rows of the embedding; with several ranks each adds those that it has.

    If the head is the same matrix, its rows are taken.
    """

    def __init__(self, embedding: flat.Embedding, head: Linear | None) -> None:
        self.source = head or Table(embedding.weight)
        self._scale = embedding.scale
        self._group: TPGroup | None = embedding.group
        self._ids: Range | None = embedding.ids

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._group is None or self._ids is None:
            x = self.source.rows(ids)
        else:
            local = ids - self._ids.start
            outside = (local < 0) | (local >= self._ids.size)
            rows = self.source.rows(local.masked_fill_(outside, 0))
            x = self._group.all_reduce(rows.masked_fill_(outside[:, None], 0))
        return x if self._scale is None else x.mul_(self._scale)


# --- norms -----------------------------------------------------------------------------------------------------------


def _norm(norm: flat.Norm | None) -> Function | None:
    if norm is None:
        return None
    if norm.split is not None:
        split: Function = norm.split
        return split
    if not norm.rms:
        weight, bias, eps = norm.weight, norm.bias, norm.eps
        return lambda x: functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    assert norm.weight is not None
    return _rms_norm(norm.weight, norm.eps)


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


def _query_norm(layer: flat.Layer, q_heads: int, order: _Order | None) -> Function | None:
    """Norms of queries and keys, over [T, query and key heads, D]."""

    def ordered(norm: flat.Norm) -> flat.Norm:
        if order is None or norm.weight is None:
            return norm
        heads = norm.weight.numel() // order.dim
        weight = order.rows(norm.weight.reshape(-1), heads).view(norm.weight.shape)
        if norm.split is not None:
            norm.split.weight = nn.Parameter(weight, requires_grad=False)
        return dataclasses.replace(norm, weight=weight)

    if layer.head_norms is not None:
        return _norm(ordered(layer.head_norms))
    if layer.query_norm is None or layer.key_norm is None:
        return None
    over_all = _norm(ordered(layer.query_norm)), _norm(ordered(layer.key_norm))

    def normed(x: torch.Tensor) -> torch.Tensor:
        parts = x[:, :q_heads], x[:, q_heads:]
        done = [norm(part.flatten(1)) for norm, part in zip(over_all, parts, strict=True) if norm is not None]
        return torch.cat(done, 1).view(x.shape)

    return normed


# --- rotary embedding ------------------------------------------------------------------------------------------------


def _complex(table: torch.Tensor) -> torch.Tensor:
    """[length, 2, R] cosines and sines as [length, R / 2] complex numbers."""
    half = table.shape[-1] // 2
    return torch.complex(table[:, 0, :half], table[:, 1, :half])


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
        self.dim = dim
        self._index: torch.Tensor | None = None
        if as_complex:
            half = next(iter(tables.values())).shape[-1]
            pairs = torch.arange(2 * half).view(2, half).t().reshape(-1)
            self._index = torch.cat([pairs, torch.arange(2 * half, dim)])

    def rows(self, rows: Any, heads: int) -> Any:
        """``rows`` [heads x D or more, ...] with the first ``heads`` heads in order."""
        if rows is None or self._index is None:
            return rows
        dim = len(self._index)
        ordered = rows.detach().clone()
        front = rows[: heads * dim].view(heads, dim, *rows.shape[1:])
        ordered[: heads * dim] = front.index_select(1, self._index).reshape(heads * dim, *rows.shape[1:])
        return ordered
