"""A chat client over HTTP, as small as ``perilune chat`` needs it: which model, and one streamed answer.

Speaks to any OpenAI-compatible server. What a server sends is checked before it is used; what is no chat completion
is a ``PeerError``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import httpx
import msgspec

from perilune.cli.start import KEY_VARIABLE
from perilune.errors import PeerError, UsageError

T = TypeVar("T")

_CONNECT_S: Final = 5.0
_DATA: Final = "data: "
_DONE: Final = "[DONE]"
_KEY: Final = re.compile(r"[!-~]{1,512}")
_USER: Final = re.compile(r"(//|^)[^/?#]*@")
_ERRNO: Final = re.compile(r"^\[Errno -?\d+\] ")


class FunctionDelta(msgspec.Struct, frozen=True):
    """Part of a call."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True):
    """Part of a call."""

    index: int
    id: str | None = None
    function: FunctionDelta = FunctionDelta()


class Delta(msgspec.Struct, frozen=True):
    """What one event adds."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: Delta = Delta()
    finish_reason: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


class _ModelCard(msgspec.Struct, frozen=True):
    id: str


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_ModelCard]


@dataclass(slots=True)
class Call:
    """A whole tool call."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """A streamed answer as far as it has come."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, delta: Delta) -> None:
        """Takes one delta."""
        self.content += delta.content or ""
        self.reasoning += delta.reasoning_content or ""
        for part in delta.tool_calls or ():
            if part.index not in range(len(self.calls) + 1):
                raise PeerError(f"the server sent tool call {part.index} after {len(self.calls)} calls")
            if part.index == len(self.calls):
                self.calls.append(Call())
            call = self.calls[part.index]
            call.id = call.id or part.id or ""
            call.name = call.name or part.function.name or ""
            call.arguments += part.function.arguments or ""

    def message(self) -> dict[str, Any]:
        """The answer as a message of the next request. Reasoning goes back: an open chain of calls needs it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


class ChatClient:
    """One server, one model.

    Args:
        url: with or without ``/v1`` at its end.
        fields: further fields of every request, such as ``temperature``.
        key: sent as a bearer token, and shown in no error.

    Raises:
        PeerError: nobody answers there, or something that is no such server. UsageError: a key that is none.
    """

    def __init__(
        self, url: str, model: str | None = None, fields: Mapping[str, Any] | None = None, key: str | None = None
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.url = _without_password(base)
        self._fields = dict(fields or {})
        if key is not None and not _KEY.fullmatch(key):
            raise UsageError("the API key has characters that no header can carry", hint="printable ASCII is needed")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            if not base.startswith(("http://", "https://")):
                raise ValueError("it does not begin with http:// or https://")
            timeout = httpx.Timeout(None, connect=_CONNECT_S)
            self._http = httpx.Client(base_url=base, headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            why = "" if "@" in url else f": {error}"  # which may quote a password
            raise PeerError(
                f"{_without_password(url)!r} is no URL{why}", hint="such as http://127.0.0.1:8000"
            ) from None
        self.model = model or self._first_model()

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()

    def stream(self, messages: list[dict[str, Any]], tools: list[Any], answer: Answer) -> Iterator[Delta]:
        """Asks, and yields the deltas as they come; ``answer`` grows with them.

        Raises:
            PeerError: refused, failed half-way, or no chat completion.
        """
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True, **self._fields}
        if tools:
            body["tools"] = tools
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise self._refused(response)
                yield from self._deltas(response.iter_lines(), answer)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _deltas(self, lines: Iterator[str], answer: Answer) -> Iterator[Delta]:
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line.removeprefix(_DATA)
            if data == _DONE:
                return
            event = _decode(data.encode(), _Event)
            if event.error is not None:
                raise PeerError(f"the answer broke off: {str(event.error.get('message'))[:300]}")
            for choice in event.choices[:1]:
                answer.add(choice.delta)
                answer.finish_reason = choice.finish_reason or answer.finish_reason
                yield choice.delta
        raise PeerError("the answer broke off: the stream ended before it was done")

    def _first_model(self) -> str:
        try:
            response = self._http.get("/v1/models", timeout=_CONNECT_S)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != httpx.codes.OK:
            raise self._refused(response)
        models = _decode(response.content, _ModelList).data
        if not models:
            raise PeerError(f"{self.url} serves no model")
        return models[0].id

    def _refused(self, response: httpx.Response) -> PeerError:
        hint = ""
        if response.status_code == httpx.codes.UNAUTHORIZED:
            hint = f"the environment variable {KEY_VARIABLE} holds the key to send"
        return PeerError(f"{self.url} answered {response.status_code}: {_error_text(response.content)}", hint=hint)

    def _unreachable(self, error: Exception) -> PeerError:
        why = _ERRNO.sub("", str(error))[:200] or type(error).__name__
        return PeerError(
            f"{self.url} can't be talked to: {why[:1].lower()}{why[1:]}",
            hint="is the server running? `perilune serve` starts one",
        )


def _without_password(url: str) -> str:
    """The URL without what stands before an ``@``: messages end in logs and screenshots."""
    return _USER.sub("//", url, count=1)


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError(f"the server's answer is not what its API says: {str(error)[:200]}") from None


def _error_text(data: bytes) -> str:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except (msgspec.DecodeError, RecursionError):
        return data[:200].decode("utf-8", "replace")
    return str((event.error or {}).get("message"))[:500]
