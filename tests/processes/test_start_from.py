"""The same from whatever program starts it, and without a main guard."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drumline.processes import ForkServer, LogConfig, ProcessSpec, Supervisor
from tests.processes.conftest import House
from tests.processes.targets import TARGETS

ROOT = Path(__file__).parents[2]
PROGRAM = f"""
import sys
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
from drumline.processes import ForkServer, LogConfig, ProcessSpec, Supervisor
for turn in range(2):
    server = ForkServer.start(log=LogConfig.create(dir={{folder!r}}))
    supervisor = Supervisor(server)
    member = server.spawn(ProcessSpec(role="Worker_0", target="{TARGETS}:serve", payload=b"x"))
    supervisor.add(member)
    supervisor.wait_all_ready([member], 30)
    print("ready", turn, member.info)
    {{ending}}
"""
CLOSE = "supervisor.close(); server.close()"
EXPECTED = "ready 0 b'info of x'\nready 1 b'info of x'\n"


@pytest.mark.parametrize("ending", [CLOSE, "pass"], ids=["closed", "left to the interpreter"])
@pytest.mark.parametrize("how", ["-c", "stdin", "script", "exec"])
def test_programs_without_a_main_guard(tmp_path: Path, how: str, ending: str) -> None:
    program = PROGRAM.format(folder=str(tmp_path / "log"), ending=ending)
    command, text = [sys.executable, "-W", "error"], None
    if how == "-c":
        command += ["-c", program]
    elif how == "stdin":
        command, text = [*command, "-"], program
    elif how == "exec":  # as a notebook does: no __file__ anywhere
        command += ["-c", f"import sys; sys.argv = ['']; exec({program!r}, {{'__name__': '__main__'}})"]
    else:
        (tmp_path / "program.py").write_text(program)
        command.append(str(tmp_path / "program.py"))
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, EXPECTED, "")


def test_modules_in_the_working_directory_are_not_imported_by_mistake(tmp_path: Path) -> None:
    for name in ("select", "json", "drumline", "random"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('wrong module')")
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "program.py"
    script.write_text(PROGRAM.format(folder=str(tmp_path / "log"), ending=CLOSE))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, EXPECTED, "")


def test_thread_that_ends_after_the_start(tmp_path: Path) -> None:
    made: list[ForkServer] = []
    log = LogConfig.create(dir=str(tmp_path / "log"), console_fd=-1)
    thread = threading.Thread(target=lambda: made.append(ForkServer.start(log=log)))
    thread.start()
    thread.join()
    with made[0] as server, Supervisor(server) as supervisor:
        member = server.spawn(ProcessSpec(role="Worker_0", target=f"{TARGETS}:serve"))
        supervisor.add(member)
        supervisor.wait_all_ready([member], 30)


def test_daemonic_process(tmp_path: Path) -> None:
    program = PROGRAM.format(folder=str(tmp_path / "log"), ending=CLOSE)
    outer = f"""
import multiprocessing
def inner():
    exec({program!r})
process = multiprocessing.get_context("fork").Process(target=inner, daemon=True)
process.start()
process.join(60)
print("exit code", process.exitcode)
"""
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{EXPECTED}exit code 0\n", "")


def test_a_fork_of_the_root_neither_holds_nor_ends_anything(house: House) -> None:
    member = house.spawn("serve")
    house.ready(member)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            house.server.close()  # not its own: does nothing
            house.supervisor.close()
            os.write(write, b"done")
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 4) == b"done"
    os.close(read)
    os.waitpid(pid, 0)
    member.send(b"x")
    assert house.supervisor.failure is None


def test_a_root_without_standard_descriptors(tmp_path: Path) -> None:
    program = PROGRAM.format(folder=str(tmp_path / "log"), ending=CLOSE)
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, EXPECTED, "")


def test_a_root_that_only_drops_the_connection_is_not_reported_dead(tmp_path: Path) -> None:
    read, write = os.pipe()
    server = ForkServer.start(log=LogConfig.create(dir=str(tmp_path), console_fd=write))
    os.close(write)
    server.conn.close()
    assert server.process is not None
    assert server.process.wait(10) == 1
    assert os.read(read, 1000) == b""
    os.close(read)
    server.close()
