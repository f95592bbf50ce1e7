"""Expert load balancing at run time: experts move to where they even out the load, between steps, without a stop.

Each module of experts counts the rows of each expert (``expert_parallel``). Every ``step_interval`` steps all ranks of
an EPLB group add up what they have counted in the last ``window_size`` steps, and each computes the same new placements
from it (``parallel.balance``). After each of the following steps the weights of *one* layer move, by an all-to-all over
the EPLB group, which nothing else uses; the layer's new placement holds from the next step on. So a step waits for the
move of one layer at most, and no answer changes: which replica computes a row makes no difference to it.

All ranks of the group take the same steps in the same order (lockstep, where it spans engines: with a dummy batch where
there is nothing to do), so counting steps is all the agreement that there is. Dummy batches are not counted as load.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from drumline.config import EPLBConfig
from drumline.model.expert_parallel import ParallelExperts
from drumline.parallel.balance import moves, rebalanced, transfer
from drumline.parallel.experts import Placement

log = logging.getLogger(__name__)

PARTS = 8
"""The window is counted in so many parts: so much of it is forgotten at a time, to stay within the window."""


class EPLBGroup(Protocol):
    """What the balancer needs of its group (``parallel.groups.GroupCoordinator``)."""

    @property
    def rank_in_group(self) -> int:
        """Place of this rank."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all members, in place."""

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Rows to and from each member."""


class ExpertBalancer:
    """Moves the experts of a stage's layers, as one rank of the EPLB group."""

    def __init__(self, layers: Sequence[ParallelExperts], group: EPLBGroup, config: EPLBConfig) -> None:
        self._layers = layers
        self._group = group
        self._config = config
        self._part = max(1, config.window_size // PARTS)
        """Steps of a part of the window."""
        self._window: deque[torch.Tensor] = deque(maxlen=config.window_size // self._part)
        """Its whole parts."""
        self._begun: torch.Tensor | None = None
        """The part that is not whole yet, as far as it has been counted."""
        self._due: deque[tuple[int, Placement]] = deque()
        """Layers, by their places, and what they get."""
        self._first = 0
        """Place of the layer whose turn is next."""
        self._steps = 0
        self.moved = 0
        """Slots that got the weights of another expert so far, on all ranks."""

    @torch.inference_mode()
    def after_step(self) -> None:
        """Every rank of the group calls it after each step. A collective in some of them."""
        self._steps += 1
        if self._due:
            self._move(*self._due.popleft())
        interval = self._steps % self._config.step_interval == 0
        if interval or self._steps % self._part == 0:
            self._count()
        if interval:
            self._plan()

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """What runs inside is no load."""
        for layer in self._layers:
            layer.counting = False
        try:
            yield
        finally:
            for layer in self._layers:
                layer.counting = True

    def _count(self) -> None:
        """Add what the layers have counted since the last time to the window."""
        counted = torch.stack([layer.loads for layer in self._layers]).cpu()
        for layer in self._layers:
            layer.loads.zero_()
        self._begun = counted if self._begun is None else self._begun + counted
        if self._steps % self._part == 0:
            self._window.append(self._begun)
            self._begun = None

    def _loads(self) -> torch.Tensor:
        """[layers, experts] of the window: of as many whole parts as it has room for beside the one that has begun."""
        room = (self._config.window_size - self._steps % self._part) // self._part
        while len(self._window) > room:
            self._window.popleft()
        return torch.stack([*self._window, *([] if self._begun is None else [self._begun])]).sum(0)

    def _plan(self) -> None:
        """Where experts shall be from now on. Layers whose move of last time is still due are planned anew.

        They move in turn from the one on whose turn is next: if there are more of them than steps until the next plan,
        those at the end come first then.
        """
        loads = self._group.all_reduce(self._loads())
        self._due.clear()
        before, after = [], []
        rows, count = loads.tolist(), len(self._layers)
        for place in (*range(self._first, count), *range(self._first)):
            layer, row = self._layers[place], rows[place]
            placement = rebalanced(layer.placement, row)
            if placement is not layer.placement:
                self._due.append((place, placement))
            before.append(layer.placement.balancedness(row))
            after.append(placement.balancedness(row))
        if self._config.log_balancedness and self._group.rank_in_group == 0:
            log.info(
                "expert load after %d steps: balancedness %.2f (mean over %d layers), %.2f when %d layers have moved",
                self._steps,
                sum(before) / len(before),
                len(before),
                sum(after) / len(after),
                len(self._due),
            )

    def _move(self, place: int, placement: Placement) -> None:
        layer = self._layers[place]
        self._first = (place + 1) % len(self._layers)
        found = moves(layer.placement, placement)
        part = transfer(found, layer.placement, self._group.rank_in_group)
        for parameter in layer.parameters():
            weights = parameter.data
            going = weights[torch.tensor(part.send, dtype=torch.int64, device=weights.device)]
            came = self._group.all_to_all(going, part.sends, part.receives)
            weights[torch.tensor(part.receive, dtype=torch.int64, device=weights.device)] = came
        layer.place(placement)
        self.moved += len(found)
