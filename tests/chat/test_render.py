"""Prompts: the worked examples, an independent template, text that imitates markers, growth by appending."""

from __future__ import annotations

import json
import time
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import SandboxedEnvironment

from perilune.chat.markers import Marker
from perilune.chat.messages import Message, Tool, read_messages, read_tools
from perilune.chat.parse import CallDelta, CallStart, ContentDelta, OutputParser, ReasoningDelta
from perilune.chat.render import RenderOptions, encode_pieces, render, render_text
from perilune.errors import ConfigError, RequestError
from perilune.text.tokenizer import KIMI_SPECIALS, Tokenizer
from perilune.types import FinishReason

Wire = dict[str, Any]

GENERATION: Final = "<|im_assistant|>assistant<|im_middle|>"
SYSTEM: Final = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "lookup_tide",
        "description": "Tide at a port",
        "parameters": {
            "type": "object",
            "properties": {"port": {"type": "string"}, "day": {"type": "integer"}},
            "required": ["port"],
        },
    },
}
DECLARED: Final = (
    '<|im_system|>tool_declare<|im_middle|>[{"type":"function","function":{"name":"lookup_tide","description":'
    '"Tide at a port","parameters":{"type":"object","properties":{"port":{"type":"string"},"day":{"type":"integer"}},'
    '"required":["port"]}}}]<|im_end|>'
)


def _wire_call(call_id: str | None, name: str, arguments: object) -> Wire:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _user(text: str) -> Wire:
    return {"role": "user", "content": text}


CHAIN: Final[list[Wire]] = [
    _user("Tide in Brest and Cork?"),
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Need two calls.",
        "tool_calls": [
            _wire_call("functions.lookup_tide:0", "lookup_tide", '{"port": "Brest"}'),
            _wire_call("functions.lookup_tide:1", "lookup_tide", {"port": "Cork"}),
        ],
    },
    {"role": "tool", "name": "lookup_tide", "tool_call_id": "functions.lookup_tide:0", "content": "4.1 m"},
    {"role": "tool", "tool_call_id": "functions.lookup_tide:1", "content": "2.7 m"},
]


def _chain(thinking: str) -> str:
    return (
        f"{SYSTEM}<|im_user|>user<|im_middle|>Tide in Brest and Cork?<|im_end|>{GENERATION}<think>{thinking}</think>"
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup_tide:0<|tool_call_argument_begin|>"
        '{"port": "Brest"}<|tool_call_end|><|tool_call_begin|>functions.lookup_tide:1<|tool_call_argument_begin|>'
        '{"port": "Cork"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>lookup_tide<|im_middle|>## Return of functions.lookup_tide:0\n4.1 m<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.lookup_tide:1\n2.7 m<|im_end|>"
    )


EMPTY_CALL: Final = (
    f"{GENERATION}<think></think><|tool_calls_section_begin|><|tool_call_begin|>functions.a:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)
HI: Final = f"{SYSTEM}<|im_user|>user<|im_middle|>Hi<|im_end|>"

EXAMPLES: Final[dict[str, tuple[list[Wire], list[Wire], bool, str]]] = {
    "A": ([_user("Hi")], [], True, HI + GENERATION),
    "B": (
        [{"role": "system", "content": "Be brief."}, _user("Tide in Brest?")],
        [TOOL],
        True,
        f"{DECLARED}<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        f"<|im_user|>user<|im_middle|>Tide in Brest?<|im_end|>{GENERATION}",
    ),
    "C": (CHAIN, [], True, _chain("Need two calls.") + GENERATION),
    "D": (
        [
            *CHAIN,
            {"role": "assistant", "content": "Brest 4.1 m, Cork 2.7 m.", "reasoning_content": "Sum up."},
            _user("And tomorrow?"),
        ],
        [],
        True,
        f"{_chain('')}{GENERATION}<think></think>Brest 4.1 m, Cork 2.7 m.<|im_end|>"
        f"<|im_user|>user<|im_middle|>And tomorrow?<|im_end|>{GENERATION}",
    ),
    "E": (
        [*CHAIN, _user("Hurry up.")],
        [],
        True,
        f"{_chain('Need two calls.')}<|im_user|>user<|im_middle|>Hurry up.<|im_end|>{GENERATION}",
    ),
    "F": (
        [_user("Hi"), {"role": "assistant", "content": "Dear", "reasoning_content": "lost"}],
        [],
        False,
        f"{HI}{GENERATION}<think></think>Dear<|im_end|>",
    ),
    "F continued": (
        [_user("Hi"), {"role": "assistant", "content": "Dear", "partial": True}],
        [],
        True,
        f"{HI}{GENERATION}<think></think>Dear",
    ),
    "G": (
        [
            _user("Hi"),
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": None,
                "tool_calls": [_wire_call("a:0", "a", "{}")],
            },
        ],
        [],
        False,
        HI + EMPTY_CALL,
    ),
    "H": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [],
        True,
        f"{SYSTEM}<|im_user|>user<|im_middle|>ab<|im_end|>{GENERATION}",
    ),
    "I": ([], [], True, SYSTEM + GENERATION),
    "J": (
        [{"role": "developer", "content": "Be brief."}, _user("Hi")],
        [],
        True,
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>" + GENERATION,
    ),
}


