"""Attention over the paged cache, merging of parts, and the feed-forward ops, against direct formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from perilune.ops import Batch, GatedMLP
from perilune.ops.ref import RefOps
from perilune.quant.tensors import Dense

OPS = RefOps()
HEADS, LATENT, ROPE, NOPE, VALUE, BLOCK = 3, 16, 8, 12, 10, 4


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def paged(lengths: list[int], fresh: list[int], seed: int) -> tuple[Tensor, Batch, list[Tensor]]:
    """A cache with a sequence for each length, blocks shuffled, unused places NaN; the last ``fresh`` tokens query."""
    contexts = [random(length, LATENT + ROPE, seed=seed + i) for i, length in enumerate(lengths)]
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    kv = torch.full((len(order), BLOCK, LATENT + ROPE), torch.nan, dtype=torch.float64)
    tables = torch.full((len(lengths), max([*counts, 1])), -1)
    for row, context in enumerate(contexts):
        blocks = [order.pop() for _ in range(counts[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int64)
        for position in range(lengths[row]):
            kv[blocks[position // BLOCK], position % BLOCK] = context[position]
    positions = torch.cat([torch.arange(n - f, n) for n, f in zip(lengths, fresh, strict=True)])
    starts = [0, *torch.tensor(fresh).cumsum(0).tolist()]
    batch = Batch(positions, torch.zeros_like(positions), tuple(starts), tuple(lengths), tables)
    return kv, batch, contexts


def direct(q: Tensor, context: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Textbook causal attention of the last len(q) positions: keys [S, H, *], values [S, H, V]."""
    fresh, length = len(q), len(context)
    scores = torch.einsum("thd,shd->hts", q, keys) * scale
    mask = torch.ones(fresh, length, dtype=torch.bool).tril(length - fresh)
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hts,shv->thv", scores.softmax(-1), values), scores.logsumexp(-1).T


