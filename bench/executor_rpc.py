"""Calls to worker processes: drumline's MultiprocExecutor and vLLM's, by turns in one run.

    python bench/executor_rpc.py [--vllm PYTHON] [--workers 2 4] [--seconds 0.5]

``decode``: execute_model with a step of 256 requests (StepPlan against SchedulerOutput); workers make arrays of it and
answer with a token for each request (StepOutput against ModelRunnerOutput). ``256B``: collective_rpc of a method that
does nothing. Both executors as their defaults have them, a worker class that loads nothing, as many processes.
``pipes`` is the least that could do it: multiprocessing's pipes and the same work, no failures noticed, no deadlines.
Median, 10th and 90th percentile in us, the ratio of the medians to drumline's, CPU of the whole tree.
"""

from __future__ import annotations

import argparse
import sys

from driver import SIZES
from turns import Cell, add_flags, run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(parser, [2, 4], [1, 10, 50])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["256B", "decode"])
    args = parser.parse_args()
    pythons = dict.fromkeys(["drumline", "pipes"], sys.executable) | ({"vllm": args.vllm} if args.vllm else {})
    cells = [Cell(size) for size in args.sizes]
    cells += [Cell(size, every=True) for size in args.sizes if size != "decode"]
    cells += [Cell("decode", gap_ms=gap) for gap in args.gaps_ms if "decode" in args.sizes]
    return run(args, "executor_systems.py", pythons, cells, (args.sizes[-1], args.sizes[-1]))


if __name__ == "__main__":
    sys.exit(main())
