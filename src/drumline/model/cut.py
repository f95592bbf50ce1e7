"""Min-p, top-k and top-p: how many of a row's largest logits stay.

Arrays are numpy's on a CPU and torch's elsewhere: what is written here with what both have in common is the same for
both, and on a few numbers numpy takes a quarter of torch's time a call.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from drumline.model.noise import row_blocks

Array = Any
"""numpy array or tensor."""


class Asked(Protocol):
    """What rows ask for; arrays of [rows]."""

    @property
    def temperature(self) -> npt.NDArray[np.float64]:
        """Over 0."""

    @property
    def top_p(self) -> npt.NDArray[np.float64]:
        """1: all."""

    @property
    def top_k(self) -> npt.NDArray[np.int32]:
        """0: all."""

    @property
    def min_p(self) -> npt.NDArray[np.float64]:
        """0: all."""


def library(array: Array) -> Any:
    """numpy or torch."""
    return np if isinstance(array, np.ndarray) else torch


def like(values: npt.NDArray[Any], array: Array) -> Array:
    """``values`` as ``array`` is one, on its device."""
    return values if isinstance(array, np.ndarray) else torch.from_numpy(values).to(array.device)


def sums_of_weights(logits: torch.Tensor, largest: Array, rows: Asked) -> Array:
    """[rows, 1] float64 sums of exp((logit - largest) / temperature) of this slice; nan if no row needs any.

    Only top-p alone does: what min-p or top-k leave is among the largest.
    """
    needed = (rows.top_p < 1) & (rows.top_k == 0) & (rows.min_p == 0)
    if not needed.any():
        return largest * float("nan")
    xp = library(largest)
    shift = xp.where(xp.isfinite(largest), largest, 0.0)
    if xp is torch:
        scaled = (logits - shift.float()) / like(rows.temperature, largest).float()[:, None]
        return scaled.exp().sum(dim=1, keepdim=True, dtype=torch.float64)
    table, shift = logits.numpy(), shift.astype(np.float32)
    inverse = (1 / rows.temperature).astype(np.float32)[:, None]
    sums = np.zeros((len(table), 1))
    for part in row_blocks(*table.shape):
        if needed[part].any():
            weights = table[part] - shift[part]
            weights *= inverse[part]
            torch.from_numpy(weights).exp_()  # half of numpy's time
            sums[part] = weights.sum(axis=1, keepdims=True)
    return sums


def kept_prefix(values: Array, rows: Asked, *, total: Array | None, complete: bool) -> tuple[Array, Array]:
    """How many of each row's largest logits stay, and whether that is undecided.

    ``values`` [rows, n] float64, largest first: all logits if ``complete``, else the n largest. ``total`` [rows]: the
    sum of exp((logit - largest) / temperature) over all logits, for rows with top-p alone; None: over ``values``.
    """
    xp, width = library(values), values.shape[1]
    every = xp.arange(len(values)) if xp is np else torch.arange(len(values), device=values.device)
    temperature, top_p, top_k, min_p = (
        like(column, values)[:, None] for column in (rows.temperature, rows.top_p, rows.top_k, rows.min_p)
    )
    largest = values[:, :1]
    finite = xp.isfinite(largest)
    weights = xp.exp((values - xp.where(finite, largest, 0.0)) / temperature)
    keep = weights >= min_p
    if rows.top_k.any():
        smallest = values[every, like((rows.top_k - 1).clip(0, width - 1).astype(np.int64), values)][:, None]
        keep &= (values >= smallest) | (top_k == 0)
    alone = ((top_k == 0) & (min_p == 0))[:, 0]
    # Whoever is as likely as the last one, but not among the values, would stay too.
    undecided = (keep[:, -1] | ~finite[:, 0]) & ~alone
    if rows.top_p.min() < 1:
        sums = (weights * keep).sum(1)
        if total is not None:
            sums = xp.where(alone, total, sums)
        before = weights.cumsum(1) - weights
        keep &= (before < top_p * sums[:, None]) | (top_p >= 1)
    count = keep.sum(1).clip(1)
    # Equals of the last one that stays may have lower ids and not be among the values.
    undecided |= alone & (values[every, count - 1] <= values[:, -1])
    return count, undecided & (not complete)


def kept_tokens(logits: torch.Tensor, rows: Asked) -> torch.Tensor:
    """[rows, vocabulary] True where a token stays, for rows with temperature > 0; ``logits`` are of all tokens."""
    ordered: Array
    if logits.device.type == "cpu":
        ordered = np.sort(logits.numpy(), axis=1)[:, ::-1].astype(np.float64)
        with np.errstate(invalid="ignore", under="ignore"):
            count = torch.from_numpy(kept_prefix(ordered, rows, total=None, complete=True)[0])
        ordered = torch.from_numpy(ordered)
    else:
        ordered = logits.sort(dim=1, descending=True).values.double()
        count, _ = kept_prefix(ordered, rows, total=None, complete=True)
    last = ordered.gather(1, count[:, None] - 1).to(logits.dtype)
    above, equal = logits > last, logits == last
    # Of the tokens that are exactly as likely as the last one, those with the lowest ids stay.
    stays: torch.Tensor = above | (equal & (equal.cumsum(dim=1) <= (count - above.sum(dim=1))[:, None]))
    return stays
