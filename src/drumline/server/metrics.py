"""Prometheus metrics, in a registry of our own so that nothing another library registers is served with them.

What the engine counts (requests, KV blocks, prefix hits, seconds in each phase of a step) is read when ``/metrics`` is
asked for; what the API server sees (latencies, tokens, reasons) is counted as it happens, into plain numbers, since
it happens for every token: an observation by prometheus_client (locks, a walk over all buckets) costs as much as the
token's JSON.

Names, labels and buckets are vLLM's (``vllm:``), so that its dashboards and autoscalers work as they are; what vLLM
has no name for is ``drumline:``.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from drumline.engine.protocol import PAUSES, STEP_TOKENS, Recoveries
from drumline.text.requests import PreparedRequest

if TYPE_CHECKING:
    from drumline.engine.protocol import EngineStats
    from drumline.server.generation import Choice
    from drumline.server.service import Service

CONTENT_TYPE = CONTENT_TYPE_LATEST
ENGINE = "0"
"""Value of the label ``engine``: the DP rank."""
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN = (
    # The first two are ours: models that run in milliseconds are not rare.
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
OUTPUTS = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20)
PHASES = ("schedule", "dispatch", "wait", "update", "output", "forward", "sample")
"""Of the engine core: making plans, handing them out, waiting for answers, taking them in, handing outputs on. Of the
worker that answers: forward and sampling; the core waits meanwhile, or works on the next plan."""
CAUSES = ("signal", "exit", "exception", "oom", "hang")
"""What an engine can die of (``FailureReport.what``); there may be others."""
REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts in buckets."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def set(self, counts: Sequence[int], total: float) -> None:
        """Take what was counted elsewhere: for each bucket, and the sum of all values."""
        if counts:
            self._counts, self._sum = list(counts), total

    def family(self, labels: dict[str, str]) -> Metric:
        """For the answer of ``/metrics``."""
        rows, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self._counts, strict=True):
            below += count
            rows.append((bound, below))
        found = HistogramMetricFamily(self.name, self.text, labels=list(labels))
        found.add_metric(list(labels.values()), rows, self._sum)
        return found


class Metrics(Collector):
    """All metrics of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.load = 0
        """HTTP requests that outputs are made for."""
        self.prompt_computed = 0
        """Prompt tokens of all outputs that have begun, without those found in the prefix cache."""
        self.prompt_found = 0
        self.output_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.http: Counter[tuple[str, str, str]] = Counter()
        """Answers by method, path and status."""
        self._histograms: list[Histogram] = []
        histogram = self._histogram
        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN)
        self.next_token = histogram("inter_token_latency_seconds", "Token to token of one output", TOKEN)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a request's tokens after the first", TOKEN
        )
        self.request = histogram("e2e_request_latency_seconds", "Arrival to end", LATENCY)
        self.queue = histogram("request_queue_time_seconds", "Arrival to the first step", LATENCY)
        self.inference = histogram("request_inference_time_seconds", "First step to end", LATENCY)
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token", LATENCY)
        self.decode = histogram("request_decode_time_seconds", "First token to last token", LATENCY)
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt", COUNTS)
        self.output_length = histogram("request_generation_tokens", "Tokens of an output", COUNTS)
        self.longest_output = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest output of a request", COUNTS
        )
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "Tokens of an output's prompt that were computed, not found", COUNTS
        )
        self.preempted = histogram(
            "request_num_preemptions", "How often an output was put back to be computed again", PREEMPTIONS
        )
        self.param_n = histogram("request_params_n", "n of requests", OUTPUTS)
        self.param_max_tokens = histogram("request_params_max_tokens", "max_tokens of requests", COUNTS)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        self._histograms.append(Histogram(f"vllm:{name}", text, bounds))
        return self._histograms[-1]

    def text(self) -> bytes:
        """The answer of ``/metrics``."""
        return generate_latest(self.registry)

    # --------------------------------------------------------------------------------------------- what is counted

    def request_began(self, prepared: PreparedRequest) -> None:
        """A prompt with its parameters goes to the engine."""
        self.prompt_length.observe(len(prepared.prompt_token_ids))
        self.param_n.observe(prepared.params.n)
        if prepared.params.max_tokens is not None:
            self.param_max_tokens.observe(prepared.params.max_tokens)

    def prompt_done(self, tokens: int, cached: int) -> None:
        """An output has its first token: of this prompt, ``cached`` tokens were found in the prefix cache."""
        self.prompt_found += cached
        self.prompt_computed += tokens - cached

    def output_ended(self, reason: str, choice: Choice, arrival: float) -> None:
        """One output of a request ended, or its client left (``abort``)."""
        self.finished[reason] += 1
        self.output_length.observe(choice.came)
        if not choice.came:
            return
        self.computed.observe(len(choice.request.prompt_token_ids) - choice.cached)
        self.preempted.observe(choice.preemptions)
        self.decode.observe(choice.last - choice.first)
        if choice.came > 1:
            self.per_token.observe((choice.last - choice.first) / (choice.came - 1))
        began = min(arrival + choice.queued_s, choice.first)
        self.queue.observe(began - arrival)
        self.prefill.observe(choice.first - began)
        self.inference.observe(choice.last - began)

    def request_ended(self, arrival: float, longest: int) -> None:
        """All outputs of an HTTP request ended."""
        self.load -= 1
        self.request.observe(time.monotonic() - arrival)
        self.longest_output.observe(longest)

    # ------------------------------------------------------------------------------------------------ what is shown

    def collect(self) -> Iterator[Metric]:
        """Everything, for the registry."""
        service = self._service
        labels = {"model_name": service.names[0], "engine": ENGINE}
        yield _gauge("drumline:ready", "1 when requests are served", float(service.status == "ready"), labels)
        if service.start is not None:
            phases = GaugeMetricFamily(
                "drumline:start_seconds", "Seconds of the start by phase", labels=[*labels, "phase"]
            )
            for phase, seconds in service.start.phases.items():
                phases.add_metric([*labels.values(), phase], seconds)
            yield phases
            text = "Seconds from the command to ready"
            yield _gauge("drumline:start_whole_seconds", text, service.start.whole_s, labels)
        http = CounterMetricFamily("drumline:http_requests", "HTTP answers", labels=["method", "handler", "status"])
        for key, count in self.http.items():
            http.add_metric(list(key), count)
        yield http
        prompts = self.prompt_computed + self.prompt_found
        yield _counter("vllm:prompt_tokens", "Prompt tokens of all outputs that have begun", prompts, labels)
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of all outputs that have begun, by where their keys and values came from",
            labels=[*labels, "source"],
        )
        for source, count in (("local_compute", self.prompt_computed), ("local_cache_hit", self.prompt_found)):
            sources.add_metric([*labels.values(), source], count)
        yield sources
        yield _counter("vllm:generation_tokens", "Output tokens of all requests", self.output_tokens, labels)
        ended = CounterMetricFamily(
            "vllm:request_success", "Outputs that ended, by reason", labels=[*labels, "finished_reason"]
        )
        for reason, count in self.finished.items():
            ended.add_metric([*labels.values(), reason], count)
        yield ended
        for histogram in self._histograms:
            yield histogram.family(labels)
        if service.engine is not None and service.engine.info is not None:
            yield from _engine(service, service.engine.stats(), labels)
            if service.engine.recoveries is not None:
                yield from _recoveries(service.engine.recoveries, labels)


