"""Runs steps on one rank: keeps the state of each slot, applies plans, packs the forward, samples.

State of a slot is rows of numpy arrays: its known tokens, its block table, counts, sampling parameters. A plan says
what changed (``plan.step``), in the order: freed, starts, blocks, forward. Nothing here decides anything; what a
plan could contradict (a token source, an unknown slot) is checked and raises, since ranks that disagree answer
nonsense.

One step::

    plan --> slot state --> input_ids, positions [1, T] + AttentionBatch --> model --> logits [S, this rank's ids]
         --> Sampler (collective) --> tokens [S], appended to the slots on every rank --> StepOutput

With ``defer_sampling`` the logits wait until ``sample`` names the step. A slot that was freed meanwhile gets no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.model.attention import AttentionBatch, KVCache, dummy_batch, make_batch
from drumline.model.sampling import Sampler, SamplingRows
from drumline.plan.step import BY_VALUE, SlotStart, StepOutput, StepPlan, ints, pack

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class _Unsampled:
    """A step between its forward and its sampling."""

    logits: torch.Tensor
    slots: Ints
    lives: npt.NDArray[np.int64]
    """Which life of each slot the step belongs to."""
    rows: SamplingRows


class SlotTable:
    """State of all slots of this rank. Arrays grow with the highest slot number that is seen."""

    def __init__(self, max_model_len: int, block_size: int, capacity: int = 64) -> None:
        self._width = max_model_len + 1  # the last sampled token is never computed, but known
        self._blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((capacity, self._width), dtype=np.int32)
        self.tables = np.zeros((capacity, self._blocks), dtype=np.int32)
        self.num_tokens = np.zeros(capacity, dtype=np.int32)
        self.num_prompt = np.zeros(capacity, dtype=np.int32)
        self.num_blocks = np.zeros(capacity, dtype=np.int32)
        self.sampled_by = np.full(capacity, BY_VALUE, dtype=np.int64)
        """Step that sampled the last token; BY_VALUE if it was given."""
        self.life = np.zeros(capacity, dtype=np.int64)
        """Odd while the slot is in use; changes with every start and free."""
        self.temperature = np.zeros(capacity)
        self.top_p = np.ones(capacity)
        self.top_k = np.zeros(capacity, dtype=np.int32)
        self.seed = np.zeros(capacity, dtype=np.int64)
        self.logprobs = np.full(capacity, -1, dtype=np.int32)

    @property
    def max_tokens(self) -> int:
        """Most tokens that a slot can know."""
        return self._width

    def start(self, start: SlotStart) -> None:
        """Fill a slot."""
        slot, tokens, sampling = start.slot, ints(start.tokens), start.sampling
        self._reserve(slot)
        if self.life[slot] % 2:
            raise RuntimeError(f"slot {slot} is given to request {start.request_id} but still in use")
        if not 0 < len(tokens) <= self._width:
            raise RuntimeError(f"request {start.request_id} starts with {len(tokens)} tokens; 1 to {self._width} fit")
        self.life[slot] += 1
        self.tokens[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = len(tokens)
        self.num_prompt[slot] = start.num_prompt
        self.num_blocks[slot] = 0
        self.sampled_by[slot] = BY_VALUE
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = max(sampling.top_k, 0)
        self.seed[slot] = (sampling.seed + (1 << 63)) % (1 << 64) - (1 << 63)  # the same 64 bits, signed
        self.logprobs[slot] = sampling.logprobs

    def free(self, slots: Ints) -> None:
        """Empty slots."""
        self.check(slots)
        self.life[slots] += 1

    def check(self, slots: Ints) -> None:
        """RuntimeError if one of these is not in use."""
        if len(slots) and (slots.max() >= len(self.life) or not (self.life[slots] % 2).all()):
            raise RuntimeError(f"the plan names slots of {slots.tolist()} that are not in use")

    def append_blocks(self, slots: Ints, counts: Ints, blocks: Ints) -> None:
        """Append ``counts[row]`` of ``blocks`` to the table of each row's slot."""
        taken = 0
        for row in np.flatnonzero(counts):
            slot, count = slots[row], counts[row]
            first = self.num_blocks[slot]
            self.tables[slot, first : first + count] = blocks[taken : taken + count]
            self.num_blocks[slot] += count
            taken += count
        if taken != len(blocks):
            raise RuntimeError(f"the plan has {len(blocks)} blocks but counts {taken}")

    def append_tokens(self, slots: Ints, tokens: Ints, step: int) -> None:
        """The tokens that a step sampled."""
        self.tokens[slots, self.num_tokens[slots]] = tokens
        self.num_tokens[slots] += 1
        self.sampled_by[slots] = step

    def sampling_rows(self, slots: Ints) -> SamplingRows:
        """What these slots ask for, for their next token."""
        return SamplingRows(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            seed=self.seed[slots],
            output_index=(self.num_tokens[slots] - self.num_prompt[slots]).astype(np.int64),
            logprobs=self.logprobs[slots],
        )

    def _reserve(self, slot: int) -> None:
        if slot < len(self.life):
            return
        grow = max(slot + 1 - len(self.life), len(self.life))
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                tail = np.zeros((grow, *array.shape[1:]), dtype=array.dtype)
                setattr(self, name, np.concatenate([array, tail]))


