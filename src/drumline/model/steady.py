"""Rows that go on as they did: what a decode step needs of its slots, kept from one step to the next.

Mostly a step has the rows of the step before it, each with the token that was sampled then. For a small model the
general way (look the slots up, check the plan against them, gather ids, positions and tables) takes longer than a
layer: some forty numpy calls on arrays of a few numbers, at 0.5 to 1 us each in a loop of their own and 3 us in a step
whose forward has washed the caches. Here the arrays are made once and counted up in place, and a plan is checked by
comparing its packed columns with those that it must have.

A plan *follows* if its columns are byte for byte what the last step's rows give when each takes its sampled token and
nothing else happens. Then every check of the general way holds, since it held for the step before. Anything else (a
slot starts or is freed, a prompt, other rows, sampling deferred, a contradiction) goes the general way, which finds the
slots up to date: they are written in each step.

Arrays are used by the step only: who keeps one for longer must copy it. A forward that finds its way by itself
(``Forward.gathers``) gets the same batch and the same tensors each time: tables have room for blocks to come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from drumline.model.attention import AttentionBatch, KVCache
from drumline.model.sampling import SamplingRows
from drumline.model.slots import Ints, SlotTable
from drumline.plan.step import StepPlan, pack

TABLE_ROOM = 16
"""Blocks that the tables of a lasting batch have room for beside those that are there."""


class SteadyRows:
    """The rows of a step in which each row had one token and sampled, ready for the next step."""

    def __init__(self, plan: StepPlan, slots: Ints, state: SlotTable, block_size: int) -> None:
        """``plan``: the step that was just run; its tokens are in the slots. ``slots`` [B]: of its rows."""
        count = len(slots)
        self.slots = slots
        self._state = state
        self._block_size = block_size
        known = state.num_tokens[slots]
        self.computed: Ints = known - 1
        """[B] tokens before the next step, as a plan says it."""
        self.counts: Ints = np.ones(count, dtype=np.int32)
        """[B] tokens of each row in the step."""
        self.batch: AttentionBatch | None = None
        """Of the last step, until blocks are appended that its tables have no room for; for forwards that do not
        gather."""
        counters = np.empty((3, count), dtype=np.int64)
        counters[0] = self.computed
        counters[1] = slots.astype(np.int64) * state.tokens.shape[1] + known
        counters[2] = known - state.num_prompt[slots]
        self._counters = counters
        self._ids = state.tokens[slots, self.computed].astype(np.int64)
        self.ids = torch.from_numpy(self._ids)
        """[B] input tokens."""
        self.positions = torch.from_numpy(counters[0])
        """[B]"""
        self.every = torch.arange(count)
        """[B] place of each row among the step's tokens."""
        self.continues = np.ones(count, dtype=np.bool_)
        self.sampling = _fixed_rows(state, slots, counters[2])
        """What the rows ask for; None if it changes from step to step."""
        self._flat = state.tokens.reshape(-1)
        self._where = where = _indices(slots)
        self._known: Ints | None = state.num_tokens[where] if isinstance(where, slice) else None
        """A view of the slots' numbers of tokens, if there can be one."""
        self._columns = (plan.slots, pack([1] * count))
        self._source = self._computed_bytes = b""
        self.set_tables()
        self._expect(plan.step)

    def set_tables(self) -> None:
        """Blocks were appended."""
        state, slots = self._state, self.slots
        blocks = state.num_blocks[slots]
        self.tables: Ints = state.tables[slots, : int(blocks.max())]
        """[B, N] block ids."""
        if self.batch is not None:
            lasting, width = self.batch.tables, self.tables.shape[1]
            if width <= lasting.shape[1]:
                lasting[:, :width] = self.tables
            else:
                self.batch = None
        most = np.minimum(blocks * self._block_size, state.max_tokens - 1)
        self.room = int((most - self.computed).min())
        """Steps that the blocks and the slots have room for."""

    def lasting_batch(self, cache: KVCache, device: torch.device) -> AttentionBatch:
        """What a forward that does not gather needs of the rows: mostly the same object again."""
        if self.batch is None:
            tables = np.zeros((len(self.slots), self.tables.shape[1] + TABLE_ROOM), dtype=np.int32)
            tables[:, : self.tables.shape[1]] = self.tables
            computed: npt.NDArray[Any] = self._counters[0]  # int64, as kernels take it
            ones: npt.NDArray[Any] = np.ones(len(self.slots), dtype=np.int64)
            self.batch = AttentionBatch(cache, tables, computed, ones, cache.data.dtype, device)
        return self.batch

    def follow(self, plan: StepPlan) -> bool:
        """The rows of this plan are these, each with its next token, and nothing else happens."""
        slots, ones = self._columns
        return (
            plan.slots == slots
            and plan.num_computed == self._computed_bytes
            and plan.token_source == self._source
            and plan.num_tokens == ones
            and plan.sample == ones
            and not (plan.starts or plan.freed or plan.defer_sampling)
            and (self.room > 0 or bool(plan.blocks))
        )

    def take(self, tokens: Ints, step: int) -> None:
        """The step's tokens [B] were sampled: they are in the slots and are the input of the next step."""
        state, where = self._state, self._where
        self._flat[self._counters[1]] = tokens
        if self._known is None:
            state.num_tokens[where] += 1
        else:
            self._known += 1
        state.sampled_by[where] = step
        state.count(self.slots, tokens)
        self._ids[:] = tokens
        self.computed += 1
        self._counters += 1
        self.room -= 1
        self._expect(step)

    def _expect(self, step: int) -> None:
        self._source = step.to_bytes(4, "little", signed=True) * len(self.slots)
        self._computed_bytes = self.computed.tobytes()


def _indices(slots: Ints) -> slice | npt.NDArray[np.int64]:
    """The quicker way to index by these slots."""
    first = int(slots[0])
    if bool((slots == np.arange(first, first + len(slots))).all()):
        return slice(first, first + len(slots))
    return slots.astype(np.int64)


def _fixed_rows(state: SlotTable, slots: Ints, output_index: npt.NDArray[np.int64]) -> SamplingRows | None:
    """What these slots ask for in every step, with an output index that is counted up elsewhere."""
    return None if state.adjusts(slots) else state.sampling_rows(slots, output_index)
