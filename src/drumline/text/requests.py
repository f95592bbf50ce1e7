"""Prompts and sampling parameters to requests of the engine: everything that can be wrong is found here.

One :class:`RequestBuilder` for each engine. A prompt with n outputs becomes n engine requests ("children"), which
share the prompt's KV through the prefix cache; child i is named ``i_<request id>``, and draws its random numbers from
seed + i (modulo 2^64), so that the children differ and each can be had alone: n = 1 with seed s + i gives what child i
of seed s gave. With ``best_of`` there are more children than outputs, and ``text.results`` chooses among them. Only the
first child asks for the prompt's log-probabilities.
"""

from __future__ import annotations

import operator
import random
import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from drumline.engine.protocol import EngineRequest
from drumline.errors import RequestError, is_unicode, shown
from drumline.plan.choices import check_choice
from drumline.plan.sampling import MAX_LOGPROBS, SamplingParams
from drumline.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 128
"""Most token sequences that the bad words of one request may come to."""
MAX_BAD_WORDS_TOKENS = 1024
"""Most tokens in them."""
MAX_CHARS = 256
"""Most characters for each token that a model takes, of texts that may have to be cut or whose tokens cannot be
bounded."""
CHEAP_CHARS = 4
"""Texts of up to so many characters for each token are tokenised without further ado."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's code for what does not fit into the model's context; clients look for it."""
_SEEDS = 2**64

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``."""


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """One prompt, ready for the engine."""

    request_id: str
    prompt: str | None
    """Text of the prompt, if it came as text."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """As given, with ``max_tokens`` resolved, and -1 log-probabilities as the size of the vocabulary."""
    children: list[EngineRequest]
    """One for each output, whose index is the place in this list; with ``best_of``, those to choose from."""


class RequestBuilder:
    """Checks prompts and parameters, and makes engine requests of them. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] | None = None,
        sampling_defaults: Mapping[str, Any] | None = None,
        seed: int | None = None,
        max_logprobs: int = MAX_LOGPROBS,
    ) -> None:
        """Limits of one engine.

        ``vocab_size`` is the model's. ``eos_token_ids`` None: the tokenizer's. ``sampling_defaults`` as
        :func:`~drumline.text.tokenizer.read_sampling_defaults` gives them. ``seed``: requests without a seed get
        theirs from a generator that begins with it, so that a program repeats itself; None: from the system.
        ``max_logprobs``: most that a request may ask for (-1: no limit); here is where it is enforced.
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_logprobs = vocab_size if max_logprobs == -1 else max_logprobs
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self.eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._defaults = dict(sampling_defaults or {})
        self._draw = random.Random(seed).getrandbits if seed is not None else secrets.randbits

    def default_params(self, *, all_that_fit: bool = False, **given: Any) -> SamplingParams:
        """Sampling parameters with the model's defaults (generation_config.json) where ``given`` has none or None.

        ``all_that_fit``: without ``max_tokens`` from either there is no limit, rather than that of SamplingParams.

        As this is what requests of the API come through, biases are brought into OpenAI's range, -100 to 100.
        """
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping) and all(type(value) in (int, float) for value in bias.values()):
            given["logit_bias"] = {token: min(max(value, -100), 100) for token, value in bias.items()}
        fallback = {"max_tokens": None} if all_that_fit else {}
        return SamplingParams(**{**fallback, **self._defaults, **{k: v for k, v in given.items() if v is not None}})

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        strict_max_tokens: bool = False,
        priority: int = 0,
        cache_salt: str = "",
    ) -> PreparedRequest:
        """Engine requests for one prompt.

        ``max_tokens`` None becomes what fits behind the prompt; more than fits is cut to that, or refused with
        ``strict_max_tokens``. ``add_special_tokens`` False is for texts that a chat template has written. Raises
        :class:`RequestError` that says what to change.
        """
        params = self.default_params() if params is None else params
        text, token_ids, salt = self._tokens(prompt, add_special_tokens)
        self._check_params(params)
        params = self._resolve(params, len(token_ids), strict_max_tokens)
        bad_words = self._bad_words(params.bad_words or ())
        check_choice(
            params.allowed_token_ids or (),
            [word[0] for word in bad_words if len(word) == 1],
            (*self.eos_token_ids, *(params.stop_token_ids or ())),
            params.min_tokens,
            self.vocab_size,
        )
        single = copy(params)  # clone() would check again what was just checked
        single.n, single.best_of, single.prompt_logprobs = 1, None, None
        count = params.best_of or params.n
        if count > params.n and single.logprobs is None:
            single.logprobs = 0  # to rank them by
        first = single
        if params.prompt_logprobs is not None:
            first = copy(single)
            first.prompt_logprobs = params.prompt_logprobs
        seed = (params.seed if params.seed is not None else self._draw(64)) % _SEEDS
        children = [
            EngineRequest(
                request_id=request_id if count == 1 else f"{index}_{request_id}",
                prompt_token_ids=token_ids,
                sampling=single if index else first,
                seed=(seed + index) % _SEEDS,
                eos_token_ids=self.eos_token_ids,
                bad_words_ids=bad_words,
                priority=priority,
                cache_salt=cache_salt or salt,
            )
            for index in range(count)
        ]
        return PreparedRequest(
            request_id=request_id, prompt=text, prompt_token_ids=token_ids, params=params, children=children
        )

    # ---------------------------------------------------------------------------------------------------- prompt

    def _tokens(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int], str]:
        """Text (if there is one), token ids and cache salt of a prompt."""
        salt = ""
        text: str | None = None
        ids: Any = None
        if isinstance(prompt, Mapping):
            text, ids, salt = _from_mapping(prompt)
        elif isinstance(prompt, str):
            text = prompt
        if text is not None and ids is None:
            return text, self._encode(text, add_special_tokens), salt
        return text, self._check_ids(ids if isinstance(prompt, Mapping) else prompt), salt

    def check_text(self, text: str, *, cut: bool = False) -> None:
        """RequestError for a text that cannot fit, before it is tokenised, which takes a second for a few megabytes.

        Nothing that fits is refused, if the tokenizer is one of which that can be proven (``text.bounds``). Of others,
        and where tokens are to be ``cut`` off, texts of more than ``MAX_CHARS`` characters for each token are.
        """
        if len(text) <= CHEAP_CHARS * self.max_model_len:
            return
        bound = None if cut or self.tokenizer is None else self.tokenizer.fewest_tokens
        if bound is None:
            if len(text) <= MAX_CHARS * self.max_model_len:
                return
            why = f"texts of more than {MAX_CHARS * self.max_model_len} characters are not tokenised"
        elif bound.exceed(text, self.max_model_len - 1):
            why = "however they are divided, these are more"
        else:
            return
        raise RequestError(
            f"The prompt has {len(text)} characters; this model takes at most {self.max_model_len} tokens, and {why}. "
            "Shorten the prompt.",
            param="prompt",
            code=TOO_LONG,
        )

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                'The tokenizer was not loaded (skip_tokenizer_init): give {"prompt_token_ids": [...]} as prompt.',
                param="prompt",
            )
        self.check_text(text)
        found = self.tokenizer.encoding(text, add_special_tokens)
        if not len(found):
            raise RequestError("The prompt is empty.", param="prompt")
        self._check_length(len(found))
        ids: list[int] = found.ids
        self._check_range(ids)
        return ids

    def _check_ids(self, ids: Any) -> list[int]:
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise RequestError(f"prompt_token_ids must be a list of integers, got {shown(ids)}.", param="prompt")
        if not len(ids):
            raise RequestError("The prompt is empty.", param="prompt")
        self._check_length(len(ids))
        if type(ids) is list and set(map(type, ids)) == {int}:
            self._check_range(ids)
            return ids.copy()
        found = []
        for place, token in enumerate(ids):
            try:
                if isinstance(token, bool):
                    raise TypeError
                found.append(operator.index(token))
            except TypeError:
                raise RequestError(
                    f"prompt_token_ids must be a list of integers, but [{place}] is {shown(token)}.", param="prompt"
                ) from None
        self._check_range(found)
        return found

    def _check_range(self, ids: list[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"prompt: token id {shown(bad)} is outside of the model's vocabulary (0 to {self.vocab_size - 1}).",
                param="prompt",
            )

    def _check_length(self, length: int) -> None:
        if length >= self.max_model_len:
            raise RequestError(
                f"The prompt has {length} tokens; this model takes at most {self.max_model_len} tokens, prompt and "
                "output together, so at least one must be left for the output. Shorten the prompt.",
                param="prompt",
                code=TOO_LONG,
            )

    # ------------------------------------------------------------------------------------------------ parameters

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and (self.vocab_size if asked == -1 else asked) > self.max_logprobs:
                got = f"-1, which asks for all {self.vocab_size}" if asked == -1 else shown(asked)
                raise RequestError(f"{name} must be at most {self.max_logprobs}, got {got}.", param=name)
        for name in ("stop_strings", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                name = name.removesuffix("_strings")
                raise RequestError(f"{name} needs a tokenizer, which was not loaded (skip_tokenizer_init).", param=name)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self.vocab_size:
                    vocabulary = f"the model's vocabulary (0 to {self.vocab_size - 1})"
                    raise RequestError(f"{name}: {token} is outside of {vocabulary}. Leave it out.", param=name)

    def _resolve(self, params: SamplingParams, length: int, strict_max_tokens: bool) -> SamplingParams:
        """A copy whose numbers are those that hold for a prompt of ``length`` tokens."""
        asked, most = params.max_tokens, self._max_tokens(length, params.max_tokens, strict_max_tokens)
        if asked is None and params.min_tokens > most:
            raise RequestError(
                f"min_tokens is {shown(params.min_tokens)}, but with a prompt of {length} tokens only {most} fit into "
                f"the {self.max_model_len} tokens that this model takes.",
                param="min_tokens",
            )
        params = params.clone()
        params.max_tokens, params.min_tokens = most, min(params.min_tokens, most)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                setattr(params, name, self.vocab_size if getattr(params, name) == -1 else getattr(params, name))
        return params

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences of words: each as it begins a text, and as it follows a space if that is one of as many
        tokens with another first one (as vLLM does it)."""
        if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > 256 * MAX_BAD_WORDS_TOKENS:  # before any is tokenised
            raise RequestError(
                f"bad_words: at most {MAX_BAD_WORDS} texts of {256 * MAX_BAD_WORDS_TOKENS} characters together are "
                f"possible, got {len(words)} of {sum(map(len, words))}.",
                param="bad_words",
            )
        found: list[list[int]] = []
        for word in words:
            assert self.tokenizer is not None
            bare, spaced = (
                self.tokenizer.encode(before + word.lstrip(), add_special_tokens=False) for before in ("", " ")
            )
            if not bare:
                raise RequestError(
                    f"bad_words has {shown(word)} in it, which gives no tokens (spaces at its beginning are not looked "
                    "at). Leave it out; single tokens can be kept away with logit_bias.",
                    param="bad_words",
                )
            for token in (token for token in (*bare, *spaced) if token >= self.vocab_size):
                raise RequestError(
                    f"bad_words has {shown(word)} in it, whose token {token} is outside of the model's vocabulary (0 "
                    f"to {self.vocab_size - 1}). Leave it out.",
                    param="bad_words",
                )
            found.append(bare)
            if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        if len(found) > MAX_BAD_WORDS or sum(map(len, found)) > MAX_BAD_WORDS_TOKENS:
            raise RequestError(
                f"bad_words are {len(found)} sequences of {sum(map(len, found))} tokens; at most {MAX_BAD_WORDS} of "
                f"{MAX_BAD_WORDS_TOKENS} are possible.",
                param="bad_words",
            )
        return found

    def _max_tokens(self, length: int, asked: int | None, strict: bool) -> int:
        room = self.max_model_len - length
        if asked is None:
            return room
        if asked > room and strict:
            raise RequestError(
                f"max_tokens is {shown(asked)}, but with a prompt of {length} tokens only {room} fit into the "
                f"{self.max_model_len} tokens that this model takes. Lower max_tokens or shorten the prompt.",
                param="max_tokens",
                code=TOO_LONG,
            )
        return min(asked, room)


def _from_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, Any, str]:
    known = ("prompt", "prompt_token_ids", "cache_salt")
    unknown = sorted(str(key) for key, value in prompt.items() if key not in known and value is not None)
    if unknown:
        raise RequestError(
            f"A prompt cannot have {', '.join(unknown)}: give prompt or prompt_token_ids.", param="prompt"
        )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt") or ""
    if text is not None and not isinstance(text, str):
        raise RequestError(f'"prompt" must be a text, got {type(text).__name__}.', param="prompt")
    if text is None and ids is None:
        raise RequestError("A prompt needs prompt or prompt_token_ids.", param="prompt")
    if not isinstance(salt, str):
        raise RequestError("cache_salt must be a text.", param="cache_salt")
    if not is_unicode(salt):
        raise RequestError(f"cache_salt has a lone surrogate in it: {shown(salt)}.", param="cache_salt")
    return text, ids, salt


def split_prompts(prompts: Any) -> list[Prompt]:
    """What ``LLM.generate`` takes as ``prompts``: one prompt, or several, as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be a text, token ids, or a list of prompts, got {type(prompts).__name__}.")
    if prompts and all(isinstance(item, Integral) for item in prompts):  # numpy's are that, too
        return [prompts]
    return list(prompts)
