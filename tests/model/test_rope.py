"""YaRN frequencies and angles against values that need no torch."""

from __future__ import annotations

import mpmath
import pytest
import torch

from perilune.config import RopeSpec
from perilune.model.rope import inverse_frequencies
from perilune.ops.ref import RefOps


def k2(beta_fast: float) -> RopeSpec:
    return RopeSpec(
        dim=64,
        theta=50000.0,
        kind="yarn",
        factor=64.0,
        original_max_position=4096,
        beta_fast=beta_fast,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    )


def test_k2_frequencies_and_scales() -> None:
    """llama.cpp#7118, ik_llama.cpp#1298: wrong mscale or ramp gives garbage past 4k."""
    spec = k2(beta_fast=32.0)
    frequencies = inverse_frequencies(spec)
    expected = {0: 1.0, 8: 6.68740e-2, 12: 1.16192e-2, 16: 1.53730e-3, 20: 1.80702e-5, 31: 4.38221e-7}
    for pair, value in expected.items():
        assert frequencies[pair].item() == pytest.approx(value, rel=1e-5)
    assert spec.softmax_mscale**2 == pytest.approx(2.0047397, rel=1e-7)
    assert 192**-0.5 * spec.softmax_mscale**2 == pytest.approx(0.1446796, rel=1e-6)
    assert spec.cos_sin_scale == 1.0


def test_beta_fast_one_is_a_step() -> None:
    """theta 50000: the ramp runs from pair 19 to 20, so each pair is either left or divided by the factor."""
    plain = inverse_frequencies(RopeSpec(dim=64, theta=50000.0))
    ratio = plain / inverse_frequencies(k2(beta_fast=1.0))
    assert ratio[:20].tolist() == pytest.approx([1.0] * 20)
    assert ratio[20:].tolist() == pytest.approx([64.0] * 12)


@pytest.mark.parametrize("beta_fast", [1.0, 32.0])
@pytest.mark.parametrize("position", [0, 1, 4096, 250_000, 262_143])
def test_angles_far_out_against_arbitrary_precision(beta_fast: float, position: int) -> None:
    """In float32 an angle of 250,000 rad is off by 0.008; ours is rounded once, after cos and sin."""
    spec = k2(beta_fast)
    cos, sin = RefOps().rotary(torch.tensor([position]), inverse_frequencies(spec), 1.0, torch.float32)
    with mpmath.workdps(40):
        theta, factor = mpmath.mpf(50000), mpmath.mpf(64)
        low, high = (19, 20) if beta_fast == 1.0 else (8, 20)
        for pair in range(32):
            ramp = min(max(mpmath.mpf(pair - low) / (high - low), 0), 1)
            plain = theta ** (-mpmath.mpf(2 * pair) / 64)
            angle = position * (plain / factor * ramp + plain * (1 - ramp))
            assert abs(cos[0, pair].item() - mpmath.cos(angle)) < 1e-7
            assert abs(sin[0, pair].item() - mpmath.sin(angle)) < 1e-7


def test_deepseek_v3_and_k2_instruct_scales() -> None:
    deepseek = RopeSpec(dim=64, theta=1e4, kind="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    instruct = RopeSpec(dim=64, theta=5e4, kind="yarn", factor=32.0, mscale=1.0, mscale_all_dim=1.0)
    assert 192**-0.5 * deepseek.softmax_mscale**2 == pytest.approx(0.1352338, rel=1e-6)
    assert 192**-0.5 * instruct.softmax_mscale**2 == pytest.approx(0.1308608, rel=1e-6)


def test_without_mscale_all_dim_cos_and_sin_carry_the_scale() -> None:
    spec = RopeSpec(dim=64, theta=1e4, kind="yarn", factor=40.0)
    assert spec.softmax_mscale == 1.0
    assert spec.cos_sin_scale == pytest.approx(1.368888, rel=1e-6)
