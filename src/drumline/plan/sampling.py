"""SamplingParams: what a request asks for, with the names and defaults of vLLM's class of that name."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from drumline.errors import RequestError

MIN_TEMPERATURE = 0.01
"""Temperatures between 0 and this one are raised to it, as in vLLM: below it logits overflow or become nan."""

MAX_N = 16384
"""Most outputs of one prompt."""


class RequestOutputKind(enum.Enum):
    """What each result of a stream (:class:`drumline.AsyncLLM`) has in it. Offline calls give whole results only."""

    CUMULATIVE = 0
    """The whole output so far."""
    DELTA = 1
    """What is new."""
    FINAL_ONLY = 2
    """There is one result, at the end."""


class _Positional(msgspec.Struct, omit_defaults=True):
    """Those that may come without their names, in the order that vLLM's class has had in every version."""

    n: int = 1
    """Number of outputs of one prompt."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    """0: greedy. At most 2."""


class SamplingParams(_Positional, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when they end.

    Raises :class:`RequestError` (a ValueError) that names the parameter if a value cannot work. Values are brought
    into one form: ``stop`` and ``stop_token_ids`` are lists afterwards, ``logprobs=True`` is 1, ``seed=-1`` is None,
    ``top_k=-1`` is 0, and with temperature 0 ``top_p`` and ``top_k`` are off.
    """

    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum up to this; in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1: all."""
    seed: int | None = None
    """Same seed, same tokens, whatever the TP size, preemption or batch. None: drawn when the request arrives."""
    max_tokens: int | None = 16
    """None: as many as fit."""
    stop: list[str] | str | None = None
    """Texts that end the output; they are not part of it unless ``include_stop_str_in_output``."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output. They are in ``token_ids`` but not in the text."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """How many of the most likely tokens to report for each output token, beside the sampled one."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False: token ids only, no text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each result of a stream has in it."""
    # Known to vLLM's users, built by a later issue: refused when they differ from their defaults.
    min_p: float = 0.0
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    spaces_between_special_tokens: bool = True
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    structured_outputs: Any = None
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.check()

    @property
    def greedy(self) -> bool:
        """The most likely token is taken each time."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def clone(self) -> SamplingParams:
        """A copy that may be changed."""
        return msgspec.structs.replace(self)

    def check(self) -> None:
        """Bring values into one form; raise :class:`RequestError` if a value cannot work."""
        self._check_counts()
        self._check_distribution()
        self._check_stops()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, got {getattr(self, name)!r}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _bad("output_kind", f"must be a RequestOutputKind, got {self.output_kind!r}")
        self._check_later()

    def _check_counts(self) -> None:
        _integer("n", self.n, least=1, most=MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1)
        if self.logprobs is True:
            self.logprobs = 1
        elif self.logprobs is not None:
            _integer("logprobs", self.logprobs, least=0)
        if self.seed is not None:
            _integer("seed", self.seed, least=-(2**63), most=2**64 - 1)
            if self.seed == -1:
                self.seed = None

    def _check_distribution(self) -> None:
        temperature = _number("temperature", self.temperature)
        if not 0.0 <= temperature <= 2.0:
            raise _bad("temperature", f"must be in [0, 2], got {self.temperature}")
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise _bad("top_p", f"must be in (0, 1], got {self.top_p}")
        _integer("top_k", self.top_k, least=-1)
        self.temperature = max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0
        self.top_p = float(self.top_p)
        self.top_k = max(self.top_k, 0)
        if self.greedy:
            if self.n > 1:
                raise _bad("n", f"must be 1 with temperature 0 (all outputs would be the same), got {self.n}")
            self.top_p, self.top_k = 1.0, 0

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        elif self.stop is not None and not isinstance(self.stop, list | tuple):
            raise _bad("stop", f"must be a text or a list of texts, got {self.stop!r}")
        self.stop = list(self.stop or ())
        if not all(isinstance(text, str) for text in self.stop):
            raise _bad("stop", f"must be a text or a list of texts, got {self.stop!r}")
        if not all(self.stop):
            raise _bad("stop", "cannot have an empty text in it")
        if self.stop and not self.detokenize:
            raise _bad("stop", "needs detokenize=True, since stop texts are looked for in the text")
        if self.stop_token_ids is not None and not isinstance(self.stop_token_ids, list | tuple):
            raise _bad("stop_token_ids", f"must be a list of integers, got {self.stop_token_ids!r}")
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids or ()))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, least=0, most=2**31 - 1)

    def _check_later(self) -> None:
        for name in _LATER:
            value = getattr(self, name)
            default = _DEFAULTS[name]
            if value != default and not (default is None and value in ([], {})):
                raise _bad(name, f"is not supported yet (got {value!r}); leave it at {default!r}")


_LATER = (
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "spaces_between_special_tokens",
    "logprob_token_ids",
    "flat_logprobs",
    "structured_outputs",
    "thinking_token_budget",
    "extra_args",
)
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def _bad(name: str, problem: str) -> RequestError:
    return RequestError(f"{name} {problem}.", param=name)


def _integer(name: str, value: Any, *, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(name, f"must be an integer, got {value!r}")
    if value < least:
        raise _bad(name, f"must be at least {least}, got {value}")
    if most is not None and value > most:
        raise _bad(name, f"must be at most {most}, got {value}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _bad(name, f"must be a finite number, got {value!r}")


class SlotSampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a worker needs to know to sample for one slot."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """64-bit seed, already resolved."""
    logprobs: int = -1
    """Number of top log-probabilities to report; -1: none."""
