"""Output tokens/s and latencies under load: `drumline serve` against `vllm serve --enforce-eager`, in one run.

    python bench/serve_load.py --vllm /path/to/venv/bin/vllm                                # random Llama, TP 1 and 2
    python bench/serve_load.py --vllm /path/to/venv/bin/vllm --model FOLDER --tp 1 --rounds 2 --beside ''

Both servers run at the same time, one loaded at a time, taking turns (A B, B A, A B ...); the client is
`drumline bench serve` for both, on the same machine: n streams, 128 tokens in, 128 out, token ids as prompts, no prompt
twice, end of sequence ignored, tokens counted by the ids in the events. Both in float32, one compute thread a worker
(OMP_NUM_THREADS=1), the same KV pool. Afterwards vLLM alone with its default dtype, shown beside. Cells are medians
over the rounds. Before each load nothing is asked for --rest seconds: vLLM's processes watch their queues for a second
after their last message, and would take both cores from the one whose turn it is. Inter-token latency is from event to
event, as `vllm bench serve` has it.

Prints a markdown table, and writes everything with --json. Servers are ended and leave nothing; their logs are kept
only if something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_llama
from servers import (
    MODEL_NAME,
    ForeignLoad,
    Server,
    about_machine,
    drumline_command,
    ended_by_sigterm,
    free_port,
    vllm_command,
    vllm_env,
)

METRICS = {
    "output_throughput": ("output tokens/s", 1),
    "median_ttft_ms": ("TTFT p50 ms", 1),
    "p99_itl_ms": ("inter-token p99 ms", 1),
}
Cell = dict[str, Any]


def load(url: str, streams: int, requests: int, output_len: int, seed: int, args: argparse.Namespace) -> Cell:
    """One run of the client."""
    command = [sys.executable, "-m", "drumline", "bench", "serve", url, "--model", MODEL_NAME, "--ignore-eos"]
    command += ["--num-prompts", str(requests), "--max-concurrency", str(streams), "--count-by", "ids", "--quiet"]
    command += ["--random-input-len", str(args.input_len), "--random-output-len", str(output_len)]
    command += ["--seed", str(seed), "--warmup", "0", "--output-json", "-", "--tokenizer", args.model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the client failed:\n{done.stderr}")
    found: Cell = json.loads(done.stdout)
    assert found["total_output_tokens"] == requests * output_len, found
    return found


@contextlib.contextmanager
def serving(system: str, dtype: str, tp: int, args: argparse.Namespace) -> Iterator[Server]:
    port = free_port()
    if system == "vllm":
        command = vllm_command(args.vllm, args.model, tp, dtype, port)
        env = vllm_env(args.vllm, args.kv_mib)
    else:
        command, env = drumline_command(args.model, tp, dtype, port, args.kv_mib), {}
    with Server(f"{system}-{dtype}-tp{tp}", command, env, port, args.logs / f"{system}-{dtype}-tp{tp}.log") as server:
        yield server


def ready(server: Server, args: argparse.Namespace) -> None:
    said = server.wait_ready()
    load(server.url, max(args.streams), max(args.streams), 8, 10_000, args)  # the warm-up
    print(f"{server.name}: ready after {said:.1f} s", file=sys.stderr, flush=True)


def compare(tp: int, args: argparse.Namespace) -> dict[str, dict[int, list[Cell]]]:
    """system: streams: a cell a round."""
    found: dict[str, dict[int, list[Cell]]] = {}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(system, "float32", tp, args)) for system in args.systems]
        for server in servers:
            ready(server, args)
        for turn in range(args.rounds):
            for streams in args.streams:
                for server in servers if turn % 2 == 0 else reversed(servers):
                    measure(server, streams, turn, found, args)
    if args.beside and "vllm" in args.systems:
        with serving("vllm", args.beside, tp, args) as server:
            ready(server, args)
            for streams in args.streams:
                measure(server, streams, 0, found, args)
    return found


def measure(
    server: Server,
    streams: int,
    turn: int,
    found: dict[str, dict[int, list[Cell]]],
    args: argparse.Namespace,
) -> None:
    requests = streams * (args.waves if streams == 1 else 1)
    time.sleep(args.rest)
    foreign = ForeignLoad()
    cell = load(server.url, streams, requests, args.output_len, 100 * turn + streams, args)
    cell["foreign_cores"] = foreign.cores()
    name = server.name.rpartition("-tp")[0]
    found.setdefault(name, {}).setdefault(streams, []).append(cell)
    values = ", ".join(f"{cell.get(metric, math.nan):.1f} {title}" for metric, (title, _) in METRICS.items())
    busy = f"others keep {cell['foreign_cores']:.2f} cores busy"
    print(f"{server.name}, {streams} streams: {values}; {busy}", file=sys.stderr, flush=True)


def medians(cells: list[Cell]) -> dict[str, float]:
    # An answer that came in one event has no gaps.
    return {metric: statistics.median(cell.get(metric, math.nan) for cell in cells) for metric in METRICS}


def table(results: dict[int, dict[str, dict[int, list[Cell]]]], args: argparse.Namespace) -> tuple[str, list[Cell]]:
    """Markdown, and the same for programs."""
    beside = f"vllm-{args.beside}"
    heads = ["TP", "streams"]
    for title, _ in METRICS.values():
        heads += [f"{title}: vLLM", "drumline", "ratio"]
    with_beside = any(beside in found for found in results.values())
    heads += [f"vLLM {args.beside}: " + ", ".join(title for title, _ in METRICS.values())] if with_beside else []
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    rows: list[Cell] = []
    for tp, found in results.items():
        for streams in args.streams:
            sides = {name: medians(found[name][streams]) for name in found}
            row: Cell = {"tp": tp, "streams": streams, "medians": sides, "ratios": {}}
            cells = [str(tp), str(streams)]
            for metric, (_, digits) in METRICS.items():
                ours = sides.get("drumline-float32", {}).get(metric)
                theirs = sides.get("vllm-float32", {}).get(metric)
                ratio = ours / theirs if ours and theirs else None
                row["ratios"][metric] = ratio
                cells += ["-" if value is None else f"{value:,.{digits}f}" for value in (theirs, ours)]
                cells += ["-" if ratio is None else f"**{ratio:.2f}**"]
            if with_beside:
                cells += [", ".join(f"{value:,.1f}" for value in sides[beside].values()) if beside in sides else "-"]
            lines.append("| " + " | ".join(cells) + " |")
            rows.append(row)
    return "\n".join(lines), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", help="the vllm command of its own virtual environment")
    parser.add_argument("--model", default="", help="model folder (the random Llama of tiny_llama.py, made anew)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=2.0, help="seconds before each load")
    parser.add_argument("--waves", type=int, default=3, help="requests of the single stream, one after the other")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--beside", default="bfloat16", help="dtype in which vLLM is shown beside; '': none")
    parser.add_argument("--systems", nargs="+", default=["vllm", "drumline"], choices=["vllm", "drumline"])
    parser.add_argument("--kv-mib", type=int, default=1024, help="KV pool of a rank; whole GiB, as vLLM wants")
    parser.add_argument("--json", type=Path, help="file for all figures")
    args = parser.parse_args()
    if "vllm" in args.systems and not args.vllm:
        parser.error("--vllm is needed, or --systems drumline")
    work = Path(tempfile.mkdtemp(prefix="drumline-serve-load-"))
    args.logs = work
    try:
        args.model = args.model or str(tiny_llama.make(work / "llama5m"))
        about = about_machine()
        print(f"{about}; {args.model}", flush=True)
        with ended_by_sigterm():
            results = {tp: compare(tp, args) for tp in args.tp}
    except SystemExit as e:
        if isinstance(e.code, str):  # the logs tell why
            raise
        shutil.rmtree(work)
        raise
    except KeyboardInterrupt:
        shutil.rmtree(work)
        raise
    text, rows = table(results, args)
    every = [cell for found in results.values() for cells in found.values() for many in cells.values() for cell in many]
    busy = statistics.median(cell["foreign_cores"] for cell in every)
    lengths = f"{args.input_len} tokens in, {args.output_len} out, medians of {args.rounds}"
    print(f"\n{lengths}; ratio: drumline / vLLM; others kept {busy:.2f} cores busy (median)\n\n{text}")
    if args.json:
        args.json.write_text(json.dumps({"about": about, "rows": rows, "runs": results}, indent=1) + "\n")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
