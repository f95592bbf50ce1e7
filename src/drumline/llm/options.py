"""Flat options, as vLLM's LLM takes them, to the configuration of an engine."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any

from drumline.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ProcessConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from drumline.errors import ConfigError
from drumline.text.chat import load_chat_template
from drumline.text.tokenizer import Tokenizer, read_eos_token_ids, tokenizer_file

_SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "process": ProcessConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
}
_FIELDS = {
    field.name: (section, field.default)
    for section, kind in _SECTIONS.items()
    for field in dataclasses.fields(kind)
    if (section, field.name) != ("model", "path")
}
"""Every option: its section of the configuration and its default."""
_RECOVERY = tuple(field.name for field in dataclasses.fields(RecoveryConfig))
_VLLM: dict[str, tuple[Any, ...]] = {
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "tokenizer_mode": ("auto", "hf"),
    "tokenizer_revision": (),
    "quantization": (),
    "cpu_offload_gb": (0,),
    "swap_space": (0, 4),
    "kv_cache_dtype": ("auto",),
    "compilation_config": (0,),
    "hf_overrides": ({},),
    "generation_config": ("auto",),
    "enable_lora": (False,),
    "enable_sleep_mode": (False,),
    "disable_log_stats": (True, False),
    "logits_processors": ([],),
    "limit_mm_per_prompt": ({},),
    "speculative_config": (),
    "attention_backend": (),
    "hf_token": (),
    "allowed_local_media_path": ("",),
    "allowed_media_domains": ([],),
    "offload_group_size": (0,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "offload_params": (set(),),
    "enable_return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "mm_processor_kwargs": ({},),
    "pooler_config": (),
    "structured_outputs_config": ({},),
    "profiler_config": ({},),
    "attention_config": ({},),
    "quantization_config": ({},),
    "spec_method": (),
    "spec_model": (),
    "spec_tokens": (0,),
}
"""Options of vLLM's LLM that nothing here has yet, with values that ask for nothing (None always does)."""
_NOT_BUILT = (
    "data_parallel_size",
    "nnodes",
)


def make_config(**options: Any) -> EngineConfig:
    """The configuration that flat options ask for. TypeError for an unknown one, ConfigError for one not built yet."""
    given: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    platform = options.pop("device", None) or options.pop("platform", None) or "auto"
    options.pop("platform", None)
    for name, value in options.items():
        if name in _VLLM:
            if value is not None and value not in _VLLM[name]:
                raise ConfigError(f"{name}={value!r} is not built yet; leave it out")
            continue
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, [*_FIELDS, "platform", *_RECOVERY, *_VLLM], n=1, cutoff=0.5)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}{hint}")
        section, default = _FIELDS[name]
        if value is not None or default is None:
            given[section][name] = _adapted(name, value)
    asked = [name for name in _NOT_BUILT if options.get(name) not in (None, _FIELDS[name][1])]
    if asked:
        raise ConfigError(
            f"not built yet: {', '.join(asked)}. Today one machine runs tensor_parallel_size=N, "
            "pipeline_parallel_size=M, prefill_context_parallel_size=P and decode_context_parallel_size=D."
        )
    made = {section: kind(**given[section]) for section, kind in _SECTIONS.items()}
    return EngineConfig(platform=platform, **made)


def split_recovery(options: Mapping[str, Any]) -> tuple[RecoveryConfig, bool, dict[str, Any]]:
    """What options say of recovery; whether ``recovery`` itself is among them; the other options. ConfigError."""
    given = {name: options[name] for name in _RECOVERY if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in _RECOVERY}
    return RecoveryConfig(**given), "recovery" in given, rest


def _adapted(name: str, value: Any) -> Any:
    """``value`` in the form that the configuration has: names as tuples, paths as texts."""
    if name in ("served_model_name", "preload"):
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "pp_layer_partition" or (name == "tp_weights" and value != "auto"):
        return _numbers(value) if isinstance(value, str) else value
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _numbers(text: str) -> tuple[int, ...] | str:
    """Of a text such as ``3,4``; another text as it is, for the configuration to refuse."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        return text


def options_of(engine_args: Any) -> dict[str, Any]:
    """What somebody's engine arguments ask for: a mapping, or a dataclass such as vLLM's ``EngineArgs``.

    Of a dataclass only fields that differ from their defaults count: its author knows more options than this program.
    An ``EngineConfig`` gives all its sections' options that differ.
    """
    if isinstance(engine_args, Mapping):
        return dict(engine_args)
    if not dataclasses.is_dataclass(engine_args) or isinstance(engine_args, type):
        raise TypeError(f"engine arguments must be a mapping or a dataclass, got {type(engine_args).__name__}")
    if isinstance(engine_args, EngineConfig):
        found = {"platform": engine_args.platform}
        for section in _SECTIONS:
            found |= options_of(getattr(engine_args, section))
        found.pop("path", None)
        return found
    found = {}
    for field in dataclasses.fields(engine_args):
        made = field.default_factory
        default = made() if made is not dataclasses.MISSING else field.default
        value = getattr(engine_args, field.name)
        if value is not default and value != default:
            found[field.name] = value
    return found


def tokenizer_loader(config: ModelConfig) -> Callable[[], Tokenizer | None]:
    """What loads the tokenizer. What is wrong most often is found right here."""
    if config.skip_tokenizer_init:
        return lambda: None
    folder = tokenizer_file(config.tokenizer or config.path).parent
    if config.chat_template:
        load_chat_template(config.chat_template)
    return lambda: Tokenizer.from_folder(folder, config.chat_template)


def eos_token_ids(tokenizer: Tokenizer | None, path: str) -> list[int]:
    """What ends an output: the model's own tokens and the tokenizer's, which may come from another folder."""
    own = tokenizer.eos_token_ids if tokenizer is not None else ()
    return list(dict.fromkeys([*own, *read_eos_token_ids(path)]))
