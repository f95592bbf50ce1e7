"""NUMA nodes of made-up machines, and where workers belong on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import Device, DeviceTable, ProcessConfig
from drumline.errors import ConfigError
from drumline.platforms import CpuPlatform, CudaPlatform, host
from drumline.platforms.numa import Place, node_of_device, nodes, parse_cpus, place, spread, union

TWO = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}


class Sysfs:
    """A made-up root folder."""

    def __init__(self, root: Path, cpus: Mapping[int, str]) -> None:
        self.root = root
        for node, text in cpus.items():
            self.file(f"sys/devices/system/node/node{node}/cpulist", text)

    def file(self, path: str, text: str) -> None:
        where = self.root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(f"{text}\n")

    def device(self, *path: str, node: int = -1, above: int = -1, near: str = "") -> None:
        """A device behind bridges (``pci0000:3a``, ``0000:3a:00.0``, ``0000:3b:00.0``); ``above``: of the last one."""
        folder = Path("sys/devices", *path)
        self.file(str(folder / "numa_node"), str(node))
        self.file(str(folder.parent / "numa_node"), str(above))
        self.file(str(folder / "local_cpulist"), near)
        link = self.root / "sys/bus/pci/devices" / path[-1]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / folder)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3,8\n", (0, 1, 2, 3, 8)), ("", ()), ("3,1-2,2", (1, 2, 3)), ("0-1, 4-5", (0, 1, 4, 5))],
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["x", "3-1", "-1", "1-", "0:3", "!0"])
def test_no_lists_of_cpus(text: str) -> None:
    with pytest.raises(ValueError):
        parse_cpus(text)


@given(st.sets(st.integers(0, 300)))
def test_what_linux_writes_is_read_back(cpus: set[int]) -> None:
    assert parse_cpus(",".join(map(str, cpus))) == tuple(sorted(cpus))


def test_nodes(tmp_path: Path) -> None:
    assert nodes(tmp_path) == {}  # a kernel without NUMA
    Sysfs(tmp_path, {0: "0-3", 1: "4-7", 10: ""})  # 10: memory without CPUs
    (tmp_path / "sys/devices/system/node/possible").write_text("0-15\n")
    assert nodes(tmp_path) == {**TWO, 10: ()}


@pytest.mark.parametrize(
    ("node", "above", "near", "found"),
    [
        (1, 0, "0-3", 1),  # what the device itself says
        (-1, 1, "0-7", 1),  # what the bridge above it says
        (-1, -1, "4-7", 1),  # what its neighbourhood says
        (-1, -1, "0-7", None),  # everything is near: unknown
        (-1, -1, "", None),
    ],
)
def test_node_of_a_device(tmp_path: Path, node: int, above: int, near: str, found: int | None) -> None:
    sysfs = Sysfs(tmp_path, {0: "0-3", 1: "4-7"})
    sysfs.device("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0", node=node, above=above, near=near)
    sysfs.file("sys/devices/numa_node", "0")  # above the root of the PCI tree: nobody looks there
    assert node_of_device("0000:3b:00.0", tmp_path) == found


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    Sysfs(tmp_path, {0: "0-7"})
    assert node_of_device("0000:3b:00.0", tmp_path) is None
    assert node_of_device("", tmp_path) is None


def test_by_device() -> None:
    places, warnings = place([0, 1, 1, None], TWO, range(8))
    assert places == [Place(cpus=TWO[0], node=0), Place(cpus=TWO[1], node=1), Place(cpus=TWO[1], node=1), Place()]
    assert warnings == ["worker 3 is not bound: the NUMA node of its device is not known (--numa-bind-nodes)"]


def test_a_container_that_has_only_some_cpus() -> None:
    places, warnings = place([0, 1], TWO, [2, 3])
    assert places == [Place(cpus=(2, 3), node=0), Place(cpus=(), node=1)]
    assert warnings == ["worker 1: this process may use no CPU of NUMA node 1; only memory is bound"]


def test_the_users_own_choice() -> None:
    nodes_only, _ = place([0, 0], TWO, range(8), wanted_nodes=[1, 0])
    assert nodes_only == [Place(cpus=TWO[1], node=1), Place(cpus=TWO[0], node=0)]
    both, _ = place([0, 0], TWO, range(8), wanted_nodes=[1, 1], wanted_cpus=["4-5", "6,7"])
    assert both == [Place(cpus=(4, 5), node=1), Place(cpus=(6, 7), node=1)]
    cpus_only, _ = place([None, 0], TWO, range(8), wanted_cpus=["4-5", "3-4"])
    assert cpus_only == [Place(cpus=(4, 5), node=1), Place(cpus=(3, 4), node=0)]  # the second are of two nodes


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"wanted_nodes": [0]}, "--numa-bind-nodes has 1 entries: give one for each of the 2 workers"),
        ({"wanted_cpus": ["0", "1", "2"]}, "--numa-bind-cpus has 3 entries"),
        ({"wanted_nodes": [0, 2]}, r"no NUMA node 2 \(nodes of this machine: 0, 1\)"),
        ({"wanted_cpus": ["0", "x"]}, "lists of CPUs such as 0-3,8; got 'x'"),
        ({"wanted_cpus": ["0", ""]}, "got ''"),
        ({"wanted_cpus": ["0", "7-9"]}, r"this process may not use CPU 8 \(it may use 0, 1, 2, 3, 4, 5, 6, 7\)"),
    ],
)
def test_a_choice_that_cannot_be(wanted: dict[str, list[object]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place([0, 1], TWO, range(8), **wanted)  # type: ignore[arg-type]


def test_workers_of_one_node_with_cpus_of_their_own() -> None:
    places, _ = place([0, 1, 0], TWO, range(8), share=False)
    assert [one.cpus for one in places] == [(0, 1), (4, 5, 6, 7), (2, 3)]
    crowded, _ = place([0] * 5, TWO, range(8), share=False)
    assert {one.cpus for one in crowded} == {TWO[0]}  # not enough: shared after all


@given(
    count=st.integers(1, 9),
    machine=st.dictionaries(st.integers(0, 3), st.sets(st.integers(0, 15), max_size=8), min_size=1),
    allowed=st.sets(st.integers(0, 15), min_size=1),
    share=st.booleans(),
)
def test_every_place_is_on_its_node_and_allowed(
    count: int, machine: dict[int, set[int]], allowed: set[int], share: bool
) -> None:
    topology = {node: tuple(sorted(cpus)) for node, cpus in machine.items()}
    chosen = spread(count, topology, sorted(allowed))
    places, warnings = place(chosen, topology, sorted(allowed), share=share)
    assert len(places) == count
    assert sorted(chosen, key=lambda node: list(topology).index(node) if node is not None else -1) == chosen
    for one, node in zip(places, chosen, strict=True):
        assert one.node == node
        assert set(one.cpus) <= set(topology.get(node, ())) & allowed if node is not None else not one.cpus
    bound = [one for one in places if one.cpus]
    assert len(bound) + len(warnings) == count
    if not share and bound and all(one.cpus for one in places):
        for node in set(chosen):
            of_node = [one.cpus for one in places if one.node == node]
            flat = [cpu for cpus in of_node for cpu in cpus]
            assert len(flat) == len(set(flat)) or len(set(of_node)) == 1


def test_who_talks_to_several_workers() -> None:
    assert union([Place(cpus=(4, 5), node=1), Place(cpus=(0,), node=0)]) == Place(cpus=(0, 4, 5), node=1)
    assert union([Place(cpus=(4, 5), node=1), Place()]) == Place()
    assert union([]) == Place()


def test_platforms_ask_their_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Sysfs(tmp_path, {0: "0-3", 1: "4-7"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr("drumline.platforms.numa.nodes", lambda: nodes(tmp_path))
    table = DeviceTable(
        platform="cuda",
        accelerator=True,
        devices=tuple(Device(index=i, name="x", numa_node=node) for i, node in enumerate((1, 0, 1))),
    )
    asked = ProcessConfig(numa_bind=True)
    assert [one.node for one in CudaPlatform(lambda: (), {}).numa_places(asked, table, 2)] == [1, 0]
    none = DeviceTable(platform="cpu", accelerator=False)
    assert [one.cpus for one in CpuPlatform().numa_places(asked, none, 4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    unbound = ProcessConfig(numa_bind=True, cpu_bind=False)
    assert [one.cpus for one in CpuPlatform().numa_places(unbound, none, 2)] == [TWO[0], TWO[1]]


def test_this_machine() -> None:
    found = nodes()
    if not found:
        pytest.skip("the kernel tells of no nodes")
    assert {cpu for cpus in found.values() for cpu in cpus} >= set(host.allowed_cpus())
