"""all_reduce of CPU tensors between processes of one machine: shared memory against gloo, in one run.

    python bench/all_reduce.py [--ranks 2 4] [--gap-us 0 1000] [--seconds 0.5] [--rounds 4] [--json FILE]

Prints the 10th percentile, median and 90th percentile in us of one call on rank 0, and the ratio of the medians
(gloo / shm). The two take turns at each size, ``--rounds`` times. ``gap``: each rank computes for that long before each
call (a spinning loop, not a sleep), as the layers of a model do; 0 is back to back. One compute thread a rank,
float32. Exit code 1 if a ratio is under what is held to: 4 up to 256 KiB, 1 above.

Other work on the machine makes both slower, and gloo more so than shared memory: then the 10th percentiles tell more
than the medians, and no ratio should be quoted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from drumline.parallel.groups import GroupCoordinator, init_groups
from drumline.parallel.layout import Layout
from drumline.parallel.rendezvous import create_rendezvous, file_init_method

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
MOST_CALLS = 2000


def held_to(size: int) -> float:
    """The least ratio at a size."""
    return 4.0 if size <= 256 << 10 else 1.0


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
    return max(5, int(torch.clamp(group.all_reduce(torch.tensor(seconds / once), "min"), max=MOST_CALLS)))


def compare(rank: int, ranks: int, methods: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """All sizes and gaps on one rank; the rows of the table."""
    torch.set_num_threads(1)
    groups = {name: init_groups(Layout(tp=ranks), rank, method) for name, method in methods.items()}
    rows = []
    for gap_us in args.gap_us:
        for size in SIZES:
            tensor = torch.zeros(size // 4)
            taken: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(args.rounds):
                for name, made in groups.items():
                    calls = agreed_calls(made.tp, tensor, gap_us / 1e6, args.seconds / args.rounds)
                    taken[name] += measure(made.tp, tensor, gap_us / 1e6, calls)
            rows.append(row(ranks, gap_us, size, taken))
            if rank == 0:
                show(rows[-1])
    for made in groups.values():
        made.tp.barrier()
        made.close()
    return rows


def row(ranks: int, gap_us: float, size: int, taken: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"ranks": ranks, "gap_us": gap_us, "bytes": size}
    for name, values in taken.items():
        deciles = statistics.quantiles(values, n=10)
        found[name] = {f"p{10 * (place + 1)}_us": round(deciles[place] * 1e6, 2) for place in (0, 4, 8)}
        found[name]["calls"] = len(values)
    found["ratio"] = round(found["gloo"]["p50_us"] / found["shm"]["p50_us"], 2)
    return found


def show(found: dict[str, Any]) -> None:
    cells = [f"{found[name][f'p{p}_us']:10.1f}" for name in ("shm", "gloo") for p in (10, 50, 90)]
    good = "" if found["ratio"] >= held_to(found["bytes"]) else "  <- too little"
    start = f"{found['ranks']:5d} {found['gap_us']:6.0f} {found['bytes'] >> 10:6d} "
    print(start, *cells, f"{found['ratio']:7.1f}{good}", flush=True)


def run(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Fork the ranks; rank 0's rows."""
    first, second = create_rendezvous(ranks), create_rendezvous(ranks)
    methods = {"shm": first.init_method, "gloo": file_init_method(second.store)}
    pids = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rows = compare(rank, ranks, methods, args)
                    if rank == 0:
                        path.write_text(json.dumps(rows))
                    code = 0
                except BaseException:  # noqa: BLE001  printed, and the exit code tells
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                finally:
                    os._exit(code)
            pids.append(pid)
        first.close()
        second.close()
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            raise SystemExit(f"a rank of {ranks} failed")
        found: list[dict[str, Any]] = json.loads(path.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gap-us", type=float, nargs="+", default=[0.0, 1000.0])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each size and system")
    parser.add_argument("--rounds", type=int, default=4, help="turns that the two take at each size")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    machine = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "torch": torch.__version__}
    print(f"{machine['cores']} cores, load {machine['load']:.1f}, torch {machine['torch']}")
    names = ("shm p10", "p50", "p90", "gloo p10", "p50", "p90")
    print("ranks gap us    KiB ", *(f"{name:>10}" for name in names), f"{'ratio':>7}", flush=True)
    rows = [found for ranks in args.ranks for found in run(ranks, args)]
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    return 0 if all(found["ratio"] >= held_to(found["bytes"]) for found in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
