"""A worker class of one's own: no model, no torch, just N processes that run the same calls.

    python examples/own_worker.py

Any class whose constructor takes a WorkerContext will do. The executor starts one process for each rank, each of which
owns one object of the class; collective_rpc calls a method on all of them.
"""

from __future__ import annotations

import os

from drumline.config import EngineConfig, ParallelConfig, ProcessConfig
from drumline.errors import RemoteCallError
from drumline.executor import Executor
from drumline.worker.protocol import WorkerContext


class WordCounter:
    """Each rank counts the words in its own part of the lines."""

    def __init__(self, context: WorkerContext) -> None:
        self.rank = context.rank
        self.world_size = context.config.parallel.world_size

    def count(self, lines: list[str]) -> int:
        if not lines:
            raise ValueError("there is nothing to count")
        return sum(len(line.split()) for line in lines[self.rank :: self.world_size])


def main() -> None:
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=3, distributed_executor_backend="mp"),
        process=ProcessConfig(worker_cls="own_worker:WordCounter", log_level="warning"),
    )
    with Executor.get_class(config)(config) as executor:
        for state in executor.workers():
            print(f"rank {state.rank}: {state.name}, {state.phase}, a process of its own: {state.pid != os.getpid()}")
        lines = ["the quick brown fox"] * 100
        print("words counted by each rank:", executor.collective_rpc("count", (lines,)))
        print("only rank 1 answers:", executor.collective_rpc("count", (lines,), reply_rank=1))

        # A function instead of a method name; it gets the worker first.
        print("squares:", executor.collective_rpc(lambda worker: worker.rank**2))

        # Arguments of each rank's own, and a future instead of waiting.
        own = [(["one"] * 9,), (["two words"] * 9,), (["three more words"] * 9,)]
        future = executor.collective_rpc("count", rank_args=own, non_block=True)
        print("of its own lines:", future.result(timeout=10))

        # An exception on any rank reaches us, with rank and traceback, and the executor goes on.
        try:
            executor.collective_rpc("count", ([],))
        except RemoteCallError as error:
            print(f"rank {error.report.rank} raised {error.report.type}: {error.report.message}")
        print("and goes on:", executor.collective_rpc("count", (["still here"],), reply_rank=0))


if __name__ == "__main__":
    main()
