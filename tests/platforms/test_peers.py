"""The probe for peer access: bounded, in another process, asked once. Programs that misbehave stand in for its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.platforms import CudaPlatform, peers

StandIn = Callable[..., Path]
"""Installs a program's text with a limit of seconds; the file to which each run of it adds a letter."""
GPUS = len(CudaPlatform().device_table().devices) if CudaPlatform().is_available() else 0


def program(folder: Path, text: str) -> str:
    file = folder / "probe.py"
    file.write_text(f"import json, os, sys, time\nopen({str(folder / 'calls')!r}, 'a').write('x')\n{text}\n")
    return str(file)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    def install(text: str, limit_s: float = 20.0) -> Path:
        monkeypatch.setattr(peers, "PROGRAM", program(tmp_path, text))
        monkeypatch.setattr(peers, "PROBE_S", limit_s)
        monkeypatch.setattr(peers, "_known", {})
        return tmp_path / "calls"

    return install


ALL_WELL = "print(json.dumps({f'{a}-{b}': '' for a in sys.argv[2:] for b in sys.argv[2:] if a != b}))"


def test_all_pairs_can(stand_in: StandIn) -> None:
    stand_in(ALL_WELL)
    assert peers.peer_access([2, 0, 1]) == {(0, 1): "", (0, 2): "", (1, 2): ""}


def test_it_is_asked_once_for_all_who_ask(stand_in: StandIn) -> None:
    calls = stand_in(ALL_WELL)
    platform = CudaPlatform(lambda: ())
    assert platform.peer_access(0, 1)
    assert platform.peer_access(1, 0)
    assert platform.peer_access(1, 1)
    assert peers.peer_access([1, 0]) == {(0, 1): ""}
    assert calls.read_text() == "x"
    assert peers.peer_access([0, 1, 2])[1, 2] == ""  # a pair that is new
    assert calls.read_text() == "xx"
    peers.remember({(0, 7): "no", (1, 7): "", (0, 1): ""})
    assert peers.peer_access([7, 0, 1]) == {(0, 1): "", (0, 7): "no", (1, 7): ""}
    assert calls.read_text() == "xx"


def test_one_direction_is_not_enough(stand_in: StandIn) -> None:
    stand_in("print(json.dumps({'0-1': '', '1-0': 'what is read over it is wrong'}))")
    assert peers.peer_access([0, 1]) == {(0, 1): "what is read over it is wrong"}
    assert not CudaPlatform(lambda: ()).peer_access(0, 1)
    assert peers.is_broken("what is read over it is wrong")
    assert not peers.is_broken("the driver says so")
    assert not peers.is_broken("")


def test_a_pair_that_was_not_told_cannot(stand_in: StandIn) -> None:
    stand_in("print(json.dumps({'0-1': ''}))")
    assert peers.peer_access([0, 1]) == {(0, 1): "not told"}


def test_a_probe_that_hangs_is_ended(stand_in: StandIn) -> None:
    stand_in("time.sleep(600)", limit_s=1.0)
    began = time.monotonic()
    found = peers.peer_access([0, 1])
    assert found == {(0, 1): "the probe did not end within 1 s"}
    assert peers.is_broken(found[0, 1])
    assert time.monotonic() - began < 60


def test_a_probe_that_crashes_or_talks_nonsense(stand_in: StandIn) -> None:
    stand_in("os.abort()")
    assert "the probe ended with code -6" in peers.peer_access([0, 1])[0, 1]
    stand_in("print('hello')")
    assert peers.peer_access([0, 2])[0, 2] == "the probe said 'hello'"


def test_one_device_needs_no_probe(stand_in: StandIn) -> None:
    calls = stand_in(ALL_WELL)
    assert peers.peer_access([3]) == {}
    assert not calls.exists()


def test_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs (or with none visible) it says why, and ends well."""
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "-1")
    found, problem = peers.run([0, 1], str(Path(peers.__file__).with_name("peer_probe.py")), 20.0)
    assert problem == ""
    assert set(found) == {"0-1", "1-0"}
    assert all("libcuda" in why or "cuInit" in why for why in found.values())


@pytest.mark.skipif(GPUS < 2, reason="no two GPUs on this machine")
def test_on_gpus() -> None:
    assert peers.peer_access([0, 1]) == {(0, 1): ""}
