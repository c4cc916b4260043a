"""The network as training sees it: one differentiable function of a flat dictionary of parameters.

Written apart from ``perilune.model`` and checked equal to it. It has no cache and no absorbed form: whole rows, all
heads decompressed. Parameters are float32 under their checkpoint names, except that the routed experts of a layer are
stacked: ``….mlp.experts.gate_proj.weight`` [E, out, in]. Notation: B rows, T tokens of a row, N = B·T, h hidden.

Where the exported file will hold fewer bits, ``stored`` replaces weights by what the file will hold and lets gradients
pass as if it had not (straight-through estimator).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.config import ModelSpec, RopeSpec
from perilune.layout.names import EMBEDDING, FINAL_NORM, HEAD, expected_tensors
from training.batches import Batch

Params = dict[str, Tensor]

GROUP = 32


def parameter_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters, experts stacked."""
    for info in expected_tensors(spec):
        if info.kind != "expert":
            yield info.name, info.shape
        elif ".experts.0." in info.name:
            yield info.name.replace(".experts.0.", ".experts."), (spec.num_experts, *info.shape)


def is_expert(name: str) -> bool:
    """True for stacked routed experts: the parameters that become INT4."""
    return ".mlp.experts." in name


def is_bias(name: str) -> bool:
    """True for the router's correction bias: moved by the balancing rule, not by a gradient."""
    return name.endswith("e_score_correction_bias")


def initial(spec: ModelSpec, seed: int) -> Params:
    """Norms one, biases zero, matrices normal by the width of their input; those behind a nonlinearity smaller."""
    generator = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, shape in parameter_shapes(spec):
        if is_bias(name):
            params[name] = torch.zeros(shape)
        elif len(shape) == 1:
            params[name] = torch.ones(shape)
        else:
            deviation = 0.5 * shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= math.sqrt(2 * spec.num_layers)
            if name == EMBEDDING:
                deviation = 0.05
            params[name] = torch.randn(shape, generator=generator) * deviation
    return params


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in -7…7 (as float32) and scales (bf16 values) in groups of 32 inputs: ``perilune.quant.int4``'s rule."""
    groups = weight.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).bfloat16().clamp_min(torch.finfo(torch.bfloat16).tiny).float()
    return (groups / scale.unsqueeze(-1)).round().clamp(-7, 7), scale


def stored(params: Params) -> Params:
    """Every parameter as the exported file will hold it: experts INT4, the bias float32, all else bf16."""
    return {name: _straight_through(name, weight) for name, weight in params.items()}


def _straight_through(name: str, weight: Tensor) -> Tensor:
    if is_bias(name):
        return weight
    with torch.no_grad():
        if is_expert(name):
            codes, scale = quantised(weight)
            rounded = (codes * scale.unsqueeze(-1)).flatten(-2)
        else:
            rounded = weight.bfloat16().float()
    return rounded + (weight - weight.detach()) if weight.requires_grad else rounded


