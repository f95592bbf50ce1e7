"""What a model's ``config.json`` says that drumline needs: no torch, no transformers.

Read by whoever plans (engine, ``drumline plan``, start-up messages) before any worker exists. What can be served, and
why the rest cannot, is in ``architectures``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drumline.config import DTYPE_ALIASES, LEAST_MODEL_LEN, ParallelConfig
from drumline.errors import ConfigError, UnsupportedModelError
from drumline.model.architectures import ARCHITECTURES, Architecture, layer_windows, why_refused
from drumline.model.expert_spec import ExpertShare, ExpertsSpec, read_experts
from drumline.model.latent_spec import LatentSpec, read_latent
from drumline.parallel.shards import WIDTH_MULTIPLE, HeadShard, Range, attention_shards, vocab_shards, width_shards
from drumline.plan.kv import KVSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Compute types, with the bytes of one element."""

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_PHI3_FIRST_POSITIONS = 4096


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of a model."""

    model_type: str
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the MLP of layers without experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of keys and values as they are cached; queries of most models have it too."""
    vocab_size: int
    max_positions: int
    """Longest sequence in tokens that the model was made for."""
    tied: bool
    """Embedding and output head are one tensor, by the configuration; weights with a head that differs have two
    (``loader``)."""
    dtype: str
    """Of the checkpoint: ``float32``, ``bfloat16`` or ``float16``."""
    windows: tuple[int | None, ...] = ()
    """Of each layer the sliding window in tokens, its own among them; None: full attention."""
    gated_mlp: bool = True
    """The MLP has three matrices (gate, up, down), not two."""
    norms_all_heads: bool = False
    """Queries and keys are normalised over all heads at once, which ranks of a TP group do together."""
    first_positions: int | None = None
    """Longest sequence in tokens of the first training, where rotary frequencies have a set for these and another one
    for longer ones (``longrope``)."""
    experts: ExpertsSpec | None = None
    """If there are layers with experts."""
    latent: LatentSpec | None = None
    """If keys and values are made from latents."""
    tp_weights: tuple[int, ...] = ()
    """In what proportions TP ranks share it (``parallel.shards``); empty: evenly. Set by :meth:`weighted`."""

    @property
    def modeling_module(self) -> str:
        """Module of transformers with the model's class."""
        folder = ARCHITECTURES[self.model_type].folder
        return f"transformers.models.{folder}.modeling_{folder}"

    def layer_weights(self, layer: int) -> int:
        """Number of weights in the matrices of one layer (norms and biases, less than a hundredth, left out)."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        if self.latent is not None:
            attention = self.latent.weights(self.hidden_size, self.num_heads)
        if self.experts is not None and layer in self.experts.layers:
            return attention + self.experts.weights(self.hidden_size)
        return attention + (3 if self.gated_mlp else 2) * self.intermediate_size * self.hidden_size

    @property
    def has_mlp(self) -> bool:
        """Some layers have no experts."""
        return self.experts is None or len(self.experts.layers) < self.num_layers

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Intermediate sizes, each of which is split over the ranks of a TP group."""
        if self.experts is None:
            return (self.intermediate_size,)
        dense = (self.intermediate_size,) if self.has_mlp else ()
        shared = (self.experts.shared_width,) if self.experts.shared_width else ()
        return (*dense, self.experts.width, *shared)

    @property
    def widths_beside_experts(self) -> tuple[int, ...]:
        """Those that are split still where each rank has whole experts."""
        widths = list(self.mlp_widths)
        if self.experts is not None:
            widths.remove(self.experts.width)
        return tuple(widths)

    @property
    def vocabulary_weights(self) -> int:
        """Number of weights in the embedding, and in the head (one tensor if tied)."""
        return self.vocab_size * self.hidden_size

    @property
    def default_max_model_len(self) -> int:
        """Longest sequence in tokens unless another one is asked for: those of the first training, as in vLLM, if
        longer ones would have all sequences rotated otherwise; else all that the model was made for."""
        first = self.max_positions if self.first_positions is None else self.first_positions
        return min(self.max_positions, first)

    def weighted(self, parallel: ParallelConfig) -> ModelSpec:
        """This spec, shared in the proportions of ``--tp-weights``. ConfigError if these are still to be found."""
        weights = parallel.tp_weights
        if isinstance(weights, str):
            raise ConfigError(
                f"--tp-weights {weights} is found before workers are started (drumline.engine.checks.check_model); "
                "give numbers here"
            )
        return replace(self, tp_weights=weights)

    def heads(self, tp_size: int) -> tuple[HeadShard, ...]:
        """Attention heads of each TP rank. ConfigError if one would have none."""
        return attention_shards(self.num_heads, self.num_kv_heads, tp_size, self.tp_weights)

    def widths(self, width: int, tp_size: int) -> tuple[Range, ...]:
        """Of a width inside the MLP the columns of each TP rank. ConfigError if one would have none."""
        return width_shards(width, tp_size, WIDTH_MULTIPLE, self.tp_weights)

    def expert_share(self, tp_rank: int, tp_size: int) -> ExpertShare:
        """What a TP rank has of the experts of a layer: of all experts a range of the width. ConfigError if nothing;
        ValueError for a model without experts."""
        if self.experts is None:
            raise ValueError(f"{self.architecture} has no experts")
        return ExpertShare(Range(0, self.experts.num_experts), self.widths(self.experts.width, tp_size)[tp_rank])

    def vocabulary(self, tp_size: int) -> tuple[Range, ...]:
        """Vocabulary ids of each TP rank, in embedding and head. ConfigError if one would have none."""
        return vocab_shards(self.vocab_size, tp_size, self.tp_weights)


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
    if model_type not in ARCHITECTURES:
        reason = why_refused(config)
        known = f"supported: {', '.join(sorted(ARCHITECTURES))}"
        raise UnsupportedModelError(
            f"{name}: model type {model_type!r} cannot be served{f': {reason}' if reason else ' yet'}; {known}"
        )
    architecture = ARCHITECTURES[model_type]
    _refuse_unsupported(config, architecture, name)
    try:
        return _make_spec(config, model_type, architecture)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: config.json lacks or mistypes {error}") from error


