"""INT4 to the bit, against vectors that compressed-tensors made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.checkpoint.header import read_header
from perilune.checkpoint.load import TORCH_DTYPES
from perilune.errors import ConfigError
from perilune.quant.int4 import pack, quantize, unpack
from perilune.quant.tensors import Int4


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, Tensor]:
    path = shared / "data" / "golden" / "int4_g32_pack.safetensors"
    data = bytearray(path.read_bytes())
    return {
        meta.name: torch.frombuffer(data[meta.begin : meta.end], dtype=TORCH_DTYPES[meta.dtype]).reshape(meta.shape)
        for meta in read_header(path).tensors
    }


@pytest.mark.parametrize("case", ["minmax", "allcodes", "qat15"])
def test_golden_codes_and_products(golden: dict[str, Tensor], case: str) -> None:
    codes, packed, scale = (golden[f"{case}.{part}"] for part in ("q_int8", "weight_packed", "weight_scale"))
    assert torch.equal(pack(codes), packed)
    assert torch.equal(unpack(packed, codes.shape[1]), codes)
    weight = Int4(packed, scale)
    assert torch.equal(weight.dequantize(torch.bfloat16), golden[f"{case}.dequant_bf16"])
    exact = codes.double() * scale.double().repeat_interleave(32, dim=1)
    assert torch.equal(weight.dequantize(torch.float64), exact)
    assert torch.equal(weight.dequantize(torch.float32).double(), exact)  # the product is exact in float32


def test_golden_rule_of_compressed_tensors(golden: dict[str, Tensor]) -> None:
    """Its min-max rule, amax/7.5 to -8…7, computed in the weight's own bf16."""
    weight = golden["minmax.weight_bf16"]
    amax = weight.reshape(48, 4, 32).abs().amax(-1)
    assert torch.equal(golden["minmax.weight_scale"], amax / torch.tensor(7.5, dtype=torch.bfloat16))
    packed, scale = quantize(weight, divisor=7.5, qmin=-8)
    assert torch.equal(scale, golden["minmax.weight_scale"])
    assert (unpack(packed, 128) - golden["minmax.q_int8"]).abs().max() <= 1


def test_kimi_rule_round_trips_kimi_weights(golden: dict[str, Tensor]) -> None:
    """cases/quant 32: with 15 levels and a group that uses ±7, divisor 7 and qmin -7 give codes and scales back."""
    codes, scale = golden["qat15.q_int8"].reshape(64, 8, 32), golden["qat15.weight_scale"]
    full = codes.abs().amax(-1) == 7
    assert full.float().mean() > 0.5
    weight = Int4(golden["qat15.weight_packed"], scale)
    packed, again = quantize(weight.dequantize(torch.float32))
    assert torch.equal(again[full], scale[full])
    assert torch.equal(unpack(packed, 256).reshape(64, 8, 32)[full], codes[full])


def test_kimi_rule_on_weights_rounded_to_bf16() -> None:
    """Every significand: codes survive; the scale moves by one place exactly where bf16(7·m) is a tie."""
    significand = torch.arange(128, 256)
    scale = (significand * 2.0**-14).to(torch.bfloat16).reshape(-1, 1)
    codes = torch.arange(32).remainder(15).sub(7).to(torch.int8).expand(128, 32)
    packed, again = quantize(Int4(pack(codes), scale).dequantize(torch.bfloat16))
    assert torch.equal(unpack(packed, 32), codes)
    moved = (again.view(torch.int16) - scale.view(torch.int16)).flatten()
    tie = (significand >= 147) & (significand % 8 == 4)
    assert torch.equal(moved.abs(), tie.short())


def test_golden_padding(shared: Path) -> None:
    cases = json.loads((shared / "data" / "golden" / "int4_pack_padding.json").read_text())["cases"]
    assert [case["cols"] for case in cases] == [1, 7, 8, 9, 13, 31, 33]
    for case in cases:
        codes = torch.tensor(case["q"], dtype=torch.int8)
        words = torch.tensor(case["packed_int32"], dtype=torch.int32)
        assert torch.equal(pack(codes), words)
        assert torch.equal(unpack(words, case["cols"]), codes)


def test_low_nibble_first() -> None:
    """cases/quant 31."""
    packed = pack(torch.tensor([[-8, -5, 1, -7, 3, -6, -7, 5]], dtype=torch.int8))
    assert int(packed) & 0xFFFFFFFF == 0xD12B1930


@pytest.mark.slow  # the library takes seconds to import; its vectors are tested above
def test_codes_of_compressed_tensors_itself() -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-8, 8, (5, 96), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    assert torch.equal(pack(codes), library.pack_to_int32(codes, 4))


@settings(max_examples=60, deadline=None)
@given(out=st.integers(0, 5), width=st.integers(0, 70), seed=st.integers(0, 1 << 20))
def test_unpack_inverts_pack(out: int, width: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (out, width), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    packed = pack(codes)
    assert packed.shape == (out, -(-width // 8))
    assert torch.equal(unpack(packed, width), codes)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20), exponent=st.integers(-30, 30))
def test_quantize_is_stable_and_within_half_a_step(seed: int, exponent: int) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    packed, scale = quantize(weight)
    values = Int4(packed, scale).dequantize(torch.float32)
    step = scale.float().repeat_interleave(32, dim=1)
    # The scale is rounded to bf16, so the outermost code may miss amax by 7 · 2^-9 of a step more.
    assert ((values - weight).abs() <= step * (0.5 + 7 / 256)).all()
    again, same = quantize(values)
    assert torch.equal(again, packed)
    assert torch.equal(same, scale)


def test_group_of_zeros() -> None:
    packed, scale = quantize(torch.zeros(2, 64))
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    assert torch.equal(Int4(packed, scale).dequantize(torch.float32), torch.zeros(2, 64))


def test_refusals_name_the_value() -> None:
    with pytest.raises(ConfigError, match="reach from -9 to 7, -8 to 7 is allowed"):
        pack(torch.tensor([[-9, 7]], dtype=torch.int8))
    with pytest.raises(ConfigError, match=r"int8 \[out, in\] is needed"):
        pack(torch.zeros(2, 8))
    with pytest.raises(ConfigError, match="2 words per row, 8 codes need 1"):
        unpack(torch.zeros(1, 2, dtype=torch.int32), 8)
    with pytest.raises(ConfigError, match=r"int32 \[out, in/8\] is needed"):
        unpack(torch.zeros(1, 8, dtype=torch.uint8), 8)
    with pytest.raises(ConfigError, match=r"\[2, 33\] cannot be cut into groups of 32"):
        quantize(torch.zeros(2, 33))
    with pytest.raises(ConfigError, match="NaN or infinity"):
        quantize(torch.full((1, 32), torch.inf))
