"""One request on its way: what is computed, what was generated, when it ends. Torch-free.

Ends are decided here and only here: stop ids, stop strings, the token limit.
"""

from __future__ import annotations

from collections.abc import Collection

from perilune.text.stop import StopMatcher
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason, Request, TokenOut


class RequestState:
    """Mutable state of one admitted request; the scheduler owns it.

    Attributes:
        tokens: prompt and generated ids.
        computed: tokens whose latents are in the cache, or will be once the planned step has run.
        slot: the worker's slot, or -1 while waiting.
        blocks: cache blocks, in order of position.
    """

    def __init__(self, request: Request, seed: int, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        self.request = request
        self.seed = seed
        self.tokens = list(request.prompt)
        self.computed = 0
        self.slot = -1
        self.blocks: tuple[int, ...] = ()
        self.finish: FinishReason | None = None
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self._stop_ids |= frozenset(eos_ids)
        self._matcher = StopMatcher(request.sampling.stop, tokenizer)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def max_tokens(self) -> int:
        """The longest that this request can become, prompt included."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    def append(self, token: int) -> TokenOut:
        """Takes a sampled id; returns what is now certain. Sets ``finish`` when it was the last one."""
        self.tokens.append(token)
        if token in self._stop_ids:
            self.finish = FinishReason.STOP
            return self._out(self._matcher.flush())
        step = self._matcher.feed((token,))
        if step.matched is not None:
            self.finish = FinishReason.STOP
            return self._out(step.tokens, step.tail)
        if self.num_generated >= self.request.sampling.max_tokens:
            self.finish = FinishReason.LENGTH
            return self._out(step.tokens + self._matcher.flush())
        return self._out(step.tokens)

    def end(self, reason: FinishReason, error: str = "") -> TokenOut:
        """Ends the request from outside."""
        self.finish = reason
        return self._out(self._matcher.flush(), error=error)

    def _out(self, tokens: tuple[int, ...], tail: bytes = b"", error: str = "") -> TokenOut:
        return TokenOut(
            request_id=self.request.id,
            tokens=tokens,
            tail=tail,
            completion_tokens=self.num_generated,
            finish=self.finish,
            error=error,
        )
