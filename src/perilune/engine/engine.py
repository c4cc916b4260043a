"""The engine: requests in, tokens out, one step at a time.

Owns the scheduler and the worker, and the checks that a request must pass to be admitted. Knows token ids, not chats;
knows nothing of HTTP, threads or processes.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection

from perilune.config import EngineConfig
from perilune.engine.admission import check_request
from perilune.engine.options import EngineStats
from perilune.engine.worker import Worker
from perilune.kv.events import CacheEvent
from perilune.sched.scheduler import Scheduler
from perilune.sched.state import RequestState
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason, Request, StepResult, TokenOut

_STOP_MARKERS = ("<|im_end|>", "[EOS]", "[EOT]")


def eos_ids(tokenizer: Tokenizer, configured: Collection[int]) -> frozenset[int]:
    """Ids that end an answer: those of config.json and Kimi's three end markers, where the vocabulary has them."""
    markers = (tokenizer.specials[name] for name in _STOP_MARKERS if name in tokenizer.specials)
    return frozenset(configured) | frozenset(markers)


class Engine:
    """Runs requests on one worker."""

    def __init__(self, worker: Worker, config: EngineConfig, num_blocks: int, tokenizer: Tokenizer) -> None:
        self.worker = worker
        self.config = config
        self.tokenizer = tokenizer
        self.scheduler = Scheduler(config, num_blocks)
        self._results: deque[StepResult] = deque()
        self._eos_ids = eos_ids(tokenizer, worker.network.spec.eos_token_ids)

    @property
    def has_work(self) -> bool:
        """Something to plan or to commit."""
        return self.scheduler.num_running + self.scheduler.num_waiting + len(self._results) > 0

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: an empty prompt, an id outside the vocabulary, or more tokens than the context holds.
        """
        check_request(request, self.config.max_model_len, self.worker.network.spec.vocab_size)
        seed = request.sampling.seed
        seed = secrets.randbits(64) if seed is None else seed
        chain = self.scheduler.chain(request.cache_salt)
        self.scheduler.add(RequestState(request, seed, chain, self.tokenizer, self._eos_ids))

    def abort(self, request_id: str) -> TokenOut | None:
        """Ends a request; its cache is free for the next plan."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenOut]:
        """Fills the steps in flight, then commits the oldest. Empty when there was nothing certain to tell."""
        while len(self._results) < self.config.depth and (plan := self.scheduler.plan()) is not None:
            self._results.append(self.worker.run(plan))
        if not self._results:
            return []
        news = self.scheduler.commit(self._results.popleft())
        # Ids that are held back are no news; that a request has begun to run is: it has no completion tokens yet.
        return [
            out
            for out in news
            if out.tokens or out.tail or out.finish or out.prompt_logprobs or not out.completion_tokens
        ]

    def stats(self) -> EngineStats:
        """A snapshot, from any thread: each number is right, together they may be a step apart."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStats(
            step=scheduler.step,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.queue.num_tokens,
            total_blocks=pool.num_blocks - 1,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            preemptions=scheduler.stats.preemptions,
            prefix_queries=scheduler.stats.prefix_queries,
            prefix_hits=scheduler.stats.prefix_hits,
            generated_tokens=scheduler.stats.generated_tokens,
        )

    def take_events(self) -> list[CacheEvent]:
        """What the cache has stored and removed since the last call, where that is recorded."""
        return self.scheduler.pool.take_events()

    def end_all(self, error: str) -> list[TokenOut]:
        """Ends every request with an error: the last thing an engine does that can't go on."""
        return self.scheduler.end_all(FinishReason.ERROR, error)
