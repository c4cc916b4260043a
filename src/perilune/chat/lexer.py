"""Markers in text, for the output of engines that send text and no ids.

A marker is recognised by its spelling, under every chunking; only text that could still become one is held back. With
ids there is no such guess, so ids are what our own engine's output is parsed from.
"""

from __future__ import annotations

from typing import Final

from perilune.chat.markers import Marker, Piece

_SPELLINGS: Final = {
    **{str(marker): marker for marker in Marker},
    # Some quantised models write the section's markers in the singular.
    "<|tool_call_section_begin|>": Marker.SECTION,
    "<|tool_call_section_end|>": Marker.SECTION_END,
}
_OPEN: Final = "<"
"""First character of every spelling, and of no other place in one: a failed match costs one comparison, no restart."""


class MarkerLexer:
    """Text chunks to pieces. Linear: held text is shorter than the longest spelling."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        text = self._held + text
        self._held = ""
        pieces: list[Piece] = []
        begin = 0
        at = text.find(_OPEN)
        while at >= 0:
            spelling = next((spelling for spelling in _SPELLINGS if text.startswith(spelling, at)), None)
            if spelling is not None:
                pieces += (text[begin:at], _SPELLINGS[spelling])
                begin = at + len(spelling)
            elif any(spelling.startswith(text[at : at + len(spelling)]) for spelling in _SPELLINGS):
                self._held = text[at:]
                text = text[:at]
                break
            at = text.find(_OPEN, max(at + 1, begin))
        pieces.append(text[begin:])
        return [piece for piece in pieces if piece]

    def flush(self) -> str:
        """The held text: the output ended, so it is no marker."""
        held, self._held = self._held, ""
        return held
