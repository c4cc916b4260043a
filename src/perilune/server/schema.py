"""The body of ``POST /v1/chat/completions``, checked.

Owns the list of fields: what each may be, which are accepted without effect, which ask for something that is not here
and are therefore refused unless they ask for nothing. Fields that it has never heard of are ignored, since clients
send new ones before servers know them, and named in ``ChatRequest.warnings`` so that a typing error is seen.
Does not look into messages and tools (``perilune.chat`` does), nor at the model's sizes.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import msgspec

from perilune.errors import RequestError
from perilune.server.fields import Fields, shown
from perilune.server.params import MAX_COUNT, Param, flag, integer, read_all, refused, text, unused
from perilune.server.wishes import MAX_TOP_LOGPROBS, SAMPLING, Wishes

LATER: Final = "a later version will have it; leave the field out"
IGNORED: Final = "ignored "
ALWAYS_THINKS: Final = "the model always thinks"
"""Warnings: the first is followed by a field's name."""

_TEXT_ONLY: Final = "the model reads and writes text"


class StreamOptions(NamedTuple):
    """``stream_options``."""

    include_usage: bool = False


def _stream_options(fields: Fields) -> StreamOptions:
    options = fields.nested("stream_options")
    if options is None:
        return StreamOptions()
    if not fields.boolean("stream", False):
        raise fields.fail("stream_options", "it is only allowed with `stream` true")
    return StreamOptions(options.boolean("include_usage", False))


def _response_format(fields: Fields) -> None:
    wanted = fields.nested("response_format")
    if wanted is not None:
        wanted.only("type", ("text",), "leave the field out and ask for JSON in the prompt; schemas come later")


