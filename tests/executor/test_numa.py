"""Workers near memory, on this machine as it is; and in a container that does not allow it."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.config import START_METHODS, ProcessConfig
from drumline.errors import ConfigError
from drumline.platforms import host, numa
from drumline.processes.linux import SET_MEMPOLICY
from tests.executor.conftest import Make
from tests.executor.test_start_methods import program

PREFERRED = 1
_GET_MEMPOLICY = {name: number - 1 for name, number in SET_MEMPOLICY.items()} | {"x86_64": 239}

pytestmark = pytest.mark.skipif(
    not numa.nodes() or platform.machine() not in SET_MEMPOLICY, reason="this kernel has no NUMA"
)


def look(worker: object) -> tuple[list[int], int, int]:
    """CPUs, kind of memory policy, mask of its nodes."""
    kind, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = _GET_MEMPOLICY[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, ctypes.byref(kind), mask, 16 * 64, None, 0) == 0
    return sorted(os.sched_getaffinity(0)), kind.value, mask[0]


@pytest.mark.parametrize("method", [method for method in START_METHODS if method != "fork"])
def test_every_worker_is_on_its_node(make: Make, method: str) -> None:
    node, cpus = next((node, cpus) for node, cpus in numa.nodes().items() if set(cpus) & set(host.allowed_cpus()))
    executor = make("mp", 2, worker_start_method=method, numa_bind_nodes=(node, node), cpu_bind=False)
    there = sorted(set(cpus) & set(host.allowed_cpus()))
    assert executor.collective_rpc(look) == [(there, PREFERRED, 1 << node)] * 2


def test_found_by_itself(make: Make) -> None:
    """Without devices workers are spread over the nodes."""
    executor = make("mp", 2, numa_bind=True)
    for cpus, kind, mask in executor.collective_rpc(look):
        [node] = [node for node in numa.nodes() if mask == 1 << node]
        assert kind == PREFERRED
        assert set(cpus) <= set(numa.nodes()[node])


def test_cpus_that_are_given(make: Make) -> None:
    cpu = host.allowed_cpus()[-1]
    executor = make("mp", 1, numa_bind_cpus=(str(cpu),))
    [(cpus, kind, _)] = executor.collective_rpc(look)
    assert (cpus, kind) == ([cpu], PREFERRED)
    assert executor.collective_rpc(lambda worker: host.cores()) == [host.cores()]  # it counts its neighbours' too


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"numa_bind_nodes": (0,)}, "one for each of the 2 workers"),
        ({"numa_bind_nodes": (0, 4711)}, "no NUMA node 4711"),
        ({"numa_bind_cpus": ("0", "4711")}, "may not use CPU 4711"),
    ],
)
def test_what_cannot_be(make: Make, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make("mp", 2, **options)


def test_nodes_or_cpus_ask_for_it_too() -> None:
    assert not ProcessConfig().numa
    assert ProcessConfig(numa_bind=True).numa
    assert ProcessConfig(numa_bind_nodes=[0]).numa  # type: ignore[arg-type]
    assert ProcessConfig(numa_bind_cpus=["0-3"]).numa  # type: ignore[arg-type]


REFUSE = """
import ctypes, platform
from drumline.processes.linux import SET_MEMPOLICY

class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]

# what a container does: load the number of the system call; set_mempolicy gets EPERM, all else is allowed
filters = (Filter * 4)(
    Filter(0x20, 0, 0, 0), Filter(0x15, 0, 1, SET_MEMPOLICY[platform.machine()]),
    Filter(0x06, 0, 0, 0x00050001), Filter(0x06, 0, 0, 0x7FFF0000),
)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(4, filters)), 0, 0) == 0
for method in ("forkserver", "spawn", "plain"):
    with open_executor(method, {folder!r}, numa_bind=True) as executor:
        print(executor.collective_rpc("echo", ("works",)))
"""


def test_a_container_that_refuses(tmp_path: Path) -> None:
    """A warning of each worker, and all works."""
    done = subprocess.run(
        [sys.executable, "-c", program(tmp_path, REFUSE)], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[(0, ('works',), {}), (1, ('works',), {})]") == 3
    warnings = done.stderr.splitlines()
    assert len(warnings) == 6
    for rank in (0, 1):
        assert sum(line.startswith(f"(Worker_{rank} pid=") for line in warnings) == 3
    assert all("cannot prefer memory of NUMA node 0: [Errno 1] Operation not permitted" in line for line in warnings)
    assert all("--cap-add SYS_NICE" in line for line in warnings)
