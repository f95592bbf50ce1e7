"""Real worker processes for tests: one host process imports everything once and forks ranks of any world size.

Test --(socket, pickle)--> host --(socketpair, pickle)--> ranks. A rank loads a model and then runs what it is told
(a method name and arguments of its ModelWorker); the host answers with all ranks' results. Ranks end when the host
ends, the host when the test closes its socket.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.config import EngineConfig


class RankHost:
    """The test's side."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        self._socket = mine
        self._socket.settimeout(100)
        root = Path(__file__).parents[2]
        environment = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{root / 'src'}:{root}"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.model.ranks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=root,
            )

    def start(self, config: EngineConfig, num_blocks: int, block_size: int) -> list[str]:
        """End the ranks before and start those of ``config``; their names. Those of all engines that talk to each
        other, one engine after the other."""
        return self._ask(("start", config, num_blocks, block_size))

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Results of all ranks. RuntimeError with a rank's traceback if one raises.

        ``method``: of the worker, or a function of a module, which gets the worker first.
        """
        return self._ask(("call", method, args))

    def each(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """As :meth:`call`, with a method and arguments for each rank."""
        return self._ask(("each", list(calls)))

    def stop(self) -> None:
        """End the ranks."""
        self._ask(("stop",))

    def close(self) -> None:
        """End the host and its ranks."""
        self._socket.close()
        self._process.wait(timeout=20)

    def _ask(self, message: Any) -> list[Any]:
        _send(self._socket, message)
        answers: list[Any] = _receive(self._socket)
        failed = [answer for answer in answers if isinstance(answer, str) and answer.startswith("Traceback")]
        if failed:
            raise RuntimeError("\n".join(failed))
        return answers


def _send(channel: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    channel.sendall(struct.pack("<Q", len(data)) + data)


def _receive(channel: socket.socket) -> Any:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = channel.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return data

    return pickle.loads(exactly(struct.unpack("<Q", exactly(8))[0]))


def _host(channel: socket.socket) -> None:
    import drumline.model.kernels.ready
    import drumline.model.worker  # noqa: F401  imported once, here
    from drumline.model.spec import read_spec

    ranks: list[tuple[int, socket.socket]] = []
    try:
        while True:
            kind, *message = _receive(channel)
            if kind == "start":
                _end(ranks)
                importlib.import_module(read_spec(message[0].model.path).modeling_module)
                ranks = _fork_ranks(channel, *message)
            elif kind == "each":
                for (_, rank), one in zip(ranks, message[0], strict=True):
                    _send(rank, one)
            elif kind == "stop":
                _end(ranks)
                ranks = []
            else:
                for _, rank in ranks:
                    _send(rank, tuple(message))
            _send(channel, [_answer(rank) for _, rank in ranks])
    except EOFError:
        pass
    finally:
        _end(ranks)


def _answer(rank: socket.socket) -> Any:
    try:
        return _receive(rank)
    except EOFError:
        return "Traceback: the rank ended"


def _end(ranks: list[tuple[int, socket.socket]]) -> None:
    for _, channel in ranks:
        channel.close()
    for pid, _ in ranks:
        os.waitpid(pid, 0)


def _fork_ranks(host: socket.socket, config: EngineConfig, blocks: int, size: int) -> list[tuple[int, socket.socket]]:
    from drumline.parallel.rendezvous import create_rendezvous

    engines = config.parallel.data_parallel_size if config.parallel.spans_engines else 1
    world = config.parallel.world_size
    rendezvous = create_rendezvous(engines * world)
    ranks: list[tuple[int, socket.socket]] = []
    for place in range(engines * world):
        engine, rank = divmod(place, world)
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for channel in (host, mine, *(channel for _, channel in ranks)):
                channel.close()
            code = 1
            try:
                own = replace(config, parallel=replace(config.parallel, data_parallel_rank=engine))
                _rank(theirs, own, rank, rendezvous.init_method, blocks, size)
                code = 0
            except BaseException:  # noqa: BLE001  a forked child must end here
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()
        ranks.append((pid, mine))
    rendezvous.close()
    return ranks


def _rank(channel: socket.socket, config: EngineConfig, rank: int, init_method: str, blocks: int, size: int) -> None:
    from drumline.model.worker import ModelWorker
    from drumline.plan.kv import KVConfig
    from drumline.worker.protocol import WorkerContext

    names: list[str] = []
    context = WorkerContext(
        config=config,
        rank=rank,
        local_rank=rank,
        distributed_init_method=init_method,
        is_driver=rank == 0,
        set_name=names.append,
    )

    def answer(action: Any) -> None:
        try:
            result = action()
        except Exception:  # noqa: BLE001  the test gets it
            result = traceback.format_exc()
        _send(channel, result)

    workers: list[ModelWorker] = []

    def start() -> str:
        worker = ModelWorker(context)
        workers.append(worker)
        worker.init_device()
        worker.load_model()
        worker.initialize_from_config([KVConfig(num_blocks=blocks, block_size=size)] * config.parallel.world_size)
        worker.compile_or_warm_up_model()
        return names[0]

    answer(start)
    try:
        while True:
            method, args = _receive(channel)
            answer(lambda: _run(workers[0], method, args))  # noqa: B023  called at once
    except EOFError:
        for worker in workers:
            worker.shutdown()


def _run(worker: Any, method: str | Callable[..., Any], args: Sequence[Any]) -> Any:
    function = globals().get(method) if isinstance(method, str) else method
    return getattr(worker, str(method))(*args) if function is None else function(worker, *args)


def parameter_bytes(worker: Any) -> int:
    """Bytes of all parameters of a rank whose modules have them, shared ones once."""
    parameters = [parameter for parameter in worker.model.parameters() if not parameter.is_meta]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return sum(storages.values())


def experts(worker: Any) -> list[dict[str, Any]]:
    """Of each layer with experts that a rank has some of: what each module knows."""
    from drumline.model.expert_parallel import ParallelExperts

    return [
        {
            "placement": module.placement.experts,
            "rows": len(module.down_proj),
            "way": module._sharing.way,
            "loads": module.loads.tolist(),
            "weights": module.down_proj.data[:, 0, 0].tolist(),
        }
        for module in worker.model.modules()
        if isinstance(module, ParallelExperts)
    ]


def moved(worker: Any) -> int:
    """Slots of experts that have got other weights so far."""
    count: int = worker._balancer.moved
    return count


def held(worker: Any) -> tuple[int, int, int]:
    """Bytes of a rank: of its parameters, as it says of its weights, of its KV pool."""
    return parameter_bytes(worker), worker.weight_bytes, worker.cache.data.nbytes


if __name__ == "__main__":
    _host(socket.socket(fileno=int(sys.argv[1])))