def _whole(config: Mapping[str, Any], name: str) -> int:
    """A size, which the library's own code will use as it is: no text, at least 1. KeyError, ValueError."""
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: {value!r} is no whole number of at least 1")
    return value


def _make_spec(config: Mapping[str, Any], model_type: str, architecture: Architecture) -> ModelSpec:
    heads, layers = _whole(config, "num_attention_heads"), _whole(config, "num_hidden_layers")
    hidden = _whole(config, "hidden_size")
    kv_heads = config.get("num_key_value_heads", architecture.num_kv_heads) if model_type != "gpt_neox" else None
    head_dim = config.get("head_dim", architecture.head_dim) if model_type != "gpt_neox" else None
    latent = read_latent(config, architecture.latent)
    if latent is not None:  # expanded keys and values, the narrower ones padded in the cache
        kv_heads, head_dim = heads, max(latent.key, latent.value)
    return ModelSpec(
        model_type=model_type,
        architecture=architecture.class_name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=int(kv_heads or heads),
        head_dim=int(head_dim or hidden // heads),
        vocab_size=_whole(config, "vocab_size"),
        max_positions=int(config.get("max_position_embeddings") or architecture.max_positions),
        tied=bool(config.get("tie_word_embeddings", architecture.tied)),
        dtype=_checkpoint_dtype(config),
        windows=layer_windows(config, architecture, layers),
        gated_mlp=architecture.gated_mlp,
        norms_all_heads=architecture.norms_all_heads,
        first_positions=_first_positions(config),
        experts=read_experts(config, architecture.experts, layers),
        latent=latent,
    )


def _first_positions(config: Mapping[str, Any]) -> int | None:
    """See ModelSpec. Phi-3's configuration class has a default; its own key goes before the rope's, but not with the
    oldest spelling."""
    if "longrope" not in _rope_types(config):
        return None
    key, rope = "original_max_position_embeddings", _rope(config)
    first = config.get(key, _PHI3_FIRST_POSITIONS)
    return int(rope.get(key, first) if (rope.get("rope_type") or rope.get("type")) == "su" else first)


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return dtype if dtype in DTYPE_BYTES else "float32"


def _refuse_unsupported(config: Mapping[str, Any], architecture: Architecture, name: str) -> None:
    model_type = config["model_type"]
    architectures = config.get("architectures") or [architecture.class_name]
    # What the model below the head was saved as; with a tied head nothing is missing.
    base = architecture.class_name.removesuffix("ForCausalLM").replace("Gemma3", "Gemma3Text") + "Model"
    if architecture.class_name not in architectures and architectures != [base]:
        raise UnsupportedModelError(
            f"{name}: architecture {', '.join(architectures)} cannot be served; of {model_type} models only "
            f"{architecture.class_name}"
        )
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        if method == "mxfp4":
            raise UnsupportedModelError(
                f"{name}: checkpoints in MXFP4 cannot be served yet: their experts are 4-bit numbers in blocks with a "
                "common exponent, and the products here take floats of 16 and 32 bits; take a checkpoint in bfloat16"
            )
        raise UnsupportedModelError(
            f"{name}: quantised checkpoints{f' ({method})' if method else ''} cannot be served yet; take the "
            "unquantised model"
        )
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            f"{name}: bidirectional attention (use_bidirectional_attention) embeds text and generates none, so the "
            "model cannot be served"
        )
    for rope_type in sorted(_rope_types(config)):
        if rope_type in _ROPE_TYPES or (rope_type, model_type) == ("longrope", "phi3"):
            continue
        reason = f"cannot be served with {model_type} models"
        if rope_type == "dynamic":
            reason = (
                "changes all rotations with the longest sequence of the batch, so an answer would depend on its "
                "neighbours, and cached keys would be rotated otherwise than new ones; it cannot be served"
            )
        raise UnsupportedModelError(f"{name}: rotary embedding of type {rope_type!r} {reason}")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Types of rotary embedding that the configuration names, in the spelling of today."""
    rope = _rope(config)
    per_layer_type = [entry for entry in rope.values() if isinstance(entry, Mapping)]
    types = {str(entry.get("rope_type") or entry.get("type") or "default") for entry in per_layer_type or [rope]}
    if config["model_type"] == "phi3":  # as its configuration class reads old checkpoints
        types = {"longrope" if rope_type in ("su", "yarn") else rope_type for rope_type in types}
    return types


def resolve_dtype(asked: str, spec: ModelSpec, device_type: str) -> str:
    """The compute type: ``auto`` is float32 on cpu (half types are slower there), else the checkpoint's."""
    if asked == "auto":
        return "float32" if device_type == "cpu" else spec.dtype
    dtype = DTYPE_ALIASES.get(asked, asked)
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {asked} is unknown; use auto, {', '.join(DTYPE_BYTES)}")
    return dtype


