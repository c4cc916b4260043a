"""The bodies of ``POST /v1/completions``, ``/tokenize`` and ``/detokenize``, checked. As ``schema`` for chat."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from perilune.errors import RequestError
from perilune.server.fields import Fields
from perilune.server.params import MAX_COUNT, Param, flag, integer, read_all, refused, text, unused
from perilune.server.schema import CONVERSATION, LATER, MESSAGES, SHARED, warnings_of, wishes_of
from perilune.server.wishes import MAX_TOP_LOGPROBS, Wishes

DEFAULT_MAX_TOKENS: Final = 16

Prompt = str | list[int]


def _ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(fields: Fields) -> list[Prompt]:
    """One prompt or many, each as text or as ids."""
    value = fields.get("prompt")
    if isinstance(value, str) or (_ids(value) and value):
        prompts: list[Any] = [value]
    elif isinstance(value, list) and value and (all(isinstance(each, str) for each in value) or all(map(_ids, value))):
        prompts = value
    else:
        raise fields.fail(
            "prompt", "text, token ids, or an array of one of them is needed, not empty", code="invalid_type"
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            where = "" if prompts is not value else f"[{index}]"
            raise RequestError(f"`prompt{where}` is empty, at least one token is needed", param=f"prompt{where}")
    return prompts


def _text_or_messages(fields: Fields) -> str | None:
    if (fields.get("prompt") is None) == (fields.get("messages") is None):
        raise RequestError("either `prompt` or `messages` is needed, not both", param="prompt")
    return fields.string("prompt", 1 << 30)


def _optional_messages(fields: Fields) -> list[Any]:
    return [] if fields.get("messages") is None else MESSAGES.read(fields)


def _tokens(fields: Fields) -> list[int]:
    value = fields.get("tokens")
    if not _ids(value):
        raise fields.fail("tokens", "an array of token ids is needed", code="invalid_type")
    return value  # type: ignore[return-value]  # `_ids` has looked


def _limit(fields: Fields) -> int | None:
    value = fields.integer("max_tokens", 0, MAX_COUNT)
    if value == 0 and not fields.boolean("echo", False):
        raise fields.fail("max_tokens", "0 is only allowed with `echo` true")
    return value


_ID_ARRAY: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT: Final = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {**_ID_ARRAY, "minItems": 1},
        {"type": "array", "items": {**_ID_ARRAY, "minItems": 1}, "minItems": 1},
    ]
}

COMPLETION: Final[tuple[Param[Any], ...]] = (
    Param("prompt", _prompts, _PROMPT, "text, token ids, or an array of one of them", required=True),
    *SHARED,
    Param(
        "max_tokens",
        _limit,
        {"type": "integer", "minimum": 0, "maximum": MAX_COUNT, "default": DEFAULT_MAX_TOKENS},
        "0 only with `echo`",
    ),
    integer("logprobs", "log-probabilities of each token and of so many likely ones", 0, MAX_TOP_LOGPROBS),
    flag("echo", "repeat the prompt before the answer, with `logprobs` also its log-probabilities"),
    flag("return_tokens_as_token_ids", "name tokens token_id:{id} in `logprobs`"),
    unused("add_special_tokens"),
    refused("best_of", (1,), "use `n`"),
    refused("suffix", ("",), LATER),
)

TOKENIZE: Final[tuple[Param[Any], ...]] = (
    text("model", "one of the served names"),
    Param("prompt", _text_or_messages, {"type": "string"}, "text; what looks like a special token is text too"),
    Param("messages", _optional_messages, MESSAGES.schema, "or a conversation, as for chat completions"),
    *(param for param in CONVERSATION if param is not MESSAGES),
    flag("add_generation_prompt", "with `messages`: end where the answer begins", default=True),
    flag("return_token_strs", "the text of each token too"),
    unused("add_special_tokens"),
)

DETOKENIZE: Final[tuple[Param[Any], ...]] = (
    text("model", "one of the served names"),
    Param("tokens", _tokens, _ID_ARRAY, "ids; special tokens come back by name", required=True),
)


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for. ``max_tokens`` None: the default, or what the context has room for."""

    model: str | None
    prompts: list[Prompt]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    logprobs: int | None
    echo: bool
    name_ids: bool
    wishes: Wishes
    warnings: tuple[str, ...]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Text, or (None) a conversation, to be made ids."""

    model: str | None
    prompt: str | None
    messages: list[Any]
    tools: list[Any]
    add_generation_prompt: bool
    return_token_strs: bool
    warnings: tuple[str, ...]


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ids to be made text."""

    model: str | None
    tokens: list[int]
    warnings: tuple[str, ...]


def read_completion_request(data: dict[str, object]) -> CompletionRequest:
    """Checks a decoded body.

    Raises:
        RequestError: names the field, its value, and what is allowed.
    """
    fields = Fields(data)
    read = read_all(COMPLETION, fields)
    return CompletionRequest(
        model=read["model"],
        prompts=read["prompt"],
        stream=read["stream"],
        include_usage=read["stream_options"].include_usage,
        max_tokens=read["max_tokens"],
        logprobs=read["logprobs"],
        echo=read["echo"],
        name_ids=read["return_tokens_as_token_ids"],
        wishes=wishes_of(read),
        warnings=warnings_of(fields),
    )


def read_tokenize_request(data: dict[str, object]) -> TokenizeRequest:
    """Checks a decoded body.

    Raises:
        RequestError: names the field, its value, and what is allowed.
    """
    fields = Fields(data)
    read = read_all(TOKENIZE, fields)
    names = ("model", "prompt", "messages", "tools", "add_generation_prompt", "return_token_strs")
    return TokenizeRequest(**{name: read[name] for name in names}, warnings=warnings_of(fields))


def read_detokenize_request(data: dict[str, object]) -> DetokenizeRequest:
    """Checks a decoded body.

    Raises:
        RequestError: names the field, its value, and what is allowed.
    """
    fields = Fields(data)
    return DetokenizeRequest(**read_all(DETOKENIZE, fields), warnings=warnings_of(fields))
