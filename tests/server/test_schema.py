"""Every field of a chat request: what it may be, what it means, what refuses it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.server.schema import CHAT, ChatRequest, read_chat_request
from perilune.server.wishes import Wishes

MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = 10**400


def read(**fields: Any) -> ChatRequest:
    return read_chat_request({"messages": MESSAGES, **fields})


def test_defaults() -> None:
    request = read()
    assert request == ChatRequest(
        model=None,
        messages=MESSAGES,
        tools=[],
        tool_choice="auto",
        stream=False,
        include_usage=False,
        max_tokens=None,
        logprobs=None,
        wishes=Wishes(
            n=1,
            temperature=None,
            top_p=None,
            top_k=None,
            min_p=None,
            seed=None,
            stop=(),
            stop_token_ids=(),
            ignore_eos=False,
            min_tokens=0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias=(),
            priority=0,
            cache_salt="",
        ),
        warnings=(),
    )


@pytest.mark.parametrize(
    ("field", "value", "attribute", "meaning"),
    [
        ("model", "m", "model", "m"),
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 2, "temperature", 2.0),
        ("temperature", 1e-6, "temperature", 1e-6),
        ("top_p", 1, "top_p", 1.0),
        ("top_k", -1, "top_k", 0),
        ("top_k", 0, "top_k", 0),
        ("top_k", 40, "top_k", 40),
        ("min_p", 0.05, "min_p", 0.05),
        ("seed", 0, "seed", 0),
        ("seed", 2**63 - 1, "seed", 2**63 - 1),
        ("stop", "a", "stop", ("a",)),
        ("stop", ["a", "b", "a"], "stop", ("a", "b")),
        ("stop", [], "stop", ()),
        ("stop_token_ids", [3, 3], "stop_token_ids", (3,)),
        ("max_tokens", 5, "max_tokens", 5),
        ("max_completion_tokens", 6, "max_tokens", 6),
        ("tool_choice", "none", "tool_choice", "none"),
        ("tool_choice", "auto", "tool_choice", "auto"),
        ("stream", True, "stream", True),
        ("ignore_eos", True, "ignore_eos", True),
        ("cache_salt", "s", "cache_salt", "s"),
        ("n", 3, "n", 3),
        ("min_tokens", 3, "min_tokens", 3),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("frequency_penalty", 2, "frequency_penalty", 2.0),
        ("repetition_penalty", 1.2, "repetition_penalty", 1.2),
        ("priority", -5, "priority", -5),
        ("logit_bias", {"7": -100, "8": 0.5}, "logit_bias", ((7, -100.0), (8, 0.5))),
    ],
)
def test_reads(field: str, value: Any, attribute: str, meaning: Any) -> None:
    request = read(**{field: value})
    found = getattr(request if hasattr(request, attribute) else request.wishes, attribute)
    assert found == meaning
    assert type(found) is type(meaning)
    assert request.warnings == ()
    assert read(**{field: None}) == read(), "null means absent"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"logprobs": False},
        {"top_logprobs": 0},
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"repetition_penalty": 1.0},
        {"logit_bias": {}},
        {"best_of": 1},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "text"}},
        {"prompt_cache_key": "k", "safety_identifier": "u", "user": "u", "metadata": {"a": "b"}},
        {"store": True, "service_tier": "auto", "reasoning_effort": "high"},
        {"thinking": {"type": "enabled", "keep": "all"}},
        {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}},
        {"chat_template_kwargs": {}},
        {"modalities": ["text"]},
    ],
    ids=str,
)
def test_accepts_without_effect(fields: dict[str, Any]) -> None:
    assert read(**fields) == read()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"tools": {}}, "tools"),
        ({"model": 1}, "model"),
        ({"model": "x" * 600}, "model"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 10**10}, "n"),
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 10**9}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"frequency_penalty": False}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
        ({"logit_bias": {"9223372036854775808": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"logit_bias": [[1, 2]]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"guided_json": {"type": "stsring"}}, "guided_json"),
        ({"structured_outputs": {"grammar": "root ::= "}}, "structured_outputs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"chat_template": "{{ ''.__class__ }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"stop": 1}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a"] * 100_000}, "stop"),
        ({"stop": "a" * 300}, "stop"),
        ({"stop_token_ids": "5"}, "stop_token_ids"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(100))}, "stop_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refuses(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param == param
    assert param.split(".", maxsplit=1)[0] in caught.value.message
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
@pytest.mark.parametrize(
    "value", [-11, 10.1, 1e-320, 1e300, HUGE, -HUGE, True, "1", [], {}, float("inf"), float("nan")]
)
def test_refuses_numbers(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(**{field: value})
    assert caught.value.param == field
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "seed", "top_k", "n", "min_tokens"])
@pytest.mark.parametrize("value", [-(2**63), 2**64, HUGE, True, 1.0, 1.5, "1", []])
def test_refuses_integers(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_answer_has_a_token(field: str) -> None:
    with pytest.raises(RequestError, match="an integer from 1"):
        read(**{field: 0})


def test_the_newer_limit_wins() -> None:
    assert read(max_tokens=5, max_completion_tokens=9).max_tokens == 9


def test_names_what_it_ignores() -> None:
    request = read(temprature=0, stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert request.include_usage
    assert request.warnings == ("ignored stream_options.include_obfuscation", "ignored temprature")


@pytest.mark.parametrize(
    "fields",
    [{"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"thinking": False}}],
    ids=["thinking", "chat_template_kwargs"],
)
def test_says_that_thinking_stays_on(fields: dict[str, Any]) -> None:
    assert read(**fields).warnings == ("the model always thinks",)


def test_a_forced_call_says_what_to_use() -> None:
    with pytest.raises(RequestError, match="not supported yet") as caught:
        read(tool_choice="required")
    assert caught.value.code == "unsupported_value"
    assert '"auto"' in caught.value.hint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = [param.name for param in CHAT]


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))
def test_is_total(fields: dict[str, Any]) -> None:
    """Whatever JSON says: a request or a refusal, nothing else."""
    with contextlib.suppress(RequestError):
        assert isinstance(read_chat_request({"messages": MESSAGES, **fields}), ChatRequest)
