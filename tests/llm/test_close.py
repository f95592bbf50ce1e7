"""Lives of LLMs and their ends: closed, interrupted, forgotten, in the middle of anything. Nothing stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from drumline import LLM, SamplingParams
from tests.held import Held, check_flat, held

from .light import LIGHT, SLOW, STEP_S
from .test_programs import TIMEOUT_S, last_json, wait_gone

GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, seed=1, max_tokens=200, ignore_eos=True)
LIVES = 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lives", [6, pytest.param(LIVES, marks=pytest.mark.chaos)])
def test_lives_with_changing_sizes(model_path: Path, lives: int) -> None:
    seen: list[Held] = []
    pids: list[int] = []
    tokens = set()
    for life in range(lives):
        llm = LLM(model_path, tensor_parallel_size=1 + life % 3, **LIGHT)
        pids += [process.pid for process in llm.processes()[1:]]
        tokens.add(tuple(llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids))
        llm.close()
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate([[5]], GREEDY)
        seen.append(held(seen[0] if seen else None))
    assert len(tokens) == 1
    wait_gone(pids)
    check_flat(seen)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_interrupt_at_any_moment_leaves_it_usable(model_path: Path, tp: int) -> None:
    """Also in the middle of a message, which costs an engine at most."""
    rounds, moments = 30, random.Random(tp)
    with LLM(model_path, tensor_parallel_size=tp, recovery_restarts=rounds, recovery_backoff_s=0.001, **SLOW) as llm:
        plain = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        interrupted = 0
        for number in range(rounds):
            timer = threading.Timer(moments.uniform(0, 12 * STEP_S), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                llm.generate([[5, 6, number + 10]] * 4, LONG, use_tqdm=False)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
        assert interrupted == rounds
        assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == plain
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_a_message_that_was_torn_costs_an_engine(model_path: Path) -> None:
    """As an interrupt between two instructions of a read leaves it."""
    with LLM(model_path, **SLOW) as llm:
        plain = llm.generate([[5, 6, 7]], LONG, use_tqdm=False)[0].outputs[0]
        llm.enqueue([[5, 6, 7]], LONG)
        llm._client._torn = True
        assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0] == plain
        assert llm.recoveries is not None
        assert llm.recoveries.by_cause == {"exception": 1}
    with LLM(model_path, recovery="off", **SLOW) as llm:
        llm._client._torn = True
        with pytest.raises(Exception, match="in the middle of a message"):
            llm.generate([[5, 6, 7]], LONG, use_tqdm=False)


HEAD = """
import asyncio, json, os, signal, sys, threading
from drumline import LLM, AsyncLLM, SamplingParams
MODEL, OPTIONS = {model!r}, {options!r}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPTS = [[5, 6, 7]] * 3

def tell(llm):
    print(json.dumps([process.pid for process in llm.processes()[1:]]), flush=True)

class Bar:  # called when the first prompt is done, the others are half way
    def __init__(self, **_): pass
    def close(self): pass
    def update(self, n): self.do()

def half_way(llm, do):
    tell(llm)
    bar = type("", (Bar,), {{"do": staticmethod(do)}})
    llm.generate(PROMPTS, [SamplingParams(max_tokens=5), LONG, LONG], use_tqdm=bar)

def leave(code=7):
    sys.exit(code)

def fail():
    raise ValueError("a fault of the program's")
"""
ENDS = {
    "sys.exit in the middle": ("half_way(LLM(MODEL, **OPTIONS), leave)", 7),
    "an unhandled exception": ("half_way(LLM(MODEL, **OPTIONS), fail)", 1),
    "os._exit": ("half_way(LLM(MODEL, **OPTIONS), lambda: os._exit(9))", 9),
    "requests that nobody waits for": ("llm = LLM(MODEL, **OPTIONS); llm.enqueue(PROMPTS, LONG); tell(llm)", 0),
    "a thread that generates": (
        """
        llm, begun = LLM(MODEL, **OPTIONS), threading.Event()
        bar = type("", (Bar,), {"do": staticmethod(begun.set)})
        asked = [SamplingParams(max_tokens=5), LONG, LONG]
        threading.Thread(target=llm.generate, args=(PROMPTS, asked, bar), daemon=True).start()
        begun.wait()
        tell(llm)
        """,
        0,
    ),
    "a thread that is waited for": (
        """
        llm = LLM(MODEL, **OPTIONS)
        tell(llm)
        threading.Thread(target=llm.generate, args=(PROMPTS, LONG, False)).start()
        """,
        0,
    ),
    "while it recovers": (
        """
        llm = LLM(MODEL, **OPTIONS)
        def kill():
            os.kill(llm.processes()[-1].pid, signal.SIGKILL)
            while not llm.recoveries.active: pass
            sys.exit(3)
        half_way(llm, kill)
        """,
        3,
    ),
    "an event loop that ends": (
        """
        async def main():
            llm = AsyncLLM(MODEL, **OPTIONS)
            stream = llm.generate({"prompt_token_ids": [5, 6, 7]}, LONG)
            await anext(stream)
            tell(llm)
            pending = asyncio.ensure_future(anext(stream))
            raise ValueError("a fault of the program's")
        asyncio.run(main())
        """,
        1,
    ),
}


@pytest.mark.parametrize("how", list(ENDS))
def test_a_program_ends_without_close(model_path: Path, how: str) -> None:
    text, code = ENDS[how]
    head = HEAD.format(model=str(model_path), options={**SLOW, "tensor_parallel_size": 2})
    found = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert found.returncode == code, found.stderr
    wait_gone(last_json(found))
    assert "Fatal" not in found.stderr
    assert ("a fault of the program's" in found.stderr) == (code == 1)
    if code != 1 and how != "a thread that generates":  # it has its exception
        assert "Traceback" not in found.stderr
