"""A rank's place in the pipeline: what a step gets from other stages, and what it gives to them.

::

    first stage          middle stages        last stage
    ids -> layers  ---->  layers  ---------->  layers, head -> sampler -> StepOutput
         ^        hidden [T, H]     hidden                        |
         |                                                        |
         +--------------- sampled tokens [S] of each step <-------+

All stages apply all plans to slots of their own (``model.slots``) and so agree on counts, blocks and which step sampled
what. Only the values of sampled tokens are known on the last stage alone: the others append a placeholder, and the
first one puts the value in its place when it comes, since it looks tokens up. A token whose slot was freed meanwhile is
dropped. Each rank of the last stage sends to the first-stage rank of its own TP place.

When the first stage takes tokens: before a step whose input they are (``token_source``), and in any case once so many
steps have followed that the engine core must have had their answer. So at most :func:`steps_unread` steps lie in the
ring from the last stage to the first, and the last stage never waits for room (see ``parallel.mail``).
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from drumline.config import EngineConfig
from drumline.errors import ConfigError
from drumline.model.slots import Ints, SlotTable
from drumline.parallel.boxes import MAIL_BYTES
from drumline.plan.step import StepPlan, ints, pack

_STEP = struct.Struct("<q")


class PipelineGroup(Protocol):
    """What a stage needs of the pipeline group (``parallel.groups.GroupCoordinator``)."""

    def send(self, tensor: torch.Tensor) -> None:
        """To the next stage."""

    def recv(self, tensor: torch.Tensor) -> torch.Tensor:
        """From the stage before."""

    def send_bytes(self, data: bytes) -> None:
        """To the next stage; from the last one to the first."""

    def recv_bytes(self) -> bytes:
        """From the stage before; on the first one from the last."""


class Stage:
    """The only stage: nothing comes from anywhere and nothing goes anywhere."""

    samples = True
    """Whether this stage has the head, and so the sampler."""
    alone = True
    """There is no other stage."""

    def prepare(self, plan: StepPlan, slots: SlotTable) -> None:
        """Put sampled tokens in place that this step needs. Slots are as after the plan's changes."""

    def receive(self, ids: torch.Tensor) -> torch.Tensor:
        """What the forward gets: the ids [T] of the step, or hidden states [T, H] of the stage before."""
        return ids

    def pass_on(self, hidden: torch.Tensor) -> None:
        """Send the hidden states [T, H] of the step on. Not on the last stage."""

    def sampled(self, step: int, slots: Ints, tokens: Ints) -> None:
        """The last stage has sampled these tokens [S]."""

    def expect(self, step: int, slots: Ints, lives: npt.NDArray[np.int64], places: Ints) -> None:
        """The last stage will sample a token for each of these slots [S], whose places in the slots are given."""

    def forget(self) -> None:
        """All slots are empty from now on; what is on its way is nobody's."""


class _Receiving(Stage):
    """A stage that has one before it."""

    alone = False

    def __init__(self, group: PipelineGroup, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._width, self._dtype, self._device = width, dtype, device

    def receive(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H] of the stage before."""
        return self._group.recv(torch.empty((len(ids), self._width), dtype=self._dtype, device=self._device))


class MiddleStage(_Receiving):
    """Neither the first nor the last."""

    samples = False

    def pass_on(self, hidden: torch.Tensor) -> None:
        """To the next stage."""
        self._group.send(hidden.contiguous())


class LastStage(_Receiving):
    """Has the head, samples, and tells the first stage."""

    def sampled(self, step: int, slots: Ints, tokens: Ints) -> None:
        """To the first stage."""
        self._group.send_bytes(_STEP.pack(step) + pack(tokens))


@dataclass(frozen=True)
class _Expected:
    """Tokens of one step that the last stage has not been asked for yet."""

    step: int
    slots: Ints
    lives: npt.NDArray[np.int64]
    places: Ints


class FirstStage(Stage):
    """Looks tokens up, and so wants to know what was sampled."""

    samples = alone = False

    def __init__(self, group: PipelineGroup, steps_in_flight: int) -> None:
        self._group = group
        self._in_flight = steps_in_flight
        self._expected: deque[_Expected] = deque()

    def prepare(self, plan: StepPlan, slots: SlotTable) -> None:
        """Take the tokens of all steps up to the last one that this plan names, and of all that are long over."""
        until = max(int(ints(plan.token_source).max(initial=-1)), plan.step - self._in_flight)
        while self._expected and self._expected[0].step <= until:
            self._take(self._expected.popleft(), slots)

    def _take(self, expected: _Expected, slots: SlotTable) -> None:
        data = self._group.recv_bytes()
        step, tokens = _STEP.unpack_from(data)[0], ints(memoryview(data)[_STEP.size :])
        if step != expected.step or len(tokens) != len(expected.slots):
            raise RuntimeError(
                f"{len(tokens)} tokens of step {step} came from the last stage, where {len(expected.slots)} of step "
                f"{expected.step} are due"
            )
        alive = slots.life[expected.slots] == expected.lives
        slots.tokens[expected.slots[alive], expected.places[alive]] = tokens[alive]

    def pass_on(self, hidden: torch.Tensor) -> None:
        """To the next stage."""
        self._group.send(hidden.contiguous())

    def expect(self, step: int, slots: Ints, lives: npt.NDArray[np.int64], places: Ints) -> None:
        """Remember what is to come."""
        self._expected.append(_Expected(step, slots, lives, places))

    def forget(self) -> None:
        """Messages still come, but no slot has lived then."""
        self._expected = deque(replace(one, lives=np.full_like(one.lives, -1)) for one in self._expected)


def steps_unread(in_flight: int) -> int:
    """Most steps whose tokens the first stage has not taken: those in flight, and the one whose answer goes out."""
    return in_flight + 1


def make_stage(
    config: EngineConfig,
    group: PipelineGroup,
    place: int,
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Stage:
    """The stage at a place of the pipeline. ``width``: of hidden states, which are of type ``dtype``.

    ConfigError if the tokens of all steps in flight could block the pipeline.
    """
    stages = config.parallel.pipeline_parallel_size
    if stages == 1:
        return Stage()
    in_flight = stages + (0 if config.scheduler.async_scheduling is False else 1)
    longest = 128 + _STEP.size + 4 * config.scheduler.max_num_seqs
    if steps_unread(in_flight) * longest > MAIL_BYTES:
        raise ConfigError(
            f"--max-num-seqs {config.scheduler.max_num_seqs} is too much for {stages} pipeline stages: tokens of "
            f"{steps_unread(in_flight)} steps do not fit into {MAIL_BYTES} bytes"
        )
    if place == 0:
        return FirstStage(group, in_flight)
    kind = LastStage if place == stages - 1 else MiddleStage
    return kind(group, width, dtype, device)
