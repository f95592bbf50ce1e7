"""Many short random requests over HTTP against the real command, with clients that leave: nothing may grow.

``make soak`` runs 50,000 (``SOAK_REQUESTS`` says otherwise), spread over one process, tensor parallel and pipeline
parallel workers. ``make test`` runs a short one. The KV pool is small and priorities are on, so that requests are
preempted and prefixes evicted all the time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.command import Serve, tiny_folder, wait_for
from tests.soak.conftest import tables
from tests.soak.load import Load
from tests.soak.watch import HEAD, SLACK, Process

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "50000"))
LAYOUTS = {"one process": (["-tp", "1"], 0.4), "TP 2": (["-tp", "2"], 0.4), "PP 2": (["-tp", "1", "-pp", "2"], 0.2)}
"""Flags, and share of the requests."""
FLAGS = ["--num-gpu-blocks-override", "72", "--max-num-seqs", "16", "--max-model-len", "256"]
FLAGS += ["--scheduling-policy", "priority", "--max-num-batched-tokens", "128", "--max-num-prefill-tokens", "64"]
PORTIONS = 20
ODD_SHARE = 0.02
"""Of the probes: random weights make near ties, which the size of the batch may turn."""

Start = Callable[[list[str]], Serve]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Serve] = []

    def one(flags: list[str]) -> Serve:
        made.append(Serve(tiny_folder(tmp_path), tmp_path / "log", *flags, *FLAGS))
        return made[-1].ready()

    yield one
    for server in made:
        server.kill()


def processes(server: Serve) -> list[Process]:
    return [Process(row["name"], row["pid"]) for row in server.state()["processes"]]


def at_rest(server: Serve, tree: list[Process], before: dict[str, tuple[int, int]]) -> None:
    """Wait until no request and no block is left, and sample. ``before``: descriptors and threads after the first."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wait_for(lambda: not any(map(server.gauge, gauges)), 10, f"rest: {[(g, server.gauge(g)) for g in gauges]}")

    def settled() -> bool:
        return all(
            now <= then for process in tree for now, then in zip(process.look(), before[process.name], strict=True)
        )

    deadline = time.monotonic() + 3
    while before and not settled() and time.monotonic() < deadline:
        time.sleep(0.02)  # connections that clients closed are taken down one by one
    for process in tree:
        process.sample()


def soak(server: Serve, name: str, requests: int, portions: int, slack: int = SLACK) -> None:
    tree = processes(server)
    load = Load(server.port())
    began = time.monotonic()
    at_first: dict[str, tuple[int, int]] = {}
    for _ in range(portions):
        asyncio.run(load.run(requests // portions))
        at_rest(server, tree, at_first)
        at_first = at_first or {process.name: process.look() for process in tree}
    counts, seconds = load.counts, time.monotonic() - began
    title = (
        f"{name}: {requests} requests in {seconds:.0f} s, {counts['left']} left by their clients, {counts['probes']} "
        f"probes ({counts['odd']} odd), {server.gauge('num_preemptions_total'):.0f} preemptions"
    )
    tables.append("\n".join([title, HEAD, *(process.row() for process in tree)]))
    print(tables[-1])
    faults = [fault for process in tree for fault in process.faults(requests // 2, slack)]
    assert not faults, "\n".join(faults)
    assert counts["odd"] <= max(counts["probes"] * ODD_SHARE, 1)
    assert counts["ended"] + counts["left"] == requests // portions * portions


def test_a_few(start: Start):
    # Caches of the server fill during these requests, so this sees only what grows by much.
    soak(start(["-tp", "2"]), "TP 2, short", 500, 10, slack=2 * SLACK)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many(start: Start, layout: str):
    flags, share = LAYOUTS[layout]
    soak(start(flags), layout, int(REQUESTS * share), PORTIONS)
