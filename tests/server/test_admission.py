"""The queue's bounds, deadlines, what is charged, and what the records say afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perilune.config import EngineConfig
from perilune.errors import UsageError
from perilune.server.auth import KeyLimits, KeyRing, key_of
from perilune.server.limits import Limits
from perilune.server.records import UsageLine
from perilune.server.runner import Loaded, Running, background, bind
from perilune.server.state import SamplingDefaults, ServerState
from perilune.server.usage import UsageLog

if TYPE_CHECKING:
    from tests.server.conftest import Script, ScriptFactory

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-canary-0123456789"
CHAT = "/v1/chat/completions"


@contextmanager
def serving(
    engine: Script, limits: Limits, key: KeyLimits | None = None, log: UsageLog | None = None
) -> Iterator[tuple[httpx.Client, ServerState]]:
    async def load() -> Loaded:
        return engine, SamplingDefaults()

    keys = None if key is None else KeyRing([key_of("canary", KEY, key)])
    state = ServerState(("m", "alias"), limits, keys, log)
    headers = {} if key is None else {"authorization": f"Bearer {KEY}"}
    with (
        background(Running(state, bind("127.0.0.1", 0), load, grace_s=0)) as url,
        httpx.Client(base_url=url, headers=headers, timeout=20) as client,
    ):
        yield client, state


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask_aside(client: httpx.Client, body: dict[str, Any], answers: list[httpx.Response]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(client.post(CHAT, json=body)))
    thread.start()
    return thread


def test_prompt_tokens_that_wait_are_bounded(script: ScriptFactory) -> None:
    """A long prompt alone is let in; beside others that wait it is not."""
    engine = script(finish=None)
    engine.steps = [[]] * 0
    long = {"messages": [{"role": "user", "content": "x" * 200}]}
    with serving(engine, Limits(max_queue_tokens=100, queue_timeout_s=3.0)) as (client, state):
        answers: list[httpx.Response] = []
        first = ask_aside(client, long, answers)
        until(lambda: state.admission.waiting_tokens > 200)
        second = client.post(CHAT, json=ASK)
        assert second.status_code == 503
        assert second.json()["error"]["code"] == "overloaded"
        assert int(second.headers["retry-after"]) >= 1
        first.join()
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "queue_timeout"
        assert state.admission.waiting_tokens == 0
        assert state.admission.stats.overloaded == 1
        assert state.admission.stats.queue_timeouts == 1
        told = client.get("/metrics").text
        assert 'perilune_rejections_total{reason="overloaded"} 1.0' in told
        assert 'perilune_rejections_total{reason="queue_timeout"} 1.0' in told
        assert 'perilune_rejections_total{reason="rate_limited"} 0.0' in told
        assert "perilune_queued_tokens 0.0" in told
    assert engine.closed == 1, "the engine was told"


def test_how_many_may_wait(script: ScriptFactory) -> None:
    engine = script(finish=None)
    engine.config = EngineConfig(max_model_len=4096, max_num_seqs=1)
    with serving(engine, Limits(max_queue=1, queue_timeout_s=1.0)) as (client, state):
        answers: list[httpx.Response] = []
        threads = [ask_aside(client, ASK, answers) for _ in range(2)]
        until(lambda: state.in_flight == 2)
        assert client.post(CHAT, content=b"no JSON at all").status_code == 503, "refused before its body is read"
        for thread in threads:
            thread.join()


def test_one_request_of_many_sequences_leaves_places_to_others(script: ScriptFactory) -> None:
    """Its sequences come into the engine as places become free, and wait under its own deadline, not the queue's."""
    engine = script(delay_s=0.05)
    engine.steps = [engine.ids("a")] * 2
    engine.config = EngineConfig(max_model_len=4096, max_num_seqs=4)
    with serving(engine, Limits(queue_timeout_s=0.4)) as (client, state):
        response = client.post("/v1/completions", json={"prompt": [f"prompt {n}" for n in range(40)], "stream": True})
        assert response.status_code == 200
        assert response.text.count('"finish_reason":"stop"') == 40
        assert "[DONE]" in response.text
        assert engine.most_running == 4
        assert (state.admission.waiting_tokens, engine.running, engine.closed) == (0, 0, 0)


