"""``POST /v1/completions``: text continued, without a chat's format. What evaluation harnesses use."""

from __future__ import annotations

import time
from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from perilune.server.generation import GenerationEndpoint, Services
from perilune.server.logprobs import TextLogprobsWriter
from perilune.server.metrics import Watch
from perilune.server.prepare import Order, TextTask
from perilune.server.text_wire import TextBuilder, TextChoice, TextCompletion, whole
from perilune.server.tokenjobs import COMPLETION
from perilune.server.wire import DONE, Usage, sse, usage
from perilune.text.tokenizer import Tokenizer
from perilune.types import TokenOut


def completion_endpoint(services: Services) -> GenerationEndpoint[TextTask]:
    """The endpoint, as an ASGI application."""
    return GenerationEndpoint(services, COMPLETION, TextAnswer)


class TextAnswer:
    """All choices of one completion: ``n`` for the first prompt, ``n`` for the second, …"""

    def __init__(self, task: TextTask, request_id: str, tokenizer: Tokenizer, _: Watch) -> None:
        self.order: Order = task.order
        self._silent = task.silent
        self._id, self._created = f"cmpl-{request_id}", int(time.time())
        number = len(task.order.prompts) * task.order.n
        self._completion_tokens = [0] * number
        self._cached_tokens = [0] * number
        self._pieces: list[list[TextChoice]] = [[] for _ in range(number)]
        self._builders = [self._builder(index, task, tokenizer) for index in range(number)]

    def events(self, index: int, out: TokenOut) -> Iterator[bytes]:
        """What news of a choice adds to a stream."""
        piece = self._take(index, out)
        if piece is not None:
            yield sse(self._completion((piece,), None if self.order.include_usage else UNSET))

    def end(self) -> Iterator[bytes]:
        """What follows when every choice has ended."""
        if self.order.include_usage:
            yield sse(self._completion((), self._usage()))
        yield DONE

    def add(self, index: int, out: TokenOut) -> None:
        """Takes news for a response that is told whole."""
        piece = self._take(index, out)
        if piece is not None:
            self._pieces[index].append(piece)

    def whole(self) -> TextCompletion:
        """That response."""
        return self._completion(tuple(map(whole, self._pieces)), self._usage())

    def _builder(self, index: int, task: TextTask, tokenizer: Tokenizer) -> TextBuilder:
        prompt = task.order.prompts[index // task.order.n] if task.echo else ()
        wanted = task.order.sampling[0].logprobs is not None
        logprobs = TextLogprobsWriter(tokenizer, name_ids=task.name_ids) if wanted else None
        return TextBuilder(index, tokenizer, prompt, logprobs, silent=task.silent)

    def _take(self, index: int, out: TokenOut) -> TextChoice | None:
        self._completion_tokens[index] = 0 if self._silent else out.completion_tokens
        self._cached_tokens[index] = out.cached_tokens
        return self._builders[index].piece(out)

    def _completion(self, choices: tuple[TextChoice, ...], used: Usage | UnsetType | None) -> TextCompletion:
        return TextCompletion(id=self._id, created=self._created, model=self.order.model, choices=choices, usage=used)

    def _usage(self) -> Usage:
        """A prompt counts once, and as cached what its first answer found."""
        return usage(
            sum(map(len, self.order.prompts)),
            sum(self._completion_tokens),
            0,
            sum(self._cached_tokens[:: self.order.n]),
        )
