"""Preparing long requests in processes that can be killed, and what that spares other streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from perilune.errors import ContextLengthError, NotFoundError, RequestError
from perilune.server.bodies import Body, Budget
from perilune.server.replies import HttpError
from perilune.server.state import SamplingDefaults
from perilune.server.tokenjobs import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Job, error_of, refusal
from perilune.server.tokenpool import PoolLimits, TokenPool
from perilune.server.wishes import Facts
from perilune.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, ServerFactory

Children = Callable[[], list[psutil.Process]]

FACTS = Facts(names=("m",), known_ids=512, max_model_len=100_000)
HUGE = 10**30
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maximum": HUGE}}}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_dir(tiny_model, 512)


@asynccontextmanager
async def pooled(**limits: Any) -> AsyncIterator[TokenPool]:
    """A pool that sends everything to its processes."""
    pool = TokenPool(PoolLimits(**{"short_bytes": 0, "kept": 0, **limits}))
    try:
        yield pool
    finally:
        await pool.close()


def running() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command line
            if "perilune.server.tokenworker" in child.cmdline():
                found.append(child)
    return found


@pytest.fixture
def children() -> Children:
    """The processes of this test's own pools."""
    others = {child.pid for child in running()}
    return lambda: [child for child in running() if child.pid not in others]


def encoded(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happened():  # noqa: ASYNC110 - what happens in processes
            await asyncio.sleep(0.005)


def held(data: bytes, bodies: Budget | None = None) -> Body:
    """A body that has arrived."""
    body = Body(bodies or Budget(1 << 30))
    body.add(data)
    return body


async def passed_on(pool: TokenPool, job: Job[Any], data: bytes, tokenizer: Tokenizer) -> bytes:
    """The answer as its client gets it."""
    budget = Budget(1 << 30)
    with budget.answer() as answer:
        await pool.pass_on(job, held(data), FACTS, tokenizer, answer)
        pieces = b"".join(answer.pieces())
        assert answer.size == len(pieces)
        assert budget.held == 0
    return pieces


async def test_a_process_says_what_a_thread_says(tokenizer: Tokenizer, children: Children) -> None:
    messages = [{"role": "user", "content": "a🙂\ud83d\ude42 <|im_end|>"}]
    bodies: dict[Job[Any], bytes] = {
        CHAT: encoded(messages=messages, tools=[TOOL], n=2, seed=1, logprobs=True, temprature=1),
        COMPLETION: encoded(prompt=["ab", "c"], echo=True, logprobs=1, seed=1, logit_bias={"5": 1.5}, stop="x"),
        TOKENIZE: encoded(prompt="x" * 100_000, return_token_strs=True),
        DETOKENIZE: encoded(tokens=[257, 65, 66]),
    }
    async with pooled() as pool:
        for job, body in bodies.items():
            assert await pool.prepare(job, held(body), FACTS, tokenizer) == job.run(body, FACTS, tokenizer)
            assert await passed_on(pool, job, body, tokenizer) == job.encoded(body, FACTS, tokenizer)
        assert len(children()) == 1, "one after the other, one process is enough"
    assert not children()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", RequestError),
        (encoded(messages=[{"role": "user", "content": "x"}], model="other"), NotFoundError),
        (encoded(messages=[{"role": "user", "content": "x" * 200_000}]), ContextLengthError),
        (encoded(messages=[{"role": "user", "content": "x"}], temperature=3), RequestError),
    ],
    ids=["JSON", "model", "context", "field"],
)
async def test_refusals_are_the_same(tokenizer: Tokenizer, body: bytes, kind: type[RequestError]) -> None:
    with pytest.raises(RequestError) as here:
        CHAT.run(body, FACTS, tokenizer)
    async with pooled() as pool:
        with pytest.raises(RequestError) as there:
            await pool.prepare(CHAT, held(body), FACTS, tokenizer)
    assert type(there.value) is type(here.value) is kind
    for name in ("message", "param", "code", "hint", "status", "type"):
        assert getattr(there.value, name) == getattr(here.value, name)


