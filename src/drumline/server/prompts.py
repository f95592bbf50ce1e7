"""Bodies of requests to engine requests: which parameters, which prompts, and everything a client can get wrong.

What the text room checks (values of sampling parameters, lengths, token ids, templates) is not checked here again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from drumline.config import EngineConfig
from drumline.engine.protocol import EngineInfo
from drumline.errors import RequestError, shown
from drumline.plan.sampling import SamplingParams
from drumline.platforms import host
from drumline.server.errors import ApiError, bad_request
from drumline.server.http import whole_number
from drumline.server.schema import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    Detokenized,
    DetokenizeRequest,
    SamplingFields,
    Tokenized,
    TokenizeRequest,
)
from drumline.text.chat import normalize_messages
from drumline.text.requests import TOO_LONG, PreparedRequest, RequestBuilder
from drumline.text.tokenizer import SHORT_CHARS, Tokenizer, read_eos_token_ids, read_sampling_defaults

T = TypeVar("T")

MAX_N = 128
"""Most outputs of one prompt: OpenAI's limit."""
MAX_CHOICES = 4096
"""Most outputs of one request."""
MAX_STOPS = 64
"""Most stop strings: each one reads every character."""
MAX_STOP_CHARS = 65_536
"""Of all stop texts of a request together: each is prepared for looking it up in a stream, while all streams wait."""
MAX_PROMPT_LOGPROBS = 500_000
"""Log-probabilities of prompt tokens in one answer, some 36 MB of JSON."""
COMPLETION_TOKENS = 16
"""Most output tokens of a completion without ``max_tokens``, as in OpenAI's API and vLLM."""
MAX_TOKENS = 1_000_000
"""Ids that can be turned into text, or be made of one, at once, unless the model takes more."""
LARGE_BODY_BYTES = SHORT_CHARS
"""Bodies from this size on are tokenised in a thread, so that the streams of others go on meanwhile: 32 KiB of digits
would hold them up for 40 ms."""
INT32, INT64 = 2**31 - 1, 2**63 - 1
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """What is read from the model's folder while the engine starts."""

    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    defaults: dict[str, Any]

    @classmethod
    def read(cls, config: EngineConfig) -> TextFiles:
        """Read it. ConfigError if there is no tokenizer that can be used."""
        model = config.model
        tokenizer = None
        if not model.skip_tokenizer_init:
            tokenizer = Tokenizer.from_folder(model.tokenizer or model.path, model.chat_template)
            _ = tokenizer.fewest_tokens  # now, not with the first long prompt
        eos = read_eos_token_ids(model.path) or (tokenizer.eos_token_ids if tokenizer is not None else ())
        if tokenizer is not None:
            eos = tuple(dict.fromkeys([*tokenizer.eos_token_ids, *eos]))
        return cls(tokenizer=tokenizer, eos_token_ids=eos, defaults=read_sampling_defaults(model.path))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One HTTP request, ready for the engine."""

    requests: list[PreparedRequest]
    """One for each prompt."""
    num_top: int | None
    """How many of the likeliest tokens to report; None: no log-probabilities."""
    echo: list[str]
    """For each prompt, what to put in front of its outputs; empty: nothing."""
    role: str = "assistant"
    """Who speaks in a chat's answer: without a generation prompt, whoever spoke last."""
    echo_only: bool = False
    """No output is wanted behind that: what the engine gives (it gives a token at least) is left out."""


