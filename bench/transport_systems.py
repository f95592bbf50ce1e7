"""What `transport.py` compares: a class for each way to get an object from a process to n others and an answer back.

``__init__`` opens the driver's side. Workers are forked right after the import of what the system needs and before
anything of it is opened; ``opened`` gives a worker how it receives and how it answers.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from driver import decode_fields, drumline_plan, main, make_payload, vllm_step

Ends = tuple[Callable[[], Any], Callable[[Any], Any]]
_PR_SET_PDEATHSIG = 1
ANSWER = ("done", 1)


def touch(obj: Any) -> None:
    """What the worker does with a message: look at both ends of the array; with TOUCH, at every page."""
    array = obj.get("array") if type(obj) is dict else None
    if array is not None:
        assert array[-1] == len(array) - 1
        if "TOUCH" in os.environ:
            array[::512].sum()


def work(rank: int, receive: Callable[[], Any], answer: Callable[[Any], Any]) -> None:
    """A tuple is an order: whether every worker answers, or the end. Nothing keeps a message while it waits."""

    def one(obj: Any) -> bool | None:
        if type(obj) is tuple:
            return bool(obj[0])
        touch(obj)
        if rank == 0 or every:
            answer(ANSWER)
        return every

    every: bool | None = False
    while every is not None:
        every = one(receive())


class Base:
    """Driver's side: ``send`` to all and take ``answers``."""

    imports: tuple[str, ...] = ()

    def __init__(self, n: int) -> None:
        self.n = n
        self.folder = Path(tempfile.mkdtemp())
        for name in self.imports:
            __import__(name)
        self._every = False
        self.sockets: list[socket.socket] = []
        self.pids: list[int] = []
        for rank in range(n):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                self._worker(rank, theirs)
            theirs.close()
            self.sockets.append(ours)
            self.pids.append(pid)

    def _worker(self, rank: int, sock: socket.socket) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        code = 1
        try:
            work(rank, *self.opened(rank, sock))
            code = 0
        except BaseException:  # noqa: BLE001  printed, and the exit code tells
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def opened(self, rank: int, sock: socket.socket) -> Ends:
        raise NotImplementedError

    def send(self, obj: Any) -> None:
        raise NotImplementedError

    def answers(self, ranks: Sequence[int]) -> None:
        raise NotImplementedError

    def payload(self, name: str) -> Any:
        return decode_fields() if name == "decode" else make_payload(name)

    def call(self, payload: Any, every: bool) -> None:
        if every is not self._every:
            self._every = every
            self.send((every,))
        self.send(payload)
        self.answers(range(self.n) if every else (0,))

    def close(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)


