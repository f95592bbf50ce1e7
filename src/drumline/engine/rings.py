"""How large the rings between the engine core and its workers must be: what a client asks for never breaks a step.

A message may wrap over all slots of a ring but not be larger than it (``transport.ring``). Plans carry prompts, and
what a request says about tokens of the vocabulary; answers carry log-probabilities. The defaults are enough for nearly
everything. Long contexts, large vocabularies and ``--max-logprobs`` can need more: then there are more slots. Memory of
a ring is taken as it is touched.
"""

from __future__ import annotations

from dataclasses import replace

from drumline.config import EngineConfig
from drumline.engine.admission import MAX_SCORED, MAX_SCORED_VALUES, MAX_START_BYTES
from drumline.model.spec import ModelSpec

_TOKEN = 5
"""Most bytes of a token id in msgpack."""
_LOGPROB = _TOKEN + 9
"""The same of a token id and a number."""
_ROW = 64
"""More than a row of a plan or an answer has besides."""


def largest_plan(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that a plan can have: the starts that the scheduler puts into one, and one that is alone too large."""
    length = config.model.max_model_len or spec.default_max_model_len
    tokens = 4 * (length + length // config.cache.block_size + 1)  # and its blocks
    # logit_bias, allowed_token_ids, and tokens that end an output: each may name the whole vocabulary
    asked = spec.vocab_size * (_LOGPROB + 2 * _TOKEN)
    return tokens + asked + MAX_START_BYTES + config.scheduler.max_num_seqs * _ROW + 65536


def largest_answer(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that an answer can have: log-probabilities of all rows, and of as many prompt tokens as one plan scores."""
    most = config.model.max_logprobs
    if most < 0 or most > spec.vocab_size:
        most = spec.vocab_size
    scored = min(MAX_SCORED * most, MAX_SCORED_VALUES + most)
    rows = config.scheduler.max_num_seqs
    return (rows * most + scored) * _LOGPROB + (rows + MAX_SCORED) * _ROW + 65536


def with_rings(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The configuration with as many slots as any plan and any answer needs, at least those asked for."""
    process = config.process

    def slots(asked: int, slot_bytes: int, needed: int) -> int:
        return max(asked, needed // slot_bytes + 2)

    return replace(
        config,
        process=replace(
            process,
            mq_slots=slots(process.mq_slots, process.mq_slot_bytes, largest_plan(config, spec)),
            mq_answer_slots=slots(process.mq_answer_slots, process.mq_answer_slot_bytes, largest_answer(config, spec)),
        ),
    )
