"""docs/message-queue.md says what is true: its blocks run, and print what they say they print. And the example runs."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drumline import errors
from drumline.transport import MessageQueue, RemoteOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "message-queue.md").read_text()


def run(script: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["several_processes", "program"])
def test_the_blocks_of_the_page(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    files = [block for block in blocks if block.startswith("# file: ")]
    assert len(files) == 1
    program = files[0] if name == "several_processes" else "\n".join(block for block in blocks if block not in files)
    expected = re.findall(r"print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert len(expected) == program.count("print(") > 0
    (tmp_path / f"{name}.py").write_text(program)
    assert run(tmp_path / f"{name}.py") == expected


def test_the_page_names_what_exists() -> None:
    named = {name for name in re.findall(r"`(\w+Error)`", PAGE) if not hasattr(builtins, name)}
    assert len(named) > 2
    assert all(hasattr(errors, name) for name in named)
    parameters = inspect.signature(MessageQueue).parameters
    assert all(re.search(rf"\b{name}\b", PAGE) for name in (*parameters, *RemoteOptions.__dataclass_fields__))
    defaults = {name: parameters[name].default for name in ("slot_bytes", "slots", "arena_bytes")}
    assert defaults == {"slot_bytes": 16384, "slots": 64, "arena_bytes": 64 << 20}


def test_the_example() -> None:
    lines = run(ROOT / "examples" / "message_queue.py")
    assert lines[:3] == [f"{who}: total 45000000" for who in ("local reader 0", "local reader 1", "remote reader 0")]
    assert re.fullmatch(
        r"queue: no room within 1 s: local reader 0( \(pid \.\.\.\))? has not read [45] message.*", lines[3]
    )
    assert lines[4:] == ["queue: local reader 0 (pid ...) has died"]
