"""What a run's requests say together. Pure.

Definitions, all in seconds here:

* time to first token: from sending (connecting included) to the first event with a token;
* inter-token latency, by event: from one event with tokens to the next; by token: the same, where an event with k
  tokens counts as k gaps of a k-th (it needs the number of tokens of each event);
* time per output token, one figure a request: from the first event with a token to the last, over tokens - 1;
* end to end: from sending to the end of the answer.

Requests that failed are counted and left out of everything else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(slots=True)
class Outcome:
    """One request and what became of it. Times are of one clock, in seconds."""

    index: int
    due: float
    """When it should have been sent."""
    sent: float
    ended: float
    asked_tokens: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    times: list[float] = field(default_factory=list)
    """Of the events with tokens."""
    counts: list[int] | None = None
    """Tokens of each of these events, as far as the server tells."""
    counted: str = ""
    """Who counted the output tokens: usage, ids, stream, events."""
    finish_reason: str = ""
    text: str = ""
    error: str = ""
    """Kind of the error; empty: it went well."""
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether it went well."""
        return not self.error


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution. Seconds."""

    count: int
    mean: float
    std: float
    low: float
    high: float
    at: dict[float, float]
    """Percentile: value."""

    @classmethod
    def of(cls, values: Iterable[float], percentiles: Sequence[float] = PERCENTILES) -> Spread | None:
        """None if there are no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        mean = math.fsum(ordered) / len(ordered)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
        found = {p: percentile(ordered, p) for p in percentiles}
        return cls(len(ordered), mean, std, ordered[0], ordered[-1], found)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """With linear interpolation, as numpy's default. ``ordered`` is sorted and not empty."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


METRICS = {
    "ttft": "time to first token",
    "itl": "inter-token, by event",
    "itl_token": "inter-token, by token",
    "tpot": "time per output token",
    "e2el": "end to end",
    "late": "sent late",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures."""

    duration: float
    """Seconds from the first request sent to the last answer's end."""
    completed: int
    failed: int
    unfinished: int
    """Not ended when the run was interrupted."""
    input_tokens: int
    output_tokens: int
    events: int
    """Events with tokens."""
    counted: list[str]
    """Who counted the output tokens."""
    peak_concurrency: int
    spreads: dict[str, Spread]
    """Of METRICS, those that there are."""
    errors: dict[str, int]
    """Kind: number, most frequent first."""
    examples: dict[str, str]
    """Kind: the first message."""

    @property
    def request_throughput(self) -> float:
        """Requests a second."""
        return self._rate(self.completed)

    @property
    def output_throughput(self) -> float:
        """Output tokens a second."""
        return self._rate(self.output_tokens)

    @property
    def total_throughput(self) -> float:
        """Prompt and output tokens a second."""
        return self._rate(self.input_tokens + self.output_tokens)

    def _rate(self, amount: float) -> float:
        return amount / self.duration if self.duration > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Flat, with the names of vLLM's result files; latencies in milliseconds."""
        found: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "token_events": self.events,
            "output_tokens_counted_by": self.counted,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_throughput,
            "max_concurrent_requests": self.peak_concurrency,
        }
        for name, spread in self.spreads.items():
            for key, value in (("mean", spread.mean), ("std", spread.std), ("min", spread.low), ("max", spread.high)):
                found[f"{key}_{name}_ms"] = value * 1e3
            for percent, value in spread.at.items():
                key = "median" if percent == 50 else f"p{percent:g}"
                found[f"{key}_{name}_ms"] = value * 1e3
        found["errors"] = self.errors
        found["error_examples"] = self.examples
        return found


def summarise(outcomes: Sequence[Outcome], unfinished: int = 0, percentiles: Sequence[float] = PERCENTILES) -> Summary:
    """The figures of a run."""
    good = [outcome for outcome in outcomes if outcome.ok]
    kinds = Counter(outcome.error for outcome in outcomes if not outcome.ok)
    examples: dict[str, str] = {}
    for outcome in outcomes:
        if not outcome.ok:
            examples.setdefault(outcome.error, outcome.message)
    values = {name: list(read(good)) for name, read in _READ.items()}
    values["late"] = [max(0.0, outcome.sent - outcome.due) for outcome in outcomes]
    spreads = {name: spread for name, found in values.items() if (spread := Spread.of(found, percentiles)) is not None}
    return Summary(
        duration=max(o.ended for o in outcomes) - min(o.sent for o in outcomes) if outcomes else 0.0,
        completed=len(good),
        failed=len(outcomes) - len(good),
        unfinished=unfinished,
        input_tokens=sum(outcome.prompt_tokens for outcome in good),
        output_tokens=sum(outcome.output_tokens for outcome in good),
        events=sum(len(outcome.times) for outcome in good),
        counted=sorted({outcome.counted for outcome in good if outcome.counted}),
        peak_concurrency=peak(outcomes),
        spreads=spreads,
        errors=dict(kinds.most_common()),
        examples=examples,
    )


def peak(outcomes: Sequence[Outcome]) -> int:
    """Most requests that were under way at one time."""
    changes = sorted(change for o in outcomes for change in ((o.sent, 1), (o.ended, -1)))
    now = most = 0
    for _, change in changes:  # at the same time, those that end come first
        now += change
        most = max(most, now)
    return most


def _ttft(good: Sequence[Outcome]) -> Iterable[float]:
    return (o.times[0] - o.sent for o in good if o.times)


def _itl(good: Sequence[Outcome]) -> Iterable[float]:
    return (after - before for o in good for before, after in zip(o.times, o.times[1:], strict=False))


def _itl_token(good: Sequence[Outcome]) -> Iterable[float]:
    if any(o.counts is None for o in good):
        return
    for o in good:
        assert o.counts is not None
        for before, after, tokens in zip(o.times, o.times[1:], o.counts[1:], strict=False):
            yield from [(after - before) / tokens] * tokens


def _tpot(good: Sequence[Outcome]) -> Iterable[float]:
    return (
        (o.times[-1] - o.times[0]) / (o.output_tokens - 1) for o in good if len(o.times) > 1 and o.output_tokens > 1
    )


def _e2el(good: Sequence[Outcome]) -> Iterable[float]:
    return (o.ended - o.sent for o in good)


_READ = {"ttft": _ttft, "itl": _itl, "itl_token": _itl_token, "tpot": _tpot, "e2el": _e2el}
