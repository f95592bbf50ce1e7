"""Rank algebra: which rank is where, and which ranks form a group. Pure arithmetic, no torch, no processes.

Ranks are laid out as a five-dimensional array, the last axis running fastest::

    ExternalDP x DP x PP x PCP x TP

so neighbouring ranks are TP neighbours (they talk most, so they should share a machine) and a pipeline stage is a
contiguous block of PCP x TP ranks. Each group kind is a set of axes that vary while the others stay fixed:

====== =========================== ==============================================================================
kind   axes that vary              what it is for
====== =========================== ==============================================================================
WORLD  all                         every rank
TP     TP                          tensor parallel
PCP    PCP                         prefill context parallel
PP     PP                          pipeline: same place in every stage
DP     DP                          replicas of the same place
EP     DP, PCP, TP of one stage    experts are spread over all of them
EPLB   as EP                       a group of its own, so that moving experts cannot interleave with their use
DCP    chunks of one stage's block decode context parallel: the PCP x TP block of a stage, *PCP fastest*, cut in chunks
ETP    none (size 1)               tensor parallel inside an expert; exists when an option for it does
====== =========================== ==============================================================================

ExternalDP counts engines that share a launcher's world (torchrun) and exchange nothing; no group crosses it.

An executor's world is TP x PP x PCP. DP is not in it: a dense model's DP ranks are engines of their own. Where the
world does span engines (experts), the global rank is ``dp_rank x world_size + rank``, which is the same layout with
the DP axis put in front. :meth:`Layout.of` makes either.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from drumline.config import ParallelConfig
from drumline.errors import ConfigError


class GroupKind(enum.StrEnum):
    """Kinds of groups; see the module's docstring."""

    WORLD = "world"
    TP = "tp"
    PCP = "pcp"
    PP = "pp"
    DP = "dp"
    EP = "ep"
    EPLB = "eplb"
    DCP = "dcp"
    ETP = "etp"


class Coordinates(NamedTuple):
    """Place of a rank on the five axes."""

    external_dp: int
    dp: int
    pp: int
    pcp: int
    tp: int


