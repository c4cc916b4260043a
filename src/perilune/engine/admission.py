"""What the engine demands of a request. Torch-free: clients check before they send, the engine before it queues."""

from __future__ import annotations

from perilune.errors import ContextLengthError, RequestError
from perilune.types import Request


def check_request(request: Request, max_model_len: int, vocab_size: int) -> None:
    """Refuses what can't be run.

    Raises:
        RequestError: an empty prompt, an id outside the vocabulary, or more tokens than the context holds.
    """
    prompt, limit = request.prompt, request.sampling.max_tokens
    if not prompt:
        raise RequestError("the prompt is empty, at least one token is needed", param="prompt")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise RequestError(f"token ids run from 0 to {vocab_size - 1}, the prompt has {min(prompt)} … {max(prompt)}")
    ids = {
        "stop_token_ids": request.sampling.stop_token_ids,
        "banned_ids": request.sampling.banned_ids,
        "logit_bias": tuple(token for token, _ in request.sampling.logit_bias),
    }
    for name, tokens in ids.items():
        for token in tokens:
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
