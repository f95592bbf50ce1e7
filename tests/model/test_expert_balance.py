"""When experts move, and by the load of which steps: without weights, and with a group of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import EPLBConfig
from drumline.model.expert_balance import PARTS, ExpertBalancer
from drumline.parallel.experts import Placement


class Layer:
    """Experts without weights."""

    def __init__(self, num_experts: int = 8, ranks: int = 2) -> None:
        self.placement = Placement.linear(num_experts, 0, ranks)
        self.loads = torch.zeros(num_experts, dtype=torch.int64)
        self.counting = True
        self.moves = 0

    def place(self, placement: Placement) -> None:
        self.placement = placement
        self.moves += 1

    def parameters(self) -> list[Any]:
        return []


class Group:
    """The others have counted nothing."""

    rank_in_group = 0

    def __init__(self) -> None:
        self.summed: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.summed.append(tensor)
        return tensor

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        raise AssertionError("there are no weights")


def balancer(layers: Sequence[Layer], group: Group, **config: int) -> ExpertBalancer:
    found: Any = layers
    return ExpertBalancer(found, group, EPLBConfig(**config))


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_every_layer_gets_its_turn(interval: int) -> None:
    """Also with fewer steps between plans than layers, all of which have something to move each time."""
    layers = [Layer() for _ in range(7)]
    made = balancer(layers, Group(), step_interval=interval, window_size=1)
    for _ in range(70):
        for layer in layers:  # always two of the same rank, whoever is there
            layer.loads[list(layer.placement.experts[:2])] += 50
        made.after_step()
    moves = [layer.moves for layer in layers]
    assert min(moves) > 0
    assert max(moves) - min(moves) <= 2


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 200))
def test_the_window_is_what_counts(interval: int, window: int, steps: int) -> None:
    """The last steps without a gap: as many as the window has, but for what is short of a part."""
    layer, group, counts = Layer(), Group(), []
    made = balancer([layer], group, step_interval=interval, window_size=window)
    for step in range(1, steps + 1):
        counts.append(step)  # so that a sum tells which steps it is of
        layer.loads += step
        made.after_step()
        if step % interval:
            continue
        least = min(step, window - max(1, window // PARTS) + 1)
        of_some = {sum(counts[-some:]) for some in range(least, min(step, window) + 1)}
        assert int(group.summed[-1][0, 0]) in of_some
