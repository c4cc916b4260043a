"""``LLM``: the engine in this process, for scripts and batches. The same scheduler and worker that serve HTTP.

    >>> from perilune.llm import LLM, SamplingParams
    >>> llm = LLM("path/to/model", max_model_len=4096)
    >>> llm.generate(["12+34 is"], SamplingParams(max_tokens=8))[0].text
    >>> answer = llm.chat([{"role": "user", "content": "What is 12+34?"}])
    >>> answer.reasoning, answer.content

Owns nothing but the joining of parts: chats are rendered and parsed by ``chat``, tokens come from ``engine``. Not for
use from several threads at once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.chat.messages import read_messages, read_tools
from perilune.chat.parse import CallDelta, CallStart, ContentDelta, OutputParser, ReasoningDelta
from perilune.chat.render import render
from perilune.engine.build import build_engine
from perilune.engine.options import EngineOptions
from perilune.errors import EngineError, RequestError
from perilune.types import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOut

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Generation:
    """What became of one prompt.

    Attributes:
        prompt_ids, ids: of the prompt and of the answer, stop ids excepted.
        text: of the answer; special tokens are not text.
        logprobs, prompt_logprobs: where they were asked for; those of the prompt begin with its second id.
    """

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0


@dataclass(slots=True)
class ToolCall:
    """A call that the model made. ``arguments`` is the model's own text, usually JSON."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """The answer to a chat."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]
    finish_reason: str
    generation: Generation


class LLM:
    """A model, loaded.

    Args:
        model: a directory in Hugging Face layout.
        options: fields of ``EngineOptions``.

    Raises:
        ModelError, CapacityError, UsageError: as ``build_engine``.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._engine = build_engine(Path(model), EngineOptions(**options))
        self.tokenizer = self._engine.tokenizer
        self.max_model_len = self._engine.config.max_model_len

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Continues every prompt (text or ids), all of them batched; in the order given.

        Args:
            sampling: for all prompts or one for each; None: the defaults, up to the end of the context.

        Raises:
            RequestError: a prompt that cannot be run; none is run then. EngineError: a request failed.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is one text, a list of them is needed", param="prompts", hint="put it in [ ]")
        encoded = [self._encode(prompt) for prompt in prompts]
        wishes = [sampling] * len(encoded) if sampling is None or isinstance(sampling, SamplingParams) else sampling
        if len(wishes) != len(encoded):
            raise RequestError(f"{len(wishes)} sampling params for {len(encoded)} prompts", param="sampling")
        requests = [self._request(ids, wish) for ids, wish in zip(encoded, wishes, strict=True)]
        found = {request.id: Generation(request.prompt) for request in requests}
        for out in self._run(requests):
            _collect(found[out.request_id], out)
        for generation in found.values():
            data = b"".join(self.tokenizer.token_bytes(token) for token in generation.ids)
            generation.text = data.decode("utf-8", "replace") + generation.text
        return list(found.values())

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[TokenOut]:
        """News of one prompt as the engine makes it. Leaving the loop ends the request.

        Raises:
            RequestError, EngineError: as ``generate``.
        """
        return self._run([self._request(self._encode(prompt), sampling)])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: SamplingParams | None = None,
    ) -> Answer:
        """Answers a conversation in the OpenAI form.

        Raises:
            RequestError: messages or tools break a rule. EngineError: the request failed.
        """
        declared = read_tools(list(tools))
        prompt = render(read_messages(list(messages)), declared, self.tokenizer)
        parser = OutputParser(self.tokenizer, declared, prompt.history_calls, prompt.starts_in_think)
        generation = Generation(prompt.ids)
        answer = Answer("", "", [], "", generation)
        for out in self._run([self._request(prompt.ids, sampling)]):
            _collect(generation, out)
            events = parser.feed(out.tokens) + parser.feed_tail(out.tail)
            if out.finish is not None:
                events += parser.finish(out.finish)
            for event in events:
                match event:
                    case ReasoningDelta(text):
                        answer.reasoning += text
                    case ContentDelta(text):
                        answer.content += text
                    case CallStart(_, call_id, name):
                        answer.tool_calls.append(ToolCall(call_id, name))
                    case CallDelta(index, arguments):
                        answer.tool_calls[index].arguments += arguments
        answer.finish_reason = parser.finish_reason
        return answer

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def _request(self, prompt: tuple[int, ...], sampling: SamplingParams | None) -> Request:
        room = max(self.max_model_len - len(prompt), 1)
        return Request(id=uuid.uuid4().hex, prompt=prompt, sampling=sampling or SamplingParams(max_tokens=room))

    def _run(self, requests: Sequence[Request]) -> Iterator[TokenOut]:
        """Runs requests to their ends; whatever ends the iteration earlier aborts those that are left."""
        left: set[str] = set()
        try:
            for request in requests:
                self._engine.add(request)
                left.add(request.id)
            while left:
                for out in self._engine.step():
                    if out.finish is not None:
                        left.discard(out.request_id)
                    if out.finish is FinishReason.ERROR:
                        raise EngineError(f"a request failed: {out.error}")
                    yield out
        finally:
            for request_id in left:
                self._engine.abort(request_id)


def _collect(generation: Generation, out: TokenOut) -> None:
    generation.ids += out.tokens
    generation.text += out.tail.decode("utf-8", "replace")
    generation.logprobs += out.logprobs
    generation.prompt_logprobs += out.prompt_logprobs
    generation.cached_tokens = max(generation.cached_tokens, out.cached_tokens)
    generation.finish_reason = out.finish