def test_an_unknown_kind_of_refusal_is_one_still() -> None:
    told = refusal(HttpError(503, "m", code="c", hint="h"))
    assert (type(error_of(told)), error_of(told).code) == (RequestError, "c")


async def test_past_the_deadline_it_is_killed_and_the_next_one_served(tokenizer: Tokenizer, children: Children) -> None:
    """The deadline begins when a process has the body: a start, or a wait, is no fault of it."""
    async with pooled(size=1, deadline_s=0.05) as pool:
        with pytest.raises(
            RequestError, match=r"within 0\.05 s: it is too much text, or this machine is too busy"
        ) as caught:
            await pool.prepare(TOKENIZE, held(encoded(prompt="x" * 4_000_000)), FACTS, tokenizer)
        assert (caught.value.code, caught.value.status) == ("prompt_timeout", 400)
        await until(lambda: not children())
        assert (await pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer)).count == 4


@pytest.mark.parametrize("size", [4, 4_000_000], ids=["a pipe full", "more"])
async def test_one_that_stands_still_before_it_has_the_body_is_replaced(
    tokenizer: Tokenizer, children: Children, size: int
) -> None:
    async with pooled(size=1, take_s=0.3) as pool:
        await pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer)
        (stopped,) = children()
        stopped.suspend()
        async with asyncio.timeout(10):
            assert (await pool.prepare(TOKENIZE, held(encoded(prompt="x" * size)), FACTS, tokenizer)).count == size
        (other,) = children()
        assert other.pid != stopped.pid


async def test_one_that_is_killed_when_it_starts_is_replaced(tokenizer: Tokenizer, children: Children) -> None:
    """At once, in its imports, and not for ever: then the server can't, and the body is not to blame."""
    async with pooled(size=1) as pool:
        for pause_s in (0.0, 0.05):
            task = asyncio.create_task(pool.prepare(TOKENIZE, held(encoded(prompt="x" * 200_000)), FACTS, tokenizer))
            await until(lambda: bool(children()))
            (process,) = children()
            await asyncio.sleep(pause_s)
            process.kill()
            assert (await task).count == 200_000
            children()[0].kill()
            await until(lambda: not children())
        task = asyncio.create_task(pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer))
        while not task.done():
            for process in children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(0.01)
        with pytest.raises(HttpError, match="no process could be started") as caught:
            await task
        assert caught.value.status == 503
        assert (await pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer)).count == 4


async def test_one_that_died_while_idle_is_no_ones_fault(tokenizer: Tokenizer, children: Children) -> None:
    """Killed at once before the next question: the loop has not heard of it."""
    async with pooled(size=1) as pool:
        body = encoded(prompt="tide" * 100_000)
        first = await pool.prepare(TOKENIZE, held(body), FACTS, tokenizer)
        for _ in range(3):
            (process,) = children()
            process.kill()
            assert await pool.prepare(TOKENIZE, held(body), FACTS, tokenizer) == first
        (process,) = children()
        process.kill()
        await asyncio.sleep(0.2)
        assert await pool.prepare(TOKENIZE, held(body), FACTS, tokenizer) == first


async def test_one_that_dies_of_a_body_is_not_tried_again(tokenizer: Tokenizer, children: Children) -> None:
    async with pooled(size=1) as pool:
        body = encoded(prompt="x" * 4_000_000)
        await pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer)
        (process,) = children()
        asked = held(body)
        task = asyncio.create_task(pool.prepare(TOKENIZE, asked, FACTS, tokenizer))
        async with asyncio.timeout(10):
            while len(asked):  # noqa: ASYNC110 - until the process has it
                await asyncio.sleep(0.001)
        process.kill()
        with pytest.raises(HttpError) as caught:
            await task
        assert caught.value.status == 500
        assert (await pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer)).count == 4


