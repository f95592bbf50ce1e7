"""How much of a device's memory is left for the KV cache: what is measured, and the decision, which is pure.

Order of a start, so that all that costs memory for good is there before it is counted::

    device opened  ->  groups  ->  cuBLAS and communicators used once  ->  snapshot  ->  weights
                   ->  the largest step, with the peak of torch's allocator  ->  snapshot  ->  KV pool

``--gpu-memory-utilization`` is the share of the device that this engine may use, whoever else is there. So its own use
is what is taken off that share:

- what torch's allocator had at the peak of the largest step: weights, activations, logits;
- what lies beside the allocator: context, kernels, communicators. The driver says what this process has in all, if it
  does (not in every container); then the rest is exact, and neighbours that come and go change nothing. If it does not,
  it is what became used on the device from before it was opened until the snapshot, and from there until the end, less
  what the allocator took. A neighbour that allocates just then looks the same, so both are bounded by what such things
  take at most.

And never more than is free: what neighbours have is not to be had.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from drumline.parallel.groups import Groups

GIB = 1 << 30
FIXED_MOST = 4 * GIB
"""Context, cuBLAS and the communicators of all groups, before there are weights."""
GROWTH_MOST = GIB // 2
"""What comes after that beside torch's allocator: kernels loaded at their first use."""
FIXED_GUESS = GIB
"""Where nothing can be measured."""


class Use(NamedTuple):
    """Memory of a device at one moment, in bytes."""

    free: int
    """Nobody has it."""
    total: int
    reserved: int
    """This process has it through torch's allocator."""
    own: int | None = None
    """This process has it in all, as the driver says; None: it does not say."""


class Room(NamedTuple):
    """The decision, and what it is made of, in bytes."""

    kv: int
    """For the KV pool."""
    share: int
    """What this engine may use of the device."""
    peak: int
    """Of torch's allocator."""
    fixed: int
    """Beside torch's allocator."""
    others: int
    """What other processes use."""

    def __str__(self) -> str:
        used = f"{_gib(self.peak)} weights and the largest step, {_gib(self.fixed)} context and communicators"
        short = self.share - self.peak - self.fixed - self.kv if self.kv else 0
        less = f"; {_gib(short)} less than its share, which others use" if short else ""
        return f"{_gib(self.kv)} of {_gib(self.share)} for the KV cache ({used}; others {_gib(self.others)}{less})"


def kv_room(opened: int, warm: Use, after: Use, peak: int, utilization: float) -> Room:
    """Bytes for the KV pool; see the module's text.

    Args:
        opened: free bytes before this process opened the device; 0: unknown.
        warm: before the weights.
        after: after the largest step, with torch's cache given back.
        peak: bytes of torch's allocator at most, in that step.
        utilization: share of the device that this engine may use, above 0, at most 1.

    """
    share, fixed = int(after.total * utilization), _beside(opened, warm, after)
    left = after.free - (peak - after.reserved)  # what is free while the step runs
    others = max(after.total - after.free - after.reserved - fixed, 0)
    return Room(max(min(share - fixed - peak, left), 0), share, peak, fixed, others)


def _beside(opened: int, warm: Use, after: Use) -> int:
    """What this process uses beside torch's allocator."""
    if after.own is not None:
        return max(after.own - after.reserved, 0)
    fixed = opened - warm.free - warm.reserved if opened else FIXED_GUESS
    growth = (warm.free - after.free) - (after.reserved - warm.reserved)
    return min(max(fixed, 0), FIXED_MOST) + min(max(growth, 0), GROWTH_MOST)


def warm_up(device: torch.device, groups: Groups, dtype: torch.dtype) -> None:
    """Have the device's libraries and all communicators take the memory that they keep. All ranks call it.

    On CPUs there is nothing to warm: groups have their memory, and products take none.
    """
    if device.type == "cpu":
        return
    square = torch.ones(16, 16, dtype=dtype, device=device)
    torch.mm(square, square)
    for group in (groups.tp, groups.pcp, groups.dcp, groups.pp):
        if group.size > 1:
            group.all_reduce(square)
    for group in groups.for_experts:
        if group.size > 1:
            each, row = [1] * group.size, square[:1].repeat(group.size, 1)
            group.all_to_all(row, each, each)
    pipeline = groups.pp
    if not pipeline.is_first:  # messages between two have a communicator of their own
        pipeline.recv(square)
    if not pipeline.is_last:
        pipeline.send(square)
    torch.get_device_module(device).synchronize(device)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
