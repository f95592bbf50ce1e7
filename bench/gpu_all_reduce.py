"""all_reduce of GPU tensors between processes of one machine: NCCL, one-shot and two-shot, in and outside CUDA graphs.

    python bench/gpu_all_reduce.py [--ranks 2] [--rounds 5] [--json FILE]

All through drumline's own groups: NCCL is a world with ``--disable-custom-all-reduce``, the other two are the symmetric
memory of a world without it; ``chosen`` is what ``group.all_reduce`` takes by its table. bfloat16, 8 KiB to 16 MiB.
Prints microseconds of one call on rank 0 (median of the rounds, in which the methods take turns; CUDA events around a
graph of ``--calls`` calls, or around as many calls one by one), then the table as ``parallel/fast_choice.py`` has it.

Before that every method sums random tensors of bfloat16 and float32, of each size and of odd ones, in and outside a
graph, and the sums are compared with what this rank computed alone, and between ranks bit for bit. Exit code 1 if one
is wrong, or if there is no fast all-reduce; 2 if there are no GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drumline.parallel.fast_choice import Method
from drumline.platforms import CudaPlatform

SIZES = [8 << 10 << step for step in range(12)]
ODD = [2, 16, 24, 48, 4112, (1 << 20) + 16, (1 << 20) + 2]
"""Bytes; those that 16 does not divide are NCCL's."""
LIMIT_S = 400
Sum = Callable[[Any], None]


class Ranks:
    """One rank's two worlds and the ways to sum."""

    def __init__(self, rank: int, ranks: int, methods: list[str]) -> None:
        import torch

        from drumline.parallel.groups import Groups, init_groups
        from drumline.parallel.layout import Layout

        platform = CudaPlatform()
        os.environ.update(platform.worker_environment(os.environ))
        self.rank, self.size, self.torch = rank, ranks, torch
        self.device = platform.set_device(rank)
        layout = Layout(tp=ranks)
        self.worlds: list[Groups] = [
            init_groups(layout, rank, method, "nccl", 120.0, device=self.device, custom_all_reduce=custom)
            for method, custom in zip(methods, (False, True), strict=True)
        ]
        self.group = self.worlds[0].tp
        fast = self.worlds[1]
        self.choice = fast.all_reduce_choice
        self.sums: dict[str, Sum] = {Method.NCCL: self.worlds[0].tp.all_reduce}
        memory: Any = getattr(fast.communicator, "memory", None)
        if memory is not None:
            self.sums |= {Method.ONE_SHOT: memory.one_shot, Method.TWO_SHOT: memory.two_shot}
        self.sums["chosen"] = fast.tp.all_reduce

    def close(self) -> None:
        """End both."""
        self.group.barrier()
        for world in reversed(self.worlds):
            world.close()

    def graph(self, sum_: Sum, tensor: Any, calls: int) -> Any:
        """A CUDA graph of so many sums."""
        torch = self.torch
        sum_(tensor)
        torch.cuda.synchronize()
        self.group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                sum_(tensor)
        return graph

    def check(self, name: str, size: int, dtype: Any) -> list[str]:
        """What is wrong with a method at a size, in and outside a graph."""
        torch, numel = self.torch, size // dtype.itemsize
        values = [
            torch.randn(numel, generator=torch.Generator().manual_seed(97 * size + rank)).to(dtype)
            for rank in range(self.size)
        ]
        expected = sum(value.double() for value in values)
        mine = values[self.rank].to(self.device)
        static, problems = mine.clone(), []
        self.sums[name](static)
        problems += self._compare(f"{name} of {size} bytes", static, expected)
        graph = self.graph(self.sums[name], static, 1)
        for _ in range(3):
            static.copy_(mine)
            graph.replay()
        problems += self._compare(f"{name} of {size} bytes in a graph", static, expected)
        del graph
        return problems

    def _compare(self, what: str, got: Any, expected: Any) -> list[str]:
        torch = self.torch
        torch.cuda.synchronize()
        found = got.cpu()
        bound = self.size * torch.finfo(found.dtype).eps * expected.abs().clamp(min=1.0)
        wrong = int(((found.double() - expected).abs() > bound).sum())
        bits = hashlib.sha256(found.view(torch.uint8).numpy().tobytes()).hexdigest()
        same = len(set(self.group.all_gather_object(bits))) == 1
        problems = [f"{what} ({found.dtype}): {wrong} of {len(found)} elements are wrong"] if wrong else []
        return problems if same else [*problems, f"{what} ({found.dtype}): ranks got different bits"]

    def time(self, run: Callable[[], None], calls: int) -> float:
        """Microseconds a call."""
        torch = self.torch
        run()
        torch.cuda.synchronize()
        self.group.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / calls


