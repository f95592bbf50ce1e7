"""One writer, readers on this machine and over TCP: any Python object to several processes.

    python examples/message_queue.py

The local readers look at the array where it lies in shared memory; the remote one gets it over an encrypted
connection, here to this machine. Handles of local readers hold descriptors, so they go as arguments of a process (or
over a unix socket: QueueHandle.send); the one of a remote reader is bytes, with its secret key.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from drumline.errors import ChannelClosedError, QueueTimeoutError
from drumline.transport import MessageQueue, QueueHandle


def read(handle: QueueHandle, report: Connection) -> None:
    """A reader's process: sums what comes until the writer closes the queue."""
    with MessageQueue.attach(handle) as reader:
        total = 0.0
        for message in reader:
            if message["op"] == "sum":
                total += float(message["array"].sum())
                assert not message["array"].flags.writeable  # others look at the same memory: copy it to change it
        kind = "remote" if handle.is_remote else "local"
        report.send(f"{kind} reader {handle.index}: total {total:.0f}")


def all_readers(context: multiprocessing.context.SpawnContext) -> None:
    ours, theirs = context.Pipe(duplex=False)
    with MessageQueue(local_readers=2, remote_readers=1, host="127.0.0.1") as queue:
        readers = [context.Process(target=read, args=(handle, theirs)) for handle in queue.handles]
        for reader in readers:
            reader.start()
        array = np.ones(1_000_000)
        for step in range(10):
            array[:] = step  # as soon as enqueue has returned
            queue.enqueue({"op": "sum", "array": array}, timeout=30)
    for line in sorted(ours.recv() for _ in readers):
        print(line)
    for reader in readers:
        reader.join()


def stuck(handle: QueueHandle, report: Connection) -> None:
    """A reader's process that reads one message and then no more."""
    with MessageQueue.attach(handle) as reader:
        report.send(reader.dequeue())
        time.sleep(60)


def when_something_is_wrong(context: multiprocessing.context.SpawnContext) -> None:
    ours, theirs = context.Pipe(duplex=False)
    with MessageQueue(local_readers=1, slots=4) as queue:
        reader = context.Process(target=stuck, args=(queue.handles[0], theirs))
        reader.start()
        queue.enqueue("are you there?")
        assert ours.recv() == "are you there?"
        try:
            while True:
                queue.enqueue("a message", timeout=1)
        except QueueTimeoutError as error:
            print(str(error).replace(f"pid {reader.pid}", "pid ..."))
        reader.kill()
        try:
            while True:
                queue.enqueue("another one")
        except ChannelClosedError as error:
            print(str(error).replace(f"pid {reader.pid}", "pid ..."))
        reader.join()


def main() -> None:
    context = multiprocessing.get_context("spawn")
    all_readers(context)
    when_something_is_wrong(context)


if __name__ == "__main__":
    main()
