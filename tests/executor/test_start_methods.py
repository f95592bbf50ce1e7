"""Executors by every start method, from whatever program starts them, and without a main guard."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drumline.config import START_METHODS
from drumline.errors import StartupError
from drumline.platforms import CpuPlatform, CudaPlatform
from drumline.processes import ForkServer, Member, OwnChildren, ProcessSpec
from tests.executor.conftest import Make
from tests.executor.program import expected, open_executor, run, use

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path[:0] = [{src!r}, {root!r}]
from tests.executor.program import *
print("at the top of the program")
{body}
"""
RUN = "print(run({folder!r}), end='')"
SAID = "at the top of the program\n" + expected()


def program(tmp_path: Path, body: str = RUN) -> str:
    body = body.replace("{folder!r}", repr(str(tmp_path / "log")))
    return (
        PROGRAM.replace("{src!r}", repr(str(ROOT / "src"))).replace("{root!r}", repr(str(ROOT))).replace("{body}", body)
    )


def outcome(
    tmp_path: Path, text: str, *flags: str, stdin: bool = False, env: dict[str, str] | None = None
) -> tuple[int, str, str]:
    command = [sys.executable, "-W", "error", *flags, *(["-"] if stdin else ["-c", text])]
    done = subprocess.run(
        command,
        input=text if stdin else None,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, **(env or {})},
    )
    return done.returncode, done.stdout, done.stderr


# ---- surroundings: each program uses all start methods, one after the other ------------------------------------------


def test_command_line(tmp_path: Path) -> None:
    assert outcome(tmp_path, program(tmp_path)) == (0, SAID, "")


def test_standard_input(tmp_path: Path) -> None:
    assert outcome(tmp_path, program(tmp_path), stdin=True) == (0, SAID, "")


def test_script_with_the_end_left_to_the_interpreter(tmp_path: Path) -> None:
    body = "made = [open_executor(method, {folder!r}) for method in START_METHODS]; print(len(made))"
    (tmp_path / "program.py").write_text(program(tmp_path, body))
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "at the top of the program\n4\n", "")


def test_a_program_without_standard_descriptors(tmp_path: Path) -> None:
    """Theirs are then the first numbers that sockets get."""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, program(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, SAID, "")


def test_a_removed_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    text = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n" + program(tmp_path)
    assert outcome(tmp_path, text) == (0, SAID, "")


def test_daemonic_process(tmp_path: Path) -> None:
    """multiprocessing forbids these to have children of their own."""
    body = """
import multiprocessing
def inner():
    print(run({folder!r}), end="", flush=True)
process = multiprocessing.get_context("fork").Process(target=inner, daemon=True)
sys.stdout.flush()
process.start()
process.join(60)
print(process.exitcode)
"""
    assert outcome(tmp_path, program(tmp_path, body)) == (0, SAID + "0\n", "")


def test_prefork_server(tmp_path: Path) -> None:
    """A master that has executors of its own, one by each method, and forks; the children have theirs."""
    body = """
import os
made = {method: open_executor(method, {folder!r}) for method in START_METHODS}
pids = []
for number in range(2):
    sys.stdout.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, run({folder!r}).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        print(file.read(), end="")
    pids.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
print("".join(use(executor, method) + "\\n" for method, executor in made.items()), end="")
"""
    code, out, error = outcome(tmp_path, program(tmp_path, body))
    assert (code, out, error) == (0, f"{SAID}{expected()}[0, 0]\n{expected()}", "")


def test_thread_that_ends_afterwards(tmp_path: Path) -> None:
    made = {}

    def start() -> None:
        made.update({method: open_executor(method, str(tmp_path / "log")) for method in START_METHODS})

    thread = threading.Thread(target=start)
    thread.start()
    tid = thread.native_id
    thread.join()
    while Path(f"/proc/self/task/{tid}").exists():
        time.sleep(0.01)  # joined is a moment before it is gone
    assert "".join(use(executor, method) + "\n" for method, executor in made.items()) == expected()


def test_pytest_with_a_stream_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, with what pytest has made of the streams; and with objects that have no descriptor at all."""
    assert run(str(tmp_path / "log")) == expected()

    class Stream:
        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None:
            raise ValueError("nothing to flush")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Stream())
        patch.setattr(sys, "stderr", Stream())
        assert run(str(tmp_path / "log")) == expected()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_notebook_and_its_kernels_death(tmp_path: Path) -> None:
    """Every method in a cell; and no worker outlives a kernel that is killed."""
    nbclient = pytest.importorskip("nbclient", reason="the notebook needs nbclient and ipykernel (make dev has them)")
    pytest.importorskip("ipykernel", reason="the notebook needs nbclient and ipykernel (make dev has them)")
    import nbformat

    client = nbclient.NotebookClient(nbformat.v4.new_notebook(), timeout=100, kernel_name="python3")

    async def cell(body: str) -> str:
        made = nbformat.v4.new_code_cell(program(tmp_path, body))
        client.nb.cells.append(made)
        await client.async_execute_cell(made, len(client.nb.cells) - 1)
        return "".join(output["text"] for output in made["outputs"] if output.get("name") == "stdout")

    async with client.async_setup_kernel():
        assert await cell(RUN) == SAID
        body = """
import json, os
made = [open_executor(method, {folder!r}) for method in START_METHODS]
print([os.getpid(), *sum((e.collective_rpc(lambda worker: os.getpid()) for e in made), [])])
"""
        kernel, *pids = json.loads((await cell(body)).splitlines()[-1])
        pidfds = [os.pidfd_open(pid) for pid in pids]
        assert len(pidfds) == 8
        os.kill(kernel, signal.SIGKILL)
        for pidfd in pidfds:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(5000)
            os.close(pidfd)


def test_places_in_an_outer_job_are_ignored(tmp_path: Path) -> None:
    """What torchrun sets for its own processes, with an address where nobody is, is neither used nor passed on."""
    outer = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1"}
    outer |= {"MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "outer"}
    body = f"""
