"""The body of ``POST /v1/chat/completions``, checked.

Owns the list of fields: what each may be, which are accepted without effect, which ask for something that is not here
and are therefore refused unless they ask for nothing. Fields that it has never heard of are ignored, since clients
send new ones before servers know them, and named in ``ChatRequest.warnings`` so that a typing error is seen.
Does not look into messages and tools (``perilune.chat`` does), nor at the model's sizes.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from perilune.errors import RequestError
from perilune.server.fields import Fields, shown

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_IDS: Final = 64
_MAX_TOKENS: Final = 1 << 31
_MAX_SEED: Final = (1 << 63) - 1
_MAX_NAME: Final = 512

_LATER: Final = "a later version will have it; leave the field out"
_NOT_HERE: Final[tuple[tuple[str, tuple[object, ...], str], ...]] = (
    ("n", (1,), "send the request several times, with different seeds"),
    ("best_of", (1,), "send the request several times, with different seeds"),
    ("use_beam_search", (False,), "leave the field out"),
    ("logprobs", (False,), _LATER),
    ("top_logprobs", (0,), _LATER),
    ("prompt_logprobs", (), _LATER),
    ("presence_penalty", (0,), _LATER),
    ("frequency_penalty", (0,), _LATER),
    ("repetition_penalty", (1,), _LATER),
    ("logit_bias", ({},), _LATER),
    ("bad_words", ([],), _LATER),
    ("min_tokens", (0,), _LATER),
    ("functions", ([],), "declare them in `tools`, each as {'type': 'function', 'function': …}"),
    ("function_call", ("auto", "none"), "use `tool_choice`"),
    ("guided_json", (), _LATER),
    ("guided_regex", (), _LATER),
    ("guided_choice", (), _LATER),
    ("guided_grammar", (), _LATER),
    ("structured_outputs", (), _LATER),
    ("modalities", (["text"],), "the model reads and writes text"),
    ("audio", (), "the model reads and writes text"),
    ("prompt_embeds", (), "send `messages`"),
    ("chat_template", (), "the prompt format belongs to the model"),
    ("continue_final_message", (False,), "set `partial` on the last assistant message"),
    ("add_generation_prompt", (True,), "leave the field out"),
    ("echo", (False,), "leave the field out"),
)
"""Field, values that ask for nothing, hint. What is silently ignored here would be a wrong answer."""

_NO_EFFECT: Final = (
    "prompt_cache_key",
    "safety_identifier",
    "user",
    "metadata",
    "store",
    "service_tier",
    "reasoning_effort",
    "verbosity",
    "prediction",
)
"""Accepted, so that clients that always send them work. They change nothing in the answer."""


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for. None: it did not say, so the model's default holds."""

    model: str | None
    messages: list[Any]
    tools: list[Any]
    tool_choice: Literal["auto", "none"]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    cache_salt: str
    warnings: tuple[str, ...]


def read_chat_request(data: dict[str, object]) -> ChatRequest:
    """Checks a decoded body.

    Raises:
        RequestError: names the field, its value, and what is allowed.
    """
    fields = Fields(data)
    for name, neutral, hint in _NOT_HERE:
        fields.only(name, neutral, hint)
    for name in _NO_EFFECT:
        fields.get(name)
    _check_response_format(fields)
    stream = fields.boolean("stream", False)
    include_usage, option_warnings = _stream_options(fields, stream)
    limit = fields.integer("max_tokens", 1, _MAX_TOKENS)
    newer_limit = fields.integer("max_completion_tokens", 1, _MAX_TOKENS)
    thinking_warnings = _thinking(fields)
    fields.boolean("parallel_tool_calls", True)
    return ChatRequest(
        model=fields.string("model", _MAX_NAME),
        messages=_array(fields, "messages", required=True),
        tools=_array(fields, "tools", required=False),
        tool_choice=_tool_choice(fields),
        stream=stream,
        include_usage=include_usage,
        max_tokens=limit if newer_limit is None else newer_limit,
        temperature=fields.number("temperature", 0.0, 2.0),
        top_p=_top_p(fields),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0.0, 1.0),
        seed=fields.integer("seed", 0, _MAX_SEED),
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos", False),
        cache_salt=_cache_salt(fields),
        # Evaluated last: by now every known name was asked for.
        warnings=(*thinking_warnings, *(f"ignored {name}" for name in (*option_warnings, *fields.unknown()))),
    )


