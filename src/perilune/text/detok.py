"""Bytes to text as it becomes certain.

A token may hold part of a character, so text is released only at character borders. Knows bytes, not tokens: what
stands between the characters (markers, the end of an answer) is the caller's business, who then flushes.
"""

from __future__ import annotations

import codecs


class Utf8Stream:
    """Incremental UTF-8. Bytes that cannot be part of a character become U+FFFD; every split gives the same text."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The characters that ``data`` completes. At most three bytes are held back."""
        return self._decoder.decode(data)

    def flush(self, *, cut: bool = False) -> str:
        """Ends a text: held bytes become U+FFFD, or vanish where a limit ``cut`` the text (they are no error then)."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return "" if cut else rest
