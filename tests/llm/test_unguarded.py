"""Programs whose worker classes live in the very module that starts the engine, without a main guard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drumline import LLM

ENGINE = """
from drumline import LLM

class Extension:
    def hello(self): return "hello"

LLM({model!r}, tensor_parallel_size=2, worker_extension_cls="program.Extension", log_level="warning")
"""
EXECUTOR = """
from drumline import EngineConfig, Executor, ParallelConfig, ProcessConfig

class Own:
    def __init__(self, context): pass

config = EngineConfig(parallel=ParallelConfig(tensor_parallel_size=2), process=ProcessConfig(worker_cls="program.Own"))
Executor.get_class(config)(config)
"""


@pytest.mark.parametrize("text", [ENGINE, EXECUTOR], ids=["LLM", "Executor"])
def test_no_process_of_ours_starts_an_engine(text: str, model_path: Path, tmp_path: Path) -> None:
    """Each worker imports the program again, which would start two more, and so on without end."""
    program = tmp_path / "program.py"
    program.write_text(text.format(model=str(model_path)))
    found = subprocess.run([sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "cannot start an engine or executor of its own" in found.stderr
    assert "if __name__ == '__main__'" in found.stderr


def test_mp_with_one_worker_has_one_fork_server(model_path: Path) -> None:
    with LLM(str(model_path), distributed_executor_backend="mp", max_model_len=64, log_level="warning") as llm:
        names = [process.name for process in llm.processes()]
        assert names == ["LLM", "ForkServer", "EngineCore_DP0", "Worker"]
        rank, pid = llm.collective_rpc(lambda worker: (worker.rank, __import__("os").getppid()))[0]
        server = next(process for process in llm.processes() if process.name == "ForkServer")
        assert (rank, pid) == (0, server.pid)
