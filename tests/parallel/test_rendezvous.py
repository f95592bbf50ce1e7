from __future__ import annotations

import os
from pathlib import Path

import pytest

from drumline.config import ParallelConfig
from drumline.errors import ConfigError
from drumline.parallel.rendezvous import (
    create_rendezvous,
    file_init_method,
    init_method_for,
    own_address,
    tcp_init_method,
)


def test_meeting_place_is_a_close_on_exec_memfd_without_a_name_in_the_file_system() -> None:
    fd, method = create_rendezvous()
    try:
        assert method == file_init_method(fd) == f"file:///proc/self/fd/{fd}"
        assert not os.get_inheritable(fd)
        assert "memfd:" in str(Path(f"/proc/self/fd/{fd}").readlink())
    finally:
        os.close(fd)


def test_tcp_addresses() -> None:
    assert tcp_init_method("10.0.0.1", 29501) == "tcp://10.0.0.1:29501"
    assert tcp_init_method("fd00::1", 29501) == "tcp://[fd00::1]:29501"


def test_own_address_is_that_of_the_route_to_the_leader() -> None:
    assert own_address("tcp://127.0.0.1:29501") == "127.0.0.1"
    assert own_address("file:///proc/self/fd/3") is None
    if (
        Path("/proc/net/if_inet6").exists()
        and "00000000000000000000000000000001" in Path("/proc/net/if_inet6").read_text()
    ):
        assert own_address("tcp://[::1]:29501") == "::1"


def test_init_method_of_a_worker() -> None:
    assert init_method_for(ParallelConfig(), None) == ""
    assert init_method_for(ParallelConfig(tensor_parallel_size=2), 7) == "file:///proc/self/fd/7"
    with pytest.raises(ConfigError):
        init_method_for(ParallelConfig(tensor_parallel_size=2), None)
    several = ParallelConfig(tensor_parallel_size=2, nnodes=2, master_addr="fd00::1", master_port=3)
    assert init_method_for(several, None) == "tcp://[fd00::1]:3"
