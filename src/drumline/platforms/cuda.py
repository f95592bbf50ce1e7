"""The cuda platform: NVIDIA GPUs.

Devices are counted without torch and without CUDA: NVML (nvidia-ml-py) if it can be imported, else ``nvidia-smi``,
else /proc/driver/nvidia (without memory sizes). All three list GPUs in the order of the PCI bus, so workers get
CUDA_DEVICE_ORDER=PCI_BUS_ID: CUDA's own default puts the fastest first, and a table in another order than the
workers' would give a rank another device than it says.

CUDA_VISIBLE_DEVICES is read here and never written: a worker picks its device by index among the visible ones, in the
order of the tokens (index, GPU-uuid or MIG-uuid, each also as an unambiguous beginning). What CUDA would pass over in
silence, an unknown device and everything after it, is an error here, and so are duplicates.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drumline.config import Device, DeviceTable
from drumline.errors import ConfigError
from drumline.platforms import host
from drumline.platforms.base import DeviceMemory, Diagnosis, Platform
from drumline.platforms.numa import node_of_device
from drumline.platforms.peers import peer_access

if TYPE_CHECKING:
    import torch

VARIABLE = "CUDA_VISIBLE_DEVICES"
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""What keeps NCCL and torch from NVLink multicast. It is off unless the user has set these otherwise: the fabric is
shared by all of a machine's GPUs, and programs that ended badly while they used it have left it unusable for all."""
T = TypeVar("T")
_SMI_TIMEOUT_S = 20.0
_HIDDEN = ("-1", "NoDevFiles", "none", "void")
"""Tokens that end the list on purpose: nothing after them is visible."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One physical GPU, or one MIG instance of it."""

    uuid: str
    name: str
    memory: int = 0
    free: int = 0
    """Bytes that nobody uses; 0: unknown."""
    bus: str = ""
    instances: tuple[Gpu, ...] = ()
    """MIG instances; a GPU that has some can only be used through them."""