@pytest.mark.parametrize("tile", [1 << 24, 64])
def test_both_forms_equal_the_textbook_and_each_other(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different prefixes in one batch (vllm#49294), in one tile and in many."""
    monkeypatch.setattr("perilune.ops.ref._TILE_ELEMENTS", tile)
    lengths, fresh = [1, 5, 9, 30], [1, 5, 2, 1]
    kv, batch, contexts = paged(lengths, fresh, seed=7)
    tokens = sum(fresh)
    q_nope, q_rope = random(tokens, HEADS, NOPE, seed=1), random(tokens, HEADS, ROPE, seed=2)
    w_uk, w_uv = random(HEADS, NOPE, LATENT, seed=3), random(HEADS, VALUE, LATENT, seed=4)
    q_latent = torch.einsum("thn,hnl->thl", q_nope, w_uk)
    mixed, lse_absorbed = OPS.mla_absorbed(q_latent, q_rope, kv, batch, 0.2)
    absorbed = torch.einsum("thl,hvl->thv", mixed, w_uv)
    q = torch.cat((q_nope, q_rope), -1)
    decompressed, lse = OPS.mla_decompressed(q, kv, w_uk, w_uv, batch, 0.2)
    for row, context in enumerate(contexts):
        part = slice(batch.row_starts[row], batch.row_starts[row + 1])
        latent, rope = context[:, :LATENT], context[:, LATENT:]
        keys = torch.cat((torch.einsum("sl,hnl->shn", latent, w_uk), rope.unsqueeze(1).expand(-1, HEADS, -1)), -1)
        values = torch.einsum("sl,hvl->shv", latent, w_uv)
        out, expected_lse = direct(q[part], context, keys, values, 0.2)
        for ours, ours_lse in ((absorbed, lse_absorbed), (decompressed, lse)):
            torch.testing.assert_close(ours[part], out, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(ours_lse[part], expected_lse, rtol=1e-12, atol=1e-12)


def test_a_row_without_context_gives_zero_and_minus_infinity() -> None:
    kv, batch, _ = paged([0], [0], seed=1)
    empty = Batch(torch.tensor([0]), torch.tensor([0]), (0, 1), (0,), batch.block_tables)
    out, lse = OPS.mla_absorbed(torch.ones(1, 2, LATENT), torch.ones(1, 2, ROPE), kv, empty, 1.0)
    assert out.abs().sum() == 0
    assert lse.tolist() == [[-math.inf, -math.inf]]


@pytest.mark.parametrize("empty_lse", [-math.inf, math.inf, math.nan])
def test_merge_drops_parts_that_saw_nothing(empty_lse: float) -> None:
    """vllm#26042: an empty context reported +inf and won."""
    junk = torch.full((1, 1, 2), 123.0)
    out, lse = OPS.merge([junk, torch.tensor([[[1.0, 2.0]]])], [torch.tensor([[empty_lse]]), torch.tensor([[0.5]])])
    assert out.tolist() == [[[1.0, 2.0]]]
    assert lse.tolist() == [[0.5]]
    out, lse = OPS.merge([junk, junk], [torch.tensor([[empty_lse]])] * 2)
    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.tolist() == [[-math.inf]]


def test_merge_weighs_by_natural_logarithms() -> None:
    """sglang#25090: reading log2 as ln turns .75/.25 into .83/.17."""
    outs = [torch.tensor([[[1.0]]]), torch.tensor([[[0.0]]])]
    out, lse = OPS.merge(outs, [torch.tensor([[math.log(3.0)]]), torch.tensor([[0.0]])])
    assert out.item() == pytest.approx(0.75)
    assert lse.item() == pytest.approx(math.log(4.0))


def test_merged_halves_equal_the_whole() -> None:
    kv, batch, contexts = paged([12], [1], seed=3)
    q_latent, q_rope = random(1, HEADS, LATENT, seed=5), random(1, HEADS, ROPE, seed=6)
    whole, whole_lse = OPS.mla_absorbed(q_latent, q_rope, kv, batch, 0.3)
    parts = []
    for part in (contexts[0][:5], contexts[0][5:]):
        table = torch.tensor([[0]])
        split = Batch(torch.tensor([len(part) - 1]), torch.tensor([0]), (0, 1), (len(part),), table)
        parts.append(OPS.mla_absorbed(q_latent, q_rope, part.unsqueeze(0), split, 0.3))
    out, lse = OPS.merge([p[0] for p in parts], [p[1] for p in parts])
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def test_silu_goes_over_the_gate_and_not_over_up() -> None:
    one = Dense(torch.ones(1, 1, dtype=torch.float64))
    mlp = GatedMLP(gate=one, up=Dense(torch.full((1, 1), 2.0, dtype=torch.float64)), down=one)
    assert OPS.gated_mlp(torch.ones(1, 1, dtype=torch.float64), mlp).item() == pytest.approx(1.4621171572600098)


def test_moe_is_the_weighted_sum_of_the_chosen_experts() -> None:
    experts = [
        GatedMLP(*(Dense(random(*shape, seed=10 * e + i)) for i, shape in enumerate(((6, 5), (6, 5), (5, 6)))))
        for e in range(4)
    ]
    x, weights = random(7, 5, seed=1), random(7, 2, seed=2).abs()
    ids = torch.tensor([[0, 1], [1, 0], [3, 1], [2, 3], [0, 2], [1, 3], [3, 0]])
    expected = torch.stack(
        [
            weights[t, 0] * OPS.gated_mlp(x[t : t + 1], experts[ids[t, 0]])[0]
            + weights[t, 1] * OPS.gated_mlp(x[t : t + 1], experts[ids[t, 1]])[0]
            for t in range(7)
        ]
    )
    torch.testing.assert_close(OPS.moe(x, ids, weights, experts), expected, rtol=1e-12, atol=1e-12)
    assert OPS.moe(x[:0], ids[:0], weights[:0], experts).shape == (0, 5)


def test_rope_turns_neighbouring_pairs_in_place_order() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]])
    angle = torch.tensor([[math.pi / 2, math.pi]])
    out = OPS.rope(x, angle.cos(), angle.sin())
    torch.testing.assert_close(out, torch.tensor([[[0.0, 1.0, 0.0, -1.0]]]), atol=1e-6, rtol=0)


def test_rms_norm_rounds_before_it_multiplies() -> None:
    """The published order: normalise in float32, round to the activations' dtype, then times the weight."""
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.randn(32, generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(OPS.rms_norm(x, weight, 1e-5), expected)
