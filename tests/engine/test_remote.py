"""The engine process: the same streams, and what becomes of them when it is stopped, killed, hung or cannot start."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from perilune.engine.options import EngineOptions
from perilune.engine.remote import RemoteEngine, Supervision
from perilune.errors import CapacityError, CheckpointError, ContextLengthError, EngineError, PortError, UsageError
from perilune.types import FinishReason, Request, SamplingParams, TokenOut

OPTIONS = EngineOptions(max_model_len=4096, threads=1)


@asynccontextmanager
async def started(
    model: Path, supervision: Supervision | None = None, options: EngineOptions = OPTIONS
) -> AsyncIterator[RemoteEngine]:
    engine = await RemoteEngine.start(model, options, supervision)
    try:
        yield engine
    finally:
        await engine.close()


def request(request_id: str = "r", max_tokens: int = 8) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(id=request_id, prompt=tuple(b"hello moon"), sampling=sampling)


async def collect(engine: RemoteEngine, wanted: Request) -> list[TokenOut]:
    return [out async for out in engine.generate(wanted)]


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 — what is waited for happens in another process
            await asyncio.sleep(0.02)


def engines() -> list[psutil.Process]:
    """Engine processes of this one; other children, of other tests, may live or be dying beside them."""
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "perilune.engine.child" in p.cmdline()]


def child() -> psutil.Process:
    """The engine process of this test."""
    (process,) = engines()
    return process


async def test_streams_aborts_and_refusals(tiny_model: Path) -> None:
    async with started(tiny_model) as engine:
        news = await asyncio.gather(*(collect(engine, request(f"r{i}")) for i in range(4)))
        told = [[token for out in outs for token in out.tokens] for outs in news]
        assert len(told[0]) == 8
        assert told == [told[0]] * 4
        async with aclosing(engine.generate(request("long", 4000))) as stream:
            async for _ in stream:
                break
        await until(lambda: engine.status().stats.step > 8 and engine.status().running == 0)
        with pytest.raises(ContextLengthError):
            await collect(engine, request(max_tokens=5000))
        assert engine.status().stats.generated_tokens >= 32
        process = child()
    assert not process.is_running()
    assert engine.status().phase == "stopped"
    with pytest.raises(EngineError, match="was stopped"):
        await collect(engine, request())


async def test_a_killed_engine_ends_streams_at_once_and_is_failed(tiny_model: Path) -> None:
    async with started(tiny_model) as engine:
        stream = engine.generate(request("long", 4000))
        await anext(stream)
        child().kill()
        async with asyncio.timeout(5):
            last = [out async for out in stream][-1]
        assert (last.finish, last.error) == (FinishReason.ERROR, "the engine failed")
        assert engine.status().phase == "failed"
        assert "exit code -9" in engine.status().error
        with pytest.raises(EngineError, match="the engine failed"):
            await collect(engine, request())


async def test_with_restart_a_new_engine_takes_over(tiny_model: Path) -> None:
    async with started(tiny_model, Supervision(restart=True)) as engine:
        before = await collect(engine, request())
        stream = engine.generate(request("long", 4000))
        await anext(stream)
        first = child()
        first.kill()
        assert [out async for out in stream][-1].finish == FinishReason.ERROR
        await until(lambda: engine.status().phase == "loading")
        await until(lambda: engine.status().phase == "ready")
        assert child().pid != first.pid
        after = await collect(engine, request())
        assert [out.tokens for out in after] == [out.tokens for out in before]


async def test_a_stopped_process_is_noticed_and_forgiven(tiny_model: Path) -> None:
    """sglang#6624: health said 200 while nothing moved."""
    async with started(tiny_model) as engine:
        process = child()
        process.suspend()
        try:
            await until(lambda: engine.status().phase == "silent", seconds=5)
            assert "has been silent for" in engine.status().error
        finally:
            process.resume()
        await until(lambda: engine.status().phase == "ready", seconds=5)
        assert (await collect(engine, request()))[-1].finish == FinishReason.LENGTH


