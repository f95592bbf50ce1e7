"""The call table under random orders of events: order, exactly-once callbacks, books that balance."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import FailureReport
from drumline.executor.calls import CallTable, broken
from drumline.executor.future import Call
from drumline.transport import Waiter

RANKS = 3

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(-1, RANKS - 1)),
        st.tuples(st.just("answer"), st.integers(0, RANKS - 1)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("expire"), st.integers(0, 5)),
        st.tuples(st.just("fail"), st.integers(0, 5)),
        st.tuples(st.just("take"), st.integers(0, 5)),
        st.tuples(st.just("forget"), st.integers(0, 5)),
    ),
    max_size=60,
)


class World:
    """A table, and ranks that answer the calls in their order."""

    def __init__(self, waiter: Waiter) -> None:
        self.table = CallTable(waiter, lambda: None, 0, RANKS)
        self.futures: list[Call] = []
        self.todo: list[list[int]] = [[] for _ in range(RANKS)]
        """Ids of calls that each rank has still to answer."""
        self.told: list[int] = []
        self.in_order: list[int] = []
        """Ids of calls that ended with an answer, as their callbacks saw it."""
        self.begun = 0

    def callback(self, call: Call) -> None:
        self.told.append(call.id)
        if call._error is None:
            self.in_order.append(call.id)

    def begin(self, reply_rank: int) -> None:
        ranks = tuple(range(RANKS)) if reply_rank < 0 else (reply_rank,)
        call = self.table.begin("m", ranks, single=reply_rank >= 0, deadline=time.monotonic() + 1000)
        call.add_done_callback(self.callback)
        for rank in ranks:
            self.todo[rank].append(call.id)
        self.futures.append(call)
        self.begun += 1

    def answer(self, rank: int) -> None:
        if self.todo[rank]:
            call_id = self.todo[rank].pop(0)
            with self.table.lock:
                self.table.answer(rank, call_id, (call_id, rank), 10)

    def pick(self, which: int) -> Call | None:
        return self.futures[which % len(self.futures)] if self.futures else None

    def cancel(self, which: int) -> None:
        call = self.pick(which)
        if call is not None:
            assert call.cancel() != call.done() or call.cancelled()

    def expire(self, which: int) -> None:
        call = self.pick(which)
        if call is not None and not call._failures:
            call.deadline = 0.0
            self.table.expire(time.monotonic(), call)
            assert call.done()

    def fail(self, which: int) -> None:
        call = self.pick(which)
        if call is None:
            return
        rank = next((rank for rank in call.ranks if call.id in self.todo[rank]), None)
        if rank is None or self.todo[rank][0] != call.id:
            return
        self.todo[rank].pop(0)
        carrier = self.table.failed(call.id, FailureReport(role="w", rank=rank), owed_by=rank)
        if carrier is not None:
            self.table.settle(carrier)

    def take(self, which: int) -> None:
        call = self.pick(which)
        if call is not None and call.done() and call._error is None:
            value: Any = call.result(0)
            assert value in ((call.id, call.ranks[0]), [(call.id, rank) for rank in range(RANKS)])

    def forget(self, which: int) -> None:
        call = self.pick(which)
        if call is not None and call.done():
            self.futures.remove(call)

    def end(self) -> None:
        for rank in range(RANKS):
            while self.todo[rank]:
                self.answer(rank)


@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_order_callbacks_and_books(events: list[tuple[str, int]]) -> None:
    waiter = Waiter.create("property")
    world = World(waiter)
    try:
        for name, argument in events:
            getattr(world, name)(argument)
        world.end()
        assert world.table.owing == [0] * RANKS
        assert len(world.table) == 0
        assert all(call.done() for call in world.futures)
        world.table.close(None, broken(FailureReport(role="over")))
        world.table.keeper.join(10)
        assert sorted(world.told) == list(range(1, world.begun + 1))
        assert world.in_order == sorted(world.in_order)
        for call in world.futures:
            if call._error is None:
                call.result(0)
        gc.collect()
        assert world.table.recount() == 0
    finally:
        world.table.close(None, broken(FailureReport(role="over")))
        world.table.keeper.join(10)
        waiter.close()


def test_a_deadline_keeps_no_ended_call_alive() -> None:
    """Whoever forgets a call that has ended gives its answer's bytes back, also while one with an earlier deadline is
    in flight."""
    waiter = Waiter.create("property")
    world = World(waiter)
    told = threading.Event()
    try:
        world.begin(0)
        sooner = world.table.begin("m", (1,), single=True, deadline=time.monotonic() + 500)
        sooner.add_done_callback(world.callback)
        last = world.table.begin("m", (2,), single=True, deadline=None)
        last.add_done_callback(lambda call: told.set())
        world.answer(0)
        last.cancel()
        assert told.wait(10)  # callbacks run in the order of the ends: the keeper has let go of the first call
        world.futures.clear()
        assert world.table.recount() == 0
        assert not sooner.done()
    finally:
        world.table.close(None, broken(FailureReport(role="over")))
        world.table.keeper.join(10)
        waiter.close()
