"""``GET /metrics``: what the server counted, what the engine tells, in Prometheus' text format.

Own names begin with ``perilune_``. On request the same figures also appear under vLLM's names, as far as they mean the
same, so that existing boards, routers and benchmarks find them. No label holds anything that a client chose. Time per
token is weighted by tokens: a message of k tokens counts k times, a k-th of the gap each.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from types import MappingProxyType, TracebackType
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.errors import PeriluneError
from perilune.server.limits import ClientGone
from perilune.server.prepare import Order
from perilune.server.replies import HttpError, error_info
from perilune.server.state import ServerState
from perilune.types import TokenOut

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

_VLLM: Final = MappingProxyType(
    {
        "perilune_running_requests": "vllm:num_requests_running",
        "perilune_waiting_requests": "vllm:num_requests_waiting",
        "perilune_kv_usage_ratio": "vllm:kv_cache_usage_perc",
        "perilune_prefix_queries": "vllm:prefix_cache_queries",
        "perilune_prefix_hits": "vllm:prefix_cache_hits",
        "perilune_preemptions": "vllm:num_preemptions",
        "perilune_prompt_tokens": "vllm:prompt_tokens",
        "perilune_cached_tokens": "vllm:prompt_tokens_cached",
        "perilune_generated_tokens": "vllm:generation_tokens",
        "perilune_finished_sequences": "vllm:request_success",
        "perilune_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "perilune_inter_token_seconds": "vllm:inter_token_latency_seconds",
        "perilune_request_seconds": "vllm:e2e_request_latency_seconds",
        "perilune_request_prompt_tokens": "vllm:request_prompt_tokens",
        "perilune_request_generated_tokens": "vllm:request_generation_tokens",
        "perilune_request_choices": "vllm:request_params_n",
        "perilune_request_max_tokens": "vllm:request_params_max_tokens",
    }
)
"""Our names and vLLM's for what means the same."""


