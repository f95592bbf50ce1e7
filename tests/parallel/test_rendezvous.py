from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from drumline.config import ParallelConfig
from drumline.errors import ConfigError
from drumline.parallel.boxes import LINE, SLOT_BYTES, SLOTS, Boxes
from drumline.parallel.layout import GroupKind
from drumline.parallel.rendezvous import (
    bind_store,
    collective_backend,
    create_rendezvous,
    file_init_method,
    init_method_for,
    listener_of,
    memory_of,
    own_address,
    tcp_init_method,
)


def test_meeting_place_is_close_on_exec_memfds_without_a_name_in_the_file_system() -> None:
    place = create_rendezvous(3)
    try:
        assert place.init_method == file_init_method(*place.fds)
        assert place.init_method == f"file:///proc/self/fd/{place.store}?shm={place.memory}"
        for fd in place.fds:
            assert not os.get_inheritable(fd)
            assert "memfd:" in str(Path(f"/proc/self/fd/{fd}").readlink())
        memory = os.fstat(place.memory)
        assert memory.st_size == Boxes(3).total_bytes
        assert memory.st_blocks == 0  # it is taken when it is touched
    finally:
        place.close()


def test_memory_and_backend_of_an_init_method() -> None:
    assert memory_of("file:///proc/self/fd/7?shm=9") == 9
    assert memory_of("file:///proc/self/fd/7") is None
    assert memory_of("") is None
    assert collective_backend("gloo", "file:///proc/self/fd/7?shm=9") == "shm"
    assert collective_backend("gloo", "tcp://10.0.0.1:29501") == "gloo"
    assert collective_backend("nccl", "file:///proc/self/fd/7?shm=9") == "nccl"


@pytest.mark.parametrize("ranks", [1, 2, 5, 255])
def test_boxes_do_not_overlap(ranks: int) -> None:
    boxes = Boxes(ranks)
    control = {boxes.member_at(rank) for rank in range(ranks)}
    control |= {boxes.word_at(kind, rank) for kind in GroupKind for rank in range(ranks)}
    slots = {boxes.slot_at(kind, rank, p) for kind in GroupKind for rank in range(ranks) for p in range(SLOTS)}
    assert len(control) == ranks * (1 + len(GroupKind))
    assert len(slots) == ranks * SLOTS * len(GroupKind)
    assert all(at % LINE == 0 for at in control)
    assert max(control) + LINE <= min(slots)
    assert all(at % 4096 == 0 for at in slots)
    assert all(b - a >= SLOT_BYTES for a, b in itertools.pairwise(sorted(slots)))
    assert max(slots) + SLOT_BYTES == boxes.mail_at(0)
    assert boxes.mail_at(ranks) == boxes.total_bytes


def test_tcp_addresses() -> None:
    assert tcp_init_method("10.0.0.1", 29501) == "tcp://10.0.0.1:29501"
    assert tcp_init_method("fd00::1", 29501) == "tcp://[fd00::1]:29501"


def test_tcp_store_is_bound_before_it_is_published() -> None:
    place = create_rendezvous(2, tcp=True)
    try:
        leader = urlsplit(place.init_method)
        assert (leader.scheme, leader.hostname) == ("tcp", "127.0.0.1")
        assert (listener_of(place.init_method), memory_of(place.init_method)) == place.fds
        assert not any(os.get_inheritable(fd) for fd in place.fds)
        with pytest.raises(OSError, match="Address already in use"):
            bind_store("127.0.0.1", leader.port or 0)
        socket.create_connection(("127.0.0.1", leader.port or 0)).close()  # it listens already
    finally:
        place.close()
    assert listener_of("tcp://10.0.0.1:29501") is None


def test_own_address_is_that_of_the_route_to_the_leader() -> None:
    assert own_address("tcp://127.0.0.1:29501") == "127.0.0.1"
    assert own_address("file:///proc/self/fd/3") is None
    if (
        Path("/proc/net/if_inet6").exists()
        and "00000000000000000000000000000001" in Path("/proc/net/if_inet6").read_text()
    ):
        assert own_address("tcp://[::1]:29501") == "::1"


def test_init_method_of_a_worker() -> None:
    assert init_method_for(ParallelConfig(), ()) == ""
    for tcp in (False, True):
        place = create_rendezvous(2, tcp=tcp)
        try:
            assert init_method_for(ParallelConfig(tensor_parallel_size=2), place.fds) == place.init_method
        finally:
            place.close()
    with pytest.raises(ConfigError):
        init_method_for(ParallelConfig(tensor_parallel_size=2), ())
    several = ParallelConfig(tensor_parallel_size=2, nnodes=2, master_addr="fd00::1", master_port=3)
    assert init_method_for(several, (7, 9)) == "tcp://[fd00::1]:3"
