"""What a model's ``config.json`` says that drumline needs: no torch, no transformers.

Read by whoever plans (engine, ``drumline plan``, start-up messages) before any worker exists. Supported model types are
a table here; each entry was tried for token equality with transformers. Everything else is refused by name, since a
model that is split wrongly answers fluently and wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config import DTYPE_ALIASES
from drumline.errors import ConfigError, UnsupportedModelError
from drumline.parallel.shards import HeadShard, attention_shards
from drumline.plan.kv import KVSpec

SUPPORTED = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""Model types that can be served, and the architecture of each."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Compute types, with the bytes of one element."""

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
# "dynamic" and "longrope" change the rotation with the longest sequence in the batch, so the output of a request would
# depend on its neighbours.


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of a model."""

    model_type: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence in tokens that the model was made for."""
    tied: bool
    """Embedding and output head are one tensor."""
    dtype: str
    """Of the checkpoint: ``float32``, ``bfloat16`` or ``float16``."""

    def heads(self, tp_size: int) -> tuple[HeadShard, ...]:
        """Attention heads of each TP rank. ConfigError if one would have none."""
        return attention_shards(self.num_heads, self.num_kv_heads, tp_size)


def read_spec(folder: str | Path) -> ModelSpec:
    """The spec of the model in a local folder. ConfigError without a readable config.json; UnsupportedModelError."""
    return spec_from_config(read_config(folder), name=str(folder))


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a folder. ConfigError if there is none or it is no JSON object."""
    path = Path(folder, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no config.json: it is not the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return config


def spec_from_config(config: Mapping[str, Any], name: str = "the model") -> ModelSpec:
    """The spec that the content of a config.json describes. UnsupportedModelError names what cannot be served."""
    model_type = str(config.get("model_type", ""))
    if model_type not in SUPPORTED:
        known = ", ".join(sorted(SUPPORTED))
        raise UnsupportedModelError(f"{name}: model type {model_type!r} cannot be served yet; supported: {known}")
    _refuse_unsupported(config, name)
    try:
        return _make_spec(config, model_type)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: config.json lacks or mistypes {error}") from error


def _make_spec(config: Mapping[str, Any], model_type: str) -> ModelSpec:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    # The head counts of a missing key are those of the configuration classes of transformers.
    default_kv = 32 if model_type == "qwen2" and "num_key_value_heads" not in config else heads
    return ModelSpec(
        model_type=model_type,
        architecture=SUPPORTED[model_type],
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or default_kv),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab_size=int(config["vocab_size"]),
        max_positions=int(config.get("max_position_embeddings") or (32768 if model_type == "qwen2" else 2048)),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=_checkpoint_dtype(config),
    )


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return dtype if dtype in DTYPE_BYTES else "float32"


def _refuse_unsupported(config: Mapping[str, Any], name: str) -> None:
    model_type = config["model_type"]
    architectures = config.get("architectures") or [SUPPORTED[model_type]]
    if SUPPORTED[model_type] not in architectures:
        raise UnsupportedModelError(
            f"{name}: architecture {', '.join(architectures)} cannot be served; of {model_type} models only "
            f"{SUPPORTED[model_type]}"
        )
    if config.get("quantization_config"):
        raise UnsupportedModelError(f"{name}: quantised checkpoints cannot be served yet; take the unquantised model")
    sliding = config.get("use_sliding_window") and config.get("sliding_window")
    if sliding or "sliding_attention" in (config.get("layer_types") or ()):
        raise UnsupportedModelError(f"{name}: {model_type} with sliding-window attention cannot be served yet")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModelError(f"{name}: rotary embedding of type {rope_type!r} cannot be served yet")


def resolve_dtype(asked: str, spec: ModelSpec, device_type: str) -> str:
    """The compute type: ``auto`` is float32 on cpu (half types are slower there), else the checkpoint's."""
    if asked == "auto":
        return "float32" if device_type == "cpu" else spec.dtype
    dtype = DTYPE_ALIASES.get(asked, asked)
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {asked} is unknown; use auto, {', '.join(DTYPE_BYTES)}")
    return dtype


def resolve_max_model_len(asked: int | None, spec: ModelSpec) -> int:
    """Longest sequence in tokens. ConfigError if more is asked for than the model was made for."""
    if asked is None:
        return spec.max_positions
    if not 1 <= asked <= spec.max_positions:
        raise ConfigError(f"--max-model-len {asked} must be between 1 and the model's {spec.max_positions}")
    return asked


def kv_spec(
    spec: ModelSpec, *, tp_rank: int, tp_size: int, dtype: str, block_size: int, num_layers: int | None = None
) -> KVSpec:
    """What one block of KV costs on a rank: keys and values of its layers (default: all) for ``block_size`` tokens."""
    num_kv_heads = spec.heads(tp_size)[tp_rank].kv.size
    num_layers = spec.num_layers if num_layers is None else num_layers
    per_token = 2 * num_layers * num_kv_heads * spec.head_dim * DTYPE_BYTES[dtype]
    return KVSpec(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        block_size=block_size,
        bytes_per_block=per_token * block_size,
    )


def preload_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Modules that a fork server imports, so that workers of this model start with everything imported."""
    modeling = f"transformers.models.{spec.model_type}.modeling_{spec.model_type}"
    return ("torch", "torch.distributed", modeling, "safetensors.torch", "drumline.model.worker")
