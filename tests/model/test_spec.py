from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import ConfigError, UnsupportedModelError
from drumline.model.spec import (
    kv_spec,
    preload_modules,
    read_spec,
    resolve_dtype,
    resolve_max_model_len,
    spec_from_config,
)

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
    for length in (0, 8193):
        with pytest.raises(ConfigError, match="--max-model-len"):
            resolve_max_model_len(length, spec)
