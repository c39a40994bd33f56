// CUDA's words, for the kernels' sources: to be included before them, in their place of nvcc's own.
//
// The sources are compiled as for a device, by a C++ compiler for the CPU.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "fiber.h"

#define __CUDA_ARCH__ 900
#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local  // a block stays on one thread of the system, which has no other meanwhile
#define POLYAMP_PARAMETER(Table) const Table&

#define threadIdx ::fiber::thread()
#define blockIdx ::fiber::block()
#define blockDim (::fiber::Index{::fiber::threads(), 1, 1})
#define gridDim (::fiber::Index{::fiber::blocks(), 1, 1})
#define warpSize 32

// Where the kernel calls: the last arguments of a function, which nobody gives.
#define POLYAMP_CALLER const char *file = __builtin_FILE(), int number = __builtin_LINE()
#define POLYAMP_LINE (fiber::Line{file, number})

// --- memory ----------------------------------------------------------------------------------------------------------

template <class T>
T* aligned(T* at, POLYAMP_CALLER) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(T) != 0) fiber::refuse("makes a misaligned access", POLYAMP_LINE);
  return at;
}

// Read and written as a whole, which a GPU does at multiples of 16 bytes only.
struct uint4 {
  uint32_t x, y, z, w;
  uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) : x(a), y(b), z(c), w(d) {}
  uint4(const uint4& other, POLYAMP_CALLER) {
    memcpy(static_cast<void*>(this), aligned(&other, file, number), sizeof other);
  }
  uint4& operator=(const uint4& other) {
    memcpy(static_cast<void*>(aligned(this)), aligned(&other), sizeof other);
    return *this;
  }
};

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <class T>
T __ldg(const T* from, POLYAMP_CALLER) { return *aligned(from, file, number); }
template <class T>
T __ldca(const T* from, POLYAMP_CALLER) { return *aligned(from, file, number); }
template <class T>
T __ldcg(const T* from, POLYAMP_CALLER) { return *aligned(from, file, number); }
template <class T>
T __ldcs(const T* from, POLYAMP_CALLER) { return *aligned(from, file, number); }
template <class T>
void __stcg(T* to, const T& value, POLYAMP_CALLER) {
  memcpy(static_cast<void*>(aligned(to, file, number)), &value, sizeof value);
}
template <class T>
void __stcs(T* to, const T& value, POLYAMP_CALLER) {
  memcpy(static_cast<void*>(aligned(to, file, number)), &value, sizeof value);
}

// --- threads together ------------------------------------------------------------------------------------------------

inline void __syncthreads(POLYAMP_CALLER) { fiber::barrier(POLYAMP_LINE); }
inline void __syncwarp(uint32_t mask = ~0u, POLYAMP_CALLER) { fiber::meet(mask, POLYAMP_LINE); }
inline void __threadfence(POLYAMP_CALLER) { fiber::fence(POLYAMP_LINE); }

// What a lane has brought; its own where the other would lie outside its segment of the warp.
template <class T>
T shuffle(uint32_t mask, T value, int (*source)(int lane, int distance), int distance, int width,
          const fiber::Line& line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "CUDA shuffles up to 8 bytes");
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  const uint64_t* words = fiber::exchange(mask, word, line);
  const int lane = threadIdx.x % warpSize, from = source(lane, distance);
  if (from < 0 || from / width != lane / width) return value;
  if (!(mask >> from & 1)) fiber::refuse("shuffles from a lane outside its mask", line);
  memcpy(&value, &words[from], sizeof value);
  return value;
}

template <class T>
T __shfl_down_sync(uint32_t mask, T value, uint32_t distance, int width = warpSize, POLYAMP_CALLER) {
  return shuffle(mask, value, [](int lane, int by) { return lane + by; }, distance, width, POLYAMP_LINE);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, uint32_t distance, int width = warpSize, POLYAMP_CALLER) {
  return shuffle(mask, value, [](int lane, int by) { return lane - by; }, distance, width, POLYAMP_LINE);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = warpSize, POLYAMP_CALLER) {
  return shuffle(mask, value, [](int lane, int by) { return lane ^ by; }, bits, width, POLYAMP_LINE);
}
template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = warpSize, POLYAMP_CALLER) {
  const int first = threadIdx.x % warpSize / width * width;
  return shuffle(mask, value, [](int, int from) { return from; }, first + source % width, width, POLYAMP_LINE);
}

inline uint32_t __ballot_sync(uint32_t mask, int holds, POLYAMP_CALLER) {
  const uint64_t* words = fiber::exchange(mask, holds != 0, POLYAMP_LINE);
  uint32_t lanes = 0;
  for (int lane = 0; lane < warpSize; ++lane)
    if (mask >> lane & 1) lanes |= static_cast<uint32_t>(words[lane]) << lane;
  return lanes;
}
inline int __any_sync(uint32_t mask, int holds, POLYAMP_CALLER) {
  return __ballot_sync(mask, holds, file, number) != 0;
}
inline int __all_sync(uint32_t mask, int holds, POLYAMP_CALLER) {
  return __ballot_sync(mask, holds, file, number) == mask;
}

// Not seen by ThreadSanitizer, which is told of the order that atomics make by fiber::Atomic.
template <class T, class Next>
[[gnu::no_sanitize("thread")]] T change(T* at, Next next) {
  const fiber::Atomic alone(at);
  T before, after;
  __atomic_load(aligned(at), &before, __ATOMIC_RELAXED);
  do after = next(before);
  while (!__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}

template <class T>
T atomicAdd(T* at, T value) { return change(at, [=](T before) { return before + value; }); }
template <class T>
T atomicOr(T* at, T value) { return change(at, [=](T before) { return before | value; }); }
template <class T>
T atomicMax(T* at, T value) { return change(at, [=](T before) { return std::max(before, value); }); }
template <class T>
T atomicMin(T* at, T value) { return change(at, [=](T before) { return std::min(before, value); }); }
template <class T>
T atomicExch(T* at, T value) { return change(at, [=](T) { return value; }); }
template <class T>
T atomicCAS(T* at, T expected, T value) {
  return change(at, [=](T before) { return before == expected ? value : before; });
}
inline uint32_t atomicInc(uint32_t* at, uint32_t last) {
  return change(at, [=](uint32_t before) { return before >= last ? 0 : before + 1; });
}

// --- numbers ---------------------------------------------------------------------------------------------------------

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

inline uint32_t __float_as_uint(float value) { return same_bits<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return same_bits<float>(bits); }
inline int32_t __float_as_int(float value) { return same_bits<int32_t>(value); }
inline float __int_as_float(int32_t bits) { return same_bits<float>(bits); }

using __half = _Float16;
inline __half __ushort_as_half(uint16_t bits) { return same_bits<__half>(bits); }
inline uint16_t __half_as_ushort(__half value) { return same_bits<uint16_t>(value); }
inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }

// Rounded to nearest, each by itself: -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
