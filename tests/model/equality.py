"""When tokens count as equal to those of transformers (promise 6 of the design).

Only a *difference* is examined: it is excused if the reference's logits of its own choice and of ours are closer than
1e-4 of the standard deviation of its logits over the vocabulary (two summation orders cannot agree there), and the
comparison of that sequence ends there. For sampled tokens the same holds of the perturbed logits, and where the
cumulative probability is within 1e-5 of top-p. Excused sequences are counted: at most 1 % (one, of fewer than 100).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from drumline.plan.sampling import SlotSampling
from tests.model import rule
from tests.model.driver import Running

TIE = 1e-4
"""Of the standard deviation of the logits over the vocabulary."""


@dataclass(frozen=True)
class Comparison:
    """Outcome for one sequence."""

    outcome: str
    """``equal``, ``excused`` or ``different``."""
    position: int = -1
    """Output index of the first difference."""
    detail: str = ""


@dataclass
class Tally:
    """Counts of outcomes over many sequences."""

    counts: dict[str, int] = field(default_factory=lambda: {"equal": 0, "excused": 0, "different": 0})
    details: list[str] = field(default_factory=list)

    def add(self, comparison: Comparison, label: object = "") -> None:
        self.counts[comparison.outcome] += 1
        if comparison.outcome != "equal":
            self.details.append(f"{label}: {comparison}")

    def check(self) -> None:
        """AssertionError if a sequence differs, or more are excused than may be."""
        total = sum(self.counts.values())
        assert total > 0, "nothing was compared"
        assert not self.counts["different"], "\n".join(self.details)
        assert self.counts["excused"] <= max(1, total // 100), "\n".join(self.details)


@torch.inference_mode()
def reference_logits(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """[len(output), vocabulary] float64 logits of the reference before each output token, given those before it."""
    ids = torch.tensor([[*prompt, *output]])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].double()


def compare_greedy(
    model: Any, prompt: Sequence[int], got: Sequence[int], sampling: SlotSampling | None = None
) -> Comparison:
    """Compare greedy output tokens with a transformers model (float32, any attention implementation).

    One forward over prompt and output: as long as tokens are equal, the reference's own greedy run sees the same.
    """
    return compare_sampled(model, prompt, got, sampling or SlotSampling())


def compare_sampled(
    model: Any, prompt: Sequence[int], got: Sequence[int], sampling: SlotSampling, first_index: int = 0
) -> Comparison:
    """Compare output tokens with a transformers model and the sampling rule written out in numpy (``rule.py``)."""
    for position, row in enumerate(reference_logits(model, prompt, got)):
        adjusted = rule.adjusted(row.numpy(), prompt, got[:position], sampling)
        scores, on_edge = rule.perturbed(adjusted, sampling, first_index + position)
        best, token = int(scores.argmax()), got[position]
        if best != token:
            gap, limit = (
                float(scores[best] - scores[token]),
                TIE * float(row.numpy().std() / (sampling.temperature or 1)),
            )
            outcome = "excused" if on_edge or gap < limit else "different"
            return Comparison(outcome, position, f"got {token}, not {best}; gap {gap:.3g}, limit {limit:.3g}")
    return Comparison("equal")


def check_prompt_logprobs(model: Any, request: Running) -> None:
    """Those that came, some of them several times after preemptions, are those of a transformers model."""
    top = request.sampling.prompt_logprobs
    assert {position for position, _ in request.prompt_logprobs} == set(
        range(1, len(request.prompt) if top >= 0 else 1)
    )
    expected = reference_logits(model, request.prompt[:1], request.prompt[1:]).log_softmax(dim=1)
    for position, entry in request.prompt_logprobs:
        row = expected[position - 1]
        value = float(row[request.prompt[position]])
        assert abs(entry.logprob - value) < 1e-4, (position, entry, value)
        assert int((row > value + 1e-5).sum()) < entry.rank <= int((row >= value - 1e-5).sum())
        best = row.topk(top)
        assert len(entry.top_ids) == top
        assert all(
            abs(float(row[token]) - float(want)) < 1e-4 for token, want in zip(entry.top_ids, best.values, strict=True)
        )
        assert all(abs(got - float(want)) < 1e-4 for got, want in zip(entry.top_logprobs, best.values, strict=True))
