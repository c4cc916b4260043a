"""News from an engine to its listeners: in order from whatever thread, and woken as cheaply as can be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from perilune.engine.messages import Abort, Submit
from perilune.engine.streams import Streams
from perilune.types import FinishReason, Request, SamplingParams, TokenOut

PATIENCE_S = 20


def request(request_id: str) -> Request:
    return Request(id=request_id, prompt=(1,), sampling=SamplingParams(max_tokens=1000))


def news(request_id: str, *tokens: int, last: bool = False) -> TokenOut:
    return TokenOut(request_id=request_id, tokens=tokens, finish=FinishReason.STOP if last else None)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what changes it does not know of events
        await asyncio.sleep(0)


class Listening:
    """Streams with a reader for each of some requests, on the running loop."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.sent: list[Submit | Abort] = []
        self.streams = Streams(self.sent.append)
        self._tasks = {name: asyncio.create_task(self._read(name)) for name in ids}

    @property
    def asked(self) -> list[str]:
        return [each.request.id for each in self.sent if isinstance(each, Submit)]

    async def started(self) -> None:
        await until(lambda: len(self.sent) >= len(self._tasks))
        await asyncio.sleep(0)

    async def tokens(self) -> dict[str, list[int]]:
        async with asyncio.timeout(PATIENCE_S):
            return {name: await task for name, task in self._tasks.items()}

    async def _read(self, name: str) -> list[int]:
        return [token async for out in self.streams.generate(request(name)) for token in out.tokens]


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Calls that wake the running loop from outside."""
    loop = asyncio.get_running_loop()
    calls: list[object] = []
    real = loop.call_soon_threadsafe

    def call(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    with patch.context() as inner:
        inner.setattr(loop, "call_soon_threadsafe", call)
        yield calls


async def test_on_the_loop_s_own_thread_nothing_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [str(i) for i in range(100)]
    listening = Listening(ids)
    await listening.started()
    with counted(monkeypatch) as calls:
        for step in range(5):
            listening.streams.deliver([news(name, step, last=step == 4) for name in ids])
        assert await listening.tokens() == {name: list(range(5)) for name in ids}
    assert not calls


async def test_from_another_thread_a_batch_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [str(i) for i in range(100)]
    listening = Listening(ids)
    await listening.started()
    with counted(monkeypatch) as calls:

        def engine() -> None:
            for step in range(5):
                listening.streams.deliver([news(name, step) for name in ids])
            listening.streams.close("over")

        thread = threading.Thread(target=engine)
        thread.start()
        found = await listening.tokens()
        thread.join(PATIENCE_S)
    assert found == {name: list(range(5)) for name in ids}
    assert len(calls) == 6


async def test_the_order_holds_when_threads_take_turns() -> None:
    """What another thread has delivered comes before what the loop's own thread delivers next, though woken later."""
    listening = Listening(["a"])
    await listening.started()
    for step in range(0, 200, 2):
        thread = threading.Thread(target=listening.streams.deliver, args=([news("a", step)],))
        thread.start()
        thread.join(PATIENCE_S)  # the loop can't have run in between
        listening.streams.deliver([news("a", step + 1)])
    listening.streams.deliver([news("a", last=True)])
    assert await listening.tokens() == {"a": list(range(200))}


async def test_readers_in_other_loops() -> None:
    """One engine, two event loops: each gets its own."""
    listening = Listening(["here"])
    await listening.started()
    there: list[dict[str, list[int]]] = []
    begun = threading.Event()

    async def other() -> None:
        second = Listening(["there"])
        second.streams = listening.streams
        await until(lambda: "there" in listening.asked)
        begun.set()
        there.append(await second.tokens())

    thread = threading.Thread(target=lambda: asyncio.run(other()))
    thread.start()
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    for step in range(50):
        listening.streams.deliver([news("here", step), news("there", step)])
    listening.streams.deliver([news("here", last=True), news("there", last=True)])
    assert await listening.tokens() == {"here": list(range(50))}
    await asyncio.to_thread(thread.join, PATIENCE_S)
    assert there == [{"there": list(range(50))}]


async def test_a_reader_that_leaves_while_it_waits() -> None:
    listening = Listening(["a", "b"])
    await listening.started()
    listening._tasks.pop("a").cancel()
    listening.streams.deliver([news("a", 1), news("b", 1)])
    await asyncio.sleep(0)
    listening.streams.deliver([news("a", 2), news("b", 2, last=True)])
    assert await listening.tokens() == {"b": [1, 2]}
    assert [each for each in listening.sent if isinstance(each, Abort)] == [Abort("a")]


async def test_a_loop_that_has_ended_takes_nothing_with_it() -> None:
    """Its listeners were left behind, as when a program is torn down; the others still get theirs."""
    listening = Listening(["a"])
    await listening.started()
    gone = asyncio.new_event_loop()
    generator = listening.streams.generate(request("gone"))

    async def begin() -> None:
        task = asyncio.ensure_future(anext(generator))
        await until(lambda: "gone" in listening.asked)
        task.cancel()

    def run() -> None:
        gone.run_until_complete(begin())
        gone.close()

    await asyncio.to_thread(run)
    listening.streams.deliver([news("gone", 1), news("a", 1, last=True)])
    assert await listening.tokens() == {"a": [1]}
