"""The row-invariant backend: the reference's values, and the same bits for a token in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.ops import Batch, GatedMLP, RouterSpec
from perilune.ops.ref import RefOps
from perilune.ops.rowwise import RowwiseOps
from perilune.quant.tensors import Dense

REF, ROWWISE = RefOps(), RowwiseOps()
TOKENS, HIDDEN, HEADS, LATENT, ROPE, BLOCK = 11, 23, 3, 20, 6, 4


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_alone_has_the_bits_it_has_in_a_batch(dtype: torch.dtype) -> None:
    x = random(TOKENS, HIDDEN, seed=0, dtype=dtype)
    weight = Dense(random(17, HIDDEN, seed=1, dtype=dtype))
    norm = random(HIDDEN, seed=2, dtype=dtype)
    heads = random(TOKENS, HEADS, 9, seed=3, dtype=dtype)
    per_head = random(HEADS, 7, 9, seed=4, dtype=dtype)
    experts = [
        GatedMLP(
            *(Dense(random(a, b, seed=10 * e, dtype=dtype)) for a, b in ((13, HIDDEN), (13, HIDDEN), (HIDDEN, 13)))
        )
        for e in range(5)
    ]
    router, bias = random(5, HIDDEN, seed=5, dtype=dtype), random(5, seed=6, dtype=dtype)
    spec = RouterSpec(top_k=2, n_group=1, topk_group=1, norm_topk_prob=True, scaling=2.5)
    ids, weights = ROWWISE.route(x, router, bias, spec)
    frequencies = random(3, seed=7, dtype=torch.float64)
    positions = torch.arange(TOKENS) * 37

    def all_ops(rows: slice, ops: RefOps | RowwiseOps) -> list[Tensor]:
        return [
            ops.linear(x[rows], weight),
            ops.head_linear(heads[rows], per_head),
            ops.rms_norm(x[rows], norm, 1e-5),
            *ops.rotary(positions[rows], frequencies, 1.0, dtype),
            *ops.route(x[rows], router, bias, spec),
            ops.gated_mlp(x[rows], experts[0]),
            ops.moe(x[rows], ids[rows], weights[rows], experts),
        ]

    whole, reference = all_ops(slice(0, TOKENS), ROWWISE), all_ops(slice(0, TOKENS), REF)
    for ours, expected in zip(whole, reference, strict=True):
        tolerance = 1e-3 if dtype == torch.float32 else 1e-11
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    for first, last in ((0, 1), (3, 7), (10, 11), (2, 11)):
        for part, full in zip(all_ops(slice(first, last), ROWWISE), whole, strict=True):
            assert torch.equal(part, full[first:last])
    for empty, full in zip(all_ops(slice(0, 0), ROWWISE), whole, strict=True):
        assert empty.shape == (0, *full.shape[1:])


@pytest.mark.parametrize("form", ["absorbed", "decompressed"])
def test_attention_has_the_same_bits_in_any_chunk(form: str) -> None:
    length = 14
    kv = random(5, BLOCK, LATENT + ROPE, seed=1, dtype=torch.float32)
    table = torch.tensor([[4, 1, 3, 2]])
    q_latent = random(length, HEADS, LATENT, seed=2, dtype=torch.float32)
    q_rope = random(length, HEADS, ROPE, seed=3, dtype=torch.float32)
    w_uk = random(HEADS, LATENT, LATENT, seed=4, dtype=torch.float32)
    w_uv = random(HEADS, 5, LATENT, seed=5, dtype=torch.float32)

    def run(first: int, last: int, ops: RefOps | RowwiseOps) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, last)
        batch = Batch(positions, positions, (0, last - first), (last,), table)
        part = slice(first, last)
        if form == "absorbed":
            return ops.mla_absorbed(q_latent[part], q_rope[part], kv, batch, 0.3)
        return ops.mla_decompressed(torch.cat((q_latent, q_rope), -1)[part], kv, w_uk, w_uv, batch, 0.3)

    whole, expected = run(0, length, ROWWISE), run(0, length, REF)
    for ours, reference in zip(whole, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    for first, last in ((0, 1), (0, 5), (5, 14), (13, 14)):
        for part, full in zip(run(first, last, ROWWISE), whole, strict=True):
            assert torch.equal(part, full[first:last])
    assert run(3, 3, ROWWISE)[0].shape[0] == 0