class ModelRunner:
    """Applies plans to a loaded model over a KV cache."""

    def __init__(
        self,
        model: Any,
        sampler: Sampler,
        *,
        num_kv_heads: int,
        max_model_len: int,
        device: torch.device,
        max_num_seqs: int = 64,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._num_kv_heads = num_kv_heads
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._device = device
        self._unsampled: dict[int, _Unsampled] = {}
        self._cache: KVCache | None = None
        self.slots = SlotTable(1, 1, 1)

    def set_cache(self, cache: KVCache) -> None:
        """Take a KV cache into use; all slots are empty then."""
        self._cache = cache
        self._unsampled.clear()
        self.slots = SlotTable(self._max_model_len, cache.block_size, self._max_num_seqs)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput | None:
        """Run one step; None if its sampling is deferred."""
        unsampled = self._forward(plan)
        if plan.defer_sampling:
            self._unsampled[plan.step] = unsampled
            return None
        return self._sample(plan.step, unsampled)

    @torch.inference_mode()
    def sample(self, step: int) -> StepOutput:
        """Sample a deferred step."""
        unsampled = self._unsampled.pop(step, None)
        if unsampled is None:
            raise RuntimeError(f"step {step} waits for no sampling")
        return self._sample(step, unsampled)

    @torch.inference_mode()
    def run_dummy(self, num_tokens: int = 1) -> None:
        """A forward, head included, that changes no state."""
        ids = torch.zeros((1, num_tokens), dtype=torch.int64, device=self._device)
        positions = torch.arange(num_tokens, device=self._device)[None]
        self._logits(ids, positions, dummy_batch(num_tokens), torch.tensor([num_tokens - 1], device=self._device))

    def _forward(self, plan: StepPlan) -> _Unsampled:
        if self._cache is None:
            raise RuntimeError("a plan came before the KV cache was configured")
        state = self.slots
        state.free(ints(plan.freed))
        for start in plan.starts:
            state.start(start)
        slots, count, computed = ints(plan.slots), ints(plan.num_tokens), ints(plan.num_computed)
        state.check(slots)
        fresh = self._append_blocks(plan, slots, computed)
        self._check_rows(plan, slots, count, computed)
        chosen = np.flatnonzero(ints(plan.sample))
        sampled = slots[chosen]
        if not len(slots):
            logits = torch.empty((0, 0))
        else:
            if len(fresh):
                self._cache.clear(self._tensor(fresh))
            starts = np.cumsum(count) - count
            rows = np.repeat(np.arange(len(slots)), count)
            positions = np.arange(len(rows)) - starts[rows] + computed[rows]
            ids = state.tokens[slots[rows], positions]
            width = -(-int((computed + count).max()) // self._cache.block_size)
            tables = state.tables[slots, :width]
            batch = make_batch(self._cache, tables, computed, count, self._num_kv_heads, self._device)
            last = self._tensor((starts + count - 1)[chosen])
            logits = self._logits(self._tensor(ids)[None], self._tensor(positions)[None], batch, last)
        return _Unsampled(logits, sampled, state.life[sampled], state.sampling_rows(sampled))

    def _append_blocks(self, plan: StepPlan, slots: Ints, computed: Ints) -> Ints:
        """Extend block tables; the ids of new blocks that hold nothing yet (a prefix hit's hold something)."""
        assert self._cache is not None
        counts, blocks = ints(plan.block_counts), ints(plan.blocks)
        if not len(blocks):
            return blocks
        rows = np.repeat(np.arange(len(slots)), counts)
        nth = np.arange(len(blocks)) - (np.cumsum(counts) - counts)[rows]
        first_position = (self.slots.num_blocks[slots][rows] + nth) * self._cache.block_size
        self.slots.append_blocks(slots, counts, blocks)
        return blocks[first_position >= computed[rows]]

    def _check_rows(self, plan: StepPlan, slots: Ints, count: Ints, computed: Ints) -> None:
        """Raise if the plan contradicts what this rank knows."""
        state, source = self.slots, ints(plan.token_source)
        known = state.num_tokens[slots]
        end = computed + count
        sampling = ints(plan.sample) == 1
        wrong = (count < 1) | (end > known) | (sampling & (end != known)) | (known >= state.max_tokens) & sampling
        wrong |= state.num_blocks[slots] * self._block_size < end
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
    def _block_size(self) -> int:
        assert self._cache is not None
        return self._cache.block_size

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        """[len(keep), this rank's part of the vocabulary] float32."""
        output = self._model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, ctx=batch, return_dict=True
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _sample(self, step: int, unsampled: _Unsampled) -> StepOutput:
        slots = unsampled.slots
        if not len(slots):
            return StepOutput(step=step, slots=b"", tokens=b"")
        tokens, logprobs = self._sampler.sample(unsampled.logits, unsampled.rows)
        alive = self.slots.life[slots] == unsampled.lives
        self.slots.append_tokens(slots[alive], tokens[alive], step)
        return StepOutput(step=step, slots=pack(slots), tokens=pack(tokens), logprobs=logprobs)
