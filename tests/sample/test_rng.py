"""Philox against the published vectors of Random123, and what the counters promise."""

from __future__ import annotations

import math

import pytest
import torch

from perilune.sample.rng import gumbel, philox, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(word.item() for word in philox((c0, c1, c2, c3), key)) == expected


def test_a_number_depends_on_its_own_counter_only() -> None:
    whole = uniform(42, 7, 1000)
    assert torch.equal(uniform(42, 7, 10), whole[:10])
    assert not torch.equal(uniform(42, 8, 1000), whole)
    assert not torch.equal(uniform(43, 7, 1000), whole)
    assert not torch.equal(uniform(42 + (1 << 32), 7, 1000), whole)
    assert torch.equal(uniform(-1, 7, 8), uniform((1 << 64) - 1, 7, 8))


def test_numbers_are_uniform_and_noise_is_finite() -> None:
    numbers = uniform(1, 2, 200_000)
    assert 0 < numbers.min().item() < numbers.max().item() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=5 * math.sqrt(1 / 12 / 200_000))
    assert torch.isfinite(gumbel(1, 2, 200_000)).all()
    assert gumbel(1, 2, 200_000).mean().item() == pytest.approx(0.5772, abs=0.02)
