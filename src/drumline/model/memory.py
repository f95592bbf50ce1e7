"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil


def available_host_memory() -> int:
    """Bytes that can be taken without swapping: the machine's, or what a cgroup (v2 or v1) leaves if that is less."""
    left = [int(psutil.virtual_memory().available)]
    for folder, limit, usage in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            free = int(Path(folder, limit).read_text()) - int(Path(folder, usage).read_text())
            left.append(free + _reclaimable(Path(folder, "memory.stat").read_text()))
        except (OSError, ValueError):  # no such cgroup version, or "max"
            continue
    return max(min(left), 0)


def _reclaimable(stat: str) -> int:
    """Page cache of a cgroup that goes when memory is needed."""
    fields = dict(line.split()[:2] for line in stat.splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
