"""Random requests: lengths, sampling parameters, priorities, streams or not, and clients that leave.

Some are *probes*: the same greedy requests again and again, whose answers must not change. They would if a block were
shared or freed wrongly under all that goes on around them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from tests.soak.client import Connection, Left

PROBES = 8
VOCAB = 420


class Load:
    """``clients`` connections that take requests one after another."""

    def __init__(self, port: int, *, clients: int = 24, abort_share: float = 0.1, seed: int = 0) -> None:
        self._port = port
        self._clients = clients
        self._abort_share = abort_share
        self._random = random.Random(seed)
        self._answers: dict[int, list[int]] = {}
        self._left = 0
        self.counts: Counter[str] = Counter()
        """``ended``, ``left``, ``probes``, ``odd`` (a probe with another answer), ``tokens``."""

    async def run(self, count: int) -> None:
        """Send ``count`` requests; returns when all have their answers and all connections are closed."""
        self._left = count
        await asyncio.gather(*(self._client() for _ in range(self._clients)))

    async def _client(self) -> None:
        connection = Connection(self._port)
        try:
            while self._left > 0:
                self._left -= 1
                async with asyncio.timeout(60):
                    await self._one(connection)
        finally:
            await connection.close()

    async def _one(self, connection: Connection) -> None:
        draw = self._random
        if draw.random() < 0.1:
            await self._probe(connection)
            return
        body = random_request(draw)
        leave_after = None
        if draw.random() < self._abort_share:
            leave_after = draw.choice((0, 1, 2, 3)) if body["stream"] else 0
        try:
            events = await connection.post(body, leave_after)
        except Left:
            self.counts["left"] += 1
            return
        self.counts["ended"] += 1
        self._check(body, events)

    def _check(self, body: dict[str, Any], events: list[dict[str, Any]]) -> None:
        ended = [c["finish_reason"] for event in events for c in event["choices"] if c["finish_reason"]]
        assert len(ended) == body.get("n", 1), events
        assert set(ended) <= {"stop", "length"}, ended
        if not body["stream"]:
            usage = events[0]["usage"]
            assert usage["completion_tokens"] <= body["max_tokens"] * body.get("best_of", body.get("n", 1))
            self.counts["tokens"] += usage["completion_tokens"]

    async def _probe(self, connection: Connection) -> None:
        number = self._random.randrange(PROBES)
        prompt = [3 + (number * 37 + place * place) % (VOCAB - 3) for place in range(4 + 9 * number)]
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        (answer,) = await connection.post(body | {"stream": False})
        tokens = answer["choices"][0]["token_ids"]
        self.counts["probes"] += 1
        self.counts["ended"] += 1
        self.counts["odd"] += tokens != self._answers.setdefault(number, tokens)


def random_request(draw: random.Random) -> dict[str, Any]:
    """A short request."""
    shared = [5 + place % 7 for place in range(draw.choice((0, 0, 16, 40)))]
    prompt: Any = shared + [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 32))]
    if draw.random() < 0.3:
        prompt = "".join(draw.choice("abcdefgh ,.") for _ in range(draw.randrange(1, 40)))
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": draw.randrange(1, 13), "stream": draw.random() < 0.5}
    options: dict[str, Any] = {
        "temperature": draw.choice((0, 0.7, 1.5)),
        "top_p": draw.choice((0.5, 0.95)),
        "top_k": draw.choice((1, 40)),
        "min_p": 0.05,
        "seed": draw.randrange(2**31),
        "logprobs": draw.randrange(4),
        "stop": ["a", "zz"],
        "ignore_eos": True,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_tokens": 1,
        "priority": draw.randrange(-1, 3),
        "cache_salt": "salt",
        "logit_bias": {"7": 5},
    }
    for name, value in options.items():
        if draw.random() < 0.25:
            body[name] = value
    if body.get("temperature") == 0:
        body.pop("n", None)
    return body
