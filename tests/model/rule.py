"""The rule of sampling, written out for one row in plain numpy: slow, and as the memos say it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drumline.plan.sampling import SlotSampling

TOP_P_MARGIN = 1e-5


def adjusted(logits: np.ndarray, prompt: Sequence[int], output: Sequence[int], sampling: SlotSampling) -> np.ndarray:
    """[vocabulary] float64 logits after bans, biases and penalties, for the token behind ``prompt`` and ``output``."""
    logits = logits.astype(np.float64).copy()
    if sampling.allowed_ids:
        banned = np.ones(len(logits), dtype=bool)
        banned[list(sampling.allowed_ids)] = False
        logits[banned] = -np.inf
    for word in sampling.bad_words:
        *before, last = word
        if len(before) <= len(output) and list(output)[len(output) - len(before) :] == before:
            logits[last] = -np.inf
    if len(output) < sampling.min_tokens:
        logits[list(sampling.end_ids)] = -np.inf
    for token, value in zip(sampling.bias_ids, sampling.bias_values, strict=True):
        logits[token] += np.float32(value)
    for token in {*prompt, *output}:
        penalty = np.float32(sampling.repetition_penalty).astype(np.float64)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in output:
        logits[token] -= sampling.frequency_penalty
    for token in set(output):
        logits[token] -= sampling.presence_penalty
    return logits


def noise(seed: int, index: int, vocab_size: int) -> np.ndarray:
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


def kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float = 0.0) -> tuple[np.ndarray, bool]:
    """Which tokens stay, and whether an edge is too close to call."""
    shift = scaled.max() if np.isfinite(scaled.max()) else 0.0
    weights = np.exp(scaled - shift)
    keep = weights >= min_p
    on_edge = bool(min_p and (np.abs(weights - min_p) < TOP_P_MARGIN * min_p).any())
    if top_k > 0:
        keep &= scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    if top_p >= 1:
        return keep, on_edge
    weights = np.where(keep, weights, 0.0)
    if not weights.sum():
        return np.arange(len(scaled)) == 0, False
    probabilities = weights / weights.sum()
    order = np.argsort(np.where(keep, -scaled, np.inf), kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    stays = before < top_p
    stays[0] = True
    keep[order[~stays]] = False
    return keep, on_edge or bool((np.abs(before - top_p) < TOP_P_MARGIN).any())


def perturbed(adjusted_logits: np.ndarray, sampling: SlotSampling, index: int) -> tuple[np.ndarray, bool]:
    """[vocabulary] what the token is the largest of, and whether an edge is too close to call."""
    if sampling.temperature == 0:
        return adjusted_logits, False
    scaled = adjusted_logits / sampling.temperature
    keep, on_edge = kept(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    return np.where(keep, scaled + noise(sampling.seed, index, len(scaled)), -np.inf), on_edge