async def test_idle_ones_end(tokenizer: Tokenizer, children: Children) -> None:
    async with pooled(idle_s=0.3) as pool:
        body = encoded(prompt="tide")
        both = [pool.prepare(TOKENIZE, held(body), FACTS, tokenizer) for _ in range(2)]
        await asyncio.gather(*both)
        assert len(children()) == 2
        for _ in range(5):  # one of them has work, the other ends
            await asyncio.sleep(0.1)
            await pool.prepare(TOKENIZE, held(body), FACTS, tokenizer)
        assert len(children()) == 1
        await asyncio.sleep(0.6)
        assert not children()
        assert (await pool.prepare(TOKENIZE, held(body), FACTS, tokenizer)).count == 4


async def test_one_stays(tokenizer: Tokenizer, children: Children) -> None:
    """The next prompt of usual size finds it ready."""
    async with pooled(idle_s=0.1, kept=1) as pool:
        await asyncio.gather(*(pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer) for _ in "ab"))
        assert len(children()) == 2
        await asyncio.sleep(0.4)
        (process,) = children()
        await pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer)
        assert children() == [process]


async def test_ends_that_meet_questions_are_never_errors(tokenizer: Tokenizer) -> None:
    """Questions come just when the process ends, some before, some after; some take longer than it may be idle."""
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    async with pooled(size=1, idle_s=0.02) as pool:
        for step in range(12):
            count = 4 + step % 2 * 300_000
            body = held(encoded(prompt="tide"[:count] + "x" * (count - 4)))
            assert (await pool.prepare(TOKENIZE, body, FACTS, tokenizer)).count == count
            await asyncio.sleep(0.0185 + step * 0.00025)
    assert not wrong


async def test_more_than_there_are_processes_for_wait_and_not_for_ever(
    tokenizer: Tokenizer, children: Children
) -> None:
    async with pooled(size=1, wait_s=0.3, take_s=60) as pool:
        body = encoded(prompt="tide")
        await pool.prepare(TOKENIZE, held(body), FACTS, tokenizer)
        (worker,) = children()
        worker.suspend()
        bodies = Budget(1 << 30)
        large = encoded(prompt="x" * 100_000)
        first = asyncio.create_task(pool.prepare(TOKENIZE, held(large, bodies), FACTS, tokenizer))
        await asyncio.sleep(0.05)
        both = bodies.held
        waiting = held(large, bodies)
        with pytest.raises(HttpError) as caught:
            await pool.prepare(TOKENIZE, waiting, FACTS, tokenizer)
        assert caught.value.status == 503
        assert bodies.held == both > 0, "the one that waited is gone, the other one is not"
        leaving = held(large, bodies)
        task = asyncio.create_task(pool.prepare(TOKENIZE, leaving, FACTS, tokenizer))
        await asyncio.sleep(0.05)
        assert bodies.held == 2 * both
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bodies.held == both, "who leaves while it waits is forgotten at once"
        worker.resume()
        assert (await first).count == 100_000
        assert bodies.held == 0


async def test_who_leaves_is_counted_until_the_work_has_ended(tokenizer: Tokenizer) -> None:
    async with pooled(size=1) as pool:
        body = encoded(prompt="x" * 2_000_000)
        task = asyncio.create_task(pool.prepare(TOKENIZE, held(body), FACTS, tokenizer))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer)).count == 4


async def test_who_leaves_twice_is_counted_until_then_too(tokenizer: Tokenizer) -> None:
    async with pooled(size=1) as pool:
        body = held(encoded(prompt="x " * 20_000))
        asked = asyncio.create_task(pool.prepare(TOKENIZE, body, FACTS, tokenizer))
        while not len(pool._all):  # noqa: ASYNC110 - what happens in processes
            await asyncio.sleep(0.01)
        for _ in range(3):
            asked.cancel()
            await asyncio.sleep(0)
            assert not asked.done()
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_a_closed_pool_starts_nothing(tokenizer: Tokenizer, children: Children) -> None:
    async with pooled(size=2) as pool:
        asked = [
            asyncio.create_task(pool.prepare(TOKENIZE, held(encoded(prompt="x" * 9000)), FACTS, tokenizer))
            for _ in range(4)
        ]
        await asyncio.sleep(0.05)
        await pool.close()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(result) for result in results} == {HttpError}
        with pytest.raises(HttpError, match="shutting down"):
            await pool.prepare(TOKENIZE, held(encoded(prompt="x")), FACTS, tokenizer)
    await until(lambda: not children())


