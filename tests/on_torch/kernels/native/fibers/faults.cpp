// Small kernels, right ones and wrong ones, one of which is run: the one that the argument names.
#include "cuda_on_cpu.h"

#include <stdio.h>

#include "vectors.h"

namespace {

constexpr uint32_t kBlocks = 5, kThreads = 96;

bool is_even() { return threadIdx.x % 2 == 0; }

uint32_t number() { return blockIdx.x * blockDim.x + threadIdx.x; }

uint32_t sums[kBlocks], done, ticket;

// Sums the numbers of a block's threads by shuffles and atomics; the last block counts a round of the ticket.
__global__ void right() {
  __shared__ uint32_t sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  uint32_t value = number();
  for (int bit = 16; bit > 0; bit /= 2) value += __shfl_xor_sync(~0u, value, bit);
  if (threadIdx.x % warpSize == 0) atomicAdd(&sum, value);
  const uint32_t first = __shfl_sync(~0u, number(), 0), above = __shfl_down_sync(~0u, number(), 1);
  const bool alike = first == number() - threadIdx.x % warpSize;
  const bool next = above == number() + (threadIdx.x % warpSize < 31);
  if (!__all_sync(~0u, alike && next) || __any_sync(~0u, !alike) || __ballot_sync(~0u, is_even()) != 0x55555555u)
    fiber::refuse("finds a wrong shuffle", {__FILE__, __LINE__});
  __syncthreads();
  if (threadIdx.x != 0) return;
  sums[blockIdx.x] = sum;
  atomicAdd(&done, atomicInc(&ticket, gridDim.x - 1) == gridDim.x - 1 ? 1u : 0u);
}

__global__ void two_barriers() {
  if (is_even()) __syncthreads();
  else __syncthreads();
}

__global__ void ended_before_the_barrier() {
  if (threadIdx.x == 70) return;
  __syncthreads();
}

__global__ void ended_before_the_shuffle() {
  if (threadIdx.x == 70) return;
  __shfl_down_sync(~0u, 1, 1);
}

__global__ void two_shuffles() {
  if (is_even()) __shfl_down_sync(~0u, 1, 1);
  else __shfl_down_sync(~0u, 1, 1);
}

__global__ void two_masks() { __shfl_down_sync(is_even() ? ~0u : ~1u, 1, 1); }

__global__ void not_in_its_mask() { __shfl_down_sync(0x55555555u, 1, 1); }

__global__ void from_outside_its_mask() {
  if (is_even()) __shfl_xor_sync(0x55555555u, 1, 1);
}

alignas(16) char memory[32];

__global__ void misaligned_read() { polyamp::read_words<polyamp::Reuse::kSoon>(memory + 4); }

__global__ void misaligned_streaming_read() { polyamp::read_words<polyamp::Reuse::kNever>(memory + 8); }

__global__ void misaligned_write() { polyamp::write_words(memory + 2, {}); }

// What a block leaves in its shared memory, or zeros, is not what the next finds there.
bool is_stale = false;

__global__ void never_written() {
  __shared__ uint32_t words[8];
  if (words[0] == 7 || words[threadIdx.x % 8] == 0) is_stale = true;
  __syncthreads();
  words[0] = 7;
}

const struct {
  const char* name;
  void (*kernel)();
} kKernels[] = {{"right", right},
                {"two_barriers", two_barriers},
                {"ended_before_the_barrier", ended_before_the_barrier},
                {"ended_before_the_shuffle", ended_before_the_shuffle},
                {"two_shuffles", two_shuffles},
                {"two_masks", two_masks},
                {"not_in_its_mask", not_in_its_mask},
                {"from_outside_its_mask", from_outside_its_mask},
                {"misaligned_read", misaligned_read},
                {"misaligned_streaming_read", misaligned_streaming_read},
                {"misaligned_write", misaligned_write},
                {"never_written", never_written}};

bool sums_are_right() {
  for (uint32_t block = 0; block < kBlocks; ++block)
    if (sums[block] != kThreads * (2 * block * kThreads + kThreads - 1) / 2) return false;
  return done == 3 && ticket == 0;
}

}  // namespace

int main(int, char** arguments) {
  for (const auto& [name, kernel] : kKernels) {
    if (strcmp(name, arguments[1]) != 0) continue;
    for (int i = 0; i < 3; ++i) fiber::launch(kBlocks, kThreads, kernel);
    const bool holds = kernel == right ? sums_are_right() : !is_stale;
    puts(holds ? "as it must be" : "wrong results");
    return !holds;
  }
  puts("there is no such kernel");
  return 2;
}
