"""Which requests can ever be served, and what the scheduler makes of one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from drumline.config import LEAST_MODEL_LEN, POLICIES
from drumline.engine.blocks import BlockPool, HashChain
from drumline.engine.protocol import EngineRequest
from drumline.engine.queue import Request
from drumline.errors import RequestError
from drumline.plan.choices import DeadEnds, check_choice
from drumline.plan.memory import Extra
from drumline.plan.sampling import MAX_LOGPROBS, SlotSampling

MAX_SCORED = 256
"""Prompt tokens whose log-probabilities one plan computes: each takes a row of logits over the whole vocabulary."""
MAX_SCORED_VALUES = 1 << 20
"""Log-probabilities of prompt tokens that the answer to one plan has, unless a single token has more."""
ORDINARY_LOGPROBS = MAX_LOGPROBS
"""Likely tokens that any request may ask for at each output token."""
MAX_START_BYTES = 1 << 20
"""Bytes of requests that one plan tells the workers of, unless a single one has more: what it says about a cached
prompt costs no tokens, but must fit into a message (``engine.rings``)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a plan never exceeds."""

    max_num_seqs: int
    """Rows of one plan, and slots."""
    max_num_batched_tokens: int
    """Tokens of one plan."""
    max_model_len: int
    """Prompt plus output of one request in tokens."""
    enable_chunked_prefill: bool = True
    vocab_size: int = 0
    """Token ids of a prompt must be below this; 0: not checked."""
    policy: str = "fcfs"
    """``fcfs`` or ``priority``."""
    max_num_prefill_tokens: int = 0
    """Prompt tokens of a plan that has other rows than one prompt's; 0: no limit."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt in a plan while there are other requests; 0: no limit."""
    max_overtakes: int = 32
    """Times that requests are let in before ones that arrived earlier, until the earliest of those is promoted."""
    num_micro_batches: int = 1
    """Pipeline stages, which work on as many plans at the same time."""
    least_micro_tokens: int = 256
    """Prompts are split over the stages into plans of so many tokens at least: fewer take a device as long."""

    def check(self) -> None:
        """Raise ValueError if no request, or not one of max_model_len, could ever be served."""
        counts = self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, self.num_micro_batches
        if min(*counts, self.least_micro_tokens) < 1:
            raise ValueError(f"every limit must be at least 1: {self}")
        if self.max_model_len < LEAST_MODEL_LEN:
            raise ValueError(f"max_model_len must be at least {LEAST_MODEL_LEN}, a token of prompt and output: {self}")
        if self.policy not in POLICIES:
            raise ValueError(f"the policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"with chunked prefill off a prompt must fit into one step, but max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) is less than max_model_len ({self.max_model_len})"
            )


