// AVX-512 (F, BW): a group has only sixteen possible values, so the products are made once per group, as a table in a
// register, and every element is a table look-up. The permutes read just the low bits of an index, which spares the
// masking of neighbouring codes.
#include <immintrin.h>

#include "isa/isa.h"

namespace perilune {
namespace {

// table[n] = (n - 8) · scale for the stored nibble n.
inline __m512 group_table(uint16_t scale) {
  const __m512 codes = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_mul_ps(codes, _mm512_set1_ps(bf16_to_float(scale)));
}

// The sixteen table entries rounded to nearest even, twice: a 16-bit permute reads five bits of its index, and the
// fifth belongs to the next code.
inline __m512i bf16_table(__m512 table) {
  const __m512i bits = _mm512_castps_si512(table);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(table, table, _CMP_UNORD_Q);
  const __m512i wide = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7FC0));
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(wide));
}

inline __m512i load_group(const int32_t* packed) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
}

}  // namespace

void dequant_row_f32_avx512(const int32_t* packed, const uint16_t* scale, float* out, int64_t groups) {
  const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i first_words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i last_words = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  for (int64_t g = 0; g < groups; ++g, packed += kWordsPerGroup, out += kGroup) {
    const __m512 table = group_table(scale[g]);
    const __m512i words = load_group(packed);
    const __m512i low = _mm512_srlv_epi32(_mm512_permutexvar_epi32(first_words, words), shifts);
    const __m512i high = _mm512_srlv_epi32(_mm512_permutexvar_epi32(last_words, words), shifts);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(low, table));
    _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(high, table));
  }
}

void dequant_row_bf16_avx512(const int32_t* packed, const uint16_t* scale, uint16_t* out, int64_t groups) {
  // Lane k of 32 takes half-word k div 4 of the group and shifts its code, k mod 4, down.
  alignas(64) static constexpr uint16_t kHalves[32] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,
                                                       4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7};
  const __m512i halves = _mm512_load_si512(kHalves);
  const __m512i shifts = _mm512_set1_epi64(0x000C'0008'0004'0000);
  for (int64_t g = 0; g < groups; ++g, packed += kWordsPerGroup, out += kGroup) {
    const __m512i table = bf16_table(group_table(scale[g]));
    const __m512i codes = _mm512_srlv_epi16(_mm512_permutexvar_epi16(halves, load_group(packed)), shifts);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(codes, table));
  }
}

}  // namespace perilune
