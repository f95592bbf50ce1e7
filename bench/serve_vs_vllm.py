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
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def pss_mib(pid: int) -> dict[str, float]:
    sizes = {}
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            kib = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
            sizes[f"{process.pid} {' '.join(process.cmdline())[:60]}"] = kib / 1024
    return sizes


def cpu_seconds(pid: int) -> float:
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


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


def measure(name: str, command: list[str], env: dict[str, str], base: str, args: argparse.Namespace) -> Result:
    log = Path(args.logs) / f"{name}.log"
    started = time.monotonic()
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        first = None
        while first is None:
            if server.poll() is not None:
                raise SystemExit(f"{name} ended with {server.returncode}: see {log}")
            if time.monotonic() - started > args.limit:
                raise SystemExit(f"{name} not ready after {args.limit} s: see {log}")
            try:
                first = next(stream(base, args.model_name, 1))
            except (httpx.HTTPError, StopIteration):
                time.sleep(0.05)
        result: Result = {"first_token": round(first - started, 2)}
        if args.quick:
            return result
        times = list(stream(base, args.model_name, 128))
        result["tokens_per_s"] = round((len(times) - 1) / (times[-1] - times[0]), 1)
        sizes = pss_mib(server.pid)
        result["pss"] = round(sum(sizes.values()))
        result["pss_by_process"] = {k: round(v) for k, v in sizes.items()}
        time.sleep(2)
        before = cpu_seconds(server.pid)
        time.sleep(args.idle)
        result["idle_cpu"] = round(cpu_seconds(server.pid) - before, 3)
        result["processes"] = len(sizes)
        return result
    finally:
        family = tree(server.pid)
        server.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(15)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait()


def run_one(system: str, tp: int, args: argparse.Namespace) -> Result:
    port = free_port()
    env = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    kv = args.kv_mib * 2**20
    common = ["--tensor-parallel-size", str(tp), "--dtype", "float32", "--max-model-len", "2048", "--port", str(port)]
    common += ["--served-model-name", args.model_name, "--host", "127.0.0.1"]
    if system == "drumline":
        command = [args.drumline, "serve", args.model, *common, "--kv-cache-memory-bytes", str(kv)]
    else:
        command = [args.vllm, "serve", args.model, *common, "--enforce-eager"]
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_mib // 1024), "VLLM_CPU_OMP_THREADS_BIND": args.vllm_bind}
        env["PATH"] = f"{Path(args.vllm).parent}:{env['PATH']}"
    name = f"{system}-tp{tp}"
    if not args.no_warm:
        quick = argparse.Namespace(**{**vars(args), "quick": True})
        print(
            f"{name} (warm-up): {measure(name + '-warm', command, env, f'http://127.0.0.1:{port}', quick)}", flush=True
        )
    result = measure(name, command, env, f"http://127.0.0.1:{port}", args)
    print(f"{name}: {json.dumps(result)}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the converted default model")
    parser.add_argument("--vllm", required=True, help="the vllm command of its own virtual environment")
    parser.add_argument("--drumline", default=str(Path(sys.executable).parent / "drumline"))
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
    parser.add_argument("--model-name", default="default")
    parser.set_defaults(quick=False)
    args = parser.parse_args()
    for tp in args.tp:
        got = {system: run_one(system, tp, args) for system in args.systems}
        if len(got) == 2:
            ratios = {
                key: round(float(str(got["drumline"][key])) / float(str(got["vllm"][key])), 3)
                for key in ("first_token", "pss", "idle_cpu", "tokens_per_s")
            }
            print(f"TP {tp}: drumline / vllm: {json.dumps(ratios)}", flush=True)


if __name__ == "__main__":
    main()
