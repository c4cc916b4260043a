"""The router, on cases that other engines got wrong."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from perilune.ops import RouterSpec
from perilune.ops.ref import RefOps

OPS = RefOps()


def logit(score: float) -> float:
    return math.log(score / (1 - score))


def route(logits: list[float], bias: list[float], spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """One token whose router logits are exactly ``logits``: x is one, the router's only column holds them."""
    router = torch.tensor(logits, dtype=torch.float64).unsqueeze(-1)
    return OPS.route(torch.ones(1, 1, dtype=torch.float64), router, torch.tensor(bias, dtype=torch.float64), spec)


def test_weights_come_from_unbiased_scores() -> None:
    """vllm#12002, transformers#41647."""
    spec = RouterSpec(top_k=2, n_group=1, topk_group=1, norm_topk_prob=True, scaling=2.827)
    ids, weights = route([logit(s) for s in (0.9, 0.8, 0.1, 0.2)], [-1, 0, 0.5, 0.5], spec)
    by_id = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert by_id == pytest.approx({1: 0.8 * 2.827, 3: 0.2 * 2.827})


def test_group_score_is_the_sum_of_its_best_two_and_masked_groups_never_win() -> None:
    """vllm#13474: biased scores below zero; a mask of 0 would pick from the masked group."""
    biased = [-0.3, -0.2, -0.5, -0.6, -0.9, -0.1, -0.8, -0.7]
    spec = RouterSpec(top_k=2, n_group=2, topk_group=1, norm_topk_prob=True, scaling=1.0)
    ids, _ = route([0.0] * 8, [b - 0.5 for b in biased], spec)  # sigmoid(0) = 0.5
    assert ids[0].tolist() == [1, 0]


def test_weights_survive_a_bias_that_swamps_them() -> None:
    """flashinfer#3875: (score - bias) would cancel to 0 / 0 in float32."""
    spec = RouterSpec(top_k=2, n_group=1, topk_group=1, norm_topk_prob=True, scaling=1.0)
    router = torch.tensor([[-18.0], [-17.0]])
    ids, weights = OPS.route(torch.ones(1, 1), router, torch.tensor([12.0, 12.0]), spec)
    by_id = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert by_id == pytest.approx({0: 0.268941, 1: 0.731059}, rel=1e-4)


@pytest.mark.parametrize("experts", [6, 24, 384])
@pytest.mark.parametrize("tokens", [1, 3])
def test_any_number_of_experts_and_ties_by_lower_id(experts: int, tokens: int) -> None:
    """sglang#8007, sglang#13374: kernels hard-wired for 256 experts or powers of two."""
    spec = RouterSpec(top_k=4, n_group=1, topk_group=1, norm_topk_prob=True, scaling=2.827)
    ids, weights = OPS.route(torch.zeros(tokens, 8), torch.ones(experts, 8), torch.zeros(experts), spec)
    assert ids.tolist() == [[0, 1, 2, 3]] * tokens
    assert torch.allclose(weights, torch.full((tokens, 4), 2.827 / 4))


def test_scores_are_computed_in_the_routers_dtype() -> None:
    """sgl-project/sglang#33764: a bf16 router changes the chosen experts."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    router = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))
    spec = RouterSpec(top_k=3, n_group=1, topk_group=1, norm_topk_prob=False, scaling=1.0)
    ids, weights = OPS.route(x, router, torch.zeros(12), spec)
    expected = (x.float() @ router.T).sigmoid()
    assert weights.dtype == torch.float32
    assert torch.equal(weights, expected.gather(-1, ids))
