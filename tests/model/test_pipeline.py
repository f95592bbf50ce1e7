"""The first stage's bookkeeping of tokens that the last one samples, without processes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drumline.config import SchedulerConfig
from drumline.errors import ConfigError
from drumline.model.pipeline import FirstStage, LastStage, MiddleStage, Stage, make_stage
from drumline.model.slots import SlotTable
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import BY_VALUE, SlotStart, StepPlan, pack
from tests.model.conftest import engine_config


class Wire:
    """The ring from the last stage to the first."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        raise AssertionError

    def recv(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    def send_bytes(self, data: bytes) -> None:
        self.messages.append(data)

    def recv_bytes(self) -> bytes:
        return self.messages.popleft()


class Pair:
    """First stage and last stage with a wire between them."""

    def __init__(self, in_flight: int = 3) -> None:
        self.wire = Wire()
        self.first = FirstStage(self.wire, in_flight)
        self.last = LastStage(self.wire, 8, torch.float32, torch.device("cpu"))
        self.slots = SlotTable(32, 4)

    def start(self, slot: int) -> None:
        self.slots.start(SlotStart(slot, "r", pack([9, 9]), 2, SlotSampling()))

    def step(self, step: int, slots: list[int], tokens: list[int]) -> None:
        """The first stage leaves room, the last one sends."""
        chosen = np.array(slots, dtype=np.int32)
        self.first.expect(step, chosen, self.slots.life[chosen], self.slots.num_tokens[chosen])
        self.slots.append_tokens(chosen, np.zeros(len(slots), dtype=np.int32), step)
        self.last.sampled(step, chosen, np.array(tokens, dtype=np.int32))

    def prepare(self, step: int, *sources: int) -> None:
        self.first.prepare(StepPlan(step=step, token_source=pack(sources)), self.slots)

    def known(self, slot: int) -> list[int]:
        return self.slots.tokens[slot, : self.slots.num_tokens[slot]].tolist()  # type: ignore[no-any-return]


def test_tokens_are_taken_when_they_are_needed() -> None:
    pair = Pair()
    pair.start(0)
    pair.start(1)
    pair.step(0, [0, 1], [5, 6])
    pair.step(1, [1], [7])
    pair.prepare(2, BY_VALUE)
    assert len(pair.wire.messages) == 2  # nobody needs them yet
    pair.prepare(2, 0, BY_VALUE)
    assert (pair.known(0), pair.known(1)) == ([9, 9, 5], [9, 9, 6, 0])
    pair.prepare(3, 1)
    assert pair.known(1) == [9, 9, 6, 7]


def test_tokens_that_nobody_needs_do_not_pile_up() -> None:
    pair = Pair(in_flight=2)
    pair.start(0)
    for step in range(20):
        pair.step(step, [0], [step])
        pair.prepare(step + 1)
        assert len(pair.wire.messages) <= 2
    assert pair.known(0)[:20] == [9, 9, *range(18)]


def test_tokens_of_a_former_life_are_dropped() -> None:
    pair = Pair()
    pair.start(0)
    pair.step(0, [0], [5])
    pair.slots.free(np.array([0], dtype=np.int32))
    pair.start(0)
    pair.step(1, [0], [6])
    pair.prepare(2, 1)
    assert pair.known(0) == [9, 9, 6]


def test_after_the_cache_was_replaced_old_tokens_are_nobodys() -> None:
    pair = Pair()
    pair.start(0)
    pair.step(0, [0], [5])
    pair.first.forget()
    pair.slots = SlotTable(32, 4)
    pair.start(0)
    pair.step(1, [0], [6])
    pair.prepare(2, 1)
    assert pair.known(0) == [9, 9, 6]


def test_stages_that_disagree_are_noticed() -> None:
    pair = Pair()
    pair.start(0)
    pair.step(0, [0], [5])
    pair.wire.messages.clear()
    pair.last.sampled(1, np.array([0], dtype=np.int32), np.array([5], dtype=np.int32))
    with pytest.raises(RuntimeError, match="1 tokens of step 1 came from the last stage, where 1 of step 0 are due"):
        pair.prepare(1, 0)


def test_places(tmp_path: Path) -> None:
    rest = {"width": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    kinds = [type(make_stage(engine_config(tmp_path, pp=3), Wire(), place, **rest)) for place in range(3)]
    assert kinds == [FirstStage, MiddleStage, LastStage]
    assert type(make_stage(engine_config(tmp_path), Wire(), 0, **rest)) is Stage
    crowded = replace(engine_config(tmp_path, pp=3), scheduler=SchedulerConfig(max_num_seqs=1 << 20))
    with pytest.raises(ConfigError, match="--max-num-seqs 1048576 is too much for 3 pipeline stages"):
        make_stage(crowded, Wire(), 0, **rest)
