// Number formats by their bits: widening, rounding to nearest, splitting, and stochastic rounding.
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

  // Noise of 16 bits, added to the bits that are cut, carries over as often as they are large.
  POLYAMP_EVERYWHERE static uint32_t narrow_by_chance(float value, uint32_t noise) {
    return is_finite(value) ? (bits_of(value) + noise) >> 16 : narrow(value);
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

  // As for bfloat16, with the 13 bits that are cut. Values of its subnormals get an offset to where its numbers have
  // the same spacing but are normal, so that 13 bits are cut there too.
  POLYAMP_EVERYWHERE static uint32_t narrow_by_chance(float value, uint32_t noise) {
    if (!is_finite(value)) return narrow(value);
    const uint32_t sign = bits_of(value) & kSign;
    const float lift = (bits_of(value) & ~kSign) < bits_of(0x1p-14f) ? float_of(sign | bits_of(0x1p-14f)) : 0.0f;
    const uint32_t cut = (bits_of(value + lift) + (noise & 0x1fff)) & ~0x1fffu;
    return narrow(float_of(sign | (bits_of(float_of(cut) - lift) & ~kSign)));
  }
};

// A float32 as bfloat16 and the 16 bits that rounding leaves over: bits = (bits of the bfloat16 << 16) + remainder.
// Rounding is to nearest, ties away from zero, so that a remainder always fits into 16 bits with a sign.
struct Split {
  uint32_t rounded, remainder;
};

POLYAMP_EVERYWHERE Split split(float value) {
  const uint32_t bits = bits_of(value);
  if (is_nan(value)) return {BFloat16::kNan, 0};
  return {(bits + 0x8000) >> 16, bits & 0xffff};
}

POLYAMP_EVERYWHERE float join(uint32_t rounded, uint32_t remainder) {
  return float_of((rounded << 16) + static_cast<uint32_t>(static_cast<int16_t>(remainder)));
}

// Philox4x32-10: random words that depend only on a key and a counter, not on a grid or a state.
// Constants: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
struct Random {
  uint32_t words[4];

  // The noise of element 0..7: halves of words, the lower one first.
  POLYAMP_EVERYWHERE uint32_t half(int element) const { return words[element / 2] >> 16 * (element % 2) & 0xffff; }
};

POLYAMP_EVERYWHERE Random philox(uint32_t key_low, uint32_t key_high, uint64_t position, uint32_t stream) {
  uint32_t a = static_cast<uint32_t>(position), b = static_cast<uint32_t>(position >> 32), c = stream, d = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = 0xD2511F53ull * a, second = 0xCD9E8D57ull * c;
    a = static_cast<uint32_t>(second >> 32) ^ b ^ key_low;
    b = static_cast<uint32_t>(second);
    c = static_cast<uint32_t>(first >> 32) ^ d ^ key_high;
    d = static_cast<uint32_t>(first);
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

}  // namespace polyamp