RESPONSE_FORMAT: Final = Param(
    "response_format",
    _response_format,
    {"type": "object", "properties": {"type": {"enum": ["text", None]}}},
    "text",
)
SHARED: Final[tuple[Param[Any], ...]] = (
    text("model", "one of the served names"),
    flag("stream", "answer as server-sent events"),
    Param(
        "stream_options",
        _stream_options,
        {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
        "only with `stream`; `include_usage`: a last chunk has the usage",
    ),
    RESPONSE_FORMAT,
    *SAMPLING,
    *(unused(name) for name in ("prompt_cache_key", "safety_identifier", "user", "metadata", "store", "service_tier")),
    refused("use_beam_search", (False,), "leave the field out"),
    refused("prompt_logprobs", (), "send `echo` and `logprobs` to /v1/completions"),
    refused("bad_words", ([],), LATER),
    refused("allowed_token_ids", (), LATER),
    refused("truncate_prompt_tokens", (), "shorten the prompt"),
    refused("guided_json", (), LATER),
    refused("guided_regex", (), LATER),
    refused("guided_choice", (), LATER),
    refused("guided_grammar", (), LATER),
    refused("structured_outputs", (), LATER),
    refused("prompt_embeds", (), "send text"),
)
"""Fields of chat and of plain completions."""


def _messages(fields: Fields) -> list[Any]:
    value = fields.get("messages")
    if not isinstance(value, list):
        raise fields.fail("messages", "an array is needed", code="invalid_type")
    if not value:
        raise fields.fail("messages", "at least one message is needed")
    return value


def _tools(fields: Fields) -> list[Any]:
    value = fields.get("tools")
    if value is None:
        return []
    if not isinstance(value, list):
        raise fields.fail("tools", "an array is needed", code="invalid_type")
    return value


def _thinking(fields: Fields) -> bool:
    """Whether the client asks the model not to think."""
    switch = fields.nested("thinking")
    kind = None if switch is None else switch.string("type", 32)
    if switch is not None:
        switch.get("keep")  # of which turns the thinking is kept: the prompt format says so
    if switch is not None and kind not in (None, "enabled", "disabled", "adaptive"):
        raise switch.fail("type", "enabled, disabled or adaptive is needed")
    return kind == "disabled"


def _template_kwargs(fields: Fields) -> bool:
    """Whether the client asks the model not to think."""
    template = fields.nested("chat_template_kwargs")
    if template is None:
        return False
    thinks = (template.boolean("thinking", True), template.boolean("enable_thinking", True))
    for unknown in template.unknown():
        raise RequestError(
            f"{shown(unknown)} is not allowed, `chat_template_kwargs` may hold thinking and enable_thinking",
            param="chat_template_kwargs",
            code="unknown_parameter",
        )
    return False in thinks


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


def _top_logprobs(fields: Fields) -> int | None:
    value = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if value and not fields.boolean("logprobs", False):
        raise fields.fail("top_logprobs", "it is only allowed with `logprobs` true")
    return value


_SWITCH: Final = {"type": "boolean"}
_OBJECTS: Final = {"type": "array", "items": {"type": "object"}}

MESSAGES: Final = Param("messages", _messages, {**_OBJECTS, "minItems": 1}, "the conversation", required=True)
CONVERSATION: Final[tuple[Param[Any], ...]] = (
    MESSAGES,
    Param("tools", _tools, _OBJECTS, "functions that the model may call"),
    Param(
        "chat_template_kwargs",
        _template_kwargs,
        {
            "type": "object",
            "properties": {"thinking": _SWITCH, "enable_thinking": _SWITCH},
            "additionalProperties": False,
        },
        "accepted; the model always thinks",
    ),
    refused("chat_template", (), "the prompt format belongs to the model"),
    refused("continue_final_message", (False,), "set `partial` on the last assistant message"),
)
"""What makes a prompt of messages: fields of chat completions and of /tokenize."""

CHAT: Final[tuple[Param[Any], ...]] = (
    *CONVERSATION,
    *SHARED,
    Param("tool_choice", _tool_choice, {"enum": ["auto", "none", None]}, "none: no call comes out"),
    flag("parallel_tool_calls", "accepted; false is not enforced", default=True),
    integer("max_completion_tokens", "default: the rest of the context", 1, MAX_COUNT),
    integer("max_tokens", "older name of `max_completion_tokens`, which wins", 1, MAX_COUNT),
    flag("logprobs", "tell the log-probability of each token"),
    Param(
        "top_logprobs",
        _top_logprobs,
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "with `logprobs`: and of the most likely tokens there",
    ),
    Param(
        "thinking",
        _thinking,
        {"type": "object", "properties": {"type": {"enum": ["enabled", "disabled", "adaptive", None]}}},
        "accepted; the model always thinks",
    ),
    *(unused(name) for name in ("reasoning_effort", "verbosity", "prediction")),
    refused("best_of", (1,), "use `n`"),
    refused("functions", ([],), "declare them in `tools`, each as {'type': 'function', 'function': …}"),
    refused("function_call", ("auto", "none"), "use `tool_choice`"),
    refused("modalities", (["text"],), _TEXT_ONLY),
    refused("audio", (), _TEXT_ONLY),
    refused("add_generation_prompt", (True,), "leave the field out"),
    refused("echo", (False,), "leave the field out"),
)


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for. ``logprobs``: how many likely tokens to tell beside each one; None for none at all."""

    model: str | None
    messages: list[Any]
    tools: list[Any]
    tool_choice: Literal["auto", "none"]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    logprobs: int | None
    wishes: Wishes
    warnings: tuple[str, ...]


def read_chat_request(data: dict[str, object]) -> ChatRequest:
    """Checks a decoded body.

    Raises:
        RequestError: names the field, its value, and what is allowed.
    """
    fields = Fields(data)
    read = read_all(CHAT, fields)
    newer_limit = read["max_completion_tokens"]
    return ChatRequest(
        model=read["model"],
        messages=read["messages"],
        tools=read["tools"],
        tool_choice=read["tool_choice"],
        stream=read["stream"],
        include_usage=read["stream_options"].include_usage,
        max_tokens=read["max_tokens"] if newer_limit is None else newer_limit,
        logprobs=(read["top_logprobs"] or 0) if read["logprobs"] else None,
        wishes=wishes_of(read),
        warnings=warnings_of(fields, off=read["thinking"] or read["chat_template_kwargs"]),
    )


def wishes_of(read: dict[str, Any]) -> Wishes:
    """The sampling fields among all that were read."""
    return Wishes(**{param.name: read[param.name] for param in SAMPLING})


def warnings_of(fields: Fields, *, off: bool = False) -> tuple[str, ...]:
    """What was taken notice of and not obeyed. To be called when every known field has been read."""
    ignored = (IGNORED + name for name in fields.unknown())
    return (ALWAYS_THINKS, *ignored) if off else tuple(ignored)
