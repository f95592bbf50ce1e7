"""What a request may choose from, in the plainest words; and requests that forbid much, made at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from drumline.plan.sampling import SlotSampling


def choosable(sampling: SlotSampling, output: Sequence[int], vocabulary: Sequence[int]) -> set[int]:
    """Tokens that may follow ``output``."""
    found = set(sampling.allowed_ids or vocabulary)
    if len(output) < sampling.min_tokens:
        found -= set(sampling.end_ids)
    for word in sampling.bad_words:
        before = list(word[:-1])
        if len(before) <= len(output) and list(output[len(output) - len(before) :]) == before:
            found.discard(word[-1])
    return found


@dataclass(frozen=True)
class Forbidding:
    """Makes requests over few tokens."""

    tokens: Sequence[int]
    words: tuple[int, int] = (0, 8)
    """Fewest and most bad words."""

    def make(self, rng: random.Random) -> SlotSampling:
        def some(most: int) -> tuple[int, ...]:
            return tuple(rng.sample(list(self.tokens), rng.randint(0, most)))

        size = len(self.tokens)
        words = {tuple(rng.choices(self.tokens, k=rng.randint(1, 3))) for _ in range(rng.randint(*self.words))}
        made = SlotSampling(
            allowed_ids=some(size - 1),
            bad_words=tuple(sorted(words)),
            end_ids=some(size),
            min_tokens=rng.choice((0, 0, 1, 2, 4)),
        )
        # Workers are told what ends the output only if it is to be waited with.
        return made if made.min_tokens else msgspec.structs.replace(made, end_ids=())
