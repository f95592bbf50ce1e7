"""SamplingParams: what a request asks for, with the names and defaults of vLLM's class of that name."""

from __future__ import annotations

import enum
import functools
import logging
import math
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import msgspec

from drumline.errors import RequestError, is_unicode, shown

log = logging.getLogger(__name__)

MIN_TEMPERATURE = 0.01
"""Temperatures between 0 and this one, however small, are raised to it, as in vLLM: below it logits overflow or become
nan. The first time in a process is logged."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, MAX_BIAS = 1e-4, 1e4, 1e9
"""Beyond these, logits in float32 (let alone float16) overflow, or turn into nan together."""

MAX_N = 16384
"""Most outputs of one prompt."""

MAX_LOGPROBS = 20
"""Most top log-probabilities a request may ask for unless the engine is told otherwise, as in vLLM and OpenAI's API."""


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
    """Taken off the logit of each token that is in the output so far; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that it is in the output so far; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the output; in [1e-4, 1e4]."""
    temperature: float = 1.0
    """0: greedy. At most 2; what is between 0 and 0.01 (``MIN_TEMPERATURE``) is raised to that."""


class SamplingParams(_Positional, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when they end.

    Raises :class:`RequestError` (a ValueError) that names the parameter if a value cannot work. Values are brought
    into one form: ``stop``, ``stop_token_ids`` and ``bad_words`` are lists afterwards, ``logprobs=True`` is 1,
    ``seed=-1`` is None, ``top_k=-1`` is 0, and with temperature 0 ``top_p``, ``top_k`` and ``min_p`` are off
    (penalties, biases and bans are not).
    """

    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum up to this; in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one's probability; in [0, 1]."""
    seed: int | None = None
    """Same seed, same tokens, whatever the TP size, preemption or batch. None: drawn when the request arrives."""
    max_tokens: int | None = 16
    """None: as many as fit."""
    min_tokens: int = 0
    """Until the output has so many tokens, tokens that end it are not chosen and ``stop`` texts are not looked for."""
    best_of: int | None = None
    """Make so many outputs and give the ``n`` whose tokens have the highest mean log-probability; None: ``n``."""
    stop: list[str] | str | None = None
    """Texts that end the output; they are not part of it unless ``include_stop_str_in_output``."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output. They are in ``token_ids`` but not in the text."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """How many of the most likely tokens to report for each output token, beside the sampled one; -1: all."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. Such a request reads no cached prefix."""
    logit_bias: dict[int, float] | None = None
    """Token id: what is added to its logit. However low, it forbids nothing: an only token is chosen all the same."""
    bad_words: list[str] | None = None
    """Texts that must not be generated: the last token of each is not chosen where it would complete it. An output for
    which they leave no token ends there, with finish_reason ``stop`` and stop_reason ``bad_words``."""
    allowed_token_ids: list[int] | None = None
    """Choose only among these. One of them must be left at the beginning by ``bad_words`` and ``min_tokens``."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False: token ids only, no text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each result of a stream has in it."""
    # Known to vLLM's users, built by a later issue: refused when they differ from their defaults.
    spaces_between_special_tokens: bool = True
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    structured_outputs: Any = None
    thinking_token_budget: int | None = None
    extra_args: dict[str, Any] | None = None
    stream_interval: int | None = None
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: Any = None
    watermarking: bool | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None

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
        self._check_penalties()
        self._check_distribution()
        self._check_tokens()
        self._check_stops()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, f"must be true or false, got {shown(getattr(self, name))}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _bad("output_kind", f"must be a RequestOutputKind, got {shown(self.output_kind)}")
        self._check_later()

    def _check_counts(self) -> None:
        _integer("n", self.n, least=1, most=MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, least=1, most=MAX_N)
            if self.best_of < self.n:
                raise _bad("best_of", f"must be at least n ({self.n}), got {self.best_of}")
        _integer("min_tokens", self.min_tokens, least=0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, least=1)
            if self.min_tokens > self.max_tokens:
                raise _bad(
                    "min_tokens", f"must be at most max_tokens ({shown(self.max_tokens)}), got {shown(self.min_tokens)}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
            elif getattr(self, name) is not None:
                _integer(name, getattr(self, name), least=-1)
        if self.seed is not None:
            _integer("seed", self.seed, least=-(2**63), most=2**64 - 1)
            if self.seed == -1:
                self.seed = None

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = _number(name, getattr(self, name))
            if not -2.0 <= value <= 2.0:
                raise _bad(name, f"must be in [-2, 2], got {value}")
            setattr(self, name, value)
        value = _number("repetition_penalty", self.repetition_penalty)
        if not MIN_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY:
            bounds = f"[{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]"
            raise _bad("repetition_penalty", f"must be in {bounds}, got {value}")
        self.repetition_penalty = value

    def _check_distribution(self) -> None:
        temperature = _number("temperature", self.temperature)
        if not 0.0 <= temperature <= 2.0:
            raise _bad("temperature", f"must be in [0, 2], got {self.temperature}")
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise _bad("top_p", f"must be in (0, 1], got {self.top_p}")
        _integer("top_k", self.top_k, least=-1)
        if not 0.0 <= _number("min_p", self.min_p) <= 1.0:
            raise _bad("min_p", f"must be in [0, 1], got {self.min_p}")
        self.min_p = float(self.min_p)
        if 0.0 < temperature < MIN_TEMPERATURE:
            _say_raised()
            temperature = MIN_TEMPERATURE
        self.temperature = abs(temperature)  # -0.0 is 0
        self.top_p = float(self.top_p)
        self.top_k = min(max(self.top_k, 0), 2**31 - 1)
        if self.greedy:
            for name in ("n", "best_of"):
                if (getattr(self, name) or 1) > 1:
                    problem = f"must be 1 with temperature 0 (all outputs would be the same), got {getattr(self, name)}"
                    raise _bad(name, problem)
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _check_tokens(self) -> None:
        if self.logit_bias is not None:
            self.logit_bias = _biases(self.logit_bias)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise _bad("allowed_token_ids", "cannot be empty: no token could be chosen")
        self.bad_words = list(dict.fromkeys(_texts("bad_words", self.bad_words, "must be a list of texts")))

    def _check_stops(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = _texts("stop", stop, "must be a text or a list of texts")
        if self.stop and not self.detokenize:
            raise _bad("stop", "needs detokenize=True, since stop texts are looked for in the text")
        self.stop_token_ids = [] if self.stop_token_ids is None else _token_ids("stop_token_ids", self.stop_token_ids)

    def _check_later(self) -> None:
        for name, harmless in _LATER.items():
            value, default = getattr(self, name), _DEFAULTS[name]
            # Types first: arrays compare element by element, and 0 is not False here.
            if value is default or any(type(value) is type(one) and value == one for one in (default, *harmless)):
                continue
            raise _bad(name, f"is not supported yet (got {shown(value)}); leave it at {default!r}")


_LATER: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (),
    "logprob_token_ids": ([],),
    "flat_logprobs": (),
    "structured_outputs": ({},),
    "thinking_token_budget": (),
    "extra_args": ({},),
    "stream_interval": (1,),
    "skip_reading_prefix_cache": (False,),
    "repetition_detection": ({},),
    "watermarking": (False,),
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (0,),
    "routed_experts_prompt_start": (),
    "trace_decode_token_ids": ([],),
}
"""Field: values that ask for nothing, beside its default."""
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


@functools.cache
def _say_raised() -> None:
    """Once in a process: each request may ask for it."""
    log.warning("a request has a temperature between 0 and %g: such are raised to %g", *(MIN_TEMPERATURE,) * 2)


def _bad(name: str, problem: str, param: str | None = None) -> RequestError:
    return RequestError(f"{name} {problem}.", param=param or name)


def _token(value: Any) -> int | None:
    """A token id as Python's number (numpy's are taken, too); None if it is none."""
    if type(value) is int:
        token = value
    elif isinstance(value, bool) or not isinstance(value, Integral):
        return None
    else:
        token = int(value)
    return token if 0 <= token < 2**31 else None


def _texts(name: str, texts: Any, kind: str) -> list[str]:
    """A list of texts that are not empty."""
    if texts is not None and not isinstance(texts, list | tuple):
        raise _bad(name, f"{kind}, got {shown(texts)}")
    for place, text in enumerate(texts or ()):
        if not isinstance(text, str):
            raise _bad(f"{name}[{place}]", f"must be a text, got {shown(text)}", name)
        if not text:
            raise _bad(f"{name}[{place}]", "is an empty text, '': leave it out", name)
        if not is_unicode(text):
            raise _bad(f"{name}[{place}]", f"has a lone surrogate in it: {shown(text)}", name)
    return list(texts or ())


def _token_ids(name: str, ids: Any) -> list[int]:
    """Without repetitions; whether they are in the vocabulary is checked where that is known."""
    if not isinstance(ids, list | tuple):
        raise _bad(name, f"must be a list of integers, got {shown(ids)}")
    found: dict[int, None] = {}
    for place, value in enumerate(ids):
        token = _token(value)
        if token is None:
            raise _bad(f"{name}[{place}]", f"must be a token id, a whole number from 0 on, got {shown(value)}", name)
        found[token] = None
    return list(found)


def _biases(biases: Any) -> dict[int, float]:
    """Keys may be texts, as JSON has no others."""
    if not isinstance(biases, Mapping):
        raise _bad("logit_bias", f"must map token ids to numbers, got {shown(biases)}")
    found = {}
    for key, value in biases.items():
        token = _token(int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 else key)
        if token is None:
            problem = f"has the key {shown(key)}, which is no token id: keys must be whole numbers from 0 on"
            raise _bad("logit_bias", problem)
        number = _number(f"logit_bias[{token}]", value, "logit_bias")
        if abs(number) > MAX_BIAS:
            bounds = f"between -{MAX_BIAS:g} and {MAX_BIAS:g}"
            raise _bad(f"logit_bias[{token}]", f"must be {bounds}, got {shown(value)}", "logit_bias")
        found[token] = number
    return found


def _integer(name: str, value: Any, *, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(name, f"must be an integer, got {shown(value)}")
    if value < least:
        raise _bad(name, f"must be at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise _bad(name, f"must be at most {most}, got {shown(value)}")


def _number(name: str, value: Any, param: str | None = None) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _bad(name, f"must be a finite number, got {shown(value)}", param)


class SlotSampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a worker needs to know to sample for one slot. All token ids are in the vocabulary."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """64-bit seed, already resolved."""
    logprobs: int = -1
    """Number of top log-probabilities to report; -1: none."""
    prompt_logprobs: int = -1
    """The same for each token of the prompt; -1: none."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_ids: tuple[int, ...] = ()
    """Tokens whose logits are biased, each once."""
    bias_values: tuple[float, ...] = ()
    """What is added to them."""
    allowed_ids: tuple[int, ...] = ()
    """The only tokens that may be chosen; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is not chosen where the output ends with the others."""
    min_tokens: int = 0
    """Length of the output from which on ``end_ids`` may be chosen."""
    end_ids: tuple[int, ...] = ()
