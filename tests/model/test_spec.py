from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from drumline.errors import ConfigError, UnsupportedModelError
from drumline.model.architectures import ARCHITECTURES
from drumline.model.expert_spec import ExpertsSpec
from drumline.model.latent_spec import LatentSpec
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
            if model_type in ("gpt_neox", "deepseek_v3"):
                heads = reference.num_attention_heads
            if model_type == "deepseek_v3":
                reference.head_dim = max(reference.qk_head_dim, reference.v_head_dim)
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
    for_all = ("mistral", "phi3", "mixtral")
    in_all = getattr(model.config, "sliding_window", None) if spec.model_type in for_all else None
    assert spec.windows == tuple(getattr(module, "sliding_window", in_all) for module in attention)
    for number, layer in enumerate(model.base_model.layers):
        matrices = [p for name, p in layer.named_parameters() if p.dim() >= 2 and not name.endswith("bias")]
        assert spec.layer_weights(number) == sum(p.numel() for p in matrices)
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
        ({"model_type": "qwen2_moe"}, "mixture of experts"),
        ({"model_type": "dbrx"}, "mixture of experts"),
        ({"model_type": "deepseek_v2"}, "another kind of latents"),
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
        ({"model_type": "new", "kv_lora_rank": 512, "n_routed_experts": 64}, "another kind of latents"),
        ({"model_type": "new", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "new"}, r"'new' cannot be served yet; supported: deepseek_v3, gemma2, .*smollm3"),
        ({}, "model type '' cannot be served yet"),
        # supported types that are something else after all
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "checkpoints in MXFP4 .* 4-bit numbers in blocks .* take a checkpoint in bfloat16",
        ),
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


def test_experts() -> None:
    """What is missing is as the configuration class has it; keys of other spellings are read."""
    said = BASE | {"num_hidden_layers": 5}
    qwen = spec_from_config(said | {"model_type": "qwen3_moe"})
    assert qwen.experts == ExpertsSpec(num_experts=128, top_k=8, width=768, layers=frozenset(range(5)))
    assert qwen.mlp_widths == (768,)
    some = {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts_per_tok": 3, "moe_intermediate_size": 90}
    for key in ("num_experts", "num_local_experts"):
        spec = spec_from_config(said | {"model_type": "qwen3_moe", key: 7} | some)
        assert spec.experts == ExpertsSpec(num_experts=7, top_k=3, width=90, layers=frozenset({1}))
        assert spec.mlp_widths == (1536, 90)
        assert spec.layer_weights(1) - spec.layer_weights(0) == 576 * (7 * (1 + 3 * 90) - 3 * 1536)
    assert spec_from_config(said | {"model_type": "qwen3_moe", "num_experts": 0}).experts is None
    gpt = spec_from_config(said | {"model_type": "gpt_oss", "num_local_experts": 4})
    assert gpt.experts == ExpertsSpec(num_experts=4, top_k=4, width=1536, layers=frozenset(range(5)), interleaved=True)
    assert gpt.windows == (128, None, 128, None, 128)
    deepseek = spec_from_config(said | {"model_type": "deepseek_v3", "n_shared_experts": 2})
    assert deepseek.experts == ExpertsSpec(
        num_experts=256, top_k=8, width=2048, layers=frozenset({3, 4}), shared_width=4096, float_router=True
    )
    assert deepseek.mlp_widths == (1536, 2048, 4096)
    with pytest.raises(ConfigError, match="n_group: 256 experts are no multiple of 5 groups"):
        spec_from_config(said | {"model_type": "deepseek_v3", "n_group": 5})
    with pytest.raises(ConfigError, match="n_group: 256 experts in 256 groups, which are chosen by their best two"):
        spec_from_config(said | {"model_type": "deepseek_v3", "n_group": 256})
    mixtral = spec_from_config(said | {"model_type": "mixtral"})
    assert mixtral.experts == ExpertsSpec(num_experts=8, top_k=2, width=1536, layers=frozenset(range(5)))
    with pytest.raises(ConfigError, match="num_experts_per_tok: 9 of 8 experts"):
        spec_from_config(said | {"model_type": "mixtral", "num_experts_per_tok": 9})


def test_latents() -> None:
    """Keys and values are cached expanded: as many KV heads as query heads, the wider of key and value for both."""
    config = BASE | {"model_type": "deepseek_v3", "num_key_value_heads": 1, "head_dim": 64}
    spec = spec_from_config(config)
    assert spec.latent == LatentSpec(query_rank=1536, kv_rank=512, rope=64, nope=128, value=128)
    assert (spec.num_kv_heads, spec.head_dim) == (9, 192)
    assert kv_spec(spec, tp_rank=1, tp_size=2, dtype="bfloat16", block_size=1).bytes_per_block == 30 * 2 * 4 * 192 * 2
    narrow = spec_from_config(config | {"q_lora_rank": None, "v_head_dim": 256})
    assert narrow.latent == LatentSpec(query_rank=None, kv_rank=512, rope=64, nope=128, value=256)
    assert narrow.head_dim == 256


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
    assert windows(model_type="qwen3_moe", sliding_window=7) == (None,) * 4
    assert windows(model_type="qwen3_moe", use_sliding_window=True) == (4096,) * 4
    assert windows(model_type="mixtral") == (None,) * 4
    assert windows(model_type="smollm3", use_sliding_window=True, sliding_window=7) == (None, None, None, 7)
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(model_type="gemma2", sliding_window=7, layer_types=kinds) == (None, 7, None, 7)
    for wrong in ({"layer_types": kinds[:3]}, {"layer_types": kinds, "sliding_window": None}):
        with pytest.raises(ConfigError, match=r"config\.json lacks or mistypes"):
            windows(model_type="gemma2", **wrong)
    for other in ("linear_attention", "chunked_attention", 5, None):
        for model_type in ("gemma2", "gemma3_text", "qwen2", "qwen3", "smollm3"):
            with pytest.raises(ConfigError, match=f"there is no {other!r} here"):
                windows(model_type=model_type, layer_types=[*kinds[:3], other], sliding_window=7)


@pytest.mark.parametrize(
    "name", ["num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [0, -1, "72", 7.5, True])
def test_sizes_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: {value!r} is no whole number"):
        spec_from_config(SMOLLM | {name: value})
