"""Every test fails if it leaves something behind: processes, threads, descriptors, memory files, temporary files.

The whole session runs with TMPDIR and XDG_STATE_HOME of its own, so whatever drumline writes there is seen. Processes
are told apart by their process group, which no process of drumline changes.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

GRACE_S = 5.0
OURS_TO_KEEP = ("pytest-of-", "torchinductor", "hypothesis")
"""Folders of the test tools themselves; they go with the session's TMPDIR."""


def _shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}


def _tmp() -> Path:
    return Path(os.environ["TMPDIR"])


def pytest_configure(config: pytest.Config) -> None:
    home = Path(tempfile.mkdtemp(prefix="dlt", dir="/tmp"))
    (home / "t").mkdir()
    config.stash[_home] = home
    os.environ["TMPDIR"] = str(home / "t")
    tempfile.tempdir = None
    os.environ["XDG_STATE_HOME"] = str(home / "state")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_finish() -> None:
    """The leak check collects garbage after each test; what the imports made need not be looked at each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    home = config.stash.get(_home, None)
    if home is not None:
        shutil.rmtree(home, ignore_errors=True)


_home = pytest.StashKey[Path]()


def _group() -> set[int]:
    """Live processes of our process group; zombies that someone will still collect are not counted."""
    mine = os.getpgid(0)
    found = set()
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == mine and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _descriptors() -> Counter[str]:
    """Number of open descriptors of each kind that drumline makes."""
    kinds: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        for kind in ("/memfd:", "socket:", "pipe:", "anon_inode:[pidfd]"):
            if target.startswith(kind):
                kinds[kind] += 1
    return kinds


def _left(before_pids: set[int], before_fds: Counter[str], before_threads: set[int], files: set[Path]) -> list[str]:
    gc.collect()
    left = []
    for pid in _group() - before_pids:
        try:
            process = psutil.Process(pid)
            left.append(f"process {pid} ({process.status()}): {' '.join(process.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    # "asyncio_N" belong to the executor of a loop that a fixture of wider scope keeps; they end with it
    left += [
        f"thread {t.name}"
        for t in threading.enumerate()
        if t.ident not in before_threads and not t.daemon and not t.name.startswith("asyncio_")
    ]
    left += [
        f"thread {t.name}" for t in threading.enumerate() if t.ident not in before_threads and "drumline" in t.name
    ]
    left += [f"{n - before_fds[kind]} x {kind}" for kind, n in _descriptors().items() if n > before_fds[kind]]
    left += [f"file {p}" for p in _tmp().iterdir() if p not in files and not p.name.startswith(OURS_TO_KEEP)]
    return left


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind_at_the_end() -> Iterator[None]:
    """What fixtures of wider scope keep alive for several tests is gone when the session ends."""
    yield from _checked()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fixtures of wider scope are made before this one, so what they keep alive counts as there already."""
    yield from _checked()


def _checked() -> Iterator[None]:
    before = _group(), _descriptors(), {t.ident for t in threading.enumerate() if t.ident is not None}
    shm = _shm()
    files = set(_tmp().iterdir())
    yield
    deadline = time.monotonic() + GRACE_S
    left = _left(*before, files)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)  # the kernel ends processes in its own time; there is no event for all of these at once
        left = _left(*before, files)
    now = _shm()
    left += [
        f"/dev/shm/{name}" for name in now - shm if "drumline" in name or name.startswith(("psm_", "sem.", "torch_"))
    ]
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left))
