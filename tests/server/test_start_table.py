"""What a server says of its start is what passed: the phases add up to the time from the command to ready."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from .command import Serve, tiny_folder, wait_for

OUTSIDE_S = 0.3
"""Until this test has seen that the server is ready."""


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.chaos), 2])
def test_phases_add_up(tmp_path: Path, tp: int) -> None:
    server = Serve(tiny_folder(tmp_path), tmp_path / "log", "-tp", str(tp))
    try:
        wait_for(lambda: server.request("GET", "/readyz")[0] == 200, 90, "ready server")
        passed = time.monotonic() - server.began
        text = server.request("GET", "/metrics")[1]
        found = re.findall(r'^drumline:start_seconds{.*phase="([^"]*)".*} (\S+)$', text, re.MULTILINE)
        seconds = {name: float(value) for name, value in found}
        assert list(seconds) == [
            *("interpreter", "imports of the command", "listening", "model folder"),
            *("fork server", "imports", "engine core", "workers", "groups", "model", "KV cache", "warm-up"),
            "front end",
        ]
        total, whole = sum(seconds.values()), server.gauge("start_whole_seconds")
        assert total == pytest.approx(whole, rel=0.05)
        assert total == pytest.approx(passed, rel=0.05, abs=OUTSIDE_S)
        assert min(seconds.values()) >= 0
        assert seconds["imports"] > seconds["engine core"]
        wait_for(lambda: "from the command to ready" in server.text, 10, "table")
        table = server.text.partition("start ")[2]
        for name, value in seconds.items():
            assert re.search(rf"^{name} +{value:.2f}$", table, re.MULTILINE), table
        assert re.search(rf"^sum +{total:.2f}$", table, re.MULTILINE), table
    finally:
        server.kill()
