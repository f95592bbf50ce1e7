"""all_reduce of CPU tensors between processes of one machine: shared memory against gloo, in one run.

    python bench/all_reduce.py [--ranks 2 4] [--gap-us 0 1000] [--seconds 0.5]

Prints median and 90th percentile in us of one call on rank 0, and the ratio of the medians (gloo / shm). The two take
turns at each size, several times. ``gap``: each rank computes for that long before each call (a spinning loop, not a
sleep), as the layers of a model do; 0 is back to back. One compute thread a rank, float32.

A machine that does other things meanwhile makes both slower: look at the ratio.
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

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
ROUNDS = 4


def measure(group: GroupCoordinator, tensor: torch.Tensor, gap_s: float, calls: int) -> list[float]:
    """Seconds of each call."""
    taken = []
    group.barrier()
    for _ in range(calls):
        busy = time.perf_counter() + gap_s
        while time.perf_counter() < busy:
            pass
        start = time.perf_counter()
        group.all_reduce(tensor)
        taken.append(time.perf_counter() - start)
    return taken


def agreed_calls(group: GroupCoordinator, tensor: torch.Tensor, gap_s: float, seconds: float) -> int:
    """As many calls as fit in the time, the same number on all ranks."""
    once = statistics.median(measure(group, tensor, gap_s, 5)) + gap_s
    return max(5, int(torch.clamp(group.all_reduce(torch.tensor(seconds / once), "min"), max=2000)))


def compare(rank: int, ranks: int, methods: dict[str, str], gaps: list[float], seconds: float) -> None:
    torch.set_num_threads(1)
    groups = {name: init_groups(Layout(tp=ranks), rank, method) for name, method in methods.items()}
    for gap_s in gaps:
        for size in SIZES:
            tensor = torch.zeros(size // 4)
            taken: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(ROUNDS):
                for name, made in groups.items():
                    calls = agreed_calls(made.tp, tensor, gap_s, seconds / ROUNDS)
                    taken[name] += measure(made.tp, tensor, gap_s, calls)
            if rank == 0:
                report(ranks, gap_s, size, taken)
    for made in groups.values():
        made.tp.barrier()
        made.close()


def report(ranks: int, gap_s: float, size: int, taken: dict[str, list[float]]) -> None:
    cells = []
    for values in taken.values():
        deciles = statistics.quantiles(values, n=10)
        cells.append(f"{deciles[4] * 1e6:10.1f} {deciles[8] * 1e6:10.1f}")
    ratio = statistics.median(taken["gloo"]) / statistics.median(taken["shm"])
    print(f"{ranks:5d} {gap_s * 1e6:6.0f} {size >> 10:6d}  {'  '.join(cells)}  {ratio:6.1f}", flush=True)


def run(ranks: int, gaps: list[float], seconds: float) -> bool:
    """Fork the ranks; whether all ended well."""
    first, second = create_rendezvous(ranks), create_rendezvous(ranks)
    methods = {"shm": first.init_method, "gloo": file_init_method(second.store)}
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                compare(rank, ranks, methods, gaps, seconds)
                code = 0
            except BaseException:  # noqa: BLE001  printed, and the exit code tells
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                os._exit(code)
        pids.append(pid)
    first.close()
    second.close()
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    return not any(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gap-us", type=float, nargs="+", default=[0.0, 1000.0])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each size and system")
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print("ranks gap us    KiB      shm p50        p90    gloo p50        p90   ratio", flush=True)
    ended_well = [run(ranks, [gap / 1e6 for gap in args.gap_us], args.seconds) for ranks in args.ranks]
    return 0 if all(ended_well) else 1


if __name__ == "__main__":
    sys.exit(main())
