"""From the bytes of a request to what the engine runs, and the parser that reads its answer. Blocking, pure.

Owns the order of checks (JSON, fields, model, messages, context) and the translation of a client's wishes into
``SamplingParams``: defaults, limits against the context, tokens that must not come out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from perilune.chat.markers import Marker
from perilune.chat.messages import read_messages, read_tools
from perilune.chat.parse import Event, OutputParser
from perilune.chat.render import render
from perilune.errors import ContextLengthError, RequestError
from perilune.server.jsonbody import decode_object
from perilune.server.schema import ChatRequest, read_chat_request
from perilune.server.state import Engine, SamplingDefaults, ServerState
from perilune.server.wire import Finish, Usage, usage
from perilune.text.tokenizer import Tokenizer
from perilune.types import Request, SamplingParams, TokenOut

_CALL_MARKERS: Final = (Marker.SECTION, Marker.CALL)
_MAX_WARNINGS: Final = 8
_NOT_PRINTABLE: Final = re.compile(r"[^ -~]")


@dataclass(slots=True)
class Prepared:
    """A request that may run, and what has been learnt of its answer so far."""

    request: Request
    parser: OutputParser
    model: str
    stream: bool
    include_usage: bool
    warning: str
    completion_tokens: int = 0

    @property
    def response_id(self) -> str:
        return f"chatcmpl-{self.request.id}"

    @property
    def finish_reason(self) -> Finish:
        return self.parser.finish_reason

    @property
    def usage(self) -> Usage:
        # No prefix is cached yet: every prompt runs from its first token.
        return usage(len(self.request.prompt), self.completion_tokens, self.parser.reasoning_tokens, 0)

    def events(self, out: TokenOut) -> list[Event]:
        """What one message of the engine adds to the answer."""
        self.completion_tokens = out.completion_tokens
        events = self.parser.feed(out.tokens)
        if out.tail:
            events += self.parser.feed_tail(out.tail)
        if out.finish is not None:
            events += self.parser.finish(out.finish)
        return events


def prepare(body: bytes, engine: Engine, state: ServerState, request_id: str) -> Prepared:
    """Checks, renders and tokenises.

    Raises:
        RequestError: whatever is wrong with the request.
    """
    asked = read_chat_request(decode_object(body))
    model = state.served_name(asked.model)
    tools = read_tools(asked.tools)
    rendered = render(read_messages(asked.messages), tools, engine.tokenizer)
    # Without tools a call could only be noise: OpenAI's default is then "none" too.
    calls_allowed = bool(tools) and asked.tool_choice == "auto"
    sampling = _sampling(asked, state.defaults, engine, len(rendered.ids))
    if not calls_allowed:
        sampling = msgspec.structs.replace(sampling, banned_ids=_call_ids(engine.tokenizer))
    return Prepared(
        request=Request(id=request_id, prompt=rendered.ids, sampling=sampling, cache_salt=asked.cache_salt),
        parser=OutputParser(
            engine.tokenizer, tools, rendered.history_calls, rendered.starts_in_think, allow_calls=calls_allowed
        ),
        model=model,
        stream=asked.stream,
        include_usage=asked.include_usage,
        warning=_header_text(asked.warnings),
    )


def _sampling(asked: ChatRequest, defaults: SamplingDefaults, engine: Engine, prompt_len: int) -> SamplingParams:
    vocab_size = engine.spec.vocab_size
    for token in asked.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"`stop_token_ids` has {token}, ids from 0 to {vocab_size - 1} are known", param="stop_token_ids"
            )
    return SamplingParams(
        max_tokens=_max_tokens(asked.max_tokens, prompt_len, engine.max_model_len),
        temperature=defaults.temperature if asked.temperature is None else asked.temperature,
        top_p=defaults.top_p if asked.top_p is None else asked.top_p,
        top_k=asked.top_k or 0,
        min_p=asked.min_p or 0.0,
        seed=asked.seed,
        stop=asked.stop,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
    )


def _max_tokens(asked: int | None, prompt_len: int, context: int) -> int:
    """What was asked for, else the rest of the context.

    Raises:
        ContextLengthError: there is not enough room.
    """
    room = context - prompt_len
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens, the context (max_model_len) holds {context} with the answer",
            hint="shorten the messages",
        )
    if asked is not None and asked > room:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens and max_tokens is {asked}: together {prompt_len + asked}, "
            f"the context (max_model_len) holds {context}",
            param="max_tokens",
            hint=f"ask for at most {room} tokens, or leave max_tokens out",
        )
    return room if asked is None else asked


def _call_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Without these ids no tool call can begin."""
    return tuple(tokenizer.specials[name] for name in _CALL_MARKERS if name in tokenizer.specials)


def _header_text(warnings: Sequence[str]) -> str:
    """Warnings as a header value: printable ASCII, bounded. They quote names that a client chose."""
    shown = [_NOT_PRINTABLE.sub("?", warning)[:80] for warning in warnings[:_MAX_WARNINGS]]
    if len(warnings) > _MAX_WARNINGS:
        shown.append(f"and {len(warnings) - _MAX_WARNINGS} more")
    return "; ".join(shown)
