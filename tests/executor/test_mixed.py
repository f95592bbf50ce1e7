"""Everything at once, by several threads, on real workers: no answer is lost, doubled or taken for another's."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

from drumline.errors import RPCTimeoutError, WorkerCallError
from drumline.executor import Call, Executor
from tests.executor.conftest import Make


class Mixer:
    """One thread that makes random calls and checks what comes of them."""

    def __init__(self, executor: Executor, number: int, until: float) -> None:
        self.executor = executor
        self.number = number
        self.until = until
        self.random = random.Random(number)
        self.count = 0
        self.told = 0
        self.registered = 0
        self.lock = threading.Lock()

    def run(self) -> None:
        while time.monotonic() < self.until:
            getattr(self, self.random.choice(["wait", "burst", "fail", "deadline", "give_up", "later", "awaited"]))()

    def key(self) -> tuple[int, int, str]:
        self.count += 1
        return self.number, self.count, "x" * self.random.choice([0, 10, 700, 3000])

    def rank(self) -> int:
        return self.random.randrange(self.executor.world_size)

    def on_end(self, call: Call) -> None:
        with self.lock:
            self.told += 1

    def wait(self) -> None:
        key, rank = self.key(), self.rank()
        assert self.executor.collective_rpc("echo", (key,), reply_rank=rank, timeout=60) == (rank, (key,), {})

    def burst(self) -> None:
        calls = []
        for _ in range(self.random.randrange(60)):
            key = self.key()
            call = self.executor.collective_rpc("echo", (key,), non_block=True)
            if self.random.random() < 0.5:
                call.add_done_callback(self.on_end)
                self.registered += 1
            calls.append((key, call))
        for key, call in calls:
            if self.random.random() < 0.7:
                assert call.result(timeout=60) == [(r, (key,), {}) for r in range(self.executor.world_size)]

    def fail(self) -> None:
        rank = self.rank()
        with pytest.raises(WorkerCallError, match=f"boom{self.number} rank{rank}"):
            self.executor.collective_rpc("raise_on", (rank, f"boom{self.number}"), timeout=60)

    def deadline(self) -> None:
        try:
            self.executor.collective_rpc("sleep", (0.01, self.rank()), timeout=0.005)
        except RPCTimeoutError:
            pass

    def give_up(self) -> None:
        call = self.executor.collective_rpc("echo", (self.key(),), non_block=True)
        call.add_done_callback(self.on_end)
        self.registered += 1
        if call.cancel():
            with pytest.raises(CancelledError):
                call.result()

    def later(self) -> None:
        key, rank = self.key(), self.rank()
        answer = self.executor.collective_rpc("later", (key, 0.001), reply_rank=rank, timeout=60)
        assert answer == (rank, key)

    def awaited(self) -> None:
        async def gather() -> list[Any]:
            return await asyncio.gather(
                *(self.executor.collective_rpc("echo", (key,), reply_rank=0, non_block=True) for key in keys)
            )

        keys = [self.key() for _ in range(5)]
        assert asyncio.run(gather()) == [(0, (key,), {}) for key in keys]


def mix(make: Make, seconds: float, threads: int) -> None:
    executor = make("mp", 3, worker="Deferred", mq_slots=8, mq_slot_bytes=2048, mq_answer_slots=4)
    mixers = [Mixer(executor, number, time.monotonic() + seconds) for number in range(threads)]
    errors: list[BaseException] = []

    def run(mixer: Mixer) -> None:
        try:
            mixer.run()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    running = [threading.Thread(target=run, args=(mixer,)) for mixer in mixers]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(seconds + 90)
    assert not errors, errors
    assert executor.collective_rpc("note", (1,), timeout=60) == [0, 1, 2]
    deadline = time.monotonic() + 20
    while sum(m.told for m in mixers) < sum(m.registered for m in mixers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sum(m.told for m in mixers) == sum(m.registered for m in mixers) > 0
    assert sum(m.count for m in mixers) > 50
    table = executor._table  # type: ignore[attr-defined]
    assert (len(table), table.unsent, table.owing) == (0, 0, [0, 0, 0])
    assert executor.waiter.lost_wakes == 0


def test_everything_at_once(make: Make) -> None:
    mix(make, 2.0, 3)


@pytest.mark.soak
def test_everything_at_once_for_long(make: Make) -> None:
    mix(make, 60.0, 5)
