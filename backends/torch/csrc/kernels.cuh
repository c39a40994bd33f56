// The kernels: a persistent grid (two blocks for each multiprocessor) walks the chunks of a table; the last block to
// end does the work that needs all results.
//
// Only here do threads cooperate: barriers, shuffles, and one ticket for each launch.
#pragma once

#include "gradients.h"
#include "steps.h"

namespace polyamp {

constexpr int kBlocksPerMultiprocessor = 2;  // with 512 threads, 64 registers for each
#define POLYAMP_KERNEL __global__ __launch_bounds__(polyamp::kThreads, polyamp::kBlocksPerMultiprocessor) void
#ifndef POLYAMP_PARAMETER  // else the code that runs the kernels on the CPU defines how a thread gets its table
#define POLYAMP_PARAMETER(Table) const __grid_constant__ Table
#endif

// Returns, to every thread of the block, whether all other blocks are done and their writes are visible. The ticket
// counts them and is 0 again after the last.
__device__ inline bool is_last_block(uint32_t* ticket) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Sum over a block in a fixed order. Only the first thread gets the result.
__device__ inline double block_sum(double value) {
  constexpr int kWarp = 32;
  __shared__ double warps[kThreads / kWarp];
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_down_sync(~0u, value, distance);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  if (threadIdx.x == 0)
    for (const double part : warps) sum += part;
  __syncthreads();
  return sum;
}

__device__ inline void sum_up(const GradTable& table, const Tally& tally) {
  double parts[] = {tally.squares, static_cast<double>(tally.grads), static_cast<double>(tally.losses)};
  for (int i = 0; i < 3; ++i) {
    const double sum = block_sum(parts[i]);
    if (threadIdx.x == 0) table.workspace[3 * blockIdx.x + i] = sum;
  }
  if (!is_last_block(ticket_in(table.workspace))) return;
  for (int i = 0; i < 3; ++i) {
    double part = 0;
    for (uint32_t block = threadIdx.x; block < gridDim.x; block += kThreads)
      part += __ldcg(&table.workspace[3 * block + i]);  // of other blocks: not from this multiprocessor's cache
    const double sum = block_sum(part);
    if (threadIdx.x == 0) table.stats[i] = table.adds ? table.stats[i] + sum : sum;
  }
}

POLYAMP_KERNEL grad_stats_kernel(POLYAMP_PARAMETER(GradTable) table) {
  const float inverse = inverse_of(*table.scale);
  Tally tally;
  uint32_t tensor = 0;
  for (uint32_t chunk = blockIdx.x; chunk < table.tensors.chunks(); chunk += gridDim.x) {
    const Place place = locate(table.tensors, chunk, tensor);
    tensor = place.tensor;
    tally_thread(table, place, threadIdx.x, inverse, tally);
  }
  sum_up(table, tally);
}

POLYAMP_KERNEL unscale_clip_kernel(POLYAMP_PARAMETER(GradTable) table) {
  __shared__ float factor;  // computed by one thread: float64 is slow on many GPUs
  if (threadIdx.x == 0) factor = factor_of(*table.scale, table.stats, table.max_norm);
  __syncthreads();
  if (!is_applied(table.stats) || factor == 1) return;
  uint32_t tensor = 0;
  for (uint32_t chunk = blockIdx.x; chunk < table.tensors.chunks(); chunk += gridDim.x) {
    const Place place = locate(table.tensors, chunk, tensor);
    tensor = place.tensor;
    rescale_thread(table, place, threadIdx.x, factor);
  }
}

// Chunks are walked from last to first: those that the statistics read last may still be in the cache.
template <class Rule, class Kept>
__device__ void step_block(const StepTable<Rule>& table) {
  __shared__ Coefficients<Rule> coefficients;  // only changes between two barriers
  if (threadIdx.x == 0) coefficients.count = NAN;
  __syncthreads();
  const uint32_t chunks = table.tensors.chunks();
  uint32_t tensor = 0;
  for (uint32_t i = blockIdx.x; i < chunks; i += gridDim.x) {
    const Place place = locate(table.tensors, chunks - 1 - i, tensor);
    tensor = place.tensor;
    const float count = count_of(table, tensor);
    if (count != coefficients.count) {  // the same for all threads of the block
      __syncthreads();
      coefficients.work_out(table, count, threadIdx.x, kThreads);
      __syncthreads();
    }
    step_thread<Rule, Kept>(table, place, threadIdx.x, coefficients.of(table, tensor));
  }
}

template <class Rule, class Kept>
POLYAMP_KERNEL step_kernel(POLYAMP_PARAMETER(StepTable<Rule>) table) {
  if (is_applied(table.stats)) step_block<Rule, Kept>(table);
  if (!is_last_block(ticket_in(table.workspace))) return;
  count_steps(table, threadIdx.x, kThreads);
  if (table.is_last && threadIdx.x == 0) finish(*table.control, table.stats, table.settings, *table.report);
}

}  // namespace polyamp
