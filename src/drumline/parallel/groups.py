"""Process groups of one worker: a :class:`Groups` object that the worker owns, with a coordinator for each kind.

Nothing here is global: any number of worlds may live in one process (not a tested promise beyond two).

What moves the bytes is chosen once, when the groups are made:

* CPU tensors, objects and barriers of ranks on one machine: shared memory (:mod:`drumline.parallel.shm`), and what a
  pipeline stage sends to the next one (:mod:`drumline.parallel.mail`). No listener, no thread.
* The same between machines: gloo (:mod:`drumline.parallel.c10d`).
* Tensors on a device: the platform's backend, such as NCCL; sums of TP groups of GPUs also through symmetric memory
  (:mod:`drumline.parallel.symmetric`), where :mod:`drumline.parallel.fast_choice` says so.

So each kind may have a device group, and a CPU group, so that objects and barriers never open a context on the
device. On the cpu platform both are the same. Groups of size 1 have none and their operations return at once; a world
of size 1 opens nothing. Kinds with the same ranks in the same order (WORLD and TP, mostly) share theirs, since a
communicator costs connections, threads and memory; EPLB alone never shares: its traffic runs beside the others', and
no kind shares with one that has another timeout. Only TP sums through a device communicator, WORLD never, also where
both have the same ranks.

**Objects.** ``broadcast_object`` of TP and DCP groups is from their first member only, as users of this field know it.
On one machine it goes through the same slots as all else, in as many turns as it takes, not through a message queue of
its own, whose descriptors ranks would have to hand to each other: docs/architecture.md has the measurement.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch

from drumline.errors import ConfigError
from drumline.parallel import fast
from drumline.parallel.boxes import MARKS
from drumline.parallel.c10d import Maker, ProcessGroup
from drumline.parallel.fast_choice import Choice
from drumline.parallel.layout import GroupKind, Layout
from drumline.parallel.mail import Mail
from drumline.parallel.rendezvous import memory_of
from drumline.parallel.shm import OneShot, ShmGroup, World
from drumline.parallel.symmetric import DeviceCommunicator
from drumline.parallel.tensor_dicts import described, made

FROM_FIRST_ONLY = frozenset({GroupKind.TP, GroupKind.DCP})
"""Kinds whose objects are broadcast by their first member only."""
WITH_COMMUNICATOR = frozenset({GroupKind.TP})
"""Kinds whose sums go through a device communicator where there is one."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which an operation gives up on ranks that do not come."""

    device_s: float = 600.0
    """Of device groups, and of all that has no timeout of its own."""
    cpu_s: float | None = None
    """Of CPU groups: objects, barriers, CPU tensors."""
    kinds: Mapping[GroupKind, float] = field(default_factory=dict)
    """Of all groups of a kind, before the two above."""

    def device(self, kind: GroupKind) -> float:
        """Of the device groups of a kind."""
        return self.kinds.get(kind, self.device_s)

    def cpu(self, kind: GroupKind) -> float:
        """Of the CPU groups of a kind."""
        return self.kinds.get(kind, self.device_s if self.cpu_s is None else self.cpu_s)


class Collectives(Protocol):
    """What moves the bytes of one group: ``shm.ShmGroup``, ``c10d.ProcessGroup``, or one of those below.

    Arguments are checked and complete: ``dim`` is not negative, all ``sizes`` are given.
    """

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce in place."""

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """All tensors along ``dim``."""

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather equal tensors into ``output`` [size, ...]."""

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Rows to and from each member."""

    def gather(self, tensor: torch.Tensor, dst: int, dim: int, sizes: Sequence[int]) -> torch.Tensor | None:
        """All tensors along ``dim`` on member ``dst``."""

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int], op: str) -> torch.Tensor:
        """Reduce; this member's part along ``dim``."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Member ``src``'s values, in place."""

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Member ``src``'s object."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """All objects."""

    def barrier(self) -> None:
        """Wait for all."""


class Peers(Protocol):
    """What sends tensors from one member to another."""

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to member ``dst``."""

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receive from member ``src``."""

    def send_bytes(self, data: bytes, dst: int) -> None:
        """Send to member ``dst``."""

    def recv_bytes(self, src: int) -> bytes:
        """Receive from member ``src``."""


class _Resource(Protocol):
    def close(self) -> None: ...


_R = TypeVar("_R", bound=_Resource)


class _Alone:
    """The only member of its group."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        pass

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        return tensor

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        output.copy_(tensor.view_as(output))

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor, dst: int, dim: int, sizes: Sequence[int]) -> torch.Tensor | None:
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int], op: str) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        pass

    def broadcast_object(self, value: Any, src: int) -> Any:
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass


