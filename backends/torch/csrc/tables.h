// The input of one launch: tensors cut into chunks, and the numbers that all of its threads need.
//
// A table is the kernel's only parameter and is passed by value: nothing is copied to the device beforehand, nothing
// on the host must outlive the launch, and a CUDA graph keeps its own copy. CUDA 12.1 allows 32,764 bytes of parameters
// (CUDA C++ Programming Guide, "__global__ function parameters"), which decides how many tensors go into one launch.
#pragma once

#include "numbers.h"

namespace polyamp {

constexpr int kThreads = 512;               // of a block
constexpr int kVector = 8;                  // elements that a thread takes at once: 16 bytes of a 16-bit format
constexpr int kSweep = kThreads * kVector;  // elements that a block takes at once
constexpr int kMaxBlocks = 1024;            // for whose partial sums the workspace has room
constexpr int kParameterBytes = 32764;

// A chunk is a block's work before it looks for its next one, in this many sweeps.
template <int Streams, int Capacity, int Sweeps>
struct Tensors {
  static constexpr int kStreams = Streams, kCapacity = Capacity, kSweeps = Sweeps, kChunk = Sweeps * kSweep;

  void* data[Streams][Capacity];
  uint32_t first[Capacity + 1];  // chunks of all tensors before this one
  uint32_t count;
  uint16_t last[Capacity];  // elements in a tensor's last chunk
  uint8_t tag[Capacity];    // which group, or which format

  POLYAMP_EVERYWHERE uint32_t chunks() const { return first[count]; }
};

// The position of a chunk.
struct Place {
  uint32_t tensor, length;
  uint64_t start;
};

// The tensor is only searched if it is not that of `near`, the position before.
template <class T>
POLYAMP_EVERYWHERE Place locate(const T& tensors, uint32_t chunk, uint32_t near) {
  uint32_t tensor = near;
  if (chunk < tensors.first[near] || chunk >= tensors.first[near + 1]) {
    uint32_t low = 0, high = tensors.count - 1;  // the last tensor whose first chunk is not beyond
    while (low < high) {
      const uint32_t middle = (low + high + 1) / 2;
      if (tensors.first[middle] <= chunk) low = middle;
      else high = middle - 1;
    }
    tensor = low;
  }
  const bool is_last = chunk + 1 == tensors.first[tensor + 1];
  const uint32_t length = is_last ? tensors.last[tensor] : static_cast<uint32_t>(T::kChunk);
  return {tensor, length, static_cast<uint64_t>(chunk - tensors.first[tensor]) * T::kChunk};
}

// Gradients of any formats, and losses, which are only tested.
enum Tag : uint8_t { kFloat32, kFloat16, kBFloat16, kFormats = 3, kLoss = 4 };

struct GradTable {
  Tensors<1, 2048 + 64, 4> tensors;  // tag: a format, and for losses kLoss
  double* stats;       // sum of squares, non-finite gradients, non-finite losses
  double* workspace;
  const float* scale;
  double max_norm;
  uint32_t adds;       // whether statistics of an earlier launch are added to
};
static_assert(sizeof(GradTable) <= kParameterBytes, "a launch's parameters");

// A workspace is memory of the launches that follow each other on one stream: three partial sums for each block, then
// the ticket, which counts the blocks that are done, and is 0 between launches. Optimizers that may step on separate
// streams must not share it.
constexpr int kWorkspace = 3 * kMaxBlocks + 1;  // float64 numbers

POLYAMP_EVERYWHERE uint32_t* ticket_in(double* workspace) {
  return reinterpret_cast<uint32_t*>(workspace + 3 * kMaxBlocks);
}

enum Stream { kParam, kMaster, kGrad, kMoment };  // kMaster: if it has one; then one or two moments

// The loss scale and its counts on the device; see polyamp.settings.LossScaleState.
struct State {
  float scale;
  int32_t good_steps, hysteresis, skipped_in_a_row, skipped, steps, growths, calibrating, grown_at;
  float overflow_scale;
};

constexpr int kControl = 16;  // 32-bit numbers in a Control, and in a Report

struct Control {
  State state;
  int32_t unused[6];
};
static_assert(sizeof(Control) == kControl * sizeof(int32_t), "the operators' int32[16]");

struct Report {
  State state;
  int32_t applied, losses_finite, unused[4];
};
static_assert(sizeof(Report) == kControl * sizeof(int32_t), "the operators' int32[16]");

struct Settings {
  double max_norm;
  float growth, backoff, min, max;
  int32_t interval, hysteresis, restart, after_growth;
  bool advance, consecutive;
};

template <class Rule>
struct StepTable {
  static constexpr int kGroups = 24;
  Tensors<kMoment + Rule::kMoments + Rule::kCounts, 576, 1> tensors;  // tag: a group of this table
  typename Rule::Group groups[kGroups];
  uint32_t group_count;
  Settings settings;
  const double* stats;
  const float* scale;
  Control* control;
  double* workspace;
  Report* report;
  bool is_last;  // of the call's launches
};

}  // namespace polyamp
