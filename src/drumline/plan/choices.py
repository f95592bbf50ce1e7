"""Whether what a request forbids leaves it any token to choose. Pure.

A token may be chosen if it is among the allowed ones (all, if none are named), no bad word of that single token, no
token that ends the output while the output is shorter than ``min_tokens``, and not the last of a bad word whose other
tokens the output ends with. Biases and penalties forbid nothing: they are finite, so an only token is chosen whatever
its bias. Nor do top-k, top-p and min-p, which keep the likeliest token.

All but the bad words of several tokens is known when the request comes. It forbids most at the first token, so a
request that has one there has one everywhere: :func:`check_choice` refuses the others. Bad words of several tokens
depend on the output. A request with :class:`DeadEnds` ends where it comes to one: every constraint holds, and no token
is made up. Rejected: to let the bad words go there (what must not be said would be said), and an error (what was said
so far would be lost, although nothing is wrong with it).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from drumline.errors import RequestError
from drumline.plan.sampling import SlotSampling

SHOWN = 8
"""Most token ids in a message."""

Word = tuple[tuple[int, ...], int]
"""A bad word of several tokens: those before the last, and the last."""


def check_choice(
    allowed: Collection[int], banned: Collection[int], ends: Collection[int], min_tokens: int, vocab_size: int
) -> None:
    """RequestError, which says what to change, if no token can be chosen at first.

    ``allowed``: empty: all. ``banned``: bad words of one token. ``ends``: tokens that end the output. All ids are below
    ``vocab_size``; 0: not known.
    """
    held = frozenset(ends) if min_tokens else frozenset[int]()
    if not _none_left(allowed, frozenset(banned) | held, vocab_size):
        return
    of = f"the {vocab_size} tokens of the vocabulary"
    if allowed:
        of = f"allowed_token_ids ({_listed(allowed)})"
    reasons, changes = [], ["allow another token"] if allowed else []
    if gone := _within(banned, allowed):
        reasons.append(f"bad_words forbid {_listed(gone)}")
        changes.append("change bad_words")
    if gone := _within(held - frozenset(banned), allowed):
        reasons.append(
            f"min_tokens = {min_tokens} forbids {_listed(gone)}, which end the output (stop_token_ids and end of "
            "sequence), at its beginning"
        )
        changes.append("set min_tokens to 0")
    raise RequestError(
        f"No token of {of} is left to choose: {', and '.join(reasons)}. To change that, {', or '.join(changes)}.",
        param="allowed_token_ids" if allowed else "min_tokens" if len(frozenset(banned)) < vocab_size else "bad_words",
    )


def _none_left(allowed: Collection[int], forbidden: frozenset[int], vocab_size: int) -> bool:
    if allowed:
        return forbidden.issuperset(allowed)
    return 0 < vocab_size <= len(forbidden)


def _within(tokens: Collection[int], allowed: Collection[int]) -> list[int]:
    return sorted(frozenset(tokens).intersection(allowed) if allowed else frozenset(tokens))


def _listed(tokens: Collection[int]) -> str:
    more = f" and {len(tokens) - SHOWN} more" if len(tokens) > SHOWN else ""
    return ", ".join(map(str, sorted(tokens)[:SHOWN])) + more


class DeadEnds:
    """Outputs of one request after which bad words of several tokens leave no token to choose."""

    def __init__(self, words: Sequence[Word], early: frozenset[int], late: frozenset[int], min_tokens: int) -> None:
        """``early``: what may be chosen, but for ``words``, before the output has ``min_tokens``; ``late``: after."""
        self._words = words
        self._early = early
        self._late = late
        self._min_tokens = min_tokens

    @classmethod
    def of(cls, sampling: SlotSampling, vocab_size: int) -> DeadEnds | None:
        """None, for nearly all requests: there can be none. ``vocab_size`` 0: not known."""
        words = [(word[:-1], word[-1]) for word in sampling.bad_words if len(word) > 1]
        if not words:
            return None
        banned = frozenset(word[0] for word in sampling.bad_words if len(word) == 1)
        held = banned.union(sampling.end_ids) if sampling.min_tokens else banned
        lasts = frozenset(last for _, last in words)
        if not _none_left(sampling.allowed_ids, held | lasts, vocab_size):
            return None
        every = sampling.allowed_ids or range(vocab_size)
        return cls(words, frozenset(every) - held, frozenset(every) - banned, sampling.min_tokens)

    def at(self, tokens: Sequence[int], start: int) -> bool:
        """The output ``tokens[start:]`` is one."""
        end = len(tokens)
        left = self._early if end - start < self._min_tokens else self._late
        hit = {
            last
            for before, last in self._words
            if last in left and end - start >= len(before) and tuple(tokens[end - len(before) :]) == before
        }
        return len(hit) == len(left)
