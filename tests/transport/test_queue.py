"""MessageQueue: objects to real processes, over shared memory and TCP."""

from __future__ import annotations

import errno
import functools
import gc
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.errors import ChannelClosedError, ConfigError, MessageTooLargeError, QueueTimeoutError, TransportError
from drumline.transport import CodecRegistry, MessageQueue, ProcessDeath, QueueHandle, QueueReader, RemoteOptions
from drumline.transport.links import attach_link, link_pair
from tests.stopped import stop

from .procs import Child, children

LONG = 30.0
LOCALHOST = "127.0.0.1"

kinds = pytest.mark.parametrize(("local", "remote"), [(1, 0), (0, 1), (2, 2)], ids=["local", "remote", "both"])


def make(local: int, n_remote: int, **more: Any) -> MessageQueue:
    return MessageQueue(local, n_remote, host=LOCALHOST if n_remote else "", **more)


def fill(queue: MessageQueue, timeout: float, most: int = 100) -> int:
    """Enqueue numbers until that raises, which it is expected to; how many went in is in ``filled``."""
    for number in range(most):
        filled[0] = number
        queue.enqueue(number, timeout)
    return most


filled = [0]


def run_reader(handle: QueueHandle, use: Callable[[QueueReader], None]) -> None:
    with MessageQueue.attach(handle) as reader:
        use(reader)


