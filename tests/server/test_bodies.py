"""The bytes of bodies that a server holds: within their budget, whoever sends what, and gone when nobody needs them."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune import memory
from perilune.server.bodies import FREE_BYTES, Body, Budget
from perilune.server.limits import Limits
from perilune.server.replies import HttpError
from perilune.server.state import SamplingDefaults

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, Served, ServerFactory

MIB = 1 << 20
LIMITS = Limits(max_body_bytes=MIB, max_bodies_bytes=2 * MIB, body_timeout_s=20)
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LARGE = json.dumps({"prompt": "x" * (MIB - 100)}).encode()


@pytest.fixture(scope="module")
def small(script: ScriptFactory, serve: ServerFactory) -> Iterator[Served]:
    """A server that holds two of its largest bodies at once."""
    engine = script()
    engine.steps = [engine.ids("a")]
    with serve(lambda: (engine, SamplingDefaults()), LIMITS) as served:
        yield served


def half_sent(served: Served, stack: ExitStack, size: int) -> socket.socket:
    """A client that announces the largest body and sends so much of it."""
    sock = stack.enter_context(served.connect())
    sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % MIB + b" " * size)
    return sock


def tokenize(served: Served, body: bytes = LARGE) -> httpx.Response:
    return httpx.post(f"{served.url}/tokenize", content=body, headers={"content-type": "application/json"}, timeout=60)


def until_held(served: Served, size: int) -> None:
    deadline = time.monotonic() + 10
    while served.state.bodies.held != size:
        assert time.monotonic() < deadline, served.state.bodies.held
        time.sleep(0.01)


def test_beyond_the_budget_is_503_before_it_is_read_and_small_ones_pass(small: Served) -> None:
    kept = MIB - 1 - FREE_BYTES
    with ExitStack() as stack:
        for number in (1, 2):
            half_sent(small, stack, MIB - 1)
            until_held(small, number * kept)
        refused = stack.enter_context(small.connect())
        refused.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % MIB)
        answer = refused.recv(1 << 16).lower()
        assert answer.startswith(b"http/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer
        assert b'"code":"overloaded"' in answer
        assert tokenize(small, json.dumps({"prompt": "x" * (FREE_BYTES - 100)}).encode()).status_code == 200
        metrics = httpx.get(f"{small.url}/metrics").text
        assert float(metrics.partition("\nperilune_body_bytes ")[2].partition("\n")[0]) == 2 * kept
        assert 'perilune_rejections_total{reason="bodies"} 1.0' in metrics
    until_held(small, 0)  # those who leave in the middle take their bytes along
    assert tokenize(small).status_code == 200


def test_what_is_only_announced_locks_nobody_out(small: Served) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            half_sent(small, stack, 1000)
        time.sleep(0.1)
        assert small.state.bodies.held == 0
        assert tokenize(small).status_code == 200


def test_an_unannounced_body_is_counted_as_it_comes(small: Served) -> None:
    with ExitStack() as stack:
        for number in (1, 2):
            half_sent(small, stack, MIB - 1)
            until_held(small, number * (MIB - 1 - FREE_BYTES))
        sock = stack.enter_context(small.connect())
        piece = b"20000\r\n" + b" " * 0x20000 + b"\r\n"
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + piece * 2 + b"0\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    until_held(small, 0)


def test_who_is_too_slow_gives_back(script: ScriptFactory, serve: ServerFactory) -> None:
    limits = Limits(max_body_bytes=MIB, max_bodies_bytes=MIB, body_timeout_s=0.5)
    with serve(lambda: (script(), SamplingDefaults()), limits) as served, ExitStack() as stack:
        sock = half_sent(served, stack, MIB // 2)
        until_held(served, MIB // 2 - FREE_BYTES)
        until_held(served, 0)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_who_leaves_while_it_is_tokenised_gives_back(small: Served) -> None:
    with ExitStack() as stack:
        sock = stack.enter_context(small.connect())
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(LARGE) + LARGE)
        until_held(small, len(LARGE) - FREE_BYTES)
    until_held(small, 0)
    assert small.state.in_flight == 0


ASKED = json.dumps({"prompt": "x" * (MIB - 200), "return_token_strs": True}).encode()
"""Its answer has some 8 MiB, more than the kernel takes off our hands."""


def asking(served: Served, stack: ExitStack, window: int = 4096) -> socket.socket:
    """A client that asks for a large answer and doesn't read it."""
    sock = stack.enter_context(served.connect())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(ASKED) + ASKED)
    return sock


