"""What ``drumline serve`` prints: progress, the process table, the listeners, how to talk to it, and the last word.

All of it goes to stderr, as whole lines, so that it does not mix with the lines of the other processes; the command has
a stderr that never blocks (:func:`drumline.processes.logs.console_as_stderr`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drumline.engine.protocol import EngineInfo, ProcessState
from drumline.errors import FailureReport
from drumline.processes.logs import ConsoleStream
from drumline.server.sockets import Listener

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RULE = "-" * 72
EXPECTED_ERRORS = ("ConfigError", "UnsupportedModelError")
"""Their messages say what to change; a traceback would hide that."""


def say(text: str) -> None:
    """One line."""
    print(text, file=sys.stderr, flush=True)


def report(failure: FailureReport) -> None:
    """The last block on the console: what broke, where and why."""
    text = failure.text()
    if failure.type in EXPECTED_ERRORS:
        text = failure.headline() + (f"\nlog file: {failure.log_file}" if failure.log_file else "")
    last_word(f"{RULE}\ndrumline failed: {text}\n{RULE}")


def last_word(text: str) -> None:
    """What is said at the end, and matters most."""
    if isinstance(sys.stderr, ConsoleStream):
        sys.stderr.last_word(text + "\n")
    else:
        say(text)


class Progress:
    """Phases of the processes during the start, a line for each change."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def show(self, processes: Sequence[ProcessState]) -> None:
        """Print what changed since the last call."""
        changed = []
        for process in processes:
            # Percentages would be a line each.
            phase = process.phase.partition(" ")[0]
            if phase and self._seen.get(process.name) != phase:
                self._seen[process.name] = phase
                changed.append(f"{process.name}: {phase}")
        if changed:
            say("  ".join(changed))


def tables(
    processes: Sequence[ProcessState], memory: dict[int, int], found: Sequence[Listener], info: EngineInfo
) -> None:
    """Process table and listeners. ``memory``: proportional bytes by pid."""
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True)
    table = _table("process", "pid", "rank", "memory", "state")
    for row in processes:
        size = memory.get(row.pid)
        rank = "" if row.rank is None else str(row.rank)
        table.add_row(row.name, str(row.pid), rank, f"{size >> 20} MiB" if size else "", row.phase)
    _print(console, table)
    table = _table("listener", "of", "pid", "reachable from")
    for entry in found:
        reach = "this machine" if entry.loopback else "the network"
        table.add_row(entry.address, entry.process, str(entry.pid), reach)
    _print(console, table)
    blocks = f"{info.num_blocks} KV blocks of {info.block_size} tokens"
    say(f"{info.model_type or 'model'}, {info.dtype}, up to {info.max_model_len} tokens a request, {blocks}")


def start(phases: dict[str, float], whole_s: float) -> None:
    """How long the start took, by phase; the sum, and the whole as the kernel has it."""
    from rich.console import Console

    table = _table("start", "seconds")
    for name, seconds in (*phases.items(), ("sum", sum(phases.values())), ("from the command to ready", whole_s)):
        table.add_row(name, f"{seconds:.2f}")
    _print(Console(stderr=True, soft_wrap=True), table)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in ("pid", "rank", "memory", "seconds") else "left")
    return table


def _print(console: Console, table: Table) -> None:
    console.print(table)
    console.print()


def invitation(url: str, model: str, *, chat: bool, text: bool, key: bool) -> None:
    """How to talk to the server. ``text``: it has a tokenizer; otherwise prompts are token ids."""
    authorization = " -H 'Authorization: Bearer <key>'" if key else ""
    body: dict[str, object] = {"model": model, "prompt": "Once upon a time" if text else [1, 2, 3], "max_tokens": 32}
    route = "/v1/completions"
    if chat:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
        route = "/v1/chat/completions"
    data = json.dumps(body).replace("'", "'\\''")
    say(f"\nReady: {url} (chat page), {url}/v1 (OpenAI API), {url}/docs. Ctrl-C ends it. Try:\n")
    say(f"curl {url}{route} -H 'Content-Type: application/json'{authorization} -d '{data}'\n")
