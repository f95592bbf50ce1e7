"""All that a call to workers can be: who answers, futures, callbacks, asyncio, cancelling, failures, late outputs.

    python examples/worker_calls.py

The worker class has nothing to do with models. docs/executor.md explains each of these.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import CancelledError

from drumline.config import EngineConfig, ParallelConfig, ProcessConfig
from drumline.errors import RPCTimeoutError, WorkerCallError
from drumline.executor import Executor
from drumline.worker import WorkerContext


class Later:
    """An output that is finished after its method has returned, by the worker's output thread."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_output(self) -> str:
        time.sleep(0.05)
        return self.text


class WordCounter:
    """Each rank counts the words in its own part of the lines."""

    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank
        self.world_size = context.config.parallel.world_size

    def count(self, lines: list[str]) -> int:
        if not lines:
            raise ValueError("there is nothing to count")
        return sum(len(line.split()) for line in lines[self.rank :: self.world_size])

    def slow(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def later(self) -> Later:
        return Later(f"from rank {self.rank}, in its own time")


class Total:
    """Folds the answers of all ranks into one."""

    def aggregate(self, outputs, output_rank):
        return sum(outputs)

    def failed(self, outputs, report):
        print(f"  told by the aggregator: ranks {sorted(outputs)} had answered when rank {report.rank} failed")


LINES = ["the quick brown fox"] * 100


def main() -> None:
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=3, distributed_executor_backend="mp"),
        process=ProcessConfig(worker_cls="worker_calls:WordCounter", log_level="warning"),
    )
    with Executor.get_class(config)(config) as executor:
        for state in executor.workers():
            print(f"rank {state.rank}: {state.name}, {state.phase}, a process of its own: {state.pid != os.getpid()}")
        who_answers(executor)
        futures(executor)
        asyncio.run(in_a_loop(executor))
        failures(executor)


def who_answers(executor: Executor) -> None:
    print("all answer:", executor.collective_rpc("count", (LINES,)))
    print("only rank 1 answers:", executor.collective_rpc("count", (LINES,), reply_rank=1))
    print("folded into one:", executor.collective_rpc("count", (LINES,), aggregators=(Total(),)))
    print("a function, which gets the worker:", executor.collective_rpc(lambda worker: worker.rank**2))
    own = [(["one"] * 9,), (["two words"] * 9,), (["three more words"] * 9,)]
    print("arguments of each rank's own:", executor.collective_rpc("count", rank_args=own))
    print("an output that is finished later:", executor.collective_rpc("later", reply_rank=2))


def futures(executor: Executor) -> None:
    slow = executor.collective_rpc("slow", (0.1,), non_block=True)
    many = [executor.collective_rpc("count", (LINES,), reply_rank=0, non_block=True) for _ in range(1000)]
    told = threading.Event()
    slow.add_done_callback(lambda call: (print("  told by the callback:", call.result()), told.set()))
    print("done yet?", slow.done())
    told.wait(10)
    print("the last of a thousand that waited behind it:", many[-1].result(timeout=10))
    given_up = executor.collective_rpc("slow", (0.1,), non_block=True)
    print("given up:", given_up.cancel())
    try:
        given_up.result()
    except CancelledError:
        print("and its answer is dropped when it comes")


async def in_a_loop(executor: Executor) -> None:
    calls = [executor.collective_rpc("count", (LINES * n,), reply_rank=0, non_block=True) for n in (1, 2, 3)]
    print("awaited:", await asyncio.gather(*calls))


def failures(executor: Executor) -> None:
    """An exception on any rank reaches us with rank and traceback, and the executor goes on."""
    try:
        executor.collective_rpc("count", ([],))
    except WorkerCallError as error:
        print(f"raised {error.type_name}: {error.message}, on {len(error.failures)} ranks")
    own = [(LINES,), ([],), (LINES,)]
    try:
        executor.collective_rpc("count", rank_args=own, aggregators=(Total(),))
    except WorkerCallError as error:
        print(f"raised on rank {error.rank}: {error.message}")
    try:
        executor.collective_rpc("slow", (0.5,), timeout=0.1)
    except RPCTimeoutError as error:
        print(str(error)[:32], "...")
    print("and goes on:", executor.collective_rpc("count", (["still here"],), reply_rank=0))


if __name__ == "__main__":
    main()
