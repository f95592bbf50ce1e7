"""The table of docs/equality.md: every architecture under every kind of parallelism, over the whole road.

Rows are models, columns ways to split them. In a cell one engine answers some requests at once and some alone, and
every output is compared with the model's own greedy run as promise 6 of the design has it. A cell that cannot be is
refused at the start, with the reason. EP x DP are two engines in lockstep, driven by the test.

``make matrix`` runs all cells and makes the table of what they recorded (scripts/equality_table.py); ``make test``
those of SUBSET. What else can go wrong (preemptions, prefix hits, odd chunks, sampling, moving experts, odd shapes) is
tried by the other modules here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from transformers import AutoModelForCausalLM

from drumline import LLM, SamplingParams
from drumline.config import ModelConfig
from drumline.errors import ConfigError
from drumline.model.resolve import resolve
from tests.matrix.test_equality import Record, count_in, make_prompts, tokens_of
from tests.model.equality import Tally, compare_greedy
from tests.model.ranks import RankHost
from tests.model.test_expert_parallel import Engines, configured
from tests.model.tiny import make_tiny


class Column(NamedTuple):
    """A way to split a model."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    dp: int = 1
    ep: bool = False

    def __str__(self) -> str:
        sizes = zip(("TP", "PP", "PCP", "DCP", "DP"), self[:5], strict=True)
        split = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "TP 1"
        return f"{split}, EP" if self.ep else split


KV_HEADS = {
    "llama": 3,
    "qwen2": 1,
    "qwen3": 2,
    "mixtral": 3,
    "qwen3_moe": 2,
    "gpt_oss": 3,
    "deepseek_v3": 9,
    "default": 3,
}
"""Rows, with the number of their KV heads."""
CHANGES: dict[str, dict[str, int]] = {
    "qwen2": {"num_attention_heads": 9, "hidden_size": 72},
    "deepseek_v3": {"num_attention_heads": 9, "num_key_value_heads": 9},
}
"""Of the tiny models: a query head at least for each of eight ranks."""
WITH_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
COLUMNS = [
    *(Column(tp=tp) for tp in range(1, 9)),
    *(Column(pp=pp) for pp in (2, 3, 4)),
    Column(tp=2, pp=2),
    Column(tp=3, pp=2),
    Column(tp=2, ep=True),
    Column(tp=3, ep=True),
    Column(tp=2, dp=2, ep=True),
    Column(pcp=2),
    *(Column(tp=tp, dcp=2) for tp in (2, 4, 6)),
    Column(tp=2, pcp=2, dcp=2),
]
SUBSET = {("llama", Column(tp=2, dcp=2)), ("qwen2", Column(tp=2, ep=True))}


def refusal(model: str, column: Column) -> str:
    """What the reason must contain where a cell cannot be; empty where it can."""
    if column.ep and model not in WITH_EXPERTS:
        return "has no experts to spread over ranks"
    beside = column.dcp // column.pcp  # TP ranks of a DCP group: they must hold the same KV heads
    if beside > 1 and KV_HEADS[model] > 1 and column.tp % (KV_HEADS[model] * beside):
        return "would hold different KV heads"
    return ""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and reference model by name, made once. Four layers, so that each of four stages has one."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made and name == "default":
            path = Path(resolve(ModelConfig()).path)
            made[name] = path, AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
        elif name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, make_tiny(folder, name, num_hidden_layers=4, **CHANGES.get(name, {}))
        return made[name]

    return get


@pytest.mark.table
@pytest.mark.parametrize(
    ("model", "column"),
    [
        pytest.param(
            model, column, marks=[] if (model, column) in SUBSET else [pytest.mark.matrix, pytest.mark.timeout(600)]
        )
        for model in KV_HEADS
        for column in COLUMNS
    ],
    ids=str,
)
def test_cell(models: Any, model: str, column: Column, record_property: Record) -> None:
    folder, reference = models(model)
    record_property("row", model)
    record_property("column", str(column))
    record_property("transformers", transformers.__version__)
    reason = refusal(model, column)
    if reason:
        with pytest.raises(ConfigError, match=reason) as refused, _started(folder, column):
            pass
        record_property("refused", str(refused.value))
        return
    tally = _in_lockstep(folder, reference, column) if column.dp > 1 else _served(folder, reference, column, model)
    count_in(tally, record_property)


def _started(folder: Path, column: Column) -> LLM:
    return LLM(
        str(folder),
        tensor_parallel_size=column.tp,
        pipeline_parallel_size=column.pp,
        prefill_context_parallel_size=column.pcp,
        decode_context_parallel_size=column.dcp,
        enable_expert_parallel=column.ep,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        kv_cache_memory_bytes=2**25,
        max_num_batched_tokens=37,  # chunks of odd sizes
    )


def _served(folder: Path, reference: Any, column: Column, model: str) -> Tally:
    count, longest, most = (6, 30, 10) if model == "default" else (12, 50, 20)
    prompts = make_prompts(reference.config.vocab_size, count, longest)
    params = [SamplingParams(temperature=0, max_tokens=most - i % 5, ignore_eos=True) for i in range(count)]
    tally = Tally()
    with _started(folder, column) as llm:
        for i, got in enumerate(tokens_of(llm, prompts, params)):
            assert len(got) == params[i].max_tokens
            tally.add(compare_greedy(reference, prompts[i], got), f"together {i}")
        for i in (0, 5):
            tally.add(compare_greedy(reference, prompts[i], tokens_of(llm, [prompts[i]], params[i])[0]), f"alone {i}")
    return tally


def _in_lockstep(folder: Path, reference: Any, column: Column) -> Tally:
    with closing(RankHost()) as host:
        engines = Engines(host, configured(folder, data_parallel_size=column.dp, tensor_parallel_size=column.tp))
        engines.add(0, reference.config.vocab_size, seed=1)
        engines.run()
        engines.add(1, reference.config.vocab_size, seed=2)
        engines.run()
        tally = Tally()
        for request in engines.requests:
            assert request.done
            tally.add(compare_greedy(reference, request.prompt, request.outputs, request.sampling))
        host.stop()
    return tally
