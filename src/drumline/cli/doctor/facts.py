"""What ``drumline doctor`` knows of a machine and of what is to run on it: data, made by ``collect`` or by a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from drumline.platforms.base import DeviceFacts


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One machine and one configuration. Sizes are bytes; None: unknown."""

    # what is to run
    workers: int = 1
    """On this machine."""
    processes: int = 2
    """All of the server's."""
    threads_per_worker: int = 0
    """0: not given."""
    refusal: str = ""
    """Why ``serve`` would refuse this configuration with these devices; empty: it would not."""
    refusals: tuple[str, ...] = ()
    """Why it would refuse these flags on any machine, or this model with them."""
    weights: int | None = None
    """Of the model's files, if it is a local folder."""

    # devices
    platform: str = "cpu"
    accelerator: bool = False
    devices: tuple[DeviceFacts, ...] = ()
    driver: str = ""
    peers: Mapping[str, str] = field(default_factory=dict)
    """``0-1`` to ``ok`` or what keeps two devices from reaching each other's memory. Empty: unknown."""
    devices_late: bool = False
    """The driver did not answer in time."""
    driver_present: bool = False
    """There is a GPU driver on this machine."""
    torch_is_cpu_build: bool = False

    # memory
    memory_total: int = 0
    """Of the machine."""
    memory_limit: int | None = None
    """Of the control group."""
    memory_available: int = 0
    oom_kills: int | None = None
    """In this control group so far."""
    overcommit: int | None = None
    """vm.overcommit_memory."""
    shm_free: int | None = None
    """In /dev/shm."""

    # cores, threads, limits
    cgroups: str = ""
    """``v1``, ``v2``, ``v1 and v2``; empty: none."""
    cores_online: int = 1
    cores_affinity: int = 1
    cpu_quota: float | None = None
    """Cores that the control group may use."""
    cores: int = 1
    """That this process may use, all counted in."""
    load: float = 0.0
    """Over the last minute."""
    omp_threads: str = ""
    """OMP_NUM_THREADS."""
    open_files: tuple[int, int] = (1024, 1024)
    """Soft and hard limit; -1: none."""
    tasks_left: int | None = None
    """Processes and threads that the control group and the user may still make; None: no limit."""

    # addresses
    host: str = "127.0.0.1"
    port: int = 8000
    port_refusal: str = ""
    """Why it cannot be bound; empty: it can."""
    port_holder: str = ""
    """Who has it."""
    loopback: bool = True
    """127.0.0.1 or ::1 can be bound."""
    everybody: bool = False
    """The server would be reachable from elsewhere without an API key."""

    # versions and the rest
    python: tuple[int, ...] = (3, 11, 0)
    kernel: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that are needed; empty text: not installed."""
    requirements: Mapping[str, str] = field(default_factory=dict)
    """``torch`` to ``>=2.11``."""
    missing_calls: tuple[str, ...] = ()
    """Of the kernel: memfd_create, pidfd_open ..."""
    folders: Mapping[str, int | None] = field(default_factory=dict)
    """Free bytes of the folders that are written to; None: not writable."""
    time: float = 0.0
    """Seconds since 1970."""
    clock_source: str = ""
    clock_synchronised: bool | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that change what happens."""
    late: tuple[str, ...] = ()
    """What did not answer in time."""
