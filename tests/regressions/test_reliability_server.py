"""Faults that others reported, done to a real server and its engine process: signals, hangs, overload, restarts.

Rows of the list of cases are named by project and number. Every stream of every test is looked at: it must end in
exactly one way (I1), and with the same text as an undisturbed one where it is complete (I2).
"""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.processes import Process, start, start_ready

from perilune.checkpoint.tiny import tiny_config, write_tiny

CHAT = "/v1/chat/completions"
STREAMS = 20
QUICK = ("--max-model-len", "4096", "--kv-tokens", "65536", "--max-num-seqs", "32")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stream ended: ``complete``, ``error`` (an event), ``refused`` (a status), or, never, ``cut``."""

    kind: str
    text: str = ""
    code: str = ""


def ask(text: str = "hi", max_tokens: int = 200) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
        "max_tokens": max_tokens,
    }


async def stream(client: httpx.AsyncClient, body: dict[str, Any], begun: Callable[[], None] = lambda: None) -> Outcome:
    """Asks, reads to the end, and judges it."""
    text, ends = "", []
    try:
        async with client.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                return Outcome("refused", code=f"{response.status_code} {error['code']}")
            async for line in response.aiter_lines():
                if not line:
                    continue
                begun()
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    ends.append(Outcome("complete"))
                    continue
                event = json.loads(data)
                if "error" in event:
                    ends.append(Outcome("error", code=event["error"]["code"]))
                    continue
                for choice in event["choices"]:
                    delta = choice["delta"]
                    text += (delta.get("content") or "") + (delta.get("reasoning_content") or "")
    except httpx.TransportError as error:
        return Outcome("cut", text, repr(error))
    assert len(ends) == 1, "every stream ends once"
    return Outcome(ends[0].kind, text, ends[0].code)


@asynccontextmanager
async def client_of(process: Process) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=process.url, timeout=60, limits=limits) as client:
        yield client


async def many(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[asyncio.Task[Outcome]], asyncio.Event]:
    """Twenty streams, and whether all of them have begun to answer."""
    begun, left = asyncio.Event(), set(range(STREAMS))

    def note(number: int) -> None:
        left.discard(number)
        if not left:
            begun.set()

    tasks = [asyncio.create_task(stream(client, body, lambda i=i: note(i))) for i in range(STREAMS)]  # type: ignore[misc]
    return tasks, begun


def engine_of(process: Process) -> psutil.Process:
    (engine,) = (
        child for child in psutil.Process(process.popen.pid).children() if "perilune.engine.child" in child.cmdline()
    )
    return engine


async def phase(client: httpx.AsyncClient) -> str:
    found: str = (await client.get("/ready")).json()["phase"]
    return found


async def wait_for_phase(client: httpx.AsyncClient, wanted: str, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while await phase(client) != wanted:  # noqa: ASYNC110 - it changes in another process
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny(path, tiny_config(max_position_embeddings=4096, num_hidden_layers=2))
    return path


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Process]:
    """For tests that leave it as it was."""
    with start_ready(str(tiny_model), *QUICK) as process:
        yield process


@pytest.fixture(scope="module")
def restarting(tiny_model: Path) -> Iterator[Process]:
    """One that starts new engines, and calls a step of six seconds hung."""
    arguments = ("--restart", "--step-deadline", "6", "--max-batched-tokens", "64")
    with start_ready(str(tiny_model), *QUICK, *arguments) as process:
        yield process


async def test_ids_that_clients_choose_are_echoed_and_not_used(server: Process) -> None:
    """vllm#15041: two requests with one id stopped the engine."""
    async with client_of(server) as client:
        body = {**ask(max_tokens=20), "stream": False}
        sent = [client.post(CHAT, json=body, headers={"x-request-id": "same"}) for _ in range(4)]
        answers = await asyncio.gather(*sent)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 4


