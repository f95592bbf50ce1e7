"""Runs steps on one rank: keeps the state of each slot, applies plans, packs the forward, samples.

State of slots is in ``model.slots``. A plan says what changed (``plan.step``), in the order: freed, starts, blocks,
forward. Nothing here decides anything; what a plan could contradict (a token source, an unknown slot) is checked and
raises, since ranks that disagree answer nonsense.

One step::

    plan --> slot state --> ids, positions [T] + AttentionBatch --> forward --> logits [S, this rank's ids]
         --> Sampler (collective) --> tokens [S], appended to the slots on every rank --> StepOutput

On a pipeline stage (``pipeline``) hidden states of the stage before take the place of ids, and on all but the last one
the forward's hidden states are passed on, nothing is sampled, and slots get placeholders of the tokens.

A step whose rows are those of the step before, each with the token that was sampled then, takes a shorter way to the
same (``model.steady``).

With ``defer_sampling`` the logits wait until ``sample`` names the step. A slot that was freed meanwhile gets no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.model.attention import AttentionBatch, KVCache, dummy_batch, make_batch
from drumline.model.busy import BusyClock, make_clock
from drumline.model.context_parallel import ContextParallel
from drumline.model.forward import Forward
from drumline.model.pipeline import Stage
from drumline.model.sampling import Sampler, SamplingRows, drawn_rows
from drumline.model.slots import Ints, PromptRows, SlotTable
from drumline.model.steady import SteadyRows
from drumline.plan.step import BY_VALUE, PromptLogprobs, StepOutput, StepPlan, ints, pack


@dataclass(frozen=True)
class _Unsampled:
    """A step between its forward and its sampling."""

    logits: torch.Tensor
    """Empty on a stage without the head."""
    slots: Ints
    lives: npt.NDArray[np.int64]
    """Which life of each slot the step belongs to."""
    rows: SamplingRows
    prompt: PromptRows | None = None
    """Tokens of prompts whose log-probabilities are asked for: their logits follow those of the rows that sample."""
    seconds: float = 0.0
    """Of the forward."""
    decodes: bool = False
    """Each row had one token, and samples."""


_NO_LOGITS = torch.empty((0, 0))


class ModelRunner:
    """Applies plans to a loaded model over a KV cache."""

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        *,
        num_kv_heads: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        max_num_seqs: int = 64,
        stage: Stage | None = None,
        context: ContextParallel | None = None,
    ) -> None:
        """``context``: if other ranks keep or compute parts of a step; then ``forward`` must gather."""
        self.forward = forward
        self._gathers = forward.gathers
        self._stage = stage or Stage()
        self._context = context
        self._clock: BusyClock | None = None if self._stage.alone else make_clock(device)
        self._sampler = sampler
        self._num_kv_heads = num_kv_heads
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._dtype = dtype
        self._unsampled: dict[int, _Unsampled] = {}
        self._cache: KVCache | None = None
        self._last_slots = b""
        """Of the last step, if each of its rows had one token and sampled."""
        self._steady: SteadyRows | None = None
        """Rows of the last two steps, if they had the same."""
        self.slots = SlotTable(1, 1, 1)

    def busy_ns(self) -> int:
        """How long this pipeline stage has computed (``model.busy``); 0: it is the only one."""
        return 0 if self._clock is None else self._clock.ns()

    def set_cache(self, cache: KVCache) -> None:
        """Take a KV cache into use; all slots are empty then."""
        self._cache = cache
        if self._gathers and self._context is None:
            cache.keep_copies(self._max_num_seqs, self._max_model_len)
        self._unsampled.clear()
        self._stage.forget()
        self._last_slots, self._steady = b"", None
        self.slots = SlotTable(
            self._max_model_len,
            cache.span,
            self._max_num_seqs,
            ids=self._sampler.ids if self._stage.samples else None,
            device=self._device,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput | None:
        """Run one step; None if its sampling is deferred, or another stage's."""
        steady, self._steady = self._steady, None
        if steady is not None and steady.follow(plan):
            output = self._go_on(plan, steady)
            self._steady = steady
            return output
        last_slots, self._last_slots = self._last_slots, b""
        unsampled = self._forward(plan)
        if plan.defer_sampling:
            self._unsampled[plan.step] = unsampled
            return None
        result = self._sample(plan.step, unsampled)
        if self._stage.alone and unsampled.decodes:
            self._last_slots = plan.slots
            if plan.slots == last_slots:
                self._steady = SteadyRows(plan, unsampled.slots, self.slots, self._span)
        return result

    @torch.inference_mode()
    def sample(self, step: int) -> StepOutput | None:
        """Sample a deferred step; None if another stage does."""
        unsampled = self._unsampled.pop(step, None)
        if unsampled is None:
            raise RuntimeError(f"step {step} waits for no sampling")
        return self._sample(step, unsampled)

    @torch.inference_mode()
    def run_dummy(self, num_tokens: int = 1, num_rows: int = 0) -> None:
        """A forward, head included, that changes no state. It goes through all stages of a pipeline.

        ``num_rows``: that many rows of logits, from which tokens are drawn, with log-probabilities; 0: one row, of
        which nothing is made.
        """
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        positions = torch.arange(num_tokens, device=self._device)
        last = torch.arange(num_tokens - max(num_rows, 1), num_tokens, device=self._device)
        inputs = self._stage.receive(ids)
        computed = self.forward(inputs, positions, dummy_batch(num_tokens, self._dtype, self._device), last)
        if not self._stage.samples:
            self._stage.pass_on(computed)
        elif num_rows:
            self._sampler.sample(computed, drawn_rows(num_rows))

    def _forward(self, plan: StepPlan) -> _Unsampled:
        if self._cache is None:
            raise RuntimeError("a plan came before the KV cache was configured")
        state = self.slots
        if plan.freed:
            state.free(ints(plan.freed))
        for start in plan.starts:
            state.start(start)
        slots, count, computed = ints(plan.slots), ints(plan.num_tokens), ints(plan.num_computed)
        state.check(slots)
        self._append_blocks(plan, slots, computed)
        self._check_rows(plan, slots, count, computed)
        self._stage.prepare(plan, state)
        chosen = np.flatnonzero(ints(plan.sample))
        sampled = slots[chosen]
        prompt = state.prompt_rows(slots, count, computed)
        logits, seconds, decodes = _NO_LOGITS, 0.0, False
        if len(slots):
            starts = count.cumsum() - count
            single = len(slots) == int(starts[-1]) + 1 == int(starts[-1] + count[-1])
            decodes = single and len(chosen) == len(slots) and prompt is None
            if single:
                ids, positions = state.tokens[slots, computed], computed
            else:
                rows = np.repeat(np.arange(len(slots)), count)
                positions = np.arange(len(rows)) - starts[rows] + computed[rows]
                ids = state.tokens[slots[rows], positions]
            width = -(-int((computed + count).max()) // self._cache.span)
            tables = state.tables[slots, :width]
            batch = self._batch(tables, computed, count, slots, ints(plan.token_source) != BY_VALUE)
            keep = (starts + count - 1)[chosen]
            last = self._tensor(keep if prompt is None else np.concatenate([keep, prompt.places]))
            inputs = self._stage.receive(self._tensor(ids if batch.owners is None else ids[batch.owners.own]))
            if self._clock is not None:
                self._clock.start()
            began = perf_counter()
            computed_here = self.forward(inputs, self._tensor(positions), batch, last)
            seconds = perf_counter() - began
            if self._clock is not None:
                self._clock.stop()
            if self._stage.samples:
                logits = computed_here
            else:
                self._stage.pass_on(computed_here)
        return _Unsampled(logits, sampled, state.life[sampled], state.sampling_rows(sampled), prompt, seconds, decodes)

    def _go_on(self, plan: StepPlan, rows: SteadyRows) -> StepOutput:
        """Run a step that follows the one before."""
        if plan.blocks:
            self._append_blocks(plan, rows.slots, rows.computed)
            rows.set_tables()
            if not rows.room:
                self._check_rows(plan, rows.slots, rows.counts, rows.computed)
        assert self._cache is not None
        if self._gathers:
            batch = self._batch(rows.tables, rows.computed, rows.counts, rows.slots, rows.continues)
        else:
            batch = rows.lasting_batch(self._cache, self._device)
        ids, positions, every = rows.ids, rows.positions, rows.every
        if self._device.type != "cpu":
            ids, positions, every = (tensor.to(self._device) for tensor in (ids, positions, every))
        began = perf_counter()
        logits = self.forward(ids, positions, batch, every)
        computed = perf_counter()
        tokens, logprobs = self._sampler.sample(logits, rows.sampling or self.slots.sampling_rows(rows.slots))
        rows.take(tokens, plan.step)
        output = StepOutput(plan.step, plan.slots, pack(tokens), logprobs)
        output.forward_s, output.sample_s = computed - began, perf_counter() - computed
        return output

    def _batch(
        self, tables: Ints, computed: Ints, count: Ints, slots: Ints, continues: npt.NDArray[np.bool_]
    ) -> AttentionBatch:
        """The attention side of a step; see ``attention.make_batch``."""
        assert self._cache is not None
        if not self._gathers:  # it finds its way by itself
            return AttentionBatch(self._cache, tables, computed, count, self._dtype, self._device)
        if self._context is not None:
            return self._context.batch(self._cache, tables, computed, count, self._device)
        decoding = slots, self.slots.life, continues
        return make_batch(self._cache, tables, computed, count, self._device, decoding=decoding)

    def _append_blocks(self, plan: StepPlan, slots: Ints, computed: Ints) -> None:
        """Extend block tables. Where attention looks at places that no query sees, new blocks are cleared."""
        assert self._cache is not None
        counts, blocks = ints(plan.block_counts), ints(plan.blocks)
        if not len(blocks):
            return
        highest = int(blocks.max())
        if int(blocks.min()) < 0 or highest >= self._cache.num_blocks:  # kernels write where they are told
            raise RuntimeError(
                f"step {plan.step} names blocks {int(blocks.min())} to {highest}: this rank has "
                f"{self._cache.num_blocks}"
            )
        self._cache.give_out(highest)
        if self._gathers:  # other forwards touch what they write and nothing else
            rows = np.repeat(np.arange(len(slots)), counts)
            nth = np.arange(len(blocks)) - (np.cumsum(counts) - counts)[rows]
            first_position = (self.slots.num_blocks[slots][rows] + nth) * self._cache.span
            fresh = blocks[first_position >= computed[rows]]  # a prefix hit's hold something
            if len(fresh):
                self._cache.clear(self._tensor(fresh))
        self.slots.append_blocks(slots, counts, blocks)

    def _check_rows(self, plan: StepPlan, slots: Ints, count: Ints, computed: Ints) -> None:
        """Raise if the plan contradicts what this rank knows."""
        state, source = self.slots, ints(plan.token_source)
        known = state.num_tokens[slots]
        end = computed + count
        sampling = ints(plan.sample) == 1
        wrong = (count < 1) | (end > known) | (sampling & (end != known)) | (known >= state.max_tokens) & sampling
        wrong |= state.num_blocks[slots] * self._span < end
        wrong |= (source != BY_VALUE) & ((source != state.sampled_by[slots]) | (count != 1) | (end != known))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            slot = int(slots[row])
            raise RuntimeError(
                f"step {plan.step} does not fit slot {slot}: tokens {computed[row]}..{end[row]}, source {source[row]}, "
                f"sample {int(sampling[row])}; known here: {known[row]} tokens, the last sampled by step "
                f"{state.sampled_by[slot]}, {state.num_blocks[slot]} blocks"
            )

    @property
    def _span(self) -> int:
        assert self._cache is not None
        return self._cache.span

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _sample(self, step: int, unsampled: _Unsampled) -> StepOutput | None:
        if not self._stage.samples:
            self._leave_room(step, unsampled)
            return None
        began = perf_counter()
        if self._clock is not None:
            self._clock.start()
        output = self._sampled(step, unsampled)
        if self._clock is not None:
            self._clock.stop()
        output.forward_s, output.sample_s = unsampled.seconds, perf_counter() - began
        return output

    def _sampled(self, step: int, unsampled: _Unsampled) -> StepOutput:
        slots, logits = unsampled.slots, unsampled.logits
        prompts = [] if unsampled.prompt is None else self._prompt_logprobs(unsampled.prompt, logits[len(slots) :])
        if not len(slots):
            return StepOutput(step=step, slots=b"", tokens=b"", prompt_logprobs=prompts)
        tokens, logprobs = self._sampler.sample(logits[: len(slots)], unsampled.rows)
        self._stage.sampled(step, slots, tokens)
        alive = self.slots.life[slots] == unsampled.lives
        self.slots.append_tokens(slots[alive], tokens[alive], step)
        return StepOutput(step=step, slots=pack(slots), tokens=pack(tokens), logprobs=logprobs, prompt_logprobs=prompts)

    def _prompt_logprobs(self, prompt: PromptRows, logits: torch.Tensor) -> list[PromptLogprobs]:
        """Log-probabilities of tokens of prompts, in pieces for each slot. A collective."""
        found = self._sampler.logprobs(logits, prompt.tokens, prompt.counts)
        begins = np.flatnonzero(np.diff(prompt.slots, prepend=-1)).tolist()
        return [
            PromptLogprobs(int(prompt.slots[begin]), int(prompt.positions[begin]), found[begin:end])
            for begin, end in zip(begins, [*begins[1:], len(prompt.slots)], strict=True)
        ]

    def _leave_room(self, step: int, unsampled: _Unsampled) -> None:
        """The last stage samples: here the tokens are counted, and their values are 0 until they are known."""
        slots = unsampled.slots
        if not len(slots):
            return
        self._stage.expect(step, slots, unsampled.lives, self.slots.num_tokens[slots])
        alive = slots[self.slots.life[slots] == unsampled.lives]
        self.slots.append_tokens(alive, np.zeros(len(alive), dtype=np.int32), step)
