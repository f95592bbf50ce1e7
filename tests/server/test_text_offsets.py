"""Where a completion's tokens begin in its text, also where characters take several tokens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from drumline.server.logprobs import Spelling, TextOffsets


@given(st.text(st.characters(codec="utf-8"), max_size=20), st.data())
def test_offsets(text: str, data: st.DataObject) -> None:
    """Tokens are any pieces of the text's bytes; each begins where the whole characters before it end."""
    whole = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole))))) if whole else []
    edges = [0, *cuts, len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(edges)]
    offsets = TextOffsets(Spelling(pieces.__getitem__))
    for number, start in enumerate(edges[:-1]):
        complete = whole[:start].decode(errors="ignore")
        assert offsets.next(number) == len(complete)
        assert text.startswith(complete)


def test_an_emoji_of_four_tokens() -> None:
    pieces = [b"a", b"\xf0", b"\x9f", b"\x98", b"\x80", b" and", b" b"]
    offsets = TextOffsets(Spelling(pieces.__getitem__))
    assert [offsets.next(token) for token in range(7)] == [0, 1, 1, 1, 1, 2, 6]
