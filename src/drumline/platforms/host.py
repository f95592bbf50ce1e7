"""Cores and memory of the host that this process may really use: affinity and control groups counted in.

Limits of control groups come as v1 and v2, also mixed (a v1 hierarchy for some controllers, v2 for the rest). Every
level from this process's group up to the mount may have a limit, and the smallest holds. Paths of /proc/self/cgroup
count from the root of the hierarchy, which a container may see only a part of: the fourth field of mountinfo says
which, and where our group lies outside of it the mount point itself is the best there is.

All functions take ``root``, so that tests can give them a made-up machine.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/")


_allowed_before: tuple[int, ...] = ()
"""CPUs that this process might use before it was bound to some of them; empty: it was not."""


def cores(root: Path = ROOT) -> int:
    """Cores that this process may use: affinity, and CPU quota of its control groups (rounded down), at least 1.

    A process that was bound (:func:`bind`) counts those that it shares with its neighbours, as if it had not been.
    """
    affinity = len(allowed_cpus()) or os.cpu_count() or 1
    return max(1, min([affinity, *(int(quota) for quota in _quotas(root))]))


def allowed_cpus() -> tuple[int, ...]:
    """CPUs that this process may use, those included that it left to its neighbours when it was bound (:func:`bind`).

    Empty where the system does not tell.
    """
    now = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return tuple(sorted({*now, *_allowed_before}))


def oom_kills(root: Path = ROOT) -> int | None:
    """Processes that the kernel has killed so far for want of memory, in the control group of this process; where that
    has no count (the root of all), on the whole machine. None: unknown."""
    for folder in _groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _count(folder / name, "oom_kill")) is not None:
                return count
    return _count(root / "proc/vmstat", "oom_kill")


def oom_killed_since(before: int | None, root: Path = ROOT) -> bool:
    """Whether there are more of them than ``before``; False: no, or unknown."""
    now = oom_kills(root)
    return now is not None and before is not None and now > before


def _count(path: Path, key: str) -> int | None:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return None


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores that the control groups of this process let it use on average; None: no limit."""
    return min(_quotas(root), default=None)


def tasks_left(root: Path = ROOT) -> int | None:
    """Processes and threads that the control groups of this process still let it make; None: no limit."""
    left = []
    for folder in _groups(root, "pids"):
        most, now = _read(folder / "pids.max").strip(), _read(folder / "pids.current").strip()
        if most.isdigit() and now.isdigit():
            left.append(max(0, int(most) - int(now)))
    return min(left, default=None)


def bind(cpus: Sequence[int], allowed: Sequence[int] = ()) -> None:
    """Bind this process to some of its CPUs. ``allowed``: all that it might use; by default those it may use now.

    OSError if the system refuses.
    """
    global _allowed_before
    before = tuple(allowed) or allowed_cpus()
    os.sched_setaffinity(0, cpus)
    _allowed_before = () if set(before) == set(cpus) else before


def part_of(cpus: Sequence[int], index: int, parts: int) -> tuple[int, ...]:
    """Neighbours among ``cpus`` for one of so many parts: each has as many as the others or one more."""
    return tuple(cpus[len(cpus) * index // parts : len(cpus) * (index + 1) // parts])


def memory_total(root: Path = ROOT) -> int:
    """Bytes of memory that this process and its control group may use at most; 0: unknown."""
    limits = [limit for limit, _ in _memory_groups(root)]
    total = _meminfo(root).get("MemTotal", 0)
    return min([*limits, *([total] if total else [])], default=0)


def memory_available(root: Path = ROOT) -> int:
    """Bytes that can still be taken without swapping or an out-of-memory kill; 0: unknown.

    Page cache that the kernel would drop counts as available.
    """
    left = [max(0, limit - used) for limit, used in _memory_groups(root)]
    available = _meminfo(root).get("MemAvailable", 0)
    return min([*left, *([available] if available else [])], default=0)


def give_back_memory() -> None:
    """Give freed memory back to the kernel: glibc keeps what lies below the newest small object. Else nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _meminfo(root: Path) -> dict[str, int]:
    """Values of /proc/meminfo in bytes."""
    values = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def _quotas(root: Path) -> Iterator[float]:
    """CPU quotas in cores, of every control group that has one."""
    for folder in _groups(root, "cpu"):
        text = _read(folder / "cpu.max").split()  # v2: "max 100000" or "150000 100000"
        if not text:
            text = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(text) == 2 and text[0].isdigit() and text[1].isdigit() and int(text[1]) > 0:  # v1 unlimited: -1
            yield int(text[0]) / int(text[1])


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, in use without droppable page cache) in bytes, of every control group that has a limit."""
    for folder in _groups(root, "memory"):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            value = _read(folder / limit).strip()
            if value.isdigit() and int(value) < 1 << 60:  # v1 unlimited: 2^63 rounded down to pages; v2: "max"
                stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line.count(" ") == 1)
                usage = int(_read(folder / used).strip() or 0)
                yield int(value), max(0, usage - int(stat.get(cache, 0)))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups for a controller, from the innermost to the mount."""
    v1, v2 = _paths(root, controller)
    for is_v2, path in ((False, v1), (True, v2)):
        mount = None if path is None else _mount(root, "" if is_v2 else controller)
        if path is None or mount is None:
            continue
        seen, point = mount
        relative = Path(path).relative_to(seen) if Path(path).is_relative_to(seen) else Path()
        folder = point / relative
        if not folder.is_dir():
            folder = point
        while True:
            yield folder
            if folder == point:
                break
            folder = folder.parent


def _paths(root: Path, controller: str) -> tuple[str | None, str | None]:
    """This process's path in the controller's v1 hierarchy and in the v2 one."""
    v1 = v2 = None
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            v1 = path
        elif number == "0" and not controllers:
            v2 = path
    return v1, v2


def _mount(root: Path, controller: str) -> tuple[str, Path] | None:
    """(path in the hierarchy that is mounted, where it is mounted) of a v1 controller, or of v2 (empty)."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == ("cgroup" if controller else "cgroup2") and (not controller or controller in kind[2].split(",")):
            return fields[3], root / fields[4].lstrip("/")
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
