from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from drumline.errors import ConfigError, UnsupportedModelError
from drumline.model.architectures import ARCHITECTURES
from drumline.model.spec import (
    kv_spec,
    preload_modules,
    read_spec,
    resolve_dtype,
    resolve_max_model_len,
    spec_from_config,
)
from tests.model.tiny import SHAPES

SMOLLM = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def test_reads_what_the_config_says() -> None:
    spec = spec_from_config(SMOLLM)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 9, 3, 64)
    assert (spec.max_positions, spec.tied, spec.dtype) == (8192, True, "bfloat16")
    assert "transformers.models.llama.modeling_llama" in preload_modules(spec)


def test_kv_of_uneven_ranks() -> None:
    spec = spec_from_config(SMOLLM)
    blocks = [kv_spec(spec, tp_rank=r, tp_size=2, dtype="float32", block_size=16).bytes_per_block for r in range(2)]
    assert blocks == [2 * 30 * 2 * 64 * 4 * 16, 2 * 30 * 1 * 64 * 4 * 16]
    assert kv_spec(spec, tp_rank=8, tp_size=9, dtype="bfloat16", block_size=1).bytes_per_block == 2 * 30 * 64 * 2
    shared = kv_spec(spec, tp_rank=8, tp_size=9, dtype="bfloat16", block_size=16, dcp_size=3)
    assert (shared.block_size, shared.bytes_per_block) == (48, 2 * 30 * 64 * 2 * 16)
    with pytest.raises(ConfigError, match="9 query heads"):
        kv_spec(spec, tp_rank=0, tp_size=10, dtype="float32", block_size=16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' cannot be served: it keeps a recurrent state"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification cannot be served"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
    ],
)
def test_refuses_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(SMOLLM | changes)


def test_a_qwen2_that_only_mentions_a_window_is_served() -> None:
    config = SMOLLM | {"model_type": "qwen2", "architectures": None, "use_sliding_window": False, "sliding_window": 99}
    assert spec_from_config(config).architecture == "Qwen2ForCausalLM"


def test_broken_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2})
    )
    with pytest.raises(ConfigError, match="hidden_size"):
        read_spec(tmp_path)


def test_dtype_and_length() -> None:
    spec = spec_from_config(SMOLLM)
    assert resolve_dtype("auto", spec, "cpu") == "float32"
    assert resolve_dtype("auto", spec, "cuda") == "bfloat16"
    assert resolve_dtype("half", spec, "cpu") == "float16"
    with pytest.raises(ConfigError, match="--dtype"):
        resolve_dtype("int8", spec, "cpu")
    assert resolve_max_model_len(None, spec) == 8192
    assert resolve_max_model_len(100, spec) == 100
    for length in (0, 1, 8193):
        with pytest.raises(ConfigError, match="--max-model-len"):
            resolve_max_model_len(length, spec)
    with pytest.raises(ConfigError, match="sequences of 1 tokens"):
        resolve_max_model_len(None, spec_from_config(SMOLLM | {"max_position_embeddings": 1}))
    short = {"model_type": "phi3", "architectures": None, "rope_scaling": {"type": "longrope"}}
    with pytest.raises(ConfigError, match=r"sequences of 0 tokens \(original_max_position_embeddings"):
        resolve_max_model_len(None, spec_from_config(SMOLLM | short | {"original_max_position_embeddings": 0}))


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
@pytest.mark.parametrize(
    "said", [{}, {"original_max_position_embeddings": 300}, {"max_position_embeddings": 9}, {"rope_parameters": None}]
)
def test_the_default_length_with_longrope(kind: str, said: dict[str, Any]) -> None:
    """That of the first training, for which transformers takes the short frequencies, wherever it finds it."""
    rope = {"type": kind, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "original_max_position_embeddings": 77}
    config = SMOLLM | {"model_type": "phi3", "architectures": None, "rope_scaling": rope} | said
    spec = spec_from_config(config)
    first = transformers.Phi3Config(**config).rope_parameters["original_max_position_embeddings"]
    assert spec.default_max_model_len == resolve_max_model_len(None, spec) == min(first, spec.max_positions)
    assert resolve_max_model_len(spec.max_positions, spec) == spec.max_positions
    plain = spec_from_config(SMOLLM | {"model_type": "phi3", "architectures": None} | said)
    assert plain.default_max_model_len == plain.max_positions


def test_missing_keys_mean_what_transformers_takes_for_them() -> None:
    """Only what every checkpoint says is given; the rest comes from the configuration classes."""
    said = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 32, "vocab_size": 320}
    said["num_attention_heads"] = 32
    for model_type, architecture in ARCHITECTURES.items():
        for more in ({}, {"use_sliding_window": True, "sliding_window": 9}, {"num_key_value_heads": 4}):
            config = said | more
            spec = spec_from_config(config | {"model_type": model_type})
            reference = getattr(transformers, architecture.class_name).config_class(**config)
            heads = getattr(reference, "num_key_value_heads", None) or reference.num_attention_heads
            if model_type == "gpt_neox":
                heads = reference.num_attention_heads
            head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads
            assert (spec.num_kv_heads, spec.head_dim) == (heads, head_dim), model_type
            assert spec.max_positions == reference.max_position_embeddings, model_type
            assert spec.tied == reference.tie_word_embeddings, model_type
            if kinds := getattr(reference, "layer_types", None):
                window = reference.sliding_window
                expected = tuple(window if kind == "sliding_attention" else None for kind in kinds)
                assert spec.windows == expected, model_type


