"""The connection below the API: malformed, slow, oversized and misdirected HTTP, over raw sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perilune.server.limits import Limits
from perilune.server.state import SamplingDefaults

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, Served, ServerFactory

OK = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def exchange(server: Served, data: bytes, *, more: bytes = b"", wait_s: float = 10) -> bytes:
    """Sends ``data`` (then ``more``, again and again, if given) and reads until the server closes."""
    with server.connect() as sock:
        sock.settimeout(wait_s)
        received = b""
        try:
            sock.sendall(data)
            for _ in range(100_000 if more else 0):
                sock.sendall(more)
        except OSError:
            pass  # the server has closed its side: what it said first is still to be read
        try:
            while piece := sock.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
    return received


def status_of(response: bytes) -> int:
    return int(response.split(b" ", 2)[1])


def error_of(response: bytes) -> dict[str, Any]:
    error = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    assert isinstance(error, dict)
    return error


@pytest.fixture(scope="module")
def quick(script: ScriptFactory, serve: ServerFactory) -> Iterator[Served]:
    """Small bounds and short times, an engine that answers at once."""
    limits = Limits(max_body_bytes=1000, body_timeout_s=0.3, header_timeout_s=0.3, drain_s=0.3, drain_bytes=200_000)
    with serve(lambda: (script(), SamplingDefaults()), limits) as served:
        yield served


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\x01\x02\x03\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"GET /h\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: 0x5\r\n\r\n", 400),
        (POST + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked, gzip\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 300 + b"\r\n", 431),
    ],
    ids=lambda value: repr(value[:60]) if isinstance(value, bytes) else "",
)
def test_malformed(server: Served, data: bytes, status: int) -> None:
    """One error in the common shape, then the connection is closed."""
    response = exchange(server, data, wait_s=8)
    assert response.startswith(b"HTTP/1.1 ")
    assert status_of(response) == status
    assert set(error_of(response)) == {"message", "type", "param", "code"}
    assert response.count(b"HTTP/1.1 ") == 1
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    "data",
    [b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y\r\nY: "],
)
def test_an_endless_header_is_cut(server: Served, data: bytes) -> None:
    assert status_of(exchange(server, data, more=b"a" * 1000)) == 431


def test_slow_head(quick: Served) -> None:
    start = time.monotonic()
    response = exchange(quick, b"GET /health HTTP/1.1\r\nHost: loc")
    assert status_of(response) == 408
    assert 0.2 < time.monotonic() - start < 3


def test_silence_is_closed_without_a_word(quick: Served) -> None:
    assert exchange(quick, b"") == b""


def test_slow_body(quick: Served) -> None:
    response = exchange(quick, POST + b"Content-Length: 50\r\n\r\n{")
    assert status_of(response) == 408
    assert error_of(response)["code"] == "request_timeout"


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"Content-Length: 5000\r\n\r\n", b""),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"400\r\n" + b"a" * 1024 + b"\r\n"),
    ],
    ids=["announced", "endless"],
)
def test_large_body(quick: Served, head: bytes, more: bytes) -> None:
    response = exchange(quick, POST + head, more=more)
    assert status_of(response) == 413
    assert b"connection: close" in response
    assert error_of(response)["code"] == "body_too_large"
    assert "1000 bytes" in error_of(response)["message"]


def test_a_client_that_asks_first_sends_no_large_body(quick: Served) -> None:
    start = time.monotonic()
    response = exchange(quick, POST + b"Content-Length: 5000\r\nExpect: 100-continue\r\n\r\n")
    assert status_of(response) == 413
    assert time.monotonic() - start < 0.25


def test_a_body_at_the_bound_is_read(quick: Served) -> None:
    body = OK + b" " * (1000 - len(OK))
    assert quick.post(body).status_code == 200
    assert quick.post(body + b" ").status_code == 413


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-type": "text/plain"}, "unsupported_media_type"),
        ({"content-type": ""}, "unsupported_media_type"),
        ({"content-type": "multipart/form-data; boundary=x"}, "unsupported_media_type"),
        ({"content-type": "application/jsonp"}, "unsupported_media_type"),
        ({"content-encoding": "gzip"}, "unsupported_encoding"),
    ],
    ids=str,
)
def test_media_types(server: Served, headers: dict[str, str], code: str) -> None:
    response = server.post(OK, headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["code"] == code


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_other_spellings(server: Served, media_type: str) -> None:
    assert server.post(OK, headers={"content-type": media_type}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/V1/models", 404),
        ("GET", "/v1/../v1/models", 404),
        ("GET", "/v1/models;x", 404),
        ("POST", "/v1/completion", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/tokenize", 405),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_paths_and_methods(server: Served, method: str, path: str, status: int) -> None:
    request = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    response = exchange(server, request.encode())
    assert status_of(response) == status
    assert set(error_of(response)) == {"message", "type", "param", "code"}
    if status == 405:
        assert b"\r\nallow: " in response


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: localhost", 200),
        ("Host: LOCALHOST:1234", 200),
        ("Host: 127.0.0.1:80", 200),
        ("Host: [::1]:80", 200),
        ("Host: evil.example", 421),
        ("Host: localhost.evil.example", 421),
        ("Host: a/health?x=", 421),
        ("Host: ", 421),
        ("Host: localhost\r\nOrigin: http://localhost", 200),
        ("Host: localhost\r\nOrigin: http://evil.example", 403),
        ("Host: localhost\r\nOrigin: null", 403),
        ("Host: localhost\r\nOrigin: http://[::1", 403),
    ],
)
def test_web_pages_cannot_reach_in(server: Served, headers: str, status: int) -> None:
    """DNS rebinding shows in Host, a foreign page in Origin."""
    request = f"GET /v1/models HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n"
    assert status_of(exchange(server, request.encode())) == status


def test_request_ids(server: Served) -> None:
    mine = httpx.get(f"{server.url}/health", headers={"x-request-id": "abc-1"}).headers
    assert mine["x-request-id"] == "abc-1"
    assert mine["x-trace-id"] != "abc-1"
    odd = httpx.get(f"{server.url}/health", headers={"x-request-id": "a b" * 80}).headers
    assert odd["x-request-id"] == odd["x-trace-id"]


def test_models(server: Served) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "tiny-alias"]
    assert all(card["max_model_len"] == 4096 for card in listed["data"])
    assert httpx.get(f"{server.url}/v1/models/tiny-alias").json() == listed["data"][1]
    assert httpx.head(f"{server.url}/v1/models").content == b""


def test_pipelined_requests_are_answered_in_order(server: Served) -> None:
    first = POST + b"Content-Length: %d\r\n\r\n" % len(OK) + OK
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    response = exchange(server, first + first + last)
    assert response.count(b"HTTP/1.1 200 OK") == 3
    assert response.rstrip().endswith(b'{"status":"ok"}')


def test_a_connection_serves_many_requests(server: Served) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(20):
            assert client.get("/health").json() == {"status": "ok"}
            assert client.get("/nothing").status_code == 404


def test_connections_that_say_nothing_cost_no_request(quick: Served) -> None:
    idle = [quick.connect() for _ in range(50)]
    try:
        assert httpx.get(f"{quick.url}/health").status_code == 200
    finally:
        for sock in idle:
            sock.shutdown(socket.SHUT_RDWR)
            sock.close()
