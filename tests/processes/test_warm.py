"""Fork servers that are copies of one which has imported: they are like executed ones, or one is executed.

Births, deaths, failures, spares: the tests of executed fork servers, over copies. And what only a copy can get wrong.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from drumline.errors import ConfigError, DrumlineError
from drumline.processes import ForkServer, LogConfig
from drumline.processes.client import originals
from drumline.processes.linux import process_state
from drumline.processes.warm import WarmStart
from tests.processes.conftest import House
from tests.processes.test_children import *  # noqa: F403
from tests.processes.test_clear import *  # noqa: F403
from tests.processes.test_failures import *  # noqa: F403
from tests.processes.test_spare import *  # noqa: F403
from tests.stopped import stop

del test_a_fork_server_that_fails_says_why  # noqa: F821  its PYTHONPATH is read at import time, so one is executed

ROOT = Path(__file__).resolve().parents[2]


def warm_start(folder: Path, *preload: str) -> WarmStart:
    return WarmStart(preload, LogConfig.create(dir=str(folder), console_fd=-1))


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[WarmStart]:
    with warm_start(tmp_path / "warm") as made:
        made.wait_ready()
        yield made


def is_copy(server: ForkServer) -> bool:
    return not isinstance(server.process, subprocess.Popen)


@pytest.fixture
def make_house(warm: WarmStart, make_house: Callable[..., House]) -> Callable[..., House]:
    """In place of conftest's: what is imported above runs over copies."""

    def make(**options: Any) -> House:
        house = make_house(**options)
        assert is_copy(house.server)
        return house

    return make


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Make a module that can be imported; its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return make


def facts_of(house: House, *names: str) -> dict[str, Any]:
    member = house.spawn("describe", json.dumps(names).encode())
    house.ready(member)
    return json.loads(member.info)  # type: ignore[no-any-return]


def test_only_what_is_new_is_imported(tmp_path: Path, module: Callable[[str, str], str]) -> None:
    """And that in the copy alone: the next copy imports it again, as it is then."""
    old = module("imported_once", "import os; print('imported in', os.getpid(), flush=True)")
    new = module("imported_each_time", "import os; print('imported in', os.getpid(), flush=True)")
    with warm_start(tmp_path / "warm", old) as warm:
        warm.wait_ready()
        first = warm.pid
        pids = []
        for number in range(2):
            house = House(tmp_path / f"log{number}", preload=(old, new))
            house.ready(house.spawn("serve"))
            pids.append(house.server.pid)
            assert f"imported in {house.server.pid}" in Path(house.server.log_file).read_text()
            assert str(first) not in Path(house.server.log_file).read_text()
            assert set(house.server.import_seconds) == {old, new}
            house.close()
        log = next((tmp_path / "warm").glob(f"*-{first}.log"))
        assert log.read_text().count("imported in") == 1
        assert len({first, *pids}) == 3


def test_it_gets_what_the_program_has_now(
    warm: WarmStart, make_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SET_LATER", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "later")
    facts = facts_of(make_house(), "SET_LATER", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    assert facts["env"] == {"SET_LATER": "1", "OMP_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": None}
    assert facts["path"][0] == str(tmp_path / "later")


def of_umask() -> Callable[[], object]:
    before = os.umask(0o077)
    return lambda: os.umask(before)


def of_limits() -> Callable[[], object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else min(hard, 1) if hard >= 0 else 1, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def of_folder() -> Callable[[], object]:
    before = Path.cwd()
    os.chdir("/")
    return lambda: os.chdir(before)


def of_cpus() -> Callable[[], object]:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU")
    os.sched_setaffinity(0, {min(before)})
    return lambda: os.sched_setaffinity(0, before)


@pytest.mark.parametrize("change", [of_umask, of_limits, of_folder, of_cpus])
def test_other_surroundings(warm: WarmStart, tmp_path: Path, change: Callable[[], Callable[[], object]]) -> None:
    """An executed process would begin with them, so one is executed; once they are as before, copies are made again."""
    undo = change()
    try:
        house = House(tmp_path / "log")
        try:
            assert not is_copy(house.server)
            house.ready(house.spawn("serve"))
        finally:
            house.close()
    finally:
        undo()
    again = House(tmp_path / "again")
    assert is_copy(again.server)
    again.close()


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "PYTHONHASHSEED", "HF_HOME", "MKL_VERBOSE"])
def test_variables_that_are_read_at_import(
    warm: WarmStart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0")
    house = House(tmp_path / "log")
    try:
        assert not is_copy(house.server)
        assert facts_of(house, name)["env"] == {name: "0"}
    finally:
        house.close()


def test_engines_outlive_it(warm: WarmStart, make_house: Callable[..., House], tmp_path: Path) -> None:
    """Whether it is closed or dies; the next one is executed."""
    house = make_house()
    member = house.spawn("serve")
    house.ready(member)
    os.kill(warm.pid, signal.SIGKILL)
    wait_gone(warm.pid)  # noqa: F405
    with pytest.raises(DrumlineError, match="SIGKILL"):
        warm.wait_ready()
    house.ready(house.spawn("serve"))
    later = House(tmp_path / "later")
    assert not is_copy(later.server)
    later.close()
    warm.close()
    house.ready(house.spawn("serve"))
    assert house.supervisor.failure is None


def test_one_that_is_stopped(warm: WarmStart, tmp_path: Path) -> None:
    """Nobody waits for it for long."""
    stop(warm.pid)
    began = time.monotonic()
    house = House(tmp_path / "log")
    assert time.monotonic() - began < 10
    assert not is_copy(house.server)
    house.ready(house.spawn("serve"))
    house.close()


def test_before_its_imports_are_done(tmp_path: Path, module: Callable[[str, str], str]) -> None:
    """The import waits for a file, so that this test knows what comes first."""
    slow = module("imported_late", f"import time\nwhile not open({str(tmp_path / 'go')!r}).read(): time.sleep(0.01)")
    (tmp_path / "go").write_text("")
    with warm_start(tmp_path / "warm", slow) as warm:
        house = House(tmp_path / "log")
        assert not is_copy(house.server)
        house.ready(house.spawn("serve"))
        house.close()
        with pytest.raises(DrumlineError, match=r"not done after 0\.1 s"):
            warm.wait_ready(0.1)
        (tmp_path / "go").write_text("go")
        warm.wait_ready()
        house = House(tmp_path / "again")
        assert is_copy(house.server)
        house.close()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise RuntimeError('no such library')", "no such library"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started threads"),
    ],
)
def test_imports_that_cannot_be_copied(
    tmp_path: Path, module: Callable[[str, str], str], text: str, cause: str
) -> None:
    """It says why, and engines start as ever."""
    bad = module("imported_badly", text)
    with warm_start(tmp_path / "warm", bad) as warm:
        with pytest.raises(DrumlineError, match=cause):
            warm.wait_ready()
        house = House(tmp_path / "log")
        assert not is_copy(house.server)
        house.ready(house.spawn("serve"))
        house.close()


