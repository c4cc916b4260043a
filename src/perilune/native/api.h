// The functions of libperilune_codecs, as perilune/native/__init__.py calls them through ctypes.
//
// Pointers, sizes and strides; no ownership, no allocation, no threads, no global state: a call reads its inputs,
// writes its output and may run beside any other call that writes elsewhere. Strides count elements, not bytes.
// Sizes and pointers come from perilune's own tensors, whose shapes Python has checked; what costs nothing to check
// again is checked again and answered with a negative code.
#pragma once

#include <cstdint>

#define PL_API __attribute__((visibility("default")))

// Raised whenever a signature or a struct of this file changes; Python refuses a library of another version.
#define PL_CODECS_ABI 1

extern "C" {

enum PlIsa : int32_t { PL_SCALAR = 0, PL_AVX2 = 1, PL_AVX512 = 2 };

enum PlStatus : int32_t { PL_OK = 0, PL_BAD_SHAPE = -1, PL_NO_SUCH_ISA = -2 };

// A weight in compressed-tensors' pack-quantized INT4, group size 32, symmetric.
//   packed [rows, cols / 8] int32: element j of a row is bits 4·(j mod 8) … +3 of word j div 8; stored = code + 8
//   scale  [rows, cols / 32] bfloat16 (as its 16 bits)
struct PlInt4 {
  const int32_t* packed;
  const uint16_t* scale;
  int64_t packed_stride;
  int64_t scale_stride;
  int64_t rows;
  int64_t cols;  // a multiple of 32
};

PL_API int32_t pl_codecs_abi();

// The best unit that this build holds and this processor can run.
PL_API int32_t pl_codecs_isa();

// out [rows, cols] = code · scale. The product is exact in float32; the bfloat16 form rounds it once, to nearest even,
// and writes every NaN as 0x7fc0. All units give the same bits. `isa` is at most pl_codecs_isa().
PL_API int32_t pl_int4_dequant_f32(const PlInt4* weight, float* out, int64_t out_stride, int32_t isa);
PL_API int32_t pl_int4_dequant_bf16(const PlInt4* weight, uint16_t* out, int64_t out_stride, int32_t isa);
}
