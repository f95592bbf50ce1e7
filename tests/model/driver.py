"""Drives model workers with hand-made step plans: a scheduler of the simplest kind, for tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drumline.plan.sampling import SlotSampling
from drumline.plan.step import BY_VALUE, SlotStart, StepOutput, StepPlan, TokenLogprobs, ints, pack

Execute = Callable[[StepPlan], StepOutput]


@dataclass
class Running:
    """One request."""

    prompt: list[int]
    sampling: SlotSampling
    max_tokens: int
    outputs: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    """With their positions, in the order in which they came."""
    slot: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    source: int = BY_VALUE

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.outputs]

    @property
    def done(self) -> bool:
        return len(self.outputs) >= self.max_tokens


class Driver:
    """Runs requests in steps; chunks of prompts have random odd sizes, blocks and slots come in random order."""

    def __init__(
        self, execute: Execute, *, num_blocks: int = 128, block_size: int = 4, max_chunk: int = 64, seed: int = 0
    ) -> None:
        self.execute = execute
        self.block_size = block_size
        self.max_chunk = max_chunk
        self.random = random.Random(seed)
        self.step_number = 0
        self.running: list[Running] = []
        self.free_blocks = list(range(num_blocks))
        self.random.shuffle(self.free_blocks)
        self.free_slots = [3, 0, 200, 7, 1, 2, 5, 4, *range(8, 72)]
        self._freed: list[int] = []

    def add(self, prompt: Sequence[int], sampling: SlotSampling | None = None, max_tokens: int = 12) -> Running:
        request = Running(list(prompt), sampling or SlotSampling(), max_tokens)
        self.running.append(request)
        return request

    def run(self) -> None:
        """Until all requests are done."""
        while self.running:
            self.step()

    def preempt(self, request: Running) -> None:
        """Take slot and blocks away; it starts again from its tokens."""
        self._release(request)
        request.computed, request.source = 0, BY_VALUE

    def step(self, *, defer: bool = False) -> StepPlan:
        """One step over all requests."""
        plan = self.plan()
        plan.defer_sampling = defer
        self.take(plan, self.execute(plan))
        return plan

    def take(self, plan: StepPlan, output: StepOutput) -> None:
        """What a step has given."""
        assert output.step == plan.step
        by_slot = {request.slot: request for request in self.running}
        for entry in output.prompt_logprobs:
            by_slot[entry.slot].prompt_logprobs += enumerate(entry.rows, start=entry.first)
        expected = [slot for slot, sample in zip(ints(plan.slots), ints(plan.sample), strict=True) if sample]
        assert ints(output.slots).tolist() == expected
        for row, (slot, token) in enumerate(zip(ints(output.slots), ints(output.tokens), strict=True)):
            request = by_slot[int(slot)]
            request.outputs.append(int(token))
            request.source = plan.step
            if output.logprobs:
                request.logprobs.append(output.logprobs[row])
        for request in [request for request in self.running if request.done]:
            self._release(request)
            self.running.remove(request)

    def plan(self) -> StepPlan:
        """The next step over all requests."""
        starts, rows = [], []
        freed, self._freed = self._freed, []
        for request in self.running:
            if request.slot < 0:
                request.slot = self.free_slots.pop(0)
                tokens = pack(request.tokens)
                starts.append(SlotStart(request.slot, "test", tokens, len(request.prompt), request.sampling))
            left = len(request.tokens) - request.computed
            count = min(left, self.random.randint(1, self.max_chunk))
            need = -(-(request.computed + count) // self.block_size) - len(request.blocks)
            blocks = [self.free_blocks.pop() for _ in range(need)]
            request.blocks += blocks
            source = request.source if request.computed == len(request.tokens) - 1 else BY_VALUE
            rows.append((request.slot, count, request.computed, source, need, int(count == left), blocks))
            request.computed += count
        columns = list(zip(*(row[:6] for row in rows), strict=True)) or [()] * 6
        self.step_number += 1
        return StepPlan(
            step=self.step_number,
            starts=starts,
            freed=pack(freed),
            slots=pack(columns[0]),
            num_tokens=pack(columns[1]),
            num_computed=pack(columns[2]),
            token_source=pack(columns[3]),
            block_counts=pack(columns[4]),
            blocks=pack([block for row in rows for block in row[6]]),
            sample=pack(columns[5]),
        )

    def _release(self, request: Running) -> None:
        if request.slot >= 0:
            self._freed.append(request.slot)
            self.free_slots.insert(self.random.randint(0, 3), request.slot)
        self.free_blocks += request.blocks
        request.slot, request.blocks = -1, []


def prompts(count: int, vocab_size: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to ``longest`` tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]
