"""What people and programs get to see of a run: a table, a file, a bar while it lasts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from drumline.cli.bench.load import Progress
from drumline.cli.bench.stats import METRICS, PERCENTILES, Outcome, Spread, Summary

Watch = Callable[[Progress], contextlib.AbstractAsyncContextManager[None]]


def table(summary: Summary, title: str) -> str:
    """A run for people."""
    left = f", {summary.unfinished} not ended" if summary.unfinished else ""
    rows = [
        title,
        f"  requests   {summary.completed} done, {summary.failed} failed{left}, in {summary.duration:.2f} s; "
        f"at most {summary.peak_concurrency} at once",
        f"  tokens     {summary.input_tokens} in, {summary.output_tokens} out ({_counted(summary)})",
        f"  rates      {summary.request_throughput:.2f} requests/s, {summary.output_throughput:.1f} output tokens/s, "
        f"{summary.total_throughput:.1f} tokens/s in all",
    ]
    if summary.spreads:
        rows += ["", *latencies(summary.spreads)]
    for kind, count in summary.errors.items():
        rows += [*([""] if kind == next(iter(summary.errors)) else []), f"  {count} x {kind}: {summary.examples[kind]}"]
    return "\n".join(rows)


def _counted(summary: Summary) -> str:
    each = summary.output_tokens / summary.events if summary.events else 0
    events = f", {each:.2f} an event" if each > 1.005 else ""
    return f"counted by {', '.join(summary.counted) or 'nobody'}{events}"


def latencies(spreads: dict[str, Spread]) -> list[str]:
    """Lines with a row for each metric, in ms."""
    percentiles = list(next(iter(spreads.values())).at)
    heads = ["mean", *(f"p{percent:g}" for percent in percentiles), "max"]
    rows = [f"  {'ms':22}" + "".join(f"{head:>10}" for head in heads)]
    for name, spread in spreads.items():
        values = [spread.mean, *spread.at.values(), spread.high]
        rows.append(f"  {METRICS.get(name, name):22}" + "".join(f"{value * 1e3:10.2f}" for value in values))
    return rows


def result(summary: Summary, settings: dict[str, Any], outcomes: Sequence[Outcome] | None = None) -> dict[str, Any]:
    """A run for programs; ``outcomes`` for each request too."""
    found = {"date": time.strftime("%Y%m%d-%H%M%S"), **settings, **summary.as_json()}
    if outcomes is not None:
        found["requests"] = [
            {
                "sent": o.sent - outcomes[0].sent,
                "ttft": o.times[0] - o.sent if o.times else None,
                "itl": [after - before for before, after in zip(o.times, o.times[1:], strict=False)],
                "tokens_of_events": o.counts,
                "e2el": o.ended - o.sent,
                "prompt_tokens": o.prompt_tokens,
                "output_tokens": o.output_tokens,
                "finish_reason": o.finish_reason,
                "error": o.error,
                "message": o.message,
                "text": o.text,
            }
            for o in outcomes
        ]
    return found


def save(found: dict[str, Any], place: str) -> None:
    """Write a result to a file, or to stdout if ``place`` is ``-``."""
    text = json.dumps(found, indent=1)
    if place == "-":
        print(text, flush=True)
        return
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def percentiles(text: str) -> tuple[float, ...]:
    """``50,90,99`` as numbers; ValueError if they are none. The median is always there."""
    found = {float(part) for part in text.split(",") if part.strip()}
    if not all(0 <= percent <= 100 for percent in found):
        raise ValueError("percentiles are from 0 to 100")
    return tuple(sorted({50.0, *found})) if found else PERCENTILES


@contextlib.asynccontextmanager
async def silent(progress: Progress) -> AsyncIterator[None]:
    """No bar."""
    yield


@contextlib.asynccontextmanager
async def bar(progress: Progress) -> AsyncIterator[None]:
    """A bar on stderr, drawn a few times a second by the loop itself: a thread would draw at the price of the GIL."""
    drawn = _rich_bar()
    task = drawn.add_task("", total=progress.total, said="")

    def show() -> None:
        failed = f", {progress.failed} failed" if progress.failed else ""
        drawn.update(task, completed=progress.done, said=f"{progress.running} running{failed}")
        drawn.refresh()

    async def draw() -> None:
        while True:
            show()
            await asyncio.sleep(0.25)

    with drawn:
        drawing = asyncio.create_task(draw())
        try:
            yield
        finally:
            drawing.cancel()
            show()


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[said]}"),
        console=Console(file=sys.stderr),
        auto_refresh=False,
        transient=True,
    )
