"""``--strict-params``: what is otherwise taken with a warning is refused, and what Moonshot's own service refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perilune.server.state import SamplingDefaults

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, ServerFactory

USER = {"role": "user", "content": "hi"}
CHAT: dict[str, Any] = {"messages": [USER]}
CALL: dict[str, Any] = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURN: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {**USER, "role": "tool", "tool_call_id": "x"},
]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "temprature": 0}, "temprature"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ("/v1/chat/completions", {**CHAT, "thinking": {"type": "disabled"}}, "thinking"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"thinking": False}}, "thinking"),
        ("/v1/chat/completions", {**CHAT, "tools": [tool("21st_magic")]}, "tools[0].function.name"),
        ("/v1/chat/completions", {"messages": [USER, *TURN, USER]}, "messages[1].reasoning_content"),
        ("/v1/chat/completions", {"messages": [{**USER, "cotnent": "x"}]}, "messages[0].cotnent"),
        (
            "/v1/chat/completions",
            {"messages": [{**USER, "content": [{"type": "text", "text": "a", "cache_control": {"x": 1}}]}]},
            "messages[0].content[0].cache_control",
        ),
        (
            "/v1/chat/completions",
            {"messages": [USER, {**TURN[0], "reasoning_content": "", "tool_calls": [{**CALL, "index": 0}]}, *TURN[1:]]},
            "messages[1].tool_calls[0].index",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "reasoning_content": "",
                        "tool_calls": [{**CALL, "function": {**CALL["function"], "args": "{}"}}],
                    },
                    *TURN[1:],
                ]
            },
            "messages[1].tool_calls[0].function.args",
        ),
        ("/v1/chat/completions", {**CHAT, "tools": [{**tool("get"), "x": 1}]}, "tools[0].x"),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [{"type": "function", "function": {"name": "get", "params": {}}}]},
            "tools[0].function.params",
        ),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ("/v1/chat/completions", {**CHAT, "thinking": {"type": "enabled", "x": 1}}, "thinking.x"),
        ("/tokenize", {"messages": [{**USER, "cotnent": "x"}]}, "messages[0].cotnent"),
        ("/v1/completions", {"prompt": "hi", "temprature": 0}, "temprature"),
        ("/tokenize", {"messages": [USER, *TURN, USER]}, "messages[1].reasoning_content"),
        ("/tokenize", {"prompt": "hi", "promt": "hi"}, "promt"),
        ("/detokenize", {"tokens": [71], "token": [72]}, "token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_only_where_that_is_wanted(
    script: ScriptFactory, serve: ServerFactory, path: str, body: dict[str, Any], param: str
) -> None:
    engine = script()
    engine.steps = [engine.ids("a")]
    with serve(lambda: (engine, SamplingDefaults())) as served:
        assert httpx.post(served.url + path, json=body).status_code == 200
        asked = len(engine.requests)
        served.state.strict = True
        refused = httpx.post(served.url + path, json=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
        assert len(engine.requests) == asked


def test_what_a_client_should_send_is_taken(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    engine.steps = [engine.ids("a")]
    echoed: dict[str, Any] = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "name": "n"}
    turn = [{**TURN[0], "reasoning_content": "", **echoed}, TURN[1]]
    thinking = {"type": "enabled", "keep": "all"}
    body = {"messages": [USER, *turn, USER], "tools": [tool("get_tide")], "user": "u", "thinking": thinking}
    with serve(lambda: (engine, SamplingDefaults())) as served:
        served.state.strict = True
        assert served.post(body).status_code == 200
        long = {**body, "messages": [{**USER, "content": "x" * 70_000}], "temprature": 1}
        assert served.post(long).json()["error"]["param"] == "temprature", "in the processes for long ones too"


def test_an_ordinary_server_names_what_it_ignores_in_messages(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    engine.steps = [engine.ids("a")]
    body: dict[str, Any] = {
        "messages": [{**USER, "refusal": None, "cotnent": "x"}],
        "tools": [{**tool("get"), "shown": 1}],
    }
    with serve(lambda: (engine, SamplingDefaults())) as served:
        answer = served.post(body)
        assert answer.status_code == 200
        assert answer.headers["x-perilune-warning"] == "ignored messages[0].cotnent"
