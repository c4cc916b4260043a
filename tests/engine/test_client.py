"""The engine thread: streams, aborts, and that nobody waits for ever when it ends or fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from perilune.engine.client import AsyncEngine
from perilune.engine.options import EngineOptions
from perilune.errors import ContextLengthError, EngineError, RequestError
from perilune.types import FinishReason, Request, SamplingParams, TokenOut


@pytest_asyncio.fixture
async def engine(tiny_model: Path) -> AsyncIterator[AsyncEngine]:
    running = AsyncEngine.start(tiny_model, EngineOptions(max_model_len=4096))
    yield running
    await running.close()


def request(request_id: str = "r", max_tokens: int = 8) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(id=request_id, prompt=tuple(b"hello moon"), sampling=sampling)


async def collect(engine: AsyncEngine, wanted: Request) -> list[TokenOut]:
    return [out async for out in engine.generate(wanted)]


async def until_idle(engine: AsyncEngine) -> None:
    async with asyncio.timeout(5):
        while engine.status().running + engine.status().waiting:  # noqa: ASYNC110 — a snapshot has no event
            await asyncio.sleep(0.005)


async def test_streams_run_side_by_side(engine: AsyncEngine) -> None:
    news = await asyncio.gather(*(collect(engine, request(f"r{i}")) for i in range(4)))
    told = [[token for out in outs for token in out.tokens] for outs in news]
    assert len(told[0]) == 8
    assert told == [told[0]] * 4
    assert engine.status().phase == "ready"


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_closing_a_stream_aborts_within_a_step(engine: AsyncEngine, after: int) -> None:
    stream = engine.generate(request(max_tokens=3000))
    async with aclosing(stream):
        async for out in stream:
            if out.completion_tokens > after:
                break
    await until_idle(engine)
    assert [out.finish for out in await collect(engine, request())][-1] == FinishReason.LENGTH


async def test_a_cancelled_task_aborts(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, request(max_tokens=3000)))
    waiting = asyncio.create_task(collect(engine, request("waiting")))
    while engine.status().running == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await waiting)[-1].finish == FinishReason.LENGTH


async def test_refusals_come_before_the_first_item(engine: AsyncEngine) -> None:
    with pytest.raises(ContextLengthError):
        await collect(engine, request(max_tokens=5000))
    stream = engine.generate(request("twice", 3000))
    await anext(stream)
    with pytest.raises(RequestError, match="is in use"):
        await collect(engine, request("twice"))
    await stream.aclose()


async def test_a_failed_engine_ends_streams_and_refuses_new_ones(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = engine.generate(request("first", 3000)), asyncio.create_task(collect(engine, request("second")))
    await anext(first)

    def broken(*_args: object) -> None:
        raise MemoryError("no memory left for the step")

    monkeypatch.setattr(engine._engine.worker, "run", broken)
    async with asyncio.timeout(5):
        last = [out async for out in first][-1]
        assert (last.finish, last.error) == (FinishReason.ERROR, "the engine failed")
        assert (await second)[-1].finish == FinishReason.ERROR
    assert engine.status().phase == "failed"
    assert "no memory left" in engine.status().error
    with pytest.raises(EngineError, match="the engine failed"):
        await collect(engine, request())


async def test_close_ends_open_streams(tiny_model: Path) -> None:
    engine = AsyncEngine.start(tiny_model, EngineOptions(max_model_len=4096))
    stream = engine.generate(request(max_tokens=3000))
    await anext(stream)
    async with asyncio.timeout(5):
        await engine.close()
        last = [out async for out in stream][-1]
    assert (last.finish, last.error) == (FinishReason.ERROR, "the engine was stopped")
    assert engine.status().phase == "stopped"
