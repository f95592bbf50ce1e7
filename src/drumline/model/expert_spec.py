"""What a model's ``config.json`` says about its experts: no torch, no transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drumline.parallel.shards import Range

_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_MIXTRAL = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"\.experts\.(\d+)\.w([123])\.")


@dataclass(frozen=True, kw_only=True)
class MoeDefaults:
    """How a model type says what experts it has; numbers are those of its configuration class in transformers."""

    where: str
    """Which layers have experts: ``all``, ``sparse_step`` (each ``decoder_sparse_step``-th, but not the
    ``mlp_only_layers``), ``after_dense`` (all but the first ``first_k_dense_replace``)."""
    num_experts: int
    top_k: int
    interleaved: bool = False
    """See :class:`ExpertsSpec`."""
    width: int | None = None
    """If the key ``moe_intermediate_size`` is missing; None: experts are as wide as ``intermediate_size`` says."""
    first_dense: int = 0
    """If the key ``first_k_dense_replace`` is missing."""
    shared: int = 0
    """If the key ``n_shared_experts`` is missing, which makes one MLP of so many experts' width for all tokens."""
    groups: int = 1
    """If the key ``n_group`` is missing."""
    float_router: bool = False
    """See :class:`ExpertsSpec`."""


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Experts of a model."""

    num_experts: int
    """Of a layer, E."""
    top_k: int
    """Experts of a token."""
    width: int
    """Intermediate size of one expert, I."""
    layers: frozenset[int]
    """Numbers of the layers that have experts; others have one MLP."""
    interleaved: bool = False
    """As GPT-OSS has them: fused tensors [E, H, 2 I] with gate and up in turn, and biases."""
    shared_width: int = 0
    """Intermediate size of the MLP beside the experts, for all tokens; 0: there is none."""
    float_router: bool = False
    """The router is in float32 whatever the compute type (its choice is by sums of scores that are close)."""

    def weights(self, hidden_size: int) -> int:
        """Number of weights in the matrices of one layer's router, experts and shared experts."""
        return hidden_size * (self.num_experts * (1 + 3 * self.width) + 3 * self.shared_width)


@dataclass(frozen=True)
class ExpertShare:
    """What of a layer's experts a rank has: of ``experts`` the ``columns`` of their width.

    ``experts`` are slots (``parallel.experts``) in the model's order: behind the last expert comes the first one again.
    """

    experts: Range
    columns: Range

    @classmethod
    def of_ep(cls, spec: ExpertsSpec, slots: Range) -> ExpertShare:
        """The experts of these slots, whole."""
        return cls(slots, Range(0, spec.width))


def name_of_today(name: str) -> str:
    """Name of a tensor with experts of Mixtral called as those of other models are."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return _MIXTRAL_EXPERT.sub(lambda found: f".experts.{found[1]}.{_MIXTRAL[found[2]]}.", name)


def read_experts(config: Mapping[str, Any], defaults: MoeDefaults | None, num_layers: int) -> ExpertsSpec | None:
    """The experts that a config.json describes; None if no layer has any. ValueError if they cannot be."""
    if defaults is None:
        return None
    key = next((key for key in _COUNT_KEYS if config.get(key) is not None), "")
    count = int(config[key]) if key else defaults.num_experts
    if not count and defaults.where == "sparse_step":
        return None  # as its class in transformers reads it
    layers = _layers(config, defaults, num_layers)
    if not layers:
        return None
    if count < 1:
        raise ValueError(f"{key}: {count}, but {len(layers)} layers are made of experts, so there must be 1 at least")
    top_k = int(config.get("num_experts_per_tok", defaults.top_k))
    if not 1 <= top_k <= count:
        raise ValueError(f"num_experts_per_tok: {top_k} of {count} experts")
    groups = int(config.get("n_group", defaults.groups) or 1)
    if count % groups:
        raise ValueError(f"n_group: {count} experts are no multiple of {groups} groups")
    if defaults.where == "after_dense" and count < 2 * groups:
        raise ValueError(f"n_group: {count} experts in {groups} groups, which are chosen by their best two")
    if defaults.width is None:
        width = int(config["intermediate_size"])
    else:
        width = int(config.get("moe_intermediate_size", defaults.width))
    return ExpertsSpec(
        num_experts=count,
        top_k=top_k,
        width=width,
        layers=layers,
        interleaved=defaults.interleaved,
        float_router=defaults.float_router,
        shared_width=width * int(config.get("n_shared_experts", defaults.shared) or 0) if defaults.shared else 0,
    )


def _layers(config: Mapping[str, Any], defaults: MoeDefaults, num_layers: int) -> frozenset[int]:
    if defaults.where == "all":
        return frozenset(range(num_layers))
    if defaults.where == "after_dense":
        return frozenset(range(int(config.get("first_k_dense_replace", defaults.first_dense)), num_layers))
    step, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    if step < 1:
        raise ValueError(f"decoder_sparse_step: {step}; every so many layers one has experts, so it is 1 at least")
    return frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
