"""Objects from one process to n others and an answer back: drumline's MessageQueue and others, by turns in one run.

    python bench/transport.py [--vllm PYTHON] [--ray PYTHON] [--workers 2 4] [--sizes 256B decode] [--seconds 0.5]

Payloads of 256 B to 64 KiB are request ids and block tables, 1 and 30 MiB one numpy array, and ``decode`` a step of 256
requests: drumline's StepPlan, vLLM's SchedulerOutput, for others a dict with what SchedulerOutput says. The answer is a
small tuple. Workers look at both ends of an array, with --touch at every page. Median, 10th and 90th percentile in us,
and the ratio of the medians to drumline's. CPU is that of the driver and its workers.

Peers: pipes (multiprocessing), zmq (PUSH over ipc), gloo (broadcast_object_list); with their interpreters vLLM's
MessageQueue, Ray's actors and its compiled graph (all of whose actors always answer). What cannot be imported is left
out: there is nothing to install for a run without them. Look at the ratios when a machine does other things meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys

from driver import SIZES
from turns import Cell, add_flags, run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(parser, [1, 2, 4, 8], [1, 10, 50])
    parser.add_argument("--ray", metavar="PYTHON", help="interpreter of an environment with Ray")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--all-sizes", nargs="*", choices=SIZES, default=["256B", "decode"], help="where all answer")
    parser.add_argument("--gap-sizes", nargs="*", choices=SIZES, default=["decode"], help="with --gaps-ms between")
    parser.add_argument("--touch", action="store_true", help="workers read every page of an array")
    args = parser.parse_args()
    if args.touch:
        os.environ["TOUCH"] = "1"
    pythons = dict.fromkeys(["drumline", "pipes", "zmq", "gloo"], sys.executable)
    pythons |= {"vllm": args.vllm} if args.vllm else {}
    pythons |= {"ray": args.ray, "ray-graph": args.ray} if args.ray else {}
    cells = [Cell(size) for size in args.sizes]
    cells += [Cell(size, every=True) for size in args.all_sizes if size in args.sizes]
    cells += [Cell(size, gap_ms=gap) for size in args.gap_sizes if size in args.sizes for gap in args.gaps_ms]
    small = args.sizes[0]
    return run(args, "transport_systems.py", pythons, cells, (small, small))


if __name__ == "__main__":
    sys.exit(main())
