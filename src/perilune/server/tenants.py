"""What each key has used of its limits. One event loop; times are its clock's seconds.

A tenant is the name of a key; without keys there is one, nameless and without limits. Tokens per minute are a bucket:
it holds one minute's worth, fills steadily, and a request may start when the bucket has enough for its prompts (or is
full, for prompts larger than a minute's worth). Answers are charged as they grow and may overdraw it, so that no answer
is cut off; the debt delays what comes next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Final

from perilune.server.auth import KeyLimits
from perilune.server.replies import HttpError

_MINUTE_S: Final = 60.0
_SMOOTHING: Final = 0.2


class TokenBucket:
    """``per_minute`` tokens, refilled steadily."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = float(per_minute), now

    def level(self, now: float) -> float:
        """Tokens in it; negative: debt."""
        filled = self._level + max(now - self._at, 0.0) * self.per_minute / _MINUTE_S
        return min(filled, float(self.per_minute))

    def take(self, tokens: int, now: float) -> None:
        """Charges, into debt if need be."""
        self._level, self._at = self.level(now) - tokens, now

    def wait_s(self, tokens: int, now: float) -> float:
        """Seconds until ``tokens``, or a whole minute's worth if that is less, are in it; 0: now."""
        missing = min(tokens, self.per_minute) - self.level(now)
        return max(missing, 0.0) * _MINUTE_S / self.per_minute


class Tenant:
    """One key's use."""

    def __init__(self, name: str = "", limits: KeyLimits | None = None) -> None:
        self.name = name
        self.limits = limits or KeyLimits()
        self.in_flight = 0
        self.places = _places(self.limits)
        """For its sequences in the engine; None: no bound of its own."""
        self._bucket: TokenBucket | None = None
        self._mean_s = 1.0

    def set_limits(self, limits: KeyLimits) -> None:
        """New limits; what was used stays used, unless the limit on tokens has changed."""
        if limits.tokens_per_minute != self.limits.tokens_per_minute:
            self._bucket = None
        if limits.concurrency != self.limits.concurrency:
            self.places = _places(limits)  # those that run go back to the old ones
        self.limits = limits

    def enter(self, now: float) -> None:
        """One more request, before anything is known of it.

        Raises:
            HttpError: 429.
        """
        most = self.limits.concurrency
        if most is not None and self.in_flight >= most:
            raise self.too_many("requests", now)
        self.check_tokens(1, now)
        self.in_flight += 1

    def too_many(self, what: str, now: float) -> HttpError:
        """A 429: as many ``what`` as the key may have are there."""
        most = self.limits.concurrency or 1
        return self._refusal(f"this key may have {most} {what} at once", self._mean_s / most, now)

    def leave(self, seconds: float) -> None:
        """A request has ended after so long."""
        self.in_flight -= 1
        self._mean_s += _SMOOTHING * (seconds - self._mean_s)

    def check_tokens(self, tokens: int, now: float) -> None:
        """Whether prompts of ``tokens`` may run now.

        Raises:
            HttpError: 429.
        """
        bucket = self._tokens(now)
        if bucket is not None and (wait_s := bucket.wait_s(tokens, now)) > 0:
            raise self._refusal(f"this key may use {bucket.per_minute} tokens per minute", wait_s, now)

    def charge(self, tokens: int, now: float) -> TokenBucket | None:
        """Tokens of a prompt that runs, or of an answer. The bucket that they came from: a later one owes no refund."""
        bucket = self._tokens(now)
        if tokens and bucket is not None:
            bucket.take(tokens, now)
        return bucket

    def headers(self, now: float) -> Mapping[str, str]:
        """``x-ratelimit-…`` of the limits that there are."""
        found: dict[str, str] = {}
        if self.limits.concurrency is not None:
            found["x-ratelimit-limit-concurrent"] = str(self.limits.concurrency)
            found["x-ratelimit-remaining-concurrent"] = str(max(self.limits.concurrency - self.in_flight, 0))
        if (bucket := self._tokens(now)) is not None:
            found["x-ratelimit-limit-tokens"] = str(bucket.per_minute)
            found["x-ratelimit-remaining-tokens"] = str(max(math.floor(bucket.level(now)), 0))
            found["x-ratelimit-reset-tokens"] = f"{math.ceil(bucket.wait_s(bucket.per_minute, now))}s"
        return found

    def _tokens(self, now: float) -> TokenBucket | None:
        if self._bucket is None and self.limits.tokens_per_minute is not None:
            self._bucket = TokenBucket(self.limits.tokens_per_minute, now)
        return self._bucket

    def _refusal(self, message: str, wait_s: float, now: float) -> HttpError:
        retry = {"retry-after": str(retry_after(wait_s))}
        error = HttpError(429, message, code="rate_limit_exceeded", headers={**self.headers(now), **retry})
        error.type = "rate_limit_error"
        return error


def _places(limits: KeyLimits) -> asyncio.Semaphore | None:
    return None if limits.concurrency is None else asyncio.Semaphore(limits.concurrency)


def retry_after(seconds: float) -> int:
    """Whole seconds, at least one."""
    return max(math.ceil(seconds), 1)
