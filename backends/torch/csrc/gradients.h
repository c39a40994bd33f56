// What is done to gradients alone: taking their statistics, and unscaling and clipping them in place.
#pragma once

#include "rules.h"
#include "vectors.h"

namespace polyamp {

// What a thread has found so far.
struct Tally {
  double squares = 0;
  uint32_t grads = 0, losses = 0;  // that are not finite
};

constexpr int kSweeps = decltype(GradTable::tensors)::kSweeps;

// What a thread takes of a chunk: one eight in each sweep of the block over it.
template <class Format>
struct Share {
  using Bits = typename Format::Bits;
  void* stream;
  bool aligned;
  uint64_t at;  // its first element
  int left;     // elements from there to the chunk's end; none, if negative
  Packed<Bits> sweeps[kSweeps];

  POLYAMP_EVERYWHERE Share(const GradTable& table, const Place& place, int thread)
      : stream(table.tensors.data[0][place.tensor]),
        aligned(is_aligned<1>(table.tensors, place.tensor)),
        at(place.start + thread * kVector),
        left(static_cast<int>(place.length) - thread * kVector) {}

  // All of it before the first is used, so that much is on its way from memory.
  template <Reuse reuse>
  POLYAMP_EVERYWHERE void read() {
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

// The sum of eight squares: in float64 where float32 overflows.
POLYAMP_EVERYWHERE double squares_of(const float (&values)[kVector], float inverse) {
  float sum = 0;
  POLYAMP_UNROLL
  for (const float value : values) sum += square(value * inverse);
  if (is_finite(sum)) return sum;
  double wide = 0;
  POLYAMP_UNROLL
  for (const float value : values) wide += square(static_cast<double>(value) * static_cast<double>(inverse));
  return wide;
}

template <class Format>
POLYAMP_EVERYWHERE void tally_chunk(const GradTable& table, const Place& place, int thread, float inverse,
                                    Tally& tally) {
  const bool is_loss = table.tensors.tag[place.tensor] & kLoss;
  Share<Format> share(table, place, thread);
  if (share.left <= 0) return;
  share.template read<Reuse::kSoon>();
  POLYAMP_UNROLL
  for (const auto& packed : share.sweeps) {
    float values[kVector];
    uint32_t found = 0;
    POLYAMP_UNROLL
    for (int i = 0; i < kVector; ++i) {
      values[i] = Format::widen(packed.get(i));
      found += !is_finite(values[i]);
    }
    (is_loss ? tally.losses : tally.grads) += found;
    if (!is_loss) tally.squares += squares_of(values, inverse);
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
