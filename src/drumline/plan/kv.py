"""What a worker says about its KV cache, and what it is told about it."""

from __future__ import annotations

import msgspec


class KVSpec(msgspec.Struct, kw_only=True):
    """KV cache of one rank: what one block costs there."""

    num_layers: int
    """Layers whose KV this rank holds."""
    num_kv_heads: int
    """KV heads of this rank, replicated ones included."""
    head_dim: int
    dtype: str
    """Name of the torch dtype, such as ``float32``."""
    block_size: int
    """Tokens that one block stands for; with decode context parallelism this rank holds its share of them."""
    bytes_per_block: int
    """Keys and values of all layers of this rank for one block, in bytes."""


class KVConfig(msgspec.Struct, kw_only=True):
    """What one rank is told to allocate."""

    num_blocks: int
    block_size: int
    """As in :class:`KVSpec`."""