def test_a_request_that_leaves_with_sequences_unsent_leaves_nothing(script: ScriptFactory) -> None:
    engine = script(finish=None)
    engine.steps = [engine.ids("a")]
    engine.config = EngineConfig(max_model_len=4096, max_num_seqs=2)
    with serving(engine, Limits(request_timeout_s=0.3)) as (client, state):
        response = client.post("/v1/completions", json={"prompt": ["a", "b", "c", "d", "e"]})
        assert response.status_code == 408
        assert (state.admission.waiting_tokens, engine.running, len(engine.requests)) == (0, 0, 2)


def test_a_key_s_concurrency_bounds_its_sequences(script: ScriptFactory) -> None:
    engine = script(delay_s=0.02)
    engine.steps = [engine.ids("a")] * 2
    with serving(engine, Limits(), KeyLimits(concurrency=3)) as (client, _):
        answers: list[httpx.Response] = []
        threads = [ask_aside(client, {**ASK, "n": 8}, answers) for _ in range(3)]
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 3
        assert engine.most_running == 3


def test_a_key_s_own_sequences_in_the_way_are_no_fault_of_the_server(script: ScriptFactory) -> None:
    engine = script(finish=None)
    engine.steps = [engine.ids("a")]
    with serving(engine, Limits(queue_timeout_s=0.3, request_timeout_s=2), KeyLimits(concurrency=2)) as (client, _):
        answers: list[httpx.Response] = []
        first = ask_aside(client, {**ASK, "n": 2}, answers)
        until(lambda: engine.running == 2)
        second = client.post(CHAT, json=ASK)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(second.headers["retry-after"]) >= 1
        first.join()


def test_prompts_of_one_request_are_charged_together_or_not_at_all(script: ScriptFactory) -> None:
    engine = script()
    engine.steps = [engine.ids("a")]
    with serving(engine, Limits(), KeyLimits(tokens_per_minute=300)) as (client, _):
        assert client.post("/v1/completions", json={"prompt": "x" * 150}).status_code == 200
        asked = len(engine.requests)
        before = int(client.get("/v1/models").headers["x-ratelimit-remaining-tokens"])
        refused = client.post("/v1/completions", json={"prompt": ["y" * 30] * 3 + ["z" * 30] * 5})
        assert refused.status_code == 429, "though each prompt alone would fit"
        assert len(engine.requests) == asked
        after = int(client.get("/v1/models").headers["x-ratelimit-remaining-tokens"])
        assert after >= before, "what was refused is not charged"
        assert client.post("/v1/completions", json={"prompt": ["y" * 30] * 2}).status_code == 200


def test_what_never_began_is_neither_charged_nor_billed(script: ScriptFactory, tmp_path: Path) -> None:
    engine = script(finish=None)
    log = UsageLog(tmp_path / "usage.jsonl")
    limits = Limits(queue_timeout_s=0.2)
    with serving(engine, limits, KeyLimits(tokens_per_minute=300), log) as (client, _):
        response = client.post("/v1/completions", json={"prompt": "x" * 200})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
        assert int(response.headers["x-ratelimit-remaining-tokens"]) == 300
        told = client.get("/metrics").text
        assert 'perilune_requests_total{outcome="refused"} 1.0' in told
    (written,) = map(json.loads, (tmp_path / "usage.jsonl").read_text().splitlines())
    assert (written["prompt_tokens"], written["error"]) == (0, "queue_timeout")


