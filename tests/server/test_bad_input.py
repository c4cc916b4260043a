"""Bad requests over HTTP, against the real engine: each a 4xx that names the value, none a harm to what follows."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import httpx

from perilune.server.limits import Limits
from perilune.server.state import SamplingDefaults

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, Served, ServerFactory

OK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


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


def test_all_prompts_of_a_request_are_bounded_together(script: ScriptFactory, serve: ServerFactory) -> None:
    """Each fits, all of them would be more ids than anybody wants to hold."""
    with serve(lambda: (script(), SamplingDefaults()), Limits(max_queue_tokens=5000)) as served:
        url = f"{served.url}/v1/completions"
        body = {"prompt": ["x" * 1700] * 3, "max_tokens": 1}
        error = httpx.post(url, json=body, timeout=30).json()["error"]
        assert error["param"] == "prompt"
        assert "5100 tokens together, at most 5000" in error["message"]
        assert httpx.post(url, json={**body, "prompt": ["x" * 1600] * 3}, timeout=30).status_code == 200
