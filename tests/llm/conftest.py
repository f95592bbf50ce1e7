"""A tiny random Llama with a tokenizer: made without torch, its weights come from ``--load-format dummy``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.vocab import byte_level_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 448,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: dict[str, Any] = {
    "load_format": "dummy",
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 32,
    "max_model_len": 256,
    "log_level": "warning",
}
"""Options that make a start quick and the pool small."""


def make_model(folder: Path) -> Path:
    byte_level_folder(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.7, "top_k": 40}))
    return folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny_llama"))
