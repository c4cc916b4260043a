"""Token buckets and what a key's account refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.server.auth import KeyLimits
from perilune.server.replies import HttpError
from perilune.server.tenants import Tenant, TokenBucket


def test_a_bucket_fills_in_a_minute_and_lends() -> None:
    bucket = TokenBucket(600, now=0.0)
    assert bucket.level(100.0) == 600, "no more than a minute's worth"
    bucket.take(900, 100.0)
    assert bucket.level(100.0) == -300
    assert bucket.wait_s(1, 100.0) == pytest.approx(30.1)
    assert bucket.wait_s(1, 131.0) == 0
    assert bucket.wait_s(10_000, 131.0) == pytest.approx(59.0), "a prompt that never fits waits for a full bucket"
    assert bucket.wait_s(10_000, 200.0) == 0


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500)), max_size=40))
def test_over_time_no_more_than_the_rate_is_let_in(steps: list[tuple[float, int]]) -> None:
    """Requests that wait as they are told use at most the rate, a full bucket, and one overdraft."""
    bucket, now, used, largest = TokenBucket(1200, 0.0), 0.0, 0, 0
    for pause, tokens in steps:
        now += pause
        now += bucket.wait_s(tokens, now)
        bucket.take(tokens, now)
        used, largest = used + tokens, max(largest, tokens)
        assert used <= 1200 + now * 20 + largest + 1e-6


def test_refusals_say_when_to_come_back() -> None:
    tenant = Tenant("t", KeyLimits(concurrency=2, tokens_per_minute=60))
    tenant.enter(0.0)
    tenant.enter(0.0)
    with pytest.raises(HttpError, match="2 requests at once") as caught:
        tenant.enter(0.0)
    assert caught.value.status == 429
    assert caught.value.headers["retry-after"] == "1"
    tenant.leave(1.0)
    tenant.charge(60, 0.0)
    with pytest.raises(HttpError, match="60 tokens per minute") as caught:
        tenant.check_tokens(30, 0.0)
    assert caught.value.headers["retry-after"] == "30"
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "0"
    assert caught.value.headers["x-ratelimit-reset-tokens"] == "60s"
    with pytest.raises(HttpError, match="tokens per minute"):
        tenant.enter(0.5)
    tenant.check_tokens(30, 30.0)
    assert tenant.in_flight == 1, "those that were refused are not counted"


def test_new_limits_keep_what_was_used() -> None:
    tenant = Tenant("t", KeyLimits(tokens_per_minute=60))
    tenant.charge(60, 0.0)
    tenant.set_limits(KeyLimits(tokens_per_minute=60, concurrency=1))
    with pytest.raises(HttpError):
        tenant.check_tokens(10, 0.0)
    tenant.set_limits(KeyLimits(tokens_per_minute=600))
    tenant.check_tokens(10, 0.0)
    tenant.set_limits(KeyLimits())
    assert tenant.headers(0.0) == {}
