"""A worker without a model: it applies plans to a KV cache of (position, token) pairs and checks every rule of them.

The token it samples is a hash of the request's seed and of the history as *read back through the block table*, so a
block that is shared, freed or reused wrongly shows up as a wrong token, or as a failed check before that.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

from drumline.plan.step import BY_VALUE, PromptLogprobs, SlotStart, StepOutput, StepPlan, TokenLogprobs, ints, pack
from drumline.worker.protocol import WorkerContext

Cell = tuple[int, int]
"""Position and token."""


def next_token(seed: int, history: list[int], vocab_size: int) -> int:
    """The model: a pure function of seed and history."""
    digest = hashlib.blake2b(repr((seed, history)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


@dataclass
class Slot:
    start: SlotStart
    tokens: list[int]
    sampled_by: int = BY_VALUE
    table: list[int] = field(default_factory=list)
    computed: int = 0


class SimulatedWorker:
    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, vocab_size: int = 11
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.cache: list[list[Cell | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.slots: dict[int, Slot] = {}
        self.next_step = 0
        self.computed_tokens = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        assert plan.step == self.next_step, "plans come in order"
        self.next_step += 1
        self._apply_changes(plan)
        rows = list(
            zip(
                *(ints(a).tolist() for a in (plan.slots, plan.num_tokens, plan.num_computed, plan.token_source)),
                ints(plan.sample).tolist(),
                strict=True,
            )
        )
        assert 1 <= len(rows) <= self.max_num_seqs
        assert len({row[0] for row in rows}) == len(rows), "a slot has one row"
        total = sum(row[1] for row in rows)
        assert total <= self.max_num_batched_tokens
        self.computed_tokens += total
        started = {start.slot for start in plan.starts}
        for slot, count, computed, source, sample in rows:
            self._write(self.slots[slot], slot, count, computed, source, sample, fresh=slot in started)
        sampling = [slot for slot, _, _, _, sample in rows if sample]
        tokens = [self._sample(self.slots[slot], plan.step) for slot in sampling]
        logprobs = [
            TokenLogprobs(-float(token), 1) if self.slots[slot].start.sampling.logprobs >= 0 else None
            for slot, token in zip(sampling, tokens, strict=True)
        ]
        prompts = [self._score(self.slots[slot], slot, count, computed) for slot, count, computed, _, _ in rows]
        return StepOutput(
            plan.step,
            pack(sampling),
            pack(tokens),
            logprobs if any(logprobs) else [],
            [entry for entry in prompts if entry.rows],
        )

    @staticmethod
    def _score(slot: Slot, number: int, count: int, computed: int) -> PromptLogprobs:
        """Of the prompt's tokens behind those computed now: minus position and token."""
        start = slot.start
        ends = min(computed + count, start.num_prompt - 1) if start.sampling.prompt_logprobs >= 0 else 0
        positions = range(computed + 1, ends + 1)
        rows = [TokenLogprobs(-float(position), slot.tokens[position]) for position in positions]
        return PromptLogprobs(number, computed + 1, rows)

    def _apply_changes(self, plan: StepPlan) -> None:
        for slot in ints(plan.freed).tolist():
            del self.slots[slot]  # KeyError: freed twice
        for start in plan.starts:
            assert start.slot not in self.slots, "a slot is filled twice"
            assert 0 <= start.slot < self.max_num_seqs
            self.slots[start.slot] = Slot(start, ints(start.tokens).tolist())
        blocks = ints(plan.blocks).tolist()
        for slot, count in zip(ints(plan.slots).tolist(), ints(plan.block_counts).tolist(), strict=True):
            self.slots[slot].table += blocks[:count]
            del blocks[:count]
        assert not blocks
        assert all(len(set(slot.table)) == len(slot.table) for slot in self.slots.values()), (
            "a block is twice in a table"
        )

    def _write(
        self, slot: Slot, number: int, count: int, computed: int, source: int, sample: int, *, fresh: bool
    ) -> None:
        assert count >= 1
        if fresh:  # a prefix from the cache, whole blocks of it
            assert computed % self.block_size == 0
            assert computed < len(slot.tokens), "at least one token is computed"
            slot.computed = computed
        assert computed == slot.computed, "positions follow one another"
        assert computed + count <= len(slot.tokens), "only known tokens are computed"
        assert len(slot.table) * self.block_size >= computed + count, "the table covers the tokens"
        assert source == slot.sampled_by, "the input token is where the plan says"
        assert source == BY_VALUE or count == 1
        assert bool(sample) == (computed + count == len(slot.tokens))
        for position in range(computed, computed + count):
            block = slot.table[position // self.block_size]
            assert 0 <= block < self.num_blocks
            for other, held in self.slots.items():
                assert other == number or block not in held.table or self._same(held, slot, position), (
                    "a block that is written is nobody else's"
                )
            self.cache[block][position % self.block_size] = (position, slot.tokens[position])
        slot.computed += count

    def _same(self, held: Slot, slot: Slot, position: int) -> bool:
        """A row of this plan may share a block which an earlier row of this plan fills with the same tokens."""
        end = (position // self.block_size + 1) * self.block_size
        return held.computed == 0 and held.tokens[:end] == slot.tokens[:end] and len(held.tokens) > end

    def _sample(self, slot: Slot, step: int) -> int:
        history = []
        for position in range(slot.computed):
            cell = self.cache[slot.table[position // self.block_size]][position % self.block_size]
            assert cell is not None, "an empty cell was read"
            assert cell[0] == position, "the cell of another position was read"
            history.append(cell[1])
        assert history == slot.tokens, "the cache holds the request's own tokens"
        token = next_token(slot.start.sampling.seed, history, self.vocab_size)
        slot.tokens.append(token)
        slot.sampled_by = step
        return token


class SimulatedModelWorker:
    """The simulated worker behind the Worker protocol; tests reach the last one through ``current``."""

    current: SimulatedModelWorker

    def __init__(self, context: WorkerContext) -> None:
        config = context.config
        assert config.cache.num_gpu_blocks_override is not None
        self.simulated = SimulatedWorker(
            num_blocks=config.cache.num_gpu_blocks_override,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail_at = -1
        self.deferred: dict[int, StepOutput] = {}
        self.defers = False
        SimulatedModelWorker.current = self

    def execute_model(self, plan: StepPlan) -> StepOutput | None:
        self.entered.set()
        assert self.gate.wait(20)
        if plan.step == self.fail_at:
            raise ValueError(f"boom at step {plan.step}")
        output = self.simulated.execute(plan)
        if self.defers:
            self.deferred[plan.step] = output
            return None
        return output

    def sample_tokens(self, step: int, grammar: object) -> StepOutput:
        return self.deferred.pop(step)

    def double(self, number: int) -> int:
        return 2 * number

    def something_odd(self) -> object:
        return object()

    def complain(self) -> None:
        raise KeyError("nothing here")