async def test_a_stopped_engine_is_noticed_and_forgiven(server: Process) -> None:
    """sglang#6624, vllm#15483: health said 200 while nothing moved; what came then was lost. Here probes say so within
    five seconds, what comes is refused, and when the engine goes on every stream is completed as if nothing was."""
    async with client_of(server) as client:
        alone = await stream(client, ask())
        assert alone.kind == "complete"
        tasks, begun = await many(client, ask())
        await begun.wait()
        engine = engine_of(server)
        engine.suspend()
        try:
            await wait_for_phase(client, "silent", 5)
            refused = await client.post(CHAT, json=ask())
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await client.get("/health")).status_code == 200
        finally:
            engine.resume()
        await wait_for_phase(client, "ready", 5)
        assert set(await asyncio.gather(*tasks)) == {alone}


async def test_a_long_prefill_is_not_called_dead(server: Process) -> None:
    """sglang#22511: a healthy server was killed while it read a long prompt."""
    async with client_of(server) as client:
        prompts = [asyncio.create_task(stream(client, ask(str(i) * 3500, 4))) for i in range(4)]
        phases = set()
        while not all(prompt.done() for prompt in prompts):
            phases.add(await phase(client))
            await asyncio.sleep(0.05)
        assert {(await prompt).kind for prompt in prompts} == {"complete"}
    assert phases == {"ready"}


async def test_what_was_computed_for_a_client_that_left_is_still_hit(server: Process) -> None:
    """llama.cpp#29163: an interrupted connection dropped the cache. vllm#54947: or went on generating."""
    async with client_of(server) as client:
        body = ask("the same long beginning " * 40, 2000)
        async with client.stream("POST", CHAT, json=body) as response:
            async for _ in response.aiter_lines():
                break
        async with asyncio.timeout(5):
            while (await client.get("/ready")).json()["running"]:  # noqa: ASYNC110 - it changes in another process
                await asyncio.sleep(0.05)
        again = (await client.post(CHAT, json={**body, "stream": False, "max_tokens": 2})).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 500


