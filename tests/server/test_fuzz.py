"""Requests that schemathesis makes of the server's own description: no 5xx, answers as described, and it lives on.

A short run against the peer is part of ``make test``; ``make fuzz`` sends 2,000 requests to a whole ``drumline serve``.
"""

from __future__ import annotations

import asyncio
import random
import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from requests import Session

from drumline.server.schema import REFUSED

from .command import Serve, tiny_folder
from .peer import ScriptedEngine, served

SHORT, LONG = 100, 2000
TIMEOUT_S = 100
"""128 outputs of each of several prompts take a while on a busy machine."""


def fuzz(address: str, requests: int, first_seed: int) -> Counter[int]:
    """Send at least so many requests; how many answers there were of each status. Raises what schemathesis finds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _fuzz(address, requests, first_seed)


def _fuzz(address: str, requests: int, first_seed: int) -> Counter[int]:
    import schemathesis
    from schemathesis import checks

    names = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    checks.load_all_checks()
    wanted = [checks.not_a_server_error, *checks.CHECKS.get_by_names(names)]
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    heavy = [one for one in operations if one.body or one.path_parameters]
    modes = list(schemathesis.GenerationMode)
    each = -(-requests // (len(heavy) * len(modes)))
    statuses: Counter[int] = Counter()
    session = Session()

    def send(case: Any) -> None:
        answer = case.call(base_url=address, session=session, timeout=TIMEOUT_S)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=wanted)

    def run(operation: Any, mode: Any, count: int, start: int) -> None:
        strategy = operation.as_strategy(generation_mode=mode)
        if mode is schemathesis.GenerationMode.POSITIVE:
            strategy = strategy.map(_fitting)
        options = settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        try:
            seed(start)(options(given(strategy)(send)))()
        except Unsatisfiable:
            pass  # nothing can be wrong in it

    with session:
        for operation in operations:
            for mode in modes:
                # A route without a body has one request to make.
                run(operation, mode, each if operation in heavy else 1, first_seed)
        # Some have fewer than their share, or invalid ones only.
        while statuses.total() < requests:
            first_seed += 1
            run(operations[0], modes[0], requests - statuses.total(), first_seed)
    return statuses


def _fitting(case: Any) -> Any:
    """Every second body as this very model takes it (names and sizes are not in the description)."""
    body = case.body
    if not isinstance(body, dict) or len(str(body)) % 2:
        return case
    body.pop("model", None)
    if "prompt" in body or "messages" in body:
        body["stream"] = len(str(body)) % 4 == 0  # events fit the description, too
    for name, most in (
        ("max_tokens", 9),
        ("max_completion_tokens", 9),
        ("n", 5),
        ("best_of", 9),
        ("min_tokens", 3),
        ("top_logprobs", 20),
    ):
        if isinstance(body.get(name), int | float):
            body[name] = min(body[name], most)
    for name in ("prompt_logprobs", "logprobs"):
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = min(max(body[name], 0), 20)
    for name in ("prompt", "tokens", "stop_token_ids", "allowed_token_ids"):
        if isinstance(body.get(name), list):
            body[name] = [_token(one) for one in body[name]]
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {str(int(key) % 420): value for key, value in body["logit_bias"].items()}
    for name in ("truncate_prompt_tokens", "stream_interval"):
        if body.get(name):
            body[name] = 7
    for name in ("priority", "stream_options", "top_logprobs", "truncation_side", *REFUSED):
        body.pop(name, None)
    return case


def _token(value: Any) -> Any:
    if isinstance(value, list):
        return [_token(one) for one in value]
    return int(value) % 420 if isinstance(value, int | float) else value


@pytest.mark.timeout(300)
async def test_short(folder: Path) -> None:
    async with served(folder, engine=ScriptedEngine(max_model_len=64)) as server:
        statuses = await asyncio.to_thread(fuzz, server.url, SHORT, 1)
        assert statuses.total() >= SHORT
        assert statuses[200] > SHORT // 10, statuses
        assert statuses[400] > SHORT // 10, statuses
        assert not server.engine.running


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_long(tmp_path: Path) -> None:
    first_seed = random.randrange(2**32)
    print("seed", first_seed)
    server = Serve(tiny_folder(tmp_path / "model"), tmp_path / "log", "--max-model-len", "128")
    try:
        server.ready()
        statuses = fuzz(f"http://127.0.0.1:{server.port()}", LONG, first_seed)
        print(dict(statuses))
        assert statuses.total() >= LONG
        assert server.request("GET", "/health")[0] == 200
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        assert server.request("POST", "/v1/completions", body)[1]["usage"]["completion_tokens"] == 4
        assert server.gauge("num_requests_running") == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.end(20) == 0
    finally:
        server.kill()
