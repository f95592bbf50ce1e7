"""Which forward runs a loaded model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from drumline.model import flat
from drumline.model.forward import Forward, ModuleForward
from drumline.model.lean import LeanForward

log = logging.getLogger(__name__)


def make_forward(model: Any, max_model_len: int, *, gathers: bool = False) -> Forward:
    """The fastest forward for a loaded model. All but the modules' own take its parameters over.

    ``gathers``: only forwards whose attention is that of ``model.attention``, as context parallelism needs it.
    """
    if model.config.model_type not in flat.KNOWN:
        log.info(
            "Models of type %s run on the modules of transformers: no fast forward knows them", model.config.model_type
        )
        return ModuleForward(model)
    if gathers:
        return LeanForward(model, max_model_len)
    weight = next(model.base_model.layers[0].parameters())
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.get_num_threads() == 1:
        try:
            from drumline.model.compiled import CompiledForward  # numba: only here is it needed
        except ImportError as error:
            log.warning("Steps take two to three times as long as they could: numba does not work here (%s)", error)
        else:
            return CompiledForward(model, max_model_len)
    return LeanForward(model, max_model_len)
