"""Tiny random models with awkward shapes, written as Hugging Face folders.

Each feature of an architecture is set so that it changes answers (``FEATURES``; tests/model/test_tiny.py holds that):
windows shorter than prompts, soft caps that bite, query scales that are not the usual ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from drumline.model import flat

COMMON: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 256, "initializer_range": 0.25}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # 9 query heads over 3 KV heads, untied, bias everywhere, widths that nothing divides
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
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
        "LlamaConfig",
        "LlamaForCausalLM",
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
    # heads wider than hidden size over heads, a window in all layers, linear rope
    "mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        {
            "hidden_size": 50,
            "intermediate_size": 93,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "vocab_size": 311,
            "tie_word_embeddings": False,
            "sliding_window": 21,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        },
    ),
    # one KV head for all, bias on q, k, v only
    "qwen2": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "hidden_size": 56,
            "intermediate_size": 100,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "vocab_size": 301,
            "tie_word_embeddings": True,
        },
    ),
    # a window in the layers after the first
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "hidden_size": 48,
            "intermediate_size": 77,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 299,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 18,
            "max_window_layers": 1,
        },
    ),
    # norms of each head, yarn
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            "hidden_size": 44,
            "intermediate_size": 85,
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "vocab_size": 293,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # query, key and value in one tensor, gate and up in one; a window; rope on three quarters of a head
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "hidden_size": 72,
            "intermediate_size": 101,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 283,
            "tie_word_embeddings": False,
            "sliding_window": 25,
            "partial_rotary_factor": 0.75,
        },
    ),
    # two sets of rotary frequencies; all sequences up to 256 tokens take the short one
    "phi3-longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "hidden_size": 40,
            "intermediate_size": 64,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "vocab_size": 281,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.1, 1.3, 1.6, 2.0],
                "long_factor": [2.0, 3.0, 5.0, 8.0],
            },
        },
    ),
    # windows in every other layer, soft caps of scores and logits, its own query scale, scaled embedding
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "hidden_size": 42,
            "intermediate_size": 90,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 12,
            "vocab_size": 271,
            "sliding_window": 19,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 15.0,
        },
    ),
    # norms of each head, two rotary embeddings, one KV head
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "hidden_size": 56,
            "intermediate_size": 75,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "vocab_size": 277,
            "sliding_window": 17,
            "query_pre_attn_scalar": 3,
            "final_logit_softcapping": 12.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    # query, key and value of each head side by side; layer norms; attention and MLP side by side; rope on half a head
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 60,
            "intermediate_size": 103,
            "num_attention_heads": 5,
            "vocab_size": 269,
            "tie_word_embeddings": False,
            "rotary_pct": 0.5,
        },
    ),
    # one after the other, tied, no bias in attention
    "gpt_neox-serial": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 72,
            "intermediate_size": 64,
            "num_attention_heads": 9,
            "vocab_size": 313,
            "tie_word_embeddings": True,
            "use_parallel_residual": False,
            "attention_bias": False,
        },
    ),
    # norms over all heads, after attention and MLP
    "olmo2": (
        "Olmo2Config",
        "Olmo2ForCausalLM",
        {
            "hidden_size": 72,
            "intermediate_size": 87,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 289,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    # each second layer without rope, and with a window
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {
            "hidden_size": 48,
            "intermediate_size": 71,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 307,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 22,
        },
    ),
    # 8 experts of which 2 for a token, an MLP in the layer between, a width that nothing divides, weights that add up
    # to 1, bias in attention, a window in all layers
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 44,
            "intermediate_size": 67,
            "moe_intermediate_size": 37,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "num_attention_heads": 10,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "vocab_size": 293,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    # experts in each second layer, 5 of them of which 3 for a token, weights as they come, untied
    "qwen3_moe-sparse": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "hidden_size": 54,
            "intermediate_size": 59,
            "moe_intermediate_size": 83,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "output_router_logits": True,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "vocab_size": 271,
            "tie_word_embeddings": False,
        },
    ),
    # other names in checkpoints, experts in all layers, a window
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {
            "hidden_size": 45,
            "intermediate_size": 53,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 283,
            "tie_word_embeddings": False,
            "sliding_window": 23,
            "head_dim": 6,
        },
    ),
    # gate and up in turn in fused tensors, biases everywhere, attention sinks, a window in every other layer, yarn;
    # numbers so large that the gating clamps
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "hidden_size": 50,
            "intermediate_size": 43,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "vocab_size": 257,
            "tie_word_embeddings": False,
            "sliding_window": 19,
            "initializer_range": 0.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # attention with latents, values narrower than keys; an MLP in the first layer; experts in groups, of which some are
    # chosen first; shared experts
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "hidden_size": 52,
            "intermediate_size": 75,
            "moe_intermediate_size": 29,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "q_lora_rank": 23,
            "kv_lora_rank": 17,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 10,
            "v_head_dim": 9,
            "vocab_size": 261,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # queries without a latent, values wider than keys, halves rotated, weights that do not add up to 1, tied
    "deepseek_v3-wide": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "hidden_size": 48,
            "intermediate_size": 66,
            "moe_intermediate_size": 34,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "num_attention_heads": 7,
            "num_key_value_heads": 7,
            "q_lora_rank": None,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 5,
            "v_head_dim": 11,
            "vocab_size": 279,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "routed_scaling_factor": 1.0,
        },
    ),
}

SECOND_SHAPES = {"qwen3_moe-sparse", "deepseek_v3-wide"}
"""Those that ``make matrix`` tries: others of their type have the same modules."""

FLAT_SHAPES = [shape for shape, (name, _, _) in SHAPES.items() if getattr(transformers, name).model_type in flat.KNOWN]
"""Those that the fast forwards know (``drumline.model.flat``)."""

FEATURES: dict[str, list[dict[str, Any]]] = {
    "llama": [],
    "llama-tied": [{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}],
    "mistral": [
        {"sliding_window": None},
        {"sliding_window": 22},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
    "qwen2": [],
    "qwen2-window": [{"use_sliding_window": False}, {"sliding_window": 17}, {"max_window_layers": 2}],
    "qwen3": [{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}],
    "phi3": [{"sliding_window": None}, {"sliding_window": 24}, {"partial_rotary_factor": 0.5}],
    "phi3-longrope": [{"original_max_position_embeddings": 64}],
    "gemma2": [
        {"sliding_window": 18},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"query_pre_attn_scalar": 12},
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
    ],
    "gemma3": [
        {"sliding_window": 16},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        {"query_pre_attn_scalar": 10},
        {"final_logit_softcapping": None},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100000.0},
            }
        },
    ],
    "gpt_neox": [{"use_parallel_residual": False}, {"rotary_pct": 1.0}],
    "gpt_neox-serial": [{"use_parallel_residual": True}],
    "olmo2": [],
    "smollm3": [{"no_rope_layers": [1, 1, 1]}, {"sliding_window": 21}, {"use_sliding_window": False}],
    "qwen3_moe": [
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 3},
        {"use_sliding_window": False},
        {"sliding_window": 21},
    ],
    "qwen3_moe-sparse": [{"norm_topk_prob": True}, {"num_experts_per_tok": 2}],
    "deepseek_v3": [
        {"n_group": 1, "topk_group": 1},
        {"topk_group": 1, "num_experts_per_tok": 2},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.0},
        {"rope_interleave": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
    "deepseek_v3-wide": [{"norm_topk_prob": True}, {"num_experts_per_tok": 3}, {"rope_interleave": True}],
    "gpt_oss": [
        {"num_experts_per_tok": 2},
        {"sliding_window": 18},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ],
    "mixtral": [{"num_experts_per_tok": 1}, {"sliding_window": None}, {"sliding_window": 24}],
}
"""Changes of the configuration of each shape that must change its answers."""


def make_config(shape: str, **changes: Any) -> Any:
    """The configuration of a shape."""
    config_class, _, fields = SHAPES[shape]
    return getattr(transformers, config_class)(**(COMMON | fields | changes))


def plain(model: Any) -> Any:
    """A reference model with the plain attention and the plain experts of transformers: others lack features, or take
    no odd widths."""
    model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def read_reference(folder: Path, shape: str) -> Any:
    """The reference model of a folder."""
    return plain(getattr(transformers, SHAPES[shape][1]).from_pretrained(folder))


def make_model(shape: str, **changes: Any) -> Any:
    """The reference model of a shape in float32, random but the same in each process.

    It is a plain one (:func:`plain`).
    """
    config = make_config(shape, **changes)
    torch.manual_seed(len(shape))
    model = getattr(transformers, SHAPES[shape][1])(config).eval()
    plain(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases are made as zeros and norms as ones: nothing would notice them missing.
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def make_tiny(
    folder: Path, shape: str, dtype: torch.dtype = torch.float32, max_shard_size: str = "50GB", **changes: Any
) -> Any:
    """Write a random model into ``folder``; the reference model in float32. ``changes`` of its configuration."""
    model = make_model(shape, **changes)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model.float()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if changes.get(key, 0) is not None}))
