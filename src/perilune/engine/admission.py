"""What the engine demands of a request. Torch-free: clients check before they send, the engine before it queues."""

from __future__ import annotations

from typing import Final

from perilune.errors import ContextLengthError, RequestError
from perilune.types import Request, SamplingParams

_RANGES: Final = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "repetition_penalty": (1e-3, 1e3),
    "top_k": (0, 1 << 31),
    "min_tokens": (0, 1 << 31),
}


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
    _check_numbers(request.sampling)
    if limit < 1:
        raise RequestError(f"max_tokens is {limit}, at least 1 is needed", param="max_tokens")
    if len(prompt) + limit > max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {limit}, together over the context of "
            f"{max_model_len}",
            hint="shorten the prompt or lower max_tokens",
        )


def _check_numbers(sampling: SamplingParams) -> None:
    """Values that arithmetic survives; what an API allows may be narrower."""
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:  # NaN too
            raise RequestError(f"{name} is {value}, a number from {low:g} to {high:g} is needed", param=name)
    if not all(abs(bias) <= 1e4 for _, bias in sampling.logit_bias):
        raise RequestError("logit_bias has a value beyond 10,000 or not a number", param="logit_bias")
