// A step's work on a chunk: read a thread's eight elements of every stream, update them, and write them back.
#pragma once

#include "abi.h"
#include "vectors.h"

namespace polyamp {

// How parameters are stored: each type reads float32 values, and writes new ones.

struct Plain {  // float32
  using Param = Float32;

  template <class Lanes>
  POLYAMP_EVERYWHERE static void load(const Lanes& lanes, const void* param, const void*, float (&values)[kVector]) {
    lanes.template load<Float32>(param, values);
  }

  template <class Lanes>
  POLYAMP_EVERYWHERE static void store(const Lanes& lanes, void* param, void*, const float (&values)[kVector]) {
    lanes.template store<Float32>(param, values);
  }
};

template <class Format>
struct Master {  // 16 bits, with float32 masters
  using Param = Format;

  // A parameter is its master rounded. Where it is not, somebody wrote to it since the last step, and its value counts.
  template <class Lanes>
  POLYAMP_EVERYWHERE static void load(const Lanes& lanes, const void* param, const void* master,
                                      float (&values)[kVector]) {
    const auto packed = lanes.template read<typename Format::Bits>(param);
    lanes.template load<Float32>(master, values);
    POLYAMP_UNROLL
    for (int i = 0; i < kVector; ++i)
      if (packed.get(i) != Format::narrow(values[i])) values[i] = Format::widen(packed.get(i));
  }

  template <class Lanes>
  POLYAMP_EVERYWHERE static void store(const Lanes& lanes, void* param, void* master, const float (&values)[kVector]) {
    lanes.template store<Float32>(master, values);
    lanes.template store<Format>(param, values);
  }
};

// Calls `work` with an object of the storage's type.
template <class Work>
int with_storage(Storage storage, const Work& work) {
  switch (storage) {
    case kPlain: return work(Plain{});
    case kMasterFloat16: return work(Master<Float16>{});
    default: return work(Master<BFloat16>{});
  }
}

// Gradients have lanes of their own: their memory layout may differ, and writes are not slower because of it.
template <class Rule, class Kept, class Lanes, class GradLanes>
POLYAMP_EVERYWHERE void step_eight(const StepTable<Rule>& table, uint32_t tensor, const Lanes& lanes,
                                   const GradLanes& grad_lanes, const typename Rule::Coefficients& coefficients) {
  const auto& data = table.tensors.data;
  using Param = typename Kept::Param;
  float values[kVector], moments[Rule::kMoments][kVector] = {};
  Kept::load(lanes, data[kParam][tensor], data[kMaster][tensor], values);
  const auto grads = grad_lanes.template read<typename Param::Bits>(data[kGrad][tensor]);  // packed: fewer registers
  POLYAMP_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m)
    if (!Rule::kMayLackMoments || data[kMoment + m][tensor])
      lanes.template load<Float32>(data[kMoment + m][tensor], moments[m]);
  POLYAMP_UNROLL
  for (int i = 0; i < kVector; ++i)
    values[i] = Rule::update(values[i], Param::widen(grads.get(i)), moments, i, coefficients);
  POLYAMP_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m)
    if (!Rule::kMayLackMoments || data[kMoment + m][tensor])
      lanes.template store<Float32>(data[kMoment + m][tensor], moments[m]);
  Kept::store(lanes, data[kParam][tensor], data[kMaster][tensor], values);
}

// Which accesses to eight elements use 16 bytes at a time.
enum class Access { kNone, kAllButGrads, kAll };

// Misaligned gradients are usual: those of DistributedDataParallel may be views of its buckets.
template <class Rule>
POLYAMP_EVERYWHERE Access access_of(const StepTable<Rule>& table, uint32_t tensor, int left) {
  uint64_t written = address_of(table.tensors, kParam, tensor) | address_of(table.tensors, kMaster, tensor);
  POLYAMP_UNROLL
  for (int m = 0; m < Rule::kMoments; ++m) written |= address_of(table.tensors, kMoment + m, tensor);
  if (left < kVector || !is_aligned(written)) return Access::kNone;
  return is_aligned(address_of(table.tensors, kGrad, tensor)) ? Access::kAll : Access::kAllButGrads;
}

// A thread's part of a chunk.
template <class Rule, class Kept>
POLYAMP_EVERYWHERE void step_thread(const StepTable<Rule>& table, const Place& place, int thread,
                                    const typename Rule::Coefficients& coefficients) {
  const int left = static_cast<int>(place.length) - thread * kVector;
  if (left <= 0) return;
  const uint64_t at = place.start + thread * kVector;
  const Eight<true> whole{at, kVector};
  const Eight<false> part{at, left};
  const Access access = access_of(table, place.tensor, left);
  if (access == Access::kNone) step_eight<Rule, Kept>(table, place.tensor, part, part, coefficients);
  else if (access == Access::kAll) step_eight<Rule, Kept>(table, place.tensor, whole, whole, coefficients);
  else step_eight<Rule, Kept>(table, place.tensor, whole, Eight<false>{at, kVector}, coefficients);
}

template <class Rule>
POLYAMP_EVERYWHERE float* steps_of(const StepTable<Rule>& table, uint32_t tensor) {
  return static_cast<float*>(table.tensors.data[kMoment + Rule::kMoments][tensor]);
}

// The number of a tensor's next step.
template <class Rule>
POLYAMP_EVERYWHERE float count_of(const StepTable<Rule>& table, uint32_t tensor) {
  if constexpr (Rule::kCounts > 0) return *steps_of(table, tensor) + 1;
  else return 0;
}

// The coefficients of a table's groups at one step count. Nearly always all tensors have the same count, and this is
// computed once for all groups; for a tensor with another count, it is computed again.
template <class Rule>
struct Coefficients {
  typename Rule::Coefficients groups[StepTable<Rule>::kGroups];
  float count;  // NaN: not computed yet

  // A thread's part.
  POLYAMP_EVERYWHERE void work_out(const StepTable<Rule>& table, float wanted, uint32_t thread, uint32_t threads) {
    if (thread == 0) count = wanted;
    for (uint32_t i = thread; i < table.group_count; i += threads) {
      const typename Rule::Group& group = table.groups[i];
      const float factor = factor_of(*table.scale, table.stats, table.settings.max_norm);
      groups[i] = Rule::coefficients(group, group.lr_on_device ? *group.lr_on_device : group.lr, wanted, factor);
    }
  }

  POLYAMP_EVERYWHERE const typename Rule::Coefficients& of(const StepTable<Rule>& table, uint32_t tensor) const {
    return groups[table.tensors.tag[tensor]];
  }
};

// Adds one to the step counts of a launch's tensors.
template <class Rule>
POLYAMP_EVERYWHERE void count_steps(const StepTable<Rule>& table, int thread, int threads) {
  if constexpr (Rule::kCounts > 0) {
    if (!is_applied(table.stats)) return;
    for (uint32_t tensor = thread; tensor < table.tensors.count; tensor += threads) *steps_of(table, tensor) += 1;
  }
}

}  // namespace polyamp
