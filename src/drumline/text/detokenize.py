"""Tokens to text, as they come: what is said once is never taken back.

Two things make text wait. A token may end within a character (emoji and CJK in byte-level vocabularies, byte fallback
in others): ``tokenizers``' DecodeStream keeps it until the character is whole. And text that may be the beginning of
a stop string waits until it is clear whether it is one; only the longest end of the text that begins a stop string is
held back, never more. Stop strings are found by one small automaton each (Knuth, Morris and Pratt), which reads every
character once, across the borders of tokens; the state of the automaton is the length that has to wait.

The stream starts from the last tokens of the prompt, because what a token stands for may depend on what is before it:
sentencepiece vocabularies drop the space in front of the first word. So the text is what the whole decodes to after
the prompt.

Rejected: looking for stop strings in the whole text at each token (quadratic), and holding back as many characters as
the longest stop string has, as others do (a stream that lags behind for nothing).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from drumline.plan.sampling import SamplingParams
from drumline.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING = 32
"""Tokens that may wait for a character to become whole; more are no text, and are given out as they are."""
_TAILS = (6, 12, 24, 48)


class Detokenizer:
    """The text of one output.

    ``push`` gives the text that new tokens make certain, and the stop string that was found, after which the output
    is over (before ``min_tokens`` tokens none is). A token that ends the output by itself (end of sequence,
    ``stop_token_ids``) adds no text unless ``include_stop_str_in_output``. ``tokenizer=None`` or
    ``params.detokenize=False``: no text at all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        """``eos_token_ids``: those that the engine ends the output with (the model may have others than the tokenizer's
        folder knows of); None: the tokenizer's."""
        self.consumed = 0
        """How many of the tokens of the last ``push`` belong to the output; less than all after a stop string."""
        self._stream = None
        if tokenizer is not None and params.detokenize:
            self._stream = _Stream(tokenizer, prompt_ids, params.skip_special_tokens)
        self._include_stop = params.include_stop_str_in_output
        self._silent: frozenset[int] = frozenset()
        if tokenizer is not None and not self._include_stop:
            eos = tokenizer.eos_token_ids if eos_token_ids is None else eos_token_ids
            eos = () if params.ignore_eos else eos
            self._silent = frozenset([*eos, *(params.stop_token_ids or ())])
        self._deaf = params.min_tokens if params.stop_strings else 0
        """How many of the next tokens' characters cannot complete a stop string."""
        self._stops = [StopMatcher(text) for text in params.stop_strings]
        self._beginnings = frozenset(stop.text[0] for stop in self._stops)
        self._matched = 0
        """Length of the longest end of the text that begins a stop string."""
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None]:
        """Text that is certain now, and the stop string that ends the output (None: it goes on)."""
        self.consumed = len(token_ids)
        if self._stream is None:
            return "", None
        said = []
        for place, token in enumerate(token_ids):
            new = self._stream.flush() if token in self._silent else self._stream.step(token)
            deaf, self._deaf = self._deaf > 0, max(self._deaf - 1, 0)
            if not new:
                continue
            text, stop = self._scan(new, deaf=deaf)
            said.append(text)
            if stop is not None:
                self.consumed = place + 1
                self._stream = None
                return "".join(said), stop
        return "".join(said), None

    def finish(self) -> str:
        """Text that was held back, once it is known that no token will follow."""
        if self._stream is None:
            return ""
        text, stop = self._scan(self._stream.flush(), deaf=self._deaf > 0)
        self._stream = None
        if stop is None:
            text, self._held = text + self._held, ""
        return text

    def _scan(self, new: str, *, deaf: bool = False) -> tuple[str, str | None]:
        """``new`` text behind what is held: what of it is certain, and the stop string in it (``deaf``: none is found,
        but one may begin in it)."""
        if not self._matched and self._beginnings.isdisjoint(new):
            return new, None
        text = self._held + new
        begin = len(self._held)
        for place, char in enumerate(new):
            # Not a generator: all automatons must read the character.
            for found in [stop for stop in self._stops if stop.read(char) and not deaf]:
                end = begin + place + 1
                self._held = ""
                return text[: end if self._include_stop else end - len(found.text)], found.text
        self._matched = max(stop.matched for stop in self._stops)
        keep = 0 if self._include_stop else self._matched
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None


class StopMatcher:
    """Looks for one text in a stream of characters."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """How many characters of ``text`` the stream ends with."""
        self._fallback = _fallbacks(text)

    def read(self, char: str) -> bool:
        """Take one character; whether ``text`` ends with it."""
        matched = self.matched
        while matched and self.text[matched] != char:
            matched = self._fallback[matched - 1]
        if self.text[matched] == char:
            matched += 1
        whole = matched == len(self.text)
        self.matched = self._fallback[matched - 1] if whole else matched
        return whole


def _fallbacks(text: str) -> list[int]:
    """For each beginning of ``text``: length of its longest proper beginning that it also ends with."""
    table = [0] * len(text)
    matched = 0
    for place in range(1, len(text)):
        while matched and text[matched] != text[place]:
            matched = table[matched - 1]
        if text[matched] == text[place]:
            matched += 1
        table[place] = matched
    return table


class _Stream:
    """DecodeStream, which can also give out what it holds."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._pending: list[int] = []
        self._window = self._seed(prompt_ids)
        self._stream = DecodeStream(ids=list(self._window), skip_special_tokens=skip_special_tokens)

    def _seed(self, prompt_ids: Sequence[int]) -> list[int]:
        """The end of the prompt, cut so that it ends with a whole character; empty if there is no such cut."""
        for size in _TAILS:
            tail = list(prompt_ids[-size:])
            if tail and not self._tokenizer.decode(tail, self._skip).endswith(_REPLACEMENT):
                return tail
            if size >= len(prompt_ids):
                break
        return []

    def step(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer.backend, token)
        except Exception:  # noqa: BLE001
            # The library's plain Exception: with this token the text before it decodes otherwise (bytes that turn
            # out to be no character). What was said stays said; go on behind it.
            return self._restart()
        if text is None:
            return self._restart() if len(self._pending) >= _MAX_PENDING else ""
        self._window, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Text of the tokens that wait, parts of characters as U+FFFD."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._window, self._skip)
        whole = self._tokenizer.decode([*self._window, *self._pending], self._skip)
        text = whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(self._pending, self._skip)
        self._pending = []
        return text

    def _restart(self) -> str:
        last = self._pending[-1:]
        text = self.flush()
        self._window = self._seed(last)
        self._stream = DecodeStream(ids=list(self._window), skip_special_tokens=self._skip)
        return text
