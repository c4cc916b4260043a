"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``, in vLLM's shapes.

Text never becomes a special token here, as nowhere in this server: a conversation (``messages``) gets its markers from
the chat format. The information has no chat template: the format is code, not a template; send ``messages``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perilune.server.exchange import EventStream, unless_gone
from perilune.server.generation import Services
from perilune.server.limits import read_json_body
from perilune.server.prepare import known_ids
from perilune.server.replies import json_response
from perilune.server.tokenjobs import Job

T = TypeVar("T")


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``/tokenizer_info``. Names of special tokens are null where the vocabulary has none such."""

    tokenizer_class: str = "TikTokenTokenizer"
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    added_tokens: dict[str, int]
    chat_template: None = None


@dataclass(frozen=True, slots=True)
class JobEndpoint(Generic[T]):
    """An endpoint that answers with a job's result, as an ASGI application."""

    services: Services
    job: Job[T]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self.services.state
        limits = state.limits
        with state.admit(scope) as engine, state.bodies.body() as body, state.answers.answer() as answer:
            await read_json_body(scope, receive, limits, body)

            async def reply() -> None:
                facts = self.services.facts(engine)
                await self.services.pool.pass_on(self.job, body, facts, engine.tokenizer, answer)
                stream = EventStream(send, limits.send_timeout_s)
                try:
                    await stream.pass_on(answer, limits.request_timeout_s)
                finally:
                    stream.close()

            await unless_gone(reply(), receive)


@dataclass(frozen=True, slots=True)
class TokenizerEndpoint:
    """``/tokenizer_info``."""

    services: Services

    async def __call__(self, _: Request) -> Response:
        engine = self.services.state.engine
        specials = engine.tokenizer.specials
        names = {token: name for name, token in specials.items()}
        ends = [names[token] for token in engine.spec.eos_token_ids if token in names]

        def named(name: str) -> str | None:
            return name if name in specials else None

        info = TokenizerInfo(
            vocab_size=known_ids(engine.tokenizer),
            model_max_length=engine.max_model_len,
            bos_token=named("[BOS]"),
            eos_token=ends[0] if ends else named("[EOS]"),
            pad_token=named("[PAD]"),
            unk_token=named("[UNK]"),
            added_tokens=dict(specials),
        )
        return json_response(info)
