"""From the command to ready: `drumline serve` at several TP sizes, by turns, with the seconds of each phase.

The phases are the server's own (`/metrics`, `drumline:start_seconds`). Beside their sum stands what this script
measured from outside: from the start of the command to the first 200 of `/readyz`. The last column is that, relative to
the first TP size. With cores to spare four workers should start in at most 1.3 times the time of one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from servers import Server, about_machine, drumline_command, ended_by_sigterm, free_port

LIMIT_S = 300.0
LOOK_S = 0.01


def started(server: Server) -> float:
    """Seconds from the command to the first 200 of /readyz. SystemExit if there is none."""
    while time.monotonic() - server.started < LIMIT_S and server.process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/readyz", timeout=5).close()
        except (OSError, urllib.error.URLError):
            time.sleep(LOOK_S)
        else:
            return time.monotonic() - server.started
    raise SystemExit(f"{server.name} does not start: see {server.log}")


def phases(server: Server) -> dict[str, float]:
    text = urllib.request.urlopen(f"{server.url}/metrics", timeout=5).read().decode()
    return {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "drumline:start_seconds"
    }


def measure(tp: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    port = free_port()
    flags = [] if args.device is None else ["--device", args.device]
    command = drumline_command(args.model, tp, "float32", port, args.kv_mib, *flags)
    if not args.model:
        command.remove("")
    with Server(f"drumline TP {tp}", command, {}, port, folder / f"tp{tp}.log") as server:
        whole = started(server)
        return {"tp": tp, "whole": whole, "phases": phases(server)}


def row(tp: int, runs: list[dict[str, Any]], first: float) -> list[str]:
    """Medians of one TP size."""
    names = list(runs[0]["phases"])
    middle = [statistics.median(run["phases"].get(name, 0.0) for run in runs) for name in names]
    total = statistics.median(sum(run["phases"].values()) for run in runs)
    whole = statistics.median(run["whole"] for run in runs)
    share = statistics.median(sum(run["phases"].values()) / run["whole"] for run in runs)
    cells = [*(f"{value:.2f}" for value in (*middle, total, whole)), f"{share:.1%}", f"{whole / first:.2f}"]
    return [str(tp), *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="folder; none: the embedded default model")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-mib", type=int, default=256)
    parser.add_argument("--device", help="cpu, cuda; none: what there is")
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args()
    print(about_machine(), flush=True)
    runs: dict[int, list[dict[str, Any]]] = {tp: [] for tp in args.tp}
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="drumline-start-") as folder:
        measure(args.tp[0], args, Path(folder))  # files are read, kernels compiled
        for number in range(args.rounds):
            for tp in args.tp[number % len(args.tp) :] + args.tp[: number % len(args.tp)]:
                runs[tp].append(measure(tp, args, Path(folder)))
                print({**runs[tp][-1], "sum": sum(runs[tp][-1]["phases"].values())}, flush=True)
    names = ["TP", *runs[args.tp[0]][0]["phases"], "sum", "measured whole", "sum / whole", f"whole / TP {args.tp[0]}"]
    print(f"\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    first = statistics.median(run["whole"] for run in runs[args.tp[0]])
    for tp in args.tp:
        print(f"| {' | '.join(row(tp, runs[tp], first))} |")
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
