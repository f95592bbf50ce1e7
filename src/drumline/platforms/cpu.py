"""The cpu platform: workers share the host's cores and memory and need no device of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drumline.config import DeviceTable
from drumline.platforms import host
from drumline.platforms.base import DeviceMemory, Platform

if TYPE_CHECKING:
    import torch


class CpuPlatform(Platform):
    """Any number of workers on the host's cores."""

    name = "cpu"
    accelerator = False
    device_type = "cpu"
    collective_backend = "gloo"
    ray_resource = "CPU"

    def is_available(self) -> bool:
        """Always."""
        return True

    def device_table(self) -> DeviceTable:
        """No devices; cores and memory that this process may use."""
        return DeviceTable(platform=self.name, accelerator=False, memory=host.memory_total(), cores=host.cores())

    def cpus_of_worker(self, index: int, workers: int, threads: int) -> tuple[int, ...]:
        """An even part of the cores for each of several workers, if that is at least a core for each of their threads.

        Ranks wait for each other many times a step, and whoever wakes another tends to get it onto its own core: two
        ranks on one of two cores, one always asleep, so that the kernel saw no reason to move either, took 3 to 4 ms
        a token where ranks that are bound take 0.9 (tiny Llama, TP 2).
        """
        cpus = host.allowed_cpus()
        if workers < 2 or min(len(cpus), host.cores()) < workers * max(threads, 1):
            return ()
        return host.part_of(cpus, index, workers)

    def device_initialised(self) -> bool:
        """Never: there is nothing to open."""
        return False

    def set_device(self, index: int) -> torch.device:
        """The CPU, whatever the index."""
        import torch

        return torch.device("cpu")

    def memory(self, index: int) -> DeviceMemory:
        """Memory of the host, which all workers share."""
        return DeviceMemory(host.memory_available(), host.memory_total())

    def peer_access(self, first: int, second: int) -> bool:
        """Processes of one host can share memory."""
        return True

    def synchronize(self) -> None:
        """Nothing runs on its own."""

    def empty_cache(self) -> None:
        """torch keeps no CPU memory for later."""
