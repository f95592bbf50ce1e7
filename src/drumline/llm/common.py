"""What :class:`~drumline.llm.offline.LLM` and :class:`~drumline.llm.online.AsyncLLM` share.

Configuration, tokenizer, checks and chat templates, and plain words about what drumline does not have. How requests
run is each one's own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import cloudpickle

from drumline.config import EngineConfig, RecoveryConfig
from drumline.engine.checks import check_machine, check_model
from drumline.engine.client import AsyncEngineClient, SyncEngineClient
from drumline.engine.protocol import EngineInfo
from drumline.engine.recovering import RecoveringEngineClient, RecoveringSyncClient
from drumline.engine.recovery import Limits
from drumline.errors import RequestError, UnsupportedError
from drumline.llm.options import eos_token_ids, make_config, split_recovery
from drumline.model.resolve import resolve
from drumline.plan.sampling import SamplingParams
from drumline.platforms import device_table
from drumline.text.chat import load_chat_template
from drumline.text.requests import RequestBuilder
from drumline.text.tokenizer import Tokenizer, read_sampling_defaults

NO_LIMIT_S = 7 * 86400.0
"""Seconds that stand for "no limit": the engine's death ends such a wait."""

CALLED = (
    "the program called its workers (collective_rpc, apply_model), and what that may have changed in them would be "
    "lost without a word; recovery='on' starts the engine again all the same"
)
"""Why a death is final after such a call, unless recovery was asked for in so many words."""

_POOLING = (
    "drumline runs models that generate text, and computes no embeddings, classes or scores. Use a library for such "
    "models (sentence-transformers, vLLM with runner='pooling'); log-probabilities of a text come from "
    "generate(..., SamplingParams(prompt_logprobs=0, max_tokens=1))."
)
_SLEEP = (
    "The processes keep weights and KV cache until they end: close this object and make a new one, which takes seconds."
)
_PROFILE = (
    "There is no profiler inside: run py-spy or perf on the processes (processes() names them), or torch.profiler in "
    "a worker with collective_rpc."
)
_LORA = "Adapters are not built yet: merge the adapter into the weights and load the merged model."
_WEIGHTS = (
    "Start with model_impl='transformers', change weights in the workers with apply_model, then call "
    "reset_prefix_cache()."
)
_MEDIA = "drumline takes text only, so there is nothing to forget."
_ABSENT = {
    "encode": _POOLING,
    "embed": _POOLING,
    "classify": _POOLING,
    "score": _POOLING,
    "reward": _POOLING,
    "sleep": _SLEEP,
    "wake_up": _SLEEP,
    "is_sleeping": _SLEEP,
    "release_kv_cache_memory": _SLEEP,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "add_lora": _LORA,
    "remove_lora": _LORA,
    "list_loras": _LORA,
    "pin_lora": _LORA,
    "init_weight_transfer_engine": _WEIGHTS,
    "shutdown_weight_transfer_engine": _WEIGHTS,
    "start_weight_update": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "update_weights": _WEIGHTS,
    "finish_weight_update": _WEIGHTS,
    "update_weight_version": _WEIGHTS,
    "get_weight_version": _WEIGHTS,
    "reset_mm_cache": _MEDIA,
    "reset_encoder_cache": _MEDIA,
    "pause_generation": "Stop sending requests, or abort those that run.",
    "resume_generation": "Nothing can be paused.",
    "is_paused": "Nothing can be paused.",
    "scale_elastic_ep": "The number of engines is fixed: end this one and start another.",
}
"""Methods of vLLM's classes that do not exist here, and what to do instead."""
_INTERNALS = {
    "llm_engine": "what vLLM keeps there is here: config, stats(), get_metrics(), processes(), get_tokenizer()",
    "engine_core": "the engine core is a process: stats(), processes() and collective_rpc() reach it",
    "model_config": "see config.model",
    "vllm_config": "see config",
    "renderer": "see get_tokenizer()",
    "input_processor": "see get_tokenizer()",
    "output_processor": "results are what generate gives",
}
"""Attributes of vLLM's classes that its users reach for."""


