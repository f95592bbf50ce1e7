"""Which start method is taken, and that all of them give the same children under the same supervision."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import START_METHODS, ProcessConfig
from drumline.errors import ConfigError, StartupError
from drumline.processes import EventKind, Member, OwnChildren, State
from drumline.processes import core as c
from drumline.processes.environment import OUTER_JOB, READ_AT_IMPORT, needs_fresh, without_outer_job
from drumline.processes.linux import open_fds
from drumline.processes.start_methods import CUDA, IN_RAY_ACTOR, NUMA, WSL, XPU, Facts, asked_for, decide, probe
from tests.processes.conftest import House

ROOT = Path(__file__).parents[2]

# ---- which one -----------------------------------------------------------------------------------------------------

FACTS = st.builds(
    Facts,
    in_ray_actor=st.booleans(),
    ray_address=st.sampled_from(["", "10.0.0.1:6379"]),
    numa=st.booleans(),
    cuda=st.booleans(),
    xpu=st.booleans(),
    wsl=st.booleans(),
)


@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        (Facts(), ()),
        (Facts(in_ray_actor=True), ("In a Ray actor and can only be spawned",)),
        (Facts(numa=True), ("NUMA binding requires spawn method",)),
        (Facts(cuda=True), ("CUDA is initialized",)),
        (Facts(xpu=True), ("XPU is initialized",)),
        (Facts(wsl=True), ("WSL is detected and NVML is not compatible with fork",)),
        (Facts(in_ray_actor=True, numa=True, cuda=True, xpu=True, wsl=True), (IN_RAY_ACTOR, NUMA, CUDA, XPU, WSL)),
    ],
)
def test_why_fork_becomes_spawn(facts: Facts, reasons: tuple[str, ...]) -> None:
    decision = decide("fork", facts)
    assert decision.reasons == reasons
    assert decision.method == ("spawn" if reasons else "fork")


def test_the_warning_is_one_line_with_all_reasons() -> None:
    warning = decide("fork", Facts(cuda=True, numa=True)).warning
    assert warning == (
        "We must use the `spawn` multiprocessing start method. "
        "Reasons: NUMA binding requires spawn method; CUDA is initialized"
    )


@given(st.sampled_from(START_METHODS), FACTS)
def test_only_fork_is_ever_replaced(method: str, facts: Facts) -> None:
    decision = decide(method, facts)
    breaks = facts.in_ray_actor or facts.numa or facts.cuda or facts.xpu or facts.wsl
    assert decision.method == ("spawn" if method == "fork" and breaks else method)
    assert bool(decision.warning) == (decision.method != method)
    assert decision.env == ({"RAY_ADDRESS": facts.ray_address} if facts.in_ray_actor and facts.ray_address else {})


@pytest.mark.parametrize(
    ("given", "variable", "method"),
    [("auto", None, "forkserver"), ("auto", "", "forkserver"), ("auto", " plain ", "plain"), ("fork", "spawn", "fork")],
)
def test_what_is_asked_for(given: str, variable: str | None, method: str) -> None:
    environ = {} if variable is None else {"DRUMLINE_WORKER_START_METHOD": variable}
    assert asked_for(given, environ) == method


def test_a_method_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="DRUMLINE_WORKER_START_METHOD must be one of forkserver, spawn, fork, plain"):
        asked_for("auto", {"DRUMLINE_WORKER_START_METHOD": "thread"})
    with pytest.raises(ConfigError, match="--worker-start-method"):
        ProcessConfig(worker_start_method="thread")


class _Module:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(("cuda", "xpu"), [*product([False, True], repeat=2)])
def test_probing_asks_torch_only_if_it_is_loaded(cuda: bool, xpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not probe(numa=False).cuda
    torch = _Module(cuda=_Module(is_initialized=lambda: cuda), xpu=_Module(is_initialized=lambda: xpu))
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    facts = probe(numa=True)
    assert (facts.cuda, facts.xpu, facts.numa) == (cuda, xpu, True)


@pytest.mark.parametrize("actor", ["a1", None])
def test_probing_a_ray_actor(actor: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    context = _Module(get_actor_id=lambda: actor, gcs_address="10.0.0.1:6379")
    ray = _Module(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    facts = probe(numa=False)
    assert (facts.in_ray_actor, facts.ray_address) == (actor is not None, "10.0.0.1:6379")


@pytest.mark.parametrize(("release", "wsl"), [("5.15.90.1-microsoft-standard-WSL2", True), ("6.1.0-generic", False)])
def test_probing_wsl(release: str, wsl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = os.uname_result(("Linux", "microsoft-office-pc", release, "#1", os.uname().machine))
    monkeypatch.setattr(os, "uname", lambda: names)
    assert probe(numa=False).wsl is wsl


def test_places_in_an_outer_job_are_taken_out_without_a_fresh_interpreter() -> None:
    outer = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_RANK": "3"}
    outer |= {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    changes = without_outer_job({**outer, "HOME": "/", "NCCL_DEBUG": "INFO", "RANKING": "1"})
    assert changes == dict.fromkeys(outer)
    assert needs_fresh(outer, changes) == []
    assert not any(OUTER_JOB.fullmatch(name) and READ_AT_IMPORT.fullmatch(name) for name in outer)


# ---- the same children under the same supervision ------------------------------------------------------------------


@pytest.fixture(params=START_METHODS)
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def any_house(make_house: Callable[..., House], method: str) -> House:
    return make_house(method=method, rung_s=1.0)


def facts(member: Member) -> dict[str, Any]:
    return json.loads(member.info)  # type: ignore[no-any-return]


def parent_of(house: House) -> int:
    return os.getpid() if isinstance(house.server, OwnChildren) else house.server.pid


def test_children_have_only_what_they_were_given(
    any_house: House, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connection, given descriptors, log: none of a sibling, none of the program."""
    cpu = max(os.sched_getaffinity(0))
    monkeypatch.setenv("DRUMLINE_TEST_LATER", "1")  # set after the start of whoever makes children: not theirs
    read, write = os.pipe()
    names = ["DRUMLINE_A", "OMP_NUM_THREADS", "DRUMLINE_TEST_LATER"]
    env = {"DRUMLINE_A": "a"}
    siblings = [any_house.spawn("serve", role=f"Worker_{i}", fds=(read,)) for i in (1, 2)]
    member = any_house.spawn("describe", json.dumps(names).encode(), env=env, cpus=(cpu,), threads=1, fds=(write,))
    os.close(write)
    any_house.ready(*siblings, member)
    seen = facts(member)
    assert seen["env"] == {"DRUMLINE_A": "a", "OMP_NUM_THREADS": "1", "DRUMLINE_TEST_LATER": None}
    assert seen["cpus"] == [cpu]
    assert seen["parent"] == parent_of(any_house)
    assert seen["path"] == sys.path
    assert seen["sigint"]
    assert member.fresh is (method in ("spawn", "plain"))
    if method != "fork":  # whose title is that of the program, cut off where there is no more room
        assert seen["title"] == "drumline::Worker_0"
    fds = {int(fd): path for fd, path in seen["fds"].items()}
    assert fds.pop(1) == fds.pop(2) == member.log_file
    assert fds.pop(seen["conn"]).startswith("socket:")
    assert fds.pop(seen["given"][0]) == f"pipe:[{os.fstat(read).st_ino}]"
    left = [path for path in fds.values() if path != "/dev/null" and not path.startswith(f"/proc/{seen['pid']}/fd")]
    assert [path.partition(":")[0] for path in left] == ["pipe", "pipe"]  # its own, for wake-ups
    assert not any(path == f"pipe:[{os.fstat(read).st_ino}]" for path in left)
    any_house.supervisor.shutdown([member])
    assert os.read(read, 1) == b""  # nobody but that child had the other end
    os.close(read)


