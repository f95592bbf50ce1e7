"""A control group with a limit on memory, for a run whose processes are to be killed for want of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

LIMIT = 3 << 29
"""A server of the tiny model takes a third of it; one process alone that takes the rest is the largest by far, also
where the files of a torch for GPUs, mapped by the fork server, count as its memory (the kernel takes the largest)."""
MOUNT = Path("/sys/fs/cgroup")


class Group:
    """Made where control groups can be made: v1, or v2 with its memory controller passed on. OSError elsewhere."""

    def __init__(self) -> None:
        parent, limit = (MOUNT / "memory", "memory.limit_in_bytes")
        if not parent.is_dir():
            parent, limit = MOUNT, "memory.max"
        self.folder = Path(tempfile.mkdtemp(prefix="drumline-chaos", dir=parent))
        try:
            (self.folder / limit).write_text(str(LIMIT))
            swap = self.folder / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
        except OSError:
            self.folder.rmdir()
            raise

    def add(self, pid: int) -> None:
        """A process, and all that it will start."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove it; the kernel may need a moment after its last process."""
        deadline = time.monotonic() + 5.0
        while True:
            try:
                return self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def can_limit() -> bool:
    """Whether this machine lets the tests make such groups; CHAOS_MEMORY=limit says no."""
    if os.environ.get("CHAOS_MEMORY") == "limit":
        return False
    with contextlib.suppress(OSError):
        Group().close()
        return True
    return False