def resolve_max_model_len(asked: int | None, spec: ModelSpec) -> int:
    """Longest sequence in tokens. ConfigError if more is asked for than the model was made for, or no request fits."""
    default = spec.default_max_model_len
    if default < LEAST_MODEL_LEN:
        key = "" if default == spec.max_positions else "original_"
        raise ConfigError(
            f"the model takes sequences of {default} tokens ({key}max_position_embeddings); a request has "
            f"{LEAST_MODEL_LEN} at least, one of its prompt and one of its output"
        )
    if asked is None:
        return default
    if not LEAST_MODEL_LEN <= asked <= spec.max_positions:
        raise ConfigError(
            f"--max-model-len {asked} must be between {LEAST_MODEL_LEN} and the model's {spec.max_positions}"
        )
    return asked


def kv_spec(
    spec: ModelSpec,
    *,
    tp_rank: int,
    tp_size: int,
    dtype: str,
    block_size: int,
    num_layers: int | None = None,
    dcp_size: int = 1,
) -> KVSpec:
    """What one block of KV costs on a rank: keys and values of its layers (default: all) for ``block_size`` tokens.

    ``dcp_size``: ranks that share out the tokens of a sequence. A block holds ``block_size`` of them on each.
    """
    num_kv_heads = spec.heads(tp_size)[tp_rank].kv.size
    num_layers = spec.num_layers if num_layers is None else num_layers
    per_token = 2 * num_layers * num_kv_heads * spec.head_dim * DTYPE_BYTES[dtype]
    return KVSpec(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        block_size=block_size * dcp_size,
        bytes_per_block=per_token * block_size,
    )


MODULES_OF_ANY = (
    "torch",
    "torch.distributed",
    "transformers.modeling_utils",
    "safetensors.torch",
    "drumline.model.worker",
)
"""What workers of every model import."""


def preload_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Modules that a fork server imports, so that workers of this model start with everything imported."""
    return (*MODULES_OF_ANY[:2], spec.modeling_module, *MODULES_OF_ANY[3:])