def test_tokens_go_back_where_they_came_from(script: ScriptFactory) -> None:
    """A key whose limit was changed meanwhile gets no tokens for free."""
    engine = script(finish=None)
    with serving(engine, Limits(queue_timeout_s=0.4), KeyLimits(tokens_per_minute=600)) as (client, state):
        answers: list[httpx.Response] = []
        body = {"messages": [{"role": "user", "content": "x" * 200}]}
        waiting = ask_aside(client, body, answers)
        until(lambda: state.admission.waiting_tokens > 200)
        state.set_keys(KeyRing([key_of("canary", KEY, KeyLimits(tokens_per_minute=1000))]))
        tenant, loop = state.admission.tenant("canary"), time.monotonic()
        tenant.charge(900, loop)
        waiting.join()
        assert answers[0].status_code == 503
        left = int(answers[0].headers["x-ratelimit-remaining-tokens"])
        assert left < 150, "100, and what a second fills in"


def test_a_lower_concurrency_is_the_key_s_own_limit_for_those_who_wait(script: ScriptFactory) -> None:
    engine = script(finish=None)
    engine.steps = [engine.ids("a")]
    with serving(engine, Limits(queue_timeout_s=0.5, request_timeout_s=2), KeyLimits(concurrency=2)) as (client, state):
        answers: list[httpx.Response] = []
        threads = [ask_aside(client, {**ASK, "n": 2}, answers)]
        until(lambda: engine.running == 2)
        threads.append(ask_aside(client, ASK, answers))
        until(lambda: state.in_flight == 2)
        state.set_keys(KeyRing([key_of("canary", KEY, KeyLimits(concurrency=1))]))
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in answers) == [408, 429]
        assert state.admission.stats.queue_timeouts == 0


