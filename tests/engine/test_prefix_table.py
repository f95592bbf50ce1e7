"""What an engine leaves behind in the table of its blocks, and what the next one takes of it.

The lives: a scheduler over a simulated worker dies at any moment, also in the middle of a write of the table, while
ranks are at any place that they may be at then. Whatever the table says is true of each rank, and requests that are
sent again give what they give alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drumline.engine.blocks import BlockPool, HashChain
from drumline.engine.prefix_table import Geometry, PrefixTable
from drumline.engine.protocol import EngineRequest
from drumline.plan.step import StepOutput, StepPlan, ints

from .rig import Rig, expected, request
from .simulated import SimulatedWorker, Slot
from .test_scheduler_lives import requests, rigs

GEOMETRY = Geometry(block_size=4, num_blocks=8, bytes_per_block=100, fingerprint=b"f" * 32)
A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def memory(geometry: Geometry = GEOMETRY) -> memoryview:
    return memoryview(bytearray(PrefixTable.size_of(geometry.num_blocks)))


def entries(buf: memoryview, geometry: Geometry = GEOMETRY, incarnation: int = 9) -> list[tuple[int, bytes]]:
    """What the next engine would find, without changing anything."""
    return PrefixTable(memoryview(bytearray(buf)), geometry, incarnation, take_over=True).entries


def test_what_was_put_and_not_dropped_is_found_in_its_order():
    table = PrefixTable(buf := memory(), GEOMETRY, 1)
    assert PrefixTable.read(buf) == (GEOMETRY, 1)
    for block, digest in ((3, A), (1, B), (7, C)):
        table.put(block, digest)
    assert entries(buf) == [(3, A), (1, B), (7, C)]
    table.drop(3)
    table.drop(5)
    assert entries(buf) == [(1, B), (7, C)]
    later = PrefixTable(buf, GEOMETRY, 2, take_over=True)
    assert PrefixTable.read(buf) == (GEOMETRY, 2)
    later.put(0, A)
    assert entries(buf) == [(1, B), (7, C), (0, A)]
    later.drop_all()
    assert entries(buf) == []
    later.put(1, B)
    assert entries(buf) == [(1, B)]
    later.stop()
    later.put(2, C)
    assert PrefixTable.read(buf) is None


def test_a_table_begins_empty_where_another_one_was():
    PrefixTable(buf := memory(), GEOMETRY, 1).put(3, A)
    other = replace(GEOMETRY, fingerprint=b"g" * 32)
    PrefixTable(buf, other, 2)
    assert PrefixTable.read(buf) == (other, 2)
    assert entries(buf, other) == []
    PrefixTable(buf, GEOMETRY, 3)
    assert entries(buf) == []


def test_no_flipped_bit_is_believed():
    table = PrefixTable(buf := memory(), GEOMETRY, 1)
    table.put(0, A)
    table.put(1, B)
    first = 256  # of the entries
    for at in (*range(first, first + 56), *range(128, 136)):
        for bit in range(8):
            buf[at] ^= 1 << bit
            assert (0, A) not in entries(buf)
            assert set(entries(buf)) <= {(1, B)}
            buf[at] ^= 1 << bit
    for at in range(88):
        for bit in range(8):
            buf[at] ^= 1 << bit
            assert PrefixTable.read(buf) is None
            buf[at] ^= 1 << bit
    assert entries(buf) == [(0, A), (1, B)]
    buf[first : first + 64] = bytes(buf[first + 64 : first + 128])  # an entry of another block
    assert entries(buf) == [(1, B)]


@pytest.mark.parametrize("size", [0, 8, 255, 256, PrefixTable.size_of(8) - 1, PrefixTable.size_of(8) + 1])
def test_what_is_no_table_is_refused(size: int):
    assert PrefixTable.read(memoryview(bytearray(size))) is None
    noise = random.Random(size).randbytes(size)
    assert PrefixTable.read(memoryview(bytearray(noise))) is None
    PrefixTable(buf := memory(), GEOMETRY, 1)
    cut = (bytes(buf) + b"\0")[:size]
    assert PrefixTable.read(memoryview(bytearray(cut))) is None


def test_a_pool_takes_over_what_the_one_before_left():
    table = PrefixTable(buf := memory(), GEOMETRY, 1)
    pool = BlockPool(8, 4, table=table)
    chain = HashChain(4)
    chain.extend(range(20))
    blocks = pool.allocate(5)
    for step, (block, digest) in enumerate(zip(blocks, chain.hashes, strict=True)):
        pool.register(block, digest, due=step)
    assert entries(buf) == []
    pool.settle(2)
    assert entries(buf) == list(zip(blocks, chain.hashes[:3], strict=False))
    pool.free(blocks)
    again = BlockPool(8, 4, table=PrefixTable(buf, GEOMETRY, 2, take_over=True))
    again.check()
    assert again.lookup(chain.hashes) == blocks[:3]
    assert again.num_free == 8
    taken = again.allocate(6)  # five that hold nothing, and the one that is known for longest
    again.check()
    assert taken[-1] == blocks[0]
    assert entries(buf) == list(zip(blocks[1:3], chain.hashes[1:3], strict=True))


def test_a_block_that_is_given_away_before_its_step_is_over_gets_no_entry():
    table = PrefixTable(buf := memory(), GEOMETRY, 1)
    pool = BlockPool(1, 4, table=table)
    (block,) = pool.allocate(1)
    pool.register(block, A, due=0)
    pool.free([block])
    assert pool.allocate(1) == [block]
    pool.settle(0)
    assert entries(buf) == []
    pool.register(block, A, due=3)
    pool.settle(2)
    assert entries(buf) == []
    pool.settle(3)
    assert entries(buf) == [(block, A)]


# Lives.

Prefix = tuple[str, tuple[int, ...]]
"""What a place of a block holds: salt, and all tokens up to this one."""


class Died(Exception):
    pass


class MortalTable(PrefixTable):
    """The process is killed when so many more bytes have been written."""

    left: int | None = None

    def _write(self, at: int, data: bytes) -> None:
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                super()._write(at, data[: self.left])
                raise Died
        super()._write(at, data)


class Recorder(SimulatedWorker):
    """Notes what each step writes, in order; and new blocks are cleared first, as some forwards do."""

    def __init__(self, salts: dict[str, str], **sizes: int) -> None:
        super().__init__(**sizes)
        self.salts = salts
        self.steps: list[list[tuple[int, int, Prefix | None]]] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        self.steps.append([])
        return super().execute(plan)

    def _apply_changes(self, plan: StepPlan) -> None:
        super()._apply_changes(plan)
        for slot, computed in zip(ints(plan.slots).tolist(), ints(plan.num_computed).tolist(), strict=True):
            for place, block in enumerate(self.slots[slot].table):
                if place * self.block_size >= computed:
                    self.steps[-1] += [(block, offset, None) for offset in range(self.block_size)]

    def _write(self, slot: Slot, number: int, count: int, computed: int, *args: Any, **kwargs: Any) -> None:
        super()._write(slot, number, count, computed, *args, **kwargs)
        salt = self.salts[slot.start.request_id]
        for position in range(computed, computed + count):
            block, offset = slot.table[position // self.block_size], position % self.block_size
            self.steps[-1].append((block, offset, (salt, tuple(slot.tokens[: position + 1]))))


Cache = list[list[Prefix | None]]


class Life:
    """Engines one after the other over the same memory."""

    def __init__(self, sizes: dict[str, Any], rng: random.Random) -> None:
        self.rng = rng
        self.sizes = sizes
        self.geometry = replace(GEOMETRY, block_size=sizes["block_size"], num_blocks=sizes["num_blocks"])
        self.buf = memory(self.geometry)
        self.salts: dict[str, str] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, str | None] = {}
        self.ranks: list[Cache] = [
            [[None] * self.geometry.block_size for _ in range(self.geometry.num_blocks)] for _ in range(2)
        ]
        self.incarnation = 0
        self.found = 0

    def begin(self) -> None:
        """A new engine, which gets all requests that are not over."""
        self.incarnation += 1
        known = PrefixTable.read(self.buf)
        table = MortalTable(self.buf, self.geometry, self.incarnation, take_over=known is not None)
        self.rig = Rig(**self.sizes, table=table)
        self.table = table
        worker = Recorder(
            self.salts,
            num_blocks=self.rig.num_blocks,
            block_size=self.rig.block_size,
            max_num_seqs=self.rig.max_num_seqs,
            max_num_batched_tokens=self.rig.max_num_batched_tokens,
            vocab_size=self.rig.worker.vocab_size,
        )
        worker.cache = [
            [None if cell is None else (len(cell[1]) - 1, cell[1][-1]) for cell in block] for block in self.ranks[0]
        ]
        self.rig.worker = self.worker = worker
        self.answered = -1
        self.rig.got = self.got
        for name, known_request in self.requests.items():
            if name not in self.ended:
                self.rig.scheduler.add(
                    msgspec.structs.replace(known_request, output_token_ids=self.got.get(name, []), sent_again=True)
                )
        self.found += self.rig.scheduler.stats().still_there

    def turn(self) -> bool:
        issued = self.rig.issue()
        if self.rig.flight and (not issued or len(self.rig.flight) >= self.rig.depth):
            self.answered = self.rig.flight[0].step
            try:
                self.rig.answer()
            finally:
                self.ended |= {name: output.finish_reason for name, output in self.rig.ended.items()}
            return True
        return issued

    def die(self) -> None:
        """Each rank has done at least what the answers say, at most what was issued, and may be amid a step."""
        steps = self.worker.steps
        sampled = {plan.step: any(ints(plan.sample)) for plan in self.rig.plans}
        for number in range(2):
            least = self.answered + 1  # steps that are over
            if number and least and not sampled[self.answered]:
                least -= 1  # only the rank that answers is known to have ended one that samples nothing
            over = self.rng.randint(least, len(steps))
            writes = [write for step in steps[:over] for write in step]
            if over < len(steps):
                writes += steps[over][: self.rng.randint(0, len(steps[over]))]
            for block, offset, content in writes:
                self.ranks[number][block][offset] = content
        self.check()

    def check(self) -> None:
        """All that the table says is true on both ranks."""
        if PrefixTable.read(self.buf) is None:
            return
        for block, digest in entries(self.buf, self.geometry):
            for rank in self.ranks:
                cells = rank[block]
                assert None not in cells, "a cell of a block with an entry is empty"
                salt, tokens = cells[-1] or ("", ())
                size = self.geometry.block_size
                assert cells == [(salt, tokens[: len(tokens) - size + 1 + place]) for place in range(size)]
                chain = HashChain(size, salt=salt)
                chain.extend(tokens)
                assert chain.hashes[-1] == digest, "a block holds another prefix than its entry says"

    def add(self, request: EngineRequest) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = request = msgspec.structs.replace(request, request_id=name)
        self.salts[name] = request.cache_salt
        self.rig.scheduler.add(request)

    def abort(self) -> None:
        running = [name for name in self.requests if name not in self.ended]
        if running:
            name = self.rng.choice(running)
            self.ended[name] = None
            self.rig.scheduler.abort([name])


def live(life: Life, new: Sequence[EngineRequest], engines: int) -> None:
    rng, coming = life.rng, list(new)
    for number in range(engines):
        life.begin()
        last = number == engines - 1
        limit = 400 if last else rng.randint(0, 25)
        if not last and rng.random() < 0.5:
            life.table.left = rng.randint(0, 600)
        try:
            for _ in range(limit):
                if coming and rng.random() < 0.5:
                    life.add(coming.pop())
                if rng.random() < 0.05:
                    life.abort()
                if rng.random() < 0.03:
                    life.rig.scheduler.reset_prefix_cache()
                if not life.turn() and not coming and last:
                    break
        except Died:
            pass
        life.die()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sizes=rigs(), new=st.lists(requests(), min_size=1, max_size=8), engines=st.integers(1, 4), seed=st.integers(0, 999)
)
def test_whatever_the_table_says_is_true_at_any_death(
    sizes: dict[str, Any], new: list[EngineRequest], engines: int, seed: int
):
    life = Life({**sizes, "caching": True}, random.Random(seed))
    live(life, new, engines)
    assert not life.rig.scheduler.has_requests
    for name, added in life.requests.items():
        if life.ended[name] is not None:
            tokens, _ = expected(added, sizes["max_model_len"])
            assert life.got[name] == tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_computed_again_is_little(depth: int):
    """Of three requests with 40 tokens each: blocks that are not full, and those of the last steps."""
    sizes = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 16, "depth": depth}
    life = Life(sizes, random.Random(1))
    life.begin()
    for number in range(3):
        prompt = [number, *[1, 2, 3] * 9]
        life.add(request("", prompt, 40))
    while min(map(len, life.got.values()), default=0) < 12 or len(life.got) < 3:
        assert life.turn()
    life.die()
    known = sum(28 + len(tokens) for tokens in life.got.values())
    life.begin()
    assert known - life.found <= 3 * 2 * 4
    assert life.rig.scheduler.stats().sent_again == 3
    while life.turn():
        pass
    assert life.worker.computed_tokens <= known - life.found + sum(40 - 12 for _ in range(3))
    for name, added in life.requests.items():
        assert life.got[name] == expected(added, 128)[0]
