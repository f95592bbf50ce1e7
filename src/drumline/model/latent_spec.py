"""Attention whose keys and values are made from a latent (MLA): what a model's ``config.json`` says of it. No torch.

Keys and values are expanded before they are cached, so the cache is that of any other model, with as many KV heads as
query heads. Of each head the key has a part without rope, made from the latent, and a part with rope, which is the same
in all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LatentDefaults:
    """What keys mean that are missing: numbers of the configuration class in transformers."""

    query_rank: int
    kv_rank: int
    rope: int
    nope: int
    value: int


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Widths of an attention with latents."""

    query_rank: int | None
    """Of the latent of queries; None: queries are made from hidden states."""
    kv_rank: int
    """Of the latent of keys and values."""
    rope: int
    """Of a key's part that is rotated."""
    nope: int
    """Of a key's part that is not."""
    value: int
    """Of a head's values."""

    @property
    def key(self) -> int:
        """Of a head's queries and keys."""
        return self.nope + self.rope

    def weights(self, hidden_size: int, num_heads: int) -> int:
        """Number of weights in the matrices of one layer's attention."""
        rank = self.query_rank
        queries = hidden_size * num_heads * self.key
        if rank is not None:
            queries = rank * (hidden_size + num_heads * self.key)
        latent = hidden_size * (self.kv_rank + self.rope)
        return queries + latent + num_heads * (self.kv_rank * (self.nope + self.value) + self.value * hidden_size)


def read_latent(config: Mapping[str, Any], defaults: LatentDefaults | None) -> LatentSpec | None:
    """What a config.json says; None if the model type has no latents."""
    if defaults is None:
        return None
    rank = config.get("q_lora_rank", defaults.query_rank)
    return LatentSpec(
        query_rank=None if rank is None else int(rank),
        kv_rank=int(config.get("kv_lora_rank", defaults.kv_rank)),
        rope=int(config.get("qk_rope_head_dim", defaults.rope)),
        nope=int(config.get("qk_nope_head_dim", defaults.nope)),
        value=int(config.get("v_head_dim") or defaults.value),
    )
