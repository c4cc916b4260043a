"""Messages and tools of a chat request, checked.

Owns their structs (field names are the wire's), the types and rules of every field, and the refusals: a
``RequestError`` whose ``param`` is the dotted path. Fields that no rule names are ignored in messages and kept in
tools, since a tool's declaration goes into the prompt as the client wrote it; ``unknown_fields`` names them.
Knows no prompt format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from perilune.errors import RequestError
from perilune.text.tokenizer import check_text

ROLES: Final = ("system", "user", "assistant", "tool", "developer")
MAX_NAME_CHARS: Final = 256

_STRICT_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_-]{2,63}")
_STRICT_TOOLS: Final = 128
_TEXT_ONLY: Final = "this model reads text only; send a part {'type': 'text', 'text': …}"

T = TypeVar("T")


class TextPart(msgspec.Struct, frozen=True):
    """An element of list-typed content. Only ``type`` "text" is accepted."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """``arguments``: the JSON text as the model wrote it; clients that send the object itself are understood."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """A call in the history. Its ``id`` may be anything: prompts get canonical ones (``chat.ids``)."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function", "builtin_function"] = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn.

    ``reasoning`` is another spelling of ``reasoning_content``. ``partial`` on the last assistant message: the answer
    continues its content. ``name`` replaces the role's name in the prompt.
    """

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    partial: bool | None = None
    function_call: Any = None

    @property
    def text(self) -> str:
        """The content: text parts with nothing between them, null as nothing."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""

    @property
    def thinking(self) -> str:
        """The reasoning, under whichever name it came."""
        return (self.reasoning if self.reasoning_content is None else self.reasoning_content) or ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A declared tool. ``wire`` is the whole declaration, keys in the client's order."""

    name: str
    wire: dict[str, Any]
    parameters: dict[str, Any] | None = None
    strict: bool = True


class _WireFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _WireTool(msgspec.Struct):
    function: _WireFunction
    type: Literal["function", "builtin_function"]


def read_messages(data: Sequence[object]) -> tuple[Message, ...]:
    """Types the decoded ``messages`` of a request and checks them.

    Raises:
        RequestError: ``param`` names the field, such as ``messages[2].role``.
    """
    messages = _convert(data, tuple[Message, ...], "messages")
    check_messages(messages)
    return messages


def read_tools(data: Sequence[object]) -> tuple[Tool, ...]:
    """Types the decoded ``tools`` of a request and checks them.

    Raises:
        RequestError: ``param`` names the field, such as ``tools[0].function.name``.
    """
    tools = []
    declarations = _convert(data, list[dict[str, Any]], "tools")
    for index, (wire, declared) in enumerate(zip(declarations, _convert(data, list[_WireTool], "tools"), strict=True)):
        function = declared.function
        if not is_tool_name(function.name):
            raise RequestError(
                f"a tool is called {function.name[:80]!r}, 1 to {MAX_NAME_CHARS} visible characters "
                "without spaces are needed",
                param=f"tools[{index}].function.name",
            )
        strict = True if function.strict is None else function.strict
        tools.append(Tool(name=function.name, wire=wire, parameters=function.parameters, strict=strict))
    return tuple(tools)


def is_tool_name(name: str) -> bool:
    """Visible characters without spaces; dots, dashes, colons and leading digits are fine."""
    return 0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and not any(map(str.isspace, name))


def unknown_fields(messages: Sequence[object], tools: Sequence[object]) -> Iterator[str]:
    """Paths of what ``read_messages`` and ``read_tools``, which have taken both, do not know. What is null, or empty as
    clients echo it from an answer, is absent. A function's ``parameters`` and a call's ``arguments`` are data."""
    for index, message in enumerate(messages):
        yield from _unknown_in(message, Message, f"messages[{index}]")
    for index, tool in enumerate(tools):
        yield from _unknown_in(tool, _WireTool, f"tools[{index}]")


def _unknown_in(data: object, kind: type[msgspec.Struct], where: str) -> Iterator[str]:
    if not isinstance(data, dict):
        return
    for name, value in data.items():
        path = f"{where}.{name}"
        if name not in kind.__struct_fields__:
            if value is not None and value != []:
                yield path
        elif (inner := _NESTED.get((kind, name))) is not None:
            if isinstance(value, list):
                for index, each in enumerate(value):
                    yield from _unknown_in(each, inner, f"{path}[{index}]")
            else:
                yield from _unknown_in(value, inner, path)


