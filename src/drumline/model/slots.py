"""What a rank knows of each slot: known tokens, block table, what to sample with. Rows of numpy arrays; bans, biases
and penalties, which few slots ask for, are in ``model.adjust``.

Plans (``plan.step``) say what changes: slots are freed, started, given blocks; sampled tokens are appended. All ranks
hold the same state. What a plan could contradict raises RuntimeError, since ranks that disagree answer nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from drumline.model.adjust import Adjuster
from drumline.model.sampling import PLAIN, SamplingRows
from drumline.parallel.shards import Range
from drumline.plan.step import BY_VALUE, SlotStart, ints

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PromptRows:
    """Prompt tokens whose log-probabilities a step computes: arrays of [P], one for each token, in order of rows."""

    places: npt.NDArray[np.int64]
    """Place among the step's tokens of the token before each, whose logits it is predicted by."""
    slots: Ints
    positions: npt.NDArray[np.int64]
    """Of the predicted token in the prompt."""
    tokens: Ints
    """The predicted token."""
    counts: Ints
    """Number of top log-probabilities to report."""


class SlotTable:
    """State of all slots of this rank. Arrays grow with the highest slot number that is seen."""

    def __init__(
        self,
        max_model_len: int,
        block_size: int,
        capacity: int = 64,
        *,
        ids: Range | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``ids``: this rank's slice of the vocabulary, if it samples; ``device``: where it does."""
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
        self.min_p = np.zeros(capacity)
        self.logprobs = np.full(capacity, -1, dtype=np.int32)
        self.prompt_logprobs = np.full(capacity, -1, dtype=np.int32)
        self._num_scoring = 0
        """Slots that are in use and ask for log-probabilities of their prompts."""
        self.special = np.zeros(capacity, dtype=np.int64)
        """1 for slots that are in use and ask for random tokens or log-probabilities ..."""
        self._num_special = 0
        """... and how many these are."""
        self._adjuster = None if ids is None else Adjuster(ids, device or torch.device("cpu"))

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
        self.min_p[slot] = sampling.min_p
        self.logprobs[slot] = sampling.logprobs
        self.prompt_logprobs[slot] = sampling.prompt_logprobs
        self._num_scoring += sampling.prompt_logprobs >= 0
        special = int(sampling.temperature > 0 or sampling.logprobs >= 0)
        self.special[slot] = special
        self._num_special += special
        if self._adjuster is not None:
            self._adjuster.start(slot, sampling, tokens, start.num_prompt)

    def free(self, slots: Ints) -> None:
        """Empty slots."""
        self.check(slots)
        self.life[slots] += 1
        if self._num_scoring:
            self._num_scoring -= int((self.prompt_logprobs[slots] >= 0).sum())
        if self._num_special:
            self._num_special -= int(self.special[slots].sum())
        if self._adjuster is not None:
            self._adjuster.free(slots)

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
        self.count(slots, tokens)

    def count(self, slots: Ints, tokens: Ints) -> None:
        """Let penalties know of sampled tokens; part of :meth:`append_tokens`."""
        if self._adjuster is not None:
            self._adjuster.sampled(slots, tokens)

    def adjusts(self, slots: Ints) -> bool:
        """Logits of some of these slots are changed before sampling, in a way that depends on their tokens."""
        return self._adjuster is not None and self._adjuster.concerns(slots)

    def sampling_rows(self, slots: Ints, output_index: npt.NDArray[np.int64] | None = None) -> SamplingRows:
        """What these slots ask for, for their next token. ``output_index``: instead of what their tokens give."""
        if not self._num_special and (self._adjuster is None or self._adjuster.idle):
            return PLAIN  # looking at each row takes 0.1 ms after a forward that has washed the caches
        if output_index is None:
            output_index = (self.num_tokens[slots] - self.num_prompt[slots]).astype(np.int64)
        return SamplingRows(
            temperature=self.temperature[slots],
            top_p=self.top_p[slots],
            top_k=self.top_k[slots],
            seed=self.seed[slots],
            output_index=output_index,
            min_p=self.min_p[slots],
            logprobs=self.logprobs[slots],
            adjustments=None
            if self._adjuster is None
            else self._adjuster.adjustments(slots, self.tokens, self.num_tokens, self.num_prompt),
        )

    def prompt_rows(self, slots: Ints, count: Ints, computed: Ints) -> PromptRows | None:
        """Prompt tokens that are predicted by those that a step computes (``count`` of each slot after ``computed``),
        where their log-probabilities are asked for. None if there are none."""
        if not self._num_scoring:
            return None
        ends = np.minimum(computed + count, self.num_prompt[slots] - 1)
        each = np.where(self.prompt_logprobs[slots] >= 0, np.maximum(ends - computed, 0), 0)
        if not each.any():
            return None
        rows = np.repeat(np.arange(len(slots)), each)
        within = np.arange(len(rows)) - (np.cumsum(each) - each)[rows]
        positions = computed[rows].astype(np.int64) + within + 1
        return PromptRows(
            places=(np.cumsum(count) - count)[rows] + within,
            slots=slots[rows],
            positions=positions,
            tokens=self.tokens[slots[rows], positions],
            counts=self.prompt_logprobs[slots[rows]],
        )

    def _reserve(self, slot: int) -> None:
        if slot < len(self.life):
            return
        grow = max(slot + 1 - len(self.life), len(self.life))
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                tail = np.zeros((grow, *array.shape[1:]), dtype=array.dtype)
                setattr(self, name, np.concatenate([array, tail]))
