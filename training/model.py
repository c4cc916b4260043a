"""The network as training sees it: one differentiable function of a flat dictionary of parameters.

Written apart from ``perilune.model`` and checked equal to it. It has no cache and no absorbed form: whole documents,
all heads decompressed. Parameters are float32 under their checkpoint names, except that a layer's routed experts are
stacked: ``….mlp.experts.gate_proj.weight`` [E, out, in]. Notation: N tokens, h hidden, H heads.

The documents of a batch lie one behind the other, so that no product is spent on padding; only attention pads, among
documents of similar length. Matrices given in bfloat16 are multiplied so, which the tile units of a CPU do four times
as fast; the residual stream, norms' statistics, routing and the head stay in the parameters' own type.

Where the exported file will hold fewer bits, training takes the gradient at what the file will hold (``stored``) and
applies it to the parameter itself (straight-through estimator).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.config import ModelSpec, RopeSpec
from perilune.layout.names import EMBEDDING, FINAL_NORM, HEAD, expected_tensors
from training.batches import Batch
from training.gather import pick, spread

Params = dict[str, Tensor]

GROUP = 32
SHORT = 1024
"""Documents up to this length attend by scores that are written down."""
SIMILAR = 0.8
"""Documents attend side by side if none is shorter than this share of the longest."""


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


@torch.no_grad()
def stored(params: Params) -> Params:
    """Every parameter as the exported file will hold it: experts INT4, the bias float32, all else bf16; in float32."""
    return {name: _rounded(name, weight) for name, weight in params.items()}


def _rounded(name: str, weight: Tensor) -> Tensor:
    if is_bias(name):
        return weight
    if is_expert(name):
        codes, scale = quantised(weight)
        return (codes * scale.unsqueeze(-1)).flatten(-2)
    return weight.bfloat16().float()


def halved(params: Params) -> Params:
    """The matrices between the embedding and the head in bfloat16, for faster products."""
    kept = (EMBEDDING, HEAD)
    return {
        name: weight if weight.dim() == 1 or name in kept or name.endswith("mlp.gate.weight") else weight.bfloat16()
        for name, weight in params.items()
    }


def logits(params: Params, spec: ModelSpec, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Logits [n, vocab] at ``batch.wanted``, and for every MoE layer how many tokens each expert got [E]."""
    groups = similar(batch.lengths)
    x = F.embedding(batch.ids, params[EMBEDDING])  # [N, h]
    rotary = rotary_table(spec.rope, max(batch.lengths))[batch.positions].to(x.dtype)  # [N, P/2, 2]
    loads: list[Tensor] = []
    for layer in range(spec.num_layers):
        weights = Prefixed(params, f"model.layers.{layer}.")
        normed = _norm(x, weights["input_layernorm.weight"], spec.rms_norm_eps)
        x = x + _attention(normed, weights, spec, rotary, groups)
        normed = _norm(x, weights["post_attention_layernorm.weight"], spec.rms_norm_eps)
        if spec.is_moe_layer(layer):
            mixed, load = mixture(normed, weights, spec)
            x = x + mixed + _mlp(normed, weights, "mlp.shared_experts.")
            loads.append(load)
        else:
            x = x + _mlp(normed, weights, "mlp.")
    x = _norm(x.index_select(0, batch.wanted), params[FINAL_NORM], spec.rms_norm_eps)
    return x @ params[HEAD].T, loads


