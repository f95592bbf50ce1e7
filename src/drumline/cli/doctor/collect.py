"""Finds out what ``findings`` judges. Whatever may take long is asked in threads, all at once, with one deadline."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from drumline.cli.doctor.facts import Facts
from drumline.config import EngineConfig, ServerConfig
from drumline.engine.checks import check_machine, check_model
from drumline.errors import ConfigError
from drumline.platforms import Diagnosis, host, resolve_platform
from drumline.platforms.cuda import torch_is_cpu_build
from drumline.processes.logs import check_log_dir, state_folder
from drumline.processes.start_methods import asked_for
from drumline.server.sockets import bind, is_loopback
from drumline.transport.memory import memfd

DEADLINE_S = 1.2
"""For everything that may hang."""
DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
VARIABLES = re.compile(r"(CUDA|NCCL|OMP|MKL|TORCH|DRUMLINE|HF|GLOO)_\w+|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_(ADDR|PORT)")
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")
_TIME_ERROR = 5  # adjtimex: the clock is not synchronised


def collect(config: EngineConfig, server: ServerConfig, check_flags: Callable[[], object] = lambda: None) -> Facts:
    """Look at this machine. Takes less than two seconds. ``check_flags``: raises ConfigError for what ``serve`` would
    refuse at once."""
    asked = {
        "the model": _Asked(lambda: _refusals(config, check_flags)),
        "devices": _Asked(lambda: _devices(config)),
        "the port": _Asked(lambda: _port(server)),
        "who has the port": _Asked(lambda: _holder(server.port)),
        "the weights": _Asked(lambda: _weights(config.model.model)),
        "folders": _Asked(lambda: _folders(config.process.log_dir)),
        "versions": _Asked(_versions),
    }
    parallel = config.parallel
    facts: dict[str, Any] = {
        "workers": parallel.local_devices,
        "processes": server.api_servers(parallel) + parallel.data_parallel_size + parallel.local_devices + 1,
        "threads_per_worker": config.process.threads_per_worker,
        "host": server.host,
        "port": server.port,
        **_memory(),
        **_cores(),
        **_kernel(),
        **_clock(),
    }
    facts["environment"] = {
        name: "(set)" if SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if VARIABLES.fullmatch(name)
    }
    deadline = time.monotonic() + DEADLINE_S
    answers = {name: one.answer(deadline) for name, one in asked.items()}
    facts["late"] = tuple(name for name, answer in answers.items() if answer is None and name != "devices")
    facts["devices_late"] = answers["devices"] is None
    for name in ("the model", "devices", "the port", "the weights", "folders", "versions"):
        facts |= answers[name] or {}
    if facts.get("port_refusal"):
        facts |= answers["who has the port"] or {}
    return Facts(**facts)


class _Asked:
    """A question in a thread of its own."""

    def __init__(self, question: Callable[[], Mapping[str, Any]]) -> None:
        self._found: Mapping[str, Any] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, args=(question,), name="doctor", daemon=True)
        self._thread.start()

    def _ask(self, question: Callable[[], Mapping[str, Any]]) -> None:
        try:
            self._found = question()
        except BaseException as error:  # noqa: BLE001  raised where the answer is wanted
            self._error = error

    def answer(self, deadline: float) -> Mapping[str, Any] | None:
        """None if it did not come in time."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        return self._found


def _refusals(config: EngineConfig, check_flags: Callable[[], object]) -> dict[str, Any]:
    """What does not depend on this machine; nothing is fetched."""
    model = config.model

    def check_model_folder() -> None:
        if model.model and (model.model.startswith((".", "/", "~")) or Path(model.model).is_dir()):
            from drumline.model.resolve import resolve  # only then: it takes its time

            check_model(config.with_(model=resolve(model)))

    def check_log_folder() -> None:
        if config.process.log_dir:
            check_log_dir(config.process.log_dir)

    found = []
    for check in (
        check_flags,
        lambda: asked_for(config.process.worker_start_method, os.environ),
        check_log_folder,
        check_model_folder,
    ):
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    return {"refusals": tuple(found)}


