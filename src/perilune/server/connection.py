"""One TCP connection: uvicorn's HTTP/1.1 protocol with bounds on a request's head.

uvicorn bounds neither the bytes, nor the number, nor the time of headers, and answers malformed HTTP in plain text.
This subclass (uvicorn's own extension point) adds the bounds, refuses framing that two parsers could read differently,
and answers in the JSON shape of every other error. A refused connection is closed: what follows on it can't be trusted.
"""

from __future__ import annotations

import asyncio
import time
from asyncio.events import TimerHandle
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import cast

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState as UvicornState

from perilune.server.limits import Limits
from perilune.server.replies import RETRY_AFTER_S, ErrorBody, ErrorInfo


class _HeadTooLarge(Exception):
    """Too many bytes or lines before the body."""


@dataclass(slots=True)
class Shared:
    """What the connections of a server share.

    ``max_connections``: those beyond are answered 503 and closed, before file descriptors run out.
    """

    config: Config
    limits: Limits
    max_connections: int
    state: UvicornState = field(default_factory=UvicornState)
    _date: int = 0

    def tell_time(self) -> None:
        """Sets the date header of the responses to come; once a second, and only while there are any."""
        now = int(time.time())
        if now != self._date:
            self._date = now
            self.state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


class Connection(HttpToolsProtocol):
    """See the module."""

    def __init__(self, shared: Shared, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(shared.config, shared.state, {}, loop)
        self.limits = shared.limits
        self._shared = shared
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._shared.max_connections:
            self._refuse(503, "too many connections are open", "too_many_connections")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client sends nothing more: the transport closes, and the request in progress ends.

        Whether it still reads could only be learnt by writing to it, and until then its request would hold the engine.
        """

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._head_timer is None and self._idle:
            self._await_head()  # the next request of a kept-alive connection
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "protocol upgrades are not supported", "upgrade_not_supported")
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _HeadTooLarge):
                self._refuse(431, self._head_bounds(), "headers_too_large")
            else:
                self._refuse(400, "this is not valid HTTP/1.1", "invalid_http")
        else:
            # llhttp hands a header over when its line is complete: an endless line is seen here.
            self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
            if self._head_bytes > self.limits.max_header_bytes:
                self._refuse(431, self._head_bounds(), "headers_too_large")

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self.limits.max_headers:
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            raise _HeadTooLarge
        self._in_head = False
        self._head_arrived()
        self._shared.tell_time()
        super().on_headers_complete()

    def shutdown(self) -> None:
        self._head_arrived()
        super().shutdown()

    @property
    def _idle(self) -> bool:
        """No request, or one that is answered."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request, whatever uvicorn says
        return cycle is None or cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._head_late)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if not self._in_head:  # nothing was asked: an answer would be taken for that to a later request
            self.transport.close()
            return
        self._refuse(
            408, f"the request's head did not arrive within {self.limits.header_timeout_s:g} s", "request_timeout"
        )

    def _head_bounds(self) -> str:
        return (
            f"the request's head is larger than {self.limits.max_header_bytes} bytes "
            f"or has more than {self.limits.max_headers} headers"
        )

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answers, unless a response is already on its way, and closes."""
        self._refused = True
        self._head_arrived()
        if self.transport.is_closing():
            return
        if self._idle or not self.cycle.response_started:
            kind = "invalid_request_error" if status < 500 else "server_error"
            body = msgspec.json.encode(ErrorBody(ErrorInfo(message=message, type=kind, code=code)))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
            retry = b"retry-after: %d\r\n" % RETRY_AFTER_S if status == 503 else b""
            self.transport.write(STATUS_LINE[status] + head + retry + b"\r\n" + body)
        self.transport.close()
