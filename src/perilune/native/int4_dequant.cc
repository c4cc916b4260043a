// INT4 group 32 → float32 or bfloat16: the entry points and the scalar twin, which is both the fallback and the
// reference that the ISA units must equal to the bit.
#include "api.h"
#include "isa/isa.h"

namespace perilune {
namespace {

int code_at(const int32_t* packed, int64_t element) {
  const uint32_t word = static_cast<uint32_t>(packed[element / 8]);
  return static_cast<int>((word >> (4 * (element % 8))) & 0xF) - 8;
}

uint16_t round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void dequant_row_f32_scalar(const int32_t* packed, const uint16_t* scale, float* out, int64_t groups) {
  for (int64_t j = 0; j < groups * kGroup; ++j) {
    out[j] = static_cast<float>(code_at(packed, j)) * bf16_to_float(scale[j / kGroup]);
  }
}

void dequant_row_bf16_scalar(const int32_t* packed, const uint16_t* scale, uint16_t* out, int64_t groups) {
  for (int64_t j = 0; j < groups * kGroup; ++j) {
    out[j] = round_to_bf16(static_cast<float>(code_at(packed, j)) * bf16_to_float(scale[j / kGroup]));
  }
}

struct Unit {
  DequantRowF32 f32 = nullptr;
  DequantRowBf16 bf16 = nullptr;
};

Unit unit_for(int32_t isa) {
  if (isa > pl_codecs_isa()) return {};
  switch (isa) {
    case PL_SCALAR:
      return {dequant_row_f32_scalar, dequant_row_bf16_scalar};
#ifdef PERILUNE_UNIT_AVX2
    case PL_AVX2:
      return {dequant_row_f32_avx2, dequant_row_bf16_avx2};
#endif
#ifdef PERILUNE_UNIT_AVX512
    case PL_AVX512:
      return {dequant_row_f32_avx512, dequant_row_bf16_avx512};
#endif
    default:
      return {};
  }
}

template <typename Row, typename Out>
int32_t dequant(const PlInt4& w, Out* out, int64_t out_stride, Row row) {
  if (row == nullptr) return PL_NO_SUCH_ISA;
  if (w.rows < 0 || w.cols < 0 || w.cols % kGroup != 0) return PL_BAD_SHAPE;
  if (w.packed_stride < w.cols / 8 || w.scale_stride < w.cols / kGroup || out_stride < w.cols) return PL_BAD_SHAPE;
  for (int64_t i = 0; i < w.rows; ++i) {
    row(w.packed + i * w.packed_stride, w.scale + i * w.scale_stride, out + i * out_stride, w.cols / kGroup);
  }
  return PL_OK;
}

}  // namespace
}  // namespace perilune

extern "C" int32_t pl_int4_dequant_f32(const PlInt4* weight, float* out, int64_t out_stride, int32_t isa) {
  return perilune::dequant(*weight, out, out_stride, perilune::unit_for(isa).f32);
}

extern "C" int32_t pl_int4_dequant_bf16(const PlInt4* weight, uint16_t* out, int64_t out_stride, int32_t isa) {
  return perilune::dequant(*weight, out, out_stride, perilune::unit_for(isa).bf16);
}