class TextRoom:
    """Tokenizer, limits and defaults of the served model."""

    def __init__(self, files: TextFiles, info: EngineInfo, *, seed: int = 0) -> None:
        """``seed`` other than 0: requests without a seed repeat themselves from one run of the server to the next."""
        self.tokenizer = files.tokenizer
        self._policy = info.scheduling_policy
        self._defaults = files.defaults
        self._most_tokens = max(MAX_TOKENS, info.max_model_len)
        # More than one, so that a large text does not hold up all others; few, since the engine needs cores too.
        self._turns = asyncio.Semaphore(max(2, host.cores() // 4))
        self._builder = RequestBuilder(
            files.tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=files.eos_token_ids,
            sampling_defaults=files.defaults,
            seed=seed or None,
            max_logprobs=info.max_logprobs,
        )

    @property
    def can_chat(self) -> bool:
        """The model has a chat template."""
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for in the output."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token)

    def chat(self, body: ChatRequest, request_id: str) -> Prepared:
        """Engine requests of a chat."""
        _refuse(body)
        num_top = _chat_top(body)
        params = self._params(body, num_top, body.max_completion_tokens, "max_completion_tokens")
        if self.tokenizer is None:
            raise bad_request("Chats need a tokenizer; this server runs without one. Use /v1/completions.", "messages")
        extra = body.chat_template_kwargs or {}
        _check_extra(extra)
        if body.reasoning_effort is not None:
            extra = {"reasoning_effort": body.reasoning_effort, **extra}
        if len(body.messages) >= self._builder.max_model_len:
            # A token each is the least they take: rendering and counting them would only cost time.
            raise bad_request(
                f"{len(body.messages)} messages do not fit into the {self._builder.max_model_len} tokens that this "
                "model takes.",
                "messages",
                TOO_LONG,
            )
        begins = body.add_generation_prompt is not False
        try:
            text = self.tokenizer.render_chat(
                body.messages,
                add_generation_prompt=begins,
                continue_final_message=bool(body.continue_final_message),
                documents=body.documents,
                **extra,
            )
            # The template writes special tokens itself.
            request = self._prepare(body, params, request_id, text, add_special_tokens=bool(body.add_special_tokens))
            (last,) = normalize_messages(body.messages[-1:])
            role = "assistant" if begins else last["role"]
            echo = [last["content"]] if body.echo and last["role"] == role else []
            return Prepared(requests=[request], num_top=_asked(request, num_top), echo=echo, role=role)
        except RequestError as e:
            if e.param == "logprobs":
                e.param, e.args = "top_logprobs", (f"top_{e}",)
            elif e.param == "prompt":
                e.param = "messages"
            raise

    def completion(self, body: CompletionRequest, request_id: str) -> Prepared:
        """Engine requests of a completion."""
        _refuse(body)
        num_top = whole_number(body.logprobs, "logprobs", -1, INT32)
        echo_only = bool(body.echo) and body.max_tokens == 0
        params = self._params(body, num_top, 1 if echo_only else None, default=COMPLETION_TOKENS)
        if body.echo and num_top is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = num_top
        if body.best_of is not None:
            params.best_of = whole_number(body.best_of, "best_of", 1, MAX_N)
            params.check()
        if body.stream and (params.best_of or params.n) > params.n:
            raise bad_request("best_of needs all outputs before it can choose; it cannot be streamed.", "best_of")
        prompts = split_prompt(body.prompt)
        count = len(prompts) * (params.best_of or params.n)
        if count > MAX_CHOICES:
            raise bad_request(f"prompts x n must be at most {MAX_CHOICES}, not {count}.", "prompt")
        special = body.add_special_tokens is not False
        requests = [
            self._prepare(body, params, f"{request_id}-{place}", prompt, add_special_tokens=special)
            for place, prompt in enumerate(prompts)
        ]
        asked = sum(len(one.prompt_token_ids) * (1 + (one.params.prompt_logprobs or 0)) for one in requests)
        if params.prompt_logprobs is not None and asked > MAX_PROMPT_LOGPROBS:
            raise bad_request(
                f"{asked} log-probabilities of prompt tokens are asked for; at most {MAX_PROMPT_LOGPROBS} fit into an "
                "answer. Ask for fewer of each token, or for fewer prompts.",
                "prompt",
            )
        echo = [self._text(request) for request in requests] if body.echo else []
        return Prepared(requests=requests, num_top=_asked(requests[0], num_top), echo=echo, echo_only=echo_only)

    def tokenize(self, body: TokenizeRequest) -> Tokenized:
        """Token ids of a prompt or a chat, also of one that is somewhat too long for the model."""
        tokenizer = self._need_tokenizer("prompt")
        _refuse(body)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("Give prompt or messages, one of them.", "prompt")
        text, special = body.prompt, body.add_special_tokens is not False
        if body.messages is not None:
            _check_extra(body.chat_template_kwargs)
            special = bool(body.add_special_tokens)
            text = tokenizer.render_chat(
                body.messages,
                add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
                continue_final_message=bool(body.continue_final_message),
                **(body.chat_template_kwargs or {}),
            )
        assert text is not None
        ids = self._many_tokens(text, special)
        names = [tokenizer.id_to_token(token) or "" for token in ids] if body.return_token_strs else None
        return Tokenized(count=len(ids), max_model_len=self._builder.max_model_len, tokens=ids, token_strs=names)

    def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        """Text of token ids, special tokens included."""
        tokenizer = self._need_tokenizer("tokens")
        if len(body.tokens) > self._most_tokens:
            raise bad_request(
                f"At most {self._most_tokens} tokens can be turned into text at once, not {len(body.tokens)}.", "tokens"
            )
        for token in body.tokens:
            if not 0 <= token < self._builder.vocab_size:
                vocabulary = f"the model's vocabulary (0 to {self._builder.vocab_size - 1})"
                raise bad_request(f"tokens: {shown(token)} is outside of {vocabulary}.", "tokens")
        return Detokenized(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))

    async def prepared(self, size: int, work: Callable[[], T]) -> T:
        """Result of ``work``; for a body of many bytes from a thread, a few at a time."""
        if size < LARGE_BODY_BYTES:
            return work()
        async with self._turns:
            return await asyncio.to_thread(work)

    def _many_tokens(self, text: str, special: bool) -> list[int]:
        """Token ids of a text that may be longer than the model takes."""
        tokenizer, most = self._need_tokenizer("prompt"), self._most_tokens
        self._builder.check_text(text, cut=True)
        bound = tokenizer.fewest_tokens
        if bound is not None and bound.exceed(text, most):
            raise bad_request(
                f"prompt has more than {most} tokens, which cannot be dealt with at once.", "prompt", TOO_LONG
            )
        found = tokenizer.encoding(text, special)
        if len(found) > most:
            raise bad_request(
                f"prompt has {len(found)} tokens; at most {most} can be dealt with at once.", "prompt", TOO_LONG
            )
        ids: list[int] = found.ids
        return ids

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request("This server runs without a tokenizer.", param)
        return self.tokenizer

    def _text(self, request: PreparedRequest) -> str:
        """Text of a prompt, which may have come as token ids."""
        if request.prompt is not None:
            return request.prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(request.prompt_token_ids)

    def _prepare(
        self,
        body: SamplingFields,
        params: SamplingParams,
        request_id: str,
        prompt: str | list[int],
        *,
        add_special_tokens: bool,
    ) -> PreparedRequest:
        return self._builder.prepare(
            request_id,
            self._truncated(body, params, prompt, add_special_tokens),
            params,
            add_special_tokens=add_special_tokens,
            strict_max_tokens=_limited(body),
            priority=self._priority(body),
            cache_salt=body.cache_salt or "",
        )

    def _priority(self, body: SamplingFields) -> int:
        priority = whole_number(body.priority, "priority", -INT32, INT32) or 0
        if priority and self._policy != "priority":
            raise ApiError(
                400,
                f"priority = {priority} needs a server with --scheduling-policy priority; this one serves requests in "
                "the order of their arrival. Leave it out or at 0.",
                param="priority",
                code="unsupported_parameter",
            )
        return priority

    def _truncated(
        self, body: SamplingFields, params: SamplingParams, prompt: str | list[int], add_special_tokens: bool
    ) -> str | list[int]:
        """The prompt, or as many of its tokens as were asked for."""
        most = whole_number(body.truncate_prompt_tokens, "truncate_prompt_tokens", -1, INT32)
        side = body.truncation_side or "left"
        if side not in ("left", "right"):
            raise bad_request(f"truncation_side must be left or right, not {shown(side)}.", "truncation_side")
        if most is None:
            return prompt
        room = self._builder.max_model_len
        limit = room - (params.max_tokens or 1 if _limited(body) else 1)
        if most == 0 or most > limit or limit < 1:
            raise bad_request(
                f"truncate_prompt_tokens must be -1 or between 1 and {limit}, what the model and max_tokens leave, not "
                f"{most}.",
                "truncate_prompt_tokens",
            )
        if isinstance(prompt, str):
            prompt = self._many_tokens(prompt, add_special_tokens)
        most = max(room - (params.max_tokens or 1), 1) if most == -1 else most
        return prompt[:most] if side == "right" else prompt[-most:]

    def _params(
        self,
        body: SamplingFields,
        num_top: int | None,
        max_tokens: float | int | None = None,
        max_tokens_name: str = "max_tokens",
        *,
        default: int | None = None,
    ) -> SamplingParams:
        """``default``: most tokens without ``max_tokens``, unless the model's own configuration says fewer; None: as
        many as it says, or as fit."""
        if max_tokens is None:
            max_tokens, max_tokens_name = body.max_tokens, "max_tokens"
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARS:
            raise bad_request(
                f"stop can have at most {MAX_STOPS} texts of {MAX_STOP_CHARS} characters together, not {len(stops)} of "
                f"{sum(map(len, stops))}.",
                "stop",
            )
        if len(body.logit_bias or ()) > self._builder.vocab_size:
            raise bad_request(
                f"logit_bias can have {self._builder.vocab_size} entries, one for each token, not "
                f"{len(body.logit_bias or ())}.",
                "logit_bias",
            )
        if body.stream and body.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs are not part of a stream: leave out one of the two.", "prompt_logprobs")
        limit = whole_number(max_tokens, max_tokens_name, 1, INT32)
        if limit is None:
            limit = min(
                (most for most in (default, self._defaults.get("max_tokens")) if most is not None), default=None
            )
        return self._builder.default_params(
            all_that_fit=limit is None,
            n=whole_number(body.n, "n", 1, MAX_N),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=whole_number(body.top_k, "top_k", -1, INT32),
            seed=whole_number(body.seed, "seed", -INT64 - 1, INT64),
            max_tokens=limit,
            # [] would mean "no stop strings" as well, but "" is an error that the text room names.
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            include_stop_str_in_output=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            logprobs=num_top,
            prompt_logprobs=whole_number(body.prompt_logprobs, "prompt_logprobs", -1, INT32),
            min_p=body.min_p,
            min_tokens=whole_number(body.min_tokens, "min_tokens", 0, INT32),
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=body.logit_bias,
            bad_words=body.bad_words,
            allowed_token_ids=body.allowed_token_ids,
        )


def _limited(body: SamplingFields) -> bool:
    """The client said how many tokens it wants at most."""
    return body.max_tokens is not None or getattr(body, "max_completion_tokens", None) is not None


def split_prompt(prompt: Any) -> list[str | list[int]]:
    """Prompts of a completion: one text, one list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise bad_request(f"prompt must be a text, token ids, or a list of either, not {shown(prompt)}.", "prompt")
    if not prompt:
        raise bad_request("prompt is empty.", "prompt")
    kinds = set(map(type, prompt))  # of JSON: nothing has a type derived from these
    if len(prompt) <= MAX_CHOICES and kinds <= {str, list}:
        return prompt
    if not kinds.isdisjoint({str, list}):
        many = len(prompt) > MAX_CHOICES
        reason = f"can have at most {MAX_CHOICES} prompts, not {len(prompt)}" if many else "mixes prompts and token ids"
        raise bad_request(f"prompt {reason}.", "prompt")
    return [prompt]


def _asked(request: PreparedRequest, num_top: int | None) -> int | None:
    """How many of the likeliest tokens: -1 is all of them."""
    return request.params.logprobs if num_top is not None else None


def _check_extra(extra: dict[str, Any] | None) -> None:
    for name in RESERVED:
        if name in (extra or {}):
            raise bad_request(f"chat_template_kwargs cannot have {name}.", "chat_template_kwargs")


def _chat_top(body: ChatRequest) -> int | None:
    top = whole_number(body.top_logprobs, "top_logprobs", -1, INT32)
    if not body.logprobs:
        if top:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        return None
    return top or 0


def _refuse(body: SamplingFields | TokenizeRequest) -> None:
    """400 for a parameter that is known, asks for something, and is not built."""
    if isinstance(body, SamplingFields) and body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true.", "stream_options")
    for name in body.__struct_fields__:
        harmless = REFUSED.get(name)
        if harmless is None:
            continue
        value = getattr(body, name)
        # 1 == True and 0 == False in Python; here either says "nothing".
        if value is None or value in harmless:
            continue
        shown = msgspec.json.encode(value)[:60].decode(errors="replace")
        hint = f" Leave it out or at {msgspec.json.encode(harmless[0]).decode()}." if harmless else " Leave it out."
        raise ApiError(400, f"{name} = {shown} is not supported.{hint}", param=name, code="unsupported_parameter")
