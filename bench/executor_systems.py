"""What `executor_rpc.py` compares: executors whose workers do nothing but make the arrays of a step ready."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from driver import ROWS, drumline_plan, main, make_payload, vllm_step


class DrumlineWorker:
    def __init__(self, context: Any) -> None:
        from drumline.plan.step import StepOutput, ints

        self.rank = context.rank
        self.ints, self.output = ints, StepOutput

    def nothing(self, message: Any) -> int:
        return 1

    def execute_model(self, plan: Any) -> Any:
        ints = self.ints
        slots = ints(plan.slots)
        positions = ints(plan.num_computed) + ints(plan.num_tokens)
        ends, blocks, source = ints(plan.block_counts).cumsum(), ints(plan.blocks), ints(plan.token_source)
        assert len(positions) == len(source) == ROWS
        assert ends[-1] == len(blocks)
        return self.output(plan.step, slots.tobytes(), positions.astype(np.int32).tobytes())


class VllmWorker:
    """By the ``worker_cls`` of vLLM's configuration."""

    def __init__(self, rank: int, **kwargs: Any) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self.rank = rank
        self.output = ModelRunnerOutput

    def init_device(self) -> None: ...

    def load_model(self) -> None: ...

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...

    def nothing(self, message: Any) -> int:
        return 1

    def execute_model(self, step: Any) -> Any:
        cached = step.scheduled_cached_reqs
        ids, scheduled = cached.req_ids, step.num_scheduled_tokens
        positions = np.array(cached.num_computed_tokens, np.int32)
        positions += np.array([scheduled[name] for name in ids], np.int32)
        blocks = np.array([found[0][0] for found in cached.new_block_ids if found is not None], np.int32)
        assert len(positions) == ROWS
        assert len(blocks) == ROWS // 16
        rows = range(ROWS)
        return self.output(ids, dict(zip(ids, rows, strict=True)), [[token] for token in positions.tolist()])


class Drumline:
    def __init__(self, n: int) -> None:
        from drumline import EngineConfig, Executor, ParallelConfig, ProcessConfig

        config = EngineConfig(
            platform="cpu",
            parallel=ParallelConfig(tensor_parallel_size=n, distributed_executor_backend="mp"),
            process=ProcessConfig(worker_cls="executor_systems:DrumlineWorker", log_level="warning"),
        )
        self._executor = Executor.get_class(config)(config)

    def payload(self, name: str) -> Any:
        return drumline_plan() if name == "decode" else make_payload(name)

    def call(self, payload: Any, every: bool) -> None:
        if type(payload) is not dict:
            assert len(self._executor.execute_model(payload).tokens) == 4 * ROWS
        else:
            self._executor.collective_rpc("nothing", (payload,), reply_rank=None if every else 0)

    def close(self) -> None:
        self._executor.shutdown()


class Vllm:
    def __init__(self, n: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        config = EngineArgs(
            model=str(_llama(Path(tempfile.mkdtemp()))),
            skip_tokenizer_init=True,
            tensor_parallel_size=n,
            distributed_executor_backend="mp",
            enforce_eager=True,
            max_model_len=1024,
            dtype="float32",
            worker_cls="executor_systems.VllmWorker",
        ).create_engine_config()
        print("async scheduling:", config.scheduler_config.async_scheduling)
        self._executor = MultiprocExecutor(config)

    def payload(self, name: str) -> Any:
        return vllm_step() if name == "decode" else make_payload(name)

    def call(self, payload: Any, every: bool) -> None:
        if type(payload) is not dict:
            assert len(self._executor.execute_model(payload).sampled_token_ids) == ROWS
        else:
            rank = None if every else 0
            self._executor.collective_rpc("nothing", args=(payload,), unique_reply_rank=rank)

    def close(self) -> None:
        self._executor.shutdown()


class Pipes(Drumline):
    """The least that an executor could be: multiprocessing's pipes, the plan pickled once, the same workers' work."""

    def __init__(self, n: int) -> None:
        from transport_systems import Pipes as Transport

        class Executor(Transport):
            def opened(self, rank: int, sock: Any) -> Any:
                receive, answer = super().opened(rank, sock)
                worker = DrumlineWorker(SimpleNamespace(rank=rank))
                output: list[Any] = [1]

                def step() -> Any:
                    message = receive()
                    if type(message) is not dict and type(message) is not tuple:
                        output[0] = worker.execute_model(message)
                    else:
                        output[0] = 1
                    return message

                return step, lambda _: answer(output[0])

        self._pipes = Executor(n)

    def call(self, payload: Any, every: bool) -> None:
        self._pipes.call(payload, every and type(payload) is dict)

    def close(self) -> None:
        self._pipes.close()


def _llama(folder: Path) -> Path:
    """A configuration that vLLM takes; nothing is loaded."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SYSTEMS = {"drumline": Drumline, "pipes": Pipes, "vllm": Vllm}

if __name__ == "__main__":
    sys.exit(main(SYSTEMS))
