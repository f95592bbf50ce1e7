"""Layers of which each rank of a tensor-parallel group holds a part.

They take the place of layers of a transformers model (``loader``). Column-parallel linears need none of these: they are
plain linears with fewer rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from drumline.parallel.shards import Range
from drumline.parallel.shm import OneShot


class TPGroup(Protocol):
    """What parallel layers need of the tensor-parallel group (``parallel.groups.GroupCoordinator``)."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def rank_in_group(self) -> int:
        """Place of this rank."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all members, in place."""

    def one_shot(self) -> OneShot | None:
        """How compiled code sums by itself; None if it cannot."""


class RowParallelLinear(nn.Module):
    """A linear whose input features are split over the group; the sum and the whole bias are on every rank."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, group: TPGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device="meta"))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta")) if bias else None
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's features] to [..., out_features]."""
        out = self._group.all_reduce(functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of its vocabulary range.

    ``scale``: what the whole embedding is multiplied by (Gemma); rounded to the type of the weights, as transformers
    rounds it.
    """

    def __init__(self, ids: Range, dim: int, dtype: torch.dtype, group: TPGroup, scale: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ids.size, dim, dtype=dtype, device="meta"))
        self.scale = None if scale is None else float(torch.tensor(scale).to(dtype))
        self._ids = ids
        self._group = group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[...] ids to [..., dim]."""
        local = input_ids - self._ids.start
        outside = (local < 0) | (local >= self._ids.size)
        rows = functional.embedding(local.masked_fill(outside, 0), self.weight)
        whole = self._group.all_reduce(rows.masked_fill(outside.unsqueeze(-1), 0))
        return whole if self.scale is None else whole * self.scale


class SplitRMSNorm(nn.Module):
    """An RMS norm over the width of all heads (OLMo 2's query and key norm), of which each rank holds some.

    The sum of squares is reduced over the group. Ranks that hold a copy of a KV head that an earlier rank holds too
    add nothing (``counts`` False), so the sum is that of the whole width exactly once.
    """

    def __init__(self, size: int, width: int, eps: float, counts: bool, dtype: torch.dtype, group: TPGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
        self.width = width
        self.variance_epsilon = eps
        self._counts = counts
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., this rank's width], normalised over the whole width; in float32 inside."""
        wide = x.float()
        squares = wide.pow(2).sum(-1, keepdim=True)
        if not self._counts:
            squares.zero_()
        squares = self._group.all_reduce(squares)
        wide = wide * torch.rsqrt(squares / self.width + self.variance_epsilon)
        return (self.weight * wide).to(x.dtype)
