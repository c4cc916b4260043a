"""Weight containers: slices of codes take their scales with them."""

from __future__ import annotations

import pytest
import torch

from perilune.errors import ConfigError
from perilune.quant.int4 import pack, quantize
from perilune.quant.tensors import Dense, Int4, Weight


def int4(out: int = 8, width: int = 128) -> Int4:
    return Int4(*quantize(torch.randn(out, width, generator=torch.Generator().manual_seed(1))))


def dense(out: int = 8, width: int = 128) -> Dense:
    return Dense(torch.randn(out, width, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("weight", [dense(), int4()], ids=["dense", "int4"])
def test_slices_equal_slices_of_the_expanded_weight(weight: Weight) -> None:
    whole = weight.dequantize(torch.float32)
    assert weight.shape == (8, 128)
    assert torch.equal(weight.rows(2, 5).dequantize(torch.float32), whole[2:5])
    assert torch.equal(weight.columns(32, 96).dequantize(torch.float32), whole[:, 32:96])
    assert torch.equal(weight.rows(1, 8).columns(64, 128).rows(3, 4).dequantize(torch.float32), whole[4:5, 64:])
    assert weight.rows(3, 3).shape == (0, 128)
    assert weight.columns(0, 128).nbytes == weight.to("cpu").nbytes == weight.nbytes


def test_bytes() -> None:
    assert dense().nbytes == 8 * 128 * 4
    assert int4().nbytes == 8 * 128 // 2 + 8 * 4 * 2  # 4.5 bits a weight


@pytest.mark.parametrize("parts", [2, 4])
def test_input_shards_take_their_own_scales(parts: int) -> None:
    """cases/engine 6: [8, 128] with group scales 1, 2, 3, 4; the second of two ranks uses 3 and 4, sums are equal."""
    codes = torch.randint(-7, 8, (8, 128), dtype=torch.int8, generator=torch.Generator().manual_seed(2))
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16).expand(8, 4).contiguous()
    weight = Int4(pack(codes), scale)
    x = torch.randint(-4, 5, (128,), generator=torch.Generator().manual_seed(3)).float()
    width = 128 // parts
    shards = [weight.columns(part * width, (part + 1) * width) for part in range(parts)]
    assert shards[-1].scale[0].tolist() == [1.0, 2.0, 3.0, 4.0][-4 // parts :]
    sums = sum(s.dequantize(torch.float32) @ x[p * width : (p + 1) * width] for p, s in enumerate(shards))
    assert torch.equal(torch.as_tensor(sums), weight.dequantize(torch.float32) @ x)


@pytest.mark.parametrize(("start", "stop"), [(0, 16), (16, 48), (8, 40)])
def test_a_cut_through_a_group_is_refused(start: int, stop: int) -> None:
    """cases/engine 7."""
    with pytest.raises(
        ConfigError, match=f"inputs {start} to {stop} of an INT4 weight with 128 inputs cut a group of 32"
    ):
        int4().columns(start, stop)
    assert dense().columns(start, stop).shape == (8, stop - start)


@pytest.mark.parametrize("weight", [dense(), int4()], ids=["dense", "int4"])
def test_slices_outside_are_refused(weight: Weight) -> None:
    with pytest.raises(ConfigError, match="outputs 4 to 9 of a weight with 8 outputs"):
        weight.rows(4, 9)
    with pytest.raises(ConfigError, match="inputs -32 to 32 of a weight with 128 inputs"):
        weight.columns(-32, 32)
    with pytest.raises(ConfigError, match="outputs 5 to 4"):
        weight.rows(5, 4)


def test_int4_of_tensors_that_do_not_fit_is_refused() -> None:
    packed, scale = int4().packed, int4().scale
    for bad in ((packed, scale.float()), (packed.long(), scale), (packed, scale[:, :3]), (packed[:, :3], scale[:, :1])):
        with pytest.raises(ConfigError, match=r"int32 \[out, in/8\] and bfloat16 \[out, in/32\] are needed"):
            Int4(*bad)