def checked(ranks: Ranks) -> list[str]:
    """Problems of all methods."""
    torch, problems = ranks.torch, []
    for dtype in (torch.bfloat16, torch.float32):
        for size in [*ODD, *SIZES]:
            for name in ranks.sums:
                direct = name in (Method.ONE_SHOT, Method.TWO_SHOT)
                if size % dtype.itemsize == 0 and not (direct and size % 16):
                    problems += ranks.check(name, size, dtype)
    return problems


def measured(ranks: Ranks, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each size, in and outside a graph."""
    torch, rows = ranks.torch, []
    for in_graph in (True, False):
        for size in SIZES:
            tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=ranks.device)
            graphs = {name: ranks.graph(sum_, tensor, args.calls) for name, sum_ in ranks.sums.items() if in_graph}
            taken: dict[str, list[float]] = {name: [] for name in ranks.sums}
            for _ in range(args.rounds):
                for name, sum_ in ranks.sums.items():
                    run = graphs[name].replay if in_graph else repeated(sum_, tensor, args.calls)
                    taken[name].append(ranks.time(run, args.calls))
            graphs.clear()
            row = {"bytes": size, "graph": in_graph}
            row |= {name: round(statistics.median(values), 2) for name, values in taken.items()}
            rows.append(row)
            if ranks.rank == 0:
                show(row, list(ranks.sums))
    return rows


def repeated(sum_: Sum, tensor: Any, calls: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(calls):
            sum_(tensor)

    return run


def show(row: dict[str, Any], names: list[str]) -> None:
    where = "graph" if row["graph"] else "plain"
    print(f"{where} {row['bytes'] >> 10:8d} KiB", *(f"{row[name]:10.1f}" for name in names), flush=True)


def one_rank(rank: int, methods: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """All that a rank does; what rank 0 found."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ranks = Ranks(rank, args.ranks, methods)
    try:
        problems = checked(ranks)
        if rank == 0:
            print("\n".join(problems) or "all sums are right, and the same bits on all ranks", flush=True)
            print(f"{'':18s}", *(f"{name:>10}" for name in ranks.sums), flush=True)
        rows = measured(ranks, args)
        choice = ranks.choice.text() if ranks.choice else ""
        fast = bool(ranks.choice and ranks.choice.is_fast)
        return {"problems": problems, "rows": rows, "choice": choice, "fast": fast, "machine": machine(ranks.torch)}
    finally:
        ranks.close()


def machine(torch: Any) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl, "gpus": names}


def forked(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the ranks; what rank 0 found. SystemExit if one fails: the others are killed."""
    from drumline.parallel.rendezvous import create_rendezvous

    places = [create_rendezvous(args.ranks) for _ in range(2)]
    pids = {}
    for rank in range(args.ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(LIMIT_S)
                found = one_rank(rank, [place.init_method for place in places], args)
                (folder / f"rank-{rank}").write_text(json.dumps(found))
                code = 0
            except BaseException:  # noqa: BLE001  printed, and the exit code tells
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids[pid] = rank
    for place in places:
        place.close()
    failed = []
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        if status and not failed:
            failed.append(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")
            for other in pids:
                os.kill(other, signal.SIGKILL)
    if failed:
        raise SystemExit(failed[0])
    ranks: list[dict[str, Any]] = [json.loads((folder / f"rank-{rank}").read_text()) for rank in range(args.ranks)]
    ranks[0]["problems"] = [f"rank {rank}: {text}" for rank, one in enumerate(ranks) for text in one["problems"]]
    return ranks[0]


def table(rows: list[dict[str, Any]]) -> str:
    """Rows in a graph, as ``fast_choice.MEASURED`` has them."""
    lines = []
    for row in rows:
        if row["graph"] and Method.ONE_SHOT in row:
            shift = row["bytes"].bit_length() - 1
            size = f"{row['bytes'] >> 10} << 10" if shift < 20 else f"{row['bytes'] >> 20} << 20"
            lines.append(f"    {size}: ({row['nccl']}, {row['one_shot']}, {row['two_shot']}),")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=50, help="sums in a graph, or one by one, of one measurement")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    platform = CudaPlatform()
    found = len(platform.device_table().devices) if platform.is_available() else 0
    if found < args.ranks:
        print(f"needs {args.ranks} GPUs and a torch that can use them; found {found}: nothing was measured")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        result = forked(args, Path(folder))
    print(f"chosen: {result['choice']}")
    print("in a graph, (nccl, one_shot, two_shot) by bytes:", table(result["rows"]), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    for problem in result["problems"]:
        print(problem)
    if not result["fast"]:
        print("there is no fast all-reduce here")
    return 1 if result["problems"] or not result["fast"] else 0


if __name__ == "__main__":
    sys.exit(main())
