"""The forward of a step on one rank: ids and positions in, logits out.

:class:`ModuleForward` runs the transformers module as it is. It serves every architecture, and is what faster ways to
run the same weights are compared with.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from drumline.model.attention import AttentionBatch


class Forward(Protocol):
    """Computes one step of this rank's part of the model."""

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        """[len(keep), this rank's part of the vocabulary] float32 logits for the tokens at the places ``keep`` [S].

        ``ids`` and ``positions`` [T] int64: the rows of the step, packed.
        """


class ModuleForward:
    """Runs a model of transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`Forward`."""
        output = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            ctx=batch,
            return_dict=True,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits
