"""compressed-tensors' ``ignore`` list: which modules a quantiser was told to leave alone.

An entry is a module's exact name, or ``re:`` and a pattern that must match from the start of the name (not to its
end, unless it says ``$``). Patterns come from a file, and a hostile one can keep a backtracking engine busy for ever,
so they are not given to one: the forms in use (literals, ``\\.``, ``.``, ``.*``, one level of ``(a|b)``, ``$``) are
read here and matched run by run, without backtracking. Anything else is reported as unclear, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Final

MAX_FORMS: Final = 256
"""Patterns of a whole list, alternatives multiplied out."""

_TOKEN: Final = re.compile(r"\.\*|\\([.\-_/])|\(((?:[\w|.\-]|\\\.)*)\)|([\w\-/])|(\.)")
_ANY, _ONE = "*", "?"

Glob = tuple[re.Pattern[str], ...]
"""Runs of fixed length, with anything between two of them."""


class IgnoreList:
    """A parsed list.

    Attributes:
        unclear: entries that could not be read; they match nothing.
    """

    __slots__ = ("_exact", "_globs", "unclear")

    def __init__(self, entries: Sequence[str]) -> None:
        self._exact = frozenset(entry for entry in entries if not entry.startswith("re:"))
        self._globs: list[tuple[Glob, bool]] = []
        unclear = []
        for entry in entries:
            if entry.startswith("re:"):
                globs = _parse(entry[3:], MAX_FORMS - len(self._globs))
                self._globs += globs
                if not globs:
                    unclear.append(entry)
        self.unclear = tuple(unclear)

    def matches(self, module: str) -> bool:
        """Whether the list covers a module by this name."""
        return module in self._exact or any(_match(glob, to_end, module) for glob, to_end in self._globs)


def _parse(pattern: str, limit: int) -> list[tuple[Glob, bool]]:
    """The pattern's alternatives, each with whether it must reach the end; empty if the form is not understood."""
    to_end = pattern.endswith("$")
    choices: list[list[str]] = []
    at, stop = int(pattern.startswith("^")), len(pattern) - to_end
    forms = 1
    while at < stop:
        token = _TOKEN.match(pattern, at, stop)
        if token is None:
            return []
        at = token.end()
        choices.append(_choices(token))
        forms *= len(choices[-1])
        if forms > limit:
            return []
    return [(_glob("".join(parts)), to_end) for parts in product(*choices)]


def _choices(token: re.Match[str]) -> list[str]:
    """What one token stands for, in the alphabet of literals, ``*`` and ``?`` (neither occurs in a module's name)."""
    escaped, group, literal, dot = token.groups()
    if escaped is not None:
        return [str(escaped)]
    if group is not None:
        return [word.replace("\\.", "\0").replace(".", _ONE).replace("\0", ".") for word in group.split("|")]
    if literal is not None:
        return [str(literal)]
    return [_ONE if dot is not None else _ANY]


def _glob(text: str) -> Glob:
    """Runs as patterns without repetition or choice: they cannot backtrack."""
    return tuple(
        re.compile("".join("." if char == _ONE else re.escape(char) for char in run)) for run in text.split(_ANY)
    )


def _match(glob: Glob, to_end: bool, name: str) -> bool:
    """Leftmost placement of each run is enough: what follows can only gain from it."""
    if len(glob) == 1 and to_end:
        return glob[0].fullmatch(name) is not None
    found = glob[0].match(name)
    middle = glob[1:-1] if to_end else glob[1:]
    for run in middle:
        if found is None:
            return False
        found = run.search(name, found.end())
    if found is None or not to_end:
        return found is not None
    return _ends_with(glob[-1], name, found.end())


def _ends_with(run: re.Pattern[str], name: str, start: int) -> bool:
    return any(run.fullmatch(name, at) is not None for at in range(start, len(name) + 1))
