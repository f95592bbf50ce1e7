"""LLM and AsyncLLM in notebooks: the example notebook in a real kernel, and what is odd there about its processes.

A kernel has a running event loop in its main thread, streams without descriptors, and a ``__main__`` without a file.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
TIMEOUT_S = 100


def test_it_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
async def test_in_a_real_kernel(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook runs; an interrupt drops a cell and keeps the model; the kernel's death ends all processes."""
    nbclient = pytest.importorskip("nbclient", reason="the notebook needs nbclient and ipykernel (make dev has them)")
    pytest.importorskip("ipykernel", reason="the notebook needs nbclient and ipykernel (make dev has them)")
    import nbformat

    monkeypatch.setenv("MODEL", str(model_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, kernel_name="python3")
    async with client.async_setup_kernel():
        for index, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, index)
        text = ["".join(str(output.get("text", "")) for output in cell.get("outputs", [])) for cell in notebook.cells]
        assert "The capital of France is ->" in "".join(text)
        assert "weights on each worker: [" in "".join(text)
        assert "AsyncLLM(" in text[-1]
        shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert not [output for output in shown if output["output_type"] == "error"]

        pids = await run(client, START.format(SMALL=SMALL))
        assert len(pids) == 2
        assert await run(client, INTERRUPTED) == ["interrupted", 3]
        assert await run(client, ASYNC) == ["cancelled", 0, 4]
        kernel = await run(client, "import os, json; print(json.dumps(os.getpid()))")
        os.kill(kernel, signal.SIGKILL)
        left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        assert not psutil.wait_procs(left, timeout=5)[1]


SMALL = {"num_gpu_blocks_override": 64, "max_model_len": 256, "log_level": "warning"}
START = """
import asyncio, json, os, signal, threading
from drumline import LLM, AsyncLLM, SamplingParams

llm = LLM(model, **{SMALL})
llm.generate("hello")  # with its progress bar
print(json.dumps([process.pid for process in llm.processes()[1:]]))
"""
INTERRUPTED = """
long = SamplingParams(max_tokens=240, ignore_eos=True)
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        llm.generate("hello", long, use_tqdm=False)
except KeyboardInterrupt:
    said = "interrupted"
tokens = llm.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids
print(json.dumps([said, len(tokens)]))
"""
ASYNC = """
online = AsyncLLM(model, max_model_len=256, log_level="warning")


async def read(tokens):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    async for output in online.generate("hello", params):
        started.set()
    return len(output.outputs[0].token_ids)


started = asyncio.Event()
task = asyncio.create_task(read(240))  # runs beside the cells
await started.wait()
task.cancel()
try:
    await task
except asyncio.CancelledError:
    said = "cancelled"
count = await read(4)
while (running := (await online.stats()).num_running):
    pass
print(json.dumps([said, running, count]))
online.shutdown()
"""


async def run(client: Any, source: str) -> Any:
    """Run a cell in the kernel; the JSON that it prints."""
    import nbformat

    cell = nbformat.v4.new_code_cell(source)
    client.nb.cells.append(cell)
    await client.async_execute_cell(cell, len(client.nb.cells) - 1)
    text = "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stdout")
    return json.loads(text.strip().splitlines()[-1])
