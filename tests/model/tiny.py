"""Tiny random models with awkward shapes, written as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

COMMON = {"num_hidden_layers": 3, "max_position_embeddings": 256, "initializer_range": 0.25, "bos_token_id": 1}

SHAPES: dict[str, tuple[type, type, dict[str, Any]]] = {
    # 9 query heads over 3 KV heads, untied, bias everywhere, widths that nothing divides
    "llama": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "hidden_size": 72,
            "intermediate_size": 131,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 307,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    # as many KV as query heads, tied, no bias, another rotary embedding
    "llama-tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "hidden_size": 40,
            "intermediate_size": 61,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "vocab_size": 263,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # one KV head for all, bias on q, k, v only
    "qwen2": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "hidden_size": 56,
            "intermediate_size": 100,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "vocab_size": 301,
            "tie_word_embeddings": True,
        },
    ),
}


def make_tiny(folder: Path, shape: str, dtype: torch.dtype = torch.float32, **save: Any) -> Any:
    """Write a random model into ``folder``; the reference model in float32."""
    config_class, model_class, fields = SHAPES[shape]
    torch.manual_seed(len(shape))
    model = model_class(config_class(**(COMMON | fields))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases are made as zeros and norms as ones: nothing would notice them missing
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder, **save)
    return model.float()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
