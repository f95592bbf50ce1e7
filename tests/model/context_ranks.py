"""What tests of context parallelism look at on the ranks; run there by ``RankHost.call(function, ...)``."""

from __future__ import annotations

from typing import Any

import torch


def kept_tokens(worker: Any) -> tuple[int, int]:
    """(tokens whose keys lie in the cache, bytes of the cache)."""
    keys = worker.cache.keys[0]  # [blocks, heads, block, D]
    return int(keys.abs().amax(dim=(1, 3)).count_nonzero()), worker.cache.data.nbytes


def num_layers(model: Any) -> int:
    """For ``apply_model``."""
    return len(model.base_model.layers)


def count_computed(worker: Any) -> None:
    """Note from now on how many tokens each forward computes on this rank."""
    part = worker.runner.forward
    inner, worker.computed = part.inner, []

    def forward(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        worker.computed.append(len(ids))
        return inner(ids, *rest)

    part.inner = forward


def computed(worker: Any) -> list[int]:
    """What was noted."""
    noted: list[int] = worker.computed
    return noted
