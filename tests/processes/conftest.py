from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.processes import (
    EventKind,
    ForkServer,
    LogConfig,
    Member,
    MemberEvent,
    OwnChildren,
    ProcessSpec,
    Supervisor,
)
from tests.processes.targets import TARGETS


class House:
    """A fork server, a supervisor and what it told."""

    def __init__(
        self,
        folder: Path,
        preload: tuple[str, ...] = (),
        rung_s: float = 4.0,
        method: str = "forkserver",
        window_s: float = 0.15,
    ) -> None:
        self.events: queue.Queue[MemberEvent] = queue.Queue()
        self.log = LogConfig.create(dir=str(folder), console_fd=-1)
        self.method = method
        own = method in ("spawn", "fork")
        self.server = OwnChildren(method, self.log) if own else ForkServer.start(preload, log=self.log)
        self.supervisor = Supervisor(self.server, self.events.put, rung_s=rung_s, window_s=window_s)

    def spawn(self, target: str, payload: bytes = b"", role: str = "Worker_0", **spec: object) -> Member:
        if self.method == "plain":
            spec["fresh"] = True
        member = self.server.spawn(
            ProcessSpec(role=role, target=f"{TARGETS}:{target}", payload=payload, **spec)  # type: ignore[arg-type]
        )
        self.supervisor.add(member)
        return member

    def ready(self, *members: Member) -> None:
        self.supervisor.wait_all_ready(members, 30)

    def event(self, kind: EventKind, timeout_s: float = 10.0) -> MemberEvent:
        """The next event of a kind; others before it are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            if event.kind is kind:
                return event

    def close(self) -> None:
        self.supervisor.close()
        self.server.close()


@pytest.fixture
def make_house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    houses: list[House] = []

    def make(**options: object) -> House:
        houses.append(House(tmp_path / f"log{len(houses)}", **options))  # type: ignore[arg-type]
        return houses[-1]

    yield make
    for house in houses:
        house.close()


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house()
