"""Handles of queues that are closed, were used, or lack something: an error, and never another queue."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from drumline.errors import ChannelClosedError
from drumline.transport import MessageQueue, QueueHandle

from .procs import children

LONG = 30.0
LOCALHOST = "127.0.0.1"


def test_a_handle_of_a_closed_queue_never_opens_another_one() -> None:
    first = MessageQueue(1, 1, host=LOCALHOST, name="first")
    stale = first.handles
    first.close(0)
    with MessageQueue(1, name="second") as second:
        second.enqueue("for its own reader")
        before = len(list(Path("/proc/self/fd").iterdir()))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for handle in stale:
                for use in (MessageQueue.attach, lambda h: h.send(ours), lambda h: h.fds):
                    with pytest.raises(ChannelClosedError, match="first: this queue was closed"):
                        use(handle)  # type: ignore[operator]
            ours.close()
            assert theirs.recv(1) == b""
        with pytest.raises(ChannelClosedError, match="first: this queue is closed"):
            _ = first.handles
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        with MessageQueue.attach(second.handles[0]) as reader:
            assert reader.dequeue(LONG) == "for its own reader"


def test_a_forked_child_may_open_its_handle_after_the_parent_has_closed() -> None:
    queue = MessageQueue(1)
    handle = queue.handles[0]
    closed, told = os.pipe()

    def read() -> None:
        os.read(closed, 1)
        with MessageQueue.attach(handle) as reader:
            assert list(reader) == ["sent"]

    with children() as start:
        child = start(read)
        queue.enqueue("sent")
        queue.close()
        os.write(told, b"x")
        assert child.join() == 0
    os.close(closed)
    os.close(told)


@pytest.mark.parametrize(("local", "remote"), [(1, 0), (0, 1)], ids=["local", "remote"])
def test_a_forked_child_cannot_go_on_with_its_parents_ends(local: int, remote: int) -> None:
    with (
        MessageQueue(local, remote, host=LOCALHOST if remote else "") as queue,
        children() as start,
        MessageQueue.attach(queue.handles[0]) as reader,
    ):
        queue.enqueue(1, LONG)

        def use() -> None:
            for call in (lambda: queue.enqueue("child's"), lambda: reader.dequeue(LONG), lambda: list(reader)):
                with pytest.raises(ChannelClosedError, match=f"that of process {parent}.* forked child"):
                    call()
            reader.close()
            queue.close()

        parent = os.getpid()
        assert start(use).join() == 0
        queue.enqueue(2, LONG)
        assert [reader.dequeue(LONG), reader.dequeue(LONG)] == [1, 2]


def test_a_forked_child_may_take_a_handle_of_its_parents_queue() -> None:
    with MessageQueue(1) as queue, children() as start:

        def read() -> None:
            with MessageQueue.attach(queue.handles[0]) as reader:
                assert reader.dequeue(LONG) == "sent"

        child = start(read)
        queue.enqueue("sent")
        assert child.join() == 0


def test_a_handle_that_was_used_or_lacks_its_descriptors_says_so() -> None:
    with MessageQueue(1) as queue:
        handle = queue.handles[0]
        bare = QueueHandle.from_bytes(handle.to_bytes())
        with pytest.raises(ValueError, match=r"has 0 descriptors.*from_bytes\(data, fds\)"):
            MessageQueue.attach(bare)
        MessageQueue.attach(handle).close()
        with pytest.raises(ChannelClosedError, match="was used: each opens one reader"):
            MessageQueue.attach(handle)


def test_nobody_lags_behind_in_a_closed_queue() -> None:
    queue = MessageQueue(1, 1, host=LOCALHOST)
    queue.close(0)
    assert queue.laggards() == []