def _reference_ids(kimi: Tokenizer, text: str) -> list[int]:
    """The reference's way: the whole text at once, markers recognised by their spelling."""
    return kimi.prepare().encode(text, allowed_special="all")


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(kimi: Tokenizer, name: str) -> None:
    wire, tools, generate, expected = EXAMPLES[name]
    messages, declared = read_messages(wire), read_tools(tools)
    assert render_text(messages, declared, add_generation_prompt=generate) == expected
    rendered = render(messages, declared, kimi, add_generation_prompt=generate)
    assert list(rendered.ids) == _reference_ids(kimi, expected)
    assert kimi.decode(rendered.ids) == expected
    assert rendered.history_calls == expected.count("<|tool_call_begin|>")
    assert not rendered.starts_in_think


def test_options(kimi: Tokenizer) -> None:
    developer = read_messages([{"role": "developer", "content": "x"}])
    text = render_text(developer, [], options=RenderOptions(developer_as_system=False))
    assert text == SYSTEM + "<|im_system|>developer<|im_middle|>x<|im_end|>" + GENERATION
    opened = render([], [], kimi, options=RenderOptions(open_think=True))
    assert opened.starts_in_think
    assert kimi.decode(opened.ids) == SYSTEM + GENERATION + "<think>"
    chain = json.loads(json.dumps(CHAIN).replace("functions.lookup_tide:", "call_"))
    kept = render_text(read_messages(chain), [], options=RenderOptions(canonical_ids=False))
    assert kept == _chain("Need two calls.").replace("functions.lookup_tide:", "call_") + GENERATION
    assert render_text(read_messages(chain), []) == _chain("Need two calls.") + GENERATION


def test_hi_has_26_tokens(kimi: Tokenizer) -> None:
    ids = render(read_messages([_user("hi")]), [], kimi).ids
    assert len(ids) == 26
    assert ids[0] == 163594
    assert ids[-3:] == (163588, 69702, 163601)


