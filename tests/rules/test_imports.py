"""Who may import whom: the contracts in pyproject.toml, and what is really loaded."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import drumline

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers")
HTTP = ("fastapi", "starlette", "uvicorn", "zmq")


def loaded(script: str, *arguments: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after ``script``."""
    script += "\nimport json, sys; sys.stderr.write(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr))


def rooms(*names: str) -> str:
    """A script that imports every module of these rooms."""
    found = [
        module.name
        for module in pkgutil.walk_packages(drumline.__path__, "drumline.")
        if module.name.split(".")[1] in names and not module.name.endswith("__main__")
    ]
    assert found
    return "\n".join(f"import {name}" for name in found)


def test_contracts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_drumline_loads_nothing_else() -> None:
    assert [name for name in loaded("import drumline") if name.startswith("drumline")] == ["drumline"]


def test_the_executor_alone_costs_no_model_code_and_no_http() -> None:
    modules = loaded("import drumline.executor; from drumline import Executor, EngineConfig, Worker")
    assert not modules & {*HEAVY, *HTTP}
    assert not [name for name in modules if name.startswith(("drumline.model", "drumline.engine", "drumline.text"))]


def test_plan_imports_no_torch() -> None:
    script = "import sys; from drumline.cli.main import main; assert main(sys.argv[1:]) == 0"
    modules = loaded(script, "plan", "-tp", "2", "-dp", "4")
    assert not modules & {*HEAVY, *HTTP}


@pytest.mark.parametrize(
    "names",
    [
        ("errors", "config", "plan", "platforms", "transport", "worker", "executor", "engine"),
        ("text", "llm", "server", "cli"),
    ],
)
def test_no_module_of_these_rooms_loads_torch(names: tuple[str, ...]) -> None:
    assert not loaded(rooms(*names)) & set(HEAVY)


def test_pure_modules_load_no_torch() -> None:
    modules = loaded("import drumline.parallel.layout, drumline.parallel.shards, drumline.parallel.rendezvous")
    assert not modules & set(HEAVY)


@pytest.mark.parametrize("name", drumline.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(drumline, name)
    assert value is not None
    assert getattr(drumline, name) is value


def test_public_names_are_listed_and_others_are_not_there() -> None:
    assert set(drumline.__all__) <= set(dir(drumline))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = drumline.Nothing


def test_nobody_yields() -> None:
    """Since Linux 6.18 it forfeits the slice: who calls it in a loop beside a busy process stands still."""
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\bsched_yield\(|[\"']sched_yield[\"']", text), f"{path}: see parallel/meeting.py"
