"""Log-probabilities of tokens, from logits that are split over ranks by vocabulary.

Of the model's own distribution: before temperature, penalties and whatever else changes what is sampled. No rank ever
gathers whole rows: each tells the others its slice's sum of exponentials, the asked token's logit and the few most
likely tokens (one small all-gather), then how many of its tokens are above the asked one (another). So every TP size
gives the same tokens in the same order, equals by id, and values that differ in the last bits only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere

from drumline.model.cut import Array
from drumline.model.noise import row_blocks
from drumline.parallel.shards import Range
from drumline.plan.step import TokenLogprobs

Ints = npt.NDArray[np.int32]


class GatherGroup(Protocol):
    """What sampling needs of the tensor-parallel group (``parallel.groups.GroupCoordinator``)."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def rank_in_group(self) -> int:
        """Place of this rank."""

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """All members' tensors along ``dim``; ``sizes`` are their extents where they differ."""


def gathered(group: GatherGroup, tensor: torch.Tensor) -> torch.Tensor:
    """[members, ...] of all members' tensors of one shape."""
    if group.size == 1:
        return tensor[None]
    return group.all_gather(tensor, 0).view(group.size, *tensor.shape)


def token_logprobs(
    logits: torch.Tensor, tokens: Ints, counts: Ints, ranges: Sequence[Range], group: GatherGroup, *, wanted: bool
) -> list[TokenLogprobs]:
    """Log-probabilities of one token for each row, its rank, and the ``counts`` [rows] most likely ones.

    ``logits`` [rows, size of this rank's range] float32, not changed. A collective of the group; the result is empty
    where it is not ``wanted``.
    """
    ids = ranges[group.rank_in_group]
    asked = torch.from_numpy(tokens.astype(np.int64)).to(logits.device)
    mine = (asked >= ids.start) & (asked < ids.stop)
    place = (asked - ids.start).clamp(0, max(ids.size - 1, 0))[:, None]
    value = logits.gather(1, place)[:, 0].double().masked_fill(~mine, float("-inf"))
    most = min(int(counts.max()), max(part.size for part in ranges))
    top_values, top_places = (torch.as_tensor(array) for array in top_tokens(logits, most))
    pieces = [value[:, None], _log_sum(logits)[:, None], top_values, (top_places + ids.start).double()]
    everyone = gathered(group, torch.cat(pieces, dim=1))
    value, total = everyone[:, :, 0].amax(dim=0), everyone[:, :, 1].logsumexp(dim=0)
    above = gathered(group, _above(logits, value)).sum(dim=0)
    if not wanted:
        return []
    tops, names = merge_top(everyone[:, :, 2 : 2 + most], everyone[:, :, 2 + most :], int(counts.max()))
    tops -= total[:, None]
    columns = ((value - total).tolist(), (above + 1).tolist(), names.long().tolist(), tops.tolist(), counts.tolist())
    # The slices cut the padding too: a row may ask for more tokens than there are.
    sizes = torch.isfinite(tops).sum(dim=1).tolist()
    return [
        TokenLogprobs(logprob=logprob, rank=rank, top_ids=found[: min(n, size)], top_logprobs=values[: min(n, size)])
        for logprob, rank, found, values, n, size in zip(*columns, sizes, strict=True)
    ]


def _above(logits: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[rows] how many logits are above each row's value."""
    limit = value.to(logits.dtype)[:, None]
    if logits.device.type != "cpu":
        return (logits > limit).sum(dim=1)
    table, limits = logits.numpy(), limit.numpy()
    counts = np.empty(len(table), dtype=np.int64)
    for part in row_blocks(*table.shape):
        counts[part] = np.count_nonzero(table[part] > limits[part], axis=1)
    return torch.from_numpy(counts)


def _log_sum(logits: torch.Tensor) -> torch.Tensor:
    """Logarithm of the sum of exponentials of each row, [rows] float64. A row is summed the same way in any batch."""
    if logits.device.type != "cpu":
        return logits.logsumexp(dim=1).double()
    table = logits.numpy()
    sums = np.empty(len(table))
    with np.errstate(invalid="ignore", divide="ignore"):
        for part in row_blocks(*table.shape):
            largest = table[part].max(axis=1, initial=-np.inf, keepdims=True)
            shift = np.where(np.isfinite(largest), largest, np.float32(0))
            sums[part] = np.log(np.exp(table[part] - shift).sum(axis=1, dtype=np.float64)) + shift[:, 0]
    return torch.from_numpy(sums)


def top_tokens(logits: torch.Tensor, most: int) -> tuple[Array, Array]:
    """[rows, most] values (float64) and places of the largest logits, largest first, equal ones in the order of places.

    -inf and a place behind the last one where a row has no more. Which of several that equal the last one are among
    them is open. Arrays are as in ``model.cut``: numpy's selection takes half of torch's time.
    """
    width = logits.shape[1]
    count = min(most, width)
    if logits.device.type == "cpu":
        values, places = _largest(logits.numpy(), count)
        if count < most:
            values = np.pad(values, ((0, 0), (0, most - count)), constant_values=-np.inf)
            places = np.pad(places, ((0, 0), (0, most - count)), constant_values=width)
        return values.astype(np.float64), places
    found = logits.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    ordered, order = logits.gather(1, found).sort(dim=1, descending=True, stable=True)
    padding = (0, most - count)
    return F.pad(ordered.double(), padding, value=float("-inf")), F.pad(found.gather(1, order), padding, value=width)


def _largest(table: npt.NDArray[Any], count: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """[rows, count] the largest values and their places, as :func:`top_tokens` has them."""
    rows, width = table.shape
    every = np.arange(rows)[:, None]
    if count in (0, width):
        found = np.repeat(np.arange(count, dtype=np.int64)[None], rows, axis=0)
    else:
        found = np.empty((rows, count), dtype=np.int64)
        for part in row_blocks(rows, width):
            found[part] = np.argpartition(table[part], width - count, axis=1)[:, width - count :]
        found.sort(axis=1)
    values = table[every, found]
    order = (-values).argsort(axis=1, kind="stable")
    return values[every, order], found[every, order]


def merge_top(values: torch.Tensor, names: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest ``most`` of all ranks' [members, rows, n] values, with their names: [rows, most] each.

    Ranks have ascending ids, so a stable sort leaves equals in the order of their ids.
    """
    if len(values) == 1:
        return values[0], names[0]
    rows = values.shape[1]
    flat = values.transpose(0, 1).reshape(rows, -1)
    ordered, order = flat.sort(dim=1, descending=True, stable=True)
    return ordered[:, :most], names.transpose(0, 1).reshape(rows, -1).gather(1, order)[:, :most]
