"""Bounds of what one client may cost, and the reading of a request's body within them.

Knows ASGI messages, not JSON. A body is bounded in bytes and in time, whether its length was announced or not.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from perilune.server.bodies import Body
from perilune.server.replies import HttpError


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds per request, per connection and in total.

    Attributes:
        max_body_bytes: of a request. max_bodies_bytes: of all that are held at once, and of the tokeniser's answers
            to them, see ``Budget``; more get a 503.
        body_timeout_s: for the whole body to arrive.
        send_timeout_s: for a client that does not read, until its request is aborted.
        token_processes: that read and tokenise all but short requests. token_deadline_s: for one request there.
        max_queue, max_queue_tokens: requests beyond those that the engine runs at once, and prompt tokens that no
            step has touched yet; more get a 503.
        queue_timeout_s: until a request's first step. request_timeout_s: until the end of its answer.
        idle_timeout_s: between two requests of a connection. max_connections: at once; more get a 503.
        max_choices, max_prompts: ``n``, and prompts, of one request; max_sequences: their product.
        max_header_bytes, max_headers, header_timeout_s: of a request's head.
        drain_bytes, drain_s: what is read and thrown away before a body is refused, so that clients that send
            first and read afterwards see the answer rather than a reset connection.
    """

    max_body_bytes: int = 16 << 20
    max_bodies_bytes: int = 64 << 20
    body_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    token_processes: int = 2
    token_deadline_s: float = 20.0
    max_queue: int = 256
    max_queue_tokens: int = 1 << 20
    queue_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    idle_timeout_s: float = 5.0
    max_connections: int = 2048
    max_choices: int = 16
    max_prompts: int = 1024
    max_sequences: int = 1024
    max_header_bytes: int = 64 << 10
    max_headers: int = 128
    header_timeout_s: float = 10.0
    drain_bytes: int = 128 << 20
    drain_s: float = 2.0


class ClientGone(Exception):
    """The client closed the connection. Nobody is there to be told."""


_JSON: Final = "application/json"


async def read_json_body(scope: Scope, receive: Receive, limits: Limits, body: Body) -> None:
    """Reads a JSON request's body into ``body``.

    Raises:
        HttpError: wrong media type, an encoding, too many bytes (announced or sent), no room for them, too slow.
        ClientGone: closed before the body was complete.
    """
    headers = Headers(scope=scope)
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != _JSON:
        raise HttpError(415, f"content-type is {media_type[:80]!r}, {_JSON} is needed", code="unsupported_media_type")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise HttpError(
            415, f"content-encoding is {encoding[:80]!r}, the body must not be compressed", code="unsupported_encoding"
        )
    announced = headers.get("content-length", "")
    if announced.isdecimal():
        size = int(announced[:20])
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        body.expect(size)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            await _read(receive, limits, body)
    except TimeoutError:
        raise HttpError(
            408, f"the body did not arrive within {limits.body_timeout_s:g} s", code="request_timeout"
        ) from None


async def drain(receive: Receive, limits: Limits) -> None:
    """Reads and drops what is left of a body, within bounds."""
    left = limits.drain_bytes
    try:
        async with asyncio.timeout(limits.drain_s):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))
    except TimeoutError:
        return


async def _read(receive: Receive, limits: Limits, body: Body) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        data = message.get("body", b"")
        if len(body) + len(data) > limits.max_body_bytes:
            raise _too_large(limits)
        body.add(data)
        if not message.get("more_body", False):
            return


def _too_large(limits: Limits) -> HttpError:
    return HttpError(
        413,
        f"the body has more than {limits.max_body_bytes} bytes",
        code="body_too_large",
        hint="raise --max-body-mib on the server if that is meant",
    )
