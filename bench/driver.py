"""The measured side of `transport.py` and `executor_rpc.py`: a process that owns one system and does what it is told.

It runs in the interpreter of its system (vLLM's, Ray's), so it needs nothing but Python and numpy. Over a socket come
lines of JSON, ``{"payload": "4KiB", "every": false, "gap_s": 0, "seconds": 1}``, and go lines of JSON back.
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
import time
import traceback
from typing import Any, Protocol

import numpy as np

ROWS = 256
"""Requests of the decode step."""
BLOCK = 16
WARM_UP = 10
WARM_UP_LARGE = 3
_TEXT = {"256B": 256, "4KiB": 4 << 10, "64KiB": 64 << 10}
_ARRAY = {"1MiB": 1 << 20, "30MiB": 30 << 20}
SIZES = [*_TEXT, *_ARRAY, "decode"]


class System(Protocol):
    """What is measured."""

    def payload(self, name: str) -> Any:
        """The object for a name of SIZES."""

    def call(self, payload: Any, every: bool) -> None:
        """To all workers and the answer of one (``every``: of all) back."""

    def close(self) -> None: ...


def make_payload(name: str) -> Any:
    """Of these bytes, pickled: request ids and block tables, or one array."""
    if name in _ARRAY:
        return {"step": 1, "array": np.arange(_ARRAY[name] // 8)}
    made: dict[str, Any] = {"step": 1, "req_ids": [], "block_tables": []}
    while (left := _TEXT[name] - len(pickle.dumps(made, protocol=5))) > 0:
        row = len(made["req_ids"])
        made["req_ids"].append(f"cmpl-{row:032x}-0")
        blocks = max(0, min(1000, (left - 50) // 3))
        made["block_tables"].append([300 + (row * 7 + i) % 60000 for i in range(blocks)])
    return made


def request_ids() -> list[str]:
    return [f"cmpl-{row:032x}-0" for row in range(ROWS)]


def decode_fields() -> dict[str, Any]:
    """The decode step as vLLM's scheduler says it: each request computes one token, every 16th gets a block."""
    ids = request_ids()
    return {
        "req_ids": ids,
        "new_block_ids": [([5000 + row],) if row % BLOCK == 0 else None for row in range(ROWS)],
        "num_computed_tokens": [BLOCK * 40 + row % BLOCK for row in range(ROWS)],
        "num_output_tokens": [BLOCK + row % BLOCK for row in range(ROWS)],
        "num_scheduled_tokens": dict.fromkeys(ids, 1),
    }


def vllm_step() -> Any:
    """The decode step as vLLM's own class, in vLLM's interpreter."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    fields = decode_fields()
    scheduled = fields.pop("num_scheduled_tokens")
    cached = CachedRequestData(resumed_req_ids=set(), new_token_ids=[], all_token_ids={}, **fields)
    made = SchedulerOutput.make_empty()
    made.scheduled_cached_reqs = cached
    made.num_scheduled_tokens = scheduled
    made.total_num_scheduled_tokens = ROWS
    return made


def drumline_plan() -> Any:
    """The same step as drumline's StepPlan."""
    from drumline.plan.step import StepPlan, pack

    fields = decode_fields()
    blocks = [found[0][0] for found in fields["new_block_ids"] if found]
    return StepPlan(
        step=7,
        slots=pack(list(range(ROWS))),
        num_tokens=pack([1] * ROWS),
        num_computed=pack(fields["num_computed_tokens"]),
        token_source=pack([6] * ROWS),
        block_counts=pack([int(found is not None) for found in fields["new_block_ids"]]),
        blocks=pack(blocks),
        sample=pack([1] * ROWS),
    )


def measure(system: System, payload: Any, every: bool, gap_s: float, seconds: float) -> list[float]:
    """Microseconds of each round trip; at least three of them."""
    taken: list[float] = []
    clock = time.perf_counter_ns
    end = clock() + int(seconds * 1e9)
    while clock() < end or len(taken) < 3:
        if gap_s:
            time.sleep(gap_s)
        start = clock()
        system.call(payload, every)
        taken.append((clock() - start) / 1000)
    return taken


def serve(sock: socket.socket, system: System) -> None:
    """Do what comes until the other side closes."""
    lines = sock.makefile("rw")
    print(json.dumps({"ready": True}), file=lines, flush=True)
    payloads: dict[str, Any] = {}
    for line in lines:
        told = json.loads(line)
        name = told["payload"]
        if name not in payloads:
            payloads[name] = system.payload(name)
        warm = told.get("warm", WARM_UP_LARGE if name in _ARRAY else WARM_UP)
        for _ in range(warm):
            system.call(payloads[name], every=True)
        print(json.dumps({"warm": warm}), file=lines, flush=True)
        lines.readline()  # go
        taken = measure(system, payloads[name], told["every"], told["gap_s"], told["seconds"])
        print(json.dumps({"us": taken}), file=lines, flush=True)
        if told.get("settle", True):
            system.call(payloads[name], every=True)  # nobody has anything left to read
        print(json.dumps({"settled": True}), file=lines, flush=True)


def main(systems: dict[str, Any]) -> int:
    """``SCRIPT SYSTEM WORKERS FD``: make the system and serve it."""
    name, workers, fd = sys.argv[1:4]
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    try:
        system = systems[name](int(workers))
    except Exception:  # noqa: BLE001  printed, and the exit code tells
        traceback.print_exc()
        return 1
    try:
        serve(sock, system)
    finally:
        system.close()
    return 0
