"""NUMA: which node a device hangs on, which CPUs a node has, and where each worker of this machine belongs.

Everything is read from sysfs below ``root``, so that tests can give a made-up machine; :func:`place` is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.errors import ConfigError
from drumline.platforms import host

_NODES = Path("sys/devices/system/node")
_PCI = Path("sys/bus/pci/devices")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process belongs."""

    cpus: tuple[int, ...] = ()
    """CPUs that it is bound to; empty: it is not."""
    node: int | None = None
    """Node that its memory comes from; None: any."""


def parse_cpus(text: str) -> tuple[int, ...]:
    """CPUs of a list as Linux and numactl write it: ``0-3,8,10-11``. ValueError if it is none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part.strip():
            continue
        first, dash, last = part.partition("-")
        low = int(first)
        high = int(last) if dash else low
        if not 0 <= low <= high:
            raise ValueError(f"{part!r} is no range of CPUs")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def nodes(root: Path = host.ROOT) -> dict[int, tuple[int, ...]]:
    """CPUs of each node that is online; empty where the kernel tells of none."""
    found = {}
    for folder in (root / _NODES).glob("node[0-9]*"):
        try:
            found[int(folder.name.removeprefix("node"))] = parse_cpus((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return dict(sorted(found.items()))


def node_of_device(bus: str, root: Path = host.ROOT) -> int | None:
    """Node of the device at a PCI address (``0000:3b:00.0``); None where sysfs does not know or has no such device.

    Firmware often leaves the device itself at -1 while a bridge above it knows; and where none knows, the CPUs that
    are near it (``local_cpulist``) may be those of one node.
    """
    device = root / _PCI / bus
    if not bus or not device.exists():
        return None
    try:
        path = device.resolve()
    except OSError:
        return None
    for folder in (path, *path.parents):
        try:
            node = int((folder / "numa_node").read_text())
        except (OSError, ValueError):
            node = -1
        if node >= 0:
            return node
        if folder.name.startswith("pci") or folder == root:  # the root of the PCI tree
            break
    return _node_of_cpus(path, root)


def _node_of_cpus(path: Path, root: Path) -> int | None:
    try:
        near = set(parse_cpus((path / "local_cpulist").read_text()))
    except (OSError, ValueError):
        return None
    all_nodes = nodes(root)
    found = [node for node, cpus in all_nodes.items() if cpus and near == set(cpus)]
    return found[0] if len(found) == 1 and len(all_nodes) > 1 else None


def place(
    device_nodes: Sequence[int | None],
    all_nodes: Mapping[int, Sequence[int]],
    allowed: Sequence[int],
    *,
    wanted_nodes: Sequence[int] = (),
    wanted_cpus: Sequence[str] = (),
    share: bool = True,
) -> tuple[list[Place], list[str]]:
    """Where each worker of this machine belongs, and what to warn of.

    Args:
        device_nodes: for each worker the node of its device; None: unknown.
        all_nodes: CPUs of each node.
        allowed: CPUs that this process may use.
        wanted_nodes: the user's own choice, one for each worker; empty: by device.
        wanted_cpus: the same, lists of CPUs; empty: all of the node.
        share: workers of one node share its CPUs; False: each gets an even part of its own, where there are enough.

    Raises ConfigError if the user chose what this machine does not have.

    """
    count = len(device_nodes)
    _check_count(count, "--numa-bind-nodes", wanted_nodes)
    _check_count(count, "--numa-bind-cpus", wanted_cpus)
    chosen: list[int | None] = [_wanted(node, all_nodes) for node in wanted_nodes]
    chosen = chosen or list(device_nodes)
    given = [_given(text, allowed) for text in wanted_cpus]
    if given and not wanted_nodes:
        chosen = [_only_node(cpus, all_nodes, node) for cpus, node in zip(given, chosen, strict=True)]
    warnings: list[str] = []
    places = []
    for index, node in enumerate(chosen):
        if given:
            places.append(Place(cpus=given[index], node=node))
        elif node is None:
            warnings.append(
                f"worker {index} is not bound: the NUMA node of its device is not known (--numa-bind-nodes)"
            )
            places.append(Place())
        else:
            cpus = _own(index, chosen, [cpu for cpu in all_nodes.get(node, ()) if cpu in set(allowed)], share)
            if not cpus:
                warnings.append(
                    f"worker {index}: this process may use no CPU of NUMA node {node}; only memory is bound"
                )
            places.append(Place(cpus=cpus, node=node))
    return places, warnings


def spread(count: int, all_nodes: Mapping[int, Sequence[int]], allowed: Sequence[int]) -> list[int | None]:
    """Nodes for workers without devices: runs of neighbours, as even as can be, over the nodes with CPUs for them."""
    usable = [node for node, cpus in all_nodes.items() if set(cpus) & set(allowed)]
    return [usable[index * len(usable) // count] if usable else None for index in range(count)]


def union(places: Sequence[Place]) -> Place:
    """Where a process belongs that talks to all of these: on all their CPUs, with memory of the first."""
    if not places or not all(one.cpus for one in places):
        return Place()
    return Place(cpus=tuple(sorted({cpu for one in places for cpu in one.cpus})), node=places[0].node)


def _check_count(workers: int, flag: str, given: Sequence[object]) -> None:
    if given and len(given) != workers:
        raise ConfigError(
            f"{flag} has {len(given)} entries: give one for each of the {workers} workers of this machine"
        )


def _wanted(node: int, all_nodes: Mapping[int, Sequence[int]]) -> int:
    if node not in all_nodes:
        known = ", ".join(map(str, all_nodes)) or "none"
        raise ConfigError(f"--numa-bind-nodes: there is no NUMA node {node} (nodes of this machine: {known})")
    return node


def _given(text: str, allowed: Sequence[int]) -> tuple[int, ...]:
    try:
        cpus = parse_cpus(text)
    except ValueError:
        cpus = ()
    if not cpus:
        raise ConfigError(f"--numa-bind-cpus takes lists of CPUs such as 0-3,8; got {text!r}")
    missing = [cpu for cpu in cpus if cpu not in set(allowed)]
    if missing:
        raise ConfigError(
            f"--numa-bind-cpus {text}: this process may not use CPU {missing[0]} (it may use "
            f"{', '.join(map(str, allowed))})"
        )
    return cpus


def _only_node(cpus: Sequence[int], all_nodes: Mapping[int, Sequence[int]], otherwise: int | None) -> int | None:
    """The node that all of these CPUs are of."""
    found = [node for node, of_node in all_nodes.items() if set(cpus) <= set(of_node)]
    return found[0] if found else otherwise


def _own(index: int, chosen: Sequence[int | None], cpus: Sequence[int], share: bool) -> tuple[int, ...]:
    neighbours = [other for other, node in enumerate(chosen) if node == chosen[index]]
    if share or len(cpus) < len(neighbours):
        return tuple(cpus)
    return host.part_of(cpus, neighbours.index(index), len(neighbours))