def score_cost(sampling: SlotSampling) -> int:
    """What log-probabilities of one prompt token take of MAX_SCORED_VALUES."""
    return min(max(sampling.prompt_logprobs + 1, MAX_SCORED_VALUES // MAX_SCORED), MAX_SCORED_VALUES)


def extra_of(num_prompt: int, sampling: SlotSampling) -> Extra:
    """What a request may ask of a step beyond an ordinary one."""
    rows = prompt_values = 0
    if sampling.prompt_logprobs >= 0:
        rows = min(max(num_prompt - 1, 0), max(MAX_SCORED_VALUES // score_cost(sampling), 1))
        prompt_values = rows * (sampling.prompt_logprobs + 1)
    return Extra(rows=rows, prompt_values=prompt_values, values=max(sampling.logprobs - ORDINARY_LOGPROBS, 0))


def make_request(
    request: EngineRequest, number: int, limits: Limits, pool: BlockPool, *, identity: str = ""
) -> Request:
    """The scheduler's form of a request, which arrived as the ``number``-th. RequestError if it can never be served."""
    prompt, known, sampling = request.prompt_token_ids, request.output_token_ids, request.sampling
    if not prompt:
        raise RequestError("the prompt is empty", param="prompt")
    if len(prompt) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; with max_model_len {limits.max_model_len} it may have at most "
            f"{limits.max_model_len - 1}",
            param="prompt",
        )
    if min(prompt) < 0 or (limits.vocab_size and max(prompt) >= limits.vocab_size):
        wrong = next(token for token in prompt if not 0 <= token < (limits.vocab_size or token + 1))
        raise RequestError(f"token id {wrong} is not in the vocabulary (0 to {limits.vocab_size - 1})", param="prompt")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {sampling.max_tokens}", param="max_tokens")
    max_length = limits.max_model_len
    if sampling.max_tokens is not None:
        max_length = min(max_length, len(prompt) + sampling.max_tokens)
    if known:
        _check_known(known, max_length - len(prompt), limits.vocab_size)
    slot_sampling = _slot_sampling(request, limits.vocab_size)
    if sampling.allowed_token_ids and not slot_sampling.allowed_ids:  # none at all would mean all
        raise RequestError("allowed_token_ids: none of them is in the vocabulary", param="allowed_token_ids")
    check_choice(
        slot_sampling.allowed_ids,
        [word[0] for word in slot_sampling.bad_words if len(word) == 1],
        slot_sampling.end_ids,
        slot_sampling.min_tokens,
        limits.vocab_size,
    )
    dead_ends = DeadEnds.of(slot_sampling, limits.vocab_size)
    if dead_ends is not None and dead_ends.at([*prompt, *known], len(prompt)):
        raise RequestError("bad_words leave no token after the known output tokens", param="output_token_ids")
    scored = sampling.prompt_logprobs is not None and not known  # they came with the first token
    most = MAX_SCORED_VALUES // score_cost(slot_sampling)
    if scored and not limits.enable_chunked_prefill and len(prompt) - 1 > most:
        raise RequestError(
            f"prompt_logprobs are computed for {most} tokens in a step, but the prompt has {len(prompt)} and "
            f"prompts are not computed in chunks: ask for fewer, or start the server with chunked prefill",
            param="prompt_logprobs",
        )
    needed = pool.blocks_for(max_length - 1)  # the last token is never computed
    if needed > pool.num_blocks:
        raise RequestError(
            f"{max_length} tokens (prompt and max_tokens) need {needed} KV blocks of {pool.block_size} "
            f"tokens, but the whole pool has {pool.num_blocks}: ask for fewer tokens or give the server "
            f"more KV memory",
            param="max_tokens",
        )
    priority = request.priority if limits.policy == "priority" else 0
    return Request(
        id=request.request_id,
        number=number,
        priority=priority,
        rank=(1, priority, number),
        tokens=[*prompt, *known],
        num_prompt=len(prompt),
        length=len(prompt) + len(known),
        max_length=max_length,
        sampling=slot_sampling,
        sampling_bytes=len(msgspec.msgpack.encode(slot_sampling)),
        extra=extra_of(len(prompt), slot_sampling),
        end_tokens=frozenset(() if sampling.ignore_eos else request.eos_token_ids),
        stop_tokens=frozenset(sampling.stop_token_ids or ()),
        prompt_logprobs=[] if scored else None,
        dead_ends=dead_ends,
        chain=HashChain(pool.block_size, model=identity, salt=request.cache_salt),
        num_cached=0 if known else -1,  # what it finds is its own
    )


def _check_known(known: list[int], room: int, vocab_size: int) -> None:
    """RequestError if an output cannot go on after these tokens. ``room``: tokens that it may have."""
    if len(known) >= room:
        raise RequestError(f"{len(known)} output tokens are known, but it may have {room}", param="output_token_ids")
    if min(known) < 0 or (vocab_size and max(known) >= vocab_size):
        raise RequestError("a known output token is not in the vocabulary", param="output_token_ids")


def _slot_sampling(request: EngineRequest, vocab_size: int) -> SlotSampling:
    """What the workers need. Numbers are brought into the ranges that they keep (int32, ids of the vocabulary):
    what a client asks for must never be what breaks a step."""
    sampling, most = request.sampling, vocab_size or 2**31 - 1

    def known(ids: Iterable[int] | None) -> tuple[int, ...]:
        return tuple(token for token in dict.fromkeys(ids or ()) if 0 <= token < most)

    def counted(logprobs: int | None) -> int:
        return -1 if logprobs is None else min(logprobs, most) if logprobs >= 0 else most

    bias = sampling.logit_bias or {}
    ends = known([*request.eos_token_ids, *(sampling.stop_token_ids or ())]) if sampling.min_tokens else ()
    return SlotSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k if 0 < sampling.top_k < most else 0,
        seed=request.seed % 2**64,
        logprobs=counted(sampling.logprobs),
        prompt_logprobs=-1 if request.output_token_ids else counted(sampling.prompt_logprobs),
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_ids=known(bias),
        bias_values=tuple(bias[token] for token in known(bias)),
        allowed_ids=known(sampling.allowed_token_ids),
        bad_words=tuple(tuple(word) for word in request.bad_words_ids if word and known(word[-1:])),
        min_tokens=min(sampling.min_tokens, 2**31 - 1) if ends else 0,
        end_ids=ends,
    )