class Metrics:
    """What the server counts. Each has a registry of its own, so that several servers fit into one process."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "perilune_requests", "Generating requests, by how they ended", ["outcome"], registry=registry
        )
        self.responses = Counter("perilune_http_responses", "HTTP responses", ["status"], registry=registry)
        self.finished = Counter(
            "perilune_finished_sequences", "Sequences that ended by themselves", ["finished_reason"], registry=registry
        )
        self.tokens = _TokenCounts()
        registry.register(self.tokens)
        self.dropped_calls = Counter(
            "perilune_dropped_calls", "Tool calls that were unfinished or named no tool", registry=registry
        )
        self.invalid_arguments = Counter(
            "perilune_invalid_arguments", "Tool calls whose arguments were no JSON", registry=registry
        )
        self.first_token = self._histogram(
            "perilune_time_to_first_token_seconds", "From a request's arrival to its first token", _SECONDS
        )
        self.inter_token = _WeightedHistogram("perilune_inter_token_seconds", "Between two tokens", _TOKEN_SECONDS)
        registry.register(self.inter_token)
        self.duration = self._histogram("perilune_request_seconds", "Generating requests that completed", _SECONDS)
        self.request_prompt = self._histogram("perilune_request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.request_generated = self._histogram("perilune_request_generated_tokens", "Tokens of an answer", _TOKENS)
        self.request_choices = self._histogram("perilune_request_choices", "`n`", (1, 2, 4, 8, 16))
        self.request_limit = self._histogram("perilune_request_max_tokens", "Longest answer allowed", _TOKENS)
        registry.register(_EngineCollector(state))
        registry.register(_AdmissionCollector(state))

    def watch(self) -> Watch:
        """For one generating request, from now on."""
        return Watch(self)

    def counted(self, app: ASGIApp) -> ASGIApp:
        """``app``, with its responses counted."""

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.responses.labels(str(message["status"])).inc()
                await send(message)

            await app(scope, receive, noting if scope["type"] == "http" else send)

        return counting

    def text(self) -> bytes:
        """The page. A millisecond or two."""
        page = generate_latest(self._registry)
        if self._state.metrics_compat != "vllm":
            return page
        compat = CollectorRegistry(auto_describe=False)
        compat.register(_VllmCollector(self._registry, self._state.names[0]))
        return page + generate_latest(compat)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, buckets=buckets, registry=self._registry)


class Watch:
    """One request. As a context manager it notes how the request ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._order: Order | None = None
        self._last: list[float] = []
        self._told: list[int] = []
        self._error: PeriluneError | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        outcome = _outcome(self._error or error)
        self._metrics.requests.labels(outcome).inc()
        if outcome == "complete":
            self._metrics.duration.observe(time.monotonic() - self._start)

    def begin(self, order: Order) -> None:
        """It was found right; sequences are sent to the engine now."""
        metrics = self._metrics
        self._order = order
        self._last = [0.0] * (order.n * len(order.prompts))
        self._told = [0] * len(self._last)
        metrics.request_choices.observe(order.n)
        for prompt, sampling in zip(order.prompts, order.sampling, strict=True):
            metrics.request_prompt.observe(len(prompt))
            metrics.request_limit.observe(sampling.max_tokens)

    def news(self, index: int, out: TokenOut) -> None:
        """A message about sequence ``index``."""
        more = out.completion_tokens - self._told[index]
        if more > 0:
            self._tokens(index, more, out)
        if out.finish is not None:
            self._metrics.finished.labels(out.finish.value).inc()
            self._metrics.request_generated.observe(out.completion_tokens)

    def parsed(self, dropped_calls: int, invalid_arguments: int) -> None:
        """What a chat's parser found wrong in an answer."""
        self._metrics.dropped_calls.inc(dropped_calls)
        self._metrics.invalid_arguments.inc(invalid_arguments)

    def received(self) -> None:
        """Its body is there: times count from now, whatever the client's line is like."""
        self._start = time.monotonic()

    def failed(self, error: PeriluneError) -> None:
        """The request failed, and its client was told so in the stream."""
        self._error = error

    def _tokens(self, index: int, more: int, out: TokenOut) -> None:
        metrics, now = self._metrics, time.monotonic()
        metrics.tokens.generated += more
        if self._told[index]:
            metrics.inter_token.observe((now - self._last[index]) / more, more)
        else:
            metrics.first_token.observe(now - self._start)
            if self._order is not None and index % self._order.n == 0:
                metrics.tokens.prompt += len(self._order.prompts[index // self._order.n])
                metrics.tokens.cached += out.cached_tokens
        self._told[index] = out.completion_tokens
        self._last[index] = now


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "complete"
    if isinstance(error, ClientGone):
        return "client_gone"
    if isinstance(error, asyncio.CancelledError):
        return "shutdown"
    status = error_info(error)[0]
    full = status == 503 and isinstance(error, HttpError)
    return "refused" if status < 500 or full else "error"


class _TokenCounts(Collector):
    """Plain numbers: they change with every token of every stream. For one thread that writes."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.generated = 0

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("perilune_prompt_tokens", "Tokens of prompts", value=self.prompt)
        yield CounterMetricFamily("perilune_cached_tokens", "Prompt tokens that were cached", value=self.cached)
        yield CounterMetricFamily("perilune_generated_tokens", "Generated tokens", value=self.generated)


class _WeightedHistogram(Collector):
    """A histogram in which one observation may count several times. For one thread that writes."""

    def __init__(self, name: str, about: str, buckets: tuple[float, ...]) -> None:
        self._name, self._about, self._buckets = name, about, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int) -> None:
        """``value``, ``weight`` times."""
        self._counts[bisect_left(self._buckets, value)] += weight
        self._sum += value * weight

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bound)) for bound in self._buckets), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._about, buckets=buckets, sum_value=self._sum)


class _EngineCollector(Collector):
    """The engine's own counters and gauges, as its last message told them. Absent while there is no engine."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        phase = self._state.phase
        yield GaugeMetricFamily("perilune_ready", "1 while requests are taken", value=float(phase == "ready"))
        if phase != "ready":
            return
        stats = self._state.engine.status().stats
        used = stats.total_blocks - stats.free_blocks
        gauges = {
            "running_requests": ("Sequences that run", stats.running),
            "waiting_requests": ("Sequences that wait", stats.waiting),
            "waiting_tokens": ("Their tokens", stats.waiting_tokens),
            "kv_usage_ratio": (
                "Share of the cache's blocks that running sequences hold",
                used / (stats.total_blocks or 1),
            ),
            "kv_blocks": ("Blocks of the cache", stats.total_blocks),
            "kv_cached_blocks": ("Blocks that a prompt can hit", stats.cached_blocks),
        }
        counters = {
            "steps": ("Steps planned", stats.step),
            "preemptions": ("Sequences that gave their blocks back", stats.preemptions),
            "prefix_queries": ("Prompt tokens looked up in the prefix cache", stats.prefix_queries),
            "prefix_hits": ("Prompt tokens found there", stats.prefix_hits),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(f"perilune_{name}", about, value=value)
        for name, (about, value) in counters.items():
            yield CounterMetricFamily(f"perilune_{name}", about, value=value)


class _AdmissionCollector(Collector):
    """Who was let in, who was not, and what the usage log could not keep."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        admission, log = self._state.admission, self._state.usage_log
        refused = CounterMetricFamily("perilune_rejections", "Requests refused or ended by a limit", labels=["reason"])
        for reason in ("rate_limited", "overloaded", "queue_timeouts", "request_timeouts"):
            refused.add_metric([reason.removesuffix("s")], getattr(admission.stats, reason))
        refused.add_metric(["bodies"], self._state.bodies.refused)
        refused.add_metric(["answers"], self._state.answers.refused)
        yield refused
        yield CounterMetricFamily(
            "perilune_admitted_requests", "Requests that passed the first check", value=admission.stats.admitted
        )
        yield GaugeMetricFamily(
            "perilune_queued_tokens", "Prompt tokens that no step has touched yet", value=admission.waiting_tokens
        )
        yield GaugeMetricFamily(
            "perilune_body_bytes", "Bytes of long request bodies that are held", value=self._state.bodies.held
        )
        yield GaugeMetricFamily(
            "perilune_answer_bytes",
            "Bytes of the tokenizer's long answers that are held",
            value=self._state.answers.held,
        )
        if log is not None:
            yield CounterMetricFamily("perilune_usage_log_lost", "Lines that could not be written", value=log.lost)


class _VllmCollector(Collector):
    """Our figures under vLLM's names and labels."""

    def __init__(self, ours: CollectorRegistry, model: str) -> None:
        self._ours = ours
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        for metric in self._ours.collect():
            name = _VLLM.get(metric.name)
            if name is None:
                continue
            renamed = Metric(name, metric.documentation, metric.type)
            for sample in metric.samples:
                renamed.add_sample(
                    name + sample.name.removeprefix(metric.name), {**self._labels, **sample.labels}, sample.value
                )
            yield renamed