def _engine(service: Service, stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    assert service.engine is not None
    info = service.engine.info
    assert info is not None
    used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    yield _gauge("vllm:num_requests_running", "Requests in the batch", stats.num_running, labels)
    yield _gauge("vllm:num_requests_waiting", "Requests that wait for a place in the batch", stats.num_waiting, labels)
    reason = {**labels, "reason": "capacity"}
    yield _gauge("vllm:num_requests_waiting_by_reason", "The same by reason", stats.num_waiting, reason)
    yield _gauge("vllm:kv_cache_usage_perc", "Used share of the KV blocks, 1 is all of them", used, labels)
    config = {
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "cache_dtype": info.dtype,
        "engine": ENGINE,
    }
    yield _gauge("vllm:cache_config_info", "The KV cache", 1.0, config)
    counters = (
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queries),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.prefix_hits),
        ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed", stats.prefix_hits),
        ("vllm:num_preemptions", "Requests put back to be computed again", stats.preemptions),
        ("drumline:engine_steps", "Steps of the engine", stats.steps),
    )
    for name, text, value in counters:
        yield _counter(name, text, value, labels)
    steps = Histogram("vllm:iteration_tokens_total", "Tokens of a step, of prompts and outputs", STEP_TOKENS)
    steps.set(stats.step_tokens, stats.tokens)
    yield steps.family(labels)
    seconds = CounterMetricFamily(
        "drumline:step_seconds", "Seconds in each phase of the engine's steps", labels=[*labels, "phase"]
    )
    for phase in PHASES:
        seconds.add_metric([*labels.values(), phase], getattr(stats, f"{phase}_s"))
    yield seconds
    if stats.stage_busy_s:
        yield from _stages(stats, labels)


def _stages(stats: EngineStats, labels: dict[str, str]) -> Iterator[Metric]:
    """Of the pipeline; only where there are several stages."""
    text = "Seconds with a step in flight in the pipeline"
    yield _counter("drumline:pipeline_active_seconds", text, stats.active_s, labels)
    names = [*labels, "stage"]
    busy = CounterMetricFamily(
        "drumline:stage_busy_seconds", "Seconds that a pipeline stage has computed", labels=names
    )
    text = "Busy part of the last second (at least) with a step in flight, of each pipeline stage"
    lately = GaugeMetricFamily("drumline:stage_busy_fraction", text, labels=names)
    for stage, (seconds, fraction) in enumerate(zip(stats.stage_busy_s, stats.stage_busy, strict=True)):
        busy.add_metric([*labels.values(), str(stage)], seconds)
        lately.add_metric([*labels.values(), str(stage)], fraction)
    yield busy
    yield lately


def _recoveries(found: Recoveries, labels: dict[str, str]) -> Iterator[Metric]:
    restarts = CounterMetricFamily(
        "drumline:engine_restarts", "Times that a dead engine was started again", labels=[*labels, "cause"]
    )
    for cause in dict.fromkeys((*CAUSES, *found.by_cause)):  # all known ones from the start, so that rates are right
        count = found.by_cause[cause]
        restarts.add_metric([*labels.values(), cause], count)
    yield restarts
    pauses = Histogram("drumline:engine_pause_seconds", "From a death to the first token after it", PAUSES)
    pauses.set(found.pauses, found.pause_s)
    yield pauses.family(labels)
    yield _counter("drumline:poisonous_requests", "Requests failed since engines died of them", found.poisonous, labels)


def _gauge(name: str, text: str, value: float, labels: dict[str, str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: dict[str, Any]) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
