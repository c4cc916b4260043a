"""Mixture of experts as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): routed experts plus one shared expert.

The correction bias takes part in choosing experts, never in weighing them; the routed scaling factor never touches the
shared expert.
"""

from __future__ import annotations

from torch import Tensor

from perilune.config import ModelSpec
from perilune.model.weights import MoEWeights
from perilune.ops import Ops, RouterSpec


def router_spec(spec: ModelSpec) -> RouterSpec:
    """The part of a model's configuration that its router needs."""
    return RouterSpec(
        top_k=spec.top_k,
        n_group=spec.n_group,
        topk_group=spec.topk_group,
        norm_topk_prob=spec.norm_topk_prob,
        scaling=spec.routed_scaling_factor,
    )


def mixture(x: Tensor, weights: MoEWeights, router: RouterSpec, ops: Ops) -> Tensor:
    """[T, h], already normed → [T, h], before the residual sum."""
    ids, expert_weights = ops.route(x, weights.router, weights.bias, router)
    routed = ops.moe(x, ids, expert_weights, weights.experts)
    return routed if weights.shared is None else routed + ops.gated_mlp(x, weights.shared)
