"""Clients that leave: the engine stops within a step, whatever the moment, streaming or not."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perilune.config import EngineConfig
from perilune.server.limits import Limits
from perilune.server.state import SamplingDefaults

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, Served, ServerFactory

LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3000,
    "ignore_eos": True,
    "temperature": 0,
}


def settle(served: Served, seconds: float = 5) -> None:
    """Waits until nothing runs, and fails if something still does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = served.engine.status()
        if (status.running, status.waiting, served.state.in_flight) == (0, 0, 0):
            return
        time.sleep(0.01)
    pytest.fail(f"still busy: {served.engine.status()}, {served.state.in_flight} in flight")


@pytest.mark.parametrize("index", [0, 1, 2, 7])
def test_stream_left_at_an_event(server: Served, index: int) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        with client.stream("POST", "/v1/chat/completions", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            for _ in range(2 * index):
                next(lines)
        left = time.monotonic()
    settle(server)
    assert time.monotonic() - left < 3, "3,000 tokens take far longer"
    assert server.post({**LONG, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
def test_left_without_reading(server: Served, stream: bool, after_s: float) -> None:
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with server.connect() as sock:
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(after_s)
    settle(server)


def test_left_in_the_middle_of_the_body(server: Served) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with server.connect() as sock:
        sock.sendall(head + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.05)
        assert server.state.in_flight == 1
    settle(server)


def test_left_while_waiting_for_another_answer(server: Served) -> None:
    """The second request never ran; the first goes on undisturbed."""
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=30) as first:
        lines = first.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=LONG, timeout=0.3)
        deadline = time.monotonic() + 3
        while server.state.in_flight > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.state.in_flight == 1
        assert server.engine.status().waiting == 0
        for _ in range(10):
            next(lines)
    settle(server)


def test_many_leave(server: Served) -> None:
    body = {**LONG, "stream": True, "max_tokens": 10}
    for round_ in range(12):
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            if round_ % 2:
                assert "data: [DONE]" in lines
    settle(server)
    assert server.engine.status().phase == "ready"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_generator_is_closed(script: ScriptFactory, serve: ServerFactory, stream: bool) -> None:
    """What the engine takes as the abort."""
    engine = script(finish=None)
    engine.steps = [engine.ids("a")] * 3
    with serve(lambda: (engine, SamplingDefaults())) as served:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/chat/completions", json={**LONG, "stream": stream}, timeout=0.4)
        deadline = time.monotonic() + 3
        while (not engine.closed or served.state.in_flight) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.closed == 1
        assert served.state.in_flight == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_half_closed_connection_is_a_closed_one(
    script: ScriptFactory, serve: ServerFactory, caplog: pytest.LogCaptureFixture, stream: bool, path: str
) -> None:
    """The documented limit: a client that shuts its side down has left, even if it still reads."""
    caplog.set_level("INFO", "perilune.access")
    engine = script(finish=None)
    engine.steps = [engine.ids("a")] * 3
    wish = {"prompt": "hi", **LONG} if path == "/v1/completions" else LONG
    body = json.dumps({**wish, "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    with serve(lambda: (engine, SamplingDefaults())) as served, served.connect() as sock:
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not engine.requests:
            time.sleep(0.01)
        sock.shutdown(socket.SHUT_WR)
        left = time.monotonic()
        answer = b""
        while part := sock.recv(65536):
            answer += part
        assert time.monotonic() - left < 3
        assert b"[DONE]" not in answer
        assert stream or not answer
        deadline = time.monotonic() + 3
        while (not engine.closed or served.state.in_flight) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.closed == 1
    facts = [record.perilune_fields for record in caplog.records if hasattr(record, "perilune_fields")]
    assert [each.get("client_gone") for each in facts if each.get("path") == path] == [True]


def test_a_client_that_does_not_read_is_dropped(script: ScriptFactory, serve: ServerFactory) -> None:
    """Its request ends; it can't hold the engine by not reading."""
    engine = script(finish=None)
    engine.steps = [engine.ids("x" * 60_000)] * 200
    limits = Limits(send_timeout_s=0.3)
    body = json.dumps({**LONG, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serve(lambda: (engine, SamplingDefaults()), limits) as served, served.connect() as sock:
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + 10
        while (not engine.closed or served.state.in_flight) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert engine.closed == 1
        assert served.state.in_flight == 0


def test_too_many_at_once(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script(finish=None)
    engine.steps = [engine.ids("a")]
    engine.config = EngineConfig(max_model_len=engine.max_model_len, max_num_seqs=1)
    with serve(lambda: (engine, SamplingDefaults()), Limits(max_queue=1)) as served:
        with httpx.Client(base_url=served.url, timeout=30) as client:
            url, body = "/v1/chat/completions", {**LONG, "stream": True}
            with client.stream("POST", url, json=body) as a, client.stream("POST", url, json=body) as b:
                assert (a.status_code, b.status_code) == (200, 200)
                third = served.post(LONG)
                assert third.status_code == 503
                assert third.headers["retry-after"] == "1"
                assert third.json()["error"]["code"] == "overloaded"
        deadline = time.monotonic() + 3
        while served.state.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        assert served.state.in_flight == 0


def test_a_long_prompt_does_not_hold_up_others(server: Served) -> None:
    """While megabytes are read, rendered and tokenised, small requests are answered."""
    words = " ".join(str(number) for number in range(200_000))  # 1.3 MB
    body = json.dumps({"messages": [{"role": "user", "content": words}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    waits: list[float] = []
    with server.connect() as sock, httpx.Client(base_url=server.url, timeout=30) as client:
        client.post("/tokenize", json={"prompt": "x" * 70_000})  # starts the process that reads long requests
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        sock.settimeout(0.001)
        answer = b""
        start = time.monotonic()
        while not answer and time.monotonic() - start < 30:
            asked = time.monotonic()
            assert client.get("/health").status_code == 200
            waits.append(time.monotonic() - asked)
            try:
                answer = sock.recv(4096)
            except TimeoutError:
                continue
    assert b"context_length_exceeded" in answer
    assert len(waits) > 3, "the long prompt took some time"
    assert max(waits) < 0.5


def test_work_of_those_who_left_still_counts(server: Served) -> None:
    """A client that sends much and leaves can't have more done at once than one that stays."""
    words = " ".join(str(number) for number in range(100_000))
    body = json.dumps({"messages": [{"role": "user", "content": words}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(3):
        with server.connect() as sock:
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    most = 0
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not (most and server.state.in_flight == 0):
        most = max(most, server.state.in_flight)
        time.sleep(0.001)
    assert most >= 2
    settle(server, 10)