@pytest.mark.parametrize(
    ("how", "said", "ended"),
    [
        ("raise", "raised ValueError: boom in a child", "exit code 1"),
        ("exit3", "ended with exit code 3", "exit code 3"),
        ("segfault", "was killed by SIGSEGV", "signal 11"),
    ],
)
def test_a_failure_at_the_start_is_told_and_the_rest_is_ended(
    any_house: House, how: str, said: str, ended: str
) -> None:
    members = [any_house.spawn("break_in" if rank == 1 else "block", how.encode(), rank=rank) for rank in range(3)]
    with pytest.raises(StartupError) as caught:
        any_house.ready(*members)
    assert said in str(caught.value)
    assert caught.value.report.rank == 1
    assert [member.state for member in members] == [State.GONE] * 3
    assert [str(members[rank].exit) for rank in (0, 1, 2)] == ["signal 9", ended, "signal 9"]


def test_those_that_are_left_are_ended_in_rank_order() -> None:
    core = c.SupervisorCore()
    for key in (3, 1, 2):  # whatever the order in which they came to be
        core.handle(c.Added(key, f"Worker_{key}", key), 0.0)
        core.handle(c.Born(key, 100 + key), 0.0)
    assert core.handle(c.StopRequested((1, 2, 3), ask=False), 0.0) == [c.SendSignal(key, 9) for key in (1, 2, 3)]
    asked = c.SupervisorCore()
    for key in (3, 1, 2):
        asked.handle(c.Added(key, f"Worker_{key}", key), 0.0)
        asked.handle(c.Born(key, 100 + key), 0.0)
    assert asked.handle(c.StopRequested((1, 2, 3)), 0.0) == [c.AskToStop(key) for key in (1, 2, 3)]


@pytest.mark.parametrize("method", ["spawn", "plain"], indirect=True)
def test_a_child_that_cannot_be_executed(any_house: House) -> None:
    """The kernel refuses an environment variable of that size; the children that it did make are ended."""
    members = [any_house.spawn("serve", rank=rank, env={"X": "x" * (rank << 18)}) for rank in range(2)]
    with pytest.raises(StartupError, match="Argument list too long") as caught:
        any_house.ready(*members)
    assert caught.value.report.rank == 1
    assert [member.state for member in members] == [State.GONE] * 2


