"""Experts of a model in place of those of transformers, and where their weights are in checkpoints.

Checkpoints have a tensor for each matrix of each expert, or the same fused over experts as transformers has it in
memory; which of both is seen by their names. Here they are fused always, and a rank reads only its part: of all
experts a range of the width (TP), or some experts whole. Names of other spellings (Mixtral's) become those of today as
files are opened (``weights``).

=====================================  =================  =====================================================
tensor                                 shape              goes to
=====================================  =================  =====================================================
``experts.3.gate_proj.weight``         [I, H]             ``gate_up_proj[3, :I]``
``experts.3.up_proj.weight``           [I, H]             ``gate_up_proj[3, I:]``
``experts.3.down_proj.weight``         [H, I]             ``down_proj[3]``
``experts.gate_up_proj``               [E, 2 I, H]        ``gate_up_proj``
``experts.down_proj``                  [E, H, I]          ``down_proj``
=====================================  =================  =====================================================
"""

from __future__ import annotations

from typing import Any

import torch

from drumline.model.expert_spec import ExpertShare, ExpertsSpec
from drumline.model.experts import Experts, MoeBlock, gating_of
from drumline.model.layers import TPGroup
from drumline.model.spec import ModelSpec
from drumline.model.weights import Part, Piece, WeightSource


def put_experts(model: Any, spec: ModelSpec, dtype: torch.dtype, group: TPGroup) -> dict[str, ExpertShare]:
    """Put this rank's experts into a model (on the meta device). By name of each experts module what of them it has.

    Here it is decided how experts are shared.
    """
    if spec.experts is None:
        return {}
    share = ExpertShare.of_tp(spec.experts, group.rank_in_group, group.size)
    shares: dict[str, ExpertShare] = {}
    for name, block in list(model.named_modules()):
        if not hasattr(block, "experts"):
            continue
        experts = Experts(share.experts.size, spec.hidden_size, share.columns.size, gating_of(block.experts), dtype)
        model.set_submodule(name, MoeBlock(block, experts, group))
        shares[f"{name}.experts"] = share
    return shares


def expert_pieces(name: str, stored: str, share: ExpertShare, spec: ModelSpec, source: WeightSource) -> list[Piece]:
    """Where the parameters of the experts module ``name`` come from, which the checkpoint calls ``stored``."""
    assert spec.experts is not None
    if source.has(f"{stored}.gate_up_proj"):
        return _fused(name, stored, share, spec.experts, spec.hidden_size)
    return _each(name, stored, share, spec.experts, spec.hidden_size)


def _each(name: str, stored: str, share: ExpertShare, spec: ExpertsSpec, hidden: int) -> list[Piece]:
    """A tensor for each matrix of each expert."""
    columns, width = share.columns, share.columns.size
    rows = (spec.width, hidden), Part((spec.width, hidden), 0, (columns,))
    across = (hidden, spec.width), Part((hidden, spec.width), 1, (columns,))
    pieces = []
    for place, expert in enumerate(range(*share.experts)):
        for leaf, target, index, (shape, part) in (
            ("gate_proj", "gate_up_proj", (place, slice(0, width)), rows),
            ("up_proj", "gate_up_proj", (place, slice(width, 2 * width)), rows),
            ("down_proj", "down_proj", (place,), across),
        ):
            pieces.append(Piece(f"{name}.{target}", f"{stored}.{expert}.{leaf}.weight", shape, part, index))
    return pieces


def _fused(name: str, stored: str, share: ExpertShare, spec: ExpertsSpec, hidden: int) -> list[Piece]:
    """Tensors over all experts."""
    gate, experts = share.columns, share.experts
    gate_up, down = (spec.num_experts, 2 * spec.width, hidden), (spec.num_experts, hidden, spec.width)
    parts = {
        "gate_up_proj": Part(gate_up, 1, (gate, gate.shifted(spec.width)), experts),
        "down_proj": Part(down, 2, (gate,), experts),
    }
    return [Piece(f"{name}.{leaf}", f"{stored}.{leaf}", part.full, part) for leaf, part in parts.items()]