@pytest.mark.parametrize("shape", SHAPES)
def test_spec_of_each_architecture(shape: str, tiny: Callable[[str], tuple[Path, Any]]) -> None:
    """Windows as the attention modules have them, and numbers of weights as they are."""
    folder, model = tiny(shape)
    spec = read_spec(folder)
    attention = [getattr(layer, "self_attn", None) or layer.attention for layer in model.base_model.layers]
    in_all = getattr(model.config, "sliding_window", None) if spec.model_type in ("mistral", "phi3") else None
    assert spec.windows == tuple(getattr(module, "sliding_window", in_all) for module in attention)
    matrices = [p for name, p in model.base_model.layers[1].named_parameters() if p.dim() == 2]
    assert spec.layer_weights == sum(p.numel() for p in matrices)
    assert spec.vocabulary_weights == model.get_input_embeddings().weight.numel()
    assert spec.modeling_module == type(model).__module__
    assert spec.norms_all_heads == (spec.model_type == "olmo2")


BASE = {key: value for key, value in SMOLLM.items() if key not in ("model_type", "architectures")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' cannot be served: it keeps a recurrent state"),
        ({"model_type": "jamba"}, "not softmax attention"),
        ({"model_type": "qwen3_next"}, "not softmax attention"),
        ({"model_type": "qwen3_moe"}, "mixture of experts"),
        ({"model_type": "mixtral"}, "mixture of experts"),
        ({"model_type": "deepseek_v3"}, "compressed latent"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "bert"}, "generates nothing"),
        ({"model_type": "gemma3"}, "multimodal checkpoint.*gemma3_text"),
        ({"model_type": "qwen2_5_vl"}, "multimodal"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "gpt2"}, "no tensor-parallel plan"),
        # names that nobody has heard of
        ({"model_type": "new", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "new", "vision_config": {}}, "multimodal"),
        ({"model_type": "new", "layer_types": ["linear_attention", "full_attention"]}, r"\(layers of type linear_att"),
        ({"model_type": "new", "mamba_d_state": 16}, "not softmax attention"),
        ({"model_type": "new", "state_size": 16}, "recurrent state"),
        ({"model_type": "new", "kv_lora_rank": 512, "n_routed_experts": 64}, "compressed latent"),
        ({"model_type": "new", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "new"}, r"'new' cannot be served yet; supported: gemma2, gemma3_text, .*smollm3"),
        ({}, "model type '' cannot be served yet"),
        # supported types that are something else after all
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}, r"quantised checkpoints \(fp8\)"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "mrope"}}, "'mrope' cannot be served with qwen2"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "longrope"}}, "'longrope' cannot be served with llama"),
        ({"model_type": "phi3", "rope_scaling": {"type": "dynamic"}}, "'dynamic' changes all rotations"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            "'dynamic' changes all rotations",
        ),
    ],
)
def test_says_why_a_model_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(BASE | changes)


def test_old_spellings() -> None:
    """Checkpoints from before rope parameters had their names of today."""
    for rope in ({"type": "su"}, {"type": "yarn"}, {"rope_type": "longrope"}):
        assert spec_from_config(BASE | {"model_type": "phi3", "rope_scaling": rope}).num_heads == 9
    spec_from_config(BASE | {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}})


def test_layers_with_a_window() -> None:
    base = BASE | {"num_hidden_layers": 4}

    def windows(**config: Any) -> tuple[int | None, ...]:
        return spec_from_config(base | config).windows

    assert windows(model_type="llama", sliding_window=5) == (None,) * 4
    assert windows(model_type="mistral") == (4096,) * 4
    assert windows(model_type="mistral", sliding_window=None) == (None,) * 4
    assert windows(model_type="mistral", sliding_window=0) == (None,) * 4
    assert windows(model_type="phi3", sliding_window=7) == (7,) * 4
    assert windows(model_type="qwen3", sliding_window=7) == (None,) * 4
    assert windows(model_type="qwen3", use_sliding_window=True, max_window_layers=3) == (None, None, None, 4096)
    assert windows(model_type="gemma2", sliding_window=7) == (7, None, 7, None)
    assert windows(model_type="gemma3_text", sliding_window=7, sliding_window_pattern=3) == (7, 7, None, 7)
    assert windows(model_type="smollm3", use_sliding_window=True, sliding_window=7) == (None, None, None, 7)
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(model_type="gemma2", sliding_window=7, layer_types=kinds) == (None, 7, None, 7)
    for wrong in ({"layer_types": kinds[:3]}, {"layer_types": kinds, "sliding_window": None}):
        with pytest.raises(ConfigError, match=r"config\.json lacks or mistypes"):
            windows(model_type="gemma2", **wrong)