class CudaPlatform(Platform):
    """NVIDIA GPUs, one for each worker.

    ``find`` lists the physical GPUs in the order of the PCI bus; tests give made-up ones.
    """

    name = "cuda"
    device_type = "cuda"
    collective_backend = "nccl"
    ray_resource = "GPU"
    visible_devices_variable = VARIABLE
    device_files = ("/dev/nvidia",)

    def __init__(
        self, find: Callable[[], Sequence[Gpu]] | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._find = find or find_gpus
        self._environ = environ

    def is_available(self) -> bool:
        """Whether there is a visible GPU, and the installed torch is not its CPU build."""
        if torch_is_cpu_build():
            return False
        return bool(visible(self._find(), self._environ.get(VARIABLE)))

    def device_table(self) -> DeviceTable:
        """The visible GPUs, in the order of CUDA_VISIBLE_DEVICES."""
        devices = tuple(
            Device(
                index=index,
                name=gpu.name,
                uuid=gpu.uuid,
                memory=gpu.memory,
                free=gpu.free,
                bus=gpu.bus,
                numa_node=node_of_device(gpu.bus),
            )
            for index, gpu in enumerate(visible(self._find(), self._environ.get(VARIABLE)))
        )
        return DeviceTable(
            platform=self.name,
            accelerator=True,
            devices=devices,
            memory=host.memory_total(),
            cores=host.cores(),
        )

    def diagnosis(self) -> Diagnosis:
        """See :meth:`Platform.diagnosis`; free memory, driver and peer access come from NVML."""
        plain = super().diagnosis()
        asked = _ask_nvml([device.uuid for device in plain.devices])
        if asked is None:
            return plain
        driver, free, peers = asked
        return Diagnosis(
            devices=tuple(replace(device, free=free.get(device.uuid)) for device in plain.devices),
            driver=driver,
            peers=peers,
        )

    def device_initialised(self) -> bool:
        """Whether torch has opened CUDA in this process; torch that is not imported has not."""
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def worker_environment(self, environ: Mapping[str, str], *, one_machine: bool = True) -> dict[str, str]:
        """Device order; NVLink multicast off; on one machine NCCL's bootstrap listener on loopback."""
        wanted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        wanted |= {name: value for name, value in NO_MULTICAST.items() if name not in environ}
        if one_machine and "NCCL_SOCKET_IFNAME" not in environ:
            wanted["NCCL_SOCKET_IFNAME"] = "lo"
        return wanted

    def set_device(self, index: int) -> torch.device:
        """Open GPU ``index`` and make it the current one; no other gets a context."""
        import torch

        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        return device

    def memory(self, index: int) -> DeviceMemory:
        """Free and total memory of GPU ``index``, by all processes' use."""
        import torch

        return DeviceMemory(*torch.cuda.mem_get_info(index))

    def free_before_use(self, index: int) -> int:
        """See :meth:`Platform.free_before_use`; from NVML or nvidia-smi."""
        return sum(device.free for device in self.device_table().devices[index : index + 1])

    def own_memory(self, index: int) -> int | None:
        """See :meth:`Platform.own_memory`; from NVML, which lists processes of its own PID namespace only."""
        return _nvml_own(self.device_table().devices[index].uuid, os.getpid())

    def peer_access(self, first: int, second: int) -> bool:
        """As a probe in another process found, once for all who ask (:mod:`drumline.platforms.peers`)."""
        return first == second or not peer_access((first, second))[min(first, second), max(first, second)]

    def synchronize(self) -> None:
        """Wait for the current GPU."""
        import torch

        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Free torch's cached blocks."""
        import torch

        torch.cuda.empty_cache()


def visible(gpus: Sequence[Gpu], tokens: str | None) -> tuple[Gpu, ...]:
    """The GPUs (or MIG instances) that CUDA_VISIBLE_DEVICES = ``tokens`` lets a process see, in its order.

    None: all, a GPU that is divided by its first instance, as CUDA takes it. ConfigError for a device that does not
    exist, an ambiguous token, or one that comes twice.
    """
    if tokens is None:
        return tuple(_usable(gpu) for gpu in gpus)
    chosen: list[Gpu] = []
    for token in (part.strip() for part in tokens.split(",")):
        if token in _HIDDEN or not token:
            break
        gpu = _named(gpus, token)
        if gpu in chosen:
            raise ConfigError(f"{VARIABLE}={tokens} names the device {gpu.uuid or gpu.name} twice: name each one once")
        chosen.append(gpu)
    return tuple(chosen)


def _named(gpus: Sequence[Gpu], token: str) -> Gpu:
    if token.isdigit():
        if int(token) >= len(gpus):
            raise ConfigError(f"{VARIABLE} names device {token}, but this machine has {len(gpus)}, counted from 0")
        return _usable(gpus[int(token)])
    matches = [gpu for gpu in gpus if gpu.uuid.startswith(token)]
    matches += [instance for gpu in gpus for instance in gpu.instances if instance.uuid.startswith(token)]
    if len(matches) != 1 or not re.match("GPU-|MIG-", token):
        found = ", ".join(gpu.uuid for gpu in matches) or "no device of this machine"
        raise ConfigError(f"{VARIABLE} has the token {token!r}, which means {found}: give an index or a whole UUID")
    return _usable(matches[0])


def _usable(gpu: Gpu) -> Gpu:
    return gpu.instances[0] if gpu.instances else gpu


def find_gpus() -> tuple[Gpu, ...]:
    """All physical GPUs of this machine in the order of the PCI bus; empty where there is no driver."""
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists() and not _is_wsl():
        return ()
    for source in (_from_nvml, _from_smi, _from_proc):
        found = source()
        if found is not None:
            return tuple(sorted(found, key=lambda gpu: gpu.bus))
    return ()


def _is_wsl() -> bool:
    return Path("/dev/dxg").exists()


def _with_nvml(question: Callable[[Any], T]) -> T | None:
    """What it finds with NVML open; None if NVML cannot be asked. Leaves no device file open."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _from_nvml() -> tuple[Gpu, ...] | None:
    """None if NVML cannot be asked."""

    def ask(nvml: Any) -> tuple[Gpu, ...]:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return tuple(_nvml_gpu(nvml, handle) for handle in handles)

    return _with_nvml(ask)


def _nvml_gpu(nvml: Any, handle: Any) -> Gpu:
    bus = bus_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    instances = []
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if divided else 0
    except nvml.NVMLError:  # a GPU without MIG
        count = 0
    for index in range(count):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:  # places without an instance
            continue
        instances.append(_nvml_part(nvml, part, bus))
    return replace(_nvml_part(nvml, handle, bus), instances=tuple(instances))


def _nvml_part(nvml: Any, handle: Any, bus: str) -> Gpu:
    """A GPU, or an instance of one."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory=int(memory.total),
        free=int(memory.free),
        bus=bus,
    )


