"""Which forward runs a loaded model."""

from __future__ import annotations

import logging
from typing import Any

from drumline.model import flat
from drumline.model.forward import Forward, ModuleForward
from drumline.model.lean import LeanForward

log = logging.getLogger(__name__)


def make_forward(model: Any, max_model_len: int) -> Forward:
    """The fastest forward for a loaded model. All but the modules' own take its parameters over."""
    if model.config.model_type not in flat.KNOWN:
        log.info(
            "Models of type %s run on the modules of transformers: no fast forward knows them", model.config.model_type
        )
        return ModuleForward(model)
    return LeanForward(model, max_model_len)