class _ByDevice:
    """A group of accelerators: tensors go where they are, objects and barriers over the CPU.

    ``number`` is told of each operation that the device gets, ``communicator`` is asked before the backend.
    """

    def __init__(
        self,
        device: ProcessGroup,
        cpu: Collectives,
        cpu_peers: Peers | None,
        number: Callable[[int], None],
        communicator: DeviceCommunicator | None = None,
    ) -> None:
        self._device = device
        self._cpu = cpu
        self._cpu_peers = cpu_peers or _NoPeers()
        self._number = number
        self._communicator = communicator
        self.broadcast_object = cpu.broadcast_object
        self.all_gather_object = cpu.all_gather_object
        self.barrier = cpu.barrier
        self.send_bytes = self._cpu_peers.send_bytes
        self.recv_bytes = self._cpu_peers.recv_bytes

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        if tensor.is_cpu:
            self._cpu.all_reduce(tensor, op)
            return
        self._number(MARKS["all_reduce"])
        if self._communicator is None or not self._communicator.all_reduce(tensor, op):
            self._device.all_reduce(tensor, op)

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        return self._of(tensor, "all_gather").all_gather(tensor, dim, sizes)

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._of(tensor, "all_gather").all_gather_into(output, tensor)

    def gather(self, tensor: torch.Tensor, dst: int, dim: int, sizes: Sequence[int]) -> torch.Tensor | None:
        return self._of(tensor, "gather").gather(tensor, dst, dim, sizes)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int], op: str) -> torch.Tensor:
        return self._of(tensor, "reduce_scatter").reduce_scatter(tensor, dim, sizes, op)

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        return self._of(tensor, "all_to_all").all_to_all(tensor, sends, receives)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._of(tensor, "broadcast").broadcast(tensor, src)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        (self._cpu_peers if tensor.is_cpu else self._device).send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        (self._cpu_peers if tensor.is_cpu else self._device).recv(tensor, src)

    def with_communicator(self, communicator: DeviceCommunicator, number: Callable[[int], None]) -> _ByDevice:
        """The same group, whose sums ``communicator`` is asked to do first."""
        peers = None if isinstance(self._cpu_peers, _NoPeers) else self._cpu_peers
        return _ByDevice(self._device, self._cpu, peers, number, communicator)

    def _of(self, tensor: torch.Tensor, operation: str = "a collective") -> Collectives:
        if tensor.is_cpu:
            return self._cpu
        self._number(MARKS[operation])
        return self._device


class _NoPeers:
    """Nothing sends CPU tensors here."""

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        raise ConfigError("on one machine only pipeline groups send CPU tensors from one member to another")

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self.send(tensor, src)

    def send_bytes(self, data: bytes, dst: int) -> None:
        raise ConfigError("only pipeline groups send bytes from one member to another")

    def recv_bytes(self, src: int) -> bytes:
        raise ConfigError("only pipeline groups send bytes from one member to another")


