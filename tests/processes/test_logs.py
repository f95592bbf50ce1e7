from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from drumline.processes import ForkServer, LogConfig, ProcessSpec, Supervisor
from drumline.processes.logs import Console, LineTee, ProcessLog, prune
from tests.processes.targets import TARGETS


def read_all(fd: int, into: list[bytes]) -> threading.Thread:
    def read() -> None:
        while data := os.read(fd, 65536):
            into.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_lines_of_several_processes_are_never_mixed(tmp_path: Path) -> None:
    read, write = os.pipe()
    got: list[bytes] = []
    reader = read_all(read, got)
    with ForkServer.start(log=LogConfig.create(dir=str(tmp_path), console_fd=write)) as server:
        os.close(write)
        with Supervisor(server) as supervisor:
            members = [
                server.spawn(ProcessSpec(role=f"Worker_{i}", target=f"{TARGETS}:chatty", payload=b"%d" % i))
                for i in range(3)
            ]
            for member in members:
                supervisor.add(member)
            supervisor.wait_all_ready(members, 30)
            pids = [member.pid for member in members]
    reader.join(10)
    os.close(read)
    lines = b"".join(got).decode().splitlines()
    for i, pid in enumerate(pids):
        mine = [line for line in lines if f" pid={pid}) " in line]
        expected = [f"(Worker_{i} pid={pid}) line {n} of {i} {'x' * 200}" for n in range(200)]
        assert mine == [*expected, f"(Worker_TP{i} pid={pid}) unfinished"]
    assert len(lines) == 3 * 201  # C code's words are in the files only


def test_long_lines_are_cut_to_what_a_pipe_takes_in_one_piece() -> None:
    read, write = os.pipe()
    console = Console(write, "Worker_TP0")
    tee = LineTee(os.open(os.devnull, os.O_WRONLY))
    tee.attach(console)
    got: list[bytes] = []
    reader = read_all(read, got)
    tee.write("é" * 5000 + "\nshort\n\n")
    tee.write("\r 10%\r 50%\r100%\n")
    os.close(tee.fileno())
    console.close()
    os.close(write)
    reader.join(5)
    os.close(read)
    lines = b"".join(got).split(b"\n")
    assert all(len(line) < 4096 for line in lines)
    prefix = f"(Worker_TP0 pid={os.getpid()}) ".encode()
    assert all(line.startswith(prefix) for line in lines[:-1])
    bare = [line.removeprefix(prefix) for line in lines[:-1]]
    assert "".join(part.decode() for part in bare[:3]) == "é" * 5000
    assert bare[3:] == [b"short", b"", b"100%"]


def test_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first, second = LogConfig.create(), LogConfig.create()
    assert first.dir != second.dir
    for config in (first, second):
        assert Path(config.dir).parent == tmp_path / "drumline" / "logs"
        assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{os.getpid()}(-\d+)?", Path(config.dir).name)


def test_old_runs_are_pruned_but_not_those_of_the_living(tmp_path: Path) -> None:
    dead = 2**22 + 1  # above the largest pid
    for i in range(30):
        (tmp_path / f"20250101-0000{i:02}-{dead}").mkdir()
    living = tmp_path / f"20240101-000000-{os.getpid()}"
    living.mkdir()
    (tmp_path / "something else").mkdir()
    prune(tmp_path, 20)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 20 + 2
    assert {living.name, "something else"} <= set(names)
    assert names[1] == f"20250101-000010-{dead}"


def test_a_state_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(LogConfig.create().dir)
    assert folder.parent == tmp_path / f"drumline-{os.getuid()}-logs"


@pytest.mark.parametrize("what", ["link", "open to others", "file"])
def test_a_fall_back_that_is_not_ours_alone_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (tmp_path / "file").touch()
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    taken = tmp_path / f"drumline-{os.getuid()}-logs"
    if what == "link":
        taken.symlink_to(other)
    elif what == "file":
        taken.touch()
    else:
        taken.mkdir()
        taken.chmod(0o777)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(LogConfig.create().dir)
    assert folder.parent.parent == tmp_path
    assert folder.parent not in (taken, other)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert not list(other.iterdir())


@pytest.mark.parametrize("what", ["link", "pipe", "older log"])
def test_a_log_file_whose_name_is_taken(tmp_path: Path, what: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            path = tmp_path / f"Worker-{os.getpid()}.log"
            if what == "link":
                path.symlink_to(tmp_path / "victim")
            elif what == "pipe":
                os.mkfifo(path)
            else:
                path.write_text("before\n")
            log = ProcessLog(str(tmp_path), "Worker", "info", -1)
            print("hello")
            log.note(log.path.name)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert not (tmp_path / "victim").exists()
    name = f"Worker-{pid}.log" if what == "older log" else f"Worker-{pid}-1.log"
    before = "before\n" if what == "older log" else ""
    assert (tmp_path / name).read_text() == f"{before}hello\n{name}\n"
