"""Responses of ``/v1/completions``: their structs, and one choice's text as it becomes certain.

Text is that of ordinary tokens; special tokens are none. Chunks of a stream, put together, are the whole response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from perilune.server.logprobs import TextLogprobs, TextLogprobsWriter, joined_arrays
from perilune.server.wire import Usage
from perilune.text.detok import Utf8Stream
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason, TokenLogprobs, TokenOut

TextFinish = Literal["stop", "length"]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: TextFinish | None = None


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One ``text_completion``, whole or as a chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class TextBuilder:
    """One choice, as it grows.

    Args:
        prompt: is told before the answer, for ``echo``; empty otherwise.
        logprobs: None where none are wanted.
        silent: nothing of the answer is told.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        prompt: tuple[int, ...],
        logprobs: TextLogprobsWriter | None,
        *,
        silent: bool,
    ) -> None:
        self._index, self._tokenizer, self._silent = index, tokenizer, silent
        self._utf8 = Utf8Stream()
        self._logprobs = logprobs
        self._prompt = prompt
        self._told = 0

    def piece(self, out: TokenOut) -> TextChoice | None:
        """What one message of the engine adds, if anything; the last one has the finish reason."""
        text, logprobs = self._echo(out) if self._told < len(self._prompt) else ("", None)
        if not self._silent:
            text += self._text(out.tokens) + self._utf8.feed(out.tail)
            if self._logprobs is not None and out.tokens:
                logprobs = joined_arrays((logprobs, self._logprobs.add(out.tokens, out.logprobs)))
        finish: TextFinish | None = None
        if out.finish is not None:
            finish = "length" if self._silent or out.finish is FinishReason.LENGTH else "stop"
            text += self._utf8.flush(cut=finish == "length")
        if not text and logprobs is None and finish is None:
            return None
        return TextChoice(index=self._index, text=text, logprobs=logprobs, finish_reason=finish)

    def _echo(self, out: TokenOut) -> tuple[str, TextLogprobs | None]:
        """The prompt, as far as its log-probabilities have come where they are wanted."""
        if self._logprobs is None:
            self._told = len(self._prompt)
            return self._text(self._prompt), None
        values: tuple[TokenLogprobs | None, ...] = out.prompt_logprobs
        if self._told == 0:
            values = (None, *values)
        tokens = self._prompt[self._told : self._told + len(values)]
        self._told += len(tokens)
        return self._text(tokens), self._logprobs.add(tokens, values)

    def _text(self, tokens: Iterable[int]) -> str:
        parts: list[str] = []
        for token in tokens:
            data = self._tokenizer.token_bytes(token)
            parts.append(self._utf8.feed(data) if data else self._utf8.flush())
        return "".join(parts)


def whole(pieces: Sequence[TextChoice]) -> TextChoice:
    """One choice, put together."""
    return TextChoice(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        logprobs=joined_arrays(piece.logprobs for piece in pieces),
        finish_reason=pieces[-1].finish_reason,
    )
