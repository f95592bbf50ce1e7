"""Health, phases, metrics, pages, and what the end of the server looks like to clients."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from drumline.engine.protocol import ProcessState, Recoveries

from .peer import ScriptedEngine, Served, make_ready, served

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


async def statuses(web: httpx.AsyncClient) -> dict[str, int]:
    return {path: (await web.get(path)).status_code for path in ("/livez", "/startupz", "/readyz", "/health")}


async def test_health_through_the_life_of_a_server(folder: Path) -> None:
    async with (
        served(folder, ready=False) as server,
        httpx.AsyncClient(base_url=server.url) as web,
    ):
        assert await statuses(web) == {"/livez": 200, "/startupz": 503, "/readyz": 503, "/health": 503}
        server.service.set_phase("converting 40%")
        state = (await web.get("/startupz")).json()
        assert state["status"] == "starting"
        assert state["phase"] == "converting 40%"
        assert state["processes"][0]["name"] == "APIServer_0"
        refused = await web.post(CHAT, json=HELLO)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "converting 40%" in refused.json()["error"]["message"]
        assert (await web.get("/v1/models")).status_code == 200

        make_ready(server.service, server.engine, folder)
        assert set((await statuses(web)).values()) == {200}
        rows = (await web.get("/startupz")).json()["processes"]
        assert {"name": "Worker_TP0", "rank": 0, "phase": "ready"}.items() <= rows[1].items()

        recoveries = server.engine.recoveries = Recoveries(active=True, reason="Worker_TP1 was killed by SIGKILL")
        assert await statuses(web) == {"/livez": 200, "/startupz": 200, "/readyz": 503, "/health": 503}
        state = (await web.get("/startupz")).json()
        assert state["status"] == "recovering"
        refused = await web.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert "being started again: Worker_TP1 was killed by SIGKILL" in refused.json()["error"]["message"]
        recoveries.by_cause["signal"] += 1
        recoveries.count(2.2)
        recoveries.active = False
        assert set((await statuses(web)).values()) == {200}
        told = (await web.get("/metrics")).text
        assert re.search(r'drumline:engine_restarts_total\{cause="signal",.*\} 1.0', told)
        assert re.search(r'drumline:engine_restarts_total\{cause="hang",.*\} 0.0', told)
        assert re.search(r'drumline:engine_pause_seconds_bucket\{engine="0",le="2.5",.*\} 1.0', told)
        server.engine.stalling = "no progress for 30.1 s with work outstanding: rank 1"
        assert await statuses(web) == {"/livez": 200, "/startupz": 200, "/readyz": 503, "/health": 503}
        assert "stands still: no progress for 30.1 s" in (await web.get("/readyz")).json()["error"]["message"]
        assert (await web.post(CHAT, json={**HELLO, "max_tokens": 1})).status_code == 200
        server.engine.stalling = ""
        assert set((await statuses(web)).values()) == {200}
        assert len(server.engine.seen) == 1  # no probe was one

        server.engine.die()
        assert await statuses(web) == {"/livez": 200, "/startupz": 503, "/readyz": 503, "/health": 503}
        state = (await web.get("/startupz")).json()
        assert state["status"] == "failed"
        assert "SIGKILL" in state["message"]


async def test_stacks_are_for_operators(folder: Path) -> None:
    async with served(folder) as server, httpx.AsyncClient(base_url=server.url) as web:
        server.service.local = None
        refused = await web.get("/debug/report")
        assert refused.status_code == 403
        assert "SIGUSR1" in refused.json()["error"]["message"]
        server.service.local = "127.0.0.1"
        found = (await web.get("/debug/report")).json()
        assert found["processes"][0]["stacks"] == "in here"
    async with served(folder, keys=["key"]) as server, httpx.AsyncClient(base_url=server.url) as web:
        assert (await web.get("/debug/report")).status_code == 401
        assert (await web.get("/debug/report", headers={"authorization": "Bearer key"})).status_code == 200


@pytest.mark.alone
async def test_seconds_in_phase_ignore_percentages(folder: Path) -> None:
    engine = ScriptedEngine()
    phases = ["load_model 10%"]
    engine.processes = lambda: [ProcessState(name="Worker_TP0", rank=0, phase=phases[0])]  # type: ignore[method-assign]
    async with served(folder, ready=False, engine=engine) as server:
        server.service.engine = engine
        server.service.startup_state()
        await asyncio.sleep(0.15)
        phases[0] = "load_model 90%"
        assert server.service.startup_state().processes[0].seconds >= 0.1
        phases[0] = "warm_up"
        assert server.service.startup_state().processes[0].seconds < 0.1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_ends_requests_with_an_error(server: Served, web: httpx.AsyncClient, stream: bool) -> None:
    server.engine.gate.clear()
    waiting = asyncio.create_task(web.post(COMPLETION, json={"prompt": "x", "stream": stream}))
    await server.engine.until(1)
    server.service.stop()
    answer = await waiting
    assert answer.status_code == 503  # also for a stream: nothing of it was sent yet
    assert "shutting down" in answer.json()["error"]["message"]
    assert not server.engine.running
    assert (await web.post(COMPLETION, json={"prompt": "x"})).status_code == 503


@pytest.mark.parametrize("death", [False, True])
async def test_end_in_mid_stream(server: Served, web: httpx.AsyncClient, death: bool) -> None:
    server.engine.pause_s = 0.005
    lines = []
    async with web.stream("POST", COMPLETION, json={"prompt": "x", "max_tokens": 200, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            lines += [line] if line else []
            if len(lines) == 3:
                server.engine.die() if death else server.service.stop()
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["code"] == "service_unavailable"
    assert ("SIGKILL" if death else "shutting down") in last["error"]["message"]
    assert "data: [DONE]" not in lines


async def test_a_fault_of_ours_is_a_plain_500(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> list[int]:
        raise ZeroDivisionError("secret detail")

    async with (
        served(folder, engine=ScriptedEngine(broken)) as server,
        httpx.AsyncClient(base_url=server.url) as web,
    ):
        for stream in (False, True):
            answer = await web.post(COMPLETION, json={"prompt": "x", "stream": stream})
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "internal_error"
            assert "secret" not in answer.text
        assert (await web.get("/health")).status_code == 200
    assert "secret detail" in caplog.text


async def test_metrics(server: Served, web: httpx.AsyncClient) -> None:
    await web.post(COMPLETION, json={"prompt": [5, 6, 7], "max_tokens": 4})
    await web.get("/nothing/special")
    answer = await web.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.text
    labels = 'engine="0",model_name="tiny"'
    for line in (
        f"drumline:ready{{{labels}}} 1.0",
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
        f"vllm:num_preemptions_total{{{labels}}} 3.0",
        f"vllm:prompt_tokens_total{{{labels}}} 3.0",
        f"vllm:generation_tokens_total{{{labels}}} 4.0",
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 1.0',
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 2.0',
        f"vllm:request_prefill_kv_computed_tokens_sum{{{labels}}} 1.0",
        'vllm:request_num_preemptions_bucket{engine="0",le="0.0",model_name="tiny"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 0.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        f"vllm:inter_token_latency_seconds_count{{{labels}}} 3.0",
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} 1.0",
        f"vllm:request_queue_time_seconds_count{{{labels}}} 1.0",
        f"vllm:request_generation_tokens_sum{{{labels}}} 4.0",
        f"vllm:request_params_max_tokens_sum{{{labels}}} 4.0",
        'drumline:step_seconds_total{engine="0",model_name="tiny",phase="forward"} 0.5',
        f"drumline:pipeline_active_seconds_total{{{labels}}} 4.0",
        'drumline:stage_busy_seconds_total{engine="0",model_name="tiny",stage="0"} 3.0',
        'drumline:stage_busy_fraction{engine="0",model_name="tiny",stage="1"} 0.5',
        'vllm:cache_config_info{block_size="16",cache_dtype="float32",engine="0",num_gpu_blocks="64"} 1.0',
        'drumline:http_requests_total{handler="/v1/completions",method="POST",status="200"} 1.0',
        # paths that clients make up are not kept apart
        'drumline:http_requests_total{handler="other",method="GET",status="404"} 1.0',
    ):
        assert line in text, line
    assert "process_resident_memory_bytes" in text


async def test_pages_load_nothing_from_elsewhere(web: httpx.AsyncClient) -> None:
    pending, seen = ["/", "/docs"], {}
    while pending:
        path = pending.pop()
        answer = await web.get(path)
        assert answer.status_code == 200, path
        seen[path] = answer
        if answer.headers["content-type"].startswith("text/html"):
            found = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
            assert all(link.startswith("/") for link in found)
            pending += [link for link in found if link not in seen and link not in pending]
            # the policy forbids inline code and styles
            assert not re.search(r"<script(?![^>]*src)|<style|\son\w+=|\sstyle=", answer.text)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
        else:
            assert not re.findall(r"https?://(?!www\.w3\.org)", answer.text), path
    assert {"/page/chat.js", "/page/docs.js", "/page/style.css", "/openapi.json"} <= set(seen)


async def test_openapi_is_whole(web: httpx.AsyncClient) -> None:
    document = (await web.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for reference in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert reference in schemas
    body = schemas["ChatRequest"]
    assert body["required"] == ["messages"]
    assert body["properties"]["max_tokens"]["description"] == "Left out: as many as fit."
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["description"] == "Left out: 16."
    assert "refused" in body["properties"]["tools"]["description"]
    for path in document["paths"]:
        answer = await web.get(path.replace("{id}", "tiny"))
        assert answer.status_code in (200, 405), path


async def test_keys_guard_v1_only(folder: Path) -> None:
    async with served(folder, keys=["k"]) as server, httpx.AsyncClient(base_url=server.url) as web:
        for path in ("/health", "/livez", "/readyz", "/startupz", "/metrics", "/version", "/", "/docs"):
            assert (await web.get(path)).status_code == 200, path
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "k"}, {"authorization": "Basic k"}):
            answer = await web.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert (await web.post(COMPLETION, content=b"{", headers=headers)).status_code == 401
            assert (await web.get("/v1/unknown", headers=headers)).status_code == 401
        assert (await web.get("/v1/models", headers={"authorization": "bearer k"})).status_code == 200


async def test_head_and_date(web: httpx.AsyncClient) -> None:
    answer = await web.head("/health")
    assert answer.status_code == 200
    assert answer.headers["date"].endswith("GMT")
    assert (await web.get("/version")).json()["version"]
