"""Whether GPUs of this machine reach each other's memory, asked once, in another process, within bounds.

Everybody who wants to know asks :func:`peer_access`, and believes it: what one user of peer memory finds broken must
not be used by the next one. The program that looks is :mod:`drumline.platforms.peer_probe`.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROBE_S = 30.0
"""Longest that the probe may take. On two H200 it takes about a second, most of it for opening them."""
WRONG, LATE = "what is", "the probe did not end within"
"""How reasons begin: other bytes came over, and a hang."""
PROGRAM = Path(__file__).with_name("peer_probe.py")


_known: dict[tuple[int, int], str] = {}


def peer_access(devices: Sequence[int]) -> Mapping[tuple[int, int], str]:
    """For each pair of these GPUs (indices among the visible ones, lower first): why they cannot use each other's
    memory, in either direction; empty if they can. A pair is looked at once in a process."""
    pairs = list(itertools.combinations(sorted(set(devices)), 2))
    unknown = [pair for pair in pairs if pair not in _known]
    if unknown:
        found, problem = run(sorted(set(itertools.chain(*unknown))), str(PROGRAM), PROBE_S)
        for one, other in unknown:
            there, back = found.get(f"{one}-{other}", "not told"), found.get(f"{other}-{one}", "not told")
            _known[one, other] = problem or there or back
    return {pair: _known[pair] for pair in pairs}


def remember(verdict: Mapping[tuple[int, int], str]) -> None:
    """Take over what another process of this machine has found."""
    _known.update(verdict)


def is_broken(reason: str) -> bool:
    """Whether the driver offers an access that does not work: then no library must be left to believe it."""
    return reason.startswith((WRONG, LATE))


def run(devices: Sequence[int], program: str, limit_s: float) -> tuple[dict[str, str], str]:
    """What the program found, and what was wrong with the program itself (empty: nothing)."""
    command = [sys.executable, "-I", "-S", program, str(max(1, int(limit_s))), *map(str, devices)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"{LATE} {limit_s:g} s"
    except OSError as error:
        return {}, f"the probe could not be started: {error}"
    if done.returncode:
        return {}, f"the probe ended with code {done.returncode}: {done.stderr.strip()[-300:]}"
    try:
        return {str(pair): str(reason) for pair, reason in json.loads(done.stdout).items()}, ""
    except (ValueError, AttributeError):
        return {}, f"the probe said {done.stdout.strip()[:100]!r}"
