"""A client of the matrix: one streamed completion, and what became of it in words."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from typing import Any

from tests.server.command import COMPLETION, Serve

BODY = {"prompt": [5, 6, 7], "stream": True, "ignore_eos": True, "temperature": 0}


class Client(threading.Thread):
    """``text`` and ``times`` of what came; ``error`` event; ``broken`` connection."""

    def __init__(self, server: Serve, **body: Any) -> None:
        super().__init__(daemon=True)
        self._port = server.port()
        self._body = {**BODY, **body}
        self.began = time.monotonic()
        self.text = ""
        self.times: list[float] = []
        self.finished = ""
        self.status = 0
        self.error = ""
        self.broken = ""
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=180)
        try:
            connection.request("POST", COMPLETION, json.dumps(self._body), {"content-type": "application/json"})
            self._read(connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            self.broken = type(error).__name__
        finally:
            connection.close()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        if answer.status != 200:
            self.error = json.loads(answer.read())["error"]["message"]
            return
        done = False
        for line in answer:
            if line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))
            done = done or line.startswith(b"data: [DONE]")
        if not done and not self.error:
            self.broken = "no end"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
        for choice in event.get("choices", []):
            self.times.append(time.monotonic())
            self.text += choice["text"]
            self.finished = choice["finish_reason"] or self.finished

    @property
    def whole(self) -> bool:
        """It has all that it asked for."""
        return self.finished == "length" and not self.error and not self.broken

    def end(self, limit_s: float) -> None:
        """Wait until its answer is over, in whatever way."""
        self.join(limit_s)
        assert not self.is_alive(), f"the client still waits after {limit_s:g} s: {self.saw()}"

    def saw(self, since: float = 0.0) -> str:
        """In words; ``since``: pauses are looked for from then on."""
        if self.broken:
            return f"connection broken ({self.broken}) after {len(self.times)} events"
        if self.error:
            return f"HTTP {self.status}, {len(self.times)} events, error: {self.error.partition(chr(10))[0][:90]}"
        if not self.finished:
            return f"{len(self.times)} events so far"
        times = [self.began, *self.times]
        pairs = [(a, b) for a, b in itertools.pairwise(times) if b > since]
        return f"the whole answer, longest pause {max((b - a for a, b in pairs), default=0.0):.2f} s"
