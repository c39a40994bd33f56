// A step's work on a chunk: read a thread's eight elements of every stream, update them, and write them back.
#pragma once

#include "rules.h"
#include "vectors.h"

namespace polyamp {

// Where a tensor's random bits come from.
struct Chance {
  uint32_t seed, draws, tensor;
};

// How parameters are kept: each reads float32 values, and writes new ones.

struct Plain {  // float32
  using Param = Float32;

  template <class Lanes>
  POLYAMP_EVERYWHERE static void load(const Lanes& lanes, const void* param, const void*, float (&values)[kVector]) {
    lanes.template load<Float32>(param, values);
  }

  template <class Lanes>
  POLYAMP_EVERYWHERE static void store(const Lanes& lanes, void* param, void*, const float (&values)[kVector],
                                       const Chance&) {
    lanes.template store<Float32>(param, values);
  }
};

template <class Format>
struct Master {  // 16 bits, whose old values are not even read, beside float32
  using Param = Format;

  template <class Lanes>
  POLYAMP_EVERYWHERE static void load(const Lanes& lanes, const void*, const void* master, float (&values)[kVector]) {
    lanes.template load<Float32>(master, values);
  }

  template <class Lanes>
  POLYAMP_EVERYWHERE static void store(const Lanes& lanes, void* param, void* master, const float (&values)[kVector],
                                       const Chance&) {
    lanes.template store<Float32>(master, values);
    lanes.template store<Format>(param, values);
  }
};

struct Remainder {  // bfloat16 beside the 16 bits that rounding left over
  using Param = BFloat16;

  template <class Lanes>
  POLYAMP_EVERYWHERE static void load(const Lanes& lanes, const void* param, const void* rest,
                                      float (&values)[kVector]) {
    const auto rounded = lanes.template read<uint16_t>(param), remainder = lanes.template read<uint16_t>(rest);
    POLYAMP_UNROLL
    for (int i = 0; i < kVector; ++i) values[i] = join(rounded.get(i), remainder.get(i));
  }

  template <class Lanes>
  POLYAMP_EVERYWHERE static void store(const Lanes& lanes, void* param, void* rest, const float (&values)[kVector],
                                       const Chance&) {
    Packed<uint16_t> rounded, remainder;
    POLYAMP_UNROLL
    for (int i = 0; i < kVector; ++i) {
      const Split both = split(values[i]);
      rounded.set(i, both.rounded);
      remainder.set(i, both.remainder);
    }
    lanes.write(param, rounded);
    lanes.write(rest, remainder);
  }
};

template <class Format>
struct Stochastic {  // 16 bits alone, rounded by chance
  using Param = Format;

  template <class Lanes>
  POLYAMP_EVERYWHERE static void load(const Lanes& lanes, const void* param, const void*, float (&values)[kVector]) {
    lanes.template load<Format>(param, values);
  }

  template <class Lanes>
  POLYAMP_EVERYWHERE static void store(const Lanes& lanes, void* param, void*, const float (&values)[kVector],
                                       const Chance& chance) {
    const Random random = philox(chance.seed, chance.draws, lanes.at / kVector, chance.tensor);
    Packed<uint16_t> rounded;
    POLYAMP_UNROLL
    for (int i = 0; i < kVector; ++i) rounded.set(i, Format::narrow_by_chance(values[i], random.half(i)));
    lanes.write(param, rounded);
  }
};

template <class Rule, class Kept, bool Whole>
POLYAMP_EVERYWHERE void step_eight(const StepTable<Rule>& table, uint32_t tensor, const Eight<Whole>& lanes,
                                   const typename Rule::Coefficients& coefficients) {
  const auto& data = table.tensors.data;
  float values[kVector], grads[kVector], moments[Rule::kMoments][kVector] = {};
  Kept::load(lanes, data[kParam][tensor], data[kKept][tensor], values);
  lanes.template load<typename Kept::Param>(data[kGrad][tensor], grads);
  POLYAMP_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m)
    if (!Rule::kMayLackMoments || data[kMoment + m][tensor])
      lanes.template load<Float32>(data[kMoment + m][tensor], moments[m]);
  POLYAMP_UNROLL
  for (int i = 0; i < kVector; ++i) values[i] = Rule::update(values[i], grads[i], moments, i, coefficients);
  POLYAMP_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m)
    if (!Rule::kMayLackMoments || data[kMoment + m][tensor])
      lanes.template store<Float32>(data[kMoment + m][tensor], moments[m]);
  const Chance chance{table.settings.seed, table.control->draws, table.index + tensor};
  Kept::store(lanes, data[kParam][tensor], data[kKept][tensor], values, chance);
}

// A thread's part of a chunk.
template <class Rule, class Kept>
POLYAMP_EVERYWHERE void step_thread(const StepTable<Rule>& table, const Place& place, int thread,
                                    const typename Rule::Coefficients& coefficients) {
  const int left = static_cast<int>(place.length) - thread * kVector;
  const uint64_t at = place.start + thread * kVector;
  if (left >= kVector && is_aligned<kMoment + Rule::kMoments>(table.tensors, place.tensor)) {
    step_eight<Rule, Kept>(table, place.tensor, Eight<true>{at, kVector}, coefficients);
  } else if (left > 0) {
    step_eight<Rule, Kept>(table, place.tensor, Eight<false>{at, left}, coefficients);
  }
}

// What coefficients depend on.
struct Key {
  int group;
  float count;

  POLYAMP_EVERYWHERE bool operator==(const Key& other) const { return group == other.group && count == other.count; }
};
constexpr Key kNoKey = {-1, 0};

template <class Rule>
POLYAMP_EVERYWHERE float* steps_of(const StepTable<Rule>& table, uint32_t tensor) {
  return static_cast<float*>(table.tensors.data[kMoment + Rule::kMoments][tensor]);
}

template <class Rule>
POLYAMP_EVERYWHERE Key key_of(const StepTable<Rule>& table, uint32_t tensor) {
  float count = 0;
  if constexpr (Rule::kCounts > 0) count = *steps_of(table, tensor) + 1;
  return {table.tensors.tag[tensor], count};
}

template <class Rule>
POLYAMP_EVERYWHERE typename Rule::Coefficients coefficients_of(const StepTable<Rule>& table, const Key& key) {
  const typename Rule::Group& group = table.groups[key.group];
  const float factor = factor_of(*table.scale, table.stats, table.settings.max_norm);
  return Rule::coefficients(group, group.lr_on_device ? *group.lr_on_device : group.lr, key.count, factor);
}

// The steps that a launch's tensors have had, one more.
template <class Rule>
POLYAMP_EVERYWHERE void count_steps(const StepTable<Rule>& table, int thread, int threads) {
  if constexpr (Rule::kCounts > 0) {
    if (!is_applied(table.stats)) return;
    for (uint32_t tensor = thread; tensor < table.tensors.count; tensor += threads) *steps_of(table, tensor) += 1;
  }
}

}  // namespace polyamp