def test_one_in_a_program(warm: WarmStart, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="close that one first"):
        warm_start(tmp_path / "second")
    warm.close()
    with warm_start(tmp_path / "third") as third:
        third.wait_ready()
        with pytest.raises(DrumlineError, match="closed"):
            warm.wait_ready()
        warm.close()
        assert originals.current is third
    assert originals.current is None


def in_fork(work: Callable[[], None]) -> int:
    """Exit code of a fork of this program that does ``work``."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001  the exit code tells
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_copy_of_the_program(warm: WarmStart, tmp_path: Path) -> None:
    """It has no part in the connection, its end closes nothing, and it may have one of its own."""

    def work() -> None:
        assert originals.current is None
        assert warm.copy({}) is None
        with pytest.raises(DrumlineError, match="belongs to process"):
            warm.wait_ready()
        warm.close()
        with warm_start(tmp_path / "own") as own:
            own.wait_ready()
            house = House(tmp_path / "log")
            assert is_copy(house.server)
            house.ready(house.spawn("serve"))
            house.close()

    assert in_fork(work) == 0
    assert process_state(warm.pid) in ("S", "R")
    warm.wait_ready()


def test_nobody_waits_for_one_who_waits(tmp_path: Path, module: Callable[[str, str], str]) -> None:
    """While a thread waits for imports that do not end: engines start, other waits end in their time, a fork is told,
    and closing ends the wait."""
    endless = module("imported_never", "import time\nwhile True: time.sleep(1)")
    ended: queue.Queue[BaseException] = queue.Queue()
    warm = warm_start(tmp_path / "warm", endless)

    def wait() -> None:
        try:
            warm.wait_ready(100)
        except DrumlineError as error:
            ended.put(error)

    def told() -> None:
        with pytest.raises(DrumlineError, match="belongs to process"):
            warm.wait_ready(100)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        began = time.monotonic()
        house = House(tmp_path / "log")
        assert not is_copy(house.server)
        house.close()
        with pytest.raises(DrumlineError, match="not done after"):
            warm.wait_ready(0.2)
        assert in_fork(told) == 0
    finally:
        warm.close()
    assert "closed" in str(ended.get(timeout=20))
    thread.join()
    assert time.monotonic() - began < 50


def test_one_of_several_threads_gets_it(tmp_path: Path) -> None:
    start = threading.Barrier(4)
    got: queue.Queue[WarmStart | ConfigError] = queue.Queue()

    def make(number: int) -> None:
        start.wait()
        try:
            got.put(warm_start(tmp_path / f"warm{number}"))
        except ConfigError as error:
            got.put(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = [one for one in got.queue if isinstance(one, WarmStart)]
    for one in made:
        one.close()
    assert len(made) == 1


def test_one_that_has_died_is_in_nobodys_way(warm: WarmStart, tmp_path: Path) -> None:
    os.kill(warm.pid, signal.SIGKILL)
    wait_gone(warm.pid)  # noqa: F405
    with warm_start(tmp_path / "next") as made:
        made.wait_ready()
        assert originals.current is made
        assert warm.pid == 0


PROGRAM = """
import os, sys
from drumline.processes import ForkServer, LogConfig, ProcessSpec, Supervisor
from drumline.processes.warm import WarmStart
from tests.processes.targets import TARGETS
if __name__ == "__main__":
    warm = WarmStart((), LogConfig.create(dir=sys.argv[1]))
    warm.wait_ready()
    server = ForkServer.start(log=LogConfig.create(dir=sys.argv[2]), role="Program")
    supervisor = Supervisor(server)
    member = server.spawn(ProcessSpec(role="Worker_0", target=f"{TARGETS}:serve"))
    supervisor.add(member)
    supervisor.wait_all_ready([member], 30)
    print(warm.pid, server.pid, member.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["kill", "end"])
def test_the_end_of_the_program(tmp_path: Path, how: str) -> None:
    """All go with it. A death is reported once, by the engine's fork server; an end without closing is no failure."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "warm"), str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    watched = [psutil.Process(pid) for pid in pids]
    if how == "kill":
        process.kill()
    _, errors = process.communicate(timeout=20)
    _, alive = psutil.wait_procs(watched, timeout=5)
    assert not alive
    assert errors.decode().count("Program") == (1 if how == "kill" else 0), errors.decode()
    assert "WarmStart" not in errors.decode()
