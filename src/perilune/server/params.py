"""Rows of the tables from which request bodies are read and described.

A ``Param`` is one field of a body: how it is read and checked, what OpenAPI says of it. ``schema``, ``text_schema`` and
``tokenize_schema`` are such tables, so the document that ``openapi`` makes of them cannot drift from what is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from perilune.server.fields import SMALLEST, Fields

T = TypeVar("T")
Schema = Mapping[str, object]

MAX_NAME: Final = 512
MAX_COUNT: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Param(Generic[T]):
    """One field.

    Attributes:
        read: takes it out of a body, checked. Raises RequestError.
        schema: JSON Schema of what ``read`` accepts; null, which means absent, goes without saying.
        about: one line for people; empty for what is only there to be refused.
    """

    name: str
    read: Callable[[Fields], T]
    schema: Schema
    about: str = ""
    required: bool = False


def read_all(params: Iterable[Param[Any]], fields: Fields) -> dict[str, Any]:
    """Every field of a table, by name."""
    return {param.name: param.read(fields) for param in params}


def flag(name: str, about: str, default: bool = False) -> Param[bool]:
    """True or false."""
    return Param(name, lambda fields: fields.boolean(name, default), {"type": "boolean", "default": default}, about)


def integer(name: str, about: str, low: int, high: int) -> Param[int | None]:
    """A bounded integer."""
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Param(name, lambda fields: fields.integer(name, low, high), schema, about)


def count(name: str, about: str, default: int, high: int = MAX_COUNT) -> Param[int]:
    """An integer from 0 (or 1, if that is the default) with a default."""
    low = min(default, 1)

    def read(fields: Fields) -> int:
        value = fields.integer(name, low, high)
        return default if value is None else value

    return Param(name, read, {"type": "integer", "minimum": low, "maximum": high, "default": default}, about)


def number(name: str, about: str, low: float, high: float) -> Param[float | None]:
    """A bounded number; 0, or not nearer to it than ``SMALLEST``."""
    schema = {"type": "number", "minimum": low, "maximum": high}
    return Param(name, lambda fields: fields.number(name, low, high), schema, about)


def positive(name: str, about: str, high: float, hint: str = "") -> Param[float | None]:
    """A number above 0."""

    def read(fields: Fields) -> float | None:
        value = fields.number(name, 0.0, high)
        if value == 0:
            raise fields.fail(name, f"a number above 0 and at most {high:g} is needed", hint=hint)
        return value

    return Param(name, read, {"type": "number", "minimum": SMALLEST, "maximum": high}, about)


def offset(name: str, about: str, neutral: float, low: float, high: float) -> Param[float]:
    """A bounded number with a default that changes nothing."""

    def read(fields: Fields) -> float:
        value = fields.number(name, low, high)
        return neutral if value is None else value

    return Param(name, read, {"type": "number", "minimum": low, "maximum": high, "default": neutral}, about)


def text(name: str, about: str, max_chars: int = MAX_NAME) -> Param[str | None]:
    """A bounded string."""
    return Param(name, lambda fields: fields.string(name, max_chars), {"type": "string", "maxLength": max_chars}, about)


def refused(name: str, neutral: tuple[object, ...], hint: str) -> Param[None]:
    """A feature that is not here. Only values that ask for nothing pass: ignoring others would give a wrong answer."""
    return Param(name, lambda fields: fields.only(name, neutral, hint), {"enum": [*neutral, None]})


def unused(name: str) -> Param[object]:
    """Accepted, so that clients that always send it work. Changes nothing in the answer."""
    return Param(name, lambda fields: fields.get(name), {}, "accepted, without effect")
