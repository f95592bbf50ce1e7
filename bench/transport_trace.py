"""Where the time of a MessageQueue's round trip goes: stamps at each stage, on all sides, medians by stage.

    python bench/transport_trace.py [--workers 8] [--gaps-ms 0 1 10] [--messages 300]

Stages of the way there (us after the writer began): encoded, rung (written, bells and wakes done); seen
(the reader's loop found it), decoded (the reader has the object), for the reader that answers and the slowest one. Of
the way back the same: answered (the answer was sent), back (the writer's loop found it), done. The clock is the same in
all processes. Stamps cost some 0.1 us each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from driver import drumline_plan, make_payload
from transport_systems import Drumline

from drumline.transport.broadcast import QueueWriter
from drumline.transport.queue import QueueReader

clock = time.perf_counter_ns
stamps: list[int] = []
note = stamps.append


def stamped(write: Any) -> Any:
    """Stamp before and after it."""

    def written(self: Any, *args: Any) -> Any:
        if not self._bells:  # a rehearsal
            return write(self, *args)
        note(clock())
        sent = write(self, *args)
        note(clock())
        return sent

    return written


def patch() -> None:
    """Stamp: encoded, rung; seen, decoded."""
    QueueWriter.write_small = stamped(QueueWriter.write_small)  # type: ignore[method-assign]

    take = QueueReader._take

    def taken(self: Any) -> Any:
        now = clock()
        found = take(self)
        if found is not None:
            note(now)
            note(clock())
        return found

    QueueReader._take = taken  # type: ignore[method-assign]


class Traced(Drumline):
    """Workers keep their stamps and hand them over when asked."""

    def opened(self, rank: int, sock: Any) -> Any:
        receive, answer = super().opened(rank, sock)

        def received() -> Any:
            obj = receive()
            while obj == "stamps":
                told = list(stamps)
                stamps.clear()
                answer((rank, told))
                stamps.clear()
                obj = receive()
            return obj

        return received, answer


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--gaps-ms", type=float, nargs="+", default=[0, 1, 10])
    parser.add_argument("--messages", type=int, default=300)
    parser.add_argument("--sizes", nargs="+", default=["256B", "decode"])
    args = parser.parse_args()
    patch()
    system = Traced(args.workers)
    for size in args.sizes:
        payload = drumline_plan() if size == "decode" else make_payload(size)
        for gap in args.gaps_ms:
            show(f"{size}, {gap:g} ms between", *trace(system, payload, gap / 1000, args.messages))
    system.close()
    return 0


def trace(system: Traced, payload: Any, gap_s: float, messages: int) -> tuple[list[list[int]], list[list[int]]]:
    """One row of stamps a message, of the writer and of each worker."""
    for _ in range(20):
        system.call(payload, False)
    gather(system)
    mine = []
    for _ in range(messages):
        if gap_s:
            time.sleep(gap_s)
        stamps.clear()
        start = clock()
        system.send(payload)
        sent = clock()
        system.answers((0,))
        mine.append([start, *stamps, sent, clock()])
    return mine, gather(system)


def gather(system: Traced) -> list[list[int]]:
    """All workers' stamps."""
    system.send("stamps")
    found = [system._answers[rank].dequeue()[1] for rank in range(system.n)]
    stamps.clear()
    return found


def show(title: str, mine: list[list[int]], theirs: list[list[int]]) -> None:
    """Medians of each stage, in us after the start."""
    rows = []
    answers = 4  # stamps of one message at rank 0: seen, decoded, and two of the answer
    for number, row in enumerate(mine):
        start, encoded, rung, back, done, sent, end = row
        first = theirs[0][answers * number : answers * number + answers]
        seen = max(other[2 * number] for other in theirs[1:]) if len(theirs) > 1 else first[0]
        last = max(other[2 * number + 1] for other in theirs[1:]) if len(theirs) > 1 else first[1]
        stages = [encoded, rung, sent, first[0], first[1], seen, last, *first[2:], back, done, end]
        rows.append([(stage - start) / 1000 for stage in stages])
    names = "encoded rung sent seen decoded | last-seen last-decoded | a-encoded a-rung back done end"
    print(title)
    labels = names.replace("|", "").split()
    for place, name in enumerate(labels):
        column = sorted(row[place] for row in rows)
        print(f"  {name:13s} {statistics.median(column):8.1f}   p10 {column[len(column) // 10]:8.1f}")
    early = [
        sum(other[step * number] - row[2] < 5000 for number, row in enumerate(mine)) for step, other in steps(theirs)
    ]
    print("  of", len(rows), "messages seen within 5 us of the bell by each worker:", *early, flush=True)


def steps(theirs: list[list[int]]) -> list[tuple[int, list[int]]]:
    """How many stamps each worker makes for a message, and its stamps."""
    return [(4 if rank == 0 else 2, other) for rank, other in enumerate(theirs)]


if __name__ == "__main__":
    sys.exit(main())
