"""The module of a pipeline stage: a range of the model's layers, with the embedding or the head where they belong.

It is the transformers model with the rest taken out:

=========  ==================================  ============================================  ======================
stage      takes                               runs                                          gives
=========  ==================================  ============================================  ======================
only       token ids [T]                       embedding, all layers, norm, head             logits of kept tokens
first      token ids [T]                       embedding, its layers                         hidden states [T, H]
middle     hidden states [T, H]                its layers                                    hidden states [T, H]
last       hidden states [T, H]                its layers, norm, head                        logits of kept tokens
=========  ==================================  ============================================  ======================

What a stage has not is an ``nn.Identity``. Its layers are ``layers[0] ...`` and their attention has ``layer_idx``
0 ..., the place in the stage's own KV cache; what a layer is (sliding or full attention, with or without rope) still
follows from its number in the whole model, since layers are made before the others are taken away. If head and
embedding are one tensor, first and last stage both hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from drumline.parallel.shards import Range


@dataclass(frozen=True)
class Slice:
    """Which part of a model a module is."""

    layers: Range
    """Numbers of its layers in the whole model."""
    first: bool
    """Has the embedding."""
    last: bool
    """Has the final norm and the head."""

    @classmethod
    def of(cls, layers: Range | None, num_layers: int) -> Slice:
        """The slice with these of ``num_layers`` layers; None: the whole model. ValueError for an impossible range."""
        layers = Range(0, num_layers) if layers is None else layers
        if not 0 <= layers.start < layers.stop <= num_layers:
            raise ValueError(f"layers {layers.start}..{layers.stop} are no part of {num_layers} layers")
        return cls(layers, layers.start == 0, layers.stop == num_layers)


def slice_of(model: nn.Module) -> Slice:
    """The part of its model that a module of :func:`drumline.model.loader.load_model` is."""
    found: Any = model.drumline_slice
    assert isinstance(found, Slice)
    return found


def cut(model: Any, part: Slice) -> None:
    """Take out of a transformers model (on the meta device) what is not of the slice."""
    model.drumline_slice = part
    if part.first and part.last:
        return
    base, config = model.base_model, model.config
    kept = list(base.layers)[part.layers.start : part.layers.stop]
    for place, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = place
    base.layers = nn.ModuleList(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[part.layers.start : part.layers.stop]
    config.num_hidden_layers = len(kept)
    if not part.first:
        model.set_input_embeddings(nn.Identity())
    if not part.last:
        model.set_output_embeddings(nn.Identity())
        norm = next(name for name in ("norm", "final_layer_norm") if hasattr(base, name))
        setattr(base, norm, nn.Identity())


def checkpoint_name(name: str, part: Slice) -> str:
    """What a parameter of the slice's module is called in the checkpoint of the whole model."""
    head, found, tail = name.partition(".layers.")
    if not found:
        return name
    place, _, rest = tail.partition(".")
    return f"{head}.layers.{int(place) + part.layers.start}.{rest}"
