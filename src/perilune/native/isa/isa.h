// What the op files know of the ISA units: one row of work each, with the signatures of the scalar twins.
#pragma once

#include <cstdint>
#include <cstring>

namespace perilune {

constexpr int64_t kGroup = 32;         // elements that share a scale
constexpr int64_t kWordsPerGroup = 4;  // int32 words of a group

// One row: packed [groups · 4], scale [groups] → out [groups · 32].
using DequantRowF32 = void (*)(const int32_t* packed, const uint16_t* scale, float* out, int64_t groups);
using DequantRowBf16 = void (*)(const int32_t* packed, const uint16_t* scale, uint16_t* out, int64_t groups);

void dequant_row_f32_avx2(const int32_t* packed, const uint16_t* scale, float* out, int64_t groups);
void dequant_row_bf16_avx2(const int32_t* packed, const uint16_t* scale, uint16_t* out, int64_t groups);
void dequant_row_f32_avx512(const int32_t* packed, const uint16_t* scale, float* out, int64_t groups);
void dequant_row_bf16_avx512(const int32_t* packed, const uint16_t* scale, uint16_t* out, int64_t groups);

// static: each unit keeps its own copy. With external linkage the linker might keep the AVX-512 one for all.
static inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

}  // namespace perilune
