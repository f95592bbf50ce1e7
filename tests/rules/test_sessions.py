"""Two sessions at once (``make test``): each sees what its own tests leave, and that alone; ``alone`` is alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = """
import tests.conftest
from tests.conftest import *

tests.conftest.GRACE_S = 0.3
"""

COMMON = """
import contextlib, logging, os, pathlib, subprocess, time
import pytest

HERE = pathlib.Path(__file__).parent

def wait_for(name):
    deadline = time.monotonic() + 20
    while not (HERE / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

@contextlib.contextmanager
def noted(name):
    with open(HERE / "turns", "a") as file:
        file.write(f"{time.monotonic()} {name}+\\n")
    yield
    with open(HERE / "turns", "a") as file:
        file.write(f"{time.monotonic()} {name}-\\n")
"""

HOLDS = """
from common import *

left = []
shm = pathlib.Path(f"/dev/shm/psm_{os.getpid()}")

def test_holds():
    with subprocess.Popen(["sleep", "60"]) as process, shm.open("w"):
        try:
            (HERE / "holding").touch()
            wait_for("beside has ended")
        finally:
            process.kill()
            shm.unlink()

def test_leaves_a_process():
    left.append(subprocess.Popen(["sleep", "60"]))

def test_leaves_a_memory_file():
    left[0].kill()
    left[0].wait()
    left.append(shm.open("w"))  # open: of one that nobody has open, both sessions would say so

def test_leaves_nothing():
    left[1].close()
    shm.unlink()

@pytest.mark.alone
def test_alone():
    (HERE / "alone comes").touch()
    with noted("alone"):
        time.sleep(0.3)
    (HERE / "alone has ended").touch()
"""

BESIDE = """
from common import *

def test_beside():
    logging.warning("a lone surrogate: \\ud800")
    wait_for("holding")

def test_says_so():
    (HERE / "beside has ended").touch()

@pytest.mark.parametrize("number", range(60))
def test_turn(number):
    with noted(f"turn{number}"):
        if number == 59 or not (HERE / "alone has ended").exists():
            time.sleep(0.02)
"""


def test_two_sessions(tmp_path: Path) -> None:
    files = {"conftest": CONFTEST, "common": COMMON, "test_holds": HOLDS, "test_beside": BESIDE}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone\n")
    options = ["-n", "2", "--dist", "loadfile", "-rA", "-p", "no:cacheprovider", "-p", "no:asyncio", "--color=no"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_holds.py", "test_beside.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout + done.stderr
    errors = re.findall(r"^ERROR \S+::(\w+)", said, re.MULTILINE)
    assert errors == ["test_leaves_a_process", "test_leaves_a_memory_file"], said
    assert re.search(r"^\s*E?\s*process \d+ \(sleeping\): sleep 60$", said, re.MULTILINE), said
    assert re.search(r"^\s*E?\s*/dev/shm/psm_\d+$", said, re.MULTILINE), said
    assert "67 passed, 2 errors" in said, said
    turns = sorted(
        (float(at), name) for at, name in (line.split() for line in (tmp_path / "turns").read_text().splitlines())
    )
    names = [name for _, name in turns]
    assert ("alone+", "alone-") in pairwise(names), names  # nobody begins or ends in between
    assert names[-1] != "alone-", names  # the other one was at work before and after
    assert names[0] != "alone+", names
