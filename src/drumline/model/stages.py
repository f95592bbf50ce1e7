"""Which layers each pipeline stage has, and what that weighs: arithmetic on the spec. No torch.

A step of decoding reads every weight of a stage once (a full batch needs all experts), and the keys and values of the
tokens before, so what is read is what a layer costs. How many tokens there are before depends on the load: a middling
one is assumed (``SEQUENCES`` of ``CONTEXT`` tokens, or of a layer's window if that is shorter). The head is a matrix
like any other and costs what it weighs, which for a small model with a large vocabulary is many layers; the embedding
is looked up, which costs next to nothing.
"""

from __future__ import annotations

from drumline.config import ParallelConfig
from drumline.model.spec import ModelSpec
from drumline.parallel.shards import Range, layer_partition, pipeline_split

SEQUENCES = 4
"""Sequences of a micro-batch whose keys and values a step is taken to read."""
CONTEXT = 1024
"""Tokens of each of them."""


def stage_layers(spec: ModelSpec, parallel: ParallelConfig) -> tuple[Range, ...]:
    """Layers of each stage: as ``--pp-layer-partition`` says, or so that the slowest stage is as fast as can be.

    ConfigError if there are more stages than layers, or the partition does not fit the model.
    """
    stages = parallel.pipeline_parallel_size
    if parallel.pp_layer_partition:
        return layer_partition(spec.num_layers, stages, parallel.pp_layer_partition)
    return pipeline_split(layer_costs(spec), 0.0, float(spec.vocabulary_weights), stages)


def layer_costs(spec: ModelSpec) -> list[float]:
    """Numbers that a step reads in each layer: its weights, and keys and values of a middling load."""
    of_token = 2 * spec.num_kv_heads * spec.head_dim
    windows = spec.windows or (None,) * spec.num_layers
    reach = (CONTEXT if window is None else min(window, CONTEXT) for window in windows)
    return [float(spec.layer_weights(layer) + SEQUENCES * tokens * of_token) for layer, tokens in enumerate(reach)]


def stage_weights(spec: ModelSpec, parallel: ParallelConfig) -> tuple[int, ...]:
    """Number of weights of each stage, all its TP ranks together (norms and biases left out).

    A tied embedding is on the first stage and once more, as the head, on the last.
    """
    stages = stage_layers(spec, parallel)
    weights = [sum(spec.layer_weights(layer) for layer in range(*layers)) for layers in stages]
    weights[0] += spec.vocabulary_weights
    if not spec.tied or len(stages) > 1:
        weights[-1] += spec.vocabulary_weights
    return tuple(weights)
