"""/metrics: figures equal what clients were told, by our names and by vLLM's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from perilune.server.metrics import Metrics, Watch
from perilune.server.prepare import Order
from perilune.server.state import Engine, SamplingDefaults, ServerState
from perilune.types import FinishReason, SamplingParams, TokenOut

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, Served, ServerFactory

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}


def scraped(url: str) -> dict[str, float]:
    """Samples by name and labels, as Prometheus' own reader finds them."""
    response = httpx.get(f"{url}/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples(response.text)


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            assert f"{sample.name}{{{labels}}}" not in found
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.fixture
def fresh(script: ScriptFactory, serve: ServerFactory) -> Iterator[Served]:
    """A server that has counted nothing yet, and answers `abc` in three steps."""
    engine = script(delay_s=0.02)
    engine.steps = [engine.ids("a"), engine.ids("bc"), engine.ids("d")]
    with serve(lambda: (engine, SamplingDefaults())) as served:
        yield served


def test_counts_what_clients_were_told(fresh: Served) -> None:
    used = fresh.post(HI).json()["usage"]
    fresh.events(HI)
    fresh.post({**HI, "temperature": 3})
    found = scraped(fresh.url)
    assert found["perilune_prompt_tokens_total{}"] == 2 * used["prompt_tokens"]
    assert found["perilune_generated_tokens_total{}"] == 2 * used["completion_tokens"] == 8
    assert found["perilune_requests_total{outcome=complete}"] == 2
    assert found["perilune_requests_total{outcome=refused}"] == 1
    assert found["perilune_finished_sequences_total{finished_reason=stop}"] == 2
    assert found["perilune_http_responses_total{status=200}"] == 2
    assert found["perilune_http_responses_total{status=400}"] == 1
    assert found["perilune_time_to_first_token_seconds_count{}"] == 2
    assert 0.04 <= found["perilune_time_to_first_token_seconds_sum{}"] < 4
    assert found["perilune_inter_token_seconds_count{}"] == 6, "tokens, not messages"
    assert 0.08 <= found["perilune_inter_token_seconds_sum{}"] < 4
    assert found["perilune_request_seconds_count{}"] == 2
    assert found["perilune_request_generated_tokens_sum{}"] == 8
    assert found["perilune_ready{}"] == 1
    assert not any(name.startswith("vllm:") for name in found)


def test_a_message_of_several_tokens_counts_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 tokens in 3 messages of 4, 40 ms apart: 8 gaps of 10 ms (and 3 within the first message, of which no time is
    known)."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    metrics = Metrics(ServerState(("m",)))
    watch = metrics.watch()
    order = Order(
        model="m",
        stream=True,
        include_usage=False,
        prompts=((1, 2),),
        sampling=(SamplingParams(max_tokens=12),),
        n=1,
        seed=0,
        seeded=False,
        priority=0,
        cache_salt="",
        warning="",
    )
    with watch:
        watch.begin(order)
        for step in range(3):
            now += 0.3 if step == 0 else 0.04
            finish = FinishReason.LENGTH if step == 2 else None
            watch.news(0, TokenOut(request_id="r", completion_tokens=4 * step + 4, cached_tokens=1, finish=finish))
    found = samples(metrics.text().decode())
    assert found["perilune_inter_token_seconds_count{}"] == 8
    assert found["perilune_inter_token_seconds_sum{}"] == pytest.approx(0.08)
    assert (
        found["perilune_inter_token_seconds_bucket{le=0.01}"] + found["perilune_inter_token_seconds_bucket{le=0.025}"]
        >= 8
    )
    assert found["perilune_inter_token_seconds_bucket{le=0.005}"] == 0
    assert found["perilune_time_to_first_token_seconds_sum{}"] == pytest.approx(0.3)
    assert found["perilune_time_to_first_token_seconds_bucket{le=0.25}"] == 0
    assert found["perilune_time_to_first_token_seconds_bucket{le=0.5}"] == 1
    assert found["perilune_cached_tokens_total{}"] == 1
    assert found["perilune_ready{}"] == 0


def test_ends_that_are_no_answers(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script(finish=FinishReason.ERROR)
    engine.steps = [engine.ids("a")]
    with serve(lambda: (engine, SamplingDefaults())) as served:
        assert served.post(HI).status_code == 500
        httpx.post(f"{served.url}/v1/chat/completions", json={**HI, "stream": True})
        engine.finish = None
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json={**HI, "stream": True}) as response:
            next(response.iter_lines())
        deadline = time.monotonic() + 5
        while "perilune_requests_total{outcome=client_gone}" not in scraped(served.url):
            assert time.monotonic() < deadline
        found = scraped(served.url)
    assert found["perilune_requests_total{outcome=error}"] == 2
    assert found["perilune_generated_tokens_total{}"] == 3
    assert "perilune_requests_total{outcome=complete}" not in found


def test_faults_of_tool_calls(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    call, arguments, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    engine.steps = [engine.ids(call, "functions.f:0", arguments, "{nope", end, call, "functions.f:1", end)]
    tools = [{"type": "function", "function": {"name": "f"}}]
    with serve(lambda: (engine, SamplingDefaults())) as served:
        served.post({**HI, "tools": tools})
        found = scraped(served.url)
    assert found["perilune_dropped_calls_total{}"] == 1
    assert found["perilune_invalid_arguments_total{}"] == 1


def test_engine_figures_under_both_names(server: Served) -> None:
    """The real engine; vLLM's names only where they were asked for, with its labels and our values."""
    prompt = "a prompt of more than a block of the cache " * 3
    for _ in range(2):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, "cache_salt": "metrics"}, timeout=30)
    server.state.metrics_compat = "vllm"
    try:
        found = scraped(server.url)
    finally:
        server.state.metrics_compat = ""
    labels = "engine=0,model_name=tiny"
    stats = server.engine.status().stats
    assert found["perilune_prefix_hits_total{}"] == stats.prefix_hits > 0
    assert found["perilune_cached_tokens_total{}"] > 0
    assert found["perilune_kv_blocks{}"] == stats.total_blocks
    pairs = {
        "num_requests_running": "running_requests",
        "num_requests_waiting": "waiting_requests",
        "kv_cache_usage_perc": "kv_usage_ratio",
        "prefix_cache_hits_total": "prefix_hits_total",
        "num_preemptions_total": "preemptions_total",
        "prompt_tokens_total": "prompt_tokens_total",
        "prompt_tokens_cached_total": "cached_tokens_total",
        "generation_tokens_total": "generated_tokens_total",
        "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum": "inter_token_seconds_sum",
        "e2e_request_latency_seconds_count": "request_seconds_count",
    }
    for theirs, ours in pairs.items():
        assert found[f"vllm:{theirs}{{{labels}}}"] == found[f"perilune_{ours}{{}}"]
    assert found["vllm:request_success_total{engine=0,finished_reason=length,model_name=tiny}"] >= 2


def test_nothing_that_a_client_chose_is_a_label(fresh: Served) -> None:
    canary = "CANARY-53f0"
    fresh.post({**HI, "model": canary, "user": canary, canary: 1})
    httpx.get(f"{fresh.url}/{canary}", headers={"x-request-id": canary})
    assert canary not in httpx.get(f"{fresh.url}/metrics").text


def test_busy_threads_do_not_delay_it(script: ScriptFactory, serve: ServerFactory) -> None:
    """Those that asyncio lends to everybody may all be taken."""
    release = threading.Event()

    async def load() -> tuple[Engine, SamplingDefaults]:
        for _ in range(100):
            asyncio.get_running_loop().run_in_executor(None, release.wait, 10)
        return script(), SamplingDefaults()

    with serve(load) as served:
        try:
            assert httpx.get(f"{served.url}/metrics", timeout=3).status_code == 200
        finally:
            release.set()


def test_watch_is_harmless_before_it_begins() -> None:
    metrics = Metrics(ServerState(("m",)))
    with pytest.raises(ValueError, match="x"), Watch(metrics):
        raise ValueError("x")
    assert samples(metrics.text().decode())["perilune_requests_total{outcome=error}"] == 1
