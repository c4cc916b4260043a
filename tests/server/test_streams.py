"""Answers: streamed equals whole, tool calls, usage, and every way in which a stream can end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perilune.server.state import SamplingDefaults
from perilune.types import FinishReason

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, Served, ServerFactory

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
TOOL = {"type": "function", "function": {"name": "get_tide", "parameters": {"type": "object", "properties": {}}}}
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
DEFAULTS = SamplingDefaults()


def joined(events: list[Any]) -> dict[str, Any]:
    """A streamed answer put together, with the rules of a stream checked."""
    assert events[-1] == "[DONE]"
    chunks = [event for event in events[:-1] if event["choices"]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert all(reason is None for reason in reasons[:-1])
    assert reasons[-1] is not None
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "usage" not in chunks[0]["choices"][0] or len(chunks) == 1
    return {
        "content": "".join(delta.get("content", "") for delta in deltas) or None,
        "reasoning": "".join(delta.get("reasoning_content", "") for delta in deltas),
        "finish_reason": reasons[-1],
        "usage": chunks[-1]["choices"][0]["usage"],
    }


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "extra", [{}, {"stop": ["e", "\n"]}, {"temperature": 0}, {"tools": [TOOL], "top_k": 60}], ids=str
)
def test_streamed_equals_whole(server: Served, seed: int, extra: dict[str, Any]) -> None:
    body = {**ASK, **extra, "seed": seed, "cache_salt": "warm"}
    server.post({**body, "max_tokens": 1})  # so that both find the prompt in the cache
    whole = server.post(body).json()
    streamed = joined(server.events(body))
    message = whole["choices"][0]["message"]
    assert streamed["content"] == message["content"]
    assert streamed["reasoning"] == message.get("reasoning_content", "")
    assert streamed["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert streamed["usage"] == whole["usage"]
    assert set(whole) == {"id", "object", "created", "model", "choices", "usage"}
    assert whole["id"].startswith("chatcmpl-")
    assert whole["model"] == "tiny"


def test_the_limit_is_the_limit(server: Served) -> None:
    whole = server.post({**ASK, "max_tokens": 3, "ignore_eos": True}).json()
    assert whole["choices"][0]["finish_reason"] == "length"
    used = whole["usage"]
    assert used["completion_tokens"] == 3
    assert used["total_tokens"] == used["prompt_tokens"] + 3


def test_the_answer_has_the_name_that_was_asked_for(server: Served) -> None:
    assert server.post({**ASK, "model": "tiny-alias"}).json()["model"] == "tiny-alias"


def test_usage_chunk_on_request(server: Served) -> None:
    events = server.events({**ASK, "stream_options": {"include_usage": True}})
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == events[-3]["choices"][0]["usage"]
    assert all(event["usage"] is None for event in events[:-2])


def test_a_tool_call_on_the_wire(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    pieces = (
        "<think>",
        "Look up.",
        "</think>",
        SECTION,
        CALL,
        "functions.get_tide:0",
        ARGUMENTS,
        '{"port": "B"}',
        CALL_END,
    )
    engine.steps = [[token] for token in engine.ids(*pieces, SECTION_END)]
    with serve(lambda: (engine, DEFAULTS)) as served:
        body = {**ASK, "tools": [TOOL], "tool_choice": "auto"}
        events = served.events(body)
        whole = served.post(body).json()["choices"][0]
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    first = calls[0]
    assert first == {
        "index": 0,
        "id": "functions.get_tide:0",
        "type": "function",
        "function": {"name": "get_tide", "arguments": ""},
    }
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert arguments == '{"port": "B"}'
    assert len(calls) > 5, "arguments stream as they are generated"
    kinds = [next(iter(delta.keys() - {"role"}), "") for delta in deltas]
    assert kinds == sorted(kinds, key=["reasoning_content", "tool_calls", ""].index)
    assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert events[-2]["choices"][0]["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Look up.")
    assert whole["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Look up.",
        "tool_calls": [
            {"id": first["id"], "type": "function", "function": {"name": "get_tide", "arguments": arguments}}
        ],
        "refusal": None,
    }
    sent = engine.requests[0].sampling
    assert sent.banned_ids == ()


@pytest.mark.parametrize(
    "extra", [{"tools": [TOOL], "tool_choice": "none"}, {}, {"tools": []}], ids=["none", "no tools", "[]"]
)
def test_without_tools_no_call_can_come(script: ScriptFactory, serve: ServerFactory, extra: dict[str, Any]) -> None:
    engine = script()
    engine.steps = [engine.ids("Hi.", SECTION, CALL, "functions.get_tide:0", ARGUMENTS, "{}", CALL_END, SECTION_END)]
    with serve(lambda: (engine, DEFAULTS)) as served:
        answer = served.post({**ASK, **extra}).json()["choices"][0]
    specials = engine.tokenizer.specials
    assert engine.requests[0].sampling.banned_ids == (specials[SECTION], specials[CALL])
    assert answer["finish_reason"] == "stop", "even of an engine that ignores the ban"
    assert "tool_calls" not in answer["message"]


def test_tools_stay_in_the_prompt_when_their_use_is_forbidden(script: ScriptFactory, serve: ServerFactory) -> None:
    """The prefix cache sees the same prompt."""
    engine = script()
    with serve(lambda: (engine, DEFAULTS)) as served:
        served.post({**ASK, "tools": [TOOL], "tool_choice": "none"})
        served.post({**ASK, "tools": [TOOL]})
    assert engine.requests[0].prompt == engine.requests[1].prompt


def test_what_the_engine_is_asked(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    with serve(lambda: (engine, SamplingDefaults(temperature=0.6, top_p=0.95))) as served:
        served.post({"messages": ASK["messages"]})
        asked = {"temperature": 0, "top_p": 1, "top_k": 5, "min_p": 0.1, "seed": 9, "stop": "x", "stop_token_ids": [7]}
        served.post({**ASK, **asked, "ignore_eos": True, "cache_salt": "s"})
    plain, full = engine.requests
    assert plain.sampling.temperature == 0.6
    assert plain.sampling.top_p == 0.95
    assert plain.sampling.max_tokens == engine.max_model_len - len(plain.prompt)
    assert plain.sampling.seed is not None, "drawn here, so that it can be told"
    sampling = full.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 5, 0.1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (9, ("x",), (7,))
    assert (sampling.max_tokens, sampling.ignore_eos, full.cache_salt) == (16, True, "s")
    assert plain.id != full.id


def test_nothing_is_sent_before_the_first_token(script: ScriptFactory, serve: ServerFactory) -> None:
    """No early role frame: clients measure the time to the first token by the first event."""
    engine = script(finish=None)
    url = "/v1/chat/completions"
    with (
        serve(lambda: (engine, DEFAULTS)) as served,
        httpx.Client(base_url=served.url, timeout=0.5) as client,
        pytest.raises(httpx.ReadTimeout),
        client.stream("POST", url, json={**ASK, "stream": True}),
    ):
        pytest.fail("the response has begun")


def test_a_request_that_fails_in_its_stream(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script(finish=FinishReason.ERROR)
    engine.steps = [engine.ids("ab")]
    with serve(lambda: (engine, DEFAULTS)) as served:
        events = served.events(ASK)
        whole = served.post(ASK)
        assert served.state.phase == "ready"
    assert events[0]["choices"][0]["delta"]["content"] == "ab"
    assert events[1:] == [
        {
            "error": {
                "message": "generation failed; see the server's log",
                "type": "server_error",
                "param": None,
                "code": "generation_failed",
            }
        }
    ]
    assert whole.status_code == 500
    assert "secret" not in whole.text


def test_an_engine_that_dies_in_a_stream(script: ScriptFactory, serve: ServerFactory) -> None:
    """An error event and no [DONE]; afterwards 503 with a time to come back."""
    engine = script(dies=True)
    engine.steps = [engine.ids("ab")]
    with serve(lambda: (engine, DEFAULTS)) as served:
        events = served.events(ASK)
        assert events[-1]["error"]["code"] == "engine_error"
        assert "secret" not in json.dumps(events)


def test_an_engine_that_dies_before_its_first_token(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script(dies=True)
    with serve(lambda: (engine, DEFAULTS)) as served:
        response = served.post({**ASK, "stream": True})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"] == {
        "message": "the engine stopped; see the server's log",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


def test_text_before_a_stop_string_that_begins_inside_a_token(server: Served) -> None:
    """Nothing of a stop string, and nothing behind it, comes out."""
    for seed in range(3):
        body = {**ASK, "seed": seed, "max_tokens": 24}
        full = server.post(body).json()["choices"][0]["message"]["content"] or ""
        letters = [letter for letter in full if letter.isascii() and letter.isprintable()]
        if not letters:
            continue
        stop = letters[len(letters) // 2]
        cut = server.post({**body, "stop": stop}).json()["choices"][0]
        assert cut["finish_reason"] == "stop"
        assert (cut["message"]["content"] or "") == full.split(stop)[0]
