"""Progress of what takes long before a model can be loaded: a callback, and one that draws on a console."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from drumline.processes.logs import console_stream

Progress = Callable[[str, float], None]
"""Gets what is being done and which part of it is done, 0 .. 1."""


class ConsoleProgress:
    """One bar on a terminal; elsewhere a line when something begins and when it is done, and each 10 s between."""

    WIDTH = 30

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or console_stream()
        self._tty = self._stream.isatty()
        self._text = ""
        self._done = True
        self._printed = 0.0

    def __call__(self, text: str, fraction: float) -> None:
        """Show that ``fraction`` of ``text`` is done."""
        fraction = min(max(fraction, 0.0), 1.0)
        new = text != self._text
        if new and not self._done:
            self._end_line()
        now = time.monotonic()
        if new or fraction >= 1 or now - self._printed > (0.1 if self._tty else 10):
            self._draw(text, fraction)
            self._printed = now
        self._text, self._done = text, fraction >= 1
        if self._done and (new or self._tty):
            self._end_line()

    def _draw(self, text: str, fraction: float) -> None:
        if not self._tty:
            self._stream.write(f"{text} {fraction:.0%}\n")
        else:
            filled = round(fraction * self.WIDTH)
            bar = "#" * filled + "." * (self.WIDTH - filled)
            self._stream.write(f"\r{text:<44.44} [{bar}] {fraction:4.0%}")
        self._stream.flush()

    def _end_line(self) -> None:
        if self._tty:
            self._stream.write("\n")
            self._stream.flush()
