"""The Platform interface: all that drumline knows about a kind of device.

The first half is asked before any worker exists, in processes without torch: it must not import it, open a device or
leave a descriptor of one open. The second half is called in workers and may import torch.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from drumline.config import DeviceTable, ProcessConfig
from drumline.errors import ConfigError
from drumline.platforms import host, numa
from drumline.platforms.numa import Place

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes."""

    free: int
    total: int


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What a driver tells of one device without opening it."""

    index: int
    name: str
    uuid: str = ""
    memory: int = 0
    """Bytes; 0: unknown."""
    free: int | None = None
    """Bytes that nobody uses; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a platform can say about its devices before anything is started (``drumline doctor``)."""

    devices: tuple[DeviceFacts, ...] = ()
    driver: str = ""
    peers: Mapping[str, str] = field(default_factory=dict)
    """``0-1`` to ``ok``, or to why two devices cannot read each other's memory. Empty: unknown."""


class Platform(ABC):
    """One kind of device. Subclasses set the class variables and write the abstract methods."""

    name: ClassVar[str]
    """What ``--platform`` and messages call it."""
    accelerator: ClassVar[bool] = True
    """Whether each worker needs a device of its own."""
    device_type: ClassVar[str]
    """torch's name of the device type, such as ``cuda``."""
    collective_backend: ClassVar[str] = "gloo"
    """torch.distributed's name of the backend of device groups."""
    ray_resource: ClassVar[str] = "GPU"
    """Ray's name of the resource of which each worker takes one."""
    needs_tcp_store: ClassVar[bool] = False
    """Whether its communicators need a TCP store, so that a file in memory is not enough as a rendezvous."""
    starts_concurrently: ClassVar[bool] = True
    """Whether its workers may be started at the same time."""
    visible_devices_variable: ClassVar[str] = ""
    """Environment variable that chooses and orders devices; its tokens are passed through untouched."""
    device_files: ClassVar[tuple[str, ...]] = ()
    """Beginnings of paths of device files; the fork server must have none of them open."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this machine has at least one usable device of this kind."""

    def diagnosis(self) -> Diagnosis:
        """The devices of :meth:`device_table`, and whatever else the driver tells without opening one."""
        return Diagnosis(
            devices=tuple(
                DeviceFacts(index=one.index, name=one.name, uuid=one.uuid, memory=one.memory)
                for one in self.device_table().devices
            )
        )

    @abstractmethod
    def device_table(self) -> DeviceTable:
        """The devices that this process may use, in the order in which workers count them. ConfigError says why not."""

    @abstractmethod
    def device_initialised(self) -> bool:
        """Whether this process has opened a device already, so that it must not fork workers."""

    def worker_environment(self, environ: Mapping[str, str], *, one_machine: bool = True) -> dict[str, str]:
        """Variables that workers need beside ``environ``. What the user has set is left as it is where it may be."""
        return {}

    def threads_per_worker(self, wanted: int, workers: int, environ: Mapping[str, str]) -> int:
        """Compute threads of one of ``workers`` workers on this machine: what is wanted (> 0), else the user's
        OMP_NUM_THREADS, else cores / workers. Never more than there are cores, with a warning."""
        cores = host.cores()
        name = "--threads-per-worker" if wanted > 0 else "OMP_NUM_THREADS"
        threads = wanted if wanted > 0 else self.user_threads(environ)
        if threads > cores:
            log.warning("%s is %d, but there are %d cores: each worker gets %d threads", name, threads, cores, cores)
            threads = cores
        return threads or max(1, cores // max(1, workers))

    def cpus_of_worker(self, index: int, workers: int, threads: int) -> tuple[int, ...]:
        """Which cores worker ``index`` of this machine's should be bound to; empty: none in particular."""
        return ()

    def numa_places(
        self, process: ProcessConfig, devices: DeviceTable, workers: int, *, warn: bool = True
    ) -> list[Place]:
        """Where each of this machine's ``workers`` belongs (``--numa-bind`` and its kin); what cannot be is logged.

        ConfigError if nodes or CPUs that were given do not exist here.
        """
        all_nodes, allowed = numa.nodes(), host.allowed_cpus()
        found = [device.numa_node for device in devices.devices[:workers]]
        if not self.accelerator:
            found = numa.spread(workers, all_nodes, allowed)
        found += [None] * (workers - len(found))
        share = self.accelerator or not process.cpu_bind
        places, warnings = numa.place(
            found,
            all_nodes,
            allowed,
            wanted_nodes=process.numa_bind_nodes,
            wanted_cpus=process.numa_bind_cpus,
            share=share,
        )
        for warning in warnings if warn else ():
            log.warning("%s", warning)
        return places

    def user_threads(self, environ: Mapping[str, str]) -> int:
        """OMP_NUM_THREADS (its first number: that of the outermost level); 0 if it is not set.

        ConfigError if it is no number of threads.
        """
        text = environ.get("OMP_NUM_THREADS", "")
        if not text.strip():
            return 0
        first = text.split(",")[0].strip()
        if not (first.isascii() and first.isdecimal() and int(first) > 0):
            raise ConfigError(f"OMP_NUM_THREADS must be a number of threads, at least 1. Got {text!r}")
        return int(first)

    # In workers.

    @abstractmethod
    def set_device(self, index: int) -> torch.device:
        """Make device ``index`` of the table the current one of this process; what tensors are made on."""

    @abstractmethod
    def memory(self, index: int) -> DeviceMemory:
        """Free and total memory of device ``index`` now, by all processes' use."""

    def free_before_use(self, index: int) -> int:
        """Free bytes of device ``index`` as the driver tells them without opening it; 0: it does not."""
        return 0

    def own_memory(self, index: int) -> int | None:
        """Bytes of device ``index`` that this process has in all, as the driver says; None: it does not."""
        return None

    def peer_access(self, first: int, second: int) -> bool:
        """Whether two devices of this machine reach each other's memory directly."""
        return False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the current device has done all that it was given."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that torch keeps for later back to the device."""
