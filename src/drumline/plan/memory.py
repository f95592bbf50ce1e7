"""What steps need beyond the KV pool and an ordinary step, in bytes. Pure; the worker's prices, the scheduler's sums.

**Where running out costs one request.** In the middle of a step it costs the engine: one rank stands in a collective
that another has left, and what either has changed is not known. So nothing is found out there. An ordinary step is paid
for before the pool is sized. What asks for more is known from the request alone: log-probabilities of prompt tokens (a
row of logits over the vocabulary each) and of very many likely tokens. Such a request is let in only once every rank
has said, in a call of its own between two steps, that it can have as much (``reserve_memory``). The plan that needs it
does not exist before. If a rank cannot, no rank has begun anything, so ranks cannot disagree; the request waits for
others that hold such memory, and fails alone if there are none.

Rejected: to try in each step, and vote before its first collective (a round trip of all ranks in each step, and slots
to be put back); to let the rank that failed join the collectives with garbage (NCCL gives it no way to say so).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class StepCosts(msgspec.Struct, kw_only=True):
    """Prices of one rank."""

    row_bytes: int
    """Of one more row of logits, with what is made of it."""
    value_bytes: int
    """Of one more log-probability in an answer."""

    @staticmethod
    def highest(costs: Iterable[StepCosts]) -> StepCosts:
        """What the dearest rank asks."""
        found = list(costs)
        return StepCosts(
            row_bytes=max(one.row_bytes for one in found), value_bytes=max(one.value_bytes for one in found)
        )


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask of a step beyond an ordinary one."""

    rows: int = 0
    """Prompt tokens whose log-probabilities one step computes."""
    prompt_values: int = 0
    """Log-probabilities of these."""
    values: int = 0
    """Log-probabilities of an output token, beyond what an ordinary request may have."""

    def __bool__(self) -> bool:
        return bool(self.rows or self.values)


ORDINARY = Extra()
"""Of most requests."""


def extra_bytes(extras: Iterable[Extra], costs: StepCosts, *, most_rows: int, most_values: int) -> int:
    """What one step of these requests may need. A plan has at most ``most_rows`` prompt tokens that are scored, with
    ``most_values`` log-probabilities, or a single token with more."""
    rows = prompt_values = values = largest = 0
    for extra in extras:
        rows += extra.rows
        prompt_values += extra.prompt_values
        largest = max(largest, extra.prompt_values)
        values += extra.values
    values += min(prompt_values, max(most_values, largest))
    return min(rows, most_rows) * costs.row_bytes + values * costs.value_bytes
