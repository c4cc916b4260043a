"""Sampling: what a parameter allows, and that a request's tokens depend on nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perilune.errors import EngineError
from perilune.sample.filters import min_p_mask, top_k_mask, top_p_mask
from perilune.sample.logprobs import token_logprobs
from perilune.sample.penalties import add_bias, penalise
from perilune.sample.sampler import History, unpack_mask
from perilune.sample.sampler import sample as sample_with
from perilune.types import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


NOTHING_SAID = History(prompt_len=0)


def sample(logits: Tensor, chosen: SamplingParams, seed: int, position: int, allowed: Tensor | None = None) -> int:
    return sample_with(logits, chosen, seed, position, NOTHING_SAID, allowed)


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def test_greedy_takes_the_highest_and_ties_go_to_the_lower_id() -> None:
    assert sample(LOGITS, params(temperature=0), 0, 0) == 1
    assert sample(torch.tensor([0.0, 5.0, 5.0]), params(temperature=0), 0, 0) == 1
    assert {sample(LOGITS, params(temperature=1e-320), seed, 0) for seed in range(20)} == {1}


def test_frequencies_follow_the_softmax() -> None:
    draws = torch.tensor([sample(LOGITS, params(), 9, position) for position in range(4000)])
    expected = LOGITS.softmax(-1)
    for token in range(4):
        share, p = (draws == token).float().mean().item(), expected[token].item()
        assert share == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / 4000))


def test_same_seed_and_position_same_token_and_seeds_differ() -> None:
    flat = torch.zeros(1000)
    first = [sample(flat, params(), 5, position) for position in range(20)]
    assert first == [sample(flat, params(), 5, position) for position in range(20)]
    assert first != [sample(flat, params(), 6, position) for position in range(20)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_an_error_and_never_token_zero(bad: float) -> None:
    """vllm#42426 (K81): token 0 is "!" in Kimi's vocabulary, users saw "!!!!!!"."""
    with pytest.raises(EngineError, match="not finite"):
        sample(torch.tensor([bad, 0.0]), params(temperature=0), 0, 0)


def test_banned_ids_never_come_out_and_banning_all_is_an_error() -> None:
    assert sample(LOGITS, params(temperature=0, banned_ids=(1,)), 0, 0) == 2
    assert LOGITS[1] == 3.0, "the caller's logits stay as they are"
    with pytest.raises(EngineError, match="no token is allowed"):
        sample(LOGITS, params(banned_ids=(0, 1, 2, 3)), 0, 0)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=40), st.integers(1, 45), st.floats(0.01, 1), st.floats(0, 1))
def test_filters_keep_the_best_token_and_no_more_than_they_say(
    values: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.tensor(values, dtype=torch.float64)
    best = logits == logits.max()
    for mask in (top_k_mask(logits, top_k), top_p_mask(logits, top_p), min_p_mask(logits, min_p)):
        assert (mask & best).any()
    assert int(top_k_mask(logits, top_k).sum()) == min(top_k, len(values))
    probabilities = logits.softmax(-1)
    kept = top_p_mask(logits, top_p)
    assert probabilities[kept].sum() >= top_p - 1e-9
    assert probabilities[kept].sum() - probabilities[kept].min() < top_p + 1e-9, "the last kept id was needed"


def test_a_grammar_mask_decides() -> None:
    mask = (0b1001).to_bytes(4, "little")
    allowed = unpack_mask(mask, 4)
    assert allowed.tolist() == [True, False, False, True]
    draws: set[int] = {sample(LOGITS, params(), 1, position, allowed) for position in range(50)}
    assert draws <= {0, 3}


def packed(allowed: Tensor) -> bytes:
    words = [0] * (-(-len(allowed) // 32))
    for index in allowed.nonzero().flatten().tolist():
        words[index // 32] |= 1 << index % 32
    return b"".join(word.to_bytes(4, "little") for word in words)


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_masks_unpack_to_what_was_packed(bits: list[bool]) -> None:
    assert unpack_mask(packed(torch.tensor(bits)), len(bits)).tolist() == bits


def test_stop_ids_do_not_come_before_min_tokens() -> None:
    wish = params(temperature=0, min_tokens=2, stop_token_ids=(1,))
    history = History(prompt_len=5)
    assert [sample_with(LOGITS, wish, 0, position, history) for position in (5, 6, 7)] == [2, 2, 1]


def test_bias_adds_up_and_leaves_the_callers_logits() -> None:
    biased = add_bias(LOGITS, ((3, 100.0), (3, 1.0), (0, -5.0)))
    assert biased.tolist() == [-4.0, 3.0, 2.0, 100.0]
    assert LOGITS[3] == -1.0
    assert sample(LOGITS, params(temperature=0, logit_bias=((1, -100.0),)), 0, 0) == 2


def test_penalties_against_their_formulas() -> None:
    wish = params(presence_penalty=0.5, frequency_penalty=0.25)
    assert penalise(LOGITS, wish, (0,), (1, 1, 3)).tolist() == [1.0, 3.0 - 0.5 - 0.5, 2.0, -1.0 - 0.5 - 0.25]
    wish = params(repetition_penalty=2.0)
    assert penalise(LOGITS, wish, (1, 1), (3,)).tolist() == [1.0, 1.5, 2.0, -2.0]
    assert penalise(LOGITS, wish, (), ()).tolist() == LOGITS.tolist()


def test_logprobs_are_of_the_raw_logits() -> None:
    expected = LOGITS.log_softmax(-1)
    found = token_logprobs(LOGITS, 0, 2)
    assert found.chosen == pytest.approx(expected[0].item())
    assert found.top_ids == (1, 2)
    assert found.top == pytest.approx(tuple(expected[[1, 2]].tolist()))
    assert token_logprobs(LOGITS, 0, 99).top_ids == (1, 2, 0, 3)
    assert token_logprobs(LOGITS, 0, 0).top_ids == ()
