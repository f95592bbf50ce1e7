"""Collectives through torch's process groups: gloo between machines, NCCL between GPUs.

``torch.distributed.init_process_group`` would set up one world for the whole process, for ever, so that two engines
could not live in one process, and every rank would have to create every group in the same order. Instead the backends
(``ProcessGroupGloo``, ``ProcessGroupNCCL``) are made directly over a prefix of the world's store, each rank making
only the groups that it is in. Calls go to the backend's own methods, which also saves the checks of
``torch.distributed.all_reduce`` in each call.

What torch still forces on a whole process: the libraries' environment variables (NCCL_*) are read once, and NCCL
binds to the current device, so two engines on different devices need two processes.

gloo opens one TCP listener a process without authentication; on one machine it is bound to loopback explicitly,
whatever GLOO_SOCKET_IFNAME says. Between machines that variable decides, else the route to the leader.

A peer that dies makes pending operations of gloo raise at once; one that is stopped is noticed only by the timeout
(``abort`` frees only the one who calls it), so a supervisor has to kill the rest.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from drumline.errors import ChannelClosedError, ConfigError
from drumline.parallel.layout import GroupKind
from drumline.parallel.rendezvous import listener_of, own_address
from drumline.parallel.symmetric import SymmetricMemory

_c10d: Any = dist  # much of what is used here is public but missing in torch's own lists of exports

_MAPPING = timedelta(seconds=60)
"""Longest that ranks wait for each other while they map their memory."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroup:
    """One of torch's process group backends. What the operations do: ``GroupCoordinator``.

    An error gets a note that names operation, group and rank. ChannelClosedError after :meth:`close`.
    """

    def __init__(self, backend: Any, kind: GroupKind, ranks: Sequence[int], rank: int) -> None:
        self._backend = backend
        self._where = f"of {kind.value} group {tuple(ranks)} on rank {rank}"
        self._size = len(ranks)
        self._place = tuple(ranks).index(rank)
        self._reductions = {name: _options(dist.AllreduceOptions, op) for name, op in _OPS.items()}
        self._scatters = {name: _options(dist.ReduceScatterOptions, op) for name, op in _OPS.items()}

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Reduce in place. ValueError for an unknown ``op``."""
        dense = _dense(tensor)
        try:
            self._backend.allreduce([dense], _known(self._reductions, op)).wait()
        except Exception as error:
            self._explain(error, f"all_reduce ({op})")
            raise
        if dense is not tensor:
            tensor.detach().copy_(dense)

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """All tensors along ``dim``, in new memory."""
        # The backends want a contiguous piece of the same size from everyone, so short ones are padded; what was
        # padded is left out when the pieces are put together.
        longest = max(sizes)
        piece = tensor.contiguous() if tensor.shape[dim] == longest else _padded(tensor, dim, longest)
        gathered = piece.new_empty((self._size, *piece.shape))
        self.all_gather_into(gathered, piece)
        if dim == 0 and min(sizes) == longest:
            return gathered.flatten(0, 1)
        return torch.cat([gathered[i].narrow(dim, 0, size) for i, size in enumerate(sizes)], dim)

    def gather(self, tensor: torch.Tensor, dst: int, dim: int, sizes: Sequence[int]) -> torch.Tensor | None:
        """All tensors along ``dim``, in new memory, on member ``dst``; None elsewhere."""
        longest, here = max(sizes), dst == self._place
        piece = tensor.contiguous() if tensor.shape[dim] == longest else _padded(tensor, dim, longest)
        gathered = [torch.empty_like(piece) for _ in sizes] if here else []
        options = dist.GatherOptions()
        options.rootRank = dst
        if piece.numel():
            with self._explained(f"gather to member {dst}"):
                self._backend.gather([gathered] if here else [], [piece], options).wait()
        if not here:
            return None
        return torch.cat([found.narrow(dim, 0, size) for found, size in zip(gathered, sizes, strict=True)], dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, sizes: Sequence[int], op: str) -> torch.Tensor:
        """This member's part along ``dim`` of the reduction, in new memory."""
        # As in a gather: equal, contiguous pieces, one behind the other.
        options = _known(self._scatters, op)
        longest, own = max(sizes), sizes[self._place]
        parts = torch.split_with_sizes(tensor.detach(), list(sizes), dim)
        rows = torch.stack([part if part.shape[dim] == longest else _padded(part, dim, longest) for part in parts])
        result = torch.empty_like(rows[0])
        if result.numel():
            with self._explained(f"reduce_scatter ({op})"):
                self._backend._reduce_scatter_base(result.view(-1), rows.view(-1), options).wait()
        return result.narrow(dim, 0, own).contiguous()

    def all_gather_into(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Gather equal, contiguous tensors into ``output`` [size, ...]."""
        if not tensor.numel():
            return
        with self._explained("all_gather"):
            self._backend._allgather_base(output.view(-1), tensor.view(-1)).wait()

    def all_to_all(self, tensor: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """Rows to and from each member."""
        output = tensor.new_empty((sum(receives), *tensor.shape[1:]))
        if not tensor.shape[1:].numel():
            return output  # rows without elements, on all members alike
        with self._explained("all_to_all"):
            options = dist.AllToAllOptions()
            self._backend.alltoall_base(output, tensor.contiguous(), list(receives), list(sends), options).wait()
        return output

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Member ``src``'s values, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        dense = _dense(tensor)
        with self._explained(f"broadcast from member {src}"):
            self._backend.broadcast([dense], options).wait()
        if dense is not tensor and src != self._place:
            tensor.detach().copy_(dense)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to member ``dst``."""
        with self._explained(f"send to member {dst}"):
            self._backend.send([tensor], dst, 0).wait()

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receive from member ``src``."""
        with self._explained(f"recv from member {src}"):
            self._backend.recv([tensor], src, 0).wait()

    def send_bytes(self, data: bytes, dst: int) -> None:
        """Send to member ``dst``. CPU groups only."""
        self.send(torch.tensor([len(data)]), dst)
        if data:
            self.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst)

    def recv_bytes(self, src: int) -> bytes:
        """Receive from member ``src``. CPU groups only."""
        size = torch.empty(1, dtype=torch.int64)
        self.recv(size, src)
        data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            self.recv(data, src)
        return data.numpy().tobytes()

    def broadcast_object(self, value: Any, src: int) -> Any:
        """Member ``src``'s object, pickled. CPU groups only."""
        if self._place == src:
            data = _to_tensor(value)
            self.broadcast(torch.tensor([data.numel()]), src)
            self.broadcast(data, src)
            return value
        size, data = torch.empty(1, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        self.broadcast(size, src)
        self.broadcast(data.resize_(int(size)), src)
        return _to_object(data)

    def all_gather_object(self, value: Any) -> list[Any]:
        """All objects, pickled. CPU groups only."""
        data = _to_tensor(value)
        sizes = self.all_gather(torch.tensor([data.numel()]), 0, [1] * self._size).tolist()
        return [_to_object(piece) for piece in torch.split_with_sizes(self.all_gather(data, 0, sizes), sizes)]

    def barrier(self) -> None:
        """Wait for all."""
        with self._explained("barrier"):
            self._backend.barrier().wait()

    def close(self) -> None:
        """End its connections and threads: peers that still wait get an error. Idempotent."""
        backend = self._backend
        if isinstance(backend, _Closed):
            return
        self._backend = _Closed(self._where.removeprefix("of "))
        # Nothing is shut down by gloo's ``shutdown``; its connections end with the last reference to it.
        end = backend.abort if isinstance(backend, _c10d.ProcessGroupGloo) else backend.shutdown
        end()

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._explain(error, operation)
            raise

    def _explain(self, error: Exception, operation: str) -> None:
        error.add_note(f"in {operation} {self._where}")


class _Closed:
    """In place of a backend that is closed."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise ChannelClosedError(f"{self._what} is closed")


class Maker:
    """Makes the process groups of one rank over one store.

    The store is that of ``init_method``; rank 0 of a TCP rendezvous serves it, so keep the maker as long as the groups.
    """

    def __init__(self, rank: int, size: int, init_method: str, timeout_s: float, one_machine: bool) -> None:
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        """Of the store."""
        self._store = _open_store(rank, size, init_method, self._timeout)
        self._store.set_timeout(self._timeout)
        self._init_method = init_method
        self._one_machine = one_machine
        self._listener: Any = None

    def gloo(self, kind: GroupKind, ranks: Sequence[int], timeout_s: float) -> ProcessGroup:
        """A group for CPU tensors. All of them share one listener, which the first one opens."""
        if self._listener is None:
            self._listener = _gloo_device(self._init_method, self._one_machine)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [self._listener]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        store, place, size = self._meeting(kind, ranks, "cpu")
        return self._wrapped(_c10d.ProcessGroupGloo(store, place, size, options), kind, ranks)

    def device(
        self, kind: GroupKind, ranks: Sequence[int], backend: str, device: torch.device | None, timeout_s: float
    ) -> ProcessGroup:
        """A group for tensors on the device, by the platform's backend."""
        meeting, timeout = self._meeting(kind, ranks, "device"), timedelta(seconds=timeout_s)
        made = self._nccl(meeting, device, timeout) if backend == "nccl" else _plugin(meeting, backend, timeout)
        return self._wrapped(made, kind, ranks)

    def symmetric(
        self, kind: GroupKind, ranks: Sequence[int], device: torch.device, capacity: int, name: str
    ) -> SymmetricMemory:
        """This rank's symmetric memory of ``capacity`` bytes. Who fails alone lets the others wait for a minute."""
        self._store.set_timeout(min(self._timeout, _MAPPING))
        try:
            return SymmetricMemory(*self._meeting(kind, ranks, "symmetric"), device, capacity, name)
        finally:
            self._store.set_timeout(self._timeout)

    def close(self) -> None:
        """Let go of the store."""
        self._store = self._listener = None

    def _nccl(self, meeting: tuple[Any, int, int], device: torch.device | None, timeout: timedelta) -> Any:
        # Point-to-point operations here run in the order of all others, which is what this warns of.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = _c10d.ProcessGroupNCCL(*meeting, options)
        if device is not None:
            group.eager_connect_single_device(device)  # or its memory would appear with the first use
        return group

    def _meeting(self, kind: GroupKind, ranks: Sequence[int], what: str) -> tuple[Any, int, int]:
        """Store, own place and size. The lowest rank makes the prefix unique among groups of one kind: disjoint."""
        store = _c10d.PrefixStore(f"{kind.value}/{min(ranks)}/{what}", self._store)
        return store, tuple(ranks).index(self._rank), len(ranks)

    def _wrapped(self, backend: Any, kind: GroupKind, ranks: Sequence[int]) -> ProcessGroup:
        return ProcessGroup(backend, kind, ranks, self._rank)


def _open_store(rank: int, size: int, init_method: str, timeout: timedelta) -> Any:
    """The store of an init method. Over TCP rank 0 serves it, on the socket that was bound for it if there is one."""
    listener = listener_of(init_method)
    if listener is None:
        return next(_c10d.rendezvous(init_method, rank, size, timeout=timeout))[0]
    leader = urlsplit(init_method)
    # TCPStore takes the descriptor for its own, and closes it; the caller's stays the caller's.
    serving = {"is_master": True, "master_listen_fd": os.dup(listener)} if rank == 0 else {"is_master": False}
    return _c10d.TCPStore(leader.hostname, leader.port, size, timeout=timeout, wait_for_workers=False, **serving)


def _plugin(meeting: tuple[Any, int, int], backend: str, timeout: timedelta) -> Any:
    """Backends of other platforms: what they registered with torch.distributed."""
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise ConfigError(f"torch.distributed knows no backend {backend!r} for device groups")
    if plugin.extended_api:
        raise ConfigError(f"backend {backend!r} wants the options of a default process group; not supported")
    return plugin.creator_fn(*meeting, timeout)


def _gloo_device(init_method: str, one_machine: bool) -> Any:
    """The one listener for all gloo groups of this process."""
    make = _c10d.ProcessGroupGloo.create_device
    if one_machine:
        return make(interface=_LOOPBACK)
    address = None if "GLOO_SOCKET_IFNAME" in os.environ else own_address(init_method)
    return _c10d.ProcessGroupGloo.create_default_device() if address is None else make(hostname=address)


_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy: the backends take the memory of any other for a contiguous one's."""
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def _known(options: Mapping[str, Any], op: str) -> Any:
    try:
        return options[op]
    except KeyError:
        raise ValueError(f"{op!r} is no reduction; there are {', '.join(_OPS)}") from None


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
