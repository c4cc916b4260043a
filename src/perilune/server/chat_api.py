"""``POST /v1/chat/completions``: answers of a chat, each with its own parser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from perilune.chat.machine import State
from perilune.chat.parse import Event, OutputParser
from perilune.server.generation import GenerationEndpoint, Services
from perilune.server.logprobs import ChatLogprobs, LogprobEntry, entry
from perilune.server.metrics import Watch
from perilune.server.prepare import ChatTask, Order
from perilune.server.tokenjobs import CHAT
from perilune.server.wire import Choice, ChunkHead, ChunkWriter, Completion, MessageBuilder, Usage, usage
from perilune.text.tokenizer import Tokenizer
from perilune.types import TokenOut


def chat_endpoint(services: Services) -> GenerationEndpoint[ChatTask]:
    """The endpoint, as an ASGI application."""
    return GenerationEndpoint(services, CHAT, ChatAnswer)


@dataclass(slots=True)
class _Choice:
    """One choice: what has been learnt of it so far, and both ways in which it may be told."""

    parser: OutputParser
    writer: ChunkWriter
    builder: MessageBuilder
    content_logprobs: list[LogprobEntry]
    reasoning_logprobs: list[LogprobEntry]
    completion_tokens: int = 0
    cached_tokens: int = 0


class ChatAnswer:
    """All choices of one chat completion."""

    def __init__(self, task: ChatTask, request_id: str, tokenizer: Tokenizer, watch: Watch) -> None:
        self.order: Order = task.order
        self._tokenizer, self._watch = tokenizer, watch
        self._logprobs = task.order.sampling[0].logprobs is not None
        self._head = ChunkHead(f"chatcmpl-{request_id}", int(time.time()), task.order.model, task.order.include_usage)
        self._choices = [
            _Choice(
                parser=OutputParser(
                    tokenizer,
                    task.tools,
                    task.history_calls,
                    task.starts_in_think,
                    allow_calls=task.calls_allowed,
                ),
                writer=ChunkWriter(self._head, index),
                builder=MessageBuilder(),
                content_logprobs=[],
                reasoning_logprobs=[],
            )
            for index in range(task.order.n)
        ]

    def events(self, index: int, out: TokenOut) -> Iterator[bytes]:
        """What news of a choice adds to a stream; the last of it has a finish reason and the choice's own usage."""
        choice = self._choices[index]
        events, logprobs = self._take(choice, out)
        yield from choice.writer.deltas(events, logprobs)
        if out.finish is not None:
            yield choice.writer.finish(choice.parser.finish_reason, self._usage([choice]))

    def end(self) -> Iterator[bytes]:
        """What follows when every choice has ended."""
        return self._head.end(self._usage(self._choices))

    def add(self, index: int, out: TokenOut) -> None:
        """Takes news for a response that is told whole."""
        choice = self._choices[index]
        events, logprobs = self._take(choice, out)
        choice.builder.add(events)
        if logprobs is not None:
            choice.content_logprobs += logprobs.content
            choice.reasoning_logprobs += logprobs.reasoning_content

    def whole(self) -> Completion:
        """That response."""
        choices = [
            Choice(
                index=index,
                message=choice.builder.message(),
                logprobs=_logprobs(choice.content_logprobs, choice.reasoning_logprobs) if self._logprobs else None,
                finish_reason=choice.parser.finish_reason,
            )
            for index, choice in enumerate(self._choices)
        ]
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=tuple(choices),
            usage=self._usage(self._choices),
        )

    def _take(self, choice: _Choice, out: TokenOut) -> tuple[list[Event], ChatLogprobs | None]:
        choice.completion_tokens, choice.cached_tokens = out.completion_tokens, out.cached_tokens
        logprobs = None
        if self._logprobs and out.tokens:
            events, logprobs = self._with_logprobs(choice.parser, out)
        else:
            events = choice.parser.feed(out.tokens)
        if out.tail:
            events += choice.parser.feed_tail(out.tail)
        if out.finish is not None:
            events += choice.parser.finish(out.finish)
            self._watch.parsed(choice.parser.dropped_calls, choice.parser.invalid_arguments)
        return events, logprobs

    def _with_logprobs(self, parser: OutputParser, out: TokenOut) -> tuple[list[Event], ChatLogprobs | None]:
        """Token by token, since a token belongs where the parser stands when it comes. Markers belong nowhere."""
        events: list[Event] = []
        told: dict[State, list[LogprobEntry]] = {State.CONTENT: [], State.REASON: []}
        for token, values in zip(out.tokens, out.logprobs, strict=True):
            if parser.place in told and not self._tokenizer.is_special(token):
                told[parser.place].append(entry(self._tokenizer, token, values))
            events += parser.feed((token,))
        if not any(told.values()):
            return events, None
        return events, _logprobs(told[State.CONTENT], told[State.REASON])

    def _usage(self, choices: list[_Choice]) -> Usage:
        """The prompt counts once, and as cached what its first answer found."""
        return usage(
            len(self.order.prompts[0]),
            sum(choice.completion_tokens for choice in choices),
            sum(choice.parser.reasoning_tokens for choice in choices),
            choices[0].cached_tokens,
        )


def _logprobs(content: list[LogprobEntry], reasoning: list[LogprobEntry]) -> ChatLogprobs:
    return ChatLogprobs(content=tuple(content), reasoning_content=tuple(reasoning))
