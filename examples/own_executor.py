"""An executor of one's own: a backend that runs every worker in a thread of this process.

    python examples/own_executor.py

What a backend has to write is how workers start and how a call gets to them; ids, futures, order, deadlines and
failures are the call table's. It is chosen by its class or its dotted name: `--distributed-executor-backend
own_executor.ThreadExecutor` does the same for `drumline serve`.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import Any

from drumline.config import EngineConfig, ParallelConfig, ProcessConfig
from drumline.executor import Executor
from drumline.executor.base import method_name
from drumline.executor.calls import CallTable
from drumline.processes import make_report
from drumline.worker.protocol import WorkerContext
from drumline.worker.wrapper import bind, start_worker, stop_worker


class ThreadExecutor(Executor):
    """Workers are threads: good for debugging with print and pdb, bad for everything else."""

    def _start(self) -> None:
        self._table = CallTable(self.waiter, lambda: None, self.output_rank, self.world_size)
        self._cleanup.callback(self._table.close, None, self._ended)
        self._lock = threading.Lock()
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(self.world_size)]
        threads = [threading.Thread(target=self._work, args=(r,), daemon=True) for r in range(self.world_size)]
        for thread in threads:
            thread.start()
            self._cleanup.callback(thread.join, 5.0)
        self._cleanup.callback(lambda: [queue.put(None) for queue in self._queues])
        self.collective_rpc(lambda worker: None)  # all of them have started when this has come back

    def collective_rpc(
        self,
        method,
        args=(),
        kwargs=None,
        timeout=None,
        reply_rank=None,
        non_block=False,
        *,
        rank_args=None,
        aggregators=(),
        expected_s=0.0,
    ):
        self._raise_if_failed()
        deadline = None if timeout is None else time.monotonic() + timeout
        everyone = reply_rank is None or bool(aggregators)
        ranks = range(self.world_size) if everyone else (reply_rank,)
        single = reply_rank is not None or bool(aggregators)
        with self._lock:  # the next id and the queues as one act: every rank gets the calls in the same order
            call = self._table.begin(
                method_name(method),
                ranks,
                single=single,
                deadline=deadline,
                aggregators=aggregators,
                expected_s=expected_s,
            )
            for rank, queue in enumerate(self._queues):
                own = rank_args[rank] if rank_args is not None else ()
                queue.put((call, method, (*args, *own), kwargs or {}))
        return call if non_block else call.result()

    def _work(self, rank: int) -> None:
        context = WorkerContext(
            config=self.config, rank=rank, local_rank=rank, distributed_init_method="", is_driver=rank == 0
        )
        worker = start_worker(context, device="this thread")
        while (job := self._queues[rank].get()) is not None:
            call, method, args, kwargs = job
            try:
                value = bind(worker, method)(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  whatever it is, the caller gets it
                report = make_report(error, role=f"Thread_{rank}", rank=rank, phase=call.method)
                owed_by = rank if rank in call.ranks else None
                if (failed := self._table.failed(call.id, report, owed_by)) is not None:
                    self._table.settle(failed)
            else:
                if rank in call.ranks:
                    with self._table.lock:
                        self._table.answer(rank, call.id, value)
            self.waiter.ring()
        stop_worker(worker)


class Adder:
    """Keeps a sum."""

    def __init__(self, context: WorkerContext) -> None:
        self.rank, self.total = context.rank, 0

    def add(self, value: int) -> int:
        self.total += value + self.rank
        return self.total


def main() -> None:
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=3, distributed_executor_backend=ThreadExecutor),
        process=ProcessConfig(worker_cls=f"{__name__}:Adder"),
    )
    cls = Executor.get_class(config)
    print("chosen:", cls.__name__)
    with cls(config) as executor:
        print("one call:", executor.collective_rpc("add", (10,)))
        futures = [executor.collective_rpc("add", (1,), reply_rank=2, non_block=True) for _ in range(5)]
        print("five futures:", [future.result(timeout=10) for future in futures])


if __name__ == "__main__":
    main()
