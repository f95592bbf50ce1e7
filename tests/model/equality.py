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

import numpy as np
import torch

from drumline.plan.sampling import SlotSampling

TIE = 1e-4
"""Of the standard deviation of the logits over the vocabulary."""
TOP_P_MARGIN = 1e-5


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


def compare_greedy(model: Any, prompt: Sequence[int], got: Sequence[int]) -> Comparison:
    """Compare greedy output tokens with a transformers model (float32, any attention implementation).

    One forward over prompt and output: as long as tokens are equal, the reference's own greedy run sees the same.
    """
    for position, logits in enumerate(reference_logits(model, prompt, got)):
        best = int(logits.argmax())
        if best != got[position]:
            gap, limit = float(logits[best] - logits[got[position]]), TIE * float(logits.std())
            outcome = "excused" if gap < limit else "different"
            return Comparison(outcome, position, f"got {got[position]}, not {best}; gap {gap:.3g}, limit {limit:.3g}")
    return Comparison("equal")


def compare_sampled(
    model: Any, prompt: Sequence[int], got: Sequence[int], sampling: SlotSampling, first_index: int = 0
) -> Comparison:
    """Compare sampled output tokens with a transformers model and the sampling rule written out in numpy."""
    for position, row in enumerate(reference_logits(model, prompt, got)):
        logits = row.numpy()
        scaled = logits / sampling.temperature
        keep, on_edge = reference_kept(scaled, sampling.top_k, sampling.top_p)
        noisy = scaled + reference_noise(sampling.seed, first_index + position, len(scaled))
        best = int(np.where(keep, noisy, -np.inf).argmax())
        token = got[position]
        if best != token:
            gap, limit = float(noisy[best] - noisy[token]), TIE * float(scaled.std())
            excused = on_edge or (keep[token] and gap < limit)
            return Comparison(
                "excused" if excused else "different", position, f"got {token}, not {best}; gap {gap:.3g}"
            )
    return Comparison("equal")


def reference_noise(seed: int, index: int, vocab_size: int) -> np.ndarray:
    """Gumbel noise of (seed, output index, id), written with unsigned 64-bit numbers."""

    def splitmix(x: np.ndarray) -> np.ndarray:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):
        key = splitmix(splitmix(np.array([seed % 2**64], dtype=np.uint64)) ^ np.uint64(index))
        bits = splitmix(key ^ np.arange(vocab_size, dtype=np.uint64))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def reference_kept(scaled: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, bool]:
    """Which tokens stay, and whether top-p's edge is too close to call."""
    keep = np.ones(len(scaled), dtype=bool)
    if top_k > 0:
        keep = scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    if top_p >= 1:
        return keep, False
    weights = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
    probabilities = weights / weights.sum()
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    stays = before < top_p
    keep[order[~stays]] = False
    return keep, bool((np.abs(before - top_p) < TOP_P_MARGIN).any())
