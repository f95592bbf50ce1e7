"""Objects from the first member of a group to all others: through the group's slots, and through a MessageQueue.

    python bench/broadcast_object.py [--ranks 2 4] [--calls 300] [--rounds 5] [--json FILE]

``slots`` is ``group.broadcast_object`` of ranks of one machine (shared memory, all meet), ``queue`` a MessageQueue of
6 slots of 256 KiB from rank 0 to the others, with its arena for large buffers. Microseconds until all have the object:
each call is followed by a barrier of the group, the same for both, whose own time is printed beside them. Median of the
rounds' medians on rank 0; the two take turns. And what each has: bytes of memory, descriptors and threads a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drumline.parallel.groups import GroupCoordinator, init_groups
from drumline.parallel.layout import Layout
from drumline.parallel.rendezvous import create_rendezvous
from drumline.transport.queue import MessageQueue

SIZES = [100, 10 << 10, 256 << 10, 1 << 20, 8 << 20]
QUEUE_SLOTS, QUEUE_SLOT_BYTES = 6, 256 << 10


def usage() -> dict[str, int]:
    """Descriptors and threads of this process."""
    return {what: len(list(Path("/proc/self", what).iterdir())) for what in ("fd", "task")}


def timed(call: Callable[[Any], Any], group: GroupCoordinator, value: Any, calls: int) -> float:
    """Median microseconds of a call and a barrier."""
    taken = []
    group.barrier()
    for _ in range(calls):
        start = time.perf_counter()
        got = call(value)
        group.barrier()
        taken.append(time.perf_counter() - start)
        assert got is None or len(got) == len(value)
    return statistics.median(taken) * 1e6


def one_rank(rank: int, ranks: int, method: str, queue: MessageQueue, args: argparse.Namespace) -> dict[str, Any]:
    """All sizes on one rank."""
    torch.set_num_threads(1)
    before = usage()
    group = init_groups(Layout(tp=ranks), rank, method).tp
    slots = {what: count - before[what] for what, count in usage().items()}
    before = usage()
    reader = MessageQueue.attach(queue.handles[rank - 1]) if rank else None
    through = {what: count - before[what] for what, count in usage().items()}

    def by_queue(value: Any) -> Any:
        return queue.enqueue(value) if reader is None else reader.dequeue(timeout=60)

    def nothing(_: Any) -> None:
        return None

    calls: dict[str, Callable[[Any], Any]] = {"slots": group.broadcast_object, "queue": by_queue, "barrier": nothing}
    rows = []
    for size in SIZES:
        value, taken = b"x" * size, {name: [] for name in calls}  # type: dict[str, list[float]]
        count = max(20, min(args.calls, (64 << 20) // size))
        for _ in range(args.rounds):
            for name, call in calls.items():
                taken[name].append(timed(call, group, value, count))
        row = {"ranks": ranks, "bytes": size} | {name: round(statistics.median(us), 1) for name, us in taken.items()}
        rows.append(row)
        if rank == 0:
            print(f"{ranks:5d} {size:9d}", *(f"{row[name]:10.1f}" for name in calls), flush=True)
    group.barrier()
    if reader is not None:
        reader.close()
    return {"rows": rows, "slots": slots, "queue": through}


def run(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Fork the ranks; what rank 0 found, and what a reader's queue needs."""
    place = create_rendezvous(ranks)
    with (
        tempfile.TemporaryDirectory() as folder,
        MessageQueue(local_readers=ranks - 1, slots=QUEUE_SLOTS, slot_bytes=QUEUE_SLOT_BYTES) as queue,
    ):
        pids = []
        for rank in range(1, ranks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    found = one_rank(rank, ranks, place.init_method, queue, args)
                    Path(folder, str(rank)).write_text(json.dumps(found))
                    code = 0
                except BaseException:  # noqa: BLE001  printed, and the exit code tells
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                finally:
                    os._exit(code)
            pids.append(pid)
        found = one_rank(0, ranks, place.init_method, queue, args)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            raise SystemExit(f"a rank of {ranks} failed")
        found["reader"] = json.loads(Path(folder, "1").read_text())
    place.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--calls", type=int, default=300, help="most calls of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; microseconds")
    print("ranks     bytes", *(f"{name:>10}" for name in ("slots", "queue", "barrier")), flush=True)
    found = [run(ranks, args) for ranks in args.ranks]
    one = found[0]["reader"]
    print(f"a reader's part takes: slots {one['slots']}, queue {one['queue']}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