async def test_the_end_while_bodies_are_read(
    tokenizer: Tokenizer, children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    """Those who are asked for then, in whatever state, are told so; nothing is left, no fault is logged."""
    for moment in range(25):
        async with pooled(size=2) as pool:
            asked = [
                asyncio.create_task(pool.prepare(TOKENIZE, held(encoded(prompt="x" * size)), FACTS, tokenizer))
                for size in (9000, 3_000_000)
            ]
            await asyncio.sleep(0.02 * moment)
            await pool.close()
            assert not children(), moment
            for result in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(result, BaseException):
                    assert isinstance(result, HttpError), (moment, result)
                    assert (result.status, result.code) == (503, "shutting_down"), moment
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_the_end_before_a_short_body_has_its_turn(tokenizer: Tokenizer) -> None:
    gate = threading.Event()
    async with pooled(short_bytes=1 << 20) as pool:
        pool._thread.submit(gate.wait)  # the thread is busy with something else
        asked = asyncio.create_task(pool.prepare(TOKENIZE, held(encoded(prompt="tide")), FACTS, tokenizer))
        await asyncio.sleep(0.05)
        await pool.close()
        gate.set()
        with pytest.raises(HttpError, match="shutting down"):
            await asked


def test_a_long_prompt_does_not_hold_up_a_stream(
    script: ScriptFactory, serve: ServerFactory, children: Children
) -> None:
    """Five megabytes of text, and another client's stream: its longest pause is not the tokeniser's time."""
    engine = script(delay_s=0.005)
    engine.steps = [engine.ids("a")] * 1200
    text = "tide and moon " * (5_000_000 // 14)
    gaps: list[float] = []

    def read() -> None:
        last = time.monotonic()
        with httpx.stream("POST", f"{served.url}/v1/completions", json={"prompt": "x", "stream": True}) as response:
            for line in response.iter_lines():
                if line:
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now

    with serve(lambda: (engine, SamplingDefaults())) as served:
        httpx.post(f"{served.url}/tokenize", json={"prompt": "x" * 70_000}, timeout=30)  # the process is there now
        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.3)
        before = len(gaps)
        body = json.dumps({"prompt": text}).encode()
        response = httpx.post(
            f"{served.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60
        )
        during = gaps[before:]
        reader.join()
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert len(during) > 20
    assert max(during) < 0.5
    assert not children()


def test_a_flood_of_prompts_holds_nobody_up(script: ScriptFactory, serve: ServerFactory) -> None:
    """Bodies just below what counts as held: new connections, small requests and metrics get through."""
    engine = script()
    engine.steps = [engine.ids("a")]
    body = b'{"x":[' + b"{}," * 21_000 + b'{}],"n":99,"prompt":"a"}'  # slow to read for its size, and refused
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    seconds: dict[str, list[float]] = {"/health": [], "/metrics": [], "small": []}
    with serve(lambda: (engine, SamplingDefaults())) as served, contextlib.ExitStack() as stack:
        flood = [stack.enter_context(served.connect()) for _ in range(150)]
        for sock in flood:
            sock.sendall(asked)
        while served.state.in_flight > 20 or not seconds["small"]:
            for name, times in seconds.items():
                start = time.monotonic()
                if name == "small":
                    small = {"prompt": "a", "max_tokens": 1}
                    response = httpx.post(f"{served.url}/v1/completions", json=small, timeout=60)
                else:
                    response = httpx.get(served.url + name, timeout=60)
                assert response.status_code == 200
                times.append(time.monotonic() - start)
        answers = [sock.recv(1000) for sock in flood]
    for name, times in seconds.items():
        assert len(times) >= 3, "the flood was there"
        assert sorted(times)[len(times) // 2] < 0.3, name
        assert max(times) < 2.0, name
    assert {answer.split(b" ", 2)[1] for answer in answers} == {b"400", b"503"}
    assert all(b"retry-after: 1" in answer for answer in answers if b" 503 " in answer[:20])
