// Number formats by their bits: widening, and rounding to nearest.
//
// The same source runs on the GPU and in the emulated grid on the CPU, and returns the same bits on both. Formats are
// IEEE 754 binary32 and binary16, and bfloat16, the upper half of a binary32.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#include <cuda_fp16.h>

#define POLYAMP_EVERYWHERE __host__ __device__ __forceinline__
#define POLYAMP_UNROLL _Pragma("unroll")  // so that small arrays are in registers
#else
#define POLYAMP_EVERYWHERE inline
#define POLYAMP_UNROLL
#endif

namespace polyamp {

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kInfinity = 0x7f800000u;  // of float32: all bits of the exponent

POLYAMP_EVERYWHERE uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

POLYAMP_EVERYWHERE float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

POLYAMP_EVERYWHERE bool is_finite(float value) { return (bits_of(value) & kInfinity) != kInfinity; }
POLYAMP_EVERYWHERE bool is_nan(float value) { return (bits_of(value) & ~kSign) > kInfinity; }

struct Float32 {
  using Bits = uint32_t;
  POLYAMP_EVERYWHERE static float widen(uint32_t bits) { return float_of(bits); }
  POLYAMP_EVERYWHERE static uint32_t narrow(float value) { return bits_of(value); }
};

struct BFloat16 {
  using Bits = uint16_t;
  static constexpr uint32_t kNan = 0x7fc0;

  POLYAMP_EVERYWHERE static float widen(uint32_t bits) { return float_of(bits << 16); }

  // To nearest, ties to even.
  POLYAMP_EVERYWHERE static uint32_t narrow(float value) {
    const uint32_t bits = bits_of(value);
    return is_nan(value) ? kNan : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

struct Float16 {
  using Bits = uint16_t;

  POLYAMP_EVERYWHERE static float widen(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
#else
    const uint32_t sign = (bits & 0x8000) << 16, exponent = bits & 0x7c00, rest = bits & 0x7fff;
    if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));  // the unit of subnormals
    const uint32_t bias = exponent == 0x7c00 ? 2 * 112 : 112;  // 127 - 15; inf and NaN keep the largest exponent
    return float_of(sign | ((rest << 13) + (bias << 23)));
#endif
  }

  // To nearest, ties to even; 65520 and beyond become inf.
  POLYAMP_EVERYWHERE static uint32_t narrow(float value) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(value));
#else
    const uint32_t sign = bits_of(value) >> 16 & 0x8000, size = bits_of(value) & ~kSign;
    if (size > kInfinity) return sign | 0x7e00;
    if (size >= bits_of(65520.0f)) return sign | 0x7c00;
    if (size < bits_of(0x1p-14f))  // subnormal: near 0.5, float32 numbers are 2**-24 apart, like float16's subnormals
      return sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f));
    return sign | ((size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13);
#endif
  }
};

}  // namespace polyamp
