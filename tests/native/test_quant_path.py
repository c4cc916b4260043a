"""``quant`` through the native codec equals ``quant`` through torch, to the bit, on whole weights and on slices."""

from __future__ import annotations

import pytest
import torch

from perilune import native
from perilune.quant import int4
from perilune.quant.tensors import Int4

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def use_library(codecs: native.Codecs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library under test, sanitized or installed, is the one that quant calls."""
    monkeypatch.setattr(int4, "codecs", lambda: codecs)


@pytest.fixture
def weight() -> Int4:
    generator = torch.Generator().manual_seed(7)
    return Int4(*int4.quantize(torch.randn(48, 256, generator=generator)))


def both(weight: Int4, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    plain = int4.dequantize(weight.packed, weight.scale, dtype, native=False)
    return weight.dequantize(dtype), plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cut",
    [
        lambda w: w,
        lambda w: w.rows(5, 31),
        lambda w: w.columns(64, 192),
        lambda w: w.rows(3, 4).columns(32, 64),
        lambda w: w.rows(9, 9),
        lambda w: w.columns(32, 32),
        lambda w: Int4(w.packed.t().contiguous().t(), w.scale.t().contiguous().t()),
        lambda w: Int4(w.packed[:1].expand(4, -1), w.scale[:1].expand(4, -1)),
    ],
    ids=["whole", "rows", "columns", "one group", "no rows", "no columns", "strided", "expanded"],
)
def test_native_equals_torch(weight: Int4, cut: object, dtype: torch.dtype) -> None:
    assert callable(cut)
    got, plain = both(cut(weight), dtype)
    assert got.dtype == plain.dtype == dtype
    assert got.shape == plain.shape
    assert torch.equal(got, plain)


def test_the_native_path_is_really_taken(weight: Int4, monkeypatch: pytest.MonkeyPatch, codecs: native.Codecs) -> None:
    """Without this the comparison above could compare torch with itself."""
    monkeypatch.setattr(int4, "unpack", None)
    assert weight.dequantize(torch.float32).shape == (48, 256)
    with pytest.raises(TypeError):
        weight.dequantize(torch.float64)
