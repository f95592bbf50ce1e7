"""Faults that a process is told to have, by signal, wherever it stands. On PYTHONPATH, so all processes have it.

The API server and the fork server import this when their interpreter starts, before anything of drumline; engine core
and workers inherit the handlers by the fork. Real-time signals, which nothing else uses: ``SIGRTMIN + 1 + n`` for the
n-th of ``FAULTS``. A handler of Python's runs in the main thread, between two instructions, and ends a wait in a system
call; so an exception comes out of whatever the process was doing.

This must import as little as possible: it is there before the standard descriptors are looked after.
"""

import os
import signal
import sys

CODE = 41
"""Of the fault ``exit``."""
CHUNK = 16 << 20
ROOM = 64 << 20


class InjectedError(Exception):
    """Of the fault ``raise``."""


def _exit():
    os._exit(CODE)


def _segfault():
    import ctypes
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def _raise():
    raise InjectedError("a fault of the test")


def _raise_unpicklable():
    class LocalError(Exception):
        def __reduce__(self):
            raise TypeError("this cannot be pickled")

    raise LocalError("a fault of the test")


def _memory():
    """Take memory for ever: until the kernel ends the process, if its control group has a limit."""
    taken = []
    while True:
        taken.append(b"x" * CHUNK)


def _address_space():
    """Take memory up to a limit of its own, so that Python raises MemoryError."""
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, before[1]))
    try:
        _memory()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


FAULTS = {
    "exit": _exit,
    "segfault": _segfault,
    "raise": _raise,
    "raise unpicklable": _raise_unpicklable,
    "memory": _memory,
    "address space": _address_space,
}
NUMBERS = {name: signal.SIGRTMIN + 1 + place for place, name in enumerate(FAULTS)}


class _Change:
    """Finds nothing, but lets tests/chaos/workers.py change the model worker when it is imported."""

    name = "drumline.model.worker"

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            importlib.import_module("tests.chaos.workers").change(module.ModelWorker)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("CHAOS_HOLD"):
    sys.meta_path.insert(0, _Change())
if os.environ.get("CHAOS_FAULTS"):
    for _name, _number in NUMBERS.items():
        signal.signal(_number, lambda number, frame, fault=FAULTS[_name]: fault())