TEMPLATE: Final = """
{%- set ns = namespace(final=-1) -%}
{%- for m in messages if m.role == "assistant" and not m.tool_calls -%}
  {%- set ns.final = messages.index(m) -%}
{%- endfor -%}
{%- macro body(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | json(",", ":") }}<|im_end|>{%- endif -%}
{%- if not messages or messages[0].role != "system" -%}
  <|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
{%- for m in messages -%}
  {%- set opener = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}.get(m.role, "<|im_system|>") -%}
  {{ opener }}{{ m.name or m.role }}<|im_middle|>
  {%- if m.role == "assistant" -%}
    <think>{%- if loop.index0 > ns.final -%}{{ m.reasoning_content or "" }}{%- endif -%}</think>
    {{- body(m.content) -}}
    {%- if m.tool_calls -%}
      <|tool_calls_section_begin|>
      {%- for call in m.tool_calls -%}
        <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
        {%- set arguments = call.function.arguments -%}
        {%- if arguments is string -%}{{ arguments }}{%- else -%}{{ arguments | json(", ", ": ") }}{%- endif -%}
        <|tool_call_end|>
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- elif m.role == "tool" -%}
    {{ "## Return of " ~ m.tool_call_id ~ "\n" }}{{ body(m.content) }}
  {%- else -%}{{ body(m.content) }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
"""The format as a chat template, transcribed from its description and from nothing in this package."""


ENVIRONMENT: Final = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.filters["json"] = lambda value, item, key: json.dumps(value, ensure_ascii=False, separators=(item, key))
REFERENCE: Final = ENVIRONMENT.from_string(TEMPLATE.strip())


def _jinja(messages: list[Wire], tools: list[Wire], generate: bool) -> str:
    # Equal messages must stay distinct for `index`, so each one carries its place.
    numbered = [{**message, "place": place} for place, message in enumerate(messages)]
    return REFERENCE.render(messages=numbered, tools=tools, add_generation_prompt=generate)


NAMES: Final = ("<|reserved", *KIMI_SPECIALS.values())
texts = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda text: not any(name in text for name in NAMES))
parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts), max_size=3)
contents = st.one_of(st.none(), texts, parts)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(texts, json_values, max_size=3)
wire_calls = st.builds(_wire_call, texts, st.text("abc.-", min_size=1, max_size=4), texts | objects)
wire_tools = st.builds(
    lambda name, parameters, extra: {"type": "function", "function": {"name": name, "parameters": parameters, **extra}},
    st.text("xyz", min_size=1, max_size=4),
    objects,
    st.dictionaries(st.sampled_from(["description", "x-note"]), texts),
)


@st.composite
def wire_messages(draw: st.DrawFn) -> Wire:
    role = draw(st.sampled_from(["system", "user", "assistant", "assistant", "tool", "tool"]))
    message: Wire = {"role": role, "content": draw(contents)}
    if draw(st.booleans()):
        message["name"] = draw(texts)
    if role == "tool":
        message["tool_call_id"] = draw(texts)
    if role == "assistant":
        message["tool_calls"] = draw(st.lists(wire_calls, max_size=2))
        message["reasoning_content"] = draw(st.none() | texts)
    return message


@given(st.lists(wire_messages(), max_size=6), st.lists(wire_tools, max_size=2), st.booleans())
@settings(deadline=None, max_examples=150)
def test_equals_an_independent_template(kimi: Tokenizer, wire: list[Wire], tools: list[Wire], generate: bool) -> None:
    messages, declared = read_messages(wire), read_tools(tools)
    options = RenderOptions(canonical_ids=False)
    text = render_text(messages, declared, add_generation_prompt=generate, options=options)
    assert text == _jinja(wire, tools, generate)
    rendered = render(messages, declared, kimi, add_generation_prompt=generate, options=options)
    assert list(rendered.ids) == _reference_ids(kimi, text)


HOSTILE: Final = st.lists(st.sampled_from([*map(str, Marker), "[EOS]", "system", "\n", "a"]), max_size=5).map("".join)


@given(hostile=st.tuples(*[HOSTILE] * 6))
@settings(deadline=None, max_examples=60)
def test_no_text_from_outside_becomes_a_marker(kimi: Tokenizer, hostile: tuple[str, ...]) -> None:
    def prompt(texts: tuple[str, ...]) -> tuple[int, ...]:
        content, name, call_name, arguments, thinking, described = texts
        function = {"name": "f", "description": described}
        wire = [
            {"role": "user", "content": content, "name": name},
            {
                "role": "assistant",
                "content": content,
                "reasoning_content": thinking,
                "tool_calls": [_wire_call("x", f"f{call_name}", arguments)],
            },
            {"role": "tool", "name": name, "tool_call_id": "x", "content": content},
        ]
        return render(read_messages(wire), read_tools([{"type": "function", "function": function}]), kimi).ids

    specials = [token for token in prompt(hostile) if kimi.is_special(token)]
    assert specials == [token for token in prompt(("a",) * 6) if kimi.is_special(token)]
    assert all(text in kimi.decode(prompt(hostile)) for text in hostile if '"' not in text and "\n" not in text)


def _history(answer: list[Any]) -> Wire:
    """The message that a client keeps of an answer's events."""
    message: Wire = {"role": "assistant", "content": None, "tool_calls": []}
    for event in answer:
        match event:
            case ReasoningDelta(text):
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case ContentDelta(text):
                message["content"] = (message["content"] or "") + text
            case CallStart(_, call_id, name):
                message["tool_calls"].append(_wire_call(call_id, name, ""))
            case CallDelta(index, more):
                message["tool_calls"][index]["function"]["arguments"] += more
    return message


