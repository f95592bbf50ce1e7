"""Numbers of an engine as vLLM's ``LLM.get_metrics`` gives them, under the names that its dashboards use."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.engine.protocol import EngineStats, Recoveries


@dataclass
class Metric:
    """One number."""

    name: str
    labels: dict[str, str]
    value: float


class Counter(Metric):
    """It only grows."""


class Gauge(Metric):
    """It goes up and down."""


def engine_metrics(
    stats: EngineStats, model: str, *, prompt_tokens: int, output_tokens: int, recoveries: Recoveries | None = None
) -> list[Metric]:
    """What is known without asking anybody. The two counts are the caller's own. ``recoveries``: None if there are none
    by design; these have the names of ``/metrics``."""
    labels = {"model_name": model, "engine": "0"}
    usage = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": usage,
    }
    counters = {
        "prefix_cache_queries": stats.prefix_queries,
        "prefix_cache_hits": stats.prefix_hits,
        "num_preemptions": stats.preemptions,
        "prompt_tokens": prompt_tokens,
        "generation_tokens": output_tokens,
    }
    return [
        *(Gauge(f"vllm:{name}", dict(labels), value) for name, value in gauges.items()),
        *(Counter(f"vllm:{name}", dict(labels), value) for name, value in counters.items()),
        *([] if recoveries is None else _of_recoveries(recoveries, labels)),
    ]


def _of_recoveries(found: Recoveries, labels: dict[str, str]) -> list[Metric]:
    return [
        *(
            Counter("drumline:engine_restarts", labels | {"cause": cause}, count)
            for cause, count in found.by_cause.items()
        ),
        Counter("drumline:engine_pause_seconds", dict(labels), found.pause_s),
        Counter("drumline:poisonous_requests", dict(labels), found.poisonous),
    ]