def test_all_are_made_before_any_is_waited_for(any_house: House) -> None:
    """Children that are never ready do not keep others from being made."""
    stuck = [any_house.spawn("block", role=f"Worker_{i}") for i in range(2)]
    any_house.ready(any_house.spawn("serve", role="Worker_2"))
    any_house.supervisor.shutdown(stuck, force=True)


def test_death_after_the_start(any_house: House) -> None:
    one, two = any_house.spawn("serve", rank=0), any_house.spawn("stubborn", rank=1)
    any_house.ready(one, two)
    os.kill(one.pid, signal.SIGKILL)
    event = any_house.event(EventKind.FAILURE)
    assert event.report is not None
    assert (event.report.rank, event.report.type) == (0, "SIGKILL")
    any_house.supervisor.shutdown()
    assert str(two.exit) == "signal 9"  # the ladder: it does not end when it is asked


def test_the_end_of_the_thread_that_started_it(make_house: Callable[..., House], method: str) -> None:
    """PDEATHSIG follows threads: the end of the one that called is no death of the owner."""
    made: list[tuple[House, Member]] = []

    def start() -> None:
        house = make_house(method=method)
        member = house.spawn("serve", b"x")
        house.ready(member)
        made.append((house, member))

    thread = threading.Thread(target=start)
    thread.start()
    tid = thread.native_id
    thread.join()
    while Path(f"/proc/self/task/{tid}").exists():
        time.sleep(0.01)  # joined is a moment before it is gone
    [(house, member)] = made
    member.send(b"still there")
    assert house.event(EventKind.MESSAGE).data == b"echo still there"
    assert house.supervisor.failure is None


@pytest.mark.parametrize("how", ["ignored", "taken"])
def test_children_of_the_program_and_ours(make_house: Callable[..., House], method: str, how: str) -> None:
    """We wait for no child of the program's; and if it takes ours, they are still known to be gone."""
    house = make_house(method=method)
    if how == "ignored":
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            member = house.spawn("serve")
            house.ready(member)
            house.supervisor.shutdown()
        finally:
            signal.signal(signal.SIGCHLD, before)
        assert str(member.exit) in ("exit code 0", "unknown")
        return
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    member = house.spawn("break_in", b"exit3")
    gone = house.event(EventKind.GONE)
    assert (gone.member, str(member.exit)) == (member, "exit code 3")
    assert process.wait(10) == 7


OWNER = """
import sys, threading
sys.path[:0] = [{src!r}, {root!r}]
from drumline.processes import *
server = OwnChildren({method!r}, LogConfig.create(dir={folder!r}, console_fd=-1))
supervisor = Supervisor(server, lambda event: print(event.member.pid, flush=True) if event.data == b"loading" else None)
for target in ("block", "hang_in_c", "stubborn"):
    member = server.spawn(ProcessSpec(role="Worker_0", target="tests.processes.targets:" + target))
    supervisor.add(member)
supervisor.wait_all_ready([member], 30)
print(member.pid, flush=True)
threading.Event().wait()
"""


@pytest.fixture(params=["spawn", "fork"])
def owner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    text = OWNER.format(src=str(ROOT / "src"), root=str(ROOT), method=request.param, folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(3)]
    pidfds = [os.pidfd_open(pid) for pid in pids]
    yield process, pidfds
    process.kill()
    process.wait()
    process.stdout.close()
    for pidfd in pidfds:
        os.close(pidfd)


def test_a_killed_owner_leaves_none_of_its_own_children(owner: tuple[subprocess.Popen[str], list[int]]) -> None:
    """One in a sleep, one in C code that holds the GIL, one that does not end when it is asked."""
    process, pidfds = owner
    process.kill()
    for pidfd in pidfds:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        assert poller.poll(5000)


def test_a_hundred_own_children_leave_nothing(make_house: Callable[..., House]) -> None:
    house = make_house(method="fork")
    house.ready(house.spawn("serve"))
    house.supervisor.shutdown()
    before = len(open_fds())
    for _ in range(10):
        members = [house.spawn("serve", role=f"Worker_{i}", rank=i) for i in range(10)]
        house.ready(*members)
        house.supervisor.shutdown(members)
        house.supervisor.forget(members)
    assert len(open_fds()) == before
    assert house.supervisor.failure is None


def test_forking_a_program_whose_threads_never_rest(make_house: Callable[..., House]) -> None:
    """Threads that log, allocate, import and open files all the time; and its handlers and streams stay its own."""
    over = threading.Event()

    def busy() -> None:
        import logging

        while not over.is_set():
            logging.getLogger("drumline.test").debug("x" * 1000)
            json.dumps([bytearray(5000).hex()] * 3)
            os.close(os.open(os.devnull, os.O_RDONLY))

    caught: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: caught.append(number))
    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        house = make_house(method="fork")
        members = [house.spawn("serve", role=f"Worker_{i}", rank=i) for i in range(30)]
        house.ready(*members)
        os.kill(members[0].pid, signal.SIGUSR2)  # without the handler of the program it ends the child
        assert house.event(EventKind.FAILURE).member is members[0]
        assert str(members[0].exit) == f"signal {int(signal.SIGUSR2)}"
        assert caught == []
    finally:
        over.set()
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGUSR2, before)
