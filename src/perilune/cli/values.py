"""What values an option takes, whatever place they come from, and the words for those that it does not.

A file's values have types of their own and are taken at their word: ``true`` is not 1, 3.0 is no whole number, "3" is
no number. The environment and the command line have only text, which must say plainly what is wanted. Knows no option
by name: a verb's signature tells what there is. Longer texts are never shown: one may be a key in the wrong place.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Final, get_args, get_origin

from perilune.errors import UsageError

SHOWN_CHARS: Final = 15
"""Longest text that a message shows. No key of a client is that short."""

_MOST_WHOLE: Final = 1 << 53
_MOST: Final = 1e9
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER: Final = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_WORDS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One value of ``base`` (bool, int, float, str, Path or an enumeration of texts), or a list of such texts.

    ``low`` and ``high`` bound numbers, ends included.
    """

    base: type
    several: bool = False
    low: float | None = None
    high: float | None = None

    @property
    def allowed(self) -> str:
        """In words, for a sentence that ends in "is needed"."""
        return "a list of texts" if self.several else self._one()

    def check(self, value: object, place: str) -> None:
        """Refuses data that is no value of this kind.

        Raises:
            UsageError: ``place`` is where it stands; the value (unless it may be a secret) and what is allowed follow.
        """
        if not self.several:
            self._check_one(value, place)
            return
        if not isinstance(value, list):
            raise self._refusal(value, place)
        for index, each in enumerate(value):
            self._check_one(each, f"{place}[{index}]")

    def check_text(self, text: str, place: str) -> None:
        """The same for text from the environment or the command line.

        Raises:
            UsageError: as ``check``.
        """
        self._check_one(self._read(text), place)

    def _check_one(self, value: object, place: str) -> None:
        if not self._takes(value):
            raise self._refusal(value, place, self._one())

    def _takes(self, value: object) -> bool:
        if self.base is bool:
            return isinstance(value, bool)
        if self.base in (int, float):
            right = type(value) is int or (self.base is float and type(value) is float)
            low, high = self._bounds()
            return right and low <= value <= high  # type: ignore[operator]  # NaN is within no bounds
        if not isinstance(value, str) or "\0" in value:
            return False
        if self.base is Path:
            return bool(value)  # of any bytes, as file systems have them
        if issubclass(self.base, Enum):
            return value in {each.value for each in self.base}
        return _is_unicode(value) and (bool(value) or not self.several)

    def _read(self, text: str) -> object:
        """What the text says; the text itself, if that is nothing of this kind."""
        plain = text.strip()
        if self.base is bool:
            return _WORDS.get(plain.lower(), text)
        if self.base is int and _WHOLE.fullmatch(plain):
            return int(plain)
        if self.base is float and _NUMBER.fullmatch(plain):
            return float(plain)
        return text

    def _bounds(self) -> tuple[float, float]:
        most = _MOST_WHOLE if self.base is int else _MOST
        return (-most if self.low is None else self.low), (most if self.high is None else self.high)

    def _one(self) -> str:
        if self.base is bool:
            return "true or false"
        if self.base in (int, float):
            low, high = (f"{end:.16g}" for end in self._bounds())
            return f"a {'whole ' if self.base is int else ''}number from {low} to {high}"
        if issubclass(self.base, Enum):
            return "one of " + ", ".join(repr(each.value) for each in self.base)
        if self.base is Path:
            return "a path"
        return "a text that is not empty" if self.several else "a text"

    def _refusal(self, value: object, place: str, allowed: str = "") -> UsageError:
        return UsageError(f"{place} is {shown(value)}, {allowed or self.allowed} is needed")


def kinds(verb: Callable[..., Any] | None) -> Mapping[str, Kind]:
    """Of every option and argument, from the verb's signature; by the parameter's name."""
    if verb is None:
        return {}
    parameters = inspect.signature(verb, eval_str=True).parameters
    return {
        name: _kind(each.annotation) for name, each in parameters.items() if hasattr(each.annotation, "__metadata__")
    }


def shown(value: object) -> str:
    """A value as TOML would have it, short, and only if it can't be a secret."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value) if len(value) <= SHOWN_CHARS else f"a text of {len(value)} characters"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a table"
    return f"a {type(value).__name__}"


def _kind(annotation: Any) -> Kind:
    inner, info = annotation.__origin__, annotation.__metadata__[0]
    base = next(each for each in _parts(inner) if each is not NoneType)
    several = get_origin(base) is list
    return Kind(get_args(base)[0] if several else base, several, getattr(info, "min", None), getattr(info, "max", None))


def _parts(annotation: Any) -> Iterator[Any]:
    """The members of a union; a type that is none is its own."""
    yield from (get_args(annotation) if NoneType in get_args(annotation) else (annotation,))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
