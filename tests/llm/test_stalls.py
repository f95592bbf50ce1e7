"""A program with an LLM whose processes stand still gets an exception with the report, in bounded time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from drumline import LLM, SamplingParams
from drumline.errors import EngineDeadError, ExitCode
from tests.stopped import stop

from .conftest import SMALL

STALL_S = 2.0
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.mark.parametrize("victim", ["Worker_TP1", pytest.param("EngineCore_DP0", marks=pytest.mark.chaos)])
def test_a_process_that_is_stopped(model_path: Path, victim: str) -> None:
    with LLM(str(model_path), tensor_parallel_size=2, stall_timeout_s=STALL_S, recovery="off", **SMALL) as llm:
        llm.generate([[5, 6, 7]], LONG)
        pid = next(one.pid for one in llm.processes() if one.name == victim)
        stop(pid)
        time.sleep(1.5 * STALL_S)  # nothing is outstanding: no hang
        began = time.monotonic()
        with pytest.raises(EngineDeadError) as caught:
            llm.generate([[5, 6, 7]] * 4, LONG)
        assert STALL_S - 0.5 < time.monotonic() - began < STALL_S + 3.0
    assert caught.value.report.what == "hang"
    assert caught.value.report.pid == pid
    assert "stopped (T)" in str(caught.value)
    assert Path(caught.value.report.stacks_file).read_text() == caught.value.report.stacks
    assert caught.value.exit_code == ExitCode.STALLED


def sleep(worker: object, seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_a_call_may_take_as_long_as_its_caller_waits(model_path: Path) -> None:
    with LLM(str(model_path), stall_timeout_s=1.0, **SMALL) as llm:
        assert llm.collective_rpc(sleep, timeout=30.0, args=(2.5,)) == [2.5]
        assert llm.collective_rpc(sleep, args=(2.5,)) == [2.5]  # no limit
        assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].outputs[0].token_ids) > 0
