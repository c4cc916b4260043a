// AVX2: eight elements at a time. A word holds eight codes; broadcast it and let each lane shift its own code down.
#include <immintrin.h>

#include "isa/isa.h"

namespace perilune {
namespace {

// The eight products of one word, as float32.
inline __m256 word_products(int32_t word, __m256 scale) {
  const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
  const __m256i nibbles = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), shifts), _mm256_set1_epi32(0xF));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(nibbles, _mm256_set1_epi32(8))), scale);
}

// Rounds to nearest even; the result stands in the low half of each 32-bit lane.
inline __m256i round_to_bf16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7FC0), is_nan);
}

}  // namespace

void dequant_row_f32_avx2(const int32_t* packed, const uint16_t* scale, float* out, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g, packed += kWordsPerGroup, out += kGroup) {
    const __m256 s = _mm256_set1_ps(bf16_to_float(scale[g]));
    for (int64_t k = 0; k < kWordsPerGroup; ++k) _mm256_storeu_ps(out + 8 * k, word_products(packed[k], s));
  }
}

void dequant_row_bf16_avx2(const int32_t* packed, const uint16_t* scale, uint16_t* out, int64_t groups) {
  for (int64_t g = 0; g < groups; ++g, packed += kWordsPerGroup, out += kGroup) {
    const __m256 s = _mm256_set1_ps(bf16_to_float(scale[g]));
    for (int64_t k = 0; k < kWordsPerGroup; k += 2) {
      const __m256i low = round_to_bf16(word_products(packed[k], s));
      const __m256i high = round_to_bf16(word_products(packed[k + 1], s));
      // packus works within 128-bit halves: [low0 high0 low1 high1] in quarters, put back in order by the permute.
      const __m256i mixed = _mm256_packus_epi32(low, high);
      const __m256i ordered = _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * k), ordered);
    }
  }
}

}  // namespace perilune
