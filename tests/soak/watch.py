"""What each process of a tree holds, and whether that is flat.

**Flat** means, for the state at rest (no request anywhere, all clients gone) after each of about 20 equal portions of
the load, the first quarter being warm-up:

- descriptors and threads of each process: never more than after the warm-up;
- memory of each process: the trends over the third and the last quarter of the portions, the medians of the slopes
  between all pairs (Theil and Sen); twice the smaller growth is less than ``BYTES_PER_REQUEST`` for each request of the
  second half, or ``SLACK`` where that is more. What leaks grows in both quarters; an allocator's heap that finds its
  size takes a step in one (2.6 MiB once in a worker of some 70).

Memory is what the process has made itself (RssAnon and RssShmem). Rings in shared memory grow until each of their pages
was used once: that of sampled tokens between pipeline stages, 4 MiB, takes 30,000 requests for it (140 bytes each).
Pss was tried: its share of libraries' pages goes up by megabytes when some other program that maps them ends.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

BYTES_PER_REQUEST = 100
SLACK = 2 << 20
WARM_UP = 0.25


def trend(values: list[int]) -> float:
    """What the values grow by from the first to the last, by the median of all slopes."""
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(values), 2)]
    return statistics.median(slopes) * (len(values) - 1)


@dataclass
class Process:
    """One process, and what it held after each portion."""

    name: str
    pid: int
    memory: list[int] = field(default_factory=list)
    """Bytes that are no file's."""
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self) -> tuple[int, int]:
        """Descriptors and threads of now."""
        base = Path(f"/proc/{self.pid}")
        return len(list((base / "fd").iterdir())), len(list((base / "task").iterdir()))

    def sample(self) -> None:
        """Note what it holds now."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        self.memory.append(
            sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))
        )
        descriptors, threads = self.look()
        self.descriptors.append(descriptors)
        self.threads.append(threads)

    def growth(self) -> float:
        """Bytes that the second half adds, if both of its quarters are like the one that adds less."""
        half = self.memory[len(self.memory) // 2 :]
        middle = len(half) // 2
        return 2 * min(trend(half[: middle + 1]), trend(half[middle:]))

    def faults(self, requests: int, slack: int) -> list[str]:
        """What is not flat. ``requests``: of the second half. ``slack``: bytes that are allowed in any case."""
        warm = max(int(len(self.memory) * WARM_UP), 1)
        found = []
        for name, values in (("descriptors", self.descriptors), ("threads", self.threads)):
            if max(values[warm:]) > max(values[:warm]):
                found.append(f"{self.name}: {name} {values}")
        if self.growth() > max(slack, BYTES_PER_REQUEST * requests):
            series = " ".join(f"{value / 2**20:.1f}" for value in self.memory)
            found.append(
                f"{self.name}: memory grew by {self.growth() / 2**20:.1f} MiB in {requests} requests: {series}"
            )
        return found

    def row(self) -> str:
        """A line of the table."""
        first, warm, last = (self.memory[i] / 2**20 for i in (0, int(len(self.memory) * WARM_UP), -1))
        return (
            f"{self.name:18} {first:8.1f} {warm:8.1f} {last:8.1f} {self.growth() / 2**10:+9.0f} "
            f"{self.descriptors[0]:5} {self.descriptors[-1]:5} {self.threads[0]:5} {self.threads[-1]:5}"
        )


HEAD = (
    f"{'process':18} {'first':>8} {'warm':>8} {'last':>8} {'growth':>9} {'fds':>11} {'threads':>11}\n"
    f"{'':18} {'MiB at rest':>26} {'KiB, half':>9} {'first last':>11} {'first last':>11}"
)
