from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.engine.blocks import BlockPool, HashChain, OutOfBlocksError


def chain(tokens: list[int], size: int = 4, salt: str = "") -> list[bytes]:
    made = HashChain(size, salt=salt)
    made.extend(tokens)
    return made.hashes


def fill(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """A request computes these tokens; its blocks."""
    hashes = chain(tokens, pool.block_size, salt)
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    for block, digest in zip(blocks, hashes, strict=False):
        pool.register(block, digest)
    return blocks


def test_chain_depends_on_salt_order_and_all_tokens_before():
    tokens = list(range(12))
    assert len(chain(tokens)) == 3
    assert len(chain(tokens[:11])) == 2
    assert chain(tokens)[:2] == chain(tokens[:8])
    assert chain(tokens, salt="a") != chain(tokens)
    assert chain([9, *tokens[1:]])[2] != chain(tokens)[2]
    assert chain([*tokens[:4], 9, *tokens[5:]])[0] == chain(tokens)[0]


def test_chains_of_models_adapters_and_salts_never_meet():
    roots = [
        ("m", "", ""),
        ("n", "", ""),
        ("m", "a", ""),
        ("m", "", "a"),
        ("", "m", ""),
        ("ma", "", ""),
        ("", "", "ma"),
    ]
    seen = set()
    for model, adapter, salt in roots:
        made = HashChain(4, model=model, adapter=adapter, salt=salt)
        made.extend([1, 2, 3, 4])
        seen.update(made.hashes)
    assert len(seen) == len(roots)


def test_a_pool_of_millions_costs_what_is_used():
    tracemalloc.start()
    try:
        pool = BlockPool(21_000_000, 16)
        fill(pool, list(range(16_000)))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert pool.num_free == 20_999_000


def test_chain_extended_in_pieces_is_the_same():
    tokens, pieces = list(range(30)), HashChain(4)
    for end in (3, 4, 9, 9, 25, 30):
        pieces.extend(tokens[:end])
    assert pieces.hashes == chain(tokens)


def test_prefix_is_found_after_its_blocks_were_freed():
    pool = BlockPool(8, 4)
    blocks = fill(pool, list(range(10)))
    pool.free(blocks)
    assert pool.num_free == 8
    assert pool.lookup(chain(list(range(12)))) == blocks[:2]
    assert pool.lookup(chain([*range(4), 50, 51, 52, 53])) == blocks[:1]
    assert pool.lookup(chain(list(range(8)), salt="x")) == []


def test_shared_blocks_are_free_only_when_nobody_has_them():
    pool = BlockPool(4, 4)
    blocks = fill(pool, list(range(8)))
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 2
    pool.free(blocks)
    assert pool.num_free == 4
    with pytest.raises(ValueError, match="free already"):
        pool.free(blocks)


def test_longest_unused_prefix_goes_first_and_its_tail_before_its_head():
    pool = BlockPool(4, 4)
    old, new = fill(pool, list(range(8))), fill(pool, list(range(100, 108)))
    pool.free(old)
    pool.free(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.lookup(chain(list(range(8)))) == old[:1]
    assert pool.lookup(chain(list(range(100, 108)))) == new
    pool.share(old[:1])  # use makes it young again
    pool.free(old[:1])
    assert pool.allocate(2) == [new[1], new[0]]


def test_blank_blocks_are_taken_before_known_ones():
    pool = BlockPool(4, 4)
    known = fill(pool, list(range(8)))
    pool.free(known)
    pool.allocate(2)
    assert pool.lookup(chain(list(range(8)))) == known


def test_second_copy_of_a_block_stays_unknown():
    pool = BlockPool(4, 4)
    first, second = fill(pool, list(range(4))), fill(pool, list(range(4)))
    assert pool.lookup(chain(list(range(4)))) == first
    pool.free(second)
    pool.check()
    pool.free(first)
    assert pool.lookup(chain(list(range(4)))) == first


def test_too_many_blocks_is_an_error_that_changes_nothing():
    pool = BlockPool(4, 4)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(5)
    assert pool.num_free == 4


def test_forget_keeps_tables():
    pool = BlockPool(4, 4)
    used, idle = fill(pool, list(range(4))), fill(pool, list(range(50, 54)))
    pool.free(idle)
    pool.forget()
    pool.check()
    assert pool.lookup(chain(list(range(4)))) == []
    assert pool.num_used == 1
    pool.free(used)
    assert pool.num_free == 4


class PoolMachine(RuleBasedStateMachine):
    """Tables come, grow and go in any order; the model is a list of tables and what each block should hold."""

    @initialize(num_blocks=st.integers(1, 12), size=st.integers(1, 3), caching=st.booleans())
    def start(self, num_blocks: int, size: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, size, enable_prefix_caching=caching)
        self.tables: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16), known=st.booleans())
    def add(self, tokens: list[int], known: bool) -> None:
        pool, size = self.pool, self.pool.block_size
        hashes = chain(tokens, size)
        found = pool.lookup(hashes)
        for index, block in enumerate(found):
            assert self.content[block] == tuple(tokens[: (index + 1) * size]), "a found block holds this prefix"
        missing = pool.blocks_for(len(tokens)) - len(found)
        if missing + pool.num_idle(found) > pool.num_free:
            return
        pool.share(found)
        table = found + pool.allocate(missing)
        held = [block for other, _ in self.tables for block in other]
        assert not set(table[len(found) :]) & set(held), "a new block is nobody else's"
        for index in range(len(found), len(table)):
            self.content[table[index]] = tuple(tokens[: (index + 1) * size])
            if known and index < len(hashes):
                pool.register(table[index], hashes[index])
        self.tables.append((table, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len({block for table, _ in self.tables for block in table})

    def teardown(self) -> None:
        for table, _ in getattr(self, "tables", []):
            self.pool.free(table)
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_free == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
