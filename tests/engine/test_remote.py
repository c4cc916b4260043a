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

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from perilune.engine.options import EngineOptions
from perilune.engine.remote import RemoteEngine, Supervision
from perilune.errors import CapacityError, CheckpointError, ContextLengthError, EngineError, PortError
from perilune.types import FinishReason, Request, SamplingParams, TokenOut

OPTIONS = EngineOptions(max_model_len=4096, threads=1)


@asynccontextmanager
async def started(model: Path, supervision: Supervision | None = None) -> AsyncIterator[RemoteEngine]:
    engine = await RemoteEngine.start(model, OPTIONS, supervision)
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


def child() -> psutil.Process:
    """The engine process of this test; those of others may be dying beside it."""
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    (process,) = (p for p in alive if "perilune.engine.child" in p.cmdline())
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
    assert not psutil.Process().children()


async def test_closing_while_it_loads(tiny_model: Path) -> None:
    task = asyncio.create_task(RemoteEngine.start(tiny_model, OPTIONS))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.Process().children()


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


async def test_cache_events_are_published_and_can_be_asked_for_again(tiny_model: Path, tmp_path: Path) -> None:
    """What routers written for vLLM decode: three frames, maps with ``type``, a replay that ends with all ones."""
    options = replace(
        OPTIONS, kv_events=f"ipc://{tmp_path}/events", kv_events_replay=f"ipc://{tmp_path}/replay", kv_events_topic="kv"
    )
    with zmq.asyncio.Context() as context:
        subscriber, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        subscriber.subscribe(b"kv")
        subscriber.connect(options.kv_events)
        replay.connect(options.kv_events_replay)
        engine = await RemoteEngine.start(tiny_model, options)
        try:
            async with asyncio.timeout(20):
                await asyncio.sleep(0.5)  # a subscription needs a moment to arrive: what is published before is missed
                prompt = tuple(range(70))
                sampling = SamplingParams(max_tokens=1, ignore_eos=True)
                await collect(engine, Request(id="a", prompt=prompt, sampling=sampling))
                topic, number, payload = await subscriber.recv_multipart()
                assert (topic, number) == (b"kv", bytes(8))
                _, events, rank = msgspec.msgpack.decode(payload)
                assert rank == 0
                assert [event["type"] for event in events] == ["BlockStored"] * 2
                assert events[0]["token_ids"] == list(prompt[:32])
                assert events[1]["parent_block_hash"] == events[0]["block_hashes"][0]
                assert events[0]["block_size"] == 32
                await replay.send_multipart((b"", b"junk"))
                await replay.send_multipart((b"", bytes(8)))
                assert await replay.recv_multipart() == [b"", topic, number, payload]
                assert await replay.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        finally:
            await engine.close()
            subscriber.close(0)
            replay.close(0)


async def test_an_address_for_events_that_cannot_be_bound(tiny_model: Path) -> None:
    with pytest.raises(PortError, match="cannot be published on tcp://nowhere"):
        await RemoteEngine.start(tiny_model, replace(OPTIONS, kv_events="tcp://nowhere"))
