"""From the bytes of a request to what the engine runs and what its answer's writer must know. Blocking, pure.

Owns the order of checks (JSON, fields, model, messages, context). Everything that comes out is plain data: short
requests are prepared in a thread, long ones in a process of their own (``tokenpool``), by these same functions.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

from perilune.chat.markers import Marker
from perilune.chat.messages import Message, Tool, check_strict, read_messages, read_tools, unknown_fields
from perilune.chat.render import render
from perilune.errors import RequestError
from perilune.server.jsonbody import decode_object
from perilune.server.schema import ALWAYS_THINKS, IGNORED, ChatRequest, read_chat_request
from perilune.server.text_schema import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    Prompt,
    TokenizeRequest,
    read_completion_request,
    read_detokenize_request,
    read_tokenize_request,
)
from perilune.server.wishes import MAX_SEED, Facts, check_choices, check_ids, sampling, served_name
from perilune.text.tokenizer import NUM_SPECIALS, Tokenizer
from perilune.types import Request, SamplingParams

_CALL_MARKERS: Final = (Marker.SECTION, Marker.CALL)
_MAX_WARNINGS: Final = 8
_SEED_BITS: Final = 53  # every JSON reader keeps such an integer whole
_NOT_PRINTABLE: Final = re.compile(r"[^ -~]")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run, and how it is to be told.

    Attributes:
        prompts: each with its own sampling; every one is answered ``n`` times.
        seed: of the first choice.
        seeded: the client chose it: choice i of every prompt uses ``seed + i``, so a prompt's answers do not depend on
            what was sent with it. Otherwise every choice gets a seed of its own, ``seed`` plus its index.
        warning: for a header.
    """

    model: str
    stream: bool
    include_usage: bool
    prompts: tuple[tuple[int, ...], ...]
    sampling: tuple[SamplingParams, ...]
    n: int
    seed: int
    seeded: bool
    priority: int
    cache_salt: str
    warning: str

    def requests(self, request_id: str) -> list[Request]:
        """One for each choice, in the order of their indices."""
        found: list[Request] = []
        for prompt, wish in zip(self.prompts, self.sampling, strict=True):
            for choice in range(self.n):
                index = len(found)
                seed = (self.seed + (choice if self.seeded else index)) & MAX_SEED
                found.append(
                    Request(
                        id=f"{request_id}-{index}" if index else request_id,
                        prompt=prompt,
                        sampling=msgspec.structs.replace(wish, seed=seed),
                        priority=self.priority,
                        cache_salt=self.cache_salt,
                    )
                )
        return found


