"""Who keeps which position, and who computes which token, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import ConfigError
from drumline.parallel.context import LEAST_CHUNK, check_same_heads, chunks, held, is_shared_out, segments
from drumline.parallel.layout import GroupKind, Layout
from drumline.parallel.shards import attention_shards

counts = st.lists(st.integers(1, 120), min_size=1, max_size=6)
places = st.integers(1, 7)


@given(length=st.integers(0, 500), size=st.integers(1, 9))
def test_positions_are_dealt_out(length: int, size: int) -> None:
    """Each position is at one place; places differ by one; a place's own are numbered without gaps."""
    for place in range(size):
        mine = [position for position in range(length) if position % size == place]
        assert held(length, place, size) == len(mine)
        assert [position // size for position in mine] == list(range(len(mine)))
    assert sum(held(length, place, size) for place in range(size)) == length


@given(length=st.integers(1, 300), size=st.integers(1, 6), block=st.integers(1, 17))
def test_all_ranks_find_a_position_in_the_same_block_of_the_table(length: int, size: int, block: int) -> None:
    """The block of a position's number at its place is that of the position among blocks of size x block tokens."""
    for position in range(length):
        assert position // size // block == position // (size * block)
    assert all(held(length, place, size) <= -(-length // (size * block)) * block for place in range(size))


@given(count=st.integers(1, 400), size=places, before=st.integers(0, 1000))
def test_chunks_are_balanced(count: int, size: int, before: int) -> None:
    """Everything is computed once; tokens differ by one, and what they see by little, between any two places."""
    shares = [[token for part in chunks(count, place, size) for token in range(*part)] for place in range(size)]
    if not is_shared_out(np.array([count]), size)[0]:
        assert all(share == list(range(count)) for share in shares)
        assert size == 1 or count < 2 * size * LEAST_CHUNK
        return
    assert sorted(token for share in shares for token in share) == list(range(count))
    assert count - 1 in shares[0]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    seen = [sum(before + token + 1 for token in share) for share in shares]
    assert max(seen) - min(seen) <= before + 2 * count


@given(counts=counts, size=places)
def test_segments_cover_a_step(counts: list[int], size: int) -> None:
    """Of rows that are shared out each token has one place, of others all; places are those of the packed step."""
    number = np.array(counts, dtype=np.int32)
    starts = np.cumsum(number) - number
    shared_out = is_shared_out(number, size)
    row_of = np.repeat(np.arange(len(counts)), number)
    times = np.zeros(len(row_of), dtype=int)
    for place in range(size):
        mine = segments(number, place, size)
        tokens = mine.places(starts)
        assert (np.diff(tokens) > 0).all()
        assert (row_of[tokens] == np.repeat(mine.rows, mine.lengths)).all()
        times[tokens] += 1
        both = [mine.of(shared_out).places(starts), mine.of(~shared_out).places(starts)]
        assert sorted(np.concatenate(both)) == tokens.tolist()
    assert (times == np.where(shared_out[row_of], 1, size)).all()


@given(tp=st.integers(1, 8), pcp=st.integers(1, 4), kv=st.integers(1, 4), data=st.data())
def test_only_ranks_with_the_same_kv_heads_share_out(tp: int, pcp: int, kv: int, data: st.DataObject) -> None:
    dcp = data.draw(st.sampled_from([n for n in range(1, tp * pcp + 1) if tp * pcp % n == 0]))
    layout, heads = Layout(tp=tp, pcp=pcp, dcp=dcp), attention_shards(kv * 8, kv, tp)
    alike = all(
        len({heads[layout.coordinates(rank).tp].kv for rank in group}) == 1 for group in layout.groups[GroupKind.DCP]
    )
    if alike:
        check_same_heads(layout, heads)
        return
    with pytest.raises(ConfigError, match="different KV heads") as caught:
        check_same_heads(layout, heads)
    named = str(caught.value).partition("work here: ")[2].partition(";")[0]
    for size in map(int, named.split(", ")):  # what is proposed works
        check_same_heads(Layout(tp=tp, pcp=pcp, dcp=size), heads)


def test_refusal_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"Sizes that work here: 1, 2; larger ones need more tensor parallel ranks"):
        check_same_heads(Layout(tp=4, dcp=4), attention_shards(8, 2, 4))
    check_same_heads(Layout(tp=4, dcp=2), attention_shards(8, 2, 4))
    check_same_heads(Layout(tp=2, pcp=2, dcp=2), attention_shards(8, 2, 2))