def logits(params: Params, spec: ModelSpec, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Logits [n, vocab] at ``batch.wanted``, and for every MoE layer how many tokens each expert got [E]."""
    same = batch.documents.unsqueeze(2) == batch.documents.unsqueeze(1)
    mask = same.tril().unsqueeze(1)  # [B, 1, T, T]
    rotary = rotary_table(spec.rope, int(batch.positions.max()) + 1)[batch.positions]
    x = F.embedding(batch.ids, params[EMBEDDING])  # [B, T, h]
    rotary = rotary.to(x.dtype)  # [B, T, P/2, 2]
    loads: list[Tensor] = []
    for layer in range(spec.num_layers):
        weights = _Prefixed(params, f"model.layers.{layer}.")
        normed = _norm(x, weights["input_layernorm.weight"], spec.rms_norm_eps)
        x = x + _attention(normed, weights, spec, rotary, mask)
        normed = _norm(x, weights["post_attention_layernorm.weight"], spec.rms_norm_eps)
        if spec.is_moe_layer(layer):
            mixed, load = _mixture(normed.flatten(0, 1), weights, spec)
            x = x + mixed.view_as(x) + _mlp(normed, weights, "mlp.shared_experts.")
            loads.append(load)
        else:
            x = x + _mlp(normed, weights, "mlp.")
    x = _norm(x.flatten(0, 1).index_select(0, batch.wanted), params[FINAL_NORM], spec.rms_norm_eps)
    return x @ params[HEAD].T, loads


class _Prefixed:
    """The parameters of one layer, by the ends of their names."""

    __slots__ = ("params", "prefix")

    def __init__(self, params: Params, prefix: str) -> None:
        self.params, self.prefix = params, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.params[self.prefix + name]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _mlp(x: Tensor, weights: _Prefixed, prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _attention(x: Tensor, weights: _Prefixed, spec: ModelSpec, rotary: Tensor, mask: Tensor) -> Tensor:
    """Latent attention, decompressed: keys and values of every head are formed from the latent."""
    nope, rope = spec.qk_nope_head_dim, spec.qk_rope_head_dim
    q_latent = _norm(
        x @ weights["self_attn.q_a_proj.weight"].T, weights["self_attn.q_a_layernorm.weight"], spec.latent_norm_eps
    )
    q = (q_latent @ weights["self_attn.q_b_proj.weight"].T).unflatten(-1, (spec.num_heads, -1))  # [B, T, H, N + P]
    latent, k_rope = (x @ weights["self_attn.kv_a_proj_with_mqa.weight"].T).split((spec.kv_lora_rank, rope), -1)
    latent = _norm(latent, weights["self_attn.kv_a_layernorm.weight"], spec.latent_norm_eps)
    kv = (latent @ weights["self_attn.kv_b_proj.weight"].T).unflatten(-1, (spec.num_heads, -1))
    k_nope, v = kv.split((nope, spec.v_head_dim), -1)
    q = torch.cat((q[..., :nope], _rotate(q[..., nope:], rotary)), -1)
    k_rope = _rotate(k_rope.unsqueeze(2), rotary).expand(-1, -1, spec.num_heads, -1)
    k = torch.cat((k_nope, k_rope), -1)
    heads = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=spec.softmax_scale
    )
    return heads.transpose(1, 2).flatten(-2) @ weights["self_attn.o_proj.weight"].T


def rotary_table(rope: RopeSpec, positions: int) -> Tensor:
    """cos and sin for every position and pair: float64 [positions, P/2, 2]; YaRN, arXiv 2309.00071."""
    pair = torch.arange(rope.dim // 2, dtype=torch.float64)
    frequency = rope.theta ** (-2 * pair / rope.dim)
    if rope.kind == "yarn":

        def pair_that_turns(times: float) -> float:
            return rope.dim * math.log(rope.original_max_position / (2 * math.pi * times)) / (2 * math.log(rope.theta))

        low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
        high = min(math.ceil(pair_that_turns(rope.beta_slow)), rope.dim - 1)
        stretched = ((pair - low) / (high - low if high > low else 0.001)).clamp(0, 1)
        frequency = frequency * (1 - stretched + stretched / rope.factor)
    angle = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequency
    return torch.stack((angle.cos(), angle.sin()), -1) * rope.cos_sin_scale


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotates neighbouring pairs of ``x`` [B, T, H, P]."""
    cos, sin = rotary.unsqueeze(2).unbind(-1)  # [B, T, 1, P/2]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def _mixture(x: Tensor, weights: _Prefixed, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Routed experts on ``x`` [N, h]: tokens sorted by expert, padded to the fullest, one product per projection."""
    experts, k = spec.num_experts, spec.top_k
    scores = torch.sigmoid(x @ weights["mlp.gate.weight"].T)  # [N, E]
    chosen = (scores.detach() + weights["mlp.gate.e_score_correction_bias"]).topk(k, -1).indices
    share = scores.gather(1, chosen)
    if spec.norm_topk_prob:
        share = share / (share.sum(-1, keepdim=True) + 1e-20)
    share = share * spec.routed_scaling_factor
    flat = chosen.flatten()
    load = torch.bincount(flat, minlength=experts)
    order = flat.argsort(stable=True)
    by_expert = flat[order]
    capacity = int(load.max())
    place = torch.arange(flat.numel()) - (load.cumsum(0) - load)[by_expert] + by_expert * capacity
    padded = x.new_zeros(experts * capacity, x.shape[1]).index_copy(0, place, x.index_select(0, order // k))
    padded = padded.view(experts, capacity, -1)
    gate, up, down = (weights[f"mlp.experts.{part}_proj.weight"].mT for part in ("gate", "up", "down"))
    out = (F.silu(padded.bmm(gate)) * padded.bmm(up)).bmm(down).flatten(0, 1)
    back = torch.empty_like(place).index_copy(0, order, place)  # where each (token, choice) landed
    return (out.index_select(0, back).view(-1, k, x.shape[1]) * share.unsqueeze(-1)).sum(1), load
