"""Mixture of experts: the block that takes the place of a decoder layer's MLP, and experts that a TP group shares.

Flow of one block, the same on every rank of the group (all have all tokens and the whole router)::

    hidden [T, H] -> router of transformers -> top_k_index, top_k_weights [T, k]
      |  experts: this rank's part of the answer [T, H]
      |  shared experts (DeepSeek): this rank's part, added
      v
    one all-reduce over the group -> [T, H] on every rank

What the block asks of its experts is :class:`ExpertsModule`: *the sum of what the ranks give is the answer*. How the
work is shared is theirs. :class:`Experts` has all experts on every rank, of each a range of its width (as an MLP is
split: gate and up by rows, down by columns), so ranks have the same work whatever the router says. Which experts a
model gets is decided in one place, ``expert_weights.put_experts``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from drumline.model.layers import TPGroup

Gating = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gate [N, I] and up [N, I] to [N, I]."""


class ExpertsModule(Protocol):
    """Experts of one layer, as a block sees them."""

    def __call__(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """This rank's part of the answer, [T, H], in a tensor of its own: parts are summed over the TP group.

        ``hidden`` [T, H]; ``top_k_index`` [T, k] numbers of experts in the whole layer; ``top_k_weights`` [T, k].
        """


class Experts(nn.Module):
    """Experts of one layer that are all here, with a range of their width I (all of it without a group).

    ``gate_up_proj`` [E, 2 I, H]: the rows of the gate, then those of up. ``down_proj`` [E, H, I]. With ``biases``
    ``gate_up_proj_bias`` [E, 2 I], and where ``down_bias`` ``down_proj_bias`` [E, H]: on one rank of a group alone,
    since the parts of all ranks are summed.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        gating: Gating,
        dtype: torch.dtype,
        *,
        biases: bool = False,
        down_bias: bool = True,
    ) -> None:
        super().__init__()
        self._gating = gating
        self.gate_up_proj = _parameter(num_experts, 2 * width, hidden_size, dtype=dtype)
        self.down_proj = _parameter(num_experts, hidden_size, width, dtype=dtype)
        self.gate_up_proj_bias = _parameter(num_experts, 2 * width, dtype=dtype) if biases else None
        self.down_proj_bias = _parameter(num_experts, hidden_size, dtype=dtype) if biases and down_bias else None

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """See :class:`ExpertsModule`. Tokens are sorted by expert; experts without tokens cost nothing."""
        tokens, choices = top_k_index.shape
        chosen, order = top_k_index.reshape(-1).sort(stable=True)
        rows = hidden.index_select(0, order // choices)
        out = torch.empty_like(rows)
        found, counts = (x.tolist() for x in torch.unique_consecutive(chosen, return_counts=True))
        for expert, some, place in zip(found, *(x.split_with_sizes(counts) for x in (rows, out)), strict=True):
            self._expert(expert, some, place)
        by_choice = torch.empty_like(out).index_copy_(0, order, out).view(tokens, choices, out.shape[1])
        return (by_choice * top_k_weights[..., None]).sum(1).to(hidden.dtype)

    def _expert(self, expert: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """One expert's answer to [N, H] into ``out`` [N, H]."""
        bias = None if self.gate_up_proj_bias is None else self.gate_up_proj_bias[expert]
        gate, up = functional.linear(rows, self.gate_up_proj[expert], bias).chunk(2, dim=-1)
        torch.mm(self._gating(gate, up), self.down_proj[expert].t(), out=out)
        if self.down_proj_bias is not None:
            out += self.down_proj_bias[expert]


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def clamped_swiglu(alpha: float, limit: float) -> Gating:
    """GPT-OSS's gating: gate x sigmoid(alpha x gate) x (up + 1), the gate at most ``limit``, up at most that far from
    0."""

    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))

    return gated


def gating_of(experts: Any) -> Gating:
    """What the experts module of a transformers model does between its two products."""
    if hasattr(experts, "limit"):
        return clamped_swiglu(experts.alpha, experts.limit)
    if hasattr(experts, "act_fn"):
        activation: Callable[[torch.Tensor], torch.Tensor] = experts.act_fn
        return lambda gate, up: activation(gate) * up
    raise ValueError(f"{type(experts).__name__}: unknown experts")


class MoeBlock(nn.Module):
    """Router, experts and shared experts of one layer, with one sum over the TP group.

    Keeps the router and the shared experts of the transformers block under the names that they have there. The last
    linear of the shared experts must give this rank's part too (``loader``).
    """

    def __init__(self, block: Any, experts: nn.Module, group: TPGroup) -> None:
        super().__init__()
        self._router = next(name for name in ("gate", "router") if hasattr(block, name))
        self.add_module(self._router, getattr(block, self._router))
        self.experts = experts
        if hasattr(block, "shared_experts"):
            self.shared_experts = block.shared_experts
        self._group = group

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, H] to the same shape, on every rank the same."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = self.get_submodule(self._router)(hidden)
        out = self.experts(hidden, index, weights)
        if "shared_experts" in self._modules:
            out += self.shared_experts(hidden)
        return self._group.all_reduce(out).view(hidden_states.shape)


class ScoredMoeBlock(MoeBlock):
    """A block of GPT-OSS, whose layers expect the router's scores beside the answer, and drop them."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """[B, T, H] to the same shape, on every rank the same; and nothing."""
        return super().forward(hidden_states), None
