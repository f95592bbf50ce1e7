"""What clients send and get: OpenAI's shapes with vLLM's extra parameters, as msgspec structs.

Unknown fields are ignored, as other servers of this API do. Fields that are known but not built are listed in
``REFUSED`` with the values that ask for nothing; any other value is a 400 that names the field, since to ignore it
would give a wrong answer. ``null`` means "not given" everywhere.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from drumline.text.results import Logprob

Number = int | float | None


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = None
    """A last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """Usage in each chunk."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """Parameters that both routes share."""

    model: str | None = None
    """One of ``/v1/models``; left out: the model that is served."""
    temperature: Number = None
    top_p: Number = None
    top_k: Number = None
    n: Number = None
    seed: Number = None
    stop: str | list[str] | None = None
    max_tokens: Number = None
    """Left out: as many as fit."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # vLLM's
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    """Token ids of prompt and outputs beside the text."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens ``token_id:<id>``, since different tokens may have the same text."""
    priority: Number = None
    """Requests with a lower number are served first."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""
    min_p: Number = None
    min_tokens: Number = None
    """Until the output has so many tokens, nothing ends it (but bad words that leave no token to choose)."""
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: dict[str, Any] | None = None
    """Token id: what is added to its logit, -100 to 100. It forbids nothing: an only token is chosen all the same."""
    bad_words: list[str] | None = None
    """Texts that are not generated. Where they leave no token to choose, the output ends with ``stop_reason``
    ``bad_words``."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens are generated. A 400 if ``bad_words`` and ``min_tokens`` leave none of them to begin with."""
    prompt_logprobs: Number = None
    """Log-probabilities of the prompt's tokens, with so many of the likeliest at each position. Not in a stream."""
    truncate_prompt_tokens: Number = None
    """Use only so many tokens of the prompt; -1: as many as fit."""
    truncation_side: str | None = None
    """``left``: leave out the beginning of the prompt (the default); ``right``: its end."""
    stream_interval: Number = None
    """Tokens in each event of a stream, the first and the last one aside."""
    request_id: str | None = None
    """Part of the answer's id."""
    # Known, not built: see REFUSED. Any type, since only whether it asks for something matters.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None
    logprob_token_ids: Any = None
    spaces_between_special_tokens: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    length_penalty: Any = None
    watermarking: Any = None
    vllm_xargs: Any = None
    ec_transfer_params: Any = None
    kv_transfer_params: Any = None
    return_token_offsets: Any = None
    return_prompt_text: Any = None


class ChatRequest(SamplingFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    """``{"role": ..., "content": text or a list of text parts}``."""
    max_completion_tokens: Number = None
    """The newer name of ``max_tokens``; it wins."""
    logprobs: bool | None = None
    top_logprobs: Number = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Go on with the last message; needs ``add_generation_prompt: false``."""
    add_special_tokens: bool | None = None
    """Put special tokens in front of what the template wrote, which has them as a rule."""
    echo: bool | None = None
    """Put the last message in front of the answer, if both are of the same role: ``assistant``, or with
    ``add_generation_prompt: false``, where the last speaker goes on, any."""
    documents: list[dict[str, Any]] | None = None
    """For templates that know documents."""
    reasoning_effort: str | None = None
    """For templates that know it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Handed to the chat template."""
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: Any
    """Text, token ids, or a list of either."""
    max_tokens: Number = None
    """Left out: 16."""
    logprobs: Number = None
    """How many of the most likely tokens to report at each position."""
    add_special_tokens: bool | None = None
    echo: bool | None = None
    """Put the prompt in front of the output, and its log-probabilities if there are any. With ``max_tokens: 0`` that
    is all."""
    best_of: Number = None
    """Make so many outputs and give the n likeliest ones. Not in a stream."""
    suffix: Any = None
    prompt_embeds: Any = None


REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "logprob_token_ids": ([],),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "length_penalty": (1,),
    "watermarking": (False,),
    "vllm_xargs": ({},),
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "suffix": ("",),
    "prompt_embeds": (),
}
"""Field: values that ask for nothing (None always does)."""


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Part of the usage."""

    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, kw_only=True):
    """One of the likeliest tokens at a position (chat)."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    """The chosen token at a position (chat)."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """``logprobs`` of a chat choice."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """``logprobs`` of a completion choice: four lists of the same length."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    """None for the first token of a prompt, which nothing is before."""
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = []


PromptLogprobs = list[dict[int, Logprob] | None]
"""For each token of a prompt: itself and the likeliest, by token id; None for the first one."""


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer: the assistant's, or with ``add_generation_prompt: false`` of whoever spoke last."""

    role: str = "assistant"
    content: str | None
    refusal: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new in a chat chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One answer in a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In the first event."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One output of a completion, whole or a piece of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In a stream: in the first piece."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of ``/v1/completions``, and one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: ``prompt``, or ``messages`` as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Left out: true for a prompt, false for messages."""
    return_token_strs: bool | None = None
    """The tokens' texts too."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    chat_template: Any = None


class Tokenized(msgspec.Struct, kw_only=True):
    """Answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


class Detokenized(msgspec.Struct, kw_only=True):
    """Answer of ``/detokenize``."""

    prompt: str


class Model(msgspec.Struct, kw_only=True):
    """One entry of ``/v1/models``."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "drumline"
    root: str = ""
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of ``/v1/models``."""

    object: str = "list"
    data: list[Model]


class Status(msgspec.Struct, kw_only=True):
    """Answer of ``/health``, ``/readyz``, ``/ping`` and ``/livez``."""

    status: str


class Load(msgspec.Struct, kw_only=True):
    """Answer of ``/load``."""

    server_load: int


class Version(msgspec.Struct, kw_only=True):
    """Answer of ``/version``."""

    version: str


class ProcessPhase(msgspec.Struct, kw_only=True):
    """One process in ``/startupz``."""

    name: str
    pid: int
    rank: int | None
    phase: str
    seconds: float
    """In this phase, as far as was seen."""


class StartupState(msgspec.Struct, kw_only=True):
    """Answer of ``/startupz``: status 200 once the server could answer requests (also while its engine is started
    again), 503 before that and when it ended."""

    status: str
    """``starting``, ``ready``, ``recovering`` (a dead engine is being started again), ``draining``, ``failed``,
    ``stopping``."""
    phase: str
    """What the command itself is doing."""
    seconds: float
    """Since the command."""
    processes: list[ProcessPhase]
    message: str = ""
