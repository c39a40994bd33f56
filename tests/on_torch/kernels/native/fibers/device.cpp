// The kernels on fibers, in the place of the emulated grid: what the operators do on the CPU.
#include "cuda_on_cpu.h"

#include "kernels.cuh"
#include "steps.h"

namespace polyamp {
namespace {

// How many blocks devices hold. As many chunks always meet the same device, so that sums are the same each time.
constexpr uint32_t kDevices[] = {2, 6, 10, 264};

uint32_t blocks_for(uint32_t chunks) {
  const uint32_t scattered = chunks * 2654435769u >> 30;
  return std::clamp(chunks, 1u, std::min(kDevices[scattered], fiber::most_blocks()));
}

template <class Table>
int launch(void (*kernel)(const Table&), const Table& table, void*) {
  fiber::launch(blocks_for(table.tensors.chunks()), kThreads, [&] { kernel(table); });
  return 0;
}

int grad_stats(const GradTable& table, void* stream) { return launch(grad_stats_kernel, table, stream); }

int unscale_clip(const GradTable& table, void* stream) { return launch(unscale_clip_kernel, table, stream); }

template <class Rule>
int step(const StepTable<Rule>& table, Storage storage, void* stream) {
  return with_storage(storage, [&](auto kind) { return launch(step_kernel<Rule, decltype(kind)>, table, stream); });
}

}  // namespace

const Device kEmulated = {grad_stats, unscale_clip, step<Adam>, step<Sgd>};

}  // namespace polyamp