class GroupCoordinator:
    """The ranks of one group of one kind, as one of them sees it. Ranks in arguments are places in the group.

    Operations must be called by all members in the same order, by one thread at a time. An error names operation,
    group and rank; after one, the group is of no use any more.
    """

    def __init__(
        self,
        kind: GroupKind,
        ranks: Sequence[int],
        rank: int,
        collectives: Collectives | None = None,
        peers: Peers | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.kind = kind
        self.ranks = tuple(ranks)
        """Ranks of the members in the layout, in group order."""
        self.rank = rank
        self.rank_in_group = self.ranks.index(rank)
        self.size = len(self.ranks)
        self._collectives: Collectives = collectives or _Alone()
        self._peers: Peers = peers or _NoPeers()
        self._device = device or torch.device("cpu")

    def __repr__(self) -> str:
        return f"GroupCoordinator({self.kind.value}, ranks={self.ranks}, rank_in_group={self.rank_in_group})"

    @property
    def is_first(self) -> bool:
        """Whether this is the group's first member."""
        return self.rank_in_group == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the group's last member."""
        return self.rank_in_group == self.size - 1

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce over all members (``sum``, ``max``, ``min``), in place; returns the tensor."""
        self._collectives.all_reduce(tensor, op)
        return tensor

    def one_shot(self) -> OneShot | None:
        """How compiled code sums over all members by itself; None if nothing here lets it."""
        collectives = self._collectives
        return collectives.one_shot() if isinstance(collectives, ShmGroup) else None

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """All members' tensors, concatenated along ``dim`` in group order.

        ``sizes`` has each member's extent along ``dim`` where they differ (ranges of shards are known to everyone, so
        no shapes are exchanged); all other extents are equal. Returns a new tensor, or ``tensor`` itself for size 1.
        IndexError for a dimension that the tensor does not have, here as in the others that take one.
        """
        dim = self._dimension(tensor, dim)
        return self._collectives.all_gather(tensor, dim, self._extents(tensor, dim, sizes))

    def gather(
        self, tensor: torch.Tensor, dst: int = 0, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """As :meth:`all_gather`, but only member ``dst`` gets it; the others get None."""
        self._check_member(dst)
        dim = self._dimension(tensor, dim)
        return self._collectives.gather(tensor, dst, dim, self._extents(tensor, dim, sizes))

    def reduce_scatter(
        self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None, op: str = "sum"
    ) -> torch.Tensor:
        """This member's part along ``dim`` of the reduction over all members (``sum``, ``max``, ``min``).

        All tensors have the same shape. ``sizes`` has the extent of each member's part, in group order, which add up
        to the extent of ``dim``; by default they are equal. Returns a new tensor, or ``tensor`` itself for size 1.
        """
        dim = self._dimension(tensor, dim)
        whole = tensor.shape[dim]
        if sizes is None:
            if whole % self.size:
                raise ValueError(
                    f"{self!r} cannot cut {whole} along dimension {dim} into {self.size} equal parts: give sizes"
                )
            sizes = [whole // self.size] * self.size
        elif len(sizes) != self.size or sum(sizes) != whole or min(sizes) < 0:
            raise ValueError(f"sizes {list(sizes)} do not fit {self!r}, whose extent of dimension {dim} is {whole}")
        return self._collectives.reduce_scatter(tensor, dim, sizes, op)

    def _dimension(self, tensor: torch.Tensor, dim: int) -> int:
        """``dim``, counted from the front. IndexError if the tensor does not have it."""
        count = tensor.dim()
        if not -count <= dim < count:
            has = f"a tensor of {count} dimensions has {-count} to {count - 1}" if count else "a scalar has none"
            raise IndexError(f"{self!r} was asked for dimension {dim}: {has}")
        return dim % count

    def _check_member(self, place: int) -> None:
        if not 0 <= place < self.size:
            raise ValueError(f"{self!r} has no member {place}")

    def _extents(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None) -> Sequence[int]:
        """Of all members along ``dim``: those given, if they fit this one's, else this one's."""
        own = tensor.shape[dim]
        if sizes is None:
            return [own] * self.size
        if len(sizes) != self.size or sizes[self.rank_in_group] != own:
            raise ValueError(f"sizes {list(sizes)} do not fit {self!r}, whose extent of dimension {dim} is {own}")
        return sizes

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather equal, contiguous tensors into a contiguous ``output`` [size, ...], which is allocated already.

        ValueError if it cannot hold them.
        """
        count, here = self.size * tensor.numel(), output.is_contiguous() and tensor.is_contiguous()
        if output.numel() != count or output.dtype != tensor.dtype or not here:
            raise ValueError(
                f"{self!r} gathers {count} elements of {tensor.dtype} into a contiguous tensor, from a contiguous one, "
                f"not {list(tensor.shape)} into {list(output.shape)} of {output.dtype}"
            )
        self._collectives.all_gather_into(output, tensor)

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Rows of a contiguous ``tensor`` [sum(sends), ...] to the members, in group order: ``sends`` to each.

        Returns [sum(receives), ...]: the rows from each member, in group order. Everyone knows how many come from whom
        (``receives``); where that is wrong, it is an error or, between machines and on devices, a wait that times out.
        Returns ``tensor`` itself for size 1.
        """
        if len(sends) != self.size or len(receives) != self.size or sum(sends) != len(tensor):
            raise ValueError(
                f"sends {list(sends)} and receives {list(receives)} do not fit {self!r} and {len(tensor)} rows"
            )
        if min(*sends, *receives) < 0:
            raise ValueError(f"sends {list(sends)} and receives {list(receives)} of {self!r}: no number may be below 0")
        if sends[self.rank_in_group] != receives[self.rank_in_group]:
            raise ValueError(f"{self!r} sends itself {sends[self.rank_in_group]} rows and receives others")
        return self._collectives.all_to_all(tensor, sends, receives)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Everyone gets member ``src``'s values, in place; returns the tensor. ValueError if there is none."""
        self._check_member(src)
        self._collectives.broadcast(tensor, src)
        return tensor

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a contiguous tensor to a member; by default the next one. Returns when it may be changed.

        CPU tensors of ranks on one machine: pipeline groups only, and to the next one only.
        """
        self._peers.send(tensor, self._after(dst))

    def recv(self, tensor: torch.Tensor, src: int | None = None) -> torch.Tensor:
        """Receive into a contiguous tensor from a member, by default the one before; returns the tensor."""
        self._peers.recv(tensor, self._before(src))
        return tensor

    def send_bytes(self, data: bytes, dst: int | None = None) -> None:
        """Send bytes over the CPU to a member, by default the next one. Pipeline groups only. In order with tensors
        that are on the CPU, too."""
        self._peers.send_bytes(data, self._after(dst))

    def recv_bytes(self, src: int | None = None) -> bytes:
        """The bytes that a member, by default the one before, has sent next."""
        return self._peers.recv_bytes(self._before(src))

    def send_tensor_dict(self, values: Mapping[str, Any], dst: int | None = None) -> None:
        """Send tensors and other (picklable) values by name to a member, by default the next. Pipeline groups only.

        Names, shapes and what is no tensor go over the CPU, tensors as :meth:`send`; empty ones are not sent.
        """
        dst = self._after(dst)
        description, tensors = described(values)
        self._peers.send_bytes(pickle.dumps(description, protocol=5), dst)
        for tensor in tensors:
            self._peers.send(tensor.contiguous(), dst)

    def recv_tensor_dict(self, src: int | None = None) -> dict[str, Any]:
        """What a member, by default the one before, has sent next by :meth:`send_tensor_dict`.

        Tensors that were on a device are on this rank's.
        """
        src = self._before(src)
        values, tensors = made(pickle.loads(self._peers.recv_bytes(src)), self._device)
        for tensor in tensors:
            self._peers.recv(tensor, src)
        return values

    def broadcast_tensor_dict(self, values: Mapping[str, Any] | None = None, src: int = 0) -> dict[str, Any]:
        """Everyone gets member ``src``'s tensors and other (picklable) values by name; others' are ignored.

        Its names, shapes and what is no tensor go by :meth:`broadcast_object`. Tensors that are on a device there are
        on each rank's own. The source gets its values back.
        """
        if self.rank_in_group == src:
            if values is None:
                raise ValueError(f"{self!r} is the source of broadcast_tensor_dict, but was given no values")
            description, tensors = described(values)
            self.broadcast_object(description, src)
            for tensor in tensors:
                self._collectives.broadcast(tensor.contiguous(), src)
            return dict(values)
        found, tensors = made(self.broadcast_object(None, src), self._device)
        for tensor in tensors:
            self._collectives.broadcast(tensor, src)
        return found

    def broadcast_object(self, value: Any = None, src: int = 0) -> Any:
        """Everyone gets member ``src``'s object (pickled, over the CPU); others' arguments are ignored.

        TP and DCP groups broadcast from their first member only: ValueError for another source.
        """
        if src and self.kind in FROM_FIRST_ONLY:
            raise ValueError(f"{self!r} broadcasts objects from its first member only, not from member {src}")
        self._check_member(src)
        return self._collectives.broadcast_object(value, src)

    def all_gather_object(self, value: Any) -> list[Any]:
        """All members' objects (pickled, over the CPU), in group order."""
        return self._collectives.all_gather_object(value)

    def barrier(self) -> None:
        """Wait until all members are here. Over the CPU, so that it opens no context on a device."""
        self._collectives.barrier()

    def _after(self, dst: int | None) -> int:
        return self._not_self((self.rank_in_group + 1) % self.size if dst is None else dst)

    def _before(self, src: int | None) -> int:
        return self._not_self((self.rank_in_group - 1) % self.size if src is None else src)

    def _not_self(self, peer: int) -> int:
        if peer == self.rank_in_group:
            raise ValueError(f"{self!r} cannot send to or receive from itself")
        return peer


