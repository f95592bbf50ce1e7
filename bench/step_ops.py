"""Where a step of the compiled forward goes, by operation.

    OMP_NUM_THREADS=1 python bench/step_ops.py FOLDER [--rows 32] [--context 200] [--prompt] [--cold 64]

``--rows`` requests decode at ``--context`` tokens; with ``--prompt`` one prompt of ``--context`` tokens is computed
instead. After one real step each instruction of its program is run by itself, many times; the best time of each is
summed by operation, and beside it stand the GFLOPS of the products. With ``--cold MB`` so much memory is read before
each time, so that weights and keys and values come from memory. The program as a whole is timed too.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forward import Ours

from drumline.model.compiled import CompiledForward
from drumline.model.kernels.step import Op, Reg, Rows, run
from drumline.parallel.groups import init_groups
from drumline.parallel.layout import Layout


def best_of(times: int, cold: np.ndarray, *arguments: object) -> float:
    """Shortest time of ``run`` in us."""
    best = float("inf")
    for _ in range(times):
        cold.sum()
        start = time.perf_counter_ns()
        run(*arguments)
        best = min(best, time.perf_counter_ns() - start)
    return best / 1e3


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--prompt", action="store_true")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--cold", type=int, default=0)
    args = parser.parse_args()
    cold = np.ones(args.cold << 17)
    groups = init_groups(Layout(), 0, "")
    try:
        ours = Ours(args.folder, groups.tp, "compiled", args.rows)
        forward = ours.runner.forward
        assert isinstance(forward, CompiledForward)
        keeping: list[object] = []  # what the registers have addresses of

        def keep(*inputs: Any) -> torch.Tensor:
            keeping[:] = inputs
            return forward(*inputs)

        ours.runner.forward = keep  # type: ignore[assignment]
        ours.start(1 if args.prompt else args.rows, args.context)
        if not args.prompt:
            ours.step()
        code, numbers = forward._program
        registers = forward._registers
        whole = best_of(args.times, cold, code, numbers, registers, 0)
        empty = best_of(1000, cold[:0], code[-1:].copy(), numbers[-1:].copy(), registers, 0)
        total: dict[str, float] = defaultdict(float)
        work: dict[str, float] = defaultdict(float)
        for pc in range(len(code) - 1):
            name = Op(code[pc, 0]).name
            if name in ("CALL", "SUM"):
                continue
            if name == "PRODUCT":
                name = f"PRODUCT {code[pc, 8]} x {code[pc, 9]}"
                rows = registers[Reg.TOKENS if code[pc, 1] == Rows.TOKENS else Reg.KEPT]
                work[name] += 2e-3 * float(rows * code[pc, 8] * code[pc, 9])
            alone = np.vstack([code[pc], code[-1]]), np.vstack([numbers[pc], numbers[-1]])
            total[name] += best_of(args.times, cold, *alone, registers, 0) - empty
        for name, taken in sorted(total.items(), key=lambda row: -row[1]):
            speed = f"{work[name] / taken:8.1f} GFLOPS" if work[name] else ""
            print(f"{name:24} {taken:10.1f} us {speed}")
        print(f"{'sum':24} {sum(total.values()):10.1f} us; the program as a whole {whole:.1f} us")
    finally:
        groups.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
