"""Log-probabilities as clients read them: chat's list of entries, and the four arrays of plain completions.

A token is named by its text. Where that is no text by itself (part of a character), it is named by its bytes,
``bytes:\\xf0\\x9f``, as OpenAI's completions do, so that two tokens never have one name; a special
token by its own name. Values are the model's own, before bias, penalties, temperature and filters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from perilune.text.detok import Utf8Stream
from perilune.text.tokenizer import Tokenizer
from perilune.types import TokenLogprobs

LOWEST: Final = -9999.0
"""Told instead of anything lower: JSON has no infinity, and OpenAI's clients know this number."""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One likely token. ``bytes`` is null for special tokens."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class LogprobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One token of an answer."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """``choices[].logprobs`` of chat: the tokens that content is made of, and those between the think marks."""

    content: tuple[LogprobEntry, ...]
    reasoning_content: tuple[LogprobEntry, ...]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """``choices[].logprobs`` of plain completions: four arrays of one length. ``text_offset``: characters into the
    choice's text. The prompt's first token has no log-probability."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Sequence[dict[str, float] | None]
    text_offset: Sequence[int]


def joined(first: ChatLogprobs | None, second: ChatLogprobs | None) -> ChatLogprobs | None:
    """Both, one after the other."""
    if first is None or second is None:
        return first or second
    return ChatLogprobs(
        content=first.content + second.content, reasoning_content=first.reasoning_content + second.reasoning_content
    )


def joined_arrays(pieces: Iterable[TextLogprobs | None]) -> TextLogprobs | None:
    """All of them, one after the other; None if there are none."""
    there = [piece for piece in pieces if piece is not None]
    if len(there) < 2:
        return there[0] if there else None
    return TextLogprobs(
        tokens=[token for piece in there for token in piece.tokens],
        token_logprobs=[value for piece in there for value in piece.token_logprobs],
        top_logprobs=[top for piece in there for top in piece.top_logprobs],
        text_offset=[offset for piece in there for offset in piece.text_offset],
    )


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """See the module."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode() if data else tokenizer.decode((token,))
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def entry(tokenizer: Tokenizer, token: int, values: TokenLogprobs) -> LogprobEntry:
    """One token as chat tells it."""
    return LogprobEntry(
        token=token_name(tokenizer, token),
        logprob=max(values.chosen, LOWEST),
        bytes=_octets(tokenizer, token),
        top_logprobs=tuple(
            TopLogprob(token=token_name(tokenizer, each), logprob=max(value, LOWEST), bytes=_octets(tokenizer, each))
            for each, value in zip(values.top_ids, values.top, strict=True)
        ),
    )


def _octets(tokenizer: Tokenizer, token: int) -> tuple[int, ...] | None:
    return tuple(tokenizer.token_bytes(token)) or None


class TextLogprobsWriter:
    """Grows the arrays of one choice.

    Args:
        name_ids: name every token ``token_id:{id}``.
    """

    def __init__(self, tokenizer: Tokenizer, *, name_ids: bool) -> None:
        self._tokenizer, self._name_ids = tokenizer, name_ids
        self._utf8 = Utf8Stream()
        self._offset = 0

    def add(self, tokens: Iterable[int], values: Iterable[TokenLogprobs | None]) -> TextLogprobs:
        """The arrays of the next tokens."""
        names: list[str] = []
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, value in zip(tokens, values, strict=True):
            names.append(self._name(token))
            offsets.append(self._offset)
            chosen.append(None if value is None else max(value.chosen, LOWEST))
            tops.append(None if value is None else self._top(token, value))
            data = self._tokenizer.token_bytes(token)
            self._offset += len(self._utf8.feed(data) if data else self._utf8.flush())
        return TextLogprobs(tokens=names, token_logprobs=chosen, top_logprobs=tops, text_offset=offsets)

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._name_ids else token_name(self._tokenizer, token)

    def _top(self, token: int, value: TokenLogprobs) -> dict[str, float]:
        """The likely tokens and, where it is none of them, the one that was chosen."""
        top = {self._name(each): max(number, LOWEST) for each, number in zip(value.top_ids, value.top, strict=True)}
        top.setdefault(self._name(token), max(value.chosen, LOWEST))
        return top
