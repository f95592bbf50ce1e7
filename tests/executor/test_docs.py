"""docs/executor.md says what is true: its blocks run, and print what they say they print."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

from drumline import errors
from drumline.config import ProcessConfig
from drumline.executor import Executor

ROOT = Path(__file__).parents[2]


def test_the_blocks_of_the_page(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "executor.md").read_text(), re.DOTALL)
    files = [block for block in blocks if block.startswith("# file: ")]
    assert len(files) == 1
    for block in files:
        (tmp_path / block.splitlines()[0].removeprefix("# file: ")).write_text(block)
    program = "\n".join(block for block in blocks if block not in files)
    expected = re.findall(r"print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert len(expected) == program.count("print(") - 1  # an aggregator's failed() prints, and is not called
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == expected


def test_the_page_names_what_exists() -> None:
    text = (ROOT / "docs" / "executor.md").read_text()
    named = {name for name in re.findall(r"`(\w+Error)`", text) if not hasattr(builtins, name)}
    assert named
    assert all(hasattr(errors, name) for name in named)
    process = ProcessConfig()
    for name in ("long_wait_s", "rpc_backlog_bytes", "failure_grace_s", "execute_timeout_s"):
        assert f"`{name}`" in text
        assert hasattr(process, name)
    parameters = [name for name in inspect.signature(Executor.collective_rpc).parameters if name != "self"]
    assert all(f"`{name}`" in text for name in parameters)
