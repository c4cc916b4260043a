"""Error bodies, in OpenAI's shape, and the responses that carry them.

Owns the mapping from an error to a status and ``{"error": {"message", "type", "param", "code"}}``. A message reaches a
client only when it was written for clients (``RequestError``): anything else is named by its kind, so no path, address
or traceback leaves the process.
"""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from perilune.errors import EngineError, RequestError

RETRY_AFTER_S: Final = 1


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The inner object of an error body."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """An error body, and the payload of an error event in a stream."""

    error: ErrorInfo


class HttpError(RequestError):
    """A request refused before its body counts: unknown path, method, media type, size, host.

    Args:
        status: the HTTP status.
        headers: further response headers.
    """

    def __init__(self, status: int, message: str, *, code: str, hint: str = "", headers: dict[str, str] | None = None):
        super().__init__(message, code=code, hint=hint)
        self.status = status
        self.headers = headers or {}
        self.type = "not_found_error" if status == 404 else "server_error" if status >= 500 else self.type


def unavailable(message: str, code: str) -> HttpError:
    """A 503 that says when to come back."""
    return HttpError(503, message, code=code, headers={"retry-after": str(RETRY_AFTER_S)})


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``value`` (plain data or structs) as JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def error_info(error: BaseException) -> tuple[int, ErrorInfo]:
    """Status and body of any exception."""
    if isinstance(error, RequestError):
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        return error.status, ErrorInfo(message=message, type=error.type, param=error.param, code=error.code)
    if isinstance(error, EngineError):
        return 503, ErrorInfo(
            message="the engine stopped; see the server's log", type="server_error", code="engine_error"
        )
    return 500, ErrorInfo(message="internal error; see the server's log", type="server_error", code="internal_error")


def error_response(error: BaseException) -> Response:
    """The whole response of any exception."""
    status, info = error_info(error)
    headers = dict(error.headers) if isinstance(error, HttpError) else {}
    if status == 503:
        headers.setdefault("retry-after", str(RETRY_AFTER_S))
    return json_response(ErrorBody(info), status, headers)
