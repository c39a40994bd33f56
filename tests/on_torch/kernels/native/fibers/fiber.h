// Runs a grid of CUDA threads on the CPU, with what they do together: barriers, shuffles, atomics and fences.
//
// Each CUDA thread is a fiber: it has a stack of its own, and runs until it waits for others or ends. Which one of its
// block is next is random. Blocks are taken in random order by a few threads of the system, so that several are at work
// at once. A kernel that would hang or be undefined on a GPU ends the program with a line that says what and where:
//
//     fibers: block 3, thread 0 is at another barrier than thread 5, which waits at kernels.cuh:23 (kernels.cuh:40)
//
// The environment may say
//     POLYAMP_FIBERS_SEED     a number: which random order
//     POLYAMP_FIBERS_WITHOUT  kernels.cuh:23, say: the barrier or the fence there is left out
//     POLYAMP_FIBERS_COUNTS   a file that gets the numbers of launches, blocks, barriers and shuffles at the end
#pragma once

#include <stdint.h>

#include <functional>

namespace fiber {

// A line of the kernels' sources.
struct Line {
  const char* file;
  int number;
};

struct Index {
  uint32_t x, y, z;
};

// How many blocks a launch may have.
uint32_t most_blocks();

// Runs a kernel in every thread of every block, and returns when all have ended.
void launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel);

// The rest is for the threads of a kernel.

Index thread();
Index block();
uint32_t threads();
uint32_t blocks();

// Waits for all threads of the block, which must come to the same line.
void barrier(const Line& line);

// Waits for the lanes of the mask, which must come with the same mask to the same line; returns what each has brought,
// by lane, which stays until the next exchange.
const uint64_t* exchange(uint32_t mask, uint64_t word, const Line& line);

// As __syncwarp: an exchange that also orders what was written before it.
void meet(uint32_t mask, const Line& line);

void fence(const Line& line);

// While it lives, the thread changes the memory at an address as no other does.
class Atomic {
 public:
  explicit Atomic(void* address);
  ~Atomic();
};

// Ends the program, with what the running thread has done wrong.
[[noreturn]] void refuse(const char* what, const Line& line);

}  // namespace fiber