def _array(fields: Fields, name: str, *, required: bool) -> list[Any]:
    value = fields.get(name)
    if value is None and not required:
        return []
    if not isinstance(value, list):
        raise fields.fail(name, "an array is needed", code="invalid_type")
    if required and not value:
        raise fields.fail(name, "at least one message is needed")
    return value


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, tuple[str, ...]]:
    options = fields.nested("stream_options")
    if options is None:
        return False, ()
    if not stream:
        raise fields.fail("stream_options", "it is only allowed with `stream` true")
    return options.boolean("include_usage", False), options.unknown()


def _check_response_format(fields: Fields) -> None:
    wanted = fields.nested("response_format")
    if wanted is not None:
        wanted.only("type", ("text",), "leave the field out and ask for JSON in the prompt; schemas come later")


def _thinking(fields: Fields) -> tuple[str, ...]:
    """K2 Thinking always thinks: its prompt format has no switch. Asking it not to gets a warning, not an error."""
    off = False
    switch = fields.nested("thinking")
    if switch is not None:
        kind = switch.string("type", 32)
        if kind not in (None, "enabled", "disabled", "adaptive"):
            raise switch.fail("type", "enabled, disabled or adaptive is needed")
        off = kind == "disabled"
    template = fields.nested("chat_template_kwargs")
    if template is not None:
        for name in ("thinking", "enable_thinking"):
            off = not template.boolean(name, True) or off
        for unknown in template.unknown():
            raise RequestError(
                f"{shown(unknown)} is not allowed, `chat_template_kwargs` may hold thinking and enable_thinking",
                param="chat_template_kwargs",
                code="unknown_parameter",
            )
    return ("the model always thinks",) if off else ()


def _tool_choice(fields: Fields) -> Literal["auto", "none"]:
    value = fields.get("tool_choice")
    if value is None or value == "auto":
        return "auto"
    if value == "none":
        return "none"
    if value == "required" or isinstance(value, dict):
        raise fields.fail(
            "tool_choice",
            "forcing a call is not supported yet",
            code="unsupported_value",
            hint='send "auto" and name the tool in the prompt',
        )
    raise fields.fail("tool_choice", "auto or none is needed")


def _top_p(fields: Fields) -> float | None:
    value = fields.number("top_p", 0.0, 1.0)
    if value == 0:
        raise fields.fail("top_p", "a number above 0 and at most 1 is needed", hint="`temperature` 0 is greedy")
    return value


def _top_k(fields: Fields) -> int | None:
    """0 and -1 both mean off: clients of different servers send either."""
    value = fields.integer("top_k", -1, _MAX_TOKENS)
    return 0 if value == -1 else value


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.fail("stop", "a string or an array of strings is needed", code="invalid_type")
    if len(stops) > MAX_STOPS:
        raise fields.fail("stop", f"at most {MAX_STOPS} strings are allowed, it has {len(stops)}")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise fields.fail("stop", f"each string must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise fields.fail("stop_token_ids", "an array of token ids is needed", code="invalid_type")
    if len(value) > MAX_STOP_IDS:
        raise fields.fail("stop_token_ids", f"at most {MAX_STOP_IDS} ids are allowed, it has {len(value)}")
    return tuple(dict.fromkeys(value))


def _cache_salt(fields: Fields) -> str:
    value = fields.string("cache_salt", _MAX_NAME)
    if value == "":
        raise fields.fail("cache_salt", "a string that is not empty is needed")
    return value or ""
