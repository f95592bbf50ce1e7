"""The few things of Linux that Python's standard library does not give: prctl, /proc, memory policy.

Nothing here keeps state. Functions that read ``/proc`` answer with something neutral when the process is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MPOL_PREFERRED = 1
SET_MEMPOLICY = {
    "x86_64": 238,
    "aarch64": 237,
    "riscv64": 237,
    "loongarch64": 237,
    "ppc64le": 261,
    "s390x": 270,
}
"""Number of the system call; the C library has no function for it."""

ALLOWED_THREADS = frozenset({"jemalloc_bg_thd"})
"""Threads that may live in a process that forks: they hold no lock that a child needs (jemalloc has fork handlers)."""

DEVICE_PREFIXES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/habanalabs", "/dev/davinci")
"""Open files below these mean that a device was touched; its driver does not survive a fork."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.signal.restype = ctypes.c_void_p


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def die_with_parent(parent_pid: int, *, last_words: bool = False) -> bool:
    """Ask for SIGKILL when the parent *thread* ends; False if the parent is not ``parent_pid`` any more.

    ``last_words``: for one who sees the parent's end itself and has something to say then. It gets SIGQUIT, whose
    handler is the C library's ``alarm``: called with the signal's number, 3, it has SIGALRM end the process 3 s later.
    No Python code takes part in that, so it also ends a process that stands in C code with the GIL held.
    """
    if last_words:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if _libc.signal(signal.SIGQUIT, ctypes.cast(_libc.alarm, ctypes.c_void_p)) == ctypes.c_void_p(-1).value:
            raise OSError("cannot set a signal handler")
    _prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT if last_words else signal.SIGKILL)
    return os.getppid() == parent_pid


def become_subreaper() -> None:
    """Orphaned descendants become children of this process. Only for processes that are ours."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def prefer_numa_node(node: int) -> None:
    """Take memory from this node first. OSError where the kernel or a sandbox refuses."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise OSError(f"no set_mempolicy number known for {platform.machine()}")
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << (node % 64)
    if _libc.syscall(number, _MPOL_PREFERRED, ctypes.byref(mask), 16 * 64) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def open_fds() -> list[int]:
    """Descriptors of this process."""
    fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 (no Path objects after a fork)
    return [fd for fd in fds if _is_open(fd)]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def identities(fds: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Device and inode that each of these leads to; those that are closed are left out."""
    found = {}
    for fd in fds:
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            found[fd] = status.st_dev, status.st_ino
    return found


def keep_descriptors(keep: Iterable[int], imported: Sequence[int] = ()) -> None:
    """Close every descriptor that is not in ``keep``, in a copy of a process.

    ``imported``: what modules opened while they were imported. They have the numbers still, so none of these may come
    to mean something else: files stay open, and anything else becomes ``/dev/null``.
    """
    keep = [*keep, *imported]
    null = os.open(os.devnull, os.O_RDWR)
    for fd in imported:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.dup2(null, fd, inheritable=False)
    low = 0
    for fd in sorted(set(keep)):
        if low < fd:  # closerange(0, 0) of Python 3.11 closes everything
            os.closerange(low, fd)
        low = fd + 1
    highest = max((int(name) for name in os.listdir("/proc/self/fd")), default=0)  # noqa: PTH208
    if low <= highest:
        os.closerange(low, highest + 1)


def blank_all_but(keep: Iterable[int]) -> None:
    """Close all others, but the numbers stay taken, by ``/dev/null``."""
    kept = set(keep)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in open_fds():
        if fd not in kept and fd != null:
            os.dup2(null, fd, inheritable=fd == 0)
    os.close(null)


def has_working_folder() -> bool:
    """It may have been removed; libraries (MKL) refuse to load then, so our processes go to the root folder."""
    try:
        os.getcwd()  # noqa: PTH109 (only whether it is there)
    except OSError:
        return False
    return True


def thread_names() -> dict[int, str]:
    """Thread id to name of every thread of this process that the operating system knows."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def device_files() -> list[str]:
    """Device files that this process has open."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))  # noqa: PTH115 (a link to something without a path is not a Path)
    return sorted(name for name in found if name.startswith(DEVICE_PREFIXES))


STATES = {
    "": "gone",
    "R": "running (R)",
    "S": "sleeping (S)",
    "D": "in uninterruptible sleep (D)",
    "T": "stopped (T)",
    "t": "stopped by a debugger (t)",
    "Z": "dead (Z)",
    "I": "idle (I)",
}
"""State letters of /proc in words."""


def process_state(pid: int) -> str:
    """State letter of a process (``R``, ``S``, ``D``, ``T``, ``Z`` ...); empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def wait_channel(pid: int) -> str:
    """Kernel function in which a process waits; empty if unknown."""
    try:
        channel = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if channel == "0" else channel


def threads_of(pid: int) -> list[str]:
    """Threads of a process as the kernel knows them: ``name (S) in futex_wait``; empty if it is gone."""
    found = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(OSError):
                _, _, rest = (task / "stat").read_text().partition("(")
                name, _, rest = rest.rpartition(")")
                channel = (task / "wchan").read_text().strip()
                found.append(f"{name} ({rest.split()[0]})" + (f" in {channel}" if channel not in ("", "0") else ""))
    return found


def cpu_ticks(pid: int) -> int:
    """Clock ticks that a process has computed for so far; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def children_of(pid: int) -> list[int]:
    """Children of the main thread of a process; empty if the kernel does not tell."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def exit_of_zombie(pid: int) -> tuple[int | None, int | None]:
    """Exit code and signal of a process that has ended and that its parent has not reaped; else both None."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, None
    if fields[0] != "Z" or len(fields) < 50:
        return None, None
    status = int(fields[49])
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)


_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
_PIDFD_INFO_EXIT = 1 << 3


def exit_of(pidfd: int) -> tuple[int | None, int | None]:
    """Exit code and signal of a process that is not our child. Linux 6.15 and newer, once reaped; else both None."""
    buffer = bytearray(64)
    buffer[0:8] = _PIDFD_INFO_EXIT.to_bytes(8, "little")
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None, None
    if not int.from_bytes(buffer[0:8], "little") & _PIDFD_INFO_EXIT:
        return None, None
    status = int.from_bytes(buffer[60:64], "little")
    return (None, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), None)
