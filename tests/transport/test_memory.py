"""memfds: what they are, what the kernel may demand, and that nothing keeps them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from drumline.errors import ChannelClosedError
from drumline.transport.memory import SharedMemory, memfd

from .procs import children


def test_create_and_attach_share_bytes() -> None:
    one = SharedMemory.create(5000, "some")
    two = SharedMemory.attach(one.fd)
    assert (one.size, two.size, two.fd) == (5000, 5000, -1)
    one.buf[4999] = 7
    assert two.buf[4999] == 7
    one.close()
    assert two.buf[4999] == 7
    two.close()
    two.close()
    with pytest.raises(ChannelClosedError):
        two.mapping()


def test_a_child_that_inherited_the_descriptor_shares_it() -> None:
    memory = SharedMemory.create(64)

    def child() -> None:
        mine = SharedMemory.attach(memory.fd, 64)
        mine.buf[:5] = b"hello"

    with children() as start:
        assert start(child).join() == 0
    assert bytes(memory.buf[:5]) == b"hello"
    memory.close()


def test_it_is_closed_on_exec_not_executable_and_of_fixed_size() -> None:
    fd = memfd("fixed", 100)
    try:
        assert not os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 10)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1000)
        assert "memfd:fixed" in str(Path(f"/proc/self/fd/{fd}").readlink())
    finally:
        os.close(fd)


def test_without_a_size_it_may_grow() -> None:
    fd = memfd("rendezvous")
    try:
        os.write(fd, b"x" * 10)
        assert os.fstat(fd).st_size == 10
    finally:
        os.close(fd)


@pytest.mark.parametrize("knows_the_flag", [True, False])
def test_kernels_that_demand_noexec_and_kernels_that_do_not_know_it(
    monkeypatch: pytest.MonkeyPatch, knows_the_flag: bool
) -> None:
    real = os.memfd_create
    asked: list[int] = []

    def kernel(name: str, flags: int) -> int:
        asked.append(flags)
        if knows_the_flag and not flags & 8:
            raise PermissionError(errno.EACCES, "vm.memfd_noexec=2")
        if not knows_the_flag and flags & 8:
            raise OSError(errno.EINVAL, "before 6.3")
        return real(name, flags & ~8)

    monkeypatch.setattr(os, "memfd_create", kernel)
    os.close(memfd("any"))
    assert len(asked) == (1 if knows_the_flag else 2)


def test_failures_leave_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="no"):
            SharedMemory.create(100)
    with pytest.raises(ValueError, match="mmap"):
        SharedMemory.create(0)
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_attach_refuses_what_is_too_small() -> None:
    memory = SharedMemory.create(100)
    with pytest.raises(ChannelClosedError, match="100 bytes, 200 expected"):
        SharedMemory.attach(memory.fd, 200)
    memory.close()


def test_close_with_a_view_left_keeps_the_view_alive() -> None:
    memory = SharedMemory.create(100)
    view = memory.buf[10:20]
    memory.close()
    view[0] = 3
    assert view[0] == 3
