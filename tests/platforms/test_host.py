"""Cores and memory, on made-up machines: control groups of version 1, version 2, mixed, and inside containers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.platforms import host
from drumline.platforms.cpu import CpuPlatform

GIB = 1 << 30


class Machine:
    """A made-up root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file("proc/meminfo", f"MemTotal: {16 * 1024 * 1024} kB\nMemAvailable: {12 * 1024 * 1024} kB\n")

    def file(self, path: str, text: str | int) -> None:
        where = self.root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(f"{text}\n")

    def v2(self, path: str = "/", seen: str = "/", at: str = "/sys/fs/cgroup") -> None:
        self.file("proc/self/cgroup", f"0::{path}")
        self.file("proc/self/mountinfo", f"30 24 0:26 {seen} {at} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate")

    def v1(self, path: str, seen: str = "/") -> None:
        self.file("proc/self/cgroup", f"5:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:/\n0::/")
        line = f"%d 25 0:%d {seen} /sys/fs/cgroup/%s rw - cgroup cgroup rw,%s"
        mounts = [line % (31, 31, "memory", "memory"), line % (32, 32, "cpu,cpuacct", "cpu,cpuacct")]
        self.file("proc/self/mountinfo", "\n".join(mounts))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    return Machine(tmp_path)


def test_without_control_groups(machine: Machine) -> None:
    assert host.cores(machine.root) == 8
    assert host.memory_total(machine.root) == 16 * GIB
    assert host.memory_available(machine.root) == 12 * GIB


def test_nothing_is_known(machine: Machine) -> None:
    (machine.root / "proc/meminfo").unlink()
    assert (host.memory_total(machine.root), host.memory_available(machine.root)) == (0, 0)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("150000 100000", 1), ("50000 100000", 1), ("400000 100000", 4), ("9900000 100000", 8)],
)
def test_quota_of_version_2(machine: Machine, quota: str, cores: int) -> None:
    machine.v2("/a/b")
    machine.file("sys/fs/cgroup/a/b/cpu.max", quota)
    assert host.cores(machine.root) == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (300000, 3), (20000, 1)])
def test_quota_of_version_1(machine: Machine, quota: int, cores: int) -> None:
    machine.v1("/job")
    machine.file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", quota)
    machine.file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", 100000)
    assert host.cores(machine.root) == cores


@pytest.mark.parametrize(("version", "file"), [("v1", "memory/job/memory.oom_control"), ("v2", "job/memory.events")])
def test_kills_for_want_of_memory(machine: Machine, version: str, file: str) -> None:
    getattr(machine, version)("/job")
    assert host.oom_kills(machine.root) is None
    machine.file("proc/vmstat", "nr_free_pages 7\noom_kill 5")
    assert host.oom_kills(machine.root) == 5  # nothing nearer
    machine.file(f"sys/fs/cgroup/{file}", "oom_kill_disable 0\nunder_oom 0\noom_kill 2")
    assert host.oom_kills(machine.root) == 2
    assert host.oom_killed_since(1, machine.root)
    assert not host.oom_killed_since(2, machine.root)
    assert not host.oom_killed_since(None, machine.root)


def test_what_else_is_limited(machine: Machine) -> None:
    machine.v2("/a/b")
    assert (host.cpu_quota(machine.root), host.tasks_left(machine.root)) == (None, None)
    machine.file("sys/fs/cgroup/a/cpu.max", "50000 100000")
    machine.file("sys/fs/cgroup/a/pids.max", 100)
    machine.file("sys/fs/cgroup/a/pids.current", 70)
    machine.file("sys/fs/cgroup/a/b/pids.max", "max")
    machine.file("sys/fs/cgroup/a/b/pids.current", 1)
    assert (host.cpu_quota(machine.root), host.tasks_left(machine.root)) == (0.5, 30)


def test_the_smallest_limit_of_all_levels_holds(machine: Machine) -> None:
    machine.v2("/a/b")
    machine.file("sys/fs/cgroup/a/cpu.max", "200000 100000")
    machine.file("sys/fs/cgroup/a/b/cpu.max", "500000 100000")
    machine.file("sys/fs/cgroup/a/memory.max", 4 * GIB)
    machine.file("sys/fs/cgroup/a/memory.current", 3 * GIB)
    machine.file("sys/fs/cgroup/a/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file 1")
    machine.file("sys/fs/cgroup/a/b/memory.max", "max")
    assert host.cores(machine.root) == 2
    assert host.memory_total(machine.root) == 4 * GIB
    assert host.memory_available(machine.root) == 2 * GIB


def test_memory_of_version_1(machine: Machine) -> None:
    machine.v1("/job")
    machine.file("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    machine.file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 2 * GIB)
    machine.file("sys/fs/cgroup/memory/job/memory.usage_in_bytes", GIB)
    machine.file("sys/fs/cgroup/memory/job/memory.stat", f"cache 1\ninactive_file 7\ntotal_inactive_file {GIB // 2}")
    assert host.memory_total(machine.root) == 2 * GIB
    assert host.memory_available(machine.root) == GIB + GIB // 2


def test_a_container_that_sees_its_own_group_as_the_mount(machine: Machine) -> None:
    machine.v1("/docker/abc", seen="/docker/abc")
    machine.file("sys/fs/cgroup/memory/memory.limit_in_bytes", GIB)
    machine.file("sys/fs/cgroup/memory/memory.usage_in_bytes", 0)
    assert host.memory_total(machine.root) == GIB


def test_a_group_outside_of_what_is_mounted(machine: Machine) -> None:
    machine.v2("/../other", seen="/box")
    machine.file("sys/fs/cgroup/cpu.max", "300000 100000")
    assert host.cores(machine.root) == 3


def test_mixed_hierarchies(machine: Machine) -> None:
    machine.v1("/job")
    mounts = (machine.root / "proc/self/mountinfo").read_text()
    machine.file("proc/self/mountinfo", f"{mounts}40 25 0:40 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")
    machine.file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", 200000)
    machine.file("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", 100000)
    assert host.cores(machine.root) == 2


def test_affinity_of_this_machine() -> None:
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script += "from drumline.platforms import host; print(host.cores())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "1\n"


def test_memory_of_this_machine() -> None:
    assert 0 < host.memory_available() <= host.memory_total()


@pytest.mark.parametrize(("cpus", "parts"), [(2, 2), (32, 5), (7, 3), (64, 64)])
def test_parts_of_cores(cpus: int, parts: int) -> None:
    numbers = list(range(10, 10 + cpus))
    found = [host.part_of(numbers, index, parts) for index in range(parts)]
    assert [cpu for part in found for cpu in part] == numbers
    assert {len(part) for part in found} <= {cpus // parts, cpus // parts + 1}


def test_who_is_bound_counts_shared_cores() -> None:
    code = (
        "import os; from drumline.platforms import host; before = host.cores(); "
        "host.bind([min(os.sched_getaffinity(0))]); "
        "assert len(os.sched_getaffinity(0)) == 1; assert host.cores() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_workers_get_cores_of_their_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = CpuPlatform()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(host, "cores", lambda: 8)
    assert [platform.cpus_of_worker(i, 3, 2) for i in range(3)] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert platform.cpus_of_worker(0, 1, 1) == ()  # alone
    assert platform.cpus_of_worker(0, 3, 3) == ()  # too few for their threads
    assert platform.cpus_of_worker(0, 9, 1) == ()
    monkeypatch.setattr(host, "cores", lambda: 2)  # a quota
    assert platform.cpus_of_worker(0, 3, 1) == ()
