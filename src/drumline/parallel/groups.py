"""Process groups of one worker: a :class:`Groups` object that the worker owns, with a coordinator for each kind.

Nothing here is global. ``torch.distributed.init_process_group`` would set up one world for the whole process, for
ever, so that two engines could not live in one process, and every rank would have to create every group in the same
order. Instead each coordinator holds process group backends (``ProcessGroupGloo``, ``ProcessGroupNCCL``) made
directly over a prefix of the world's store, each rank making only the groups that it is in. Calls go to the backend's
own methods, which also saves the checks of ``torch.distributed.all_reduce`` in each call.

What torch still forces on a whole process: the libraries' environment variables (NCCL_*) are read once, and NCCL
binds to the current device, so two engines on different devices need two processes. With gloo any number of worlds
may live in one process (not a tested promise beyond two).

Each kind has a device group (for tensors on the device) and a CPU group (for objects and barriers, so that these
never open a context on the device). On the cpu platform both are the same backend. Groups of size 1 have none and
their operations return at once; a world of size 1 opens nothing. Kinds with the same ranks in the same order (WORLD
and TP, mostly) share their backends, since a communicator costs connections, threads and device memory; EPLB alone
never shares: its traffic runs beside the others'.

gloo opens one TCP listener a process without authentication; on one machine it is bound to loopback explicitly,
whatever GLOO_SOCKET_IFNAME says. Between machines that variable decides, else the route to the leader.

A peer that dies makes pending operations of gloo raise at once; one that is stopped is noticed only by the timeout
(traps.md: ``abort`` frees only the one who calls it), so a supervisor has to kill the rest.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drumline.errors import ConfigError
from drumline.parallel.layout import GroupKind, Layout
from drumline.parallel.rendezvous import own_address

_c10d: Any = dist  # much of what is used here is public but missing in torch's own lists of exports

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class GroupCoordinator:
    """The ranks of one group of one kind, as one of them sees it. Ranks in arguments are places in the group.

    Operations must be called by all members in the same order. They work in place on contiguous tensors where they
    say so. An error gets a note that names operation, group and ranks; after one, the group is of no use any more.
    """

    def __init__(
        self,
        kind: GroupKind,
        ranks: Sequence[int],
        rank: int,
        device_group: Any = None,
        cpu_group: Any = None,
    ) -> None:
        self.kind = kind
        self.ranks = tuple(ranks)
        """Ranks of the members in the layout, in group order."""
        self.rank = rank
        self.rank_in_group = self.ranks.index(rank)
        self.size = len(self.ranks)
        self.device_group = device_group
        """Backend for tensors on the device; None for size 1."""
        self.cpu_group = cpu_group
        """Backend for CPU tensors, objects and barriers; None for size 1."""
        self._sum = _options(dist.AllreduceOptions, dist.ReduceOp.SUM)

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
        if self.size == 1:
            return tensor
        options = self._sum if op == "sum" else _options(dist.AllreduceOptions, _OPS[op])
        try:
            self._group(tensor).allreduce([tensor], options).wait()
        except Exception as error:
            self._explain(error, f"all_reduce ({op})")
            raise
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """All members' tensors, concatenated along ``dim`` in group order.

        ``sizes`` has each member's extent along ``dim`` where they differ (ranges of shards are known to everyone, so
        no shapes are exchanged); all other extents are equal. Returns a new tensor, or ``tensor`` itself for size 1.
        """
        if self.size == 1:
            return tensor
        dim %= tensor.dim()
        own = tensor.shape[dim]
        sizes = [own] * self.size if sizes is None else sizes
        if len(sizes) != self.size or sizes[self.rank_in_group] != own:
            raise ValueError(f"sizes {list(sizes)} do not fit {self!r}, whose extent of dimension {dim} is {own}")
        # The backends want a contiguous piece of the same size from everyone, so short ones are padded; what was
        # padded is left out when the pieces are put together.
        longest = max(sizes)
        piece = tensor.contiguous() if own == longest else _padded(tensor, dim, longest)
        gathered = piece.new_empty((self.size, *piece.shape))
        self.all_gather_into(gathered, piece)
        if dim == 0 and min(sizes) == longest:
            return gathered.flatten(0, 1)
        return torch.cat([gathered[i].narrow(dim, 0, size) for i, size in enumerate(sizes)], dim)

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather equal, contiguous tensors into a contiguous ``output`` [size, ...]: no allocation, no copy."""
        if self.size == 1:
            output.copy_(tensor.view_as(output))
            return
        if not tensor.numel():
            return
        try:
            self._group(tensor)._allgather_base(output.view(-1), tensor.view(-1)).wait()
        except Exception as error:
            self._explain(error, "all_gather")
            raise

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Everyone gets member ``src``'s values, in place; returns the tensor."""
        if self.size == 1:
            return tensor
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        try:
            self._group(tensor).broadcast([tensor], options).wait()
        except Exception as error:
            self._explain(error, f"broadcast from member {src}")
            raise
        return tensor

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a contiguous tensor to a member; by default the next one. Returns when it may be changed."""
        dst = (self.rank_in_group + 1) % self.size if dst is None else dst
        self._not_self(dst)
        try:
            self._group(tensor).send([tensor], dst, 0).wait()
        except Exception as error:
            self._explain(error, f"send to member {dst}")
            raise

    def recv(self, tensor: torch.Tensor, src: int | None = None) -> torch.Tensor:
        """Receive into a contiguous tensor from a member, by default the one before; returns the tensor."""
        src = (self.rank_in_group - 1) % self.size if src is None else src
        self._not_self(src)
        try:
            self._group(tensor).recv([tensor], src, 0).wait()
        except Exception as error:
            self._explain(error, f"recv from member {src}")
            raise
        return tensor

    def broadcast_object(self, value: Any = None) -> Any:
        """Everyone gets the first member's object (pickled, over the CPU group); others' arguments are ignored."""
        if self.size == 1:
            return value
        if self.is_first:
            data = _to_tensor(value)
            self.broadcast(torch.tensor([data.numel()]))
            self.broadcast(data)
            return value
        size = self.broadcast(torch.empty(1, dtype=torch.int64))
        return _to_object(self.broadcast(torch.empty(int(size), dtype=torch.uint8)))

    def all_gather_object(self, value: Any) -> list[Any]:
        """All members' objects (pickled, over the CPU group), in group order."""
        if self.size == 1:
            return [value]
        data = _to_tensor(value)
        sizes = self.all_gather(torch.tensor([data.numel()]), 0).tolist()
        pieces = torch.split_with_sizes(self.all_gather(data, 0, sizes), sizes)
        return [_to_object(piece) for piece in pieces]

    def barrier(self) -> None:
        """Wait until all members are here. Over the CPU group, so that it opens no context on a device."""
        if self.size == 1:
            return
        try:
            self.cpu_group.barrier().wait()
        except Exception as error:
            self._explain(error, "barrier")
            raise

    def _group(self, tensor: torch.Tensor) -> Any:
        return self.cpu_group if tensor.is_cpu else self.device_group

    def _not_self(self, peer: int) -> None:
        if peer == self.rank_in_group:
            raise ValueError(f"{self!r} cannot send to or receive from itself")

    def _explain(self, error: Exception, operation: str) -> None:
        error.add_note(f"in {operation} of {self.kind.value} group {self.ranks} on rank {self.rank}")


