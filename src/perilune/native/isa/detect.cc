// Which unit this processor can run, by cpuid (the builtin also asks the operating system whether it saves the
// registers). Units that the compiler could not build are not offered.
#include "api.h"

extern "C" int32_t pl_codecs_abi() { return PL_CODECS_ABI; }

extern "C" int32_t pl_codecs_isa() {
#ifdef PERILUNE_UNIT_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return PL_AVX512;
#endif
#ifdef PERILUNE_UNIT_AVX2
  if (__builtin_cpu_supports("avx2")) return PL_AVX2;
#endif
  return PL_SCALAR;
}
