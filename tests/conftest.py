"""Every test fails if it leaves something behind: processes, threads, descriptors, memory files, temporary files.

The whole session runs with TMPDIR and XDG_STATE_HOME of its own, so whatever drumline writes there is seen. Processes
are told apart by their process group, which no process of drumline changes.

``make test`` runs two sessions at once (pytest-xdist), each with folders and a process group of its own, so each sees
only what its own tests leave. /dev/shm is the machine's: what processes of the other session have open there is theirs;
of what nobody has open both say so.
Tests marked ``alone`` (those that measure the machine) run while no other test does.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

from drumline.llm.warm import warm_start
from drumline.processes.client import originals
from drumline.processes.warm import WarmStart

GRACE_S = 5.0
OURS_TO_KEEP = ("pytest-of-", "torchinductor", "hypothesis")
"""Folders of the test tools themselves; they go with the session's TMPDIR."""
TURN_S = 300.0
"""How long a test waits for its turn: the other session's test has a limit of its own, which is far shorter."""


settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("DRUMLINE_HYPOTHESIS", "fixed"))
"""``fixed``: the same examples in each run. ``search`` (make search): others each time; what it finds becomes an
``@example``."""


def _shm() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*")}


def _tmp() -> Path:
    return Path(os.environ["TMPDIR"])


def pytest_configure(config: pytest.Config) -> None:
    home = Path(tempfile.mkdtemp(prefix="dlt", dir="/tmp"))
    (home / "t").mkdir()
    config.stash[_home] = home
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        os.setpgid(0, 0)
        config.stash[_turns] = Turns(Path(worker["turns"]))
    os.environ["TMPDIR"] = str(home / "t")
    tempfile.tempdir = None
    os.environ["XDG_STATE_HOME"] = str(home / "state")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a session that is one of several where they take turns."""
    node.workerinput["turns"] = str(node.config.stash[_home])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Wait for the test's turn, before its time limit begins."""
    turns = item.config.stash.get(_turns, None)
    if turns is None:
        return (yield)
    with turns.take(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What goes from session to console goes as UTF-8, which a lone surrogate in a log line has none of."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data if data.isascii() else data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {key: _encodable(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(map(_encodable, data))
    return data


def pytest_collection_finish() -> None:
    """What the imports made need not be looked at whenever garbage is collected."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    home = config.stash.get(_home, None)
    if home is not None:
        shutil.rmtree(home, ignore_errors=True)


class Turns:
    """Lets any tests of all sessions run at once, or one alone.

    Two file locks: ``room`` is shared by those that run, or held by the one alone; ``door`` is held by whoever comes
    next, so that one who waits for an empty room is not passed for ever. A session that dies lets go of both.
    """

    def __init__(self, folder: Path) -> None:
        self._door = os.open(folder / "door", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self._room = os.open(folder / "room", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)

    @contextmanager
    def take(self, *, alone: bool) -> Iterator[None]:
        """One test's turn. TimeoutError after TURN_S."""
        deadline = time.monotonic() + TURN_S
        self._lock(self._door, fcntl.LOCK_EX, deadline)
        try:
            self._lock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, deadline)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)  # not by closing: forked children may hold copies

    def _lock(self, fd: int, how: int, deadline: float) -> None:
        while True:
            try:
                return fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no turn for this test within {TURN_S:.0f} s") from None
                time.sleep(0.01)


_home = pytest.StashKey[Path]()
_turns = pytest.StashKey[Turns]()


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


def of_others(path: Path) -> bool:
    """A live process of another process group has this memory file open or mapped."""
    mine = os.getpgid(0)
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == mine:
                continue
            process = Path(f"/proc/{pid}")
            if str(path) in (process / "maps").read_text() or any(
                link.readlink() == path for link in (process / "fd").iterdir()
            ):
                return True
        except OSError:  # it has ended, or closed the descriptor, or belongs to another user
            continue
    return False


def _left(
    before_pids: set[int], before_fds: Counter[str], before_threads: set[int], files: set[Path], shm: set[str]
) -> list[str]:
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
    left += [
        f"/dev/shm/{name}"
        for name in _shm() - shm
        if ("drumline" in name or name.startswith(("psm_", "sem.", "torch_"))) and not of_others(Path("/dev/shm", name))
    ]
    return left


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind_at_the_end() -> Iterator[None]:
    """What fixtures of wider scope keep alive for several tests is gone when the session ends."""
    if Path("/proc/driver/nvidia").exists():
        import torch

        torch.cuda.is_available()  # whoever asks first in a process leaves pipes of the driver open there
    yield from _checked()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fixtures of wider scope are made before this one, so what they keep alive counts as there already."""
    yield from _checked()


@pytest.fixture(scope="session")
def warm(nothing_left_behind_at_the_end: None) -> Iterator[WarmStart]:
    """One process with everything imported, for the tests of the folders whose conftest says so."""
    with warm_start() as made:
        originals.current = None
        made.wait_ready()
        yield made


@pytest.fixture(scope="module")
def engines_start_warm(warm: WarmStart) -> Iterator[None]:
    """Engines and executors of this module's tests are copies of that process: a start costs 1 s of CPU, not 6.

    Tests of how processes come to be, live and die do without.
    """
    originals.current = warm
    yield
    originals.current = None


def _checked() -> Iterator[None]:
    threads = {t.ident for t in threading.enumerate() if t.ident is not None}
    before = _group(), _descriptors(), threads, set(_tmp().iterdir()), _shm()
    yield
    deadline = time.monotonic() + GRACE_S
    left = _left(*before)
    if left:
        gc.collect()  # only now: it takes 80 ms with torch and transformers, and can but make what is left less
        left = _left(*before)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)  # the kernel ends processes in its own time; there is no event for all of these at once
        gc.collect()
        left = _left(*before)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left))
