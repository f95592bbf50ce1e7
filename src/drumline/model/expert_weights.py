"""Experts of a model in place of those of transformers, and where their weights are in checkpoints.

Checkpoints have a tensor for each matrix of each expert, or the same fused over experts as transformers has it in
memory; which of both is seen by their names. Here they are fused always, and a rank reads only its part: of all
experts a range of the width (TP), or some whole (EP). Names of other spellings (Mixtral's) become those of today as
files are opened (``weights``).

=====================================  =================  =====================================================
tensor                                 shape              goes to
=====================================  =================  =====================================================
``experts.3.gate_proj.weight``         [I, H]             ``gate_up_proj[3, :I]``
``experts.3.up_proj.weight``           [I, H]             ``gate_up_proj[3, I:]``
``experts.3.down_proj.weight``         [H, I]             ``down_proj[3]``
``experts.gate_up_proj``               [E, 2 I, H]        ``gate_up_proj``
``experts.down_proj``                  [E, H, I]          ``down_proj``
``experts.gate_up_proj`` (GPT-OSS)     [E, H, 2 I]        ``gate_up_proj``, gate and up apart, transposed
``experts.gate_up_proj_bias``          [E, 2 I]           ``gate_up_proj_bias``, gate and up apart
``experts.down_proj`` (GPT-OSS)        [E, I, H]          ``down_proj``, transposed
``experts.down_proj_bias``             [E, H]             ``down_proj_bias``, on the first rank of the group
=====================================  =================  =====================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drumline.model.expert_parallel import ExpertSharing, ParallelExperts
from drumline.model.expert_spec import ExpertShare, ExpertsSpec
from drumline.model.experts import Experts, MoeBlock, ScoredMoeBlock, gating_of
from drumline.model.layers import TPGroup
from drumline.model.spec import ModelSpec
from drumline.model.weights import Part, Piece, WeightSource
from drumline.parallel.shards import Range

Arrange = Callable[[torch.Tensor], torch.Tensor]


def put_experts(
    model: Any, spec: ModelSpec, dtype: torch.dtype, group: TPGroup, sharing: ExpertSharing | None = None
) -> dict[str, ExpertShare]:
    """Put this rank's experts into a model (on the meta device). By name of each experts module what of them it has.

    Here it is decided how experts are shared: as ``sharing`` says, or each over the ranks of the TP group.
    """
    if spec.experts is None:
        return {}
    interleaved = spec.experts.interleaved
    if sharing is None:
        share = spec.expert_share(group.rank_in_group, group.size)
    else:
        share = ExpertShare.of_ep(spec.experts, sharing.slots)
    shares: dict[str, ExpertShare] = {}
    for name, block in list(model.named_modules()):
        if not hasattr(block, "experts"):
            continue
        if spec.experts.float_router:
            block.gate.to(torch.float32)  # as of transformers 5.24 it is by itself
        gating, size = gating_of(block.experts), (spec.hidden_size, share.columns.size)
        if sharing is None:
            first = group.rank_in_group == 0
            experts = Experts(share.experts.size, *size, gating, dtype, biases=interleaved, down_bias=first)
        else:
            experts = ParallelExperts(sharing, spec.experts.num_experts, *size, gating, dtype, biases=interleaved)
        model.set_submodule(name, (ScoredMoeBlock if interleaved else MoeBlock)(block, experts, group))
        shares[f"{name}.experts"] = share
    return shares


def expert_pieces(name: str, stored: str, share: ExpertShare, spec: ModelSpec, source: WeightSource) -> list[Piece]:
    """Where all that an experts module ``name`` can have comes from; the checkpoint calls the module ``stored``."""
    assert spec.experts is not None
    if spec.experts.interleaved:
        return _interleaved(name, stored, share, spec.experts, spec.hidden_size)
    if source.has(f"{stored}.gate_up_proj"):
        return _fused(name, stored, share, spec.experts, spec.hidden_size)
    return _each(name, stored, share, spec.experts, spec.hidden_size)


def _each(name: str, stored: str, share: ExpertShare, spec: ExpertsSpec, hidden: int) -> list[Piece]:
    """A tensor for each matrix of each expert."""
    columns, width = share.columns, share.columns.size
    rows = (spec.width, hidden), Part((spec.width, hidden), 0, (columns,))
    across = (hidden, spec.width), Part((hidden, spec.width), 1, (columns,))
    pieces = []
    for place, expert in enumerate(slot % spec.num_experts for slot in range(*share.experts)):
        for leaf, target, index, (shape, part) in (
            ("gate_proj", "gate_up_proj", (place, slice(0, width)), rows),
            ("up_proj", "gate_up_proj", (place, slice(width, 2 * width)), rows),
            ("down_proj", "down_proj", (place,), across),
        ):
            pieces.append(Piece(f"{name}.{target}", f"{stored}.{expert}.{leaf}.weight", shape, part, index))
    return pieces


def _stack(experts: Range, count: int) -> tuple[Range, Arrange | None]:
    """Which of ``count`` experts to read for slots, and how to bring them into their order if that is not theirs."""
    start = experts.start % count
    if start + experts.size <= count:
        return Range(start, start + experts.size), None
    index = torch.arange(*experts) % count
    return Range(0, count), lambda tensor: tensor[index]


def _after(first: Arrange | None, then: Arrange | None) -> Arrange | None:
    if first is None or then is None:
        return first or then
    return lambda tensor: then(first(tensor))


def _fused(name: str, stored: str, share: ExpertShare, spec: ExpertsSpec, hidden: int) -> list[Piece]:
    """Tensors over all experts."""
    gate, (experts, order) = share.columns, _stack(share.experts, spec.num_experts)
    gate_up, down = (spec.num_experts, 2 * spec.width, hidden), (spec.num_experts, hidden, spec.width)
    parts = {
        "gate_up_proj": Part(gate_up, 1, (gate, gate.shifted(spec.width)), experts),
        "down_proj": Part(down, 2, (gate,), experts),
    }
    return [Piece(f"{name}.{leaf}", f"{stored}.{leaf}", part.full, part, arrange=order) for leaf, part in parts.items()]


def _interleaved(name: str, stored: str, share: ExpertShare, spec: ExpertsSpec, hidden: int) -> list[Piece]:
    """Tensors over all experts as GPT-OSS has them."""
    count, columns, both = spec.num_experts, share.columns, share.columns.scaled(2)
    experts, order = _stack(share.experts, count)
    leaves: dict[str, tuple[Part, Arrange | None]] = {
        "gate_up_proj": (Part((count, hidden, 2 * spec.width), 2, (both,), experts), _transposed_halves),
        "gate_up_proj_bias": (Part((count, 2 * spec.width), 1, (both,), experts), _halves),
        "down_proj": (Part((count, spec.width, hidden), 1, (columns,), experts), _transposed),
        "down_proj_bias": (Part((count, hidden), 0, (experts,)), None),
    }
    return [
        Piece(f"{name}.{leaf}", f"{stored}.{leaf}", part.full, part, arrange=_after(order, arrange))
        for leaf, (part, arrange) in leaves.items()
    ]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _halves(tensor: torch.Tensor) -> torch.Tensor:
    """[E, 2 n, ...] with gate and up in turn to gate, then up."""
    return torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)


def _transposed_halves(tensor: torch.Tensor) -> torch.Tensor:
    return _halves(tensor.transpose(1, 2))
