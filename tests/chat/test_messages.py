"""Messages and tools from the wire: what is accepted, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.chat.messages import Message, check_messages, check_strict, is_tool_name, read_messages, read_tools
from perilune.errors import RequestError

Wire = Any


def _tool(name: Wire = "f", **function: Wire) -> Wire:
    return {"type": "function", "function": {"name": name, **function}}


CALL: Wire = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER: Wire = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("message", "text", "thinking"),
    [
        ({"role": "user"}, "", ""),
        ({"role": "user", "content": None}, "", ""),
        ({"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}, "a", ""),
        ({"role": "assistant", "reasoning": "r", "reasoning_content": None, "content": "c"}, "c", "r"),
        ({"role": "assistant", "reasoning": "r", "reasoning_content": "r", "tool_calls": []}, "", "r"),
        ({"role": "assistant", "reasoning": None, "reasoning_content": "", "refusal": None}, "", ""),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], "function_call": None}, "", ""),
        ({"role": "assistant", "content": "c", "partial": True, "prefix": 1}, "c", ""),
    ],
)
def test_accepted(message: Wire, text: str, thinking: str) -> None:
    (read,) = read_messages([message])
    assert (read.text, read.thinking) == (text, thinking)


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([USER, {"role": "robot"}], "messages[1].role", "`messages[1].role` is 'robot', known: system, user"),
        ([{"role": "function"}], "messages[0].role", "is 'function'"),
        ([{"role": 3}], "messages[0].role", "expected `str`, got `int`"),
        ([{"content": "x"}], "messages[0]", "missing required field `role`"),
        ([USER, "x"], "messages[1]", "expected `object`, got `str`"),
        ([{"role": "user", "content": 1}], "messages[0].content", "expected `str | array | null`, got `int`"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "expected `object`, got `str`"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]", "missing required field `type`"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1].type",
            "is 'image_url', only 'text' is allowed",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "is absent"),
        ([{"role": "user", "tool_calls": [CALL]}], "messages[0].tool_calls", "only an assistant's may"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]", "`function`"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}],
            "messages[0].tool_calls[0].function.name",
            "has no name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "expected `str | object | null`, got `array`",
        ),
        ([{"role": "assistant", "partial": True}, USER], "messages[0].partial", "the last message"),
        ([{"role": "user", "partial": True}], "messages[0].partial", "an assistant's"),
        ([{"role": "assistant", "partial": True, "tool_calls": [CALL]}], "messages[0].partial", "without tool calls"),
        ([{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}], "messages[0].reasoning", "differ here"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call", "is not supported"),
        ([USER, {"role": "user", "content": "a\ud800"}], "messages[1].content", "U+D800 at character 1"),
        ([{"role": "user", "name": "\udfff"}], "messages[0].name", "lone surrogate"),
        ([{"role": "tool", "tool_call_id": "\udfff"}], "messages[0].tool_call_id", "lone surrogate"),
        ([{"role": "assistant", "reasoning": "\udfff"}], "messages[0].reasoning_content", "lone surrogate"),
        (
            [{"role": "assistant", "tool_calls": [CALL, {"function": {"name": "f", "arguments": "\ud800"}}]}],
            "messages[0].tool_calls[1].function.arguments",
            "lone surrogate",
        ),
    ],
)
def test_refused_messages(messages: list[Wire], param: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        read_messages(messages)
    assert error.value.param == param
    assert message in error.value.message
    assert error.value.status == 400


def test_images_are_refused_with_a_way_out() -> None:
    with pytest.raises(RequestError) as error:
        read_messages([{"role": "user", "content": [{"type": "input_image"}]}])
    assert error.value.code == "unsupported_content"
    assert "reads text only" in error.value.hint


def test_messages_made_in_code_obey_the_same_rules() -> None:
    with pytest.raises(RequestError, match="known: system"):
        check_messages([Message(role="robot", content="x")])


@pytest.mark.parametrize(
    ("tools", "param", "message"),
    [
        ([3], "tools[0]", "expected `object`, got `int`"),
        ([{"type": "function"}], "tools[0]", "missing required field `function`"),
        ([{"function": {"name": "f"}}], "tools[0]", "missing required field `type`"),
        (
            [_tool(), {"type": "retrieval", "function": {"name": "f"}}],
            "tools[1].type",
            "invalid enum value 'retrieval'",
        ),
        ([_tool(3)], "tools[0].function.name", "expected `str`"),
        ([_tool("")], "tools[0].function.name", "1 to 256 visible characters"),
        ([_tool("a b")], "tools[0].function.name", "'a b'"),
        ([_tool("a\nb")], "tools[0].function.name", "visible"),
        ([_tool("\ud800")], "tools[0].function.name", "visible"),
        ([_tool("a" * 257)], "tools[0].function.name", "1 to 256"),
        ([_tool(parameters=[])], "tools[0].function.parameters", "expected `object | null`, got `array`"),
        ([_tool(description=3)], "tools[0].function.description", "expected `str | null`"),
        ([_tool(strict="yes")], "tools[0].function.strict", "expected `bool | null`"),
    ],
)
def test_refused_tools(tools: list[Wire], param: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        read_tools(tools)
    assert error.value.param == param
    assert message in error.value.message


def test_tools_keep_what_the_client_wrote() -> None:
    wire = {"function": {"strict": None, "name": "$web.search:v1-2"}, "z": [1], "type": "builtin_function"}
    (tool,) = read_tools([wire])
    assert (tool.name, tool.strict, tool.parameters) == ("$web.search:v1-2", True, None)
    assert list(tool.wire) == ["function", "z", "type"]
    assert tool.wire == wire


def test_strict_rules() -> None:
    check_strict(
        read_messages([{"role": "assistant", "reasoning": "", "tool_calls": [CALL]}]), read_tools([_tool("abc")])
    )
    with pytest.raises(RequestError, match="129 tools"):
        check_strict((), read_tools([_tool("abc")] * 129))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "name", "type", "text", "arguments"]),
            inner | st.sampled_from(["assistant", "text", "function"]),
        )
    ),
)


@given(st.lists(json_values, max_size=3))
def test_anything_is_read_or_refused_by_name(data: list[Wire]) -> None:
    for read, field in ((read_messages, "messages"), (read_tools, "tools")):
        refusal: RequestError | None = None
        try:
            read(data)
        except RequestError as error:
            refusal = error
        assert refusal is None or (refusal.param or "").startswith(field)


def test_tool_names() -> None:
    assert all(map(is_tool_name, ["a", "list-files", "calendar.add", "ns:add", "21st", "$x", "ä", "工具"]))
    assert not any(map(is_tool_name, ["", " ", "a b", "a\u00a0b", "a\u200b\n", "\x00", "a" * 257]))
