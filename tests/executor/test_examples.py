"""The examples run as programs, and a program that never shuts down ends quietly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("own_worker", ["words counted by each rank: [104, 104, 100, 100]"]),
        (
            "worker_calls",
            [
                "rank 2: Worker_TP2, ready, a process of its own: True",
                "all answer: [136, 132, 132]",
                "only rank 1 answers: 132",
                "folded into one: 400",
                "a function, which gets the worker: [0, 1, 4]",
                "arguments of each rank's own: [3, 6, 9]",
                "an output that is finished later: from rank 2, in its own time",
                "done yet? False",
                "  told by the callback: [0, 1, 2]",
                "the last of a thousand that waited behind it: 136",
                "given up: True",
                "and its answer is dropped when it comes",
                "awaited: [136, 268, 400]",
                "raised ValueError: there is nothing to count, on 3 ranks",
                "  told by the aggregator: ranks [0, 2] had answered when rank 1 failed",
                "raised on rank 1: there is nothing to count",
                "and goes on: 2",
            ],
        ),
        ("own_executor", ["chosen: ThreadExecutor", "one call: [10, 11, 12]", "five futures: [15, 18, 21, 24, 27]"]),
    ],
)
def test_example(name: str, lines: list[str]) -> None:
    done = run(str(ROOT / "examples" / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    for line in lines:
        assert line in done.stdout.splitlines(), done.stdout


def test_own_worker_is_short() -> None:
    lines = (ROOT / "examples" / "own_worker.py").read_text().splitlines()
    assert sum(bool(line.strip()) and not line.startswith('"""') for line in lines) <= 20


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_a_program_that_never_shuts_down(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from drumline.executor import Executor\n"
        "from tests.executor.conftest import BACKENDS, configure\n"
        f"config = configure('{backend}', BACKENDS['{backend}'], log_level='warning')\n"
        f"os.environ['DRUMLINE_TEST_SHUTDOWN'] = '{tmp_path}/rank'\n"
        "executor = Executor.get_class(config)(config)\n"
        "future = executor.collective_rpc('sleep', (0.1,), non_block=True)\n"
        "print(executor.collective_rpc('note', (1,)))\n"
    )
    done = run("-W", "error", str(script))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.glob("rank-*"))) == (1 if backend == "uni" else 3)


def test_the_layer_alone_imports_little() -> None:
    code = (
        "import sys, drumline.executor, drumline.executor.mp, drumline.executor.uni, drumline.worker.main\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'zmq', 'ray', 'drumline.model', 'drumline.engine',"
        " 'drumline.server', 'drumline.text', 'drumline.llm'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert run("-c", code).stdout == "[]\n"
