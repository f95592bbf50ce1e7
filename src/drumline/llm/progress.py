"""Progress of a call that takes long, drawn where the user looks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from drumline.processes.logs import console_shown

ProgressBar = Callable[..., Any]
"""Makes a bar as ``tqdm`` does: called with total and desc, has ``update(n)`` and ``close()``."""


class Progress:
    """Says how many prompts are done and how fast. This one says nothing."""

    def tokens(self, count: int) -> None:
        """Output tokens came."""

    def one_done(self) -> None:
        """A prompt has all its outputs."""


class _CallersBar(Progress):
    """A bar of the caller's, as tqdm's."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def one_done(self) -> None:
        self._bar.update(1)


class _RichBar(Progress):
    """Drawn by the thread that waits for the engine: a thread of its own would draw at the price of the GIL."""

    INTERVAL_S = 0.1

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task
        self._began = self._drawn = time.monotonic()
        self._tokens = 0

    def tokens(self, count: int) -> None:
        self._tokens += count
        now = time.monotonic()
        if now - self._drawn >= self.INTERVAL_S:
            self._drawn = now
            self._show()
            self._bar.refresh()

    def one_done(self) -> None:
        self._bar.advance(self._task)
        self._show()

    def _show(self) -> None:
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        self._bar.update(self._task, rate=f"{rate:,.1f} tokens/s")


@contextlib.contextmanager
def shown(use_tqdm: bool | ProgressBar, total: int, what: str = "Processed prompts") -> Iterator[Progress]:
    """A bar of ``total`` prompts: none, drumline's, or one that the caller's function makes."""
    if not use_tqdm or not total:
        yield Progress()
    elif callable(use_tqdm):
        bar = use_tqdm(total=total, desc=what, dynamic_ncols=True)
        try:
            yield _CallersBar(bar)
        finally:
            bar.close()
    else:
        with console_shown() as console, _rich_bar(console) as drawn:
            yield _RichBar(drawn, drawn.add_task(what, total=total, rate=""))


def _rich_bar(file: TextIO) -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        console=Console(file=file),
        auto_refresh=False,
    )
