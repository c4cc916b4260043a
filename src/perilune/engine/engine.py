"""The engine: requests in, tokens out, one step at a time.

Owns the scheduler and the worker, and the checks that a request must pass to be admitted. Knows token ids, not chats;
knows nothing of HTTP, threads or processes.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection

from perilune.config import EngineConfig
from perilune.engine.worker import Worker
from perilune.errors import ContextLengthError, RequestError
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
        return [out for out in news if out.tokens or out.tail or out.finish or out.prompt_logprobs]

    def end_all(self, error: str) -> list[TokenOut]:
        """Ends every request with an error: the last thing an engine does that can't go on."""
        return self.scheduler.end_all(FinishReason.ERROR, error)


def check_request(request: Request, max_model_len: int, vocab_size: int) -> None:
    """What the engine demands of a request, callable before it is sent.

    Raises:
        RequestError: see ``Engine.add``.
    """
    prompt, limit = request.prompt, request.sampling.max_tokens
    if not prompt:
        raise RequestError("the prompt is empty, at least one token is needed", param="prompt")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise RequestError(f"token ids run from 0 to {vocab_size - 1}, the prompt has {min(prompt)} … {max(prompt)}")
    for name in ("stop_token_ids", "banned_ids"):
        for token in getattr(request.sampling, name):
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} has {token}, token ids run from 0 to {vocab_size - 1}", param=name)
    if limit < 1:
        raise RequestError(f"max_tokens is {limit}, at least 1 is needed", param="max_tokens")
    if len(prompt) + limit > max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {limit}, together over the context of "
            f"{max_model_len}",
            hint="shorten the prompt or lower max_tokens",
        )
