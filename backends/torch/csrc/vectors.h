// How a thread reads and writes memory: eight neighbouring elements at once.
//
// Eight elements are 16 bytes of a 16-bit format and 32 of float32, in accesses of 16 bytes, the widest that all
// architectures have. At a tensor's end, or in unaligned memory, the same eight are accessed one by one.
#pragma once

#include "tables.h"

namespace polyamp {

struct [[gnu::may_alias]] alignas(16) Words {
  uint32_t at[4];
};

enum class Reuse { kNever, kSoon };  // whether data that was read should stay in the cache

template <Reuse reuse>
POLYAMP_EVERYWHERE Words read_words(const void* from) {
#ifdef __CUDA_ARCH__
  const uint4* at = static_cast<const uint4*>(from);
  const uint4 words = reuse == Reuse::kSoon ? *at : __ldcs(at);
  return {{words.x, words.y, words.z, words.w}};
#else
  return *static_cast<const Words*>(from);
#endif
}

POLYAMP_EVERYWHERE void write_words(void* to, const Words& words) {
#ifdef __CUDA_ARCH__
  __stcs(static_cast<uint4*>(to), make_uint4(words.at[0], words.at[1], words.at[2], words.at[3]));
#else
  *static_cast<Words*>(to) = words;
#endif
}

// Eight elements of 16 or 32 bits, as memory has them (all machines that CUDA runs on are little-endian).
template <class Bits>
struct Packed {
  static constexpr int kWords = sizeof(Bits) * kVector / sizeof(Words);
  Words words[kWords];

  POLYAMP_EVERYWHERE uint32_t get(int i) const {
    if constexpr (sizeof(Bits) == 4) return words[i / 4].at[i % 4];
    else return words[0].at[i / 2] >> 16 * (i % 2) & 0xffff;
  }

  POLYAMP_EVERYWHERE void set(int i, uint32_t bits) {  // in ascending order
    if constexpr (sizeof(Bits) == 4) words[i / 4].at[i % 4] = bits;
    else if (i % 2 == 0) words[0].at[i / 2] = bits;
    else words[0].at[i / 2] |= bits << 16;
  }
};

// The position of eight neighbours, from element `at` on. Whole: all are inside the tensor, and its memory is aligned;
// else only the first `count` are inside, and those beyond read as zeros.
template <bool Whole>
struct Eight {
  uint64_t at;
  int count;

  template <class Bits, Reuse reuse = Reuse::kNever>
  POLYAMP_EVERYWHERE Packed<Bits> read(const void* stream) const {
    const Bits* from = static_cast<const Bits*>(stream) + at;
    Packed<Bits> packed;
    if constexpr (Whole) {
      POLYAMP_UNROLL
      for (int i = 0; i < packed.kWords; ++i) packed.words[i] = read_words<reuse>(from + i * kVector / packed.kWords);
    } else {
      POLYAMP_UNROLL
      for (int i = 0; i < kVector; ++i) packed.set(i, i < count ? from[i] : 0);
    }
    return packed;
  }

  template <class Bits>
  POLYAMP_EVERYWHERE void write(void* stream, const Packed<Bits>& packed) const {
    Bits* to = static_cast<Bits*>(stream) + at;
    if constexpr (Whole) {
      POLYAMP_UNROLL
      for (int i = 0; i < packed.kWords; ++i) write_words(to + i * kVector / packed.kWords, packed.words[i]);
    } else {
      POLYAMP_UNROLL
      for (int i = 0; i < kVector; ++i)
        if (i < count) to[i] = static_cast<Bits>(packed.get(i));
    }
  }

  template <class Format>
  POLYAMP_EVERYWHERE void load(const void* stream, float (&values)[kVector]) const {
    const auto packed = read<typename Format::Bits>(stream);
    POLYAMP_UNROLL
    for (int i = 0; i < kVector; ++i) values[i] = Format::widen(packed.get(i));
  }

  template <class Format>
  POLYAMP_EVERYWHERE void store(void* stream, const float (&values)[kVector]) const {
    Packed<typename Format::Bits> packed;
    POLYAMP_UNROLL
    for (int i = 0; i < kVector; ++i) packed.set(i, Format::narrow(values[i]));
    write(stream, packed);
  }
};

template <class T>
POLYAMP_EVERYWHERE uint64_t address_of(const T& tensors, int stream, uint32_t tensor) {
  return reinterpret_cast<uint64_t>(tensors.data[stream][tensor]);
}

// Whether memory allows accesses of 16 bytes: at its start, and so at every eighth element. For several addresses, pass
// the bitwise OR of them.
POLYAMP_EVERYWHERE bool is_aligned(uint64_t address) { return address % sizeof(Words) == 0; }

}  // namespace polyamp
