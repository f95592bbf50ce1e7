#!/usr/bin/env python3
"""docs/equality.md from what the cells of tests/matrix/test_table.py recorded.

usage: equality_table.py DOCUMENT.md RESULTS.xml [RESULTS.xml ...]

RESULTS.xml: pytest's ``--junitxml``; of a cell that is in several the last one counts. Exits with 1, and writes
nothing, if a cell failed or is missing, or if over all tests more than one sequence in a hundred was too close to call;
of a run with no cell of the table it says so and leaves the document alone.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

NAMES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "gpt_oss": "GPT-OSS",
    "deepseek_v3": "DeepSeek-V3",
    "default": "default model",
}


def main(document: Path, results: list[Path]) -> int:
    """Exit status."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    outcomes: dict[tuple[str, str], str] = {}
    others = Counter[str]()
    for case in (case for path in results for case in ElementTree.parse(path).iter("testcase")):
        said = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        if "row" not in said:
            others[outcome] += 1
            others.update({name: int(said[name]) for name in ("equal", "excused") if name in said})
            continue
        cells[said["row"], said["column"]] = said
        outcomes[said["row"], said["column"]] = outcome
    equal, excused = (others[name] + sum(int(c.get(name, 0)) for c in cells.values()) for name in ("equal", "excused"))
    print(f"{equal} sequences equal, {excused} excused")
    if excused > (equal + excused) / 100:
        print("more than 1 % were excused")
        return 1
    if not cells:
        print("no cell of the table ran")
        return 0
    failed = [f"{row}, {column}: {outcomes[row, column]}" for row, column in cells if outcomes[row, column] != "passed"]
    rows = [row for row in NAMES if any(row == found for found, _ in cells)]
    columns = sorted({column for _, column in cells}, key=_place)
    missing = [f"{row}, {column}: did not run" for row in NAMES for column in columns if (row, column) not in cells]
    if failed or missing:
        print(*failed, *missing, sep="\n")
        return 1
    document.write_text(text(cells, rows, columns, others), encoding="utf-8")
    print(f"{document}: {len(cells)} cells")
    return 0


def _place(column: str) -> tuple[int, ...]:
    """TP alone first, then with PP, experts, PCP, DCP."""
    sizes = {name: int(size) for name, size in re.findall(r"(\w+) (\d+)", column)}
    inner = (sizes.get(name, 1) for name in ("DCP", "PCP", "DP"))
    return (*inner, "EP" in column, sizes.get("PP", 1), sizes.get("TP", 1))


def text(
    cells: dict[tuple[str, str], dict[str, str]], rows: list[str], columns: list[str], others: Counter[str]
) -> str:
    """The document."""
    notes: dict[str, list[str]] = defaultdict(list)
    for (row, column), said in cells.items():
        if "refused" in said:
            notes[re.sub(r"\s+", " ", said["refused"])].append(f"{NAMES[row]}, {column}")
    numbers = {cell: number for number, which in enumerate(notes.values(), 1) for cell in which}

    def shown(row: str, column: str) -> str:
        said = cells[row, column]
        if "refused" in said:
            return f"refused ({numbers[f'{NAMES[row]}, {column}']})"
        return said["equal"] + (f" + {said['excused']} excused" if said["excused"] != "0" else "")

    versions = ", ".join(sorted({said["transformers"] for said in cells.values()}))
    compared = sum(int(said.get("equal", 0)) for said in cells.values())
    excused = sum(int(said.get("excused", 0)) for said in cells.values())
    rest = (
        f"In the same run {others['passed']} other tests passed, {others['equal']} sequences equal and"
        f" {others['excused']} excused."
    )
    return "\n".join(
        [
            "# Token equality",
            "",
            "Made by `make matrix` (tests/matrix/test_table.py, scripts/equality_table.py): each cell is one engine,",
            "or for DP two of them in lockstep, with a model of the row split as the column says. The number is that",
            "of sequences whose greedy tokens are those of the model in transformers, in float32; *excused* are those",
            "with two logits closer than 1e-4 of their standard deviation, at most 1 % of all. Models are tiny random",
            "ones with widths and head counts that nothing divides and four layers; the default model is the real one.",
            "",
            f"{compared} sequences equal, {excused} excused, none different. Python {platform.python_version()},"
            f" transformers {versions}, {platform.machine()}, {os.cpu_count()} CPUs.",
            *([rest] if others["passed"] else []),
            "",
            "| | " + " | ".join(NAMES[row] for row in rows) + " |",
            "|---" * (len(rows) + 1) + "|",
            *(f"| {column} | " + " | ".join(shown(row, column) for row in rows) + " |" for column in columns),
            "",
            "Refused at the start, with these words:",
            "",
            *(f"{number}. {words}" for number, words in enumerate(notes, 1)),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
