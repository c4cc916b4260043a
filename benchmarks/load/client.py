"""A load generator's client: one request on a connection of its own, read to the last byte, kept as an ``Attempt``.

Raw asyncio, because what is looked for is what client libraries hide: cut streams, answers that come twice, bytes
behind the end. Asks for ``connection: close``, so that all that comes belongs to the request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.history import Answer, Attempt

Address = tuple[str, int]

_BROKEN = (OSError, EOFError, ValueError, LookupError, asyncio.LimitOverrunError)
"""What reading raises where a response is no response: cut off, not HTTP, not the JSON that was promised."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat request. ``leave_after``: events after which the client goes away; 0 leaves before the status."""

    model: str
    question: str
    streamed: bool = True
    max_tokens: int = 96
    leave_after: int | None = None

    def encode(self, address: Address) -> bytes:
        """The bytes to send."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.question}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }
        if self.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data


class _Left(Exception):
    """This client meant to leave here."""


async def ask(address: Address, wish: Ask, deadline_s: float) -> Attempt:
    """Sends one request and tells what became of it. Never raises for what a server does."""
    attempt = Attempt(wish.question, wish.streamed, time.monotonic())
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(wish.encode(address))
            await writer.drain()
            await _read(reader, attempt, wish.leave_after)
    except _Left:
        attempt.end = "cancelled"
    except TimeoutError:
        attempt.end = "timeout" if writer else "unreachable"
    except _BROKEN as error:
        attempt.end = "cut" if writer else "unreachable"
        attempt.note = f"{type(error).__name__}: {error}"[:200]
    finally:
        attempt.ended = time.monotonic()
        if writer is not None:
            writer.transport.abort() if attempt.end == "cancelled" else writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return attempt


async def get(address: Address, path: str, deadline_s: float = 10.0) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where there was no answer."""
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nhost: {address[0]}\r\nconnection: close\r\n\r\n".encode())
                status, headers = await _head(reader)
                return status, b"".join([piece async for piece in _body(reader, headers)])
            finally:
                writer.close()
    except (*_BROKEN, TimeoutError):
        return 0, b""


async def _read(reader: asyncio.StreamReader, attempt: Attempt, leave_after: int | None) -> None:
    if leave_after == 0:
        raise _Left
    attempt.status, headers = await _head(reader)
    retry_after = headers.get("retry-after")
    attempt.retry_after = float(retry_after) if retry_after is not None else None
    body = _body(reader, headers)
    if headers.get("content-type", "").startswith("text/event-stream"):
        await _read_events(body, attempt, leave_after)
    else:
        _read_whole(b"".join([piece async for piece in body]), attempt)
    attempt.surplus = len(await reader.read())


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split(" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The pieces of a body. EOFError where it ends before its own end."""
    if headers.get("transfer-encoding") != "chunked":
        yield await reader.readexactly(int(headers["content-length"]))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")


def _read_whole(body: bytes, attempt: Attempt) -> None:
    data = json.loads(body)
    if attempt.status != 200:
        attempt.end, attempt.note = "error", str(data["error"]["message"])[:200]
        return
    choice = data["choices"][0]
    message = choice["message"]
    attempt.response_id, attempt.finishes = data["id"], 1
    attempt.answer = Answer(
        message["content"] or "",
        message.get("reasoning_content") or "",
        choice["finish_reason"],
        data["usage"]["completion_tokens"],
    )
    attempt.end = "complete"


@dataclass(slots=True)
class _Story:
    """A streamed answer, put together as it comes."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish: str = ""
    tokens: int = 0

    def answer(self) -> Answer:
        return Answer("".join(self.content), "".join(self.reasoning), self.finish, self.tokens)


async def _read_events(body: AsyncIterator[bytes], attempt: Attempt, leave_after: int | None) -> None:
    story, rest, error = _Story(), b"", ""
    async for piece in body:
        *frames, rest = (rest + piece).split(b"\n\n")
        for frame in frames:
            attempt.events += 1
            error = _read_event(frame, attempt, story) or error
            if attempt.events == leave_after:
                raise _Left
    if error:
        attempt.end, attempt.note = "error", error
    elif attempt.finishes and attempt.dones and not rest:
        attempt.end, attempt.answer = "complete", story.answer()
    else:
        attempt.end, attempt.note = "cut", "the stream ended without its end mark"


def _read_event(frame: bytes, attempt: Attempt, story: _Story) -> str:
    """Takes one event in; the message if it is an error."""
    text = frame.removeprefix(b"data: ")
    if text == b"[DONE]":
        attempt.dones += 1
        return ""
    data = json.loads(text)
    if "error" in data:
        return str(data["error"]["message"])[:200]
    attempt.response_id = data["id"]
    if data.get("usage"):
        story.tokens = data["usage"]["completion_tokens"]
    for choice in data["choices"]:
        story.content.append(choice["delta"].get("content") or "")
        story.reasoning.append(choice["delta"].get("reasoning_content") or "")
        if choice["finish_reason"]:
            attempt.finishes += 1
            story.finish = choice["finish_reason"]
    return ""
