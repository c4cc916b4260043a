"""One request on its way: what is computed, what was generated, when it ends. Torch-free.

Ends are decided here and only here: stop ids, stop strings, the token limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from perilune.kv.prefix import BlockChain
from perilune.text.stop import StopMatcher, StopStep
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason, Request, TokenLogprobs, TokenOut


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
        stop_ids: ids that end it, the model's end markers among them unless they are ignored.
        begun: its client knows that it has begun to run.
        scores_told: prompt logprobs that the client has.
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
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self.stop_ids |= frozenset(eos_ids)
        self.begun = False
        self.scores_told = 0
        self._held_logprobs: deque[TokenLogprobs] = deque()
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

    def append(self, token: int, logprobs: TokenLogprobs | None = None) -> TokenOut:
        """Takes a sampled id; returns what is now certain. Sets ``finish`` when it was the last one."""
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish = FinishReason.STOP
            return self._out(self._matcher.flush())
        if logprobs is not None:
            self._held_logprobs.append(logprobs)
        early = self.num_generated <= self.request.sampling.min_tokens
        step = StopStep((token,)) if early else self._matcher.feed((token,))
        if step.matched is not None:
            self.finish = FinishReason.STOP
            return self._out(step.tokens, step.tail)
        if len(self.tokens) >= self.max_length:
            self.finish = FinishReason.LENGTH
            return self._out(step.tokens + self._matcher.flush())
        return self._out(step.tokens)

    def begin(self) -> TokenOut:
        """News of a long prompt's first step: nothing but that it runs."""
        self.begun = True
        return self._out(())

    def end(self, reason: FinishReason, error: str = "") -> TokenOut:
        """Ends the request from outside."""
        self.finish = reason
        return self._out(self._matcher.flush(), error=error)

    def scores(self, first: int, scores: Sequence[TokenLogprobs]) -> TokenOut | None:
        """Takes prompt logprobs behind position ``first`` on; what a preemption makes anew is told only once."""
        news = tuple(scores[max(self.scores_told - first, 0) :])
        self.scores_told += len(news)
        return TokenOut(request_id=self.request.id, prompt_logprobs=news) if news else None

    def _out(self, tokens: tuple[int, ...], tail: bytes = b"", error: str = "") -> TokenOut:
        logprobs = tuple(self._held_logprobs.popleft() for _ in tokens) if self._held_logprobs else ()
        return TokenOut(
            request_id=self.request.id,
            tokens=tokens,
            logprobs=logprobs,
            tail=tail,
            completion_tokens=self.num_generated,
            cached_tokens=max(self.cached_tokens, 0),
            finish=self.finish,
            error=error,
        )