async def test_a_killed_engine_ends_the_server(tiny_model: Path) -> None:
    """Without --restart: an error event in each stream at once, refusals, exit code 7."""
    with start_ready(str(tiny_model), *QUICK) as process:
        async with client_of(process) as client:
            tasks, begun = await many(client, ask(max_tokens=3000))
            await begun.wait()
            engine_of(process).kill()
            killed = time.monotonic()
            outcomes = await asyncio.gather(*tasks)
            assert time.monotonic() - killed < 3
            assert {outcome.kind for outcome in outcomes} == {"error"}
            late = await client.get("/ready")
            assert (late.status_code, late.json()["phase"]) == (503, "failed")
        assert process.wait() == 7
    assert "exit code -9" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize("when", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
async def test_with_restart_a_killed_engine_is_replaced(restarting: Process, when: str) -> None:
    """llumnix-ray#18: what a dead engine had begun went on beside what replaced it."""
    async with client_of(restarting) as client:
        await wait_for_phase(client, "ready", 30)
        alone = await stream(client, ask())
        body = ask(max_tokens=3000) if when == "decode" else ask("x" * 3000, 50)
        tasks, begun = await many(client, body)
        if when == "decode":
            await begun.wait()
        else:
            await asyncio.sleep(0.3)
        first = engine_of(restarting)
        first.kill()
        outcomes = await asyncio.gather(*tasks)
        kinds = {outcome.kind for outcome in outcomes}
        assert kinds <= {"error", "refused", "complete"}
        assert kinds & {"error", "refused"}
        assert all(outcome.code.startswith("503") for outcome in outcomes if outcome.kind == "refused")
        await wait_for_phase(client, "ready", 40)
        assert engine_of(restarting).pid != first.pid
        assert await stream(client, ask()) == alone, "one request by itself, and nobody else wakes the engine"


@pytest.mark.slow
async def test_a_hang_past_the_deadline_of_a_step_is_a_death(restarting: Process) -> None:
    """vllm#41530: five minutes passed before a hang was one."""
    async with client_of(restarting) as client:
        await wait_for_phase(client, "ready", 40)
        tasks, begun = await many(client, ask(max_tokens=3000))
        await begun.wait()
        first = engine_of(restarting)
        first.suspend()
        outcomes = await asyncio.gather(*tasks)
        assert {outcome.kind for outcome in outcomes} == {"error"}
        await wait_for_phase(client, "ready", 40)
        assert not first.is_running()
        assert (await stream(client, ask(max_tokens=5))).kind == "complete"


async def test_drain_lets_short_answers_end_and_tells_long_ones(tiny_model: Path) -> None:
    """vllm#24885, posthog#73863: streams were cut without a word."""
    with start_ready(str(tiny_model), *QUICK, "--grace", "6") as process:
        async with client_of(process) as client:
            short = asyncio.create_task(stream(client, ask(max_tokens=20)))
            long, begun = await many(client, ask(max_tokens=4000))
            await begun.wait()
            process.signal(signal.SIGTERM)
            await wait_for_phase(client, "draining", 1)
            assert (await stream(client, ask())).code == "503 server_draining"
            assert (await short).kind == "complete"
            outcomes = set(await asyncio.gather(*long))
        assert {(outcome.kind, outcome.code) for outcome in outcomes} == {("error", "shutting_down")}
        assert process.wait() == 0


@pytest.mark.slow
async def test_overload_gives_each_request_one_answer(tiny_model: Path) -> None:
    """sglang#33858, vllm#18826: queues had no bound, and what they refused had no answer."""
    bounds = ("--max-num-seqs", "2", "--max-queue", "4")
    with start_ready(str(tiny_model), *QUICK[:4], *bounds) as process:
        async with client_of(process) as client:
            outcomes = await asyncio.gather(*(stream(client, ask(max_tokens=30)) for _ in range(120)))
            kinds = [outcome.kind for outcome in outcomes]
            assert kinds.count("complete") + kinds.count("refused") == 120
            assert kinds.count("complete") >= 6
            assert {outcome.code for outcome in outcomes if outcome.kind == "refused"} == {"503 overloaded"}
            ready = (await client.get("/ready")).json()
            assert (ready["running"], ready["waiting"]) == (0, 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.slow
async def test_a_killed_server_leaves_nothing_in_the_way(tiny_model: Path) -> None:
    """sglang#22779: after kill -9 and a start on the same port requests hung."""
    port = str(free_port())
    with start_ready(str(tiny_model), *QUICK, "--port", port) as process:
        async with client_of(process) as client:
            tasks, begun = await many(client, ask(max_tokens=3000))
            await begun.wait()
            engine = engine_of(process)
            process.popen.kill()
            assert {outcome.kind for outcome in await asyncio.gather(*tasks)} == {"cut"}, "there is nobody to tell it"
    with start_ready(str(tiny_model), *QUICK, "--port", port) as process:
        assert psutil.wait_procs([engine], timeout=10)[1] == []
        async with client_of(process) as client:
            body = {**ask(max_tokens=2), "stream": False}
            assert {(await client.post(CHAT, json=body)).status_code for _ in range(200)} == {200}


@pytest.mark.slow
async def test_few_file_descriptors(tiny_model: Path) -> None:
    """F17: with 64 descriptors the server bounds its connections, answers those beyond, and lives."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with start(str(tiny_model), *QUICK, wrapper=("bash", "-c", 'ulimit -n 64; exec "$@"', "bash")) as process:
        process.wait_for("  try ")
        process.find_url()
        assert "file descriptors bound the connections" in process.stderr
        port = httpx.URL(process.url).port or 0
        held = []
        for _ in range(100):
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            held.append(connection)
        answered = sum(b"too_many_connections" in _received(connection) for connection in held[60:])
        assert answered > 20
        for connection in held:
            connection.close()
        await asyncio.sleep(0.5)
        async with client_of(process) as client:
            assert (await stream(client, ask(max_tokens=5))).kind == "complete"
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


def _received(connection: socket.socket) -> bytes:
    connection.settimeout(2)
    try:
        return connection.recv(4096)
    except (TimeoutError, ConnectionResetError):
        return b""