class Drumline(Base):
    imports = ("drumline.transport", "drumline.worker.wire", "numpy")

    def __init__(self, n: int) -> None:
        from drumline.transport import MessageQueue, QueueHandle
        from drumline.worker.wire import make_codec

        self._codec = make_codec()
        super().__init__(n)
        self._queue = MessageQueue(n, codec=self._codec)
        for sock, handle in zip(self.sockets, self._queue.handles, strict=True):
            handle.send(sock)
        self._answers = [MessageQueue.attach(QueueHandle.receive(sock), self._codec) for sock in self.sockets]

    def opened(self, rank: int, sock: socket.socket) -> Ends:
        from drumline.transport import MessageQueue, QueueHandle

        reader = MessageQueue.attach(QueueHandle.receive(sock), self._codec)
        answers = MessageQueue(1, codec=self._codec)
        answers.handles[0].send(sock)
        return reader.dequeue, answers.enqueue

    def send(self, obj: Any) -> None:
        self._queue.enqueue(obj)

    def answers(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._answers[rank].dequeue()

    def payload(self, name: str) -> Any:
        return drumline_plan() if name == "decode" else make_payload(name)


class Pipes(Base):
    """multiprocessing's; pickled once for all workers."""

    imports = ("numpy",)

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._pipes = [Connection(sock.detach()) for sock in self.sockets]

    def opened(self, rank: int, sock: socket.socket) -> Ends:
        pipe = Connection(sock.detach())
        return pipe.recv, pipe.send

    def send(self, obj: Any) -> None:
        data = pickle.dumps(obj, protocol=5)
        for pipe in self._pipes:
            pipe.send_bytes(data)

    def answers(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._pipes[rank].recv()


class Zmq(Base):
    """PUSH to each worker over ipc, one PULL for the answers; pickled once, buffers as frames of their own."""

    imports = ("zmq", "numpy")

    def __init__(self, n: int) -> None:
        super().__init__(n)
        import zmq

        context = zmq.Context()
        self._pull = context.socket(zmq.PULL)
        self._pull.bind(self._url("answers"))
        self._push = [context.socket(zmq.PUSH) for _ in range(n)]
        for rank, push in enumerate(self._push):
            push.bind(self._url(rank))
        for sock in self.sockets:
            sock.sendall(b"x")

    def _url(self, name: object) -> str:
        return f"ipc://{self.folder}/{name}"

    def opened(self, rank: int, sock: socket.socket) -> Ends:
        import zmq

        sock.recv(1)
        context = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.connect(self._url(rank))
        push.connect(self._url("answers"))

        def receive() -> Any:
            first, *rest = pull.recv_multipart(copy=False)
            return pickle.loads(first.buffer, buffers=[frame.buffer for frame in rest])

        return receive, push.send_pyobj

    def send(self, obj: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        frames: list[Any] = [pickle.dumps(obj, protocol=5, buffer_callback=buffers.append), *(b.raw() for b in buffers)]
        for push in self._push:
            push.send_multipart(frames, copy=not buffers)

    def answers(self, ranks: Sequence[int]) -> None:
        for _ in ranks:
            self._pull.recv_pyobj()


class Gloo(Base):
    """``broadcast_object_list`` of torch.distributed, answers by ``send_object_list``."""

    imports = ("torch.distributed", "numpy")

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._join(0)

    def _join(self, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", f"file://{self.folder}/store", timedelta(hours=1), self.n + 1, rank
        )

    def opened(self, rank: int, sock: socket.socket) -> Ends:
        from torch import distributed

        self._join(rank + 1)

        def receive() -> Any:
            found: list[Any] = [None]
            distributed.broadcast_object_list(found, src=0)
            return found[0]

        return receive, lambda answer: distributed.send_object_list([answer], dst=0)

    def send(self, obj: Any) -> None:
        from torch import distributed

        distributed.broadcast_object_list([obj], src=0)

    def answers(self, ranks: Sequence[int]) -> None:
        from torch import distributed

        for rank in ranks:
            distributed.recv_object_list([None], src=rank + 1)


class Vllm(Base):
    """vLLM's MessageQueue, sized as its executor does; one back from each worker."""

    imports = ("vllm.distributed.device_communicators.shm_broadcast", "vllm.v1.core.sched.output", "numpy")

    def __init__(self, n: int) -> None:
        super().__init__(n)
        from vllm import envs
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        chunk = getattr(envs, "VLLM_MQ_MAX_CHUNK_BYTES_MB", 16) << 20
        self._queue = MessageQueue(n, n, max_chunk_bytes=chunk, connect_ip="127.0.0.1")
        pipes = [Connection(sock.detach()) for sock in self.sockets]
        for pipe in pipes:
            pipe.send(self._queue.export_handle())
        self._answers = [MessageQueue.create_from_handle(pipe.recv(), 0) for pipe in pipes]
        for queue in [self._queue, *self._answers]:
            queue.wait_until_ready()

    def opened(self, rank: int, sock: socket.socket) -> Ends:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        pipe = Connection(sock.detach())
        reader = MessageQueue.create_from_handle(pipe.recv(), rank)
        answers = MessageQueue(1, 1, connect_ip="127.0.0.1")
        pipe.send(answers.export_handle())
        reader.wait_until_ready()
        answers.wait_until_ready()
        return lambda: reader.dequeue(indefinite=True), answers.enqueue

    def send(self, obj: Any) -> None:
        self._queue.enqueue(obj)

    def answers(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._answers[rank].dequeue()

    def payload(self, name: str) -> Any:
        return vllm_step() if name == "decode" else make_payload(name)


class RayActors:
    """A method call on each actor; what has an array goes through the object store once."""

    def __init__(self, n: int) -> None:
        import ray

        ray.init("local", num_cpus=n, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)

        class Actor:
            def handle(self, obj: Any) -> Any:
                touch(obj)
                return ANSWER

        actor: Any = ray.remote(Actor)
        self._actors = [actor.remote() for _ in range(n)]
        self._ray = ray
        self._open()

    def _open(self) -> None:
        self._ray.get([actor.handle.remote(None) for actor in self._actors])

    def payload(self, name: str) -> Any:
        return decode_fields() if name == "decode" else make_payload(name)

    def call(self, payload: Any, every: bool) -> None:
        sent = self._ray.put(payload) if "array" in payload else payload
        answers = [actor.handle.remote(sent) for actor in self._actors]
        self._ray.get(answers if every else answers[0])

    def close(self) -> None:
        self._ray.shutdown()


class RayGraph(RayActors):
    """A compiled graph over the same actors. All of them answer, always."""

    def _open(self) -> None:
        from ray.dag import InputNode, MultiOutputNode

        with InputNode() as given:
            graph = MultiOutputNode([actor.handle.bind(given) for actor in self._actors])
        self._graph = graph.experimental_compile(_buffer_size_bytes=64 << 20)

    def call(self, payload: Any, every: bool) -> None:
        self._ray.get(self._graph.execute(payload))

    def close(self) -> None:
        self._graph.teardown()
        super().close()


SYSTEMS = {
    "drumline": Drumline,
    "pipes": Pipes,
    "zmq": Zmq,
    "gloo": Gloo,
    "vllm": Vllm,
    "ray": RayActors,
    "ray-graph": RayGraph,
}

if __name__ == "__main__":
    sys.exit(main(SYSTEMS))
