"""Beam search over an engine that knows nothing of it.

A round asks for the most likely next tokens of every live beam, each as a request of one token. The beams' KV is in the
prefix cache, so a round costs about a step, plus what does not fill a block. Pure: the caller runs the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from drumline.errors import RequestError
from drumline.text.results import Logprob


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """How to search. RequestError if a value cannot work."""

    beam_width: int
    """Number of outputs, and of beams that are followed at once."""
    max_tokens: int
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    temperature: float = 0.0
    """Has no effect: beams are compared by the model's own log-probabilities. Must be 0."""
    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** this; the length has the prompt in it, as in vLLM."""
    include_stop_str_in_output: bool = False
    """Has no effect: there are no stop strings here."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        for name, least in (("beam_width", 1), ("max_tokens", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RequestError(f"{name} must be an integer of at least {least}, got {value!r}.", param=name)
        if self.temperature != 0:
            raise RequestError("temperature must be 0: beam search does not sample.", param="temperature")


@dataclass
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """The prompt's and its own."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """For each of its own tokens: the candidates of that place."""
    cum_logprob: float = 0.0
    text: str | None = None
    """Of its own tokens, once the search is over and if there is a tokenizer."""
    finish_reason: str | None = None
    """``stop`` or ``length``."""
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class Search:
    """The search of one prompt."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, eos: Iterable[int], room: int) -> None:
        """``room``: tokens that fit behind the prompt. ``eos``: tokens that end a beam."""
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos)
        self._end_marks = frozenset(eos)
        self.prompt_length = len(prompt)
        self._left = min(params.max_tokens, room)
        self.live = [BeamSearchSequence(list(prompt))]
        """Beams that go on, best first."""
        self._ended: list[BeamSearchSequence] = []

    @property
    def over(self) -> bool:
        """Nothing is left to ask."""
        return not self.live or not self._left

    def take(self, candidates: Sequence[Mapping[int, Logprob]]) -> None:
        """The most likely next tokens of each live beam. At least as many as two for each beam of the width."""
        self._left -= 1
        found = []
        for beam, row in zip(self.live, candidates, strict=True):
            for token, one in row.items():
                found.append(
                    BeamSearchSequence(
                        [*beam.tokens, token], [*beam.logprobs, dict(row)], beam.cum_logprob + one.logprob
                    )
                )
        ended = [beam for beam in found if beam.tokens[-1] in self._eos]
        for beam in ended:
            beam.finish_reason, beam.stop_reason = "stop", beam.tokens[-1]
        self._ended += ended
        going_on = [beam for beam in found if beam.finish_reason is None]
        self.live = sorted(going_on, key=self._score, reverse=True)[: self._params.beam_width]

    def best(self) -> list[BeamSearchSequence]:
        """The result."""
        for beam in self.live:
            beam.finish_reason = "length"
        return sorted([*self._ended, *self.live], key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in self._end_marks)
        return beam.cum_logprob / float(max(length, 1) ** self._params.length_penalty)
