"""Where the ranks of one world first meet. No torch here.

On one machine the meeting place is a file store in a memfd: nothing to name, nothing left behind after a kill, no
port that could be taken between probing and binding. torch opens it by path, ``/proc/self/fd/N``, once for each
operation, so the descriptor must stay open (under the same number) as long as the groups live, and descriptors of
different processes may have different numbers: each makes its own init method with :func:`file_init_method`.

A memfd is good for one world only: keys of a former world would be taken for the new one's. A restarted engine makes
a new one.

Between machines it is TCP to the leader: :func:`tcp_init_method`. Whoever reaches that port can take part: the
network between the machines must be private. A machine's own address is the one from which its route to the leader
starts (:func:`own_address`): names and interfaces may be many, that one is known to work.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from drumline.config import ParallelConfig
from drumline.errors import ConfigError
from drumline.transport.memory import memfd


def create_rendezvous(name: str = "drumline-rendezvous") -> tuple[int, str]:
    """A new meeting place for the ranks of one world on this machine.

    Returns (fd, init_method). The fd is close-on-exec; it is passed to the workers and closed by whoever created it
    once they have it. ``init_method`` holds for processes in which the descriptor has this number.
    """
    fd = memfd(name)
    return fd, file_init_method(fd)


def file_init_method(fd: int) -> str:
    """Init method of a process that has the meeting place as descriptor ``fd``."""
    return f"file:///proc/self/fd/{fd}"


def tcp_init_method(host: str, port: int) -> str:
    """Init method over TCP; rank 0 listens on ``host``. IPv6 addresses get their brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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


def init_method_for(parallel: ParallelConfig, fd: int | None) -> str:
    """The init method of a worker: empty for world size 1, the memfd on one machine, else the leader's address."""
    if parallel.world_size == 1:
        return ""
    if parallel.nnodes_within_dp > 1:
        return tcp_init_method(parallel.master_addr, parallel.master_port)
    if fd is None:
        raise ConfigError("workers of one machine need the descriptor of their rendezvous")
    return file_init_method(fd)
