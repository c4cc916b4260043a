"""INT4 dequantisation: every ISA unit gives the bits of the format's definition, whatever the scales hold."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perilune.errors import PeriluneError
from perilune.native import ISAS, Codecs, Int4View, Isa

GUARD = 0xA5


@dataclass(frozen=True, slots=True)
class Case:
    """A packed weight inside larger arrays, so that strides and overruns show."""

    packed: NDArray[np.int32]  # [rows, cols / 8 + pad]
    scale: NDArray[np.uint16]  # [rows, cols / 32 + pad], bf16 bits
    rows: int
    cols: int

    def view(self) -> Int4View:
        return Int4View(
            packed=self.packed.ctypes.data,
            scale=self.scale.ctypes.data,
            packed_stride=self.packed.shape[1],
            scale_stride=self.scale.shape[1],
            rows=self.rows,
            cols=self.cols,
        )


def make_case(rows: int, groups: int, pad: int, seed: int, special: bool = False) -> Case:
    rng = np.random.default_rng(seed)
    packed = rng.integers(-(2**31), 2**31, (rows, groups * 4 + pad), dtype=np.int64).astype(np.int32)
    if special:
        scale = rng.integers(0, 2**16, (rows, groups + pad), dtype=np.uint16)
    else:
        scale = bf16_bits(rng.uniform(1e-4, 1e-2, (rows, groups + pad)).astype(np.float32))
    return Case(packed, scale, rows, groups * 32)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 → bfloat16 by the definition: the nearer of the two neighbours, the even one on a tie."""
    bits = values.view(np.uint32)
    down = bits & np.uint32(0xFFFF0000)
    rest = bits & np.uint32(0xFFFF)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    up = (rest > 0x8000) | ((rest == 0x8000) & (odd == 1))
    rounded = ((down >> np.uint32(16)) + up).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def expected(case: Case) -> NDArray[np.float32]:
    """The definition in numpy: nibble j of a row, less 8, times its group's scale."""
    words = case.packed[:, : case.cols // 8].astype(np.uint32)
    nibbles = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(0xF)
    codes = nibbles.reshape(case.rows, case.cols).astype(np.float32) - np.float32(8)
    scale = (case.scale[:, : case.cols // 32].astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return codes * np.repeat(scale, 32, axis=1)


def run_f32(codecs: Codecs, case: Case, pad: int) -> NDArray[np.float32]:
    out = np.full((case.rows, case.cols + pad), np.nan, dtype=np.float32)
    out.view(np.uint8)[...] = GUARD
    codecs.int4_dequantize(case.view(), out.ctypes.data, out.shape[1], "float32")
    assert (np.ascontiguousarray(out[:, case.cols :]).view(np.uint8) == GUARD).all()
    return np.ascontiguousarray(out[:, : case.cols])


def run_bf16(codecs: Codecs, case: Case, pad: int) -> NDArray[np.uint16]:
    out = np.full((case.rows, case.cols + pad), 0xA5A5, dtype=np.uint16)
    codecs.int4_dequantize(case.view(), out.ctypes.data, out.shape[1], "bfloat16")
    assert (out[:, case.cols :] == 0xA5A5).all()
    return out[:, : case.cols]


@pytest.fixture(params=ISAS)
def unit(request: pytest.FixtureRequest, codecs: Codecs) -> Codecs:
    isa: Isa = request.param
    if ISAS.index(isa) > ISAS.index(codecs.isa):
        pytest.skip(f"this machine or build has no {isa}")
    return codecs.with_isa(isa)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    groups=st.integers(0, 9),
    pad=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
    special=st.booleans(),
)
def test_every_unit_equals_the_definition(
    codecs: Codecs, rows: int, groups: int, pad: int, seed: int, special: bool
) -> None:
    case = make_case(rows, groups, pad, seed, special)
    want = expected(case)
    want_bf16 = bf16_bits(want)
    for isa in ISAS[: ISAS.index(codecs.isa) + 1]:
        chosen = codecs.with_isa(isa)
        got = run_f32(chosen, case, pad)
        same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
        assert same.all(), isa
        assert (run_bf16(chosen, case, pad) == want_bf16).all(), isa


def test_every_code_with_every_scale(unit: Codecs) -> None:
    """All 16 codes under all 65,536 scales: subnormals, infinities, NaN and both zeros among them."""
    packed = np.zeros((65536, 4), dtype=np.uint32)
    for j in range(32):
        packed[:, j // 8] |= np.uint32(j % 16) << np.uint32(4 * (j % 8))
    case = Case(packed.view(np.int32), np.arange(65536, dtype=np.uint16)[:, None].copy(), 65536, 32)
    want = expected(case)
    got = run_f32(unit, case, 0)
    assert ((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))).all()
    assert (run_bf16(unit, case, 0) == bf16_bits(want)).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("rows", -1), ("cols", -32), ("cols", 33), ("packed_stride", 7), ("scale_stride", 1)],
)
def test_sizes_that_contradict_are_refused(unit: Codecs, field: str, value: int) -> None:
    case = make_case(rows=2, groups=2, pad=0, seed=1)
    view = case.view()
    setattr(view, field, value)
    out = np.zeros((2, 64), dtype=np.float32)
    with pytest.raises(PeriluneError, match="a size or stride does not fit"):
        unit.int4_dequantize(view, out.ctypes.data, 64, "float32")
    assert not out.any()


def test_an_output_row_that_is_too_short_is_refused(unit: Codecs) -> None:
    case = make_case(rows=2, groups=2, pad=0, seed=1)
    out = np.zeros((2, 64), dtype=np.uint16)
    with pytest.raises(PeriluneError, match="int4_dequantize of 2×64"):
        unit.int4_dequantize(case.view(), out.ctypes.data, 63, "bfloat16")


def test_an_unknown_unit_is_refused_by_the_library(codecs: Codecs) -> None:
    case = make_case(rows=1, groups=1, pad=0, seed=1)
    out = np.zeros((1, 32), dtype=np.float32)
    for isa in (-1, len(ISAS)):
        status = codecs.library.pl_int4_dequant_f32(ctypes.byref(case.view()), out.ctypes.data, 32, isa)
        assert status == -2
    assert not out.any()
