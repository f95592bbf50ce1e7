"""Which models can be served, what their configuration classes take for missing keys, and why others cannot.

No torch, no transformers. Each entry of :data:`ARCHITECTURES` was tried for token equality with transformers, at
several TP sizes and as pipeline stages (tests/matrix). Everything else is refused by name, since a model that is split
wrongly answers fluently and wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drumline.model.expert_spec import MoeDefaults
from drumline.model.latent_spec import LatentDefaults


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A supported model type. Defaults are those of its configuration class in transformers."""

    class_name: str
    folder: str
    """Name of its folder in transformers."""
    num_kv_heads: int | None = None
    """If the key is missing; None: as many as query heads. A key with null always means as many as query heads."""
    head_dim: int | None = None
    """If the key is missing; None: hidden size over query heads."""
    max_positions: int = 2048
    tied: bool = False
    windows: str = "none"
    """Where the sliding window is said: ``none``, ``all`` (in every layer), ``all_or_none`` (``use_sliding_window``,
    in every layer), ``optional`` (``use_sliding_window`` and ``max_window_layers``), ``nope``
    (``use_sliding_window``, in layers without rope), ``alternating`` (each other layer, from the first on),
    ``pattern`` (all layers but each ``sliding_window_pattern``-th, 6th by default). ``layer_types`` goes before the
    last four."""
    window: int | None = None
    """If the key ``sliding_window`` is missing."""
    norms_all_heads: bool = False
    """Queries and keys are normalised over all heads at once."""
    gated_mlp: bool = True
    """The MLP has three matrices, not two."""
    experts: MoeDefaults | None = None
    """If layers have experts in place of an MLP."""
    latent: LatentDefaults | None = None
    """If queries, keys and values are made from latents (MLA)."""
    plan: Mapping[str, str] = field(default_factory=dict)
    """How modules are split of which the tensor-parallel plan in transformers does not say it (``loader.tp_plan``)."""


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(class_name="LlamaForCausalLM", folder="llama"),
    "mistral": Architecture(
        class_name="MistralForCausalLM",
        folder="mistral",
        num_kv_heads=8,
        max_positions=131072,
        windows="all",
        window=4096,
    ),
    "qwen2": Architecture(
        class_name="Qwen2ForCausalLM",
        folder="qwen2",
        num_kv_heads=32,
        max_positions=32768,
        windows="optional",
        window=4096,
    ),
    "qwen3": Architecture(
        class_name="Qwen3ForCausalLM",
        folder="qwen3",
        num_kv_heads=32,
        head_dim=128,
        max_positions=32768,
        windows="optional",
        window=4096,
    ),
    "phi3": Architecture(class_name="Phi3ForCausalLM", folder="phi3", max_positions=4096, windows="all"),
    "gemma2": Architecture(
        class_name="Gemma2ForCausalLM",
        folder="gemma2",
        num_kv_heads=4,
        head_dim=256,
        max_positions=8192,
        tied=True,
        windows="alternating",
        window=4096,
    ),
    "gemma3_text": Architecture(
        class_name="Gemma3ForCausalLM",
        folder="gemma3",
        num_kv_heads=4,
        head_dim=256,
        max_positions=131072,
        tied=True,
        windows="pattern",
        window=4096,
    ),
    "gpt_neox": Architecture(class_name="GPTNeoXForCausalLM", folder="gpt_neox", gated_mlp=False),
    "olmo2": Architecture(class_name="Olmo2ForCausalLM", folder="olmo2", norms_all_heads=True),
    "smollm3": Architecture(
        class_name="SmolLM3ForCausalLM",
        folder="smollm3",
        num_kv_heads=4,
        max_positions=32768,
        tied=True,
        windows="nope",
    ),
    "qwen3_moe": Architecture(
        class_name="Qwen3MoeForCausalLM",
        folder="qwen3_moe",
        num_kv_heads=4,
        max_positions=32768,
        windows="all_or_none",
        window=4096,
        experts=MoeDefaults(where="sparse_step", num_experts=128, top_k=8, width=768),
    ),
    "mixtral": Architecture(
        class_name="MixtralForCausalLM",
        folder="mixtral",
        num_kv_heads=8,
        max_positions=131072,
        windows="all",
        experts=MoeDefaults(where="all", num_experts=8, top_k=2),
    ),
    "gpt_oss": Architecture(
        class_name="GptOssForCausalLM",
        folder="gpt_oss",
        num_kv_heads=8,
        head_dim=64,
        max_positions=131072,
        windows="alternating",
        window=128,
        experts=MoeDefaults(where="all", num_experts=128, top_k=4, interleaved=True),
        plan={
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn.k_proj": "colwise",
            "layers.*.self_attn.v_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
        },
    ),
    "deepseek_v3": Architecture(
        class_name="DeepseekV3ForCausalLM",
        folder="deepseek_v3",
        max_positions=4096,
        latent=LatentDefaults(query_rank=1536, kv_rank=512, rope=64, nope=128, value=128),
        experts=MoeDefaults(
            where="after_dense",
            num_experts=256,
            top_k=8,
            width=2048,
            first_dense=3,
            shared=1,
            groups=8,
            float_router=True,
        ),
        plan={
            "layers.*.self_attn.q_proj": "colwise",
            "layers.*.self_attn.q_b_proj": "colwise",
            "layers.*.self_attn.kv_b_proj": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
        },
    ),
}
"""By ``model_type`` of config.json."""