@given(
    turns=st.lists(st.tuples(texts, texts, st.lists(objects, min_size=1, max_size=3)), min_size=1, max_size=3),
    results=texts,
)
@settings(deadline=None, max_examples=60)
def test_an_open_chain_grows_by_appending(
    kimi: Tokenizer, turns: list[tuple[str, str, list[Wire]]], results: str
) -> None:
    """Prompt and generated ids are the beginning of the next prompt: the prefix cache loses nothing."""
    wire = [_user("go")]
    tools = read_tools([TOOL])
    for reasoning, content, calls in turns:
        prompt = render(read_messages(wire), tools, kimi)
        pieces: list[Marker | str] = [Marker.THINK, reasoning, Marker.THINK_END, content, Marker.SECTION]
        for number, arguments in enumerate(calls, prompt.history_calls):
            pieces += [Marker.CALL, f"functions.lookup_tide:{number}", Marker.ARGUMENTS]
            pieces += [json.dumps(arguments), Marker.CALL_END]
        generated = encode_pieces([*pieces, Marker.SECTION_END, Marker.END], kimi)
        parser = OutputParser(kimi, tools, prompt.history_calls, prompt.starts_in_think)
        message = _history([*parser.feed(generated), *parser.finish(FinishReason.STOP)])
        wire.append(message)
        wire += [{"role": "tool", "tool_call_id": call["id"], "content": results} for call in message["tool_calls"]]
        following = render(read_messages(wire), tools, kimi)
        assert following.ids[: len(prompt.ids) + len(generated)] == (*prompt.ids, *generated)


def test_a_long_history_takes_linear_time(kimi: Tokenizer) -> None:
    turn = [_user("The quick brown fox jumps over the lazy dog. " * 40), *CHAIN[1:]]
    messages = read_messages(turn * 120)
    started = time.perf_counter()
    rendered = render(messages, read_tools([TOOL]), kimi)
    assert time.perf_counter() - started < 5  # 0.3 s here
    assert len(rendered.ids) > 50_000
    assert rendered.history_calls == 240


def test_a_vocabulary_without_think_marks_is_refused() -> None:
    tokens = [bytes((byte,)) for byte in range(256)]
    names = {256: "<|im_system|>", 257: "<|im_middle|>", 258: "<|im_end|>", 259: "<|im_user|>", 260: "<|im_assistant|>"}
    with pytest.raises(ConfigError, match="no special token '<think>'"):
        render([Message(role="assistant", content="x")], [], Tokenizer(tokens, names, 512))


def test_surrogates_and_depth_are_refused_by_name(kimi: Tokenizer) -> None:
    deep: Wire = {}
    for _ in range(5_000):
        deep = {"a": deep}
    tool = Tool(name="f", wire={"function": {"name": "f", "parameters": deep}})
    with pytest.raises(RequestError, match="nested too deep") as error:
        render([], [tool], kimi)
    assert error.value.param == "tools"
    with pytest.raises(RequestError, match="lone surrogate") as error:
        render([], read_tools([{"type": "function", "function": {"name": "f", "description": "\udead"}}]), kimi)
    assert error.value.param == "tools"