_NESTED: Final[Mapping[tuple[type[msgspec.Struct], str], type[msgspec.Struct]]] = {
    (Message, "content"): TextPart,
    (Message, "tool_calls"): ToolCall,
    (ToolCall, "function"): FunctionCall,
    (_WireTool, "function"): _WireFunction,
}


def check_messages(messages: Sequence[Message]) -> None:
    """The rules between fields, for messages from anywhere.

    Raises:
        RequestError: an unknown role, content that is no text, calls or ``partial`` where they cannot be, two
            different reasonings, text without UTF-8.
    """
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise RequestError(
                f"`{where}.role` is {message.role[:80]!r}, known: {', '.join(ROLES)}", param=f"{where}.role"
            )
        if isinstance(message.content, list):
            _check_parts(message.content, f"{where}.content")
        if message.function_call is not None:
            raise RequestError(
                f"`{where}.function_call` is not supported",
                param=f"{where}.function_call",
                code="unsupported_value",
                hint="send the call as an element of `tool_calls`",
            )
        _check_assistant_fields(message, where, last=index == len(messages) - 1)
        for field, text in _texts(message):
            check_text(text, f"{where}.{field}")


def check_strict(messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Rules of Moonshot's own service that this server does not need; for clients that want to be held to them.

    Raises:
        RequestError: too many tools, a tool's name outside their pattern, a call without its reasoning.
    """
    if len(tools) > _STRICT_TOOLS:
        raise RequestError(f"{len(tools)} tools are declared, at most {_STRICT_TOOLS} are allowed", param="tools")
    for index, tool in enumerate(tools):
        if not _STRICT_NAME.fullmatch(tool.name):
            raise RequestError(
                f"a tool is called {tool.name!r}, names must match ^{_STRICT_NAME.pattern}$",
                param=f"tools[{index}].function.name",
            )
    for index, message in enumerate(messages):
        if message.tool_calls and message.reasoning_content is None and message.reasoning is None:
            raise RequestError(
                f"reasoning_content is missing in assistant tool call message at index {index}",
                param=f"messages[{index}].reasoning_content",
            )


def _check_parts(parts: list[TextPart], where: str) -> None:
    for index, part in enumerate(parts):
        if part.type != "text":
            raise RequestError(
                f"`{where}[{index}].type` is {part.type[:80]!r}, only 'text' is allowed",
                param=f"{where}[{index}].type",
                code="unsupported_content",
                hint=_TEXT_ONLY,
            )
        if part.text is None:
            raise RequestError(f"`{where}[{index}].text` is absent, a string is needed", param=f"{where}[{index}].text")


def _check_assistant_fields(message: Message, where: str, *, last: bool) -> None:
    assistant = message.role == "assistant"
    if message.tool_calls and not assistant:
        raise RequestError(
            f"a message of role {message.role!r} has `tool_calls`, only an assistant's may", param=f"{where}.tool_calls"
        )
    if message.partial and not (assistant and last and not message.tool_calls):
        raise RequestError(
            "`partial` is true, which only the last message, an assistant's without tool calls, may be",
            param=f"{where}.partial",
        )
    if None not in (message.reasoning, message.reasoning_content) and message.reasoning != message.reasoning_content:
        raise RequestError(
            "`reasoning` and `reasoning_content` are two spellings of one field and differ here",
            param=f"{where}.reasoning",
            hint="send one of them",
        )
    for index, call in enumerate(message.tool_calls or ()):
        if not call.function.name:
            raise RequestError("a call's function has no name", param=f"{where}.tool_calls[{index}].function.name")


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    """Every text of a message that a prompt may show, by field."""
    yield "content", message.text
    yield "name", message.name or ""
    yield "reasoning_content", message.thinking
    yield "tool_call_id", message.tool_call_id or ""
    for index, call in enumerate(message.tool_calls or ()):
        yield f"tool_calls[{index}].id", call.id or ""
        yield f"tool_calls[{index}].function.name", call.function.name
        if isinstance(call.function.arguments, str):
            yield f"tool_calls[{index}].function.arguments", call.function.arguments


def _convert(data: object, kind: type[T], param: str) -> T:
    """``msgspec.convert`` with our errors: "… - at `$[2].role`" becomes the param ``messages[2].role``."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param += path.removesuffix("`")
        raise RequestError(f"`{param}`: {what[:1].lower()}{what[1:]}", param=param, code="invalid_type") from None
