"""What clients read: the shape of every event, and that deltas put together are the message."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.chat.parse import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta
from perilune.server.wire import ChunkHead, ChunkWriter, MessageBuilder, Usage, merged, usage

USAGE = usage(prompt=10, completion=7, reasoning=3, cached=4)


def decode(events: list[bytes]) -> list[Any]:
    found = []
    for event in events:
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2
        data = event.removeprefix(b"data: ").removesuffix(b"\n\n")
        found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def told(steps: list[list[Event]], *, include_usage: bool = False) -> list[Any]:
    head = ChunkHead("chatcmpl-1", 5, "m", include_usage)
    writer = ChunkWriter(head)
    events = [event for step in steps for event in writer.deltas(step)]
    return decode([*events, writer.finish("stop", USAGE), *head.end(USAGE)])


def test_a_whole_stream() -> None:
    chunks = told(
        [
            [ReasoningDelta("a"), ReasoningDelta("b")],
            [],
            [ReasoningDelta("c"), ContentDelta("d")],
            [CallStart(0, "functions.f:0", "f"), CallDelta(0, '{"x"'), CallDelta(0, ":1}")],
        ]
    )
    assert chunks.pop() == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "reasoning_content": "ab"},
        {"reasoning_content": "c"},
        {"content": "d"},
        {
            "tool_calls": [
                {"index": 0, "id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]},
        {},
    ]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert (chunk["id"], chunk["created"], chunk["model"]) == ("chatcmpl-1", 5, "m")
        assert "usage" not in chunk
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 5 + ["stop"]
    assert chunks[-1]["choices"][0]["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 17,
        "cached_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_usage_in_a_chunk_of_its_own_when_asked_for() -> None:
    chunks = told([[ContentDelta("a")]], include_usage=True)
    assert chunks.pop() == "[DONE]"
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"] == chunks[-1]["choices"][0]["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_an_answer_of_nothing_still_has_a_role() -> None:
    chunks = told([[], []])
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [{"role": "assistant", "content": ""}]


def test_empty_reasoning_is_told() -> None:
    """Moonshot's clients tell reasoning that was empty from none at all."""
    assert told([[ReasoningDelta("")]])[0]["choices"][0]["delta"] == {"role": "assistant", "reasoning_content": ""}
    builder = MessageBuilder()
    builder.add([ReasoningDelta("")])
    assert builder.message().reasoning_content == ""


def test_text_never_breaks_the_framing() -> None:
    chunks = told([[ContentDelta("data: x\n\ndata: [DONE]\r\n\u2028")]])
    assert chunks[0]["choices"][0]["delta"]["content"] == "data: x\n\ndata: [DONE]\r\n\u2028"


@pytest.mark.parametrize("reasoning", [0, 7])
def test_usage_adds_up(reasoning: int) -> None:
    used: Usage = usage(prompt=3, completion=7, reasoning=reasoning, cached=0)
    assert used.total_tokens == 10
    assert used.completion_tokens_details.reasoning_tokens == reasoning


@st.composite
def answers(draw: st.DrawFn) -> list[Event]:
    """What a parser may emit: text in any order, calls with their fragments behind them."""
    events: list[Event] = []
    text = st.text(max_size=5)
    calls = 0
    for kind in draw(st.lists(st.sampled_from("rcf"), max_size=12)):
        if kind == "r":
            events.append(ReasoningDelta(draw(text)))
        elif kind == "c":
            events.append(ContentDelta(draw(text)))
        else:
            events.append(CallStart(calls, f"functions.f:{calls}", "f"))
            events += [CallDelta(calls, piece) for piece in draw(st.lists(text, max_size=4))]
            calls += 1
    return events


@given(answers(), st.data())
def test_deltas_put_together_are_the_message(events: list[Event], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=4)))
    bounds = [0, *cuts, len(events)]
    steps = [events[a:b] for a, b in itertools.pairwise(bounds)]
    builder = MessageBuilder()
    for step in steps:
        builder.add(step)
    whole = builder.message()

    content, reasoning, calls = "", "", list[dict[str, str]]()
    for chunk in told(steps)[:-1]:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert content == (whole.content or "")
    assert reasoning == (whole.reasoning_content or "")
    told_calls = whole.tool_calls or ()
    assert calls == [
        {"id": call.id, "name": call.function.name, "arguments": call.function.arguments} for call in told_calls
    ]
    assert list(merged(list(merged(events)))) == list(merged(events))