import os
for method in START_METHODS:
    with open_executor(method, {{folder!r}}) as executor:
        print(executor.collective_rpc(lambda worker: [worker.rank, *sorted({set(outer)!r} & set(os.environ))]))
print(os.environ["RANK"])
"""
    expected = "at the top of the program\n" + 4 * "[[0], [1]]\n" + "3\n"
    assert outcome(tmp_path, program(tmp_path, body), env=outer) == (0, expected, "")


@pytest.mark.parametrize("method", START_METHODS)
def test_the_users_choice_of_devices_is_passed_on_as_it_is(
    make: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Nobody writes it: names, beginnings of names, instances, any order, blanks."""
    tokens = "GPU-8932f937, MIG-7c4f ,2,0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", tokens)
    monkeypatch.setattr(CpuPlatform, "worker_environment", CudaPlatform.worker_environment)
    executor = make("mp", 2, worker_start_method=method)
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    seen = executor.collective_rpc(lambda worker: [os.environ.get(name) for name in names])
    assert seen == [[tokens, "PCI_BUS_ID"]] * 2
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("CUDA_DEVICE_ORDER")) == (tokens, None)


@pytest.mark.parametrize("method", START_METHODS)
def test_a_platform_whose_workers_start_one_by_one(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    """The next is asked for when the last one runs, long before it is ready: ranks wait for each other in the start."""
    kind = OwnChildren if method in ("spawn", "fork") else ForkServer
    said: list[list[bool]] = []
    plain = kind.spawn

    def spawn(self: ForkServer, spec: ProcessSpec) -> Member:
        said.append([bool(member.log_file) for member in self.members.values()])
        return plain(self, spec)

    monkeypatch.setattr(kind, "spawn", spawn)
    monkeypatch.setattr(CpuPlatform, "starts_concurrently", False)
    executor = make("mp", 3, worker="Meets", worker_start_method=method, log_dir=str(tmp_path))
    assert said == [[], [True], [True, True]]
    assert executor.collective_rpc("hello") == [3, 3, 3]


def test_the_variable_for_programs(tmp_path: Path) -> None:
    body = "print(use(open_executor('auto', {folder!r}), 'spawn'))"
    said = outcome(tmp_path, program(tmp_path, body), env={"DRUMLINE_WORKER_START_METHOD": "spawn"})
    assert said == (0, "at the top of the program\n" + expected(["spawn"]), "")
    code, _, error = outcome(tmp_path, program(tmp_path, body), env={"DRUMLINE_WORKER_START_METHOD": "thread"})
    assert code == 1
    assert "DRUMLINE_WORKER_START_METHOD must be one of" in error


def test_a_class_of_the_program_itself_under_fork(tmp_path: Path) -> None:
    """A copy of the program has what stands in no module."""
    body = """
class Mine:
    def __init__(self, context):
        self.rank = context.rank
    def hello(self):
        return f"hello {self.rank}"
with open_executor("fork", {folder!r}, worker_cls="__main__:Mine") as executor:
    print(executor.collective_rpc("hello"))
"""
    said = (0, "at the top of the program\n['hello 0', 'hello 1']\n", "")
    assert outcome(tmp_path, program(tmp_path, body)) == said


# ---- fork where it would break ---------------------------------------------------------------------------------------


def test_fork_becomes_spawn_with_one_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """WSL is what one can pretend to be without a device."""
    names = os.uname_result(("Linux", "host", "5.15-microsoft-WSL2", "#1", os.uname().machine))
    monkeypatch.setattr(os, "uname", lambda: names)
    with caplog.at_level(logging.WARNING, "drumline"):
        executor = make("mp", 2, worker_start_method="fork", numa_bind=True)
    assert [record.getMessage() for record in caplog.records] == [
        "We must use the `spawn` multiprocessing start method. Reasons: NUMA binding requires spawn method; "
        "WSL is detected and NVML is not compatible with fork"
    ]
    assert executor.collective_rpc(lambda worker: "pytest" in sys.modules) == [False, False]  # no copy of this process


def test_a_fork_after_the_program_has_computed_with_several_threads(tmp_path: Path) -> None:
    """libgomp's threads are not copied: a copy of a thread that had opened a parallel region hangs in its next one."""
    body = """
import torch
torch.set_num_threads(2)
a = torch.ones(1500, 1500)
print(float((a @ a)[0, 0]))
def multiply(worker):
    import torch
    torch.set_num_threads(2)
    a = torch.ones(1500, 1500)
    return torch.get_num_threads(), float((a @ a)[0, 0])
with open_executor("fork", {folder!r}, 1, threads_per_worker=2) as executor:
    print(executor.collective_rpc(multiply, timeout=30))
"""
    code, out, error = outcome(tmp_path, program(tmp_path, body), env={"OMP_NUM_THREADS": "2"})
    assert (code, out, error) == (0, "at the top of the program\n1500.0\n[(2, 1500.0)]\n", "")


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize(
    ("how", "said"),
    [("load_model:raise", "raised ValueError: no load_model"), ("construct:kill", "was killed by SIGKILL")],
)
def test_a_start_that_fails(make: Make, monkeypatch: pytest.MonkeyPatch, method: str, how: str, said: str) -> None:
    monkeypatch.setenv("DRUMLINE_TEST_FAIL", how)
    with pytest.raises(StartupError) as caught:
        make("mp", 3, worker="FailsToStart", worker_start_method=method)
    assert said in str(caught.value)
    assert caught.value.report.rank == 2
