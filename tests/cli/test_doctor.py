"""``drumline doctor``: what made-up machines give, and that it is quick on this one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.doctor import collect as collecting
from drumline.cli.doctor.facts import Facts
from drumline.cli.doctor.findings import FIRST_DAY, GIB, MIB, Finding, Level, findings, satisfies
from drumline.cli.main import main
from drumline.config import EngineConfig, ServerConfig
from drumline.errors import ExitCode
from drumline.platforms import DeviceFacts
from tests.server.command import tiny_folder

TOPICS = [
    "flags",
    "devices",
    "peers",
    "memory",
    "cgroup",
    "cores",
    "files",
    "addresses",
    "versions",
    "folders",
    "clock",
]
GPUS = tuple(DeviceFacts(index=i, name="H200", memory=140 * GIB, free=139 * GIB) for i in range(2))


def facts(**changes: Any) -> Facts:
    """A machine on which all is well."""
    well: dict[str, Any] = {
        "workers": 2,
        "processes": 5,
        "memory_total": 64 * GIB,
        "memory_available": 60 * GIB,
        "oom_kills": 0,
        "overcommit": 0,
        "cgroups": "v2",
        "cores_online": 8,
        "cores_affinity": 8,
        "cores": 8,
        "open_files": (65536, 65536),
        "python": (3, 12, 1),
        "kernel": "Linux 6.8",
        "requirements": {"torch": ">=2.11"},
        "versions": {"torch": "2.13.0+cpu", "drumline": "0.1.0"},
        "folders": {"/home/me": 50 * GIB},
        "time": FIRST_DAY + 1.0,
        "clock_source": "tsc",
        "clock_synchronised": True,
        "weights": 2 * GIB,
    }
    return Facts(**well | changes)


def gpus(**changes: Any) -> Facts:
    well: dict[str, Any] = {
        "platform": "cuda",
        "accelerator": True,
        "devices": GPUS,
        "peers": {"0-1": "ok"},
        "driver_present": True,
        "shm_free": GIB,
    }
    return facts(**well | changes)


@pytest.mark.parametrize("machine", [facts(), gpus(), facts(workers=1), gpus(workers=1)])
def test_nothing_is_said_of_a_machine_that_is_well(machine: Facts) -> None:
    found = findings(machine)
    assert {one.level for one in found} == {Level.OK}
    assert list(dict.fromkeys(one.topic for one in found)) == TOPICS


@pytest.mark.parametrize(
    ("machine", "topic", "level", "said", "do"),
    [
        (facts(refusal="needs 4 cuda devices"), "devices", "error", "needs 4 cuda devices", "flags"),
        (facts(driver_present=True, torch_is_cpu_build=True), "devices", "warning", "CPU build", "CUDA build"),
        (facts(driver_present=True), "devices", "warning", "none is visible", "CUDA_VISIBLE_DEVICES"),
        (facts(devices_late=True), "devices", "warning", "did not answer", "persistence"),
        (
            gpus(devices=(GPUS[0], DeviceFacts(index=1, name="H200", memory=140 * GIB, free=GIB)), weights=None),
            "devices",
            "warning",
            "device 1 has 139.0 GiB in use",
            "nvidia-smi",
        ),
        (gpus(weights=400 * GIB), "devices", "error", "share of the weights is 200.0 GiB", "--tensor-parallel-size"),
        (gpus(devices=(GPUS[0], DeviceFacts(index=1, name="L4"))), "devices", "note", "different", "CUDA_VISIBLE"),
        (gpus(peers={"0-1": "not supported"}), "peers", "warning", "devices 0 and 1 cannot", "NCCL_P2P_DISABLE"),
        (gpus(peers={}), "peers", "note", "does not tell", "topo"),
        (facts(memory_available=GIB), "memory", "error", "1.0 GiB available", "smaller model"),
        (facts(memory_available=100 * MIB, weights=None), "memory", "warning", "100 MiB available", "--memory"),
        (facts(overcommit=2), "memory", "warning", "overcommit", "sysctl"),
        (facts(oom_kills=3), "memory", "warning", "killed 3 processes", "limit"),
        (gpus(shm_free=MIB), "memory", "warning", "/dev/shm has 1 MiB", "--shm-size"),
        (facts(tasks_left=30), "cgroup", "warning", "only 30 more processes", "pids.max"),
        (facts(tasks_left=10), "cgroup", "error", "only 10 more processes", "ulimit -u"),
        (facts(cpu_quota=0.5), "cgroup", "warning", "quota of 0.5 cores", "cpu.max"),
        (facts(workers=9), "cores", "warning", "9 workers compute on 8 cores", "at most 8"),
        (facts(omp_threads="8"), "cores", "warning", "more than 8 cores", "OMP_NUM_THREADS=4"),
        (facts(threads_per_worker=8), "cores", "warning", "more than 8 cores", "OMP_NUM_THREADS=4"),
        (facts(omp_threads="many"), "cores", "error", "is no number", "unset"),
        (facts(load=20.0), "cores", "note", "load of 20.0", "OMP_NUM_THREADS=1"),
        (facts(open_files=(64, 64)), "files", "error", "64 open files", "ulimit -n"),
        (facts(open_files=(1024, 1024)), "files", "note", "at most about 928 clients", "hard limit 1024"),
        (facts(port_refusal="Port 80.", port_holder="nginx"), "addresses", "error", "held by nginx", "--port"),
        (facts(everybody=True, host="0.0.0.0"), "addresses", "warning", "everybody", "--api-key"),
        (gpus(loopback=False), "addresses", "error", "loopback", "ip link"),
        (facts(late=("the port",)), "addresses", "note", "no answer in time: the port", "first"),
        (facts(versions={"torch": "2.9.1"}), "versions", "warning", "torch 2.9.1, tried with >=2.11", "pip install"),
        (facts(versions={}), "versions", "error", "torch is not installed", "pip install"),
        (facts(python=(3, 10, 9)), "versions", "error", "Python 3.10.9", "3.11"),
        (facts(missing_calls=("pidfd_open",)), "versions", "error", "refuses pidfd_open", "seccomp"),
        (facts(environment={"RANK": "1"}), "versions", "note", "RANK of an outer job", ""),
        (facts(folders={"/home/me": None}), "folders", "warning", "cannot be written", "--log-dir"),
        (facts(folders={"/home/me": MIB}), "folders", "warning", "1 MiB free", "room"),
        (facts(time=0.0), "clock", "warning", "date is wrong", "ntp"),
        (facts(clock_source="hpet"), "clock", "warning", "hpet", "tsc"),
        (facts(clock_synchronised=False), "clock", "note", "no time server", "chrony"),
    ],
)
def test_what_is_said_and_what_to_do(machine: Facts, topic: str, level: str, said: str, do: str) -> None:
    found = [one for one in findings(machine) if one.level is not Level.OK]
    matching = [one for one in found if said in one.message]
    assert len(matching) == 1, found
    assert (matching[0].topic, matching[0].level) == (topic, level)
    assert do in matching[0].do
    assert bool(do) == bool(matching[0].do)
    assert {one.topic for one in found} == {topic}  # one fault, one topic


def test_every_finding_is_one_line_and_what_to_do() -> None:
    assert Finding("memory", Level.OK, "enough").text() == "memory     ok       enough"
    assert Finding("memory", Level.ERROR, "little", "more").text().splitlines()[1].strip() == "-> more"


@pytest.mark.parametrize(
    ("version", "wanted", "ok"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("5.24.0", ">=5.17,<5.25", True),
        ("5.25.0", ">=5.17,<5.25", False),
        ("0.22.1", "", True),
        ("4.1", "~=4.0", True),
        ("5.0", "~=4.0", False),
        ("4.2.3", "==4.2", True),
        ("4.2.3", "!=4.2.3", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, wanted: str, ok: bool) -> None:
    assert satisfies(version, wanted) is ok


# ---- this machine ----------------------------------------------------------------------------------------------------


def doctor(*flags: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "drumline.cli.main", "doctor", "--json", *flags],
        capture_output=True,
        text=True,
        timeout=20,
        env={**os.environ, **(env or {})},
        check=False,
    )
    assert " torch\n" not in done.stderr
    assert " transformers\n" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


@pytest.mark.alone
def test_it_is_quick_and_imports_no_torch() -> None:
    best = 9.0
    for _ in range(3):  # others compute here too
        began = time.monotonic()
        code, found = doctor("-tp", "2", "--port", "0")
        best = min(best, time.monotonic() - began)
    assert best < 2.0
    assert code == ExitCode.OK, found
    assert found["ok"]
    assert list(dict.fromkeys(one["topic"] for one in found["findings"])) == TOPICS
    assert found["facts"]["workers"] == 2
    assert found["facts"]["cores"] >= 1
    assert not found["facts"]["late"]


def test_a_port_that_somebody_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, found = doctor("--port", str(taken.getsockname()[1]))
    assert code == ExitCode.START_FAILED
    (error,) = (one for one in found["findings"] if one["level"] == "error")
    assert f"(pid {os.getpid()})" in error["message"]


def test_a_configuration_that_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--port", "0", "-tp", "2", "--distributed-executor-backend", "uni"])
    out = capsys.readouterr().out
    assert code == ExitCode.START_FAILED
    assert "uni runs one worker, but the world size is 2" in out
    assert "-> " in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-dp", "2"), "not built yet: --data-parallel-size"),
        (("MODEL", "-tp", "99"), "99"),
        (("MODEL", "--max-model-len", "999999999"), "--max-model-len"),
        (("/no/such/model",), "there is no such folder"),
        (("--log-dir", "FILE"), "is no folder"),
    ],
)
def test_flags_that_serve_would_refuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").touch()
    model = str(tiny_folder(tmp_path / "model"))
    given = [{"MODEL": model, "FILE": str(tmp_path / "file")}.get(flag, flag) for flag in flags]
    given += ["--load-format", "dummy", "--port", "0"]
    assert main(["doctor", *given]) == ExitCode.START_FAILED
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("flags "))
    assert "error" in line
    assert said in line
    assert main(["doctor", model, "--load-format", "dummy", "--port", "0"]) == ExitCode.OK


def test_a_start_method_of_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMLINE_WORKER_START_METHOD", "bogus")
    assert main(["doctor"]) == ExitCode.START_FAILED
    assert "DRUMLINE_WORKER_START_METHOD must be one of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("to", "code", "said"), [("/dev/full", ExitCode.USAGE, "No space left"), ("a pipe", ExitCode.OK, "")]
)
@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_output_that_nobody_takes(command: str, to: str, code: int, said: str) -> None:
    if to == "a pipe":
        reading, fd = os.pipe()
        os.close(reading)
    else:
        fd = os.open(to, os.O_WRONLY)
    try:
        got = subprocess.run(
            [sys.executable, "-m", "drumline", command], stdout=fd, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(fd)
    assert got.returncode == code, got.stderr
    assert "Traceback" not in got.stderr
    assert said in got.stderr


def test_secrets_are_not_shown() -> None:
    code, found = doctor("--port", "0", env={"HF_TOKEN": "hf_abc", "DRUMLINE_API_KEY": "key_abc", "NCCL_DEBUG": "WARN"})
    assert code == ExitCode.OK
    assert "_abc" not in json.dumps(found)
    assert found["facts"]["environment"]["NCCL_DEBUG"] == "WARN"


def test_a_driver_that_hangs_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def hangs(config: EngineConfig) -> dict[str, Any]:
        gate.wait(30)
        return {}

    monkeypatch.setattr(collecting, "_devices", hangs)
    began = time.monotonic()
    found = collecting.collect(EngineConfig(), ServerConfig(port=0))
    assert time.monotonic() - began < 2.0
    gate.set()
    assert found.devices_late


def test_weights_of_a_local_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert collecting._weights(str(tmp_path)) == {"weights": 1000}
    assert collecting._weights("a/hub-name") == {"weights": None}


@pytest.mark.parametrize("flags", [["--live", "--url", "http://127.0.0.1:1"], ["--live", "--port", "1"]])
def test_no_server_to_ask(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == ExitCode.START_FAILED
    assert "drumline doctor: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pid", "said"), [(None, "not a process of drumline"), (-5, "--pid -5"), (2**70, f"--pid {2**70}")]
)
def test_a_pid_that_is_none_of_ours(capsys: pytest.CaptureFixture[str], pid: int | None, said: str) -> None:
    """None: of this process, which is no server's."""
    assert main(["doctor", "--live", "--pid", str(pid or os.getpid())]) == ExitCode.USAGE
    assert said in capsys.readouterr().err
