"""drumline serve against vllm serve on one model folder: start, memory, idle CPU. Prints figures and ratios.

    python bench/serve_vs_vllm.py MODEL_FOLDER --vllm /path/to/venv/bin/vllm --tp 1 3

For each system and TP size, one after the other in one run, page cache warm (each server is started once before it is
measured, unless --no-warm):

* ``first_token``: seconds from the command to the first streamed token of a chat request that is retried until the
  server takes it;
* ``pss``: proportional memory (Pss of /proc/PID/smaps_rollup) of the whole process tree in MiB after 128 tokens;
* ``idle_cpu``: CPU seconds of the whole tree in --idle seconds without a request;
* ``tokens_per_s``: of one stream of 128 tokens (for information; speed is another benchmark's subject).

vLLM runs with --enforce-eager; both in float32 with the same KV bytes a rank, one compute thread a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from servers import (
    MODEL_NAME,
    Server,
    cpu_seconds,
    drumline_command,
    ended_by_sigterm,
    free_port,
    tree,
    vllm_command,
    vllm_env,
)


def pss_mib(pid: int) -> dict[str, float]:
    sizes = {}
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            kib = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
            sizes[f"{process.pid} {' '.join(process.cmdline())[:60]}"] = kib / 1024
    return sizes


def stream(base: str, model: str, max_tokens: int) -> Iterator[float]:
    """Yield time.monotonic() at each streamed chunk with content."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Write a long story about a drum line that marches to the sea."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=300) as response:
        if response.status_code != 200:
            response.read()
            raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choices = json.loads(line[6:]).get("choices") or []
            if choices and choices[0].get("delta", {}).get("content"):
                yield time.monotonic()


Result = dict[str, object]


def measure(name: str, command: list[str], env: dict[str, str], port: int, args: argparse.Namespace) -> Result:
    log = Path(args.logs) / f"{name}.log"
    with Server(name, command, env, port, log) as server:
        first = None
        while first is None:
            if server.process.poll() is not None:
                raise SystemExit(f"{name} ended with {server.process.returncode}: see {log}")
            if time.monotonic() - server.started > args.limit:
                raise SystemExit(f"{name} not ready after {args.limit} s: see {log}")
            try:
                first = next(stream(server.url, MODEL_NAME, 1))
            except (httpx.HTTPError, StopIteration):
                time.sleep(0.05)
        result: Result = {"first_token": round(first - server.started, 2)}
        if args.quick:
            return result
        times = list(stream(server.url, MODEL_NAME, 128))
        result["tokens_per_s"] = round((len(times) - 1) / (times[-1] - times[0]), 1)
        pid = server.process.pid
        sizes = pss_mib(pid)
        result["pss"] = round(sum(sizes.values()))
        result["pss_by_process"] = {k: round(v) for k, v in sizes.items()}
        time.sleep(2)
        before = cpu_seconds(pid)
        time.sleep(args.idle)
        result["idle_cpu"] = round(cpu_seconds(pid) - before, 3)
        result["processes"] = len(sizes)
        return result


def run_one(system: str, tp: int, args: argparse.Namespace) -> Result:
    port = free_port()
    if system == "drumline":
        command = drumline_command(args.model, tp, "float32", port, args.kv_mib)
        if args.drumline:
            command[:3] = [args.drumline]
        env = {}
    else:
        command = vllm_command(args.vllm, args.model, tp, "float32", port)
        env = vllm_env(args.vllm, args.kv_mib, args.vllm_bind)
    name = f"{system}-tp{tp}"
    if not args.no_warm:
        quick = argparse.Namespace(**{**vars(args), "quick": True})
        print(f"{name} (warm-up): {measure(name + '-warm', command, env, port, quick)}", flush=True)
    result = measure(name, command, env, port, args)
    print(f"{name}: {json.dumps(result)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the converted default model")
    parser.add_argument("--vllm", required=True, help="the vllm command of its own virtual environment")
    parser.add_argument("--drumline", help="the drumline command (this Python's module)")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--systems", nargs="+", default=["vllm", "drumline"])
    parser.add_argument(
        "--kv-mib", type=int, default=1024, help="KV pool of one rank in MiB; whole GiB, since vLLM takes no other"
    )
    parser.add_argument("--vllm-bind", default="nobind", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--idle", type=float, default=30.0)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--logs", default="/tmp", help="folder for the servers' logs")
    parser.add_argument("--no-warm", action="store_true")
    parser.set_defaults(quick=False)
    args = parser.parse_args()
    for tp in args.tp:
        with ended_by_sigterm():
            got = {system: run_one(system, tp, args) for system in args.systems}
        if len(got) == 2:
            ratios = {
                key: round(float(str(got["drumline"][key])) / float(str(got["vllm"][key])), 3)
                for key in ("first_token", "pss", "idle_cpu", "tokens_per_s")
            }
            print(f"TP {tp}: drumline / vllm: {json.dumps(ratios)}", flush=True)


if __name__ == "__main__":
    main()
