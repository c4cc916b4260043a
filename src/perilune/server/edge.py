"""The outermost ASGI layer: who may talk to us, what every response carries, what becomes of exceptions.

Owns request ids (ours; a client's ``x-request-id`` is echoed, never used), the Host and Origin checks against web pages
that call a server on this machine (DNS rebinding), keys, and the last word on errors: one JSON shape for all of them,
and no text that was not written for clients. Where keys are needed, everything needs one but the paths of ``OPEN``,
whether there is something at a path or not. Decides on the ASGI scope's own path and headers, never on a URL put
together from them. Notes each exchange in the log, and in the usage log if it asked for tokens; no content in either.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.logs import fields
from perilune.server.admission import TENANT
from perilune.server.limits import ClientGone, drain
from perilune.server.records import RECORD, Record
from perilune.server.replies import HttpError, error_info, error_response, unavailable
from perilune.server.state import ServerState

logger = logging.getLogger(__name__)
access = logging.getLogger("perilune.access")

OPEN: Final = frozenset({"/health", "/ready"})
"""Paths that need no key."""
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
TRACE_ID: Final = "perilune.trace_id"
"""Key of the scope under which endpoints find the id of this request."""

SHUTTING_DOWN: Final = "the server is shutting down, the answer was not finished"

_ECHOED_ID: Final = re.compile(r"[!-~]{1,128}")
_MAX_PATH: Final = 200


class Edge:
    """Wraps the routes.

    Args:
        allowed_hosts: names that the Host header may have; None allows all, for addresses that others reach.
    """

    def __init__(self, app: ASGIApp, state: ServerState, allowed_hosts: Collection[str] | None) -> None:
        self._app, self._state, self._allowed_hosts = app, state, allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(scope, receive, send, self._state)
        record = exchange.record
        try:
            headers = Headers(scope=scope)
            self._check_origin(headers)
            record.tenant = self._authenticate(scope["path"], headers)
            inner = {**scope, TRACE_ID: record.id, TENANT: record.tenant, RECORD: record}
            # Starlette's routes raise, rather than answer in plain text, where they find an application here.
            await self._app({**inner, "app": self}, exchange.receive, exchange.send)
        except ClientGone:
            record.client_gone = True
        except asyncio.CancelledError:
            # The grace at the server's end is over. Nobody is left to cancel us for anything else.
            await self._refuse(exchange, unavailable(SHUTTING_DOWN, code="shutting_down"))
        except Exception as error:  # noqa: BLE001 - the last handler: whatever it is, the client gets one JSON shape
            await self._refuse(exchange, _as_http_error(error))
        finally:
            self._note(record)

    def _authenticate(self, path: str, headers: Headers) -> str:
        """The name of the key that a request carries; empty where none is needed.

        Raises:
            HttpError: 401.
        """
        if self._state.keys is None or path in OPEN:
            return ""
        key = self._state.keys.find(headers.getlist("authorization"))
        if key is None:
            raise HttpError(
                401,
                "this server needs an API key, and this request has none that it knows",
                code="invalid_api_key",
                hint="send `Authorization: Bearer KEY`",
                headers={"www-authenticate": 'Bearer realm="perilune"'},
            )
        return key.name

    def _note(self, record: Record) -> None:
        seconds = asyncio.get_running_loop().time() - record.started
        level = logging.DEBUG if record.path in OPEN else logging.INFO
        if access.isEnabledFor(level):
            used = record.wanted_engine
            access.log(
                level,
                "request",
                extra=fields(
                    id=record.id,
                    method=record.method,
                    path=record.path[:_MAX_PATH],
                    status=record.status,
                    seconds=round(seconds, 4),
                    key=record.tenant or None,
                    client_gone=record.client_gone or None,
                    error=record.error or None,
                    prompt_tokens=record.prompt_tokens if used else None,
                    completion_tokens=record.completion_tokens if used else None,
                    finish=",".join(record.finish) or None,
                ),
            )
        if record.wanted_engine and self._state.usage_log is not None:
            record.model = record.model or self._state.names[0]
            self._state.usage_log.write(record.usage(record.started + seconds))

    async def _refuse(self, exchange: _Exchange, error: Exception) -> None:
        status, info = error_info(error)
        exchange.record.error = info.code or info.type
        if status == 500 or (exchange.started and info.code != "shutting_down"):
            logger.error("request failed", exc_info=error, extra=fields(id=exchange.record.id))
        if exchange.started:
            return  # the server closes the connection: a response cut short can't look complete
        response = error_response(error)
        if not exchange.body_read:
            response.headers["connection"] = "close"
            if "expect" not in Headers(scope=exchange.scope) and info.code != "shutting_down":
                await drain(exchange.receive, self._state.limits)
        await response(exchange.scope, exchange.receive, exchange.send)

    def _check_origin(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            message = f"{len(hosts)} Host headers, exactly one is needed"
            raise HttpError(400, message, code="invalid_host", headers={"connection": "close"})
        if self._allowed_hosts is not None and _host_name(hosts[0]) not in self._allowed_hosts:
            raise HttpError(
                421,
                f"this server does not answer for host {hosts[0][:80]!r}",
                code="unknown_host",
                hint="use localhost or 127.0.0.1",
            )
        origin = headers.get("origin")
        if origin is not None and _origin_authority(origin) != hosts[0].lower():
            raise HttpError(403, f"pages of origin {origin[:80]!r} may not call this server", code="origin_not_allowed")


class _Exchange:
    """One request and its response: what has been read and sent so far."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, state: ServerState) -> None:
        self.scope, self._receive, self._send, self._state = scope, receive, send, state
        now = asyncio.get_running_loop().time()
        self.record = Record(uuid.uuid4().hex, scope["method"], scope["path"], now)
        self.started = False
        self.body_read = scope["method"] in ("GET", "HEAD")

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.body_read = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.record.status = message["status"]
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            given = Headers(scope=self.scope).get("x-request-id", "")
            headers["x-request-id"] = given if _ECHOED_ID.fullmatch(given) else self.record.id
            headers["x-trace-id"] = self.record.id
            if self.record.tenant:
                now = asyncio.get_running_loop().time()
                headers.update(self._state.admission.tenant(self.record.tenant).headers(now))
            message = {**message, "headers": headers.raw}
        await self._send(message)


def _as_http_error(error: Exception) -> Exception:
    """Starlette's own refusals (no route, wrong method) in our words."""
    if not isinstance(error, HTTPException):
        return error
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return HttpError(
            405, f"this path takes {allowed or 'other methods'}", code="method_not_allowed", headers={"allow": allowed}
        )
    return HttpError(
        error.status_code,
        "there is nothing at this path",
        code="not_found",
        hint="POST /v1/chat/completions, GET /v1/models, /health and /ready are here",
    )


def _host_name(host: str) -> str:
    """The name of a Host header without port, brackets and final dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _origin_authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
