"""A server's life: it listens before it can answer, drains before it ends, and dies with its engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perilune.errors import CheckpointError, ConfigError, EngineError, PortError, UsageError
from perilune.server.runner import Load, Loaded, Running, background, base_url, bind
from perilune.server.state import Engine, SamplingDefaults, ServerState, read_defaults

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, ServerFactory

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
DEFAULTS = SamplingDefaults()
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what the tests are about


def loads(engine: Engine) -> Load:
    """A load that has been done."""

    async def load() -> Loaded:
        return engine, DEFAULTS

    return load


class InThread:
    """A server that may not be ready yet."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.url = base_url(running.sock)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self.running.run())
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def ready(self) -> httpx.Response:
        return httpx.get(f"{self.url}/ready", timeout=5)

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def wait_for_phase(server: InThread, phase: str) -> httpx.Response:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            response = server.ready()
        except httpx.ConnectError:
            continue
        if response.json()["phase"] == phase:
            return response
        time.sleep(0.01)
    pytest.fail(f"never {phase}")


def test_ready_only_when_it_is(script: ScriptFactory) -> None:
    go = threading.Event()
    engine = script()
    state = ServerState(("m",))

    async def load() -> Loaded:
        state.progress = (3, 10)
        await asyncio.to_thread(go.wait, 10)
        return engine, DEFAULTS

    server = InThread(Running(state, bind("127.0.0.1", 0), load))
    try:
        loading = wait_for_phase(server, "loading")
        assert loading.status_code == 503
        assert loading.headers["retry-after"] == "1"
        assert loading.json() == {"phase": "loading", "running": 0, "waiting": 0, "loaded": 3, "total": 10}
        assert httpx.get(f"{server.url}/health").status_code == 200
        for refused in (
            httpx.post(f"{server.url}/v1/chat/completions", json=ASK),
            httpx.get(f"{server.url}/v1/models"),
        ):
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_loading"
        go.set()
        assert wait_for_phase(server, "ready").status_code == 200
        assert httpx.post(f"{server.url}/v1/chat/completions", json=ASK).status_code == 200
    finally:
        go.set()
        server.running.stop()
        server.join()
    assert server.error is None
    assert engine.phase == "stopped", "the engine was closed"


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    async def load() -> Loaded:
        raise CheckpointError("shard 3 is missing")

    server = InThread(Running(ServerState(("m",)), bind("127.0.0.1", 0), load))
    server.join()
    assert isinstance(server.error, CheckpointError)
    with (
        pytest.raises(CheckpointError, match="shard 3"),
        background(Running(ServerState(("m",)), bind("127.0.0.1", 0), load)),
    ):
        pytest.fail("there is nothing to talk to")


def test_stopped_while_it_loads() -> None:
    async def load() -> Loaded:
        await asyncio.sleep(10)
        raise CheckpointError("nobody hears this")

    server = InThread(Running(ServerState(("m",)), bind("127.0.0.1", 0), load))
    wait_for_phase(server, "loading")
    server.running.stop()
    server.join()
    assert server.error is None


def test_an_engine_that_fails_ends_the_server(script: ScriptFactory) -> None:
    engine = script()
    server = InThread(Running(ServerState(("m",)), bind("127.0.0.1", 0), loads(engine)))
    wait_for_phase(server, "ready")
    engine.phase = "failed"
    response = server.ready()
    assert response.status_code == 503
    assert response.json()["phase"] == "failed"
    assert "scripted" not in response.text
    server.join()
    assert isinstance(server.error, EngineError)
    assert "scripted failure" in server.error.message


def read_all(url: str, body: dict[str, Any], into: list[str], started: threading.Event) -> None:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=30) as response:
        for line in response.iter_lines():
            into.append(line)
            started.set()


