"""Rings between the engine core and its workers are as large as what clients may ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from drumline.config import EngineConfig, ModelConfig, ProcessConfig, SchedulerConfig
from drumline.engine.admission import MAX_SCORED, MAX_SCORED_VALUES
from drumline.engine.rings import largest_answer, largest_plan, with_rings
from drumline.model.spec import ModelSpec, read_spec
from drumline.plan.sampling import SlotSampling
from drumline.plan.step import PromptLogprobs, SlotStart, StepOutput, TokenLogprobs, encode, pack


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(fields))
    return read_spec(tmp_path)


def test_the_defaults_are_enough_for_most(spec: ModelSpec) -> None:
    config = EngineConfig()
    assert with_rings(config, spec).process == config.process


def test_long_contexts_and_many_log_probabilities_get_more(spec: ModelSpec) -> None:
    config = EngineConfig(model=ModelConfig(max_logprobs=-1), process=ProcessConfig(mq_slots=2))
    process = with_rings(config, replace(spec, max_positions=2_000_000)).process
    assert process.mq_slots * process.mq_slot_bytes > 8_000_000
    assert process.mq_answer_slots * process.mq_answer_slot_bytes > config.scheduler.max_num_seqs * 49152 * 8


def test_what_is_held_for_the_largest_is_larger(spec: ModelSpec) -> None:
    rows = 8
    config = EngineConfig(model=ModelConfig(max_logprobs=-1), scheduler=SchedulerConfig(max_num_seqs=rows))
    ids = tuple(range(spec.vocab_size))
    entry = TokenLogprobs(-1.0 / 3, 49152, list(ids), [-1.0 / 3] * len(ids))
    scored = min(MAX_SCORED, MAX_SCORED_VALUES // (len(ids) + 1))
    answer = StepOutput(
        5, pack([1] * rows), pack([1] * rows), [entry] * rows, [PromptLogprobs(255, 8000, [entry] * scored)]
    )
    assert len(encode(answer)) < largest_answer(config, spec)
    sampling = SlotSampling(
        bias_ids=ids, bias_values=tuple(1 / 3 for _ in ids), allowed_ids=ids, end_ids=ids, bad_words=(ids[-1024:],)
    )
    start = SlotStart(255, "r" * 64, pack([49151] * 8192), 8191, sampling)
    assert len(msgspec.msgpack.encode(start)) < largest_plan(config, spec)