@dataclass(frozen=True, slots=True)
class Groups:
    """Documents of similar length side by side, for attention.

    Attributes:
        shapes: documents and longest length of each group.
        tokens: for all places of all groups, the token there; padding has any.
        places: for all tokens, their place.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: Tensor
    places: Tensor


def similar(lengths: Sequence[int]) -> Groups:
    """Groups documents of these lengths."""
    starts = [0, *accumulate(lengths)]
    groups: list[list[int]] = []
    for doc in sorted(range(len(lengths)), key=lambda doc: (-lengths[doc], doc)):
        if groups and lengths[doc] >= SIMILAR * lengths[groups[-1][0]]:
            groups[-1].append(doc)
        else:
            groups.append([doc])
    return _places(groups, starts)


def _places(groups: Sequence[Sequence[int]], starts: Sequence[int]) -> Groups:
    tokens = []
    for group in groups:
        first = torch.tensor([starts[doc] for doc in group]).unsqueeze(1)
        end = torch.tensor([starts[doc + 1] for doc in group]).unsqueeze(1)
        where = first + torch.arange(int(end[0] - first[0]))
        tokens.append(torch.where(where < end, where, -1))
    index = torch.cat([token.flatten() for token in tokens])
    real = (index >= 0).nonzero().squeeze(1)
    places = torch.empty(starts[-1], dtype=torch.int64).index_copy(0, index[real], real)
    return Groups(tuple((token.shape[0], token.shape[1]) for token in tokens), index.clamp_min(0), places)


class Prefixed:
    """The parameters of one layer, by the ends of their names."""

    __slots__ = ("params", "prefix")

    def __init__(self, params: Params, prefix: str) -> None:
        self.params, self.prefix = params, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self.params[self.prefix + name]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _mlp(x: Tensor, weights: Prefixed, prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
    x = x.to(gate.dtype)
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _attention(x: Tensor, weights: Prefixed, spec: ModelSpec, rotary: Tensor, groups: Groups) -> Tensor:
    """Latent attention, decompressed: keys and values of every head are formed from the latent."""
    nope, rope = spec.qk_nope_head_dim, spec.qk_rope_head_dim
    x = x.to(weights["self_attn.q_a_proj.weight"].dtype)
    rotary = rotary.to(x.dtype)
    q_latent = _norm(
        x @ weights["self_attn.q_a_proj.weight"].T, weights["self_attn.q_a_layernorm.weight"], spec.latent_norm_eps
    )
    q = (q_latent @ weights["self_attn.q_b_proj.weight"].T).unflatten(-1, (spec.num_heads, -1))  # [N, H, nope + P]
    latent, k_rope = (x @ weights["self_attn.kv_a_proj_with_mqa.weight"].T).split((spec.kv_lora_rank, rope), -1)
    latent = _norm(latent, weights["self_attn.kv_a_layernorm.weight"], spec.latent_norm_eps)
    kv = (latent @ weights["self_attn.kv_b_proj.weight"].T).unflatten(-1, (spec.num_heads, -1))
    k_nope, v = kv.split((nope, spec.v_head_dim), -1)
    q = torch.cat((q[..., :nope], _rotate(q[..., nope:], rotary)), -1)
    k_rope = _rotate(k_rope.unsqueeze(1), rotary).expand(-1, spec.num_heads, -1)
    k = torch.cat((k_nope, k_rope), -1)
    heads = attend(q, k, v, groups, spec.softmax_scale)
    return heads.flatten(-2) @ weights["self_attn.o_proj.weight"].T


def attend(q: Tensor, k: Tensor, v: Tensor, groups: Groups, scale: float) -> Tensor:
    """Causal attention inside every document: q, k [N, H, K], v [N, H, V] to [N, H, V].

    Padding lies behind its document, where causal attention does not see it.
    """
    width, size = q.shape[-1], v.shape[-1]
    joined = spread(torch.cat((q, k, v), -1).flatten(1), groups.tokens, groups.places.unsqueeze(1))
    outs, start = [], 0
    for docs, length in groups.shapes:
        rows = joined[start : start + docs * length].view(docs, length, -1, 2 * width + size).transpose(1, 2)
        inside = _by_scores if length <= SHORT else _by_blocks
        q_rows, k_rows, v_rows = rows.split((width, width, size), -1)
        out = inside(q_rows, k_rows, v_rows, scale)
        outs.append(out.transpose(1, 2).reshape(docs * length, -1))
        start += docs * length
    heads: Tensor = pick(torch.cat(outs), groups.places).unflatten(-1, (-1, size))
    return heads


def _by_scores(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Scores written down: faster than blocks while there are few."""
    later = torch.full((q.shape[2], q.shape[2]), -math.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(later, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    return scores.softmax(-1).bmm(v.flatten(0, 1)).view_as(v)


def _by_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Scores never written down; values are widened, since that kernel asks for equal sizes of keys and values."""
    wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    heads: Tensor = F.scaled_dot_product_attention(q, k, wide, is_causal=True, scale=scale)
    return heads[..., : v.shape[-1]]


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
    """Rotates neighbouring pairs of ``x`` [N, H, P]."""
    cos, sin = rotary.unsqueeze(1).unbind(-1)  # [N, 1, P/2]
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def mixture(x: Tensor, weights: Prefixed, spec: ModelSpec) -> tuple[Tensor, Tensor]:
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
    back = torch.empty_like(place).index_copy(0, order, place)  # where each (token, choice) landed
    token = torch.zeros(experts * capacity, dtype=torch.int64).index_copy(0, place, order // k)
    gate, up, down = (weights[f"mlp.experts.{part}_proj.weight"].mT for part in ("gate", "up", "down"))
    x = x.to(gate.dtype)
    padded = spread(x, token, back.view(-1, k)).view(experts, capacity, -1)
    out = (F.silu(padded.bmm(gate)) * padded.bmm(up)).bmm(down).flatten(0, 1)
    chosen_out = pick(out, back).view(-1, k, x.shape[1])
    return (share.to(x.dtype).unsqueeze(1) @ chosen_out).squeeze(1), load