async def test_a_step_past_its_deadline_ends_the_engine(tiny_model: Path) -> None:
    """vllm#41530: five minutes passed until a hang was noticed. Here every step is too long."""
    async with started(tiny_model, Supervision(step_deadline_s=0.0)) as engine:
        stream = engine.generate(request("long", 4000))
        async with asyncio.timeout(20):
            last = [out async for out in stream][-1]
        assert last.finish == FinishReason.ERROR
        assert "has been running for" in engine.status().error


async def test_what_went_wrong_at_the_start_comes_out_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="memory are free"):
        await RemoteEngine.start(tiny_model, EngineOptions(kv_tokens=1 << 40))
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tiny_model, tmp_path / "model", ignore=ignore)
    with pytest.raises(CheckpointError):
        await RemoteEngine.start(tmp_path / "model")
    assert not engines()


async def test_closing_while_it_loads(tiny_model: Path) -> None:
    task = asyncio.create_task(RemoteEngine.start(tiny_model, OPTIONS))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not engines()


@pytest.mark.parametrize("ready", [True, False], ids=["ready", "loading"])
def test_an_engine_does_not_outlive_its_server(tiny_model: Path, tmp_path: Path, ready: bool) -> None:
    """Nor leave its sockets behind; while it loads it has no heartbeat yet."""
    script = (
        "import asyncio, pathlib, sys\n"
        "from perilune.engine.remote import RemoteEngine\n"
        "async def main():\n"
        f"    engine = await RemoteEngine.start(pathlib.Path({str(tiny_model)!r}))\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(100)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as server:
        if ready:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 20
        while not (children := psutil.Process(server.pid).children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_cannot_hold_sockets(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path / ("x" * 120), tmp_path / "absent"):
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        if len(folder.name) > 100:
            folder.mkdir()
        with pytest.raises(EngineError, match="could not be started"):
            await RemoteEngine.start(tiny_model, OPTIONS)


def test_the_server_side_needs_no_torch() -> None:
    script = "import sys, perilune.engine.remote; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


class Clients:
    """Sockets of those who follow an engine."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []

    def socket(self, kind: int, address: str, queue: int = 0) -> zmq.asyncio.Socket:
        made = self._context.socket(kind)
        self._sockets.append(made)
        made.setsockopt(zmq.LINGER, 0)
        made.set_hwm(queue)
        if kind == zmq.SUB:
            made.subscribe(b"kv")
        made.connect(address)
        return made

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self._context.term()


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    made = Clients()
    try:
        yield made
    finally:
        made.close()


async def next_batch(subscriber: zmq.asyncio.Socket) -> tuple[int, list[dict[str, Any]]]:
    async with asyncio.timeout(20):
        topic, number, payload = await subscriber.recv_multipart()
    _, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, rank) == (b"kv", 0)
    return int.from_bytes(number, "big"), events


def publishing(folder: Path) -> EngineOptions:
    return replace(
        OPTIONS, kv_events=f"ipc://{folder}/events", kv_events_replay=f"ipc://{folder}/replay", kv_events_topic="kv"
    )


async def test_cache_events_are_published_and_can_be_asked_for_again(
    tiny_model: Path, tmp_path: Path, clients: Clients
) -> None:
    """What routers written for vLLM decode: three frames, maps with ``type``, a replay that ends with all ones."""
    options = publishing(tmp_path)
    subscriber = clients.socket(zmq.SUB, options.kv_events)
    replay = clients.socket(zmq.DEALER, options.kv_events_replay)
    async with started(tiny_model, options=options) as engine:
        assert await next_batch(subscriber) == (0, [{"type": "AllBlocksCleared"}])
        prompt = tuple(range(70))
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        await collect(engine, Request(id="a", prompt=prompt, sampling=sampling))
        number, events = await next_batch(subscriber)
        assert number == 1
        assert [event["type"] for event in events] == ["BlockStored"] * 2
        assert events[0]["token_ids"] == list(prompt[:32])
        assert events[1]["parent_block_hash"] == events[0]["block_hashes"][0]
        assert events[0]["block_size"] == 32
        await replay.send_multipart((b"", b"junk"))
        await replay.send_multipart((b"", bytes(7) + b"\x01"))
        async with asyncio.timeout(20):
            empty, topic, told, payload = await replay.recv_multipart()
            assert (empty, topic, told) == (b"", b"kv", bytes(7) + b"\x01")
            assert msgspec.msgpack.decode(payload)[1] == events
            assert await replay.recv_multipart() == [b"", b"", b"\xff" * 8, b""]


async def test_a_subscriber_follows_from_an_engine_that_died_to_the_next(
    tiny_model: Path, tmp_path: Path, clients: Clients
) -> None:
    """The next engine counts from 0, and says first that what the one before it held is gone."""
    options = publishing(tmp_path)
    subscriber = clients.socket(zmq.SUB, options.kv_events)
    async with started(tiny_model, Supervision(restart=True), options) as engine:
        for life in range(2):
            assert await next_batch(subscriber) == (0, [{"type": "AllBlocksCleared"}])
            await until(lambda: engine.status().phase == "ready")
            await collect(engine, request(f"r{life}", 40))
            number, events = await next_batch(subscriber)
            assert (number, [event["type"] for event in events]) == (1, ["BlockStored"])
            if life == 0:
                child().kill()


async def test_replays_do_not_hold_answers_up(tiny_model: Path, tmp_path: Path, clients: Clients) -> None:
    options = replace(publishing(tmp_path), block_size=1)
    async with started(tiny_model, options=options) as engine:
        await collect(engine, request("long", 500))
        for _ in range(50):
            asker = clients.socket(zmq.DEALER, options.kv_events_replay)
            for _ in range(40):
                await asker.send_multipart((b"", bytes(8)))
        slowest = 0.0
        for each in range(20):
            began = time.monotonic()
            await collect(engine, request(f"short{each}", 1))
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.7


async def test_an_engine_ends_though_nobody_reads_its_events(
    tiny_model: Path, tmp_path: Path, clients: Clients
) -> None:
    options = replace(publishing(tmp_path), block_size=1)
    subscriber = clients.socket(zmq.SUB, options.kv_events, queue=1)
    replay = clients.socket(zmq.DEALER, options.kv_events_replay, queue=1)
    async with started(tiny_model, options=options) as engine:
        assert await next_batch(subscriber) == (0, [{"type": "AllBlocksCleared"}])
        for each in range(4):
            sampling = SamplingParams(max_tokens=1)
            await collect(engine, Request(id=f"{each}", prompt=(each,) * 1000, sampling=sampling))
        await replay.send_multipart((b"", bytes(8)))
        await asyncio.sleep(0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 1
    assert not os.listdir(tmp_path)


async def test_an_address_for_events_that_cannot_be_bound(tiny_model: Path, tmp_path: Path) -> None:
    """Told before any weight is read, and before torch is."""
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tiny_model, tmp_path / "model", ignore=ignore)
    with pytest.raises(PortError, match=r"cannot be published on ipc:///absent/events: no such file or directory"):
        await RemoteEngine.start(tmp_path / "model", replace(OPTIONS, kv_events="ipc:///absent/events"))
    with pytest.raises(UsageError, match="no known host"):
        await RemoteEngine.start(tmp_path / "model", replace(OPTIONS, kv_events="tcp://no.such.host.invalid:5557"))
    with pytest.raises(UsageError, match="--kv-events-replay is"):
        await RemoteEngine.start(tmp_path / "model", replace(OPTIONS, kv_events_replay="ipc:///tmp/replay"))
