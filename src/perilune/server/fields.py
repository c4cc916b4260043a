"""Typed, bounded access to the fields of a decoded JSON object.

Every refusal is a ``RequestError`` whose ``param`` is the field and whose message names the value and what is allowed.
``null`` means absent, as OpenAI's clients use it. ``true`` is not 1; an integer is a fine float; a float with an
integral value is no integer. Keeps the set of names that were asked for, so that the rest can be reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from perilune.errors import RequestError
from perilune.server.jsonbody import json_type

SMALLEST: Final = 1e-6
"""Numbers nearer to 0 than this, but not 0, are refused: dividing logits by them overflows, and nobody means them."""


class Fields:
    """One object of a request.

    Args:
        data: the object.
        prefix: where it stands, for ``param``: empty for the body, ``stream_options.`` below it.
    """

    def __init__(self, data: Mapping[str, object], prefix: str = "") -> None:
        self._data = data
        self._prefix = prefix
        self._known: set[str] = set()
        self._nested: list[Fields] = []

    def get(self, name: str) -> object:
        """The raw value, None when absent. Marks the name as known."""
        self._known.add(name)
        return self._data.get(name)

    def unknown(self) -> tuple[str, ...]:
        """Names that nobody asked for, with their prefix: those in nested objects first."""
        below = tuple(name for each in self._nested for name in each.unknown())
        return below + tuple(self._prefix + name for name in self._data if name not in self._known)

    def keys(self) -> tuple[str, ...]:
        """Every name, in the order of the request; for objects whose keys are data."""
        return tuple(self._data)

    def fail(self, name: str, allowed: str, *, code: str = "invalid_value", hint: str = "") -> RequestError:
        """The refusal of a field: ``allowed`` completes the sentence."""
        param = self._prefix + name
        return RequestError(f"`{param}` is {shown(self._data.get(name))}, {allowed}", param=param, code=code, hint=hint)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false is needed", code="invalid_type")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"an integer from {low} to {high} is needed", code="invalid_type")
        if not low <= value <= high:
            raise self.fail(name, f"an integer from {low} to {high} is needed")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(name, f"a number from {low:g} to {high:g} is needed", code="invalid_type")
        if not low <= value <= high:  # before float(): a huge integer has no float
            raise self.fail(name, f"a number from {low:g} to {high:g} is needed")
        number = float(value)
        if (number and abs(number) < SMALLEST) or not math.isfinite(number):
            raise self.fail(name, f"0, or a number of at least {SMALLEST:g}, is needed")
        return number

    def string(self, name: str, max_chars: int) -> str | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.fail(name, "a string is needed", code="invalid_type")
        if len(value) > max_chars:
            raise self.fail(name, f"at most {max_chars} characters are allowed, it has {len(value)}")
        return value

    def nested(self, name: str) -> Fields | None:
        """A nested object, with its own fields."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, "an object is needed", code="invalid_type")
        nested = Fields(value, f"{self._prefix}{name}.")
        self._nested.append(nested)
        return nested

    def only(self, name: str, neutral: tuple[object, ...], hint: str) -> None:
        """Refuses every value of a feature that is not here, but for those that ask for nothing."""
        value = self.get(name)
        if value is None or any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
        ):
            return
        allowed = " or ".join(shown(item) for item in neutral) or "nothing"
        raise self.fail(name, f"only {allowed} is supported", code="unsupported_value", hint=hint)


def shown(value: object) -> str:
    """A value as an error message shows it: short, one line, no addresses."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        # str() of a huge integer is quadratic, and Python refuses it beyond 4300 digits.
        return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}…"
    return f"an {json_type(value)}"
