"""Memory that is not there costs the request that needs it, and nothing else: no process, no other request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.config import ProcessConfig
from drumline.engine.launch import preload_of
from drumline.engine.protocol import OUT_OF_MEMORY
from drumline.engine.recovery import Limits

from .poison import LONG
from .processes import config_for, engine, greedy, prompt
from .test_recovering import run


@pytest.mark.parametrize(
    ("tp", "worker"),
    [
        pytest.param(2, "Poor", marks=pytest.mark.chaos),
        pytest.param(2, "Poorest", marks=pytest.mark.chaos),
        (1, "Poorest"),
    ],
)
def test_one_request_fails(tiny: tuple[Path, Any], tp: int, worker: str) -> None:
    config = config_for(tiny[0], tp=tp)
    process = ProcessConfig(worker_cls=f"tests.engine.poison:{worker}", preload=preload_of(config))

    async def disturb(got: dict[str, Any]) -> None:
        for number in range(2):
            name = f"rich{number}"
            ended = await served.outputs(greedy(name, prompt(9, LONG + 20), 5, prompt_logprobs=1))
            assert [(one.finish_reason, one.stop_reason, one.token_ids) for one in ended] == [
                ("error", OUT_OF_MEMORY, [])
            ]
            assert "memory" in ended[0].message
        assert all(one.end is None for one in got.values()), "the others run meanwhile"

    with engine(config.with_(process=process), recovery=Limits()) as served:
        pids = [one.pid for one in served.client.processes()]
        some = [greedy(name, prompt(seed, 20), 400, ignore_eos=True, logprobs=1) for seed, name in enumerate("abc")]
        modest = greedy("d", prompt(5, LONG // 2), 300, ignore_eos=True, prompt_logprobs=1)
        plain = served.run(run(served, [*some, modest]))
        again = served.run(run(served, [*some, modest], disturb))
        for name, one in plain.items():
            again[name].same_as(one)
        assert len(again["d"].prompt_logprobs) == LONG // 2 - 1
        assert [one.pid for one in served.client.processes()] == pids
        assert served.client.recoveries is not None
        assert not served.client.recoveries.by_cause
