"""A program of its own: do GPUs read and write each other's memory? Uses the CUDA driver alone: no torch, no drumline.

    python peer_probe.py SECONDS INDEX INDEX ...

Prints JSON: for each ordered pair ``"0-1"``, whether GPU 0 can use GPU 1's memory: ``""`` or why not. What the driver
says is not believed alone: behind some IOMMUs and virtual machines it says yes, and the copy hangs or brings other
bytes. So bytes are copied both ways and compared. Whatever goes wrong here, a hang or a crash included, ends this
process only: after SECONDS an alarm ends it, and so does the death of who started it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
from typing import Any

BYTES = 1 << 20
_ALREADY_ENABLED = 704
_PDEATHSIG = 1


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """The few calls of libcuda that are needed. Devices by index among the visible ones."""

    def __init__(self) -> None:
        self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any, fine: tuple[int, ...] = ()) -> None:
        """Call it; DriverError for a code other than 0 and ``fine``."""
        code = getattr(self._cuda, name)(*arguments)
        if code and code not in fine:
            raise DriverError(f"{name} failed with CUDA error {code}")

    def device(self, index: int) -> ctypes.c_int:
        """The driver's name of a device."""
        device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), index)
        return device

    def use(self, index: int) -> ctypes.c_void_p:
        """Make a device current; its context."""
        if index not in self._contexts:
            context = ctypes.c_void_p()
            self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device(index))
            self._contexts[index] = context
        self("cuCtxSetCurrent", self._contexts[index])
        return self._contexts[index]

    def says(self, first: int, second: int) -> bool:
        """Whether the driver thinks that ``first`` reaches the memory of ``second``."""
        can = ctypes.c_int()
        self("cuDeviceCanAccessPeer", ctypes.byref(can), self.device(first), self.device(second))
        return bool(can.value)

    def allocate(self, index: int) -> ctypes.c_uint64:
        """Memory on a device."""
        self.use(index)
        pointer = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(BYTES))
        return pointer

    def free(self, index: int, pointer: ctypes.c_uint64) -> None:
        """Give it back."""
        self.use(index)
        self("cuMemFree_v2", pointer)

    def put(self, index: int, pointer: ctypes.c_uint64, data: bytes) -> None:
        """Bytes to a device."""
        self.use(index)
        self("cuMemcpyHtoD_v2", pointer, data, ctypes.c_size_t(BYTES))

    def get(self, index: int, pointer: ctypes.c_uint64) -> bytes:
        """Bytes from a device."""
        self.use(index)
        data = ctypes.create_string_buffer(BYTES)
        self("cuMemcpyDtoH_v2", data, pointer, ctypes.c_size_t(BYTES))
        return data.raw

    def copy(self, index: int, to: ctypes.c_uint64, source: ctypes.c_uint64) -> None:
        """Copy as a device, to or from wherever the pointers are."""
        self.use(index)
        self("cuMemcpyDtoD_v2", to, source, ctypes.c_size_t(BYTES))
        self("cuCtxSynchronize")


def look(driver: Driver, first: int, second: int) -> str:
    """Why ``first`` cannot use the memory of ``second``; empty if it can."""
    if not driver.says(first, second):
        return "the driver says so"
    theirs = driver.use(second)
    driver.use(first)
    driver("cuCtxEnablePeerAccess", theirs, 0, fine=(_ALREADY_ENABLED,))
    own, other = driver.allocate(first), driver.allocate(second)
    try:
        one, two = (os.urandom(256) * (BYTES // 256) for _ in range(2))
        driver.put(second, other, one)
        driver.put(first, own, two)
        driver.copy(first, own, other)
        if driver.get(first, own) != one:
            return "what is read over it is wrong"
        driver.put(first, own, two)
        driver.copy(first, other, own)
        return "" if driver.get(second, other) == two else "what is written over it is wrong"
    finally:
        driver.free(first, own)
        driver.free(second, other)


def probe(indices: list[int]) -> dict[str, str]:
    """All ordered pairs."""
    try:
        driver = Driver()
    except (OSError, DriverError) as error:
        return {f"{one}-{other}": str(error) for one, other in itertools.permutations(indices, 2)}
    found = {}
    for one, other in itertools.permutations(indices, 2):
        try:
            found[f"{one}-{other}"] = look(driver, one, other)
        except DriverError as error:
            found[f"{one}-{other}"] = str(error)
    return found


def main() -> None:
    """The program."""
    parent = os.getppid()
    signal.alarm(int(sys.argv[1]))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
    print(json.dumps(probe([int(argument) for argument in sys.argv[2:]])), flush=True)


if __name__ == "__main__":
    main()
