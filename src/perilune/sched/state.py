"""One request on its way: what is computed, what was generated, when it ends. Torch-free.

Ends are decided here and only here: stop ids, stop strings, the token limit.
"""

from __future__ import annotations

from collections.abc import Collection

from perilune.kv.prefix import BlockChain
from perilune.text.stop import StopMatcher
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason, Request, TokenOut


class RequestState:
    """Mutable state of one request; the scheduler owns it.

    Attributes:
        arrival: place in the order of arrival.
        tokens: prompt and generated ids.
        planned: tokens whose latents are in the cache, or will be once the steps in flight have run.
        computed: tokens whose latents are in the cache for certain.
        chain: names of the blocks.
        pending: samples that steps in flight will add to ``tokens``.
        slot: the worker's slot, or -1 while waiting.
        blocks: cache blocks, in order of position; the first ``published`` of them can be hit by others.
        cached_tokens: prompt tokens that the prefix cache held at the first admission, or -1 before it.
    """

    def __init__(
        self, request: Request, seed: int, chain: BlockChain, tokenizer: Tokenizer, eos_ids: Collection[int]
    ) -> None:
        self.request = request
        self.seed = seed
        self.arrival = 0
        self.tokens = list(request.prompt)
        self.planned = self.computed = self.pending = 0
        self.slot = -1
        self.blocks: list[int] = []
        self.published = 0
        self.chain = chain
        self.cached_tokens = -1
        self.preemptions = 0
        self.finish: FinishReason | None = None
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self._stop_ids |= frozenset(eos_ids)
        self._matcher = StopMatcher(request.sampling.stop, tokenizer)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_known(self) -> int:
        """Tokens there are or will be once the steps in flight have run."""
        return len(self.tokens) + self.pending

    @property
    def max_length(self) -> int:
        """The longest that this request can become, prompt included."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    @property
    def ends_with_pending(self) -> bool:
        """The sample that is on its way will be the last: there is nothing more to run."""
        return self.pending > 0 and self.num_known >= self.max_length

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
        if len(self.tokens) >= self.max_length:
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
            cached_tokens=max(self.cached_tokens, 0),
            finish=self.finish,
            error=error,
        )