def test_a_stream_that_failed_is_told_apart_in_the_logs(script: ScriptFactory, tmp_path: Path) -> None:
    engine = script(finish=None)
    engine.steps = [engine.ids("a")]
    log = UsageLog(tmp_path / "usage.jsonl")
    with serving(engine, Limits(request_timeout_s=0.3), None, log) as (client, _):
        assert client.post(CHAT, json={**ASK, "stream": True}).status_code == 200
        assert client.post(CHAT, content=b"{").status_code == 415
        told = client.get("/metrics").text
        assert 'perilune_requests_total{outcome="refused"} 2.0' in told
    first, second = map(json.loads, (tmp_path / "usage.jsonl").read_text().splitlines())
    assert (first["status"], first["error"], first["finish"]) == (200, "deadline_exceeded", ["abort"])
    assert (second["status"], second["error"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_the_deadline_of_a_request(script: ScriptFactory, stream: bool) -> None:
    engine = script(finish=None)
    engine.steps = [engine.ids("a")]
    with serving(engine, Limits(request_timeout_s=60)) as (client, state):
        start = time.monotonic()
        response = client.post(CHAT, json={**ASK, "stream": stream}, headers={"x-request-timeout-s": "0.4"})
        assert 0.3 < time.monotonic() - start < 5
        if stream:
            assert response.status_code == 200
            last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
            assert "[DONE]" not in response.text
        else:
            assert response.status_code == 408
            assert response.headers["x-should-retry"] == "false"
            last = response.json()
        assert last["error"]["code"] == "deadline_exceeded"
        assert state.admission.stats.request_timeouts == 1
        until(lambda: state.in_flight == 0)
    assert engine.closed == 1


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", "", "1e400x"])
def test_deadlines_that_are_none(script: ScriptFactory, value: str) -> None:
    with serving(script(), Limits()) as (client, _):
        response = client.post(CHAT, json=ASK, headers={"x-request-timeout-s": value})
    assert response.status_code == 400
    assert "x-request-timeout-s" in response.json()["error"]["message"]


def test_the_server_s_deadline_bounds_the_client_s(script: ScriptFactory) -> None:
    with serving(script(finish=None), Limits(request_timeout_s=0.3, queue_timeout_s=9)) as (client, _):
        response = client.post(CHAT, json=ASK, headers={"x-request-timeout-s": "inf"})
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")


def test_tokens_per_minute_are_prompt_and_answer(script: ScriptFactory) -> None:
    engine = script()
    engine.steps = [engine.ids("a")] * 30
    with serving(engine, Limits(), KeyLimits(tokens_per_minute=300)) as (client, _):
        first = client.post(CHAT, json=ASK)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-tokens"] == "300"
        used = first.json()["usage"]["total_tokens"]
        left = int(client.get("/v1/models").headers["x-ratelimit-remaining-tokens"])
        assert 0 <= left - (300 - used) <= 20, "it fills again by 5 tokens a second"
        answers = [client.post(CHAT, json=ASK) for _ in range(4)]
        assert answers[-1].status_code == 429
        assert answers[-1].json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60


def test_max_tokens_and_priority_of_a_key(script: ScriptFactory) -> None:
    engine = script()
    with serving(engine, Limits(), KeyLimits(max_tokens=7, priority=(3, 5))) as (client, _):
        assert client.post(CHAT, json=ASK).status_code == 200, "no wish is no refusal"
        assert engine.requests[0].sampling.max_tokens == 7
        assert engine.requests[0].priority == 3
        assert client.post(CHAT, json={**ASK, "max_tokens": 7}).status_code == 200
        refused = client.post(CHAT, json={**ASK, "max_tokens": 8})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "max_tokens"


def test_the_usage_log(script: ScriptFactory, tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    engine = script()
    engine.steps = [engine.ids("ab"), engine.ids("c")]
    log = UsageLog(path)
    with serving(engine, Limits(), KeyLimits(), log) as (client, _):
        trace = client.post(CHAT, json=ASK).headers["x-trace-id"]
        client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
        client.get("/v1/models")
        path.rename(tmp_path / "usage.1")
        log.reopen()
        client.post(CHAT, json={**ASK, "model": "alias"})
    first, second = [json.loads(line) for line in (tmp_path / "usage.1").read_text().splitlines()]
    assert (first["request_id"], first["key"], first["model"], first["status"]) == (trace, "canary", "m", 200)
    assert first["prompt_tokens"] == len(engine.requests[0].prompt)
    assert (first["completion_tokens"], first["finish"]) == (3, ["stop"])
    assert 0 <= first["queued_s"] <= first["total_s"]
    assert (second["status"], second["completion_tokens"]) == (400, 0)
    (last,) = map(json.loads, path.read_text().splitlines())
    assert last["model"] == "alias"
    for text in (path.read_text(), (tmp_path / "usage.1").read_text()):
        assert KEY not in text
    assert oct(path.stat().st_mode & 0o777) == "0o640"


def line(request_id: str) -> UsageLine:
    return UsageLine(
        time=0.0,
        request_id=request_id,
        key="",
        model="m",
        status=200,
        error="",
        client_gone=False,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        finish=["stop"],
        queued_s=None,
        first_token_s=None,
        total_s=0.0,
    )


def test_a_full_disk_costs_lines_not_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """F16: a file system of 64 KiB fills up; what is in the file stays whole lines; it goes on when there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount")
    try:
        log = UsageLog(disk / "usage.jsonl")
        for number in range(1000):
            log.write(line(f"{number:064}"))
        until(lambda: log._waiting.empty() and log.lost > 0)
        lines = (disk / "usage.jsonl").read_bytes().split(b"\n")
        assert lines.pop() == b""
        assert all(json.loads(each) for each in lines)
        assert caplog.text.count("the usage log loses lines") == 1
        os.truncate(disk / "usage.jsonl", 0)
        log.write(line("after"))
        log.close()
        assert json.loads((disk / "usage.jsonl").read_bytes())["request_id"] == "after"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_usage_log_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: is a directory"):
        UsageLog(tmp_path)