def checked_config(model: str | os.PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    """The configuration that a constructor's arguments ask for, if this machine can do it; the model is not looked at.

    TypeError for an option that does not exist, ConfigError for what cannot work.
    """
    config = make_config(model=model, **options)
    return check_machine(config, device_table(config.platform))


@dataclasses.dataclass(frozen=True)
class Healing:
    """What becomes of a dead engine of a program's.

    On by default: a program that waits for the outputs of thousands of prompts loses minutes of work, not seconds, and
    what it gets is the same. But workers that the program changed (weights of an RL loop) would be started with what
    the files have, and their outputs would silently be another model's. So a call into the workers turns it off, unless
    the program says ``recovery="on"``.
    """

    config: RecoveryConfig
    asked: bool
    """``recovery`` was given."""

    @property
    def on(self) -> bool:
        """A dead engine is started again."""
        return self.config.recovery == "on"

    def sync_client(self, config: EngineConfig) -> SyncEngineClient:
        """Of ``LLM``."""
        return RecoveringSyncClient(config, Limits.of(self.config)) if self.on else SyncEngineClient(config)

    def async_client(self, config: EngineConfig, role: str) -> AsyncEngineClient:
        """Of ``AsyncLLM``."""
        if not self.on:
            return AsyncEngineClient(config, role=role)
        return RecoveringEngineClient(config, Limits.of(self.config), role=role)

    def called(self, client: SyncEngineClient | AsyncEngineClient) -> None:
        """The program is about to call its workers."""
        if not self.asked:
            client.renounce_recovery(CALLED)


def split_healing(options: Mapping[str, Any]) -> tuple[Healing, dict[str, Any]]:
    """What a constructor's arguments say of recovery, and the others. ConfigError."""
    config, asked, rest = split_recovery(options)
    return Healing(config, asked), rest


def with_model(config: EngineConfig) -> EngineConfig:
    """``config`` with the model's local folder, fetched if need be, and checked. ConfigError. Blocks."""
    made = check_model(dataclasses.replace(config, model=resolve(config.model)))
    read_sampling_defaults(made.model.path)
    return made


class Common:
    """Base of both classes."""

    config: EngineConfig
    """The whole configuration."""
    _tokenizer: Tokenizer | None = None
    _builder: RequestBuilder
    _pid: int

    def _set_up(self, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        """The engine is ready."""
        model = self.config.model
        self._tokenizer = tokenizer
        self._builder = RequestBuilder(
            tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=eos_token_ids(tokenizer, model.path),
            sampling_defaults=read_sampling_defaults(model.path),
            seed=model.seed,
            max_logprobs=info.max_logprobs,
        )

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers, those of all data-parallel engines unless told otherwise."""
        parallel = self.config.parallel
        return parallel.world_size * (parallel.data_parallel_size if include_dp else 1)

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``sampling_params=None`` means: the defaults of the model's generation_config.json."""
        return self._builder.default_params()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. RuntimeError with ``skip_tokenizer_init``."""
        if self._tokenizer is None:
            raise RuntimeError("the tokenizer was not loaded (skip_tokenizer_init)")
        return self._tokenizer

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:

            def refuse(*_: Any, **__: Any) -> NoReturn:
                raise UnsupportedError(f"{type(self).__name__}.{name}: {_ABSENT[name]}")

            return refuse
        if name in _INTERNALS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}: {_INTERNALS[name]}", name=name, obj=self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def _render(
        self,
        conversations: Sequence[Any],
        *,
        chat_template: str | os.PathLike[str] | None,
        chat_template_content_format: str,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[str]:
        """Conversations as the texts that the model reads. RequestError."""
        if self._tokenizer is None:
            raise RequestError("chat needs a tokenizer, which was not loaded (skip_tokenizer_init).", param="messages")
        if chat_template_content_format not in ("auto", "string"):
            raise RequestError(
                f"chat_template_content_format {chat_template_content_format!r} is not supported: contents are given "
                "to the template as text.",
                param="chat_template_content_format",
            )
        template = None if chat_template is None else load_chat_template(os.fspath(chat_template))
        return [
            self._tokenizer.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=template,
                **dict(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]

    def _check_priority(self, priority: int) -> None:
        """RequestError if requests are served in another order."""
        if priority and self.config.scheduler.scheduling_policy != "priority":
            raise RequestError(
                f"priority {priority} has no meaning here: requests are served in the order of their arrival. Make the "
                f"{type(self).__name__} with scheduling_policy='priority', or leave priority at 0.",
                param="priority",
            )

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            name = type(self).__name__
            raise RuntimeError(f"this {name} belongs to the process that made it, and this one was forked from it")


def refuse(**given: Any) -> None:
    """RequestError for arguments that vLLM's users know and nothing here can do."""
    for name, value in given.items():
        if value:
            raise RequestError(f"{name} is not supported.", param=name)


def add_special_tokens(given: Mapping[str, Any] | None, *, default: bool) -> bool:
    """The one thing that ``tokenization_kwargs`` may say."""
    options = dict(given or {})
    value = options.pop("add_special_tokens", default)
    if options:
        raise RequestError(
            f"tokenization_kwargs can have add_special_tokens, but not {', '.join(map(str, options))}.",
            param="tokenization_kwargs",
        )
    return bool(value)


def pickled_call(
    method: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> bytes:
    """A call for the engine core's ``pickled_rpc``."""
    return bytes(cloudpickle.dumps((method, tuple(args), dict(kwargs or {})), protocol=5))
