"""Prometheus metrics, in a registry of our own so that nothing another library registers is served with them.

What the engine counts (requests, KV blocks, prefix hits) is read when ``/metrics`` is asked for; what the API server
sees (latencies, tokens, reasons) is counted as it happens. Names are ``drumline:`` and then what vLLM users expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from drumline.server.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
LENGTH_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class _EngineCollector(Collector):
    """Reads the engine's counters when asked."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        model = service.names[0]

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"drumline:{name}", text, labels=["model_name"])
            family.add_metric([model], value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(f"drumline:{name}", text, labels=["model_name"])
            family.add_metric([model], value)
            return family

        yield gauge("ready", "1 when requests are served", float(service.status == "ready"))
        if service.engine is None or service.engine.info is None:
            return
        stats = service.engine.stats()
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield gauge("num_requests_running", "Requests in the batch", stats.num_running)
        yield gauge("num_requests_waiting", "Requests that wait for a place in the batch", stats.num_waiting)
        yield gauge("kv_cache_usage_perc", "Used share of the KV blocks, 1 is all of them", used)
        yield gauge("kv_blocks", "KV blocks of the engine", service.engine.info.num_blocks)
        yield counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries)
        yield counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits)
        yield counter("num_preemptions", "Requests put back to be computed again", stats.preemptions)
        yield counter("engine_steps", "Steps of the engine", stats.steps)


class Metrics:
    """All metrics of one server."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(_EngineCollector(service))
        ProcessCollector(registry=self.registry)
        labels, values = ["model_name"], {"model_name": service.names[0]}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"drumline:{name}", text, labels, buckets=buckets, registry=self.registry)
            return family.labels(**values)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"drumline:{name}", text, labels, registry=self.registry).labels(**values)

        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN_BUCKETS)
        self.next_token = histogram("inter_token_latency_seconds", "Token to token of one output", TOKEN_BUCKETS)
        self.request = histogram("e2e_request_latency_seconds", "Arrival to end", REQUEST_BUCKETS)
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt", LENGTH_BUCKETS)
        self.output_length = histogram("request_generation_tokens", "Tokens of an output", LENGTH_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of all requests")
        self.output_tokens = counter("generation_tokens", "Output tokens of all requests")
        self.finished = Counter(
            "drumline:request_success",
            "Outputs that ended, by reason",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.http = Counter(
            "drumline:http_requests", "HTTP answers", ["method", "handler", "status"], registry=self.registry
        )
        self._model = service.names[0]

    def output_ended(self, reason: str, tokens: int) -> None:
        """One output of a request ended, or its client left (``abort``)."""
        self.finished.labels(self._model, reason).inc()
        self.output_length.observe(tokens)

    def text(self) -> bytes:
        """The answer of ``/metrics``."""
        return generate_latest(self.registry)
