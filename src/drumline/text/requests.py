"""Prompts and sampling parameters to requests of the engine: everything that can be wrong is found here.

One :class:`RequestBuilder` for each engine. A prompt with n outputs becomes n engine requests ("children"), which
share the prompt's KV through the prefix cache; child i is named ``i_<request id>``, and draws its random numbers from
seed + i (modulo 2^64), so that the children differ and each can be had alone: n = 1 with seed s + i gives what child i
of seed s gave.
"""

from __future__ import annotations

import operator
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.engine.protocol import EngineRequest
from drumline.errors import RequestError
from drumline.plan.sampling import SamplingParams
from drumline.text.tokenizer import Tokenizer

MAX_LOGPROBS = 20
"""Most top log-probabilities a request may ask for, as in vLLM and OpenAI's API."""
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
    """As given, with ``max_tokens`` resolved."""
    children: list[EngineRequest]
    """One for each output; the output's index is the place in this list."""


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
        """
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        if eos_token_ids is None:
            eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else ()
        self.eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._defaults = dict(sampling_defaults or {})
        self._draw = random.Random(seed).getrandbits if seed is not None else secrets.randbits

    def default_params(self, **given: Any) -> SamplingParams:
        """Sampling parameters with the model's defaults (generation_config.json) where ``given`` has none or None."""
        return SamplingParams(**{**self._defaults, **{k: v for k, v in given.items() if v is not None}})

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
        if priority:
            raise RequestError(
                f"priority = {priority} is not supported: requests are served in the order of their arrival. Leave it "
                "out or at 0.",
                param="priority",
                code="unsupported_parameter",
            )
        params = self.default_params() if params is None else params
        text, token_ids, salt = self._tokens(prompt, add_special_tokens)
        self._check_params(params)
        params = params.clone()
        params.max_tokens = self._max_tokens(len(token_ids), params.max_tokens, strict_max_tokens)
        seed = (params.seed if params.seed is not None else self._draw(64)) % _SEEDS
        single = params.clone()
        single.n = 1
        children = [
            EngineRequest(
                request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                prompt_token_ids=token_ids,
                sampling=single,
                seed=(seed + index) % _SEEDS,
                eos_token_ids=[] if params.ignore_eos else self.eos_token_ids,
                priority=priority,
                cache_salt=cache_salt or salt,
            )
            for index in range(params.n)
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
        else:
            ids = prompt
        if ids is None:
            assert text is not None
            return text, self._encode(text, add_special_tokens), salt
        return text, self._check_ids(ids), salt

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise RequestError(
                'The tokenizer was not loaded (skip_tokenizer_init): give {"prompt_token_ids": [...]} as prompt.',
                param="prompt",
            )
        # No vocabulary packs 256 characters into a token on average: what cannot fit is refused before it is tokenised.
        if len(text) > self.max_model_len * 256:
            raise RequestError(
                f"The prompt has {len(text)} characters; this model takes at most {self.max_model_len} tokens.",
                param="prompt",
                code=TOO_LONG,
            )
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestError("The prompt is empty.", param="prompt")
        self._check_length(len(ids))
        self._check_range(ids)
        return ids

    def _check_ids(self, ids: Any) -> list[int]:
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise RequestError(
                f"prompt_token_ids must be a list of integers, got {type(ids).__name__}.", param="prompt"
            )
        if not len(ids):
            raise RequestError("The prompt is empty.", param="prompt")
        self._check_length(len(ids))
        try:
            found = [operator.index(token) for token in ids if not isinstance(token, bool)]
        except TypeError:
            found = []
        if len(found) != len(ids):
            raise RequestError("prompt_token_ids must be a list of integers.", param="prompt")
        self._check_range(found)
        return found

    def _check_range(self, ids: list[int]) -> None:
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"Token id {bad} is outside of the model's vocabulary (0 to {self.vocab_size - 1}).", param="prompt"
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
        if params.logprobs is not None and params.logprobs > self.max_logprobs:
            raise RequestError(
                f"logprobs must be at most {self.max_logprobs}, got {params.logprobs}.", param="logprobs"
            )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop needs a tokenizer, which was not loaded (skip_tokenizer_init).", param="stop")
        for token in params.stop_token_ids or ():
            if token >= self.vocab_size:
                raise RequestError(
                    f"stop_token_ids: {token} is outside of the model's vocabulary (0 to {self.vocab_size - 1}).",
                    param="stop_token_ids",
                )

    def _max_tokens(self, length: int, asked: int | None, strict: bool) -> int:
        room = self.max_model_len - length
        if asked is None:
            return room
        if asked > room and strict:
            raise RequestError(
                f"max_tokens is {asked}, but with a prompt of {length} tokens only {room} fit into the "
                f"{self.max_model_len} tokens that this model takes. Lower max_tokens or shorten the prompt.",
                param="max_tokens",
                code=TOO_LONG,
            )
        return min(asked, room)


def _from_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, Any, str]:
    unknown = sorted(str(key) for key in set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"})
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
    return text, ids, salt


def split_prompts(prompts: Any) -> list[Prompt]:
    """What ``LLM.generate`` takes as ``prompts``: one prompt, or several, as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be a text, token ids, or a list of prompts, got {type(prompts).__name__}.")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)
