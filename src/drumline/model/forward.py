"""The forward of a step on one rank: ids and positions in, logits out; on a pipeline stage hidden states too.

:class:`ModuleForward` runs the transformers module as it is. It serves every architecture, and is what faster ways to
run the same weights are compared with.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from drumline.model.attention import AttentionBatch
from drumline.model.slices import slice_of


class Forward(Protocol):
    """Computes one step of this rank's part of the model."""

    gathers: bool
    """Its attention gathers blocks: on CPUs copies of decoding rows in one piece (``model.rows``) make it faster."""

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        """[len(keep), this rank's part of the vocabulary] float32 logits for the tokens at the places ``keep`` [S].

        ``ids`` and ``positions`` [T] int64: the rows of the step, packed. A pipeline stage after the first gets hidden
        states [T, H] in the model's type in place of ``ids``; one before the last ignores ``keep`` and gives hidden
        states [T, H].

        The very same objects may come again, with other numbers in them (``model.steady``). Then what was returned for
        them before is not looked at any more.
        """


class ModuleForward:
    """Runs a model of transformers, whole or a stage of it (``slices``)."""

    gathers = True

    def __init__(self, model: Any) -> None:
        self._model = model
        self._part = slice_of(model)

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, keep: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`Forward`."""
        inputs = {"input_ids" if self._part.first else "inputs_embeds": ids[None]}
        common = {"position_ids": positions[None], "use_cache": False, "ctx": batch, "return_dict": True}
        if not self._part.last:
            hidden: torch.Tensor = self._model.base_model(**inputs, **common).last_hidden_state[0]
            return hidden
        logits: torch.Tensor = self._model(**inputs, **common, logits_to_keep=keep).logits[0].float()
        return logits
