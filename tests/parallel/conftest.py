"""Runs a program that forks ranks, and keeps what they returned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Ran:
    """What the ranks of all functions of a program returned."""

    def __init__(self, folder: Path, console: str) -> None:
        self.folder = folder
        self.console = console

    def codes(self, function: str) -> list[int]:
        return json.loads((self.folder / f"{function}-codes").read_text())  # type: ignore[no-any-return]

    def __getitem__(self, function: str) -> list[dict[str, Any]]:
        """One for each rank; {} for one that died."""
        files = [self.folder / f"{function}-{rank}" for rank in range(len(self.codes(function)))]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.fixture(scope="session")
def run_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """Runs a module with a folder and more arguments; fails with what it printed if it fails."""

    def run(module: str, *more: str) -> Ran:
        folder = tmp_path_factory.mktemp("ranks")
        command = [sys.executable, "-m", module, str(folder), *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=115, check=False)
        assert done.returncode == 0, done.stderr
        return Ran(folder, done.stdout + done.stderr)

    return run
