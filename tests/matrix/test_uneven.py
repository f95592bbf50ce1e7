"""Token equality where nothing divides: odd shapes at every TP size from 1 to 8, TP weights, 7 layers on 3 stages.

As tests/matrix/test_equality.py, whose helpers and rules it uses: one engine a cell, requests together and alone, every
output compared with the model's own greedy run. Shapes: 28 query heads over 4 KV heads, 1 KV head for all (so ranks
hold copies of it), a vocabulary of 50277, MLP widths that nothing divides, tied and untied, biases on every projection.

``make matrix`` runs all cells; ``make test`` those of SUBSET.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline import SamplingParams
from tests.matrix.test_equality import Record, count_in, make_prompts, started, tokens_of
from tests.model.equality import Tally, compare_greedy
from tests.model.tiny import make_tiny

BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "28-over-4": BIASES
    | {
        "hidden_size": 84,
        "intermediate_size": 131,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 50277,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    },
    "8-over-1-tied": BIASES
    | {
        "hidden_size": 72,
        "intermediate_size": 127,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "vocab_size": 263,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
    "7-layers": BIASES | {"num_hidden_layers": 7, "intermediate_size": 61, "tie_word_embeddings": True},
}
"""Changes of the tiny Llama. Other names are those of tests/model/tiny.py."""

CELLS: list[tuple[str, int, int, tuple[int, ...]]] = [
    *(("28-over-4", tp, 1, ()) for tp in range(1, 9)),
    ("28-over-4", 2, 1, (3, 1)),
    ("28-over-4", 3, 1, (2, 1, 1)),
    ("28-over-4", 5, 1, (3, 1, 1, 1, 1)),
    ("28-over-4", 3, 2, (1, 1, 2)),
    *(("8-over-1-tied", tp, 1, ()) for tp in range(1, 9)),
    ("8-over-1-tied", 3, 1, (5, 2, 1)),
    ("8-over-1-tied", 2, 2, (1, 3)),
    ("7-layers", 1, 3, ()),
    ("7-layers", 2, 3, (2, 1)),
    ("7-layers", 3, 2, ()),
    ("7-layers", 1, 7, ()),
    ("qwen3_moe", 3, 1, (2, 1, 1)),
    ("mixtral", 2, 2, (1, 2)),
    ("gpt_oss", 3, 1, (1, 1, 2)),
    ("deepseek_v3", 2, 1, (2, 1)),
]
"""Model, TP size, PP size, TP weights."""
SUBSET = {("28-over-4", 3, 1, (2, 1, 1)), ("8-over-1-tied", 7, 1, ())}
OPTIONS = {"max_num_batched_tokens": 37}
"""Prompts in chunks of odd sizes."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder and reference model by name, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            shape, changes = ("llama", MODELS[name]) if name in MODELS else (name, {})
            made[name] = folder, make_tiny(folder, shape, **changes)
        return made[name]

    return get


@pytest.mark.parametrize(
    ("model", "tp", "pp", "weights"),
    [
        pytest.param(*cell, marks=[] if cell in SUBSET else [pytest.mark.matrix, pytest.mark.timeout(600)])
        for cell in CELLS
    ],
)
def test_greedy(models: Any, model: str, tp: int, pp: int, weights: tuple[int, ...], record_property: Record) -> None:
    folder, reference = models(model)
    prompts = make_prompts(reference.config.vocab_size, 12, 50)
    params = [SamplingParams(temperature=0, max_tokens=20 - i % 5, ignore_eos=True) for i in range(len(prompts))]
    tally = Tally()
    with started(str(folder), tp, pp, OPTIONS | ({"tp_weights": weights} if weights else {})) as llm:
        for i, got in enumerate(tokens_of(llm, prompts, params)):
            assert len(got) == params[i].max_tokens
            tally.add(compare_greedy(reference, prompts[i], got), f"together {i}")
        for i in (0, 5):
            tally.add(compare_greedy(reference, prompts[i], tokens_of(llm, [prompts[i]], params[i])[0]), f"alone {i}")
    count_in(tally, record_property)