def until_answers(served: Served, test: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + 20
    while not test(served.state.answers.held):
        assert time.monotonic() < deadline, served.state.answers.held
        time.sleep(0.01)


def test_answers_that_nobody_reads_lock_no_bodies_out(small: Served) -> None:
    """One may be larger than the budget if nothing else counts; the next one is told why it can't be had."""
    with ExitStack() as stack:
        asking(small, stack)
        until_answers(small, lambda held: held > 2 * MIB)
        until_held(small, 0)
        assert tokenize(small, json.dumps({"prompt": "x" * (MIB - 100), "model": "?"}).encode()).status_code == 404
        refused = tokenize(small, ASKED)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "MiB of answers are held" in refused.json()["error"]["message"]
        assert tokenize(small, json.dumps({"prompt": "x" * 10_000}).encode()).status_code == 200
        metrics = httpx.get(f"{small.url}/metrics").text
        assert float(metrics.partition("\nperilune_answer_bytes ")[2].partition("\n")[0]) > 2 * MIB
        assert 'perilune_rejections_total{reason="answers"} 1.0' in metrics
    until_answers(small, lambda held: held == 0)
    assert tokenize(small, ASKED).json()["count"] == MIB - 200
    until_answers(small, lambda held: held == 0)


def test_what_has_left_counts_no_more(small: Served) -> None:
    with ExitStack() as stack:
        sock = asking(small, stack, 1 << 18)
        until_answers(small, lambda held: held > 2 * MIB)
        most = held = small.state.answers.held
        while held > most - MIB:
            assert sock.recv(1 << 16), "the answer is not over"
            held = small.state.answers.held
        assert held > 0, "it leaves piece by piece"
    until_answers(small, lambda held: held == 0)


def test_a_client_has_so_much_time_for_an_answer(script: ScriptFactory, serve: ServerFactory) -> None:
    """However much it has read meanwhile."""
    limits = Limits(max_body_bytes=MIB, max_bodies_bytes=2 * MIB, request_timeout_s=1.0)
    with serve(lambda: (script(), SamplingDefaults()), limits) as served, ExitStack() as stack:
        sock = asking(served, stack)
        until_answers(served, lambda held: held > 2 * MIB)
        deadline = time.monotonic() + 10
        while served.state.answers.held:
            assert time.monotonic() < deadline
            sock.recv(4096)
            time.sleep(0.005)
        assert served.state.in_flight == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * FREE_BYTES)), max_size=30))
def test_held_is_the_sum_of_what_is_held_and_never_above_the_limit(steps: list[tuple[int, int]]) -> None:
    """Bodies that grow and end in any order; a size of 0 ends one."""

    async def play() -> None:
        limit = 4 * FREE_BYTES
        bodies = Budget(limit)
        some = [Body(bodies) for _ in range(4)]
        for index, size in steps:
            before = len(some[index])
            if not size:
                some[index].close()
                continue
            free = limit - bodies.held
            more = max(before + size - FREE_BYTES, 0) - max(before - FREE_BYTES, 0)
            try:
                some[index].add(bytes(size))
            except HttpError:
                assert more > free
                assert len(some[index]) == before
            else:
                assert more <= free
            assert bodies.held == sum(max(len(body) - FREE_BYTES, 0) for body in some) <= limit
        for body in some:
            body.close()
            body.close()
        assert bodies.held == 0

    asyncio.run(play())


@pytest.mark.parametrize("size", [MIB // 8, 4000], ids=["long", "short"])
async def test_memory_goes_back_once_after_a_burst(size: int) -> None:
    trims: list[float] = []
    bodies = Budget(10 * MIB, trim=lambda: trims.append(time.monotonic()))
    for _ in range(2 * MIB // size):
        with bodies.body() as body:
            body.add(bytes(size))
    await asyncio.sleep(1.3)
    assert len(trims) == 1
    with bodies.body() as body:
        body.add(b"short")
    await asyncio.sleep(1.1)
    assert len(trims) == 1


def test_free_memory_goes_back_to_the_system() -> None:
    """Blocks between others that stay: the allocator keeps them. Elsewhere than with glibc nothing happens."""
    blocks = [bytearray(100_000) for _ in range(800)]
    kept = blocks[::20]
    del blocks
    process = psutil.Process()
    before = process.memory_info().rss
    if not memory.trim():
        pytest.skip("no malloc_trim here")
    assert process.memory_info().rss < before - (40 << 20)
    assert len(kept) == 40
