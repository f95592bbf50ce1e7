"""Which all-reduce a group of GPUs uses: a pure function over a table of where its ranks are. No torch, no devices.

Two ways beside the library's (NCCL), both through torch's symmetric memory, where every rank maps every other's
buffer and kernels read it directly:

* *one-shot*: every rank sums all buffers. One exchange of signals; reads size x bytes.
* *two-shot*: every rank sums its share and writes it to all. Two exchanges; moves 2 x bytes, and one more copy.

They are faster than NCCL where signals and not bytes are what takes time, and they need the ranks' GPUs to reach each
other's memory: :func:`choose` says whether they do, or the first condition that is not met. Which of the three is
taken for a tensor depends on its bytes alone, by a measured table (:data:`MEASURED`, ``bench/gpu_all_reduce.py`` makes
it), so all ranks decide the same without asking each other.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SIZES = (2, 4, 6, 8, 16)
"""Group sizes for which there is a fast all-reduce."""
MULTI_NODE_CAPABILITY = (10, 0)
"""Compute capability from which GPUs of several nodes can be in one NVLink domain."""
TIE = 1.03
"""Methods whose times differ by less than this factor are taken for equally fast: then the simpler one."""


class Method(enum.StrEnum):
    """How one tensor is summed, the simpler ones first."""

    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    NCCL = "nccl"


Times = Mapping[Method, float]
"""Microseconds of each method for one size of tensor."""

MEASURED: Mapping[int, Mapping[int, Times]] = {
    2: {
        size: dict(zip((Method.NCCL, Method.ONE_SHOT, Method.TWO_SHOT), times, strict=True))
        for size, times in {
            8 << 10: (12.0, 6.3, 6.2),
            64 << 10: (12.6, 6.7, 7.2),
            256 << 10: (14.0, 8.1, 7.5),
            1 << 20: (19.2, 13.2, 10.0),
            4 << 20: (36.5, 30.0, 19.9),
            16 << 20: (78.2, 96.7, 58.2),
        }.items()
    }
}
"""By group size, then bytes. Two H200 (NV18), torch 2.11, bfloat16, in a CUDA graph."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is."""

    node: str
    """Something that only ranks of one machine share."""
    device: int
    """Index of its GPU on that machine."""
    capability: tuple[int, int]
    """Compute capability of its GPU."""
    fabric: str = ""
    """Name of its NVLink domain, where that may span machines; empty: none."""
    lacks: str = ""
    """What its torch lacks for symmetric memory; empty: nothing."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where the ranks of one group are."""

    places: Sequence[Place]
    """In group order."""
    peers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By pairs of members on one machine (in group order, lower first): why they cannot use each other's memory. A pair
    that is missing can."""
    multicast: bool = False
    """Whether NVLink multicast is allowed."""
    disabled: bool = False
    """``--disable-custom-all-reduce``."""

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one machine."""
        return len({place.node for place in self.places}) == 1


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a group uses, and why."""

    limits: tuple[tuple[int, Method], ...] = ()
    """Up to so many bytes this method, ascending; larger ones NCCL. Empty: NCCL for all."""
    reason: str
    """A condition that is not met, or what makes the fast ones possible."""
    warns: bool = False
    """Whether it is worth a warning: the user might think it is fast."""

    @property
    def is_fast(self) -> bool:
        """Whether there is anything but NCCL."""
        return bool(self.limits)

    @property
    def capacity(self) -> int:
        """Bytes of the largest tensor that does not go through NCCL."""
        return max((most for most, method in self.limits if method is not Method.NCCL), default=0)

    def method(self, size: int) -> Method:
        """How to sum a tensor of ``size`` bytes."""
        for most, method in self.limits:
            if size <= most:
                return method
        return Method.NCCL

    def text(self) -> str:
        """``one_shot to 64 KiB, two_shot to 16384 KiB, nccl above (...)``."""
        steps = [f"{method} to {most >> 10} KiB" for most, method in self.limits]
        return f"{', '.join([*steps, 'nccl above'] if steps else ['nccl'])} ({self.reason})"


def choose(topology: Topology, measured: Mapping[int, Mapping[int, Times]] = MEASURED) -> Choice:
    """What a group of GPUs uses. The unmet condition is the choice's ``reason`` if it is NCCL alone."""
    size = len(topology.places)
    if size == 1:
        return Choice(reason="one rank")
    if topology.disabled:
        return Choice(reason="--disable-custom-all-reduce")
    if reason := unmet(topology):
        return Choice(reason=reason, warns=True)
    where = "all pairs reach each other's memory" if topology.one_node else "one multi-node NVLink domain"
    return Choice(limits=limits(size, measured), reason=f"{size} GPUs, {where}")


def unmet(topology: Topology) -> str:
    """The first condition of the fast all-reduce that is not met; empty if all are."""
    places, size = topology.places, len(topology.places)
    if size not in SIZES:
        return f"it is for groups of {', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]} ranks, not {size}"
    for rank, place in enumerate(places):
        if place.lacks:
            return f"rank {rank} of the group: {place.lacks}"
    for (first, one), (second, other) in itertools.combinations(enumerate(places), 2):
        if (one.node, one.device) == (other.node, other.device):
            return f"ranks {first} and {second} of the group share GPU {one.device}"
    return _unmet_on_node(topology) if topology.one_node else _unmet_across(topology)


def _unmet_on_node(topology: Topology) -> str:
    for (first, second), reason in sorted(topology.peers.items()):
        if reason:
            one, other = topology.places[first].device, topology.places[second].device
            return f"GPUs {one} and {other} do not reach each other's memory: {reason}"
    return ""


def _unmet_across(topology: Topology) -> str:
    needed = ".".join(map(str, MULTI_NODE_CAPABILITY))
    for rank, place in enumerate(topology.places):
        if place.capability < MULTI_NODE_CAPABILITY:
            own = ".".join(map(str, place.capability))
            return f"across machines it needs compute capability {needed}, but rank {rank} of the group has {own}"
        if not place.fabric:
            return f"across machines it needs a multi-node NVLink domain, but rank {rank} of the group is in none"
    if len({place.fabric for place in topology.places}) > 1:
        return "the ranks are in different NVLink domains"
    if not topology.multicast:
        return "across machines it needs NVLink multicast, which is off (TORCH_SYMM_MEM_DISABLE_MULTICAST=0 allows it)"
    return ""


def limits(size: int, measured: Mapping[int, Mapping[int, Times]] = MEASURED) -> tuple[tuple[int, Method], ...]:
    """Ranges of bytes by method, ascending, for a group of ``size``.

    A tensor takes the method that was fastest for the next larger size of the table. For a size without a table of its
    own, that of the nearest smaller size (else the smallest) stands in: two-shot moves the same bytes whatever the
    size, one-shot as many times more as there are ranks more, so its limits shrink by that factor.
    """
    known = max((one for one in measured if one <= size), default=min(measured))
    steps = [(most, _fastest(times)) for most, times in sorted(measured[known].items())]
    merged: list[tuple[int, Method]] = []
    for most, method in steps:
        if merged and merged[-1][1] is method:
            merged.pop()
        merged.append((most, method))
    if size > known:
        merged = [(most * known // size if method is Method.ONE_SHOT else most, method) for most, method in merged]
    while merged and merged[-1][1] is Method.NCCL:
        merged.pop()
    return tuple(merged)


def _fastest(times: Times) -> Method:
    best = min(times.values())
    return next(method for method in Method if method in times and times[method] <= best * TIE)
