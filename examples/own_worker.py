"""A worker class of one's own, which has nothing to do with models, on 4 processes: python examples/own_worker.py"""

from drumline import EngineConfig, Executor, ParallelConfig, ProcessConfig


class WordCounter:
    def __init__(self, context):
        self.rank, self.size = context.rank, context.config.parallel.world_size

    def count(self, lines):
        return sum(len(line.split()) for line in lines[self.rank :: self.size])


if __name__ == "__main__":
    config = EngineConfig(
        parallel=ParallelConfig(tensor_parallel_size=4, distributed_executor_backend="mp"),
        process=ProcessConfig(worker_cls="own_worker:WordCounter", log_level="warning"),
    )
    with Executor.get_class(config)(config) as executor:
        print("words counted by each rank:", executor.collective_rpc("count", (["the quick brown fox"] * 102,)))
