"""The load generator's client, against servers that misbehave in one way each, byte by byte."""

from __future__ import annotations

import asyncio
import json

import pytest
from benchmarks.load.client import Ask, ask, get
from benchmarks.load.facts import percentile, slope
from benchmarks.load.history import Answer, Attempt

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(content: str = "", finish: str | None = None, tokens: int = 0) -> bytes:
    choice = {"delta": {"content": content}, "finish_reason": finish}
    used = {"completion_tokens": tokens} if tokens else None
    return b"data: " + json.dumps({"id": "c", "choices": [choice], "usage": used}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


WHOLE = chunk(event("4")) + chunk(event("2")) + chunk(event("", "stop", 3)) + chunk(DONE)


async def against(response: bytes, *, streamed: bool = True, hang: bool = False, leave: int | None = None) -> Attempt:
    """One request to a server that answers with these bytes and closes, or hangs."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        if hang:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        return await ask((host, port), Ask("m", "q", streamed, leave_after=leave), 0.5)


async def test_a_whole_stream_is_complete() -> None:
    got = await against(HEAD + WHOLE + END)
    assert (got.end, got.answer) == ("complete", Answer("42", "", "stop", 3))
    assert not got.lost
    assert not got.duplicated


async def test_events_may_be_split_anywhere() -> None:
    data = event("4") + event("2") + event("", "stop", 3) + DONE
    pieces = b"".join(chunk(data[i : i + 7]) for i in range(0, len(data), 7))
    assert (await against(HEAD + pieces + END)).answer == Answer("42", "", "stop", 3)


@pytest.mark.parametrize(
    "response",
    [
        b"",
        HEAD,
        HEAD + WHOLE,  # without the end of the body
        HEAD + chunk(event("4")) + END,  # without finish_reason and [DONE]
        HEAD + chunk(event("", "stop")) + END,  # without [DONE]
        HEAD + WHOLE[:-9],
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{}",
        b"garbage\r\n\r\n",
    ],
)
async def test_what_is_cut_off_is_lost(response: bytes) -> None:
    assert (await against(response)).end == "cut"


async def test_an_error_event_is_an_outcome() -> None:
    error = b'data: {"error": {"message": "the engine stopped"}}\n\n'
    got = await against(HEAD + chunk(event("4")) + chunk(error) + END)
    assert (got.end, got.note, got.lost) == ("error", "the engine stopped", False)


@pytest.mark.parametrize("more", [END + b"x", chunk(DONE) + END, chunk(event("", "stop", 3)) + END])
async def test_what_comes_twice_is_seen(more: bytes) -> None:
    assert (await against(HEAD + WHOLE + more)).duplicated


async def test_a_rejection_is_told_from_a_failure() -> None:
    body = b'{"error": {"message": "full"}}'
    head = b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n" % len(body)
    assert (await against(head + b"retry-after: 2\r\n\r\n" + body)).rejected
    assert (await against(head + b"\r\n" + body)).server_fault


async def test_waiting_ends() -> None:
    assert (await against(HEAD + chunk(event("4")), hang=True)).end == "timeout"


@pytest.mark.parametrize("leave", [0, 1])
async def test_a_client_may_leave(leave: int) -> None:
    got = await against(HEAD + WHOLE + END, leave=leave)
    assert (got.end, got.events) == ("cancelled", leave)


async def test_nobody_listens() -> None:
    server = await asyncio.start_server(lambda _, __: None, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    server.close()
    await server.wait_closed()
    assert (await ask(address, Ask("m", "q"), 1)).end == "unreachable"
    assert await get(address, "/ready") == (0, b"")


def test_percentiles_are_observed_values() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]


def test_slopes() -> None:
    found, error = slope([0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0])
    assert found == pytest.approx(2)
    assert error == pytest.approx(0, abs=1e-9)
    rising, doubt = slope([0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 1.0, 3.0])
    assert rising == pytest.approx(0.8)
    assert doubt == pytest.approx(0.4243, abs=1e-4)