class ChatTask(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion. The rest is for the parser of its answers."""

    order: Order
    tools: tuple[Tool, ...]
    history_calls: int
    starts_in_think: bool
    calls_allowed: bool


class TextTask(msgspec.Struct, frozen=True, kw_only=True):
    """A plain completion. ``silent``: the one token that the engine makes is not told (``max_tokens`` 0)."""

    order: Order
    echo: bool
    silent: bool
    name_ids: bool


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to ``/detokenize``."""

    prompt: str


def known_ids(tokenizer: Tokenizer) -> int:
    """Ids below it have a meaning."""
    return tokenizer.num_ranks + NUM_SPECIALS


def prepare_chat(body: bytes, facts: Facts, tokenizer: Tokenizer) -> ChatTask:
    """Checks, renders and tokenises.

    Raises:
        RequestError: whatever is wrong with the request.
    """
    asked = read_chat_request(decode_object(body))
    model = served_name(asked.model, facts.names)
    check_choices(asked.wishes.n, 1, facts)
    messages, tools = read_messages(asked.messages), read_tools(asked.tools)
    asked = msgspec.structs.replace(asked, warnings=_with_nested(asked, facts))
    if facts.strict:
        _hold_to_the_letter(asked.warnings, messages, tools)
    rendered = render(messages, tools, tokenizer)
    # Without tools a call could only be noise: OpenAI's default is then "none" too.
    calls_allowed = bool(tools) and asked.tool_choice == "auto"
    banned = () if calls_allowed else _call_ids(tokenizer)
    params = sampling(asked.wishes, asked.max_tokens, len(rendered.ids), facts, "messages", banned)
    return ChatTask(
        order=_order(model, asked, (rendered.ids,), (msgspec.structs.replace(params, logprobs=asked.logprobs),)),
        tools=tools,
        history_calls=rendered.history_calls,
        starts_in_think=rendered.starts_in_think,
        calls_allowed=calls_allowed,
    )


def prepare_completion(body: bytes, facts: Facts, tokenizer: Tokenizer) -> TextTask:
    """Checks and tokenises.

    Raises:
        RequestError: whatever is wrong with the request.
    """
    asked = read_completion_request(decode_object(body))
    model = served_name(asked.model, facts.names)
    if len(asked.prompts) > facts.max_prompts:
        raise RequestError(
            f"`prompt` has {len(asked.prompts)} prompts, at most {facts.max_prompts} are allowed",
            param="prompt",
            hint="send them in several requests",
        )
    if facts.strict:
        _hold_to_the_letter(asked.warnings)
    check_choices(asked.wishes.n, len(asked.prompts), facts)
    prompts = tuple(_encoded(prompt, facts, tokenizer) for prompt in asked.prompts)
    total = sum(map(len, prompts))
    if len(prompts) > 1 and total > facts.max_prompt_tokens:
        raise RequestError(
            f"the prompts have {total} tokens together, at most {facts.max_prompt_tokens} are allowed in one request",
            param="prompt",
            hint="send them in several requests",
        )
    return TextTask(
        order=_order(model, asked, prompts, tuple(_text_sampling(asked, len(prompt), facts) for prompt in prompts)),
        echo=asked.echo,
        silent=asked.max_tokens == 0,
        name_ids=asked.name_ids,
    )


def tokenize(body: bytes, facts: Facts, tokenizer: Tokenizer) -> Tokenized:
    """Ids of text or of a conversation.

    Raises:
        RequestError: whatever is wrong with the request.
    """
    asked = read_tokenize_request(decode_object(body))
    if facts.strict:
        _hold_to_the_letter(asked.warnings)
    served_name(asked.model, facts.names)
    if asked.prompt is None:
        messages, tools = read_messages(asked.messages), read_tools(asked.tools)
        if facts.strict:
            _hold_to_the_letter(_with_nested(asked, facts), messages, tools)
        rendered = render(messages, tools, tokenizer, add_generation_prompt=asked.add_generation_prompt)
        ids = rendered.ids
    else:
        ids = tuple(tokenizer.encode(asked.prompt))
    return Tokenized(
        count=len(ids),
        max_model_len=facts.max_model_len,
        tokens=ids,
        token_strs=tuple(tokenizer.decode((token,)) for token in ids) if asked.return_token_strs else None,
    )


def detokenize(body: bytes, facts: Facts, tokenizer: Tokenizer) -> Detokenized:
    """Text of ids; special tokens by name.

    Raises:
        RequestError: whatever is wrong with the request.
    """
    asked = read_detokenize_request(decode_object(body))
    if facts.strict:
        _hold_to_the_letter(asked.warnings)
    served_name(asked.model, facts.names)
    check_ids("tokens", asked.tokens, facts.known_ids)
    return Detokenized(prompt=tokenizer.decode(asked.tokens))


def _order(
    model: str,
    asked: ChatRequest | CompletionRequest,
    prompts: tuple[tuple[int, ...], ...],
    wanted: tuple[SamplingParams, ...],
) -> Order:
    wishes = asked.wishes
    return Order(
        model=model,
        stream=asked.stream,
        include_usage=asked.include_usage,
        prompts=prompts,
        sampling=wanted,
        n=wishes.n,
        seed=secrets.randbits(_SEED_BITS) if wishes.seed is None else wishes.seed,
        seeded=wishes.seed is not None,
        priority=wishes.priority,
        cache_salt=wishes.cache_salt,
        warning=_header_text(asked.warnings),
    )


def _encoded(prompt: Prompt, facts: Facts, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    check_ids("prompt", prompt, facts.known_ids)
    return tuple(prompt)


def _text_sampling(asked: CompletionRequest, prompt_len: int, facts: Facts) -> SamplingParams:
    limit = asked.max_tokens
    if limit is None:
        limit = max(min(DEFAULT_MAX_TOKENS, facts.max_model_len - prompt_len), 1)
    params = sampling(asked.wishes, max(limit, 1), prompt_len, facts, "prompt")
    prompt_logprobs = asked.logprobs if asked.echo else None
    return msgspec.structs.replace(params, logprobs=asked.logprobs, prompt_logprobs=prompt_logprobs)


def _call_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Without these ids no tool call can begin."""
    return tuple(tokenizer.specials[name] for name in _CALL_MARKERS if name in tokenizer.specials)


def _with_nested(asked: ChatRequest | TokenizeRequest, facts: Facts) -> tuple[str, ...]:
    """Warnings, of unknown fields in messages too. Those in tools are refused, or else shown to the model."""
    unknown = unknown_fields(asked.messages, asked.tools if facts.strict else ())
    return (*asked.warnings, *(IGNORED + path for path in unknown))


def _hold_to_the_letter(warnings: Sequence[str], messages: Sequence[Message] = (), tools: Sequence[Tool] = ()) -> None:
    """Refuses what is taken with a warning otherwise, and what Moonshot's own service refuses.

    Raises:
        RequestError: names a field.
    """
    if ALWAYS_THINKS in warnings:
        raise RequestError("thinking is switched off, this model always thinks", param="thinking")
    if warnings:
        name = warnings[0].removeprefix(IGNORED)
        raise RequestError(f"there is no field `{name[:80]}`", param=name[:80], code="unknown_field")
    check_strict(messages, tools)


def _header_text(warnings: Sequence[str]) -> str:
    """Warnings as a header value: printable ASCII, bounded. They quote names that a client chose."""
    shown = [_NOT_PRINTABLE.sub("?", warning)[:80] for warning in warnings[:_MAX_WARNINGS]]
    if len(warnings) > _MAX_WARNINGS:
        shown.append(f"and {len(warnings) - _MAX_WARNINGS} more")
    return "; ".join(shown)
