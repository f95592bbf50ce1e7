"""Tensors from one pipeline stage to the next on CPUs of one machine: rings in shared memory against gloo, in one run.

    python bench/stage_messages.py [--seconds 1]

There and back: a tensor goes from stage 0 to stage 1 and one of the same size back; half of that is printed, median
and 90th percentile in us, and the ratio of the medians (gloo / ring). The two take turns at each size, several times.
``send``: how long the sender alone is held up (it goes on with its next micro-batch after that).

A machine that does other things meanwhile makes both slower: look at the ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch

from drumline.parallel.groups import GroupCoordinator, init_groups
from drumline.parallel.layout import Layout
from drumline.parallel.rendezvous import create_rendezvous, file_init_method

SIZES = [2 << 10, 32 << 10, 256 << 10, 1 << 20, 16 << 20]
ROUNDS = 4


def measure(pp: GroupCoordinator, tensor: torch.Tensor, seconds: float) -> list[tuple[float, float]]:
    """Seconds of each way, and of the call of ``send``; on stage 0. Stage 1 answers until it gets a negative number."""
    taken: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    going = True
    while going:
        start = time.perf_counter()
        if pp.is_first:
            going = start < end or len(taken) < 5
            tensor[0] = 1.0 if going else -1.0
            pp.send(tensor)
            sent = time.perf_counter()
            pp.recv(tensor)
            taken.append(((time.perf_counter() - start) / 2, sent - start))
        else:
            going = float(pp.recv(tensor)[0]) > 0
            pp.send(tensor)
    return taken


def compare(rank: int, methods: dict[str, str], seconds: float) -> None:
    torch.set_num_threads(1)
    groups = {name: init_groups(Layout(pp=2), rank, method) for name, method in methods.items()}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for _ in range(ROUNDS):
            for name, made in groups.items():
                taken[name] += measure(made.pp, tensor, seconds / ROUNDS)
        if rank == 0:
            report(size, taken)
    for made in groups.values():
        made.world.barrier()
        made.close()


def report(size: int, taken: dict[str, list[tuple[float, float]]]) -> None:
    cells, medians = [], []
    for values in taken.values():
        deciles = statistics.quantiles([way for way, _ in values], n=10)
        send = statistics.median(sent for _, sent in values)
        medians.append(deciles[4])
        cells.append(f"{deciles[4] * 1e6:9.1f} {deciles[8] * 1e6:9.1f} {send * 1e6:9.1f}")
    print(f"{size >> 10:6d}  {'  '.join(cells)}  {medians[1] / medians[0]:6.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size and system")
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print("   KiB   ring p50       p90      send   gloo p50       p90      send   ratio", flush=True)
    first, second = create_rendezvous(2), create_rendezvous(2)
    methods = {"ring": first.init_method, "gloo": file_init_method(second.store)}
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                compare(rank, methods, args.seconds)
                code = 0
            except BaseException:  # noqa: BLE001  printed, and the exit code tells
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        pids.append(pid)
    first.close()
    second.close()
    return 1 if any([os.waitpid(pid, 0)[1] for pid in pids]) else 0  # noqa: C419  all of them are waited for


if __name__ == "__main__":
    sys.exit(main())