class Groups:
    """All groups that one rank is in. Owned by the worker; :meth:`close` when it ends."""

    def __init__(self, layout: Layout, rank: int, coordinators: dict[GroupKind, GroupCoordinator], store: Any) -> None:
        self.layout = layout
        self.rank = rank
        self._coordinators = coordinators
        self._store = store  # rank 0 of a TCP rendezvous serves it, so it lives as long as the groups

    def __getitem__(self, kind: GroupKind) -> GroupCoordinator:
        try:
            return self._coordinators[kind]
        except KeyError:
            raise ConfigError(f"the {kind.value} group exists only with --enable-expert-parallel") from None

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

    def close(self) -> None:
        """Give up all connections and threads. Idempotent; not a collective: peers that still wait get an error.

        CUDA graphs that captured operations of these groups must be gone before: NCCL waits for them without end.
        """
        backends = {}
        for coordinator in self._coordinators.values():
            for backend in (coordinator.device_group, coordinator.cpu_group):
                if backend is not None:
                    backends[id(backend)] = backend
            coordinator.device_group = coordinator.cpu_group = None
        for backend in backends.values():
            backend.shutdown()
        self._store = None


def init_groups(
    layout: Layout,
    rank: int,
    init_method: str,
    backend: str = "gloo",
    timeout_s: float = 600.0,
    *,
    device: torch.device | None = None,
    one_machine: bool = True,
    expert_parallel: bool = False,
) -> Groups:
    """Join the world and make all groups that this rank is in. Every rank of the layout calls it.

    Returns when all members of each group are connected; raises (torch's RuntimeError or DistStoreError) if that
    takes longer than ``timeout_s``, which is also the timeout of each later operation. ``backend`` is the device
    group's (``gloo`` where it is the platform's; ``nccl`` and others need ``device``, the current one); CPU groups are
    gloo's. ``init_method``: see :mod:`drumline.parallel.rendezvous`; empty for a world of size 1. ``one_machine``
    keeps all listeners on loopback. Writes nothing to the console.
    """
    kinds = [kind for kind in GroupKind if expert_parallel or kind not in (GroupKind.EP, GroupKind.EPLB)]
    if layout.size == 1:
        return Groups(layout, rank, {kind: GroupCoordinator(kind, (rank,), rank) for kind in kinds}, None)
    if not init_method:
        raise ConfigError(f"a world of {layout.size} ranks needs an init method")
    maker = _Maker(rank, layout.size, init_method, backend, timeout_s, device, one_machine)
    coordinators = {}
    made: dict[tuple[tuple[int, ...], bool], tuple[Any, Any]] = {}
    for kind in kinds:
        ranks = layout.group_of(kind, rank)
        key = (ranks, kind is GroupKind.EPLB)
        if key not in made:
            made[key] = maker.make(kind, ranks) if len(ranks) > 1 else (None, None)
        coordinators[kind] = GroupCoordinator(kind, ranks, rank, *made[key])
    return Groups(layout, rank, coordinators, maker.store)


