"""Dicts of tensors and other values on their way between ranks: what they are, apart from the tensors' values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Described:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this kind, unfilled; on ``device`` if it was on one."""
        return torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_cpu else device)


def described(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A dict without its tensors' values, to be pickled; and those of its tensors that are not empty, in order."""
    found: dict[str, Any] = {}
    tensors = []
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
            continue
        found[name] = Described(tuple(value.shape), value.dtype, value.is_cpu)
        if value.numel():
            tensors.append(value.detach())
    return found, tensors


def made(description: Mapping[str, Any], device: torch.device) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The dict of a description, with tensors that have yet to be filled; and those of them that are not empty."""
    values = {
        name: value.empty(device) if isinstance(value, Described) else value for name, value in description.items()
    }
    return values, [values[name] for name, one in description.items() if isinstance(one, Described) and one.numel]
