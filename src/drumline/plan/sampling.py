"""SamplingParams: what a request asks for, with the names and defaults of vLLM's class of that name."""

from __future__ import annotations

import msgspec

from drumline.errors import RequestError


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when they end.

    Raises :class:`RequestError` (a ValueError) that names the parameter if a value cannot work.
    """

    n: int = 1
    """Number of outputs of one prompt."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1: all."""
    seed: int | None = None
    """Same seed, same tokens, whatever the TP size, preemption or batch. None: drawn when the request arrives."""
    max_tokens: int | None = 16
    """None: as many as fit."""
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    """How many of the most likely tokens to report for each output token, beside the sampled one."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    # Known to vLLM's users, built by a later issue: refused when they differ from their defaults.
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise :class:`RequestError` if a value cannot work."""
        raise NotImplementedError


class SlotSampling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a worker needs to know to sample for one slot."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """64-bit seed, already resolved."""
    logprobs: int = -1
    """Number of top log-probabilities to report; -1: none."""


_ = RequestError