class _Maker:
    """Makes the backends of one rank over one store."""

    def __init__(
        self,
        rank: int,
        size: int,
        init_method: str,
        backend: str,
        timeout_s: float,
        device: torch.device | None,
        one_machine: bool,
    ) -> None:
        self.rank = rank
        self.backend = backend
        self.timeout = timedelta(seconds=timeout_s)
        self.device = device
        self.store = next(_c10d.rendezvous(init_method, rank, size, timeout=self.timeout))[0]
        self.store.set_timeout(self.timeout)
        self.gloo_device = _gloo_device(init_method, one_machine)

    def make(self, kind: GroupKind, ranks: tuple[int, ...]) -> tuple[Any, Any]:
        """(device group, CPU group) of one group; the same object where gloo is the device's backend."""
        # The lowest rank makes the prefix unique among the groups of one kind: they are disjoint.
        store = _c10d.PrefixStore(f"{kind.value}/{min(ranks)}", self.store)
        place = ranks.index(self.rank)
        cpu = self._gloo(_c10d.PrefixStore("cpu", store), place, len(ranks))
        if self.backend == "gloo":
            return cpu, cpu
        return self._device(_c10d.PrefixStore("device", store), place, len(ranks)), cpu

    def _gloo(self, store: Any, place: int, size: int) -> Any:
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [self.gloo_device]
        options._timeout = self.timeout
        options._threads = 1
        return _c10d.ProcessGroupGloo(store, place, size, options)

    def _device(self, store: Any, place: int, size: int) -> Any:
        if self.backend == "nccl":
            # Point-to-point operations here run in the order of all others, which is what this warns of.
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            group = _c10d.ProcessGroupNCCL(store, place, size, options)
            if self.device is not None:
                group.eager_connect_single_device(self.device)  # or its memory would appear with the first use
            return group
        # Backends of other platforms: what they registered with torch.distributed.
        plugin = dist.Backend._plugins.get(self.backend.upper())
        if plugin is None:
            raise ConfigError(f"torch.distributed knows no backend {self.backend!r} for device groups")
        if plugin.extended_api:
            raise ConfigError(f"backend {self.backend!r} wants the options of a default process group; not supported")
        return plugin.creator_fn(store, place, size, self.timeout)


def _gloo_device(init_method: str, one_machine: bool) -> Any:
    """The one listener for all gloo groups of this process."""
    make = _c10d.ProcessGroupGloo.create_device
    if one_machine:
        return make(interface=_LOOPBACK)
    address = None if "GLOO_SOCKET_IFNAME" in os.environ else own_address(init_method)
    return _c10d.ProcessGroupGloo.create_default_device() if address is None else make(hostname=address)


_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def _options(kind: Any, op: Any) -> Any:
    options = kind()
    options.reduceOp = op
    return options


def _padded(tensor: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """A contiguous copy that is ``extent`` long along ``dim``; what is new is uninitialised."""
    shape = list(tensor.shape)
    shape[dim] = extent
    padded = tensor.new_empty(shape)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


def _to_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)


def _to_object(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
