"""Where the ranks of one world first meet. No torch here.

On one machine the meeting place is two memfds: nothing to name, nothing left behind after a kill, no port that could
be taken between probing and binding.

* The *memory* is what ranks do their collectives through (:mod:`drumline.parallel.shm`) and send to the next pipeline
  stage (:mod:`drumline.parallel.mail`), and all they need on CPUs.
* The *store* is a file store for what torch makes itself (NCCL). torch opens it by path,
  ``/proc/self/fd/N``, once for each operation.

Both descriptors must stay open under the same numbers until the groups are made (the store: as long as they live).
Numbers may differ between processes, so each makes its own init method with :func:`file_init_method`; the memory is
in it as ``?shm=N``, which torch ignores, so that a worker class that knows only torch can use it too.

A platform whose communicators need a TCP store (``Platform.needs_tcp_store``) gets a listening socket in place of the
store's memfd: bound by whoever makes the meeting place, on loopback and a port that the kernel chooses, and then
published, so nobody can take the port between. Rank 0 serves the store on that very socket, which is in its init method
as ``listen=N``. Each rank finds out by itself which of the two it was given.

A meeting place is good for one world only: what a former world left in it would be taken for the new one's. A
restarted engine makes a new one.

Between machines it is TCP to the leader: :func:`tcp_init_method`, likewise with a socket that is bound first
(:func:`bind_store`) where the leader has one. Whoever reaches that port can take part: the
network between the machines must be private. A machine's own address is the one from which its route to the leader
starts (:func:`own_address`): names and interfaces may be many, that one is known to work.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from drumline.config import ParallelConfig
from drumline.errors import ConfigError
from drumline.parallel.boxes import Boxes
from drumline.transport.memory import memfd


@dataclass(frozen=True)
class Rendezvous:
    """The meeting place of one world, in the process that made it. Closed there once the ranks have it."""

    store: int
    """A memfd, or a listening socket."""
    memory: int

    @property
    def fds(self) -> tuple[int, int]:
        """What to pass to the ranks; they hand it to :func:`init_method_for`."""
        return self.store, self.memory

    @property
    def init_method(self) -> str:
        """Init method for processes in which the descriptors have these numbers, such as forked children."""
        return _init_method(self.fds)

    def close(self) -> None:
        """Close the descriptors. The ranks have theirs."""
        for fd in self.fds:
            os.close(fd)


def create_rendezvous(ranks: int, name: str = "drumline-rendezvous", *, tcp: bool = False) -> Rendezvous:
    """A new meeting place for the ``ranks`` ranks of one world on this machine. Descriptors are close-on-exec.

    ``tcp``: its store is one that rank 0 serves on loopback.
    """
    store = bind_store().detach() if tcp else memfd(name)
    try:
        return Rendezvous(store, memfd(f"{name}-memory", Boxes(ranks).total_bytes))
    except BaseException:
        os.close(store)
        raise


def bind_store(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that listens for ranks that want the store; port 0: one that is free. OSError if it is taken.

    What to publish then is its ``getsockname()``; what rank 0 gets is :func:`tcp_init_method` with its descriptor.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def file_init_method(store: int, memory: int | None = None) -> str:
    """Init method of a process that has the meeting place as these descriptors; without memory all goes over torch."""
    return f"file:///proc/self/fd/{store}" + ("" if memory is None else f"?shm={memory}")


def memory_of(init_method: str) -> int | None:
    """Descriptor of the memory in an init method; None if it has none."""
    return _number("shm", init_method)


def listener_of(init_method: str) -> int | None:
    """Descriptor of the bound socket of a TCP store in an init method; None if it has none."""
    return _number("listen", init_method)


def _number(name: str, init_method: str) -> int | None:
    found = parse_qs(urlsplit(init_method).query).get(name)
    return int(found[0]) if found else None


def collective_backend(device_backend: str, init_method: str) -> str:
    """Name of what moves the tensors of device groups: the platform's, or ``shm`` where that takes gloo's place."""
    return "shm" if device_backend == "gloo" and memory_of(init_method) is not None else device_backend


def tcp_init_method(host: str, port: int, *, listen: int | None = None, memory: int | None = None) -> str:
    """Init method over TCP; rank 0 listens on ``host``. IPv6 addresses get their brackets.

    ``listen``: descriptor of the socket that is bound there already, in rank 0's process (others ignore it).
    ``memory``: as in :func:`file_init_method`.
    """
    leader = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    found = {"listen": listen, "shm": memory}
    query = "&".join(f"{name}={fd}" for name, fd in found.items() if fd is not None)
    return f"{leader}?{query}" if query else leader


def own_address(init_method: str) -> str | None:
    """This machine's address on the route to the leader of a TCP init method; None for other methods.

    Asks the routing table only: connecting a datagram socket sends nothing. OSError if there is no route.
    """
    leader = urlsplit(init_method)
    if leader.scheme != "tcp" or leader.hostname is None:
        return None
    family, kind, _, _, address = socket.getaddrinfo(leader.hostname, leader.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
    return own


def init_method_for(parallel: ParallelConfig, fds: Sequence[int]) -> str:
    """The init method of a worker: empty for world size 1, the memfds on one machine, else the leader's address."""
    if parallel.world_size == 1 and not parallel.spans_engines:
        return ""
    if parallel.nnodes_within_dp > 1:
        return tcp_init_method(parallel.master_addr, parallel.master_port)
    if not fds:
        raise ConfigError("workers of one machine need the descriptors of their rendezvous")
    return _init_method(fds)


def _init_method(fds: Sequence[int]) -> str:
    """Of a process in which store and memory have these numbers."""
    store, memory = fds
    if not stat.S_ISSOCK(os.fstat(store).st_mode):
        return file_init_method(store, memory)
    with socket.socket(fileno=os.dup(store)) as listener:
        host, port = listener.getsockname()[:2]
    return tcp_init_method(host, port, listen=store, memory=memory)
