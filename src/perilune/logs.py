"""Log lines: one event, one line, as JSON or as text. Standard library only; server and engine process share it.

An event's message is written by us; what a client chose (names, paths) comes beside it as ``fields``. Nothing in either
can end a line, pass for another event, or for another field: text lines follow logfmt (what is ambiguous stands in
quotes, with JSON's escapes), so a line reads back as the fields that it was made of. Prompts, answers and keys are
never logged: nobody hands them to a logger. Only our own loggers follow the level that an operator chooses; libraries
speak up from warnings on, because at ``debug`` some of them print what they carry.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from typing import IO, Any, Final, Literal

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

OURS: Final = "perilune"
_FIELDS: Final = "perilune_fields"
_MAX_CHARS: Final = 4000
_NOT_PLAIN: Final = re.compile(r"[^ -~]")


def configure(form: LogFormat, level: LogLevel, stream: IO[str] | None = None) -> None:
    """Sends the process's log to ``stream`` (None: stderr), replacing what was configured before."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(OURS).setLevel(level.upper())


def fields(**values: object) -> dict[str, Any]:
    """The ``extra`` of a log call: facts beside the message. None is left out."""
    return {_FIELDS: {name: value for name, value in values.items() if value is not None}}


class _Json(logging.Formatter):
    """``{"time", "level", "logger", "message", …fields}``; time is UTC."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:_MAX_CHARS],
            "pid": record.process,
            **{name: _finite(value) for name, value in _fields_of(record).items()},
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Text(logging.Formatter):
    """``time LEVEL logger: message name=value …``; a traceback follows, each line of it marked.

    Quoted is a message that could be taken for a field or is not printable, and a value that is empty, not printable,
    or has a space, ``=`` or ``"``.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()[:_MAX_CHARS]
        clear = message.isprintable() and "=" not in message and not message.startswith('"')
        parts = [message if clear else _quoted(message)]
        parts += [f"{name}={_value(value)}" for name, value in _fields_of(record).items()]
        line = f"{_utc(record.created)} {record.levelname} {record.name}: {' '.join(parts)}"
        if not record.exc_info:
            return line
        trace = self.formatException(record.exc_info).splitlines()
        return "\n".join([line, *(f"    | {printable(each)}" for each in trace)])


def _fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, _FIELDS, {})
    return found


def _finite(value: object) -> object:
    """JSON has no number that is none."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def _value(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not any(char in text for char in ' ="') else _quoted(text)


def _quoted(text: str) -> str:
    """As a JSON string; what is printable stays as it is."""
    return f'"{printable(json.dumps(text, ensure_ascii=False)[1:-1])}"'


def printable(text: str) -> str:
    """Everything that could move a cursor or end a line is shown as JSON's escape of it."""
    return text if text.isprintable() else _NOT_PLAIN.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    char = found[0]
    if char.isprintable():
        return char
    escaped = json.dumps(char)[1:-1]
    return f"\\u{ord(char):04x}" if escaped == char else escaped  # JSON lets DEL stand