def _devices(config: EngineConfig) -> dict[str, Any]:
    found: dict[str, Any] = {
        "driver_present": any(Path(path).exists() for path in DRIVERS),
        "torch_is_cpu_build": torch_is_cpu_build(),
    }
    try:
        platform = resolve_platform(config.platform)
        table = platform.device_table()
        found |= {"platform": table.platform, "accelerator": table.accelerator}
        diagnosis = platform.diagnosis() if table.accelerator else Diagnosis()
        found |= {"devices": diagnosis.devices, "driver": diagnosis.driver, "peers": diagnosis.peers}
        check_machine(config, table)
    except (ConfigError, TypeError) as error:
        found["refusal"] = str(error)
    return found


def _port(server: ServerConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        for sock in bind(server.host, server.port):
            with sock:
                found["everybody"] = not is_loopback(sock.getsockname()[0]) and not server.api_key
    except ConfigError as error:
        found["port_refusal"] = str(error)
    found["loopback"] = False
    for address in ("127.0.0.1", "::1"):
        try:
            for sock in bind(address, 0):
                sock.close()
            found["loopback"] = True
        except ConfigError:
            pass
    return found


def _holder(port: int) -> dict[str, Any]:
    """Who listens on the port; processes of other users are seen without a name."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                if not connection.pid:
                    return {"port_holder": "a process of another user"}
                return {"port_holder": f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"}
    except (psutil.Error, OSError):  # gone meanwhile, or not ours to see
        pass
    return {"port_holder": ""}


def _weights(model: str) -> dict[str, Any]:
    folder = Path(model) if model else None
    if folder is None or not folder.is_dir():
        return {"weights": None}
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return {"weights": sum(sizes) if sizes else None}


def _folders(log_dir: str) -> dict[str, Any]:
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = (Path(base) if base else Path.home() / ".cache") / "drumline"
    return {"folders": {str(folder): _room(folder) for folder in (Path(log_dir or state_folder()), cache)}}


def _room(folder: Path) -> int | None:
    """Free bytes where the folder is or will be; None if it cannot be written to."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _versions() -> dict[str, Any]:
    wanted = {}
    for line in metadata.requires("drumline") or ():
        match = re.match(r"([\w.-]+)\s*([^;]*)(;.*)?$", line)
        if match and "extra ==" not in (match[3] or "") and "win32" not in (match[3] or ""):
            wanted[match[1]] = match[2].strip()
    versions = {}
    for name in ("drumline", *wanted):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return {"versions": versions, "requirements": wanted}


def _memory() -> dict[str, Any]:
    total = psutil.virtual_memory().total
    limit = host.memory_total()
    found: dict[str, Any] = {
        "memory_total": total,
        "memory_limit": limit if limit and limit < total else None,
        "memory_available": host.memory_available(),
        "oom_kills": host.oom_kills(),
    }
    text = _read("/proc/sys/vm/overcommit_memory")
    found["overcommit"] = int(text) if text.isdigit() else None
    try:
        space = os.statvfs("/dev/shm")
        found["shm_free"] = space.f_bavail * space.f_frsize
    except OSError:
        found["shm_free"] = None
    return found


def _cores() -> dict[str, Any]:
    versions = [name for name, path in (("v1", "memory"), ("v2", "cgroup.controllers")) if _cgroup(path)]
    return {
        "cgroups": " and ".join(versions),
        "cores_online": os.cpu_count() or 1,
        "cores_affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "cpu_quota": host.cpu_quota(),
        "cores": host.cores(),
        "load": os.getloadavg()[0],
        "omp_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "tasks_left": host.tasks_left(),
    }


def _cgroup(name: str) -> bool:
    folder = Path("/sys/fs/cgroup")
    return (folder / name).exists() or (folder / "unified" / name).exists()


def _kernel() -> dict[str, Any]:
    system = os.uname()
    missing = []
    try:
        os.close(memfd("drumline-doctor", 4096))
    except OSError:
        missing.append("memfd_create")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):
        missing.append("pidfd_open")
    return {
        "python": tuple(sys.version_info[:3]),
        "kernel": f"{system.sysname} {system.release} {system.machine}",
        "missing_calls": tuple(missing),
    }


def _clock() -> dict[str, Any]:
    return {
        "time": time.time(),
        "clock_source": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "clock_synchronised": _synchronised(),
    }


def _synchronised() -> bool | None:
    """Whether something keeps the clock; None: the kernel does not say."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # modes 0: only read
    return None if state < 0 else state != _TIME_ERROR


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
