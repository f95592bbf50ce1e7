"""Outputs by calls (``AsyncEngine.open``), with real processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.engine.protocol import RequestOutput
from drumline.errors import EngineDeadError, RequestError

from .processes import Engine, config_for, engine, greedy, kill, prompt


@pytest.fixture(scope="module")
def served(tiny: tuple[Path, Any]) -> Iterator[Engine]:
    with engine(config_for(tiny[0], blocks=100, max_num_seqs=16)) as made:
        yield made


class Reader:
    """Takes what comes, or leaves it."""

    def __init__(self) -> None:
        self.takes = True
        self.taken: list[RequestOutput] = []
        self.offered: list[int] = []
        """How many tokens were offered at each call."""
        self.changed = asyncio.Event()
        self.dead = False

    def on_output(self, output: RequestOutput) -> bool:
        self.offered.append(len(output.token_ids))
        if self.takes:
            self.taken.append(output)
        self.changed.set()
        return self.takes

    def on_dead(self) -> None:
        self.dead = True
        self.changed.set()

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.taken for token in output.token_ids]

    async def until(self, what: str) -> None:
        conditions = {
            "end": lambda: bool(self.taken) and self.taken[-1].finish_reason is not None,
            "some": lambda: len(self.taken) >= 3,
            "ten left": lambda: bool(self.offered) and self.offered[-1] >= 10,
            "dead": lambda: self.dead,
        }
        while not conditions[what]():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 20)


def test_the_same_tokens_as_the_iterator_gives(served: Engine):
    async def both() -> None:
        readers = [Reader() for _ in range(5)]
        for i, reader in enumerate(readers):
            served.client.open(greedy(f"c{i}", prompt(i, 9), 20, logprobs=1), reader.on_output, reader.on_dead)
        with pytest.raises(RequestError, match="in use"):
            served.client.open(greedy("c0", prompt(0, 9)), readers[0].on_output, readers[0].on_dead)
        for i, reader in enumerate(readers):
            await reader.until("end")
            assert reader.tokens == await served.tokens(greedy(f"i{i}", prompt(i, 9), 20))
            assert sum(len(output.logprobs) for output in reader.taken) == 20
            assert reader.taken[0].queued_s > 0
            assert not any(output.queued_s for output in reader.taken[1:])

    served.run(both())


def test_what_is_left_waits_and_is_merged(served: Engine):
    async def lag() -> None:
        reader = Reader()
        reader.takes = False
        handle = served.client.open(greedy("lag", prompt(1, 9), 30), reader.on_output, reader.on_dead)
        await reader.until("ten left")
        assert not reader.taken
        reader.takes = True
        handle.resume()
        assert len(reader.taken) == 1
        assert len(reader.taken[0].token_ids) >= 10
        await reader.until("end")
        assert reader.tokens == await served.tokens(greedy("alone", prompt(1, 9), 30))
        handle.close()

    served.run(lag())


def test_close_aborts_and_nothing_follows(served: Engine):
    async def leave() -> None:
        reader = Reader()
        handle = served.client.open(greedy("leave", prompt(1, 9), 300), reader.on_output, reader.on_dead)
        await reader.until("some")
        handle.close()
        handle.close()
        seen = len(reader.offered)
        await served.until_idle()
        assert (await served.client.call("stats"))["kv_blocks_used"] == 0
        assert len(reader.offered) == seen
        assert not reader.dead

    served.run(leave())


def test_steps_are_counted(served: Engine):
    before = served.run(served.client.call("stats"))
    served.run(served.tokens(greedy("count", prompt(77, 40), 5)))
    after = served.run(served.client.call("stats"))
    assert after["tokens"] - before["tokens"] in (44, 45)  # with a step of look-ahead
    assert sum(after["step_tokens"]) > sum(before["step_tokens"])


def test_death_is_told_once(tiny: tuple[Path, Any]):
    with engine(config_for(tiny[0])) as made:

        async def die() -> None:
            reader = Reader()
            made.client.open(greedy("a", prompt(1, 9), 200), reader.on_output, reader.on_dead)
            await reader.until("some")
            kill(made.pid("EngineCore_DP0"), signal.SIGKILL)
            await reader.until("dead")
            assert made.client.failure is not None
            with pytest.raises(EngineDeadError):
                made.client.open(greedy("b", prompt(1, 9)), reader.on_output, reader.on_dead)

        made.run(die())