Groups = tuple[tuple[int, ...], ...]
"""All groups of one kind: each rank is in exactly one, members in group order."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes, and everything that follows from them. Ranks are those of this layout (0 .. size - 1)."""

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dp: int = 1
    external_dp: int = 1
    dcp: int = 1
    etp: int = 1
    """Always 1 until an option exists."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "pcp", "dp", "external_dp", "dcp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.etp != 1:
            raise ConfigError("tensor parallelism inside experts (etp) is not built yet; leave it at 1")
        if (self.tp * self.pcp) % self.dcp:
            raise ConfigError(
                f"decode context parallel size {self.dcp} must divide tensor parallel size x prefill context parallel "
                f"size = {self.tp} x {self.pcp}: change --decode-context-parallel-size"
            )

    @classmethod
    def of(cls, parallel: ParallelConfig, *, span_engines: bool = False) -> Layout:
        """Layout of one executor's world; with ``span_engines`` of the world that all DP ranks form together."""
        return cls(
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            pcp=parallel.prefill_context_parallel_size,
            dcp=parallel.decode_context_parallel_size,
            dp=parallel.data_parallel_size if span_engines else 1,
        )

    @property
    def size(self) -> int:
        """Number of ranks of this layout."""
        return self.external_dp * self.dp * self.world_size

    @property
    def world_size(self) -> int:
        """Ranks of one executor: TP x PP x PCP."""
        return self.pp * self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage of one executor: PCP x TP."""
        return self.pcp * self.tp

    @property
    def output_rank(self) -> int:
        """Rank (in an executor's world) whose answer the executor waits for: the first of the last stage."""
        return self.world_size - self.stage_size

    def coordinates(self, rank: int) -> Coordinates:
        """Place of a rank. ValueError if there is no such rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in 0..{self.size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, pcp = divmod(rest, self.pcp)
        rest, pp = divmod(rest, self.pp)
        external_dp, dp = divmod(rest, self.dp)
        return Coordinates(external_dp, dp, pp, pcp, tp)

    def rank(self, *, tp: int = 0, pcp: int = 0, pp: int = 0, dp: int = 0, external_dp: int = 0) -> int:
        """The rank at a place; inverse of :meth:`coordinates`. ValueError if a coordinate is outside its axis."""
        place = Coordinates(external_dp, dp, pp, pcp, tp)
        for name, value in zip(Coordinates._fields, place, strict=True):
            if not 0 <= value < getattr(self, name):
                raise ValueError(f"{name} {value} is not in 0..{getattr(self, name) - 1}")
        return (((external_dp * self.dp + dp) * self.pp + pp) * self.pcp + pcp) * self.tp + tp

    def is_driver(self, rank: int) -> bool:
        """Whether this is a driver rank: its TP place is 0."""
        return self.coordinates(rank).tp == 0

    @cached_property
    def groups(self) -> dict[GroupKind, Groups]:
        """All groups of every kind, in the order in which processes create them."""
        return {kind: tuple(self._make(kind)) for kind in GroupKind}

    def group_of(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """Ranks of the group of this kind that ``rank`` is in, in group order."""
        return self._by_rank[kind][rank]

    def rank_in_group(self, kind: GroupKind, rank: int) -> int:
        """Place of ``rank`` in its group of this kind."""
        return self.group_of(kind, rank).index(rank)

    def group_size(self, kind: GroupKind) -> int:
        """Size of the groups of this kind (they are all alike)."""
        return len(self.groups[kind][0])

    @cached_property
    def _by_rank(self) -> dict[GroupKind, dict[int, tuple[int, ...]]]:
        return {kind: {rank: group for group in groups for rank in group} for kind, groups in self.groups.items()}

    def _make(self, kind: GroupKind) -> Iterator[tuple[int, ...]]:
        if kind is GroupKind.DCP:
            yield from self._dcp()
        else:
            yield from self._along(_AXES[kind])

    def _along(self, varying: frozenset[str]) -> Iterator[tuple[int, ...]]:
        """One group for each place on the fixed axes; members ordered as the axes are (TP fastest)."""
        names = Coordinates._fields
        sizes = {name: int(getattr(self, name)) for name in names}
        for fixed in product(*(range(1 if name in varying else sizes[name]) for name in names)):
            outer = dict(zip(names, fixed, strict=True))
            inner = product(*(range(sizes[name]) if name in varying else (outer[name],) for name in names))
            yield tuple(self.rank(**dict(zip(names, place, strict=True))) for place in inner)

    def _dcp(self) -> Iterator[tuple[int, ...]]:
        """Chunks of each stage's block, PCP fastest: ranks that hold the same KV heads come together first."""
        for start in range(0, self.size, self.stage_size):
            block = [start + pcp * self.tp + tp for tp in range(self.tp) for pcp in range(self.pcp)]
            for chunk in range(0, self.stage_size, self.dcp):
                yield tuple(block[chunk : chunk + self.dcp])


_AXES: dict[GroupKind, frozenset[str]] = {
    GroupKind.WORLD: frozenset(Coordinates._fields),
    GroupKind.TP: frozenset({"tp"}),
    GroupKind.PCP: frozenset({"pcp"}),
    GroupKind.PP: frozenset({"pp"}),
    GroupKind.DP: frozenset({"dp"}),
    GroupKind.EP: frozenset({"dp", "pcp", "tp"}),
    GroupKind.EPLB: frozenset({"dp", "pcp", "tp"}),
    GroupKind.ETP: frozenset(),
}


def global_rank(parallel: ParallelConfig, rank: int) -> int:
    """Rank among all engines of a rank of this executor's world: ``dp_rank x world_size + rank``."""
    return parallel.data_parallel_rank * parallel.world_size + rank


def node_of(parallel: ParallelConfig, rank: int) -> int:
    """Which of the machines that this executor spans a rank of its world runs on (0: the leader's)."""
    return rank // parallel.local_world_size


def local_rank_of(parallel: ParallelConfig, rank: int) -> int:
    """Place of a rank of the executor's world among the workers of its machine."""
    return rank % parallel.local_world_size


def local_ranks(parallel: ParallelConfig) -> range:
    """Ranks of the executor's world that run on this machine."""
    start = parallel.node_rank_within_dp * parallel.local_world_size
    return range(start, start + parallel.local_world_size)


def device_index(parallel: ParallelConfig, local_rank: int) -> int:
    """Index into this machine's device table of the device of a local rank.

    DP ranks of one machine stand side by side: rank r of them takes the r-th run of ``local_world_size`` devices.
    """
    return parallel.data_parallel_rank_local * parallel.local_world_size + local_rank


def worker_places(parallel: ParallelConfig, rank: int) -> dict[str, tuple[int, int]]:
    """(place, size) of a rank of the executor's world in each kind that names a worker: dp, pp, pcp, tp, dcp, ep.

    ``drumline.processes.titles.worker_name(**places, expert_parallel=...)`` makes the name of it.
    """
    layout = Layout.of(parallel, span_engines=True)
    place = global_rank(parallel, rank)
    kinds = (GroupKind.DP, GroupKind.PP, GroupKind.PCP, GroupKind.TP, GroupKind.DCP, GroupKind.EP)
    return {kind.value: (layout.rank_in_group(kind, place), layout.group_size(kind)) for kind in kinds}
