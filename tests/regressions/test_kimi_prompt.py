"""Public bug reports about Kimi K2's prompts, each with a minimal input of our own and the right text."""

from __future__ import annotations

from typing import Any

import pytest

from perilune.chat.markers import Marker
from perilune.chat.messages import check_strict, read_messages, read_tools
from perilune.chat.parse import CallStart, OutputParser
from perilune.chat.render import encode_pieces, render, render_text
from perilune.errors import RequestError
from perilune.text.tokenizer import Tokenizer

Wire = dict[str, Any]


def _call(call_id: str, name: str, arguments: str = "{}") -> Wire:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _assistant(*calls: Wire, **fields: object) -> Wire:
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def _result(call_id: str, content: str = "ok") -> Wire:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _section(*calls: tuple[str, str]) -> str:
    told = "".join(
        f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{args}<|tool_call_end|>" for name, args in calls
    )
    return f"<|tool_calls_section_begin|>{told}<|tool_calls_section_end|>"


USER: Wire = {"role": "user", "content": "go"}
GENERATION = "<|im_assistant|>assistant<|im_middle|>"


def _text(*messages: Wire) -> str:
    return render_text(read_messages(messages), [])


def test_k46_foreign_ids_are_rewritten() -> None:
    text = _text(
        USER,
        _assistant(_call("call_a1", "get_tide"), _call("call_b2", "read_log")),
        _result("call_b2", "log"),
        _result("call_a1", "tide"),
    )
    assert "call_a1" not in text
    assert "call_b2" not in text
    assert _section(("functions.get_tide:0", "{}"), ("functions.read_log:1", "{}")) in text
    assert "## Return of functions.read_log:1\nlog<|im_end|>" in text
    assert "## Return of functions.get_tide:0\ntide<|im_end|>" in text


def test_k47_a_misspelt_id_is_rewritten() -> None:
    text = _text(USER, _assistant(_call("serach:0", "search")), _result("serach:0"))
    assert _section(("functions.search:0", "{}")) in text
    assert "## Return of functions.search:0\nok" in text
    assert "serach" not in text


def test_k48_repeated_ids_are_paired_turn_by_turn() -> None:
    turn = (_assistant(_call("functions.get_tide:0", "get_tide")), _result("functions.get_tide:0"))
    text = _text(USER, *turn, *turn)
    order = [text.index(part) for part in ("begin|>functions.get_tide:0<", "of functions.get_tide:0\n")]
    order += [text.index(part) for part in ("begin|>functions.get_tide:1<", "of functions.get_tide:1\n")]
    assert order == sorted(order)
    assert text.count("functions.get_tide:") == 4


def test_k71_k79_a_call_without_reasoning_is_accepted() -> None:
    messages = (USER, _assistant(_call("functions.f:0", "f")), _result("functions.f:0"))
    assert f"{GENERATION}<think></think>{_section(('functions.f:0', '{}'))}" in _text(*messages)
    with pytest.raises(RequestError, match="missing in assistant tool call message at index 1") as error:
        check_strict(read_messages(messages), ())
    assert error.value.param == "messages[1].reasoning_content"


def test_k72_null_reasoning_prints_nothing() -> None:
    text = _text(USER, _assistant(_call("functions.f:0", "f"), reasoning_content=None, content=None))
    assert f"<think></think>{_section(('functions.f:0', '{}'))}" in text
    assert "None" not in text


@pytest.mark.parametrize("content", ["", None, []], ids=["string", "null", "list"])
def test_k73_empty_content_prints_nothing(content: object) -> None:
    text = _text(USER, _assistant(_call("functions.f:0", "f"), content=content, reasoning_content="r"))
    assert f"<think>r</think>{_section(('functions.f:0', '{}'))}<|im_end|>" in text


@pytest.mark.parametrize(
    "messages",
    [(), (USER,), (USER, _assistant(_call("x", "f")), _result("x")), (USER, _assistant(content="Hi"))],
    ids=["none", "user", "tool", "assistant"],
)
def test_k74_the_generation_prompt_is_there(kimi: Tokenizer, messages: tuple[Wire, ...]) -> None:
    assert _text(*messages).endswith(GENERATION)
    ids = render(read_messages(messages), [], kimi).ids
    assert ids[-3:] == (163588, 69702, 163601)


def test_k26_an_answer_behind_a_tool_message_is_parsed_for_reasoning(kimi: Tokenizer) -> None:
    messages = read_messages([USER, _assistant(_call("x", "f")), _result("x")])
    rendered = render(messages, [], kimi)
    assert (rendered.history_calls, rendered.starts_in_think) == (1, False)
    parser = OutputParser(kimi, read_tools([{"type": "function", "function": {"name": "f"}}]), rendered.history_calls)
    call = (Marker.CALL, "functions.f:0", Marker.ARGUMENTS, "{}", Marker.CALL_END)
    events = parser.feed(encode_pieces((Marker.THINK, "r", Marker.THINK_END, *call), kimi))
    assert CallStart(0, "functions.f:1", "f") in events


def test_k83_history_calls_are_rendered() -> None:
    text = _text(USER, _assistant(_call("functions.f:0", "f", '{"a": 1}'), content="Wait."), _result("functions.f:0"))
    section = _section(("functions.f:0", '{"a": 1}'))
    assert text.endswith(
        f"{GENERATION}<think></think>Wait.{section}<|im_end|>"
        f"<|im_system|>tool<|im_middle|>## Return of functions.f:0\nok<|im_end|>{GENERATION}"
    )


def test_k84_a_name_that_starts_with_a_digit() -> None:
    tools = read_tools([{"type": "function", "function": {"name": "21st_magic"}}])
    assert '"name":"21st_magic"' in render_text([], tools)
    with pytest.raises(RequestError, match="'21st_magic', names must match") as error:
        check_strict((), tools)
    assert error.value.param == "tools[0].function.name"


def test_k86_the_wrapper_is_kept_and_reasoning_stays_with_calls() -> None:
    wire = {"function": {"parameters": {}, "name": "f", "x-note": "é"}, "type": "function", "extra": 1.0}
    text = render_text(read_messages([USER, _assistant(_call("x", "f"), reasoning_content="why")]), read_tools([wire]))
    declared = '[{"function":{"parameters":{},"name":"f","x-note":"é"},"type":"function","extra":1.0}]'
    assert text.startswith(f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|>")
    assert "<think>why</think><|tool_calls_section_begin|>" in text
    with pytest.raises(RequestError, match="missing required field `function`") as error:
        read_tools([{"name": "f", "parameters": {}}])
    assert error.value.param == "tools[0]"


def test_k87_tools_are_compact_json() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"required": ["a", "b"]}}}
    declared = render_text([], read_tools([tool, tool])).partition("<|im_end|>")[0]
    assert " " not in declared.removeprefix("<|im_system|>tool_declare<|im_middle|>")


def test_k88_no_newline_from_the_template() -> None:
    tools = read_tools([{"type": "function", "function": {"name": "f"}}])
    messages = read_messages([USER, _assistant(_call("x", "f"), content="c", reasoning_content="r"), USER])
    assert "\n" not in render_text(messages, tools)
