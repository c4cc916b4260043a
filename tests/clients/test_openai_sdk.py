"""The OpenAI Python SDK, unchanged, against ``perilune serve`` with the bundled model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from perilune.cli.calculator import DECLARATION, run_call

TOOL: Any = dict(DECLARATION)


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "perilune.cli.main", "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = None
            while found is None and (line := process.stderr.readline()):
                found = re.search(r"URL +(http://\S+/v1)$", line)
            assert found is not None
            with openai.OpenAI(base_url=found[1], api_key="unused", max_retries=0, timeout=60) as made:
                yield made
        finally:
            process.terminate()
            process.wait(10)


def ask(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["pico"]
    assert client.models.retrieve("pico").owned_by == "perilune"


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="pico", messages=ask("What is 12+30?"), temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    assert "42" in choice.message.content
    assert choice.message.reasoning_content  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_answer(client: openai.OpenAI) -> None:
    reasoning, content, reasons, used = "", "", [], []
    stream = client.chat.completions.create(
        model="pico",
        messages=ask("What is 12+30?"),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        used += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            if choice.delta.content:
                content += choice.delta.content
                assert reasoning, "thinking comes first"
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "42" in content
    assert reasoning
    assert reasons == ["stop"]
    assert len(used) == 1


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    """The SDK puts the deltas together itself, and checks them as it does."""
    with client.chat.completions.stream(model="pico", messages=ask("What is 2+3?"), temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert (
        final.choices[0].message.content
        == client.chat.completions.create(model="pico", messages=ask("What is 2+3?"), temperature=0)
        .choices[0]
        .message.content
    )


def test_a_tool_loop(client: openai.OpenAI) -> None:
    messages = ask("What is 345*27?")
    with client.chat.completions.stream(model="pico", messages=messages, tools=[TOOL], temperature=0) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    assert call.id == "functions.calculator:0"
    assert call.function.name == "calculator"
    result = run_call(call.function.arguments)
    assert result == "9315"
    assert json.loads(call.function.arguments)

    whole = client.chat.completions.create(model="pico", messages=messages, tools=[TOOL], temperature=0).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.tool_calls is not None
    assert whole.message.tool_calls[0].to_dict() == {
        "id": call.id,
        "type": "function",
        "function": {"name": "calculator", "arguments": call.function.arguments},
    }

    messages += [whole.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": result}]
    final = client.chat.completions.create(model="pico", messages=messages, tools=[TOOL], temperature=0)
    assert "9315" in (final.choices[0].message.content or "")


def test_tools_may_be_forbidden(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="pico", messages=ask("What is 345*27?"), tools=[TOOL], tool_choice="none", temperature=0, max_tokens=100
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model="pico", messages=ask("hi"), temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError, match="this server has pico"):
        client.chat.completions.create(model="gpt-9", messages=ask("hi"))


def test_leaving_a_stream_frees_the_engine(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="pico", messages=ask("hi"), stream=True, extra_body={"ignore_eos": True}
    )
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    answer = client.chat.completions.create(model="pico", messages=ask("What is 1+1?"), temperature=0)
    assert "2" in (answer.choices[0].message.content or "")
