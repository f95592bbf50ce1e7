"""Flat options, as vLLM's LLM takes them, to the configuration of an engine."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, ProcessConfig, SchedulerConfig
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
    "max_logprobs": (20,),
    "logits_processors": ([],),
    "limit_mm_per_prompt": ({},),
    "speculative_config": (),
    "scheduling_policy": ("fcfs",),
    "attention_backend": (),
    "hf_token": (),
}
"""Options of vLLM's LLM that nothing here has yet, with values that ask for nothing (None always does)."""
_NOT_BUILT = (
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "data_parallel_size",
    "nnodes",
    "enable_expert_parallel",
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
            near = difflib.get_close_matches(name, [*_FIELDS, "platform"], n=1, cutoff=0.5)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}{hint}")
        section, default = _FIELDS[name]
        if value is not None or default is None:
            given[section][name] = _adapted(name, value)
    asked = [name for name in _NOT_BUILT if options.get(name) not in (None, _FIELDS[name][1])]
    if asked:
        raise ConfigError(f"not built yet: {', '.join(asked)}. Today one machine runs tensor_parallel_size=N.")
    made = {section: kind(**given[section]) for section, kind in _SECTIONS.items()}
    return EngineConfig(platform=platform, **made)


def _adapted(name: str, value: Any) -> Any:
    """``value`` in the form that the configuration has: names as tuples, paths as texts."""
    if name in ("served_model_name", "preload"):
        return (value,) if isinstance(value, str) else tuple(value)
    return str(value) if isinstance(value, Path) else value


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
