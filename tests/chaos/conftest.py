from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.tree import Tree
from tests.model.tiny import edit_config, make_tiny
from tests.text.vocab import byte_level_folder

figures: list[tuple[str, str, float | None, float]] = []
"""Phase, what was done, seconds to the report, seconds until nothing was left."""


rows: list[tuple[str, ...]] = []
"""Of the matrix's table."""
HEAD = (
    "phase",
    "who",
    "what",
    "recovery",
    "outcome",
    "what the client saw",
    "s to the report",
    "s until nothing was left",
)


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("chaos")
    make_tiny(folder, "llama")
    edit_config(folder, max_position_embeddings=4096)
    return byte_level_folder(folder, vocab_size=300)


@pytest.fixture
def tree(model: Path) -> Iterator[Callable[..., Tree]]:
    made: list[Tree] = []

    def make(phase: str, victim: str = "", recovery: Sequence[str] = ("off",), **more: Any) -> Tree:
        tree = Tree.__new__(Tree)
        made.append(tree)
        tree.__init__(model, phase, victim, recovery, **more)  # type: ignore[misc]
        return tree

    yield make
    for tree in made:
        tree.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if rows:
        terminalreporter.section("faults")
        for line in table([HEAD, *rows]):
            terminalreporter.write_line(line)
    if not figures:
        return
    terminalreporter.section("seconds to the report, until all is gone")
    for phase, what, report, end in figures:
        terminalreporter.write_line(f"{phase:16} {what:24} {'' if report is None else f'{report:.2f}':>6} {end:6.2f}")
