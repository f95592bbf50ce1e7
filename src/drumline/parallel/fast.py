"""Sets up the fast all-reduce of a group of GPUs: facts of all ranks, one probe, one choice, one line in the log.

Every step is agreed over the CPU group, so all members end with the same communicator or all with none: a rank that
fails alone would otherwise wait in another kernel than its peers.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from drumline.parallel.fast_choice import Choice, Place, Topology, choose, unmet
from drumline.parallel.symmetric import FastAllReduce, SymmetricMemory, missing, multicast_allowed
from drumline.platforms import peers

log = logging.getLogger(__name__)


class Objects(Protocol):
    """The CPU side of a group."""

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Member ``src``'s object."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """All objects."""


NCCL_P2P = "NCCL_P2P_DISABLE"

Probe = Callable[[Sequence[int]], Mapping[tuple[int, int], str]]
"""For each pair of GPUs: why they cannot use each other's memory."""
Make = Callable[[int, str], SymmetricMemory]
"""Makes this rank's memory of ``capacity`` bytes under a name."""


def set_up(
    cpu: Objects, place: int, own: Place, make: Make, *, disabled: bool, probe: Probe = peers.peer_access
) -> tuple[FastAllReduce | None, Choice]:
    """The group's communicator and choice; None and a choice if it is NCCL alone. A collective of all members.

    ``place``: of this member in the group; ``own``: where it runs.
    """
    choice = agree(cpu, place, own, disabled=disabled, probe=probe)
    if not choice.is_fast:
        return None, choice
    name = cpu.broadcast_object(f"drumline-{uuid.uuid4().hex}", 0)
    memory, problem = None, ""
    try:
        memory = make(choice.capacity, name)
    except Exception as error:  # noqa: BLE001  whatever torch or the driver cannot do is a reason for NCCL
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    problems = cpu.all_gather_object(problem)
    failed = next((rank for rank, text in enumerate(problems) if text), None)
    if failed is None and memory is not None:
        return FastAllReduce(memory, choice), choice
    if memory is not None:
        memory.close()
    reason = f"symmetric memory of rank {failed} of the group cannot be set up: {problems[failed or 0]}"
    return None, Choice(reason=reason, warns=True)


def agree(cpu: Objects, place: int, own: Place, *, disabled: bool, probe: Probe = peers.peer_access) -> Choice:
    """The choice, the same on all members. The first one asks whether the GPUs reach each other; only if it matters."""
    places = cpu.all_gather_object(own)
    topology = Topology(places=places, multicast=multicast_allowed(), disabled=disabled)
    if place == 0:
        if not disabled and topology.one_node and not unmet(topology):
            devices = [one.device for one in places]
            topology = replace(topology, peers=by_member(devices, probe(devices)))
        choice = choose(topology)
    else:
        choice = None
    agreed: Choice = cpu.broadcast_object(choice, 0)
    return agreed


def respect_peers(cpu: Objects, place: int, device: torch.device, probe: Probe = peers.peer_access) -> None:
    """Ask the probe once for all GPUs of a world on one machine, and keep its verdict on every rank. A collective.

    NCCL would use peer memory wherever the driver offers it: where that does not work, it is told not to, before it is
    set up for the first time.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    devices = cpu.all_gather_object(index)
    verdict = cpu.broadcast_object(probe(devices) if place == 0 else None, 0)
    peers.remember(verdict)
    broken = [f"{one} and {other}: {why}" for (one, other), why in verdict.items() if peers.is_broken(why)]
    if broken and NCCL_P2P not in os.environ:
        os.environ[NCCL_P2P] = "1"
        if place == 0:
            log.warning("NCCL goes without peer memory (%s=1), which is broken between GPUs %s", NCCL_P2P, broken[0])


def by_member(devices: Sequence[int], found: Mapping[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    """What was found for pairs of devices, for pairs of members."""
    pairs = [(one, other) for one in range(len(devices)) for other in range(one + 1, len(devices))]
    return {
        (one, other): found[min(devices[one], devices[other]), max(devices[one], devices[other])]
        for one, other in pairs
    }


def tell(world: Objects, rank: int, ranks: tuple[int, ...], choice: Choice) -> None:
    """One line for all groups of the world, from rank 0: what was chosen and why. A collective of the world."""
    found: dict[str, list[tuple[int, ...]]] = {}
    warns = False
    for group, other in world.all_gather_object((ranks, choice)):
        groups = found.setdefault(other.text(), [])
        if group not in groups:
            groups.append(group)
        warns = warns or other.warns
    if rank == 0 and len(ranks) > 1:
        lines = [f"ranks {' and '.join(map(str, groups))}: {text}" for text, groups in found.items()]
        log.log(logging.WARNING if warns else logging.INFO, "all-reduce on GPUs of %s", "; ".join(lines))


def place_of(device: torch.device) -> Place:
    """Where this rank is."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return Place(
        node=_node(),
        device=index,
        capability=torch.cuda.get_device_capability(index),
        fabric=_fabric(str(torch.cuda.get_device_properties(index).uuid)),
        lacks=missing(),
    )


def _node() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


_FABRIC_COMPLETE = 3


def _fabric(device_uuid: str) -> str:
    """The NVLink domain of a GPU as NVML tells it: cluster and clique; empty if it is in none, or cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001  an optional library, and any driver's error: then nothing is known
        return ""
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{device_uuid}".encode())
        fabric = pynvml.c_nvmlGpuFabricInfo_t()
        pynvml.nvmlDeviceGetGpuFabricInfo(handle, pynvml.byref(fabric))
        cluster = bytes(fabric.clusterUuid).hex()
        return f"{cluster}/{fabric.cliqueId}" if fabric.state == _FABRIC_COMPLETE and cluster.strip("0") else ""
    except Exception:  # noqa: BLE001  the same
        return ""
    finally:
        pynvml.nvmlShutdown()