@pytest.mark.parametrize("grace_s", [5, 0], ids=["time to finish", "no time"])
def test_the_end_of_open_streams(script: ScriptFactory, grace_s: int) -> None:
    """A stream that can finish in time does; one that can't is told so, and has no [DONE]."""
    engine = script(delay_s=0.05)
    engine.steps = [engine.ids("a")] * 20
    server = InThread(Running(ServerState(("m",)), bind("127.0.0.1", 0), loads(engine), grace_s=grace_s))
    wait_for_phase(server, "ready")
    lines: list[str] = []
    started = threading.Event()
    reader = threading.Thread(target=read_all, args=(server.url, ASK, lines, started))
    reader.start()
    assert started.wait(5)
    server.running.stop()
    reader.join(10)
    server.join()
    events = [line for line in lines if line]
    if grace_s:
        assert events[-1] == "data: [DONE]"
        assert len(events) == 22
    else:
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert "data: [DONE]" not in events
        assert engine.closed == 1
    with pytest.raises(httpx.ConnectError):
        server.ready()


def test_the_end_of_an_answer_that_is_awaited_whole(script: ScriptFactory) -> None:
    engine = script(finish=None)
    server = InThread(Running(ServerState(("m",)), bind("127.0.0.1", 0), loads(engine), grace_s=0))
    wait_for_phase(server, "ready")
    got: list[httpx.Response] = []
    url = f"{server.url}/v1/chat/completions"
    asker = threading.Thread(target=lambda: got.append(httpx.post(url, json=ASK, timeout=30)))
    asker.start()
    while not engine.requests:
        time.sleep(0.01)
    server.running.stop()
    asker.join(10)
    server.join()
    assert got[0].status_code == 503
    assert got[0].json()["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_the_end_while_a_body_is_read(script: ScriptFactory, path: str) -> None:
    state = ServerState(("m",))
    server = InThread(Running(state, bind("127.0.0.1", 0), loads(script()), grace_s=0))
    wait_for_phase(server, "ready")
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    with socket.create_connection(server.running.sock.getsockname(), timeout=10) as client:
        client.sendall(head.encode() + b'{"prom')
        while not state.in_flight:
            time.sleep(0.01)
        server.running.stop()
        answer = b""
        while more := client.recv(4096):
            answer += more
    server.join()
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 ")
    assert "connection: close" in head
    assert json.loads(body)["error"]["code"] == "shutting_down"


def test_a_port_in_use() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"cannot listen on 127.0.0.1:{port}: address already in use") as caught:
            bind("127.0.0.1", port)
    assert "--port" in caught.value.hint


@pytest.mark.parametrize("host", ["256.1.1.1", "no.such.host.invalid", "203.0.113.7", "", "a" * 100, ".", "a b"])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(PortError) as caught:
        bind(host, 0, public=True)
    assert f"{host}:0" in caught.value.message


def test_the_world_is_not_let_in_by_accident() -> None:
    with pytest.raises(UsageError, match="no authentication") as caught:
        bind(EVERYWHERE, 0)
    assert "--insecure-no-auth" in caught.value.hint


def test_the_world_is_let_in_on_purpose(script: ScriptFactory) -> None:
    """Any Host then; a foreign page still may not."""
    running = Running(ServerState(("m",)), bind(EVERYWHERE, 0, public=True), loads(script()))
    with background(running) as url:
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/v1/models", headers={"host": "gpu7.example"}).status_code == 200
        headers = {"host": "gpu7.example", "origin": "https://evil.example"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 403


def test_ipv6_where_there_is_any(serve: ServerFactory, script: ScriptFactory) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        sock = bind("::1", 0)
    except PortError:
        pytest.skip("no IPv6 loopback")
    with background(Running(ServerState(("m",)), sock, loads(script()))) as url:
        assert url.startswith("http://[::1]:")
        assert httpx.get(f"{url}/ready").status_code == 200


def test_generation_config(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults(1.0, 1.0)
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_p": null, "max_length": 5}')
    assert read_defaults(tmp_path) == SamplingDefaults(0.6, 1.0)
    for bad in ('{"temperature": "hot"}', '{"temperature": NaN}', '{"top_p": 0}', '{"top_p": true}', "[]", "{"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            read_defaults(tmp_path)
    path.unlink()
    for target in (path, tmp_path / "nowhere"):
        path.symlink_to(target)
        with pytest.raises(ConfigError, match=r"generation_config\.json` is missing or not a file"):
            read_defaults(tmp_path)
        path.unlink()
