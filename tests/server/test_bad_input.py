"""Bad requests over HTTP, against the real engine: each a 4xx that names the value, none a harm to what follows."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.server.conftest import Served

OK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
LEAK = re.compile(r"0x[0-9a-f]{6,}|/site-packages/|/home/|/root/|/tmp/|Traceback|File \"|perilune\.")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CASES: list[tuple[str, Any, int, str | None]] = [
    ("empty body", b"", 400, None),
    ("not an object", b"[1]", 400, None),
    ("nested 100,000 deep", b"[" * 100_000, 400, None),
    ("nested in a field", b'{"messages":' + b'[{"a":' * 50_000, 400, None),
    ("NaN", b'{"temperature":NaN}', 400, None),
    ("1e400", b'{"temperature":1e400}', 400, None),
    ("lone surrogate", b'{"messages":[{"role":"user","content":"\\ud800x"}]}', 400, None),
    ("invalid UTF-8", b'{"messages":"\xff"}', 400, None),
    ("byte order mark", b"\xef\xbb\xbf{}", 400, None),
    ("no messages", {"model": "tiny"}, 400, "messages"),
    ("empty messages", {**OK, "messages": []}, 400, "messages"),
    ("message is null", {**OK, "messages": [None]}, 400, "messages[0]"),
    ("no role", {**OK, "messages": [{"content": "x"}]}, 400, "messages[0]"),
    ("unknown role", {**OK, "messages": [{"role": "root", "content": "x"}]}, 400, "messages[0].role"),
    ("content is a number", {**OK, "messages": user(5)}, 400, "messages[0].content"),
    (
        "image",
        {**OK, "messages": user([{"type": "image_url", "image_url": {"url": "http://a\\@127.0.0.1"}}])},
        400,
        "messages[0].content[0].type",
    ),
    ("tool without a name", {**OK, "tools": [{"type": "function", "function": {}}]}, 400, "tools[0].function"),
    ("tool of unknown type", {**OK, "tools": [{"type": "x", "function": {"name": "f"}}]}, 400, "tools[0].type"),
    ("unknown model", {**OK, "model": "gpt-9"}, 404, "model"),
    ("model with a line break", {**OK, "model": 'x\r\n{"level":"error"'}, 404, "model"),
    ("prompt over the context", {**OK, "messages": user("x" * 5000)}, 400, "messages"),
    ("no room for that answer", {**OK, "max_tokens": 4090}, 400, "max_tokens"),
    ("huge max_tokens", {**OK, "max_tokens": 10**30}, 400, "max_tokens"),
    ("temperature 3", {**OK, "temperature": 3}, 400, "temperature"),
    ("true is no number", {**OK, "temperature": True}, 400, "temperature"),
    ("n", {**OK, "n": 1000}, 400, "n"),
    ("stop id beyond the vocabulary", {**OK, "stop_token_ids": [512]}, 400, "stop_token_ids"),
    ("negative stop id", {**OK, "stop_token_ids": [-1]}, 400, "stop_token_ids"),
    ("stop id beyond 64 bits", {**OK, "stop_token_ids": [2**63]}, 400, "stop_token_ids"),
    ("lone surrogate in a stop string", b'{"messages":[],"stop":["\\udfff"]}', 400, None),
    ("logprobs", {**OK, "logprobs": True}, 400, "logprobs"),
    ("forced tool", {**OK, "tool_choice": "required"}, 400, "tool_choice"),
    ("schema", {**OK, "response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format.type"),
    ("template", {**OK, "chat_template": "{% for i in range(10**9) %}"}, 400, "chat_template"),
    (
        "duplicate partial",
        {**OK, "messages": [{"role": "assistant", "content": "a", "partial": True}, *user("x")]},
        400,
        "messages[0].partial",
    ),
]


@pytest.mark.parametrize(("body", "status", "param"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_refused(server: Served, body: Any, status: int, param: str | None, stream: bool) -> None:
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    response = server.post(body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-trace-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert error["param"] == param
    assert 10 < len(error["message"]) < 500
    assert "\n" not in error["message"]
    assert not LEAK.search(response.text)


def test_context_errors_name_both_numbers(server: Served) -> None:
    error = server.post({**OK, "messages": user("x" * 5000)}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    prompt = re.search(r"prompt has (\d+) tokens", error["message"])
    assert prompt is not None
    assert int(prompt[1]) > 5000
    assert "4096" in error["message"]
    error = server.post({**OK, "max_tokens": 4090}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "4090" in error["message"]
    assert "4096" in error["message"]


def test_the_rest_of_the_context_may_be_asked_for(server: Served) -> None:
    short = server.post({**OK, "messages": user("x")}).json()["usage"]["prompt_tokens"]
    full = {**OK, "messages": user("x" * (server.engine.max_model_len - short - 2))}  # leaves room for three
    answered = server.post({**full, "max_tokens": 3}).json()["usage"]
    assert answered["prompt_tokens"] == server.engine.max_model_len - 3
    refused = server.post({**full, "max_tokens": 4})
    assert refused.status_code == 400
    assert "at most 3 tokens" in refused.json()["error"]["message"]


def test_refusals_are_quick_and_leave_nothing_behind(server: Served) -> None:
    start = time.monotonic()
    assert server.post({**OK, "n": 10**9}).status_code == 400
    assert time.monotonic() - start < 1
    assert server.state.in_flight == 0
    status = server.engine.status()
    assert (status.phase, status.running, status.waiting) == ("ready", 0, 0)
    assert server.post(OK).status_code == 200


def test_unknown_fields_are_named_in_a_header(server: Served) -> None:
    body = {**OK, "temprature": 0, 'x\r\nset-cookie: "é': 1}
    response = server.post(body)
    assert response.status_code == 200
    assert response.headers["x-perilune-warning"] == 'ignored temprature; ignored x??set-cookie: "?'
    many = {**OK, **{f"field{i}": i for i in range(50)}}
    assert server.post(many).headers["x-perilune-warning"].endswith("; and 42 more")
    assert "x-perilune-warning" not in server.post(OK).headers


def test_markers_in_user_text_are_text(server: Served) -> None:
    """`<|im_end|>` typed by a user has as many tokens as its letters."""
    plain = server.post({**OK, "messages": user("x" * 10)}).json()["usage"]["prompt_tokens"]
    marker = server.post({**OK, "messages": user("<|im_end|>")}).json()["usage"]["prompt_tokens"]
    assert marker == plain


def test_error_bodies_are_json_whatever_is_quoted(server: Served) -> None:
    response = server.post({**OK, "model": 'a"\\\u2028</script>\x00'})
    assert response.status_code == 404
    assert json.loads(response.content)["error"]["code"] == "model_not_found"