def thing(number: int) -> Any:
    rng = random.Random(number)
    size = rng.choice((0, 10, 3000, 3000, 40_000, 150_000))
    return {"number": number, "array": np.full(size, number % 251, np.uint8), "text": "x" * (size // 100)}


def check_things(reader: QueueReader, count: int) -> None:
    for number in range(count):
        got = reader.dequeue(LONG)
        want = thing(number)
        assert got["number"] == number
        assert (got["array"] == want["array"]).all()
        assert got["text"] == want["text"]
        if number % 97 == 0:
            time.sleep(0.005)  # so that the queue fills up
    with pytest.raises(ChannelClosedError, match="closed"):
        reader.dequeue(LONG)


@kinds
def test_every_reader_gets_every_object_in_order(local: int, remote: int) -> None:
    options = RemoteOptions(window_bytes=200_000)
    with make(local, remote, slot_bytes=4096, slots=50, remote=options) as queue, children() as start:
        readers = [start(run_reader, h, functools.partial(check_things, count=300)) for h in queue.handles]
        for number in range(300):
            queue.enqueue(thing(number), LONG)
        queue.close(LONG)
        assert [reader.join() for reader in readers] == [0] * (local + remote)


@kinds
def test_the_caller_may_change_its_buffers_after_enqueue(local: int, remote: int) -> None:
    with make(local, remote) as queue, children() as start:

        def use(reader: QueueReader) -> None:
            for value in range(20):
                small, large, data = reader.dequeue(LONG)
                assert (small == value).all()
                assert (large == value).all()
                assert data == bytearray([value] * 50)
                with pytest.raises(ValueError, match="read-only"):
                    large[0] = 1

        readers = [start(run_reader, h, use) for h in queue.handles]
        small, large, data = np.zeros(5), np.zeros(30_000), bytearray(50)
        for value in range(20):
            small[:] = large[:] = value
            data[:] = bytes([value] * 50)
            queue.enqueue((small, large, data), LONG)
            small[:] = large[:] = -1
            data[:] = bytes(50)
        assert [reader.join() for reader in readers] == [0] * (local + remote)


def test_an_object_is_encoded_once_however_many_readers_there_are() -> None:
    class Counted:
        times = 0

    codec = CodecRegistry()

    def encode(obj: Counted) -> list[bytes]:
        Counted.times += 1
        return [b"one"]

    codec.register(99, Counted, encode, bytes)
    with MessageQueue(3, 2, host=LOCALHOST, codec=codec) as queue:
        readers = [MessageQueue.attach(h, codec) for h in queue.handles]
        queue.enqueue(Counted(), LONG)
        assert [reader.dequeue(LONG) for reader in readers] == [b"one"] * 5
        assert Counted.times == 1
        for reader in readers:
            reader.close()


@kinds
def test_timeouts_say_who_has_not_read_and_since_when(local: int, remote: int) -> None:
    options = RemoteOptions(window_bytes=1 << 20 if local else 2000)
    with make(local, remote, slot_bytes=64, slots=4, remote=options) as queue:
        readers = [MessageQueue.attach(h) for h in queue.handles]
        for reader in readers:
            with pytest.raises(QueueTimeoutError, match=r"queue: the writer .* has sent nothing within 0.02 s"):
                reader.dequeue(0.02)
        with pytest.raises(TimeoutError) as caught:
            fill(queue, 0.1)
        number = filled[0]
        text = str(caught.value)
        assert "queue: no room within 0.1 s: " in text
        pattern = "remote reader 0 at 127.0.0.1" if not local else f"local reader 0 (pid {os.getpid()})"
        assert pattern in text
        assert f"has not read {number} message(s) for 0." in text
        for reader in readers[1:]:
            for i in range(number):
                assert reader.dequeue(LONG) == i
        with pytest.raises(QueueTimeoutError) as caught:
            queue.enqueue("still full", 0.1)
        assert f"{number} message(s)" in str(caught.value)
        assert "local reader 1" not in str(caught.value)
        assert readers[0].dequeue(LONG) == 0
        queue.enqueue("room", LONG)
        for reader in readers[1:]:
            assert reader.dequeue(LONG) == "room"  # nothing of what was refused
        for reader in readers:
            reader.close()


def test_a_long_wait_says_for_whom(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.transport.queue.LONG_WAIT_S", 0.2)
    monkeypatch.setattr("drumline.transport.waiter.RECHECK_S", 0.05)
    attached_read, attached_write = os.pipe()

    def wait(reader: QueueReader) -> None:
        os.write(attached_write, b"x")
        signal.pause()

    with MessageQueue(1, slot_bytes=64, slots=2) as queue, children() as start:
        child = start(run_reader, queue.handles[0], wait)
        assert os.read(attached_read, 1)
        stop(child.pid)
        with pytest.raises(QueueTimeoutError, match=rf"\(pid {child.pid}\) is stopped \(state T\) and has not read 2"):
            fill(queue, 0.5)
        lines = [r.getMessage() for r in caplog.records]
        assert len(lines) == 2
        for line in lines:
            assert re.match(rf"queue: no room for 0 s: local reader 0 \(pid {child.pid}\) is stopped", line)
    os.close(attached_read)
    os.close(attached_write)


def test_a_reader_that_never_came_is_named() -> None:
    with MessageQueue(1, 1, host=LOCALHOST, slot_bytes=64, slots=2, remote=RemoteOptions(window_bytes=600)) as queue:
        queue.enqueue(0)
        with pytest.raises(QueueTimeoutError, match=r"remote reader 0 has not read .* and has never connected"):
            queue.enqueue(1, 0.05)
        assert any("has never attached" in line for line in queue.laggards())
        queue.close(0)  # else it waits for the remote reader


@kinds
def test_closing_ends_the_readers_after_the_last_object(local: int, remote: int) -> None:
    with make(local, remote) as queue:
        readers = [MessageQueue.attach(h) for h in queue.handles]
        for number in range(5):
            queue.enqueue(number)
        closer = threading.Thread(target=queue.close)
        closer.start()
        assert [list(reader) for reader in readers] == [[0, 1, 2, 3, 4]] * (local + remote)
        closer.join()
        with pytest.raises(ChannelClosedError, match="this queue is closed"):
            queue.enqueue(1)
        for reader in readers:
            with pytest.raises(ChannelClosedError, match="has closed"):
                reader.dequeue()
            reader.close()
            with pytest.raises(ChannelClosedError, match="this reader is closed"):
                reader.dequeue()


@kinds
def test_a_reader_that_closes_is_known_at_once(local: int, remote: int) -> None:
    with make(local, remote, slot_bytes=64, slots=2, remote=RemoteOptions(window_bytes=1200)) as queue:
        readers = [MessageQueue.attach(h) for h in queue.handles]
        queue.enqueue(1)
        for reader in readers:
            reader.dequeue(LONG)
        timer = threading.Timer(0.05, readers[0].close)
        timer.start()
        with pytest.raises(ChannelClosedError, match=r"reader 0 .*has closed its end"):
            fill(queue, LONG)  # somewhere in there there is no room
        timer.join()
        for reader in readers:
            reader.close()


@pytest.mark.alone
def test_kill_of_a_reader_with_the_ring_full_is_known_within_100_ms() -> None:
    with MessageQueue(2, slot_bytes=64, slots=2) as queue, children() as start:
        attached_read, attached_write = os.pipe()

        def sleep(reader: QueueReader) -> None:
            os.write(attached_write, b"x")
            signal.pause()

        victim, other = (start(run_reader, h, sleep) for h in queue.handles)
        assert os.read(attached_read, 1)
        assert os.read(attached_read, 1)
        os.close(attached_read)
        os.close(attached_write)
        queue.enqueue(0)
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(victim.pid, signal.SIGKILL)

        timer = threading.Timer(0.1, kill)
        timer.start()
        with pytest.raises(ChannelClosedError, match=rf"local reader 0 \(pid {victim.pid}\) has died"):
            fill(queue, LONG)
        assert time.monotonic() - killed[0] < 0.1
        timer.join()
        other.kill()


@pytest.mark.alone
def test_kill_of_the_writer_wakes_sleeping_readers_within_100_ms() -> None:
    """Also where a reader was forked from the writer and so has copies of its descriptors."""
    report_read, report_write = os.pipe()

    def write() -> None:
        queue = MessageQueue(2, 0)

        def read(reader: QueueReader) -> None:
            assert reader.dequeue(LONG) == "hello"
            os.write(report_write, b"x" * 8)
            with pytest.raises(ChannelClosedError, match=r"the writer of queue \(pid \d+\) has died"):
                reader.dequeue(LONG)
            os.write(report_write, b"%08d" % int(time.monotonic() * 1000 % 1e8))

        for handle in queue.handles:
            Child(run_reader, handle, read)
        queue.enqueue("hello", LONG)
        signal.pause()

    with children() as start:
        writer = start(write)
        for _ in range(2):
            assert os.read(report_read, 8) == b"x" * 8
        time.sleep(0.05)
        killed = int(time.monotonic() * 1000 % 1e8)
        os.kill(writer.pid, signal.SIGKILL)
        for _ in range(2):
            assert int(os.read(report_read, 8)) - killed < 100
        os.close(report_read)
        os.close(report_write)


def test_what_a_dead_writer_has_written_is_read_before_its_death() -> None:
    ours, theirs = socket.socketpair()

    def write() -> None:
        queue = MessageQueue(1)
        queue.handles[0].send(theirs)
        for number in range(10):
            queue.enqueue(number)
        os._exit(0)

    with children() as start, ours, theirs:
        writer = start(write)
        handle = QueueHandle.receive(ours)
        writer.join()
        with MessageQueue.attach(handle) as reader:
            assert [reader.dequeue(LONG) for _ in range(10)] == list(range(10))
            with pytest.raises(ChannelClosedError, match=r"the writer of queue .* (has died|is gone)"):
                reader.dequeue(LONG)
            with pytest.raises(ChannelClosedError):
                list(reader)


def test_death_sources_end_a_wait_for_a_reader_that_never_attached() -> None:
    with children() as start:
        child = start(signal.pause)
        death = ProcessDeath(child.pid, "worker 7")
        with MessageQueue(1, slot_bytes=64, slots=2, deaths=[death]) as queue:
            queue.enqueue(1)
            threading.Timer(0.05, os.kill, (child.pid, signal.SIGKILL)).start()
            with pytest.raises(ChannelClosedError, match=rf"queue: worker 7 \(pid {child.pid}\) has died"):
                fill(queue, LONG)
        death.close()


def note_all(reader: QueueReader, seen: list[Any]) -> None:
    for obj in reader:
        seen.append(weakref.ref(obj))
        del obj


def test_a_payload_is_garbage_before_the_next_one_is_waited_for() -> None:
    for local, remote in ((1, 0), (0, 1)):
        with make(local, remote) as queue, MessageQueue.attach(queue.handles[0]) as reader:
            queue.enqueue(np.zeros(300_000, np.uint8), LONG)
            seen: list[Any] = []
            thread = threading.Thread(target=note_all, args=(reader, seen))
            thread.start()
            deadline = time.monotonic() + LONG
            while (not seen or seen[0]() is not None) and time.monotonic() < deadline:
                time.sleep(0.002)
            assert seen[0]() is None
            queue.close()
            thread.join()


class Explosive:
    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise KeyError("cannot be rebuilt here")


@kinds
def test_what_cannot_be_decoded_raises_there_and_the_next_one_is_read(local: int, remote: int) -> None:
    with make(local, remote, slot_bytes=256, slots=4) as queue:
        readers = [MessageQueue.attach(h) for h in queue.handles]
        for _ in range(10):
            queue.enqueue(Explosive(), LONG)
            queue.enqueue("next", LONG)
            for reader in readers:
                with pytest.raises(KeyError, match="cannot be rebuilt"):
                    reader.dequeue(LONG)
                assert reader.dequeue(LONG) == "next"
        with pytest.raises(TypeError, match="pickle"):
            queue.enqueue(sys._getframe())
        for reader in readers:
            reader.close()


def test_threads_may_enqueue_together() -> None:
    with MessageQueue(1, 1, host=LOCALHOST, slot_bytes=128, slots=8) as queue, children() as start:

        def use(reader: QueueReader) -> None:
            last = [-1] * 4
            for _ in range(800):
                who, number = reader.dequeue(LONG)
                assert number == last[who] + 1
                last[who] = number

        readers = [start(run_reader, h, use) for h in queue.handles]

        def write(who: int) -> None:
            for number in range(200):
                queue.enqueue((who, number), LONG)

        threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [reader.join() for reader in readers] == [0, 0]


def test_a_second_thread_waits_for_its_turn_until_its_deadline() -> None:
    with MessageQueue(1, slot_bytes=64, slots=2) as queue, MessageQueue.attach(queue.handles[0]) as reader:
        queue.enqueue(0)
        first = threading.Thread(target=lambda: [queue.enqueue(i, LONG) for i in range(1, 4)])
        first.start()
        time.sleep(0.05)
        with pytest.raises(QueueTimeoutError, match="another thread waits for room"):
            queue.enqueue("late", 0.05)
        assert [reader.dequeue(LONG) for _ in range(4)] == [0, 1, 2, 3]
        first.join()


def test_interrupted_waits_go_on() -> None:
    """A signal handler runs while dequeue sleeps, and the deadline holds."""
    noted: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda *_: noted.append(1))
    try:
        with MessageQueue(1) as queue, MessageQueue.attach(queue.handles[0]) as reader:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            begin = time.monotonic()
            with pytest.raises(QueueTimeoutError):
                reader.dequeue(0.2)
            assert noted
            assert 0.19 < time.monotonic() - begin < 2
    finally:
        signal.signal(signal.SIGUSR1, old)


# Handles.


def mp_reader(handle: QueueHandle, back: Any) -> None:
    with MessageQueue.attach(handle) as reader:
        back.send(reader.dequeue(LONG).sum())


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_handles_as_arguments_of_a_process() -> None:
    """Forked here; spawned in the example, whose interpreter ends and with it multiprocessing's resource tracker."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with MessageQueue(1, 1, host=LOCALHOST) as queue, ours, theirs:
        processes = [context.Process(target=mp_reader, args=(h, theirs)) for h in queue.handles]
        for process in processes:
            process.start()
        queue.enqueue(np.arange(100), LONG)
        for process in processes:
            process.join(LONG)
            assert process.exitcode == 0
            process.close()
        assert (ours.recv(), ours.recv()) == (4950, 4950)


def test_handles_over_a_unix_socket() -> None:
    ours, theirs = socket.socketpair()

    def read() -> None:
        handles = [QueueHandle.receive(theirs) for _ in range(2)]
        assert [h.is_remote for h in handles] == [False, True]
        assert theirs.recv(4) == b"more"
        readers = [MessageQueue.attach(h) for h in handles]
        assert [r.dequeue(LONG) for r in readers] == ["hello", "hello"]
        for reader in readers:
            reader.close()

    with MessageQueue(1, 1, host=LOCALHOST) as queue, children() as start, ours, theirs:
        reader = start(read)
        for handle in queue.handles:
            handle.send(ours)
        ours.send(b"more")
        queue.enqueue("hello")
        assert reader.join() == 0


def test_the_handle_of_a_remote_reader_is_bytes() -> None:
    code = """if True:
        import sys
        from drumline.transport import MessageQueue, QueueHandle
        with MessageQueue.attach(QueueHandle.from_bytes(sys.stdin.buffer.read())) as reader:
            print(list(reader))
        assert "torch" not in sys.modules
    """
    with MessageQueue(0, 1, host=LOCALHOST) as queue:
        data = queue.handles[0].to_bytes()
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(data)
        process.stdin.close()
        queue.enqueue("over TCP")
        deadline = time.monotonic() + LONG
        while queue.laggards() and time.monotonic() < deadline and "never" in queue.laggards()[0]:
            time.sleep(0.01)
        queue.close()
        assert process.stdout is not None
        assert process.stdout.read() == b"['over TCP']\n"
        process.stdout.close()
        assert process.wait() == 0


def test_handles_say_what_is_wrong() -> None:
    with MessageQueue(1, 1, host=LOCALHOST) as queue:
        local, remote = queue.handles
        with pytest.raises(TypeError, match=r"hold.* descriptors"):
            pickle.dumps(local)
        assert pickle.loads(pickle.dumps(remote)).to_bytes() == remote.to_bytes()
        secret = remote.data.remote
        assert secret is not None
        for text in (repr(remote), str(remote), repr(secret), repr(remote.data)):
            assert repr(secret.secret_key)[2:-1] not in text
            assert "secret" not in text
        one = MessageQueue.attach(local)
        with pytest.raises(TransportError, match="is in use already"):
            MessageQueue.attach(queue.handles[0])
        one.close()
    for sent, error in ((b"", ChannelClosedError), (b"\xff\xff\xff\xff", TransportError)):
        a, b = socket.socketpair()
        with b:
            a.sendall(sent)
            a.close()
            with pytest.raises(error):
                QueueHandle.receive(b)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"local_readers": 0}, "has readers"),
        ({"local_readers": 255}, "at most 254"),
        ({"slots": 0}, "at least one slot"),
        ({"slots": 1 << 40}, "slots is at most"),
        ({"slots": 1 << 30, "slot_bytes": 1 << 30}, "slots times slot_bytes is at most"),
        ({"slot_bytes": 1.5}, "slot_bytes is a whole number"),
        ({"local_readers": "2"}, "local_readers is a whole number"),
        ({"local_readers": True}, "local_readers is a whole number"),
        ({"arena_bytes": -5}, "arena_bytes is 0 to"),
        ({"arena_bytes": 1 << 60}, "arena_bytes is 0 to"),
        ({"arena_bytes": 1.5}, "arena_bytes is a whole number"),
        ({"port": 70000, "remote_readers": 1, "host": LOCALHOST}, "port is 0 to 65535"),
        ({"name": "n" * 300}, "name is at most 200 bytes"),
        ({"name": "a\0b"}, "without NUL"),
        ({"slot_bytes": 0, "remote_readers": 1, "host": LOCALHOST}, "at least one slot"),
        ({"remote_readers": -1}, "has readers"),
        ({"remote_readers": 1}, "need host"),
        ({"remote_readers": 1, "host": "0.0.0.0"}, "would listen on all"),
        ({"remote_readers": 1, "host": "::"}, "would listen on all"),
        ({"remote_readers": 1, "host": "*"}, "would listen on all"),
        ({"remote_readers": 1, "host": "no.such.host.invalid"}, "has no address"),
        ({"remote_readers": 1, "host": "192.0.2.1"}, "cannot listen on tcp://192.0.2.1:0"),
    ],
)
def test_impossible_queues(arguments: dict[str, Any], match: str) -> None:
    before = open_descriptors()
    with pytest.raises(ConfigError, match=match):
        MessageQueue(**arguments)
    gc.collect()
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"window_bytes": 1e9}, "window_bytes is a whole number"),
        ({"max_message_bytes": float("inf")}, "max_message_bytes is a whole number"),
        ({"max_message_bytes": 1 << 70}, "max_message_bytes is 1 to"),
        ({"heartbeat_s": float("inf")}, "heartbeat_s is at most"),
        ({"reconnect_s": float("nan")}, "reconnect_s is a number of seconds"),
        ({"connect_s": "5"}, "connect_s is a number of seconds"),
    ],
)
def test_impossible_options(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        RemoteOptions(**arguments)


def test_too_few_descriptors_leave_none_open() -> None:
    """Whichever is the one that cannot be had, of the writer's and of the reader's."""

    def try_all() -> None:
        def make_both() -> None:
            with MessageQueue(2) as queue, MessageQueue.attach(queue.handles[0]) as reader:
                queue.enqueue(1)
                assert reader.dequeue(LONG) == 1

        make_both()
        gc.collect()
        before = open_descriptors()
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        failed = 0
        for limit in range(3, highest + 60):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            try:
                make_both()
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                failed += 1
                del error
            else:
                break
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            gc.collect()
            assert open_descriptors() == before, f"of {limit}"
        assert 10 < failed < highest + 57

    with children() as start:
        assert start(try_all).join() == 0


def test_too_large_for_the_remote_limit_and_nothing_was_sent() -> None:
    with MessageQueue(1, 1, host=LOCALHOST, remote=RemoteOptions(max_message_bytes=5000)) as queue:
        readers = [MessageQueue.attach(h) for h in queue.handles]
        with pytest.raises(MessageTooLargeError, match="max_message_bytes of this queue is 5000"):
            queue.enqueue(bytes(6000))
        queue.enqueue("fits")
        for reader in readers:
            assert reader.dequeue(LONG) == "fits"
            reader.close()


def test_a_forked_copy_of_the_writer_closes_nothing() -> None:
    with MessageQueue(1, 1, host=LOCALHOST) as queue, children() as start:
        readers = [MessageQueue.attach(h) for h in queue.handles]
        assert start(queue.close).join() == 0
        queue.enqueue("still here")
        for reader in readers:
            assert reader.dequeue(LONG) == "still here"
            reader.close()


def test_a_program_that_never_closes_ends_quietly() -> None:
    code = """if True:
        from drumline import MessageQueue
        queue = MessageQueue(1, 1, host="127.0.0.1")
        readers = [MessageQueue.attach(h) for h in queue.handles]
        queue.enqueue("x")
        print([reader.dequeue(30) for reader in readers])
    """
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['x', 'x']\n", "")
    assert time.monotonic() - begin < 10


def test_forever_is_a_timeout_too() -> None:
    with MessageQueue(1, 1, host=LOCALHOST, remote=RemoteOptions(connect_s=1e12)) as queue:
        readers = [MessageQueue.attach(h) for h in queue.handles]
        queue.enqueue("x", 1e12)
        for timeout in (1e8, float("inf")):
            queue.enqueue("x", timeout)
        for reader in readers:
            assert [reader.dequeue(t) for t in (1e8, 1e12, float("inf"))] == ["x"] * 3
            reader.close()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_thread_and_no_descriptor_is_left() -> None:
    before = open_descriptors()
    for _ in range(3):
        with MessageQueue(2, 1, host=LOCALHOST) as queue:
            readers = [MessageQueue.attach(h) for h in queue.handles]
            queue.enqueue(1)
            for reader in readers:
                assert reader.dequeue(LONG) == 1
                reader.close()
    gc.collect()
    assert open_descriptors() == before
    assert not [t for t in threading.enumerate() if "drumline" in t.name]


@pytest.mark.parametrize("first", ["writer", "reader"])
def test_a_close_is_known_as_such_also_by_who_was_not_heard(first: str) -> None:
    """Who closes may not have read what the other side said last: the kernel tells that (ECONNRESET) before the news of
    the close."""
    ours, theirs = link_pair("a reader")
    other = attach_link(theirs.detach(), "a writer")
    closing, staying = (ours, other) if first == "writer" else (other, ours)
    if first == "reader":
        staying.greet()
    closing.close()
    try:
        assert staying.look(())
        assert staying.closed
        assert "has closed its end" in staying.over
    finally:
        staying.close()