class Groups:
    """All groups that one rank is in. Owned by the worker; :meth:`close` when it ends."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        coordinators: dict[GroupKind, GroupCoordinator],
        backend: str,
        resources: Sequence[_Resource] = (),
        all_reduce: Choice | None = None,
        communicator: DeviceCommunicator | None = None,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.backend = backend
        """What moves the tensors of device groups: ``shm``, ``gloo``, ``nccl`` ...; empty for a world of one."""
        self.all_reduce_choice = all_reduce
        """What sums tensors of GPUs in TP groups, and why; None where there is no choice (CPUs, one rank)."""
        self.communicator = communicator
        """What TP groups of GPUs sum through before the backend is asked; None: nothing. For benchmarks."""
        self._coordinators = coordinators
        self._resources = list(resources)

    def __getitem__(self, kind: GroupKind) -> GroupCoordinator:
        try:
            return self._coordinators[kind]
        except KeyError:
            flag = "--enable-eplb" if kind is GroupKind.EPLB else "--enable-expert-parallel"
            raise ConfigError(f"the {kind.value} group exists only with {flag}") from None

    @property
    def world(self) -> GroupCoordinator:
        """Every rank of the layout."""
        return self[GroupKind.WORLD]

    @property
    def tp(self) -> GroupCoordinator:
        """Tensor parallel."""
        return self[GroupKind.TP]

    @property
    def pp(self) -> GroupCoordinator:
        """Pipeline parallel: the same place in every stage."""
        return self[GroupKind.PP]

    @property
    def pcp(self) -> GroupCoordinator:
        """Prefill context parallel."""
        return self[GroupKind.PCP]

    @property
    def dcp(self) -> GroupCoordinator:
        """Decode context parallel."""
        return self[GroupKind.DCP]

    @property
    def dp(self) -> GroupCoordinator:
        """Data parallel; size 1 unless the layout spans engines."""
        return self[GroupKind.DP]

    @property
    def ep(self) -> GroupCoordinator:
        """Expert parallel: DP x PCP x TP of one stage. ConfigError unless made with ``expert_parallel``."""
        return self[GroupKind.EP]

    @property
    def eplb(self) -> GroupCoordinator:
        """The same ranks, for moving experts. ConfigError unless made with ``expert_balancing``."""
        return self[GroupKind.EPLB]

    @property
    def for_experts(self) -> tuple[GroupCoordinator, ...]:
        """Those of EP and EPLB that there are."""
        kinds = (GroupKind.EP, GroupKind.EPLB)
        return tuple(self._coordinators[kind] for kind in kinds if kind in self._coordinators)

    def close(self) -> None:
        """Give up all memory, connections and threads. Idempotent; no collective: peers that still wait get an error.

        CUDA graphs that captured operations of these groups must be gone before: NCCL waits for them without end.
        """
        while self._resources:
            self._resources.pop().close()


def init_groups(
    layout: Layout,
    rank: int,
    init_method: str,
    backend: str = "gloo",
    timeout_s: float | Timeouts = 600.0,
    *,
    device: torch.device | None = None,
    one_machine: bool = True,
    expert_parallel: bool = False,
    expert_balancing: bool = False,
    custom_all_reduce: bool = True,
) -> Groups:
    """Join the world and make all groups that this rank is in. Every rank of the layout calls it.

    Returns when all members of each group are there; raises (CollectiveError, torch's RuntimeError or DistStoreError)
    if that takes longer than ``timeout_s``, which is also the timeout of each later operation; :class:`Timeouts` tells
    device groups, CPU groups and kinds apart. Without ``custom_all_reduce`` GPUs sum through NCCL only, else whatever
    is chosen is logged once for the world, by rank 0. ``backend`` is the platform's for device groups (``nccl`` and
    others need ``device``, the current one); ``gloo`` stands for CPU
    tensors, which go through shared memory if all ranks are on one machine and ``init_method`` has some. For
    ``init_method`` see :mod:`drumline.parallel.rendezvous`; it is empty for a world of size 1. ``one_machine`` also
    keeps all listeners on loopback. Writes nothing to the console.
    """
    optional = {GroupKind.EP: expert_parallel, GroupKind.EPLB: expert_balancing}
    kinds = [kind for kind in GroupKind if optional.get(kind, True)]
    if layout.size == 1:
        return Groups(layout, rank, {kind: GroupCoordinator(kind, (rank,), rank) for kind in kinds}, "")
    if not init_method:
        raise ConfigError(f"a world of {layout.size} ranks needs an init method")
    timeouts = timeout_s if isinstance(timeout_s, Timeouts) else Timeouts(timeout_s)
    joiner = _Joiner(layout, rank, init_method, backend, timeouts, device, one_machine)
    joiner.custom_all_reduce = custom_all_reduce
    try:
        coordinators = joiner.join(kinds)
    except BaseException:
        joiner.close()
        raise
    return Groups(layout, rank, coordinators, joiner.backend, joiner.resources, joiner.choice, joiner.communicator)


class _Joiner:
    """Makes the groups of one rank."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        init_method: str,
        backend: str,
        timeouts: Timeouts,
        device: torch.device | None,
        one_machine: bool,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.device = device
        self.custom_all_reduce = True
        self.resources: list[_Resource] = []
        self.choice: Choice | None = None
        self.communicator: DeviceCommunicator | None = None
        memory = memory_of(init_method) if one_machine else None
        self.on_cpu = backend == "gloo"
        self.backend = "shm" if self.on_cpu and memory is not None else backend
        self._timeouts = timeouts
        joining_s = timeouts.cpu(GroupKind.WORLD)
        self._world = None if memory is None else self._keep(World(memory, layout.size, rank, joining_s))
        self._maker_arguments = (rank, layout.size, init_method, joining_s, one_machine)
        self._made: dict[tuple[Any, ...], tuple[Collectives, Peers | None]] = {}
        self._ring: Mail | None = None

    def join(self, kinds: Sequence[GroupKind]) -> dict[GroupKind, GroupCoordinator]:
        """Coordinators of these kinds, WORLD first."""
        coordinators = {}
        for kind in kinds:
            ranks = self.layout.group_of(kind, self.rank)
            movers = self._made_for(kind, ranks) if len(ranks) > 1 else (_Alone(), None)
            coordinators[kind] = GroupCoordinator(kind, ranks, self.rank, *movers, self.device)
            if kind is GroupKind.WORLD and self._world is not None:
                coordinators[kind].barrier()  # who is missing is told by name, before anything else waits for it
        if self.choice is not None:
            ranks = coordinators[GroupKind.TP].ranks
            world = self._made_for(GroupKind.WORLD, coordinators[GroupKind.WORLD].ranks)[0]
            fast.tell(world, self.rank, ranks, self.choice)
        return coordinators

    def _made_for(self, kind: GroupKind, ranks: tuple[int, ...]) -> tuple[Collectives, Peers | None]:
        """What moves the bytes of a group. Kinds with the same ranks and timeouts share connections; in shared memory,
        where a group costs nothing, each has its own, and errors and reports name the kind."""
        communicates = kind in WITH_COMMUNICATOR and self.backend == "nccl"
        own = kind if self.on_cpu and self._world is not None else kind is GroupKind.EPLB
        key = (ranks, own, communicates, self._timeouts.device(kind), self._timeouts.cpu(kind))
        if key not in self._made:
            if communicates and (plain := (ranks, own, False, *key[3:])) in self._made:
                self._made[key] = self._communicating(kind, ranks, self._made[plain])
            else:
                self._made[key] = self._make(kind, ranks)
                if communicates:
                    self._made[key] = self._communicating(kind, ranks, self._made[key])
        return self._made[key]

    def _make(self, kind: GroupKind, ranks: tuple[int, ...]) -> tuple[Collectives, Peers | None]:
        cpu, cpu_peers = self._make_cpu(kind, ranks)
        if self.on_cpu:
            return cpu, cpu_peers
        if self.backend == "nccl" and self._world is not None and kind is GroupKind.WORLD and self.device is not None:
            fast.respect_peers(cpu, ranks.index(self.rank), self.device)
        timeout_s = self._timeouts.device(kind)
        device = self._keep(self._maker.device(kind, ranks, self.backend, self.device, timeout_s))
        both = _ByDevice(device, cpu, cpu_peers, self._numbers(kind))
        return both, both

    def _make_cpu(self, kind: GroupKind, ranks: tuple[int, ...]) -> tuple[Collectives, Peers | None]:
        timeout_s = self._timeouts.cpu(kind)
        if self._world is None:
            gloo = self._keep(self._maker.gloo(kind, ranks, timeout_s))
            return gloo, gloo
        shared = self._world.group(kind, ranks, timeout_s)
        if ranks != self.layout.group_of(GroupKind.PP, self.rank):
            return shared, None
        return shared, self._mail(ranks)

    def _communicating(
        self, kind: GroupKind, ranks: tuple[int, ...], plain: tuple[Collectives, Peers | None]
    ) -> tuple[Collectives, Peers | None]:
        """The same group with a device communicator, if there is one for these GPUs."""
        device, group = self.device, plain[0]
        assert isinstance(group, _ByDevice)
        if device is None:
            return plain
        self.communicator, self.choice = fast.set_up(
            group,
            ranks.index(self.rank),
            fast.place_of(device),
            lambda capacity, name: self._maker.symmetric(kind, ranks, device, capacity, name),
            disabled=not self.custom_all_reduce,
        )
        if self.communicator is None:
            return plain
        both = group.with_communicator(self._keep(self.communicator), self._numbers(kind))
        return both, both

    def _numbers(self, kind: GroupKind) -> Callable[[int], None]:
        return _unnumbered if self._world is None else self._world.numbers(kind)

    def _mail(self, ranks: tuple[int, ...]) -> Mail:
        """There is one ring for each rank, so all kinds with the ranks of the pipeline group share it."""
        if self._ring is None:
            assert self._world is not None
            self._ring = self._world.mail(ranks, self._timeouts.cpu(GroupKind.PP))
        return self._ring

    @cached_property
    def _maker(self) -> Maker:
        """What makes torch's groups. It opens the store, so it is made only if something needs it."""
        return self._keep(Maker(*self._maker_arguments))

    def _keep(self, resource: _R) -> _R:
        self.resources.append(resource)
        return resource

    def close(self) -> None:
        """After a join that failed."""
        while self.resources:
            self.resources.pop().close()


def _unnumbered(_mark: int) -> None:
    """Between machines there is no memory in which to number anything."""
