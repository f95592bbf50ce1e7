"""A tiny random Llama with a tokenizer and weights, made without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from tests.text.vocab import byte_level_folder

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 448, 48, 64, 2, 6, 3, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 32,
    "max_model_len": 256,
    "log_level": "warning",
}
"""Options that make a start quick and the pool small."""


def weights() -> dict[str, npt.NDArray[np.float32]]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return random.normal(0, 0.2, (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": ones,
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": ones.copy(),
            f"{name}.post_attention_layernorm.weight": ones.copy(),
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{name}.mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(FFN, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, FFN),
        }
    return tensors


def make_model(folder: Path) -> Path:
    byte_level_folder(folder)
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.7, "top_k": 40}))
    return folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(autouse=True, scope="module")
def start_warm(engines_start_warm: None) -> None:
    """See tests/conftest.py."""