def _ask_nvml(uuids: Sequence[str]) -> tuple[str, dict[str, int], dict[str, str]] | None:
    """Driver version, free bytes by UUID, and peer access of each pair by their places. None if NVML cannot be asked.

    Peer access is that of whole GPUs: instances of MIG have none.
    """

    def ask(nvml: Any) -> tuple[str, dict[str, int], dict[str, str]]:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        handles = {}
        for uuid in uuids:
            with contextlib.suppress(nvml.NVMLError):
                handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        free = {uuid: int(nvml.nvmlDeviceGetMemoryInfo(handle).free) for uuid, handle in handles.items()}
        return driver, free, _nvml_peers(nvml, uuids, handles)

    return _with_nvml(ask)


def _nvml_own(uuid: str, pid: int) -> int | None:
    """Bytes that a process has on a GPU; None if NVML cannot be asked, or does not list it."""

    def ask(nvml: Any) -> int | None:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        return bytes_of(pid, nvml.nvmlDeviceGetComputeRunningProcesses(handle))

    return _with_nvml(ask)


def bytes_of(pid: int, processes: Sequence[Any]) -> int | None:
    """What NVML's list of a GPU's processes has for one of them; None: it is not there, or its memory is not known."""
    found = [one.usedGpuMemory for one in processes if one.pid == pid]
    return int(found[0]) if len(found) == 1 and found[0] else None


_P2P = ("ok", "the chipset does not support it", "the GPU does not support it", "the topology does not allow it",
        "switched off by the driver's settings", "not supported", "unknown")  # fmt: skip
"""NVML's states of peer-to-peer, by number."""


def _nvml_peers(nvml: Any, uuids: Sequence[str], handles: Mapping[str, Any]) -> dict[str, str]:
    peers = {}
    for first, second in itertools.combinations(range(len(uuids)), 2):
        pair = handles.get(uuids[first]), handles.get(uuids[second])
        if None in pair:
            continue
        try:
            status = int(nvml.nvmlDeviceGetP2PStatus(*pair, nvml.NVML_P2P_CAPS_INDEX_READ))
        except (nvml.NVMLError, AttributeError):
            continue
        peers[f"{first}-{second}"] = _P2P[min(status, len(_P2P) - 1)]
    return peers


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _from_smi() -> tuple[Gpu, ...] | None:
    """None if there is no nvidia-smi or it does not answer."""
    query = ["--query-gpu=uuid,name,memory.total,pci.bus_id,memory.free", "--format=csv,noheader,nounits"]
    table = _smi(*query)
    return None if table is None else parse_smi(table, _smi("-L") or "")


def _smi(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def parse_smi(table: str, listing: str) -> tuple[Gpu, ...]:
    """GPUs of ``nvidia-smi --query-gpu=uuid,name,memory.total,pci.bus_id,memory.free`` (CSV, MiB) and of
    ``nvidia-smi -L``."""
    instances: dict[str, list[tuple[str, str]]] = {}
    gpu = ""
    for line in listing.splitlines():
        match = re.match(r"\s*(.+?)\s*\(UUID: ((?:GPU|MIG)-[^)]+)\)", line)
        if match and match[2].startswith("GPU-"):
            gpu = match[2]
        elif match:
            name = re.sub(r"\s+Device\s+\d+:$", "", match[1])
            instances.setdefault(gpu, []).append((match[2], name))
    gpus = []
    for line in table.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 5:
            uuid, name, memory, bus, unused = fields
            # "[N/A]" where GPU and host share their memory
            size, free = (int(text) << 20 if text.isdigit() else 0 for text in (memory, unused))
            bus = bus_address(bus)
            parts = tuple(Gpu(uuid=part, name=kind, bus=bus) for part, kind in instances.get(uuid, ()))
            gpus.append(Gpu(uuid=uuid, name=name, memory=size, free=free, bus=bus, instances=parts))
    return tuple(gpus)


def _from_proc(folder: Path = Path("/proc/driver/nvidia/gpus")) -> tuple[Gpu, ...] | None:
    """None if the driver lists nothing there."""
    gpus = []
    for entry in sorted(folder.glob("*/information")):  # folders are named by bus address
        try:
            lines = [line.partition(":") for line in entry.read_text().splitlines()]
        except OSError:
            continue
        facts = {key.strip(): value.strip() for key, _, value in lines}
        gpus.append(
            Gpu(
                uuid=facts.get("GPU UUID", ""),
                name=facts.get("Model", "NVIDIA GPU"),
                bus=bus_address(facts.get("Bus Location", entry.parent.name)),
            )
        )
    return tuple(gpus) or None


def bus_address(text: str) -> str:
    """PCI address as sysfs names it, ``0000:3b:00.0``, of NVIDIA's form with an eight-digit domain."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def torch_is_cpu_build() -> bool:
    """Whether the installed torch cannot use GPUs, by its version (``2.13.0+cpu``), without importing it."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