_RECURRENT = (
    "it keeps a recurrent state for each sequence instead of keys and values of each token, and the cache here holds "
    "keys and values in blocks"
)
_HYBRID = (
    "some of its layers are not softmax attention (linear attention, state space or convolution) and keep a recurrent "
    "state for each sequence, which the block cache here cannot hold"
)
_EXPERTS = "it is a mixture of experts of a kind that cannot be split or routed here yet"
_LATENT = "its attention is of another kind of latents (MLA) than the one that is served, DeepSeek-V3's"
_ENCODER_DECODER = "it is an encoder-decoder: its decoder attends to an encoder's output, and only decoders are served"
_ENCODER = "it is an encoder without a language-model head: it generates nothing"
_MULTIMODAL = "it is multimodal: images, sound or video need parts of the model that are not served"
_ALIBI = "its attention adds biases by distance (ALiBi), which the attention here does not have"
_NO_PLAN = "transformers has no tensor-parallel plan for it, so nothing says how to split it"

_FAMILIES: Mapping[str, str] = {
    "mamba mamba2 falcon_mamba rwkv xlstm": _RECURRENT,
    "jamba bamba zamba zamba2 nemotron_h falcon_h1 granitemoehybrid recurrent_gemma lfm2 lfm2_moe qwen3_next "
    "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text minimax kimi_linear bailing_hybrid olmo_hybrid": _HYBRID,
    "qwen2_moe olmoe flex_olmo phimoe granitemoe glm4_moe glm4_moe_lite dbrx ernie4_5_moe "
    "hunyuan_v1_moe dots1 minimax_m2 jetmoe": _EXPERTS,
    "deepseek_v2 deepseek_v32 glm_moe_dsa longcat_flash minicpm3": _LATENT,
    "t5 mt5 umt5 longt5 switch_transformers bart mbart pegasus marian m2m_100 nllb-moe blenderbot led prophetnet "
    "whisper t5gemma seamless_m4t": _ENCODER_DECODER,
    "bert roberta distilbert xlm-roberta albert electra deberta deberta-v2 modernbert mpnet": _ENCODER,
    "gemma3n gemma4 gemma4_unified llava llava_next llava_onevision paligemma mllama llama4 qwen2_vl qwen2_5_vl "
    "qwen3_vl qwen3_vl_moe qwen2_audio qwen2_5_omni idefics idefics2 idefics3 smolvlm internvl mistral3 pixtral "
    "phi4_multimodal aya_vision chameleon kimi_k25 blip-2": _MULTIMODAL,
    "bloom mpt": _ALIBI,
    "gpt2 opt gpt_bigcode gptj gpt_neo codegen": _NO_PLAN,
}

REASONS: Mapping[str, str] = {
    "gemma3": (
        "it is a multimodal checkpoint (Gemma3ForConditionalGeneration) with a vision part that is not served; its "
        "text-only sizes have the model type gemma3_text and are"
    ),
    **{name: reason for names, reason in _FAMILIES.items() for name in names.split()},
}
"""Why a model type that many will try is refused."""


def why_refused(config: Mapping[str, Any]) -> str:
    """Why the model of a config.json whose type is unsupported cannot be served; empty if nothing tells.

    By name, and for names that nobody has written down by what the configuration mentions.
    """
    if reason := REASONS.get(str(config.get("model_type", ""))):
        return reason
    if config.get("is_encoder_decoder"):
        return _ENCODER_DECODER
    if any(key in config for key in ("vision_config", "audio_config", "image_token_id", "text_config")):
        return _MULTIMODAL
    kinds = [str(kind) for kind in config.get("layer_types") or config.get("layers_block_type") or ()]
    strange = sorted({kind for kind in kinds if kind not in ("full_attention", "sliding_attention", "attention")})
    if strange or any(key in config for key in ("linear_num_key_heads", "attn_layer_period", "mamba_d_state")):
        return _HYBRID + (f" (layers of type {', '.join(strange)})" if strange else "")
    if any(key in config for key in ("state_size", "ssm_cfg", "time_step_rank")):
        return _RECURRENT
    if config.get("kv_lora_rank"):
        return _LATENT
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")):
        return _EXPERTS
    return ""


def layer_windows(config: Mapping[str, Any], architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens (its own among them); None: full attention.

    0 is no window, as vLLM has it. ValueError if there are layers with a sliding window whose size nothing says.
    """
    how = architecture.windows
    window = config.get("sliding_window", architecture.window)
    if window is not None and window < 0:
        raise ValueError(f"sliding_window: {window} is no number of tokens")
    window = window or None
    if how in ("optional", "nope", "all_or_none") and not config.get("use_sliding_window", False):
        window = None
    if how == "none":
        return (None,) * num_layers
    if how in ("all", "all_or_none"):
        return (window,) * num_layers
    types = config.get("layer_types") or _default_layer_types(config, architecture, num_layers, window)
    if len(types) != num_layers:
        raise ValueError(f"layer_types: {len(types)} for {num_layers} layers")
    if other := [kind for kind in types if kind not in ("full_attention", "sliding_attention")]:
        raise ValueError(f"layer_types: there is no {other[0]!r} here, only full_attention and sliding_attention")
    if window is None and "sliding_attention" in types:
        raise ValueError("sliding_window: layers of sliding attention need one")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _default_layer_types(
    config: Mapping[str, Any], architecture: Architecture, num_layers: int, window: int | None
) -> list[str]:
    if architecture.windows == "optional":
        first = int(config.get("max_window_layers", 28)) if window is not None else num_layers
        sliding = [i >= first for i in range(num_layers)]
    elif architecture.windows == "nope":
        every = int(config.get("no_rope_layer_interval", 4))
        rope = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(num_layers)]
        sliding = [window is not None and not rope[i] for i in range(num_layers)]
    else:
        every = int(config.get("sliding_window_pattern", 6)) if architecture.windows == "pattern" else 2
        sliding = [(i + 1) % every != 0 for i in range(num_layers)]
    return ["sliding_attention" if here else "full_attention" for here in sliding]
