"""Messages to the prompt of Kimi K2 Thinking (revision "fix-default-system-prompt" of its chat template).

    [tools]    SYSTEM tool_declare MIDDLE {compact JSON of all tools} END
    [default]  SYSTEM system MIDDLE {default text} END                       unless the first message is a system's
    message    opener {name or role} MIDDLE {body} END
    assistant  body = THINK {reasoning} THINK_END {content} [SECTION {calls} SECTION_END]
    calls      CALL {id} ARGUMENTS {arguments} CALL_END                      for each, with nothing between
    tool       body = "## Return of {id}", a newline, {content}
    [answer]   ASSISTANT assistant MIDDLE                                    the model writes THINK itself

Reasoning is kept only behind the last assistant message without tool calls: it lives as long as its chain of calls is
open. So inside a chain a prompt grows by pure appending.

Text from outside never becomes a marker: text between two markers is encoded on its own, with special tokens off. That
gives the ids which the reference gives for the joined text, wherever that text imitates no marker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from perilune.chat.ids import CallIds, canonical_ids
from perilune.chat.markers import Marker, Piece
from perilune.chat.messages import FunctionCall, Message, Tool, check_messages
from perilune.errors import RequestError
from perilune.text.tokenizer import Tokenizer, check_text

DEFAULT_SYSTEM: Final = "You are Kimi, an AI assistant created by Moonshot AI."

_OPENERS: Final = {"user": Marker.USER, "assistant": Marker.ASSISTANT}


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Choices that the format leaves open.

    Attributes:
        developer_as_system: the model has never seen a role "developer".
        canonical_ids: write tool-call ids anew (``chat.ids``); off, they stay as the client sent them.
        open_think: end the prompt with THINK, so that the answer begins inside the reasoning.
    """

    developer_as_system: bool = True
    canonical_ids: bool = True
    open_think: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and what the parser of its answer must know.

    Attributes:
        ids: the prompt.
        history_calls: tool calls in the messages; the answer's calls are numbered from here.
        starts_in_think: the prompt ends with THINK.
    """

    ids: tuple[int, ...]
    history_calls: int
    starts_in_think: bool


def render(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    add_generation_prompt: bool = True,
    options: RenderOptions = RenderOptions(),
) -> Rendered:
    """The prompt's ids. Linear in the length of the conversation.

    A last message with ``partial`` is left open, to be continued; there is no generation prompt then.

    Raises:
        RequestError: the messages break a rule (``chat.messages``).
        ConfigError: the vocabulary lacks a marker.
    """
    pieces, history_calls = _prompt(messages, tools, add_generation_prompt, options)
    ids = encode_pieces(pieces, tokenizer)
    return Rendered(tuple(ids), history_calls, ids[-1] == tokenizer.special(Marker.THINK))


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer) -> list[int]:
    """Ids of markers and of the text between them; text is encoded from marker to marker.

    Raises:
        RequestError: text holds a lone surrogate.
        ConfigError: the vocabulary lacks a marker.
    """
    ids: list[int] = []
    pending: list[str] = []
    for piece in pieces:
        if not isinstance(piece, Marker):
            pending.append(piece)
            continue
        ids += tokenizer.encode("".join(pending))
        ids.append(tokenizer.special(piece))
        pending.clear()
    return ids + tokenizer.encode("".join(pending))


def render_text(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    *,
    add_generation_prompt: bool = True,
    options: RenderOptions = RenderOptions(),
) -> str:
    """The prompt as people and text-only engines read it. Text that imitates a marker cannot be told apart here.

    Raises:
        RequestError: as for ``render``.
    """
    return "".join(_prompt(messages, tools, add_generation_prompt, options)[0])


def _prompt(
    messages: Sequence[Message], tools: Sequence[Tool], add_generation_prompt: bool, options: RenderOptions
) -> tuple[Iterable[Piece], int]:
    check_messages(messages)
    if options.developer_as_system:
        messages = [
            msgspec.structs.replace(message, role="system") if message.role == "developer" else message
            for message in messages
        ]
    ids = canonical_ids(messages)
    count = ids.count
    if not options.canonical_ids:
        ids = _given_ids(messages)
    return _pieces(messages, tools, ids, add_generation_prompt, options.open_think), count


def _pieces(
    messages: Sequence[Message], tools: Sequence[Tool], ids: CallIds, add_generation_prompt: bool, open_think: bool
) -> Iterator[Piece]:
    if tools:
        yield from (Marker.SYSTEM, "tool_declare", Marker.MIDDLE, _declaration(tools), Marker.END)
    if not messages or messages[0].role != "system":
        yield from (Marker.SYSTEM, "system", Marker.MIDDLE, DEFAULT_SYSTEM, Marker.END)
    answered = _last_answer(messages)
    for index, message in enumerate(messages):
        yield from (_OPENERS.get(message.role, Marker.SYSTEM), message.name or message.role, Marker.MIDDLE)
        if message.role == "assistant":
            yield from (Marker.THINK, message.thinking if index > answered else "", Marker.THINK_END)
        elif message.role == "tool":
            yield f"## Return of {ids.results[index]}\n"
        yield message.text
        if message.tool_calls:
            yield from _section(message, ids.calls[index])
        if message.partial:
            return
        yield Marker.END
    if add_generation_prompt:
        yield from (Marker.ASSISTANT, "assistant", Marker.MIDDLE)
        if open_think:
            yield Marker.THINK


def _section(message: Message, call_ids: Sequence[str]) -> Iterator[Piece]:
    yield Marker.SECTION
    for call, call_id in zip(message.tool_calls or (), call_ids, strict=True):
        yield from (Marker.CALL, call_id, Marker.ARGUMENTS, _arguments(call.function), Marker.CALL_END)
    yield Marker.SECTION_END


def _last_answer(messages: Sequence[Message]) -> int:
    """Index of the last assistant message without tool calls, -1 if there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "assistant" and not messages[index].tool_calls:
            return index
    return -1


def _given_ids(messages: Sequence[Message]) -> CallIds:
    calls = {
        index: tuple(call.id or "" for call in message.tool_calls)
        for index, message in enumerate(messages)
        if message.tool_calls
    }
    results = {index: message.tool_call_id or "" for index, message in enumerate(messages) if message.role == "tool"}
    return CallIds(calls, results, sum(map(len, calls.values())))


def _declaration(tools: Sequence[Tool]) -> str:
    return _json([tool.wire for tool in tools], (",", ":"), "tools")


def _arguments(function: FunctionCall) -> str:
    """A string stands as the model wrote it; an object gets the separators that the template's ``tojson`` has."""
    if isinstance(function.arguments, str):
        return function.arguments
    return _json(function.arguments or {}, (", ", ": "), "messages")


def _json(value: object, separators: tuple[str, str], param: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=separators)
    except RecursionError:
        raise RequestError("JSON is nested too deep to be written", param=param, code="nesting_too_deep") from None
    check_text(text, param)
    return text
