// Work on gradients alone: computing their statistics, and unscaling and clipping them in place.
#pragma once

#include "update_rules.h"
#include "vectors.h"

namespace polyamp {

// The statistics of one thread so far.
struct Tally {
  double squares = 0;
  uint32_t grads = 0, losses = 0;  // number of non-finite elements
};

constexpr int kSweeps = decltype(GradTable::tensors)::kSweeps;

// A thread's part of a chunk: eight elements in each sweep of the block over it.
template <class Format>
struct Share {
  using Bits = typename Format::Bits;
  void* stream;
  bool aligned;
  uint64_t at;  // its first element
  int left;     // elements from there to the chunk's end; none if negative
  Packed<Bits> sweeps[kSweeps];

  POLYAMP_EVERYWHERE Share(const GradTable& table, const Place& place, int thread)
      : stream(table.tensors.data[0][place.tensor]),
        aligned(is_aligned(address_of(table.tensors, 0, place.tensor))),
        at(place.start + thread * kVector),
        left(static_cast<int>(place.length) - thread * kVector) {}

  // Load everything before the first use, so that many loads are in flight. The usual case has its own branch:
  // next to the other accesses, the assembler used its first load before it issued the next.
  template <Reuse reuse>
  POLYAMP_EVERYWHERE void read() {
    if (is_whole(kSweeps - 1)) {
      POLYAMP_UNROLL
      for (int i = 0; i < kSweeps; ++i) sweeps[i] = eight<true>(i).template read<Bits, reuse>(stream);
      return;
    }
    POLYAMP_UNROLL
    for (int i = 0; i < kSweeps; ++i) {
      if (is_whole(i)) sweeps[i] = eight<true>(i).template read<Bits, reuse>(stream);
      else sweeps[i] = eight<false>(i).template read<Bits, reuse>(stream);
    }
  }

  POLYAMP_EVERYWHERE void write() const {
    POLYAMP_UNROLL
    for (int i = 0; i < kSweeps; ++i) {
      if (is_whole(i)) eight<true>(i).write(stream, sweeps[i]);
      else eight<false>(i).write(stream, sweeps[i]);
    }
  }

  POLYAMP_EVERYWHERE bool is_whole(int sweep) const { return aligned && left - sweep * kSweep >= kVector; }

  template <bool Whole>
  POLYAMP_EVERYWHERE Eight<Whole> eight(int sweep) const {
    return {at + sweep * kSweep, left - sweep * kSweep};
  }
};

template <class Number>
POLYAMP_EVERYWHERE Number square(Number number) {
  return number * number;
}

template <class Format>
POLYAMP_EVERYWHERE float sum_of_squares(const Packed<typename Format::Bits>& packed, float inverse) {
  float sum = square(Format::widen(packed.get(0)) * inverse);
  POLYAMP_UNROLL
  for (int i = 1; i < kVector; ++i) sum += square(Format::widen(packed.get(i)) * inverse);
  return sum;
}

// The same in float64, where finite numbers have finite squares.
template <class Format>
POLYAMP_EVERYWHERE double wide_sum_of_squares(const Packed<typename Format::Bits>& packed, float inverse) {
  double sum = 0;
  POLYAMP_UNROLL
  for (int i = 0; i < kVector; ++i)
    sum += square(static_cast<double>(Format::widen(packed.get(i))) * static_cast<double>(inverse));
  return sum;
}

template <class Format>
POLYAMP_EVERYWHERE uint32_t count_non_finite(const Packed<typename Format::Bits>& packed) {
  uint32_t count = 0;
  POLYAMP_UNROLL
  for (int i = 0; i < kVector; ++i) count += !is_finite(Format::widen(packed.get(i)));
  return count;
}

// A sum of squares is finite only if every number is: only if it is not, the numbers are tested one by one. That halves
// the instructions, which limited this kernel for 16-bit gradients.
template <class Format>
POLYAMP_EVERYWHERE void tally_chunk(const GradTable& table, const Place& place, int thread, float inverse,
                                    Tally& tally) {
  Share<Format> share(table, place, thread);
  if (share.left <= 0) return;
  share.template read<Reuse::kSoon>();
  double squares = tally.squares;
  uint32_t found = 0;
  POLYAMP_UNROLL
  for (const auto& packed : share.sweeps) {
    const float sum = sum_of_squares<Format>(packed, inverse);
    if (is_finite(sum)) {
      squares += sum;
    } else {
      squares += wide_sum_of_squares<Format>(packed, inverse);
      found += count_non_finite<Format>(packed);
    }
  }
  if (table.tensors.tag[place.tensor] & kLoss) {
    tally.losses += found;
  } else {
    tally.grads += found;
    tally.squares = squares;
  }
}

template <class Format>
POLYAMP_EVERYWHERE void rescale_chunk(const GradTable& table, const Place& place, int thread, float factor) {
  Share<Format> share(table, place, thread);
  if (share.left <= 0) return;
  share.template read<Reuse::kNever>();
  POLYAMP_UNROLL
  for (auto& packed : share.sweeps) {
    const auto before = packed;
    POLYAMP_UNROLL
    for (int i = 0; i < kVector; ++i) packed.set(i, Format::narrow(Format::widen(before.get(i)) * factor));
  }
  share.write();
}

POLYAMP_EVERYWHERE void tally_thread(const GradTable& table, const Place& place, int thread, float inverse,
                                     Tally& tally) {
  switch (table.tensors.tag[place.tensor] % kLoss) {
    case kFloat32: return tally_chunk<Float32>(table, place, thread, inverse, tally);
    case kFloat16: return tally_chunk<Float16>(table, place, thread, inverse, tally);
    default: return tally_chunk<BFloat16>(table, place, thread, inverse, tally);
  }
}

POLYAMP_EVERYWHERE void rescale_thread(const GradTable& table, const Place& place, int thread, float factor) {
  switch (table.tensors.tag[place.tensor]) {
    case kFloat32: return rescale_chunk<Float32>(table, place, thread, factor);
    case kFloat16: return rescale_chunk<Float16>(table, place, thread, factor);
    default: return rescale_chunk<BFloat16>(table, place, thread, factor);
  }
}

}  // namespace polyamp
