"""The futex system call: its number on each kind of machine, waiting, waking. Linux has no wrapper in Python.

A number from another machine would be another system call, so there is a table and no guess. It holds the call that
takes a ``timespec`` of two C longs: on 64-bit machines the only one, on 32-bit ones the old one, whose seconds are
relative here and so do not run out in 2038. 32-bit RISC-V has only the other one, and is not in the table.

Where there is none (macOS, or a machine that is not in the table) whoever waits looks again and again
(:mod:`drumline.transport.doorbell`). ``DRUMLINE_NO_FUTEX=1`` asks for that on any machine: tests, and kernels whose
sandbox forbids the call.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from typing import Any

from drumline.errors import ChannelClosedError, TransportError

NO_FUTEX_VARIABLE = "DRUMLINE_NO_FUTEX"
"""Environment variable: not empty and not 0 means that no process of this run uses the futex."""

_BITS = 64 if sys.maxsize > 2**32 else 32
# From the kernel's tables (arch/*/kernel/syscalls, include/uapi/asm-generic/unistd.h).
_NUMBERS_64 = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "loongarch64": 98,
    "ppc64": 221,
    "ppc64le": 221,
    "s390x": 238,
    "mips64": 5194,
    "sparc64": 142,
    "alpha": 394,
}
# What ``uname`` says where a 32-bit process runs: a 32-bit kernel, or a 64-bit one.
_NUMBERS_32 = {
    "i386": 240,
    "i486": 240,
    "i586": 240,
    "i686": 240,
    "x86_64": 240,
    "armv6l": 240,
    "armv7l": 240,
    "armv8l": 240,
    "aarch64": 240,
    "ppc": 221,
    "s390": 238,
    "mips": 4238,
}
_WAIT = 0
_WAKE = 1
_EVERYBODY = 0x7FFFFFFF
LONGEST_WAIT_S = 86_400.0
"""Waits are cut to this many seconds."""
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000
_DURATIONS_MOST = 64
_QUIET = frozenset({errno.EAGAIN, errno.EINTR})


def futex_number(system: str = sys.platform, machine: str = "", bits: int = _BITS) -> int:
    """Number of the futex system call on this machine; TransportError with the reason where it is not known."""
    machine = machine or platform.machine()
    number = (_NUMBERS_64 if bits == 64 else _NUMBERS_32).get(machine)
    if not system.startswith("linux") or number is None:
        known = ", ".join(sorted({*_NUMBERS_64, *_NUMBERS_32}))
        here = f"{system} on {machine}, {bits}-bit"
        raise TransportError(f"no futex known here: it needs Linux on {known}; this is {here}")
    return number


def futex_or_none() -> int | None:
    """The number, or None where there is no futex or the environment forbids it."""
    if os.environ.get(NO_FUTEX_VARIABLE, "0") not in ("", "0"):
        return None
    try:
        return futex_number()
    except TransportError:
        return None


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


# Waiting releases the GIL (CDLL); waking does not (PyDLL): it never blocks, and to give the GIL away costs more than
# the call. Arguments of a wake are ctypes objects made beforehand: half the time of having them converted in each call.
# The two last arguments of the system call are left out, since a wait has none there.
_wait_call = ctypes.CDLL(None, use_errno=True).syscall
_wait_call.restype = ctypes.c_long
wake_call = ctypes.PyDLL(None).syscall
"""``wake_call(*wake_arguments(...))`` wakes all who sleep on a word. A full barrier (see :mod:`fence`)."""
wake_call.restype = ctypes.c_long

Arguments = tuple[Any, ...]


def wake_arguments(number: int, address: int) -> Arguments:
    """What :data:`wake_call` wants, for the word at this address."""
    return ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_int(_WAKE), ctypes.c_int(_EVERYBODY)


def wait_arguments(number: int, address: int) -> Arguments:
    """What :func:`futex_wait` wants, for the word at this address."""
    return ctypes.c_long(number), ctypes.c_void_p(address), ctypes.c_int(_WAIT)


def sharpen_sleeps() -> None:
    """Let timed sleeps of the calling thread end when they should, and not up to 50 us later (Linux's timer slack)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)


def _duration(timeout_s: float) -> Any:
    """A pointer to the ``timespec`` of so many seconds, which it keeps alive."""
    timeout_s = min(timeout_s, LONGEST_WAIT_S)
    seconds = int(timeout_s)
    return ctypes.byref(_Timespec(seconds, int((timeout_s - seconds) * 1e9)))


_durations: dict[float, Any] = {}
"""Those that were asked for; whole seconds only, since waits without a deadline are all as long."""


def futex_wait(arguments: Arguments, seen: int, timeout_s: float) -> bool:
    """Sleep while the word is ``seen``, at most ``timeout_s`` seconds. May return early for no reason.

    Returns on a signal, whose Python handler has run by then. True: the time is over. ChannelClosedError if nothing is
    mapped there any more.
    """
    duration = _durations.get(timeout_s)
    if duration is None:
        duration = _duration(timeout_s)
        if timeout_s == int(timeout_s) and len(_durations) < _DURATIONS_MOST:
            _durations[timeout_s] = duration
    if _wait_call(*arguments, seen, duration) == -1:
        code = ctypes.get_errno()
        if code == errno.ETIMEDOUT:
            return True
        if code == errno.EFAULT:
            raise ChannelClosedError("this doorbell is closed")
        if code not in _QUIET:
            raise OSError(code, f"futex wait: {os.strerror(code)}")
    return False
