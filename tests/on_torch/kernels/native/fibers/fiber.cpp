// The fibers of fiber.h, and the blocks and processors that run them.
#include "fiber.h"

#include <link.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ordering.h"

namespace fiber {
namespace {

constexpr uint32_t kLanes = 32;      // of a warp
constexpr size_t kStack = 64 << 10;  // bytes of a fiber's stack, with a page before it that nothing may touch
constexpr size_t kProcessors = 3;    // threads of the system that take blocks

std::string variable(const char* name) {
  const char* value = getenv(name);
  return value ? value : "";
}

bool operator==(const Line& one, const Line& other) {
  return one.number == other.number && strcmp(one.file, other.file) == 0;
}

std::string text(const Line& line) {
  const char* slash = strrchr(line.file, '/');
  return (slash ? slash + 1 : line.file) + (":" + std::to_string(line.number));
}

const std::string left_out = variable("POLYAMP_FIBERS_WITHOUT");

bool is_left_out(const Line& line) { return !left_out.empty() && left_out == text(line); }

std::mutex last_words;  // the first block to fail speaks, and ends the program

struct Counts {
  std::atomic<uint64_t> launches{0}, blocks{0}, barriers{0}, shuffles{0};

  ~Counts() {
    const std::string path = variable("POLYAMP_FIBERS_COUNTS");
    if (path.empty()) return;
    FILE* file = fopen(path.c_str(), "w");
    if (!file) return;
    fprintf(file, "{\"launches\": %lu, \"blocks\": %lu, \"barriers\": %lu, \"shuffles\": %lu}\n", launches.load(),
            blocks.load(), barriers.load(), shuffles.load());
    fclose(file);
  }
} counts;

// Where a fiber, or the thread of the system that began with it, goes on.
struct Context {
  void* registers[5];  // of __builtin_setjmp, which, unlike swapcontext, makes no system call
  ucontext_t beginning;
  bool has_begun = false;
  ordering::Actor actor = nullptr;
};

[[gnu::noinline, noreturn]] void go_on(Context& to) {
  if (!to.has_begun) {
    to.has_begun = true;
    setcontext(&to.beginning);
  }
  __builtin_longjmp(to.registers, 1);
}

[[gnu::noinline]] void leave(Context& from, Context& to) {
  ordering::become(to.actor);
  if (__builtin_setjmp(from.registers) == 0) go_on(to);
}

class Processor;

enum class Doing { kRuns, kBarrier, kShuffle, kEnded };

struct Fiber {
  Context context;
  Processor* processor;
  uint32_t thread;
  Doing doing;
  Line line;           // where it waits
  char written, seen;  // addresses for `ordering`: what its last fence released, and its next acquires
};

thread_local Fiber* running = nullptr;

struct Warp {
  uint64_t words[2][kLanes];  // of this exchange and of the last, which a slow lane may still read
  uint32_t mask, arrived;
  uint32_t round;
  Line line;
  char meetings[2];  // addresses for `ordering`
};

// What the kernels call __shared__, of one thread of the system: all thread-local memory of this library or program.
struct Shared {
  char* begin = nullptr;
  size_t bytes = 0;

  static Shared find() {
    Shared found;
    dl_iterate_phdr(look_into, &found);
    return found;
  }

  // Each block finds other rubbish.
  void spoil(std::minstd_rand& random) const {
    for (size_t i = 0; i < bytes; ++i) begin[i] = static_cast<char>(random() >> 8);
  }

 private:
  static int look_into(dl_phdr_info* library, size_t, void* found) {
    char* const begin = static_cast<char*>(library->dlpi_tls_data);
    char* const own = reinterpret_cast<char*>(&running);
    for (int i = 0; begin && i < library->dlpi_phnum; ++i) {
      const size_t bytes = library->dlpi_phdr[i].p_memsz;
      if (library->dlpi_phdr[i].p_type != PT_TLS || own < begin || own >= begin + bytes) continue;
      *static_cast<Shared*>(found) = {begin, bytes};
      return 1;
    }
    return 0;
  }
};

// A launch, of which processors take blocks.
struct Launch {
  const std::function<void()>& kernel;
  uint32_t threads;
  std::vector<uint32_t> blocks;  // in the order in which they are taken
  std::atomic<size_t> taken{0};
};

// Runs one block after another, each with the same fibers.
class Processor {
 public:
  Launch* launch;
  uint32_t block;

  explicit Processor(uint32_t seed) : random_(seed), stranger_(ordering::create()) {}

  void run(Launch& given) {
    launch = &given;
    main_.has_begun = true;
    main_.actor = ordering::current();
    const Shared shared = Shared::find();
    while (fibers_.size() < given.threads) fibers_.push_back(make(fibers_.size()));
    for (size_t next; (next = given.taken++) < given.blocks.size();) {
      block = given.blocks[next];
      shared.spoil(random_);
      run_block();
      ++counts.blocks;
    }
  }

  void barrier(Fiber& fiber, const Line& line) {
    if (waiting_ == 0) meeting_ = &fiber;
    else if (!(line == meeting_->line)) refuse(("is at another barrier than " + said(*meeting_)).c_str(), line);
    const uint32_t round = round_;
    ordering::release(&barriers_[round]);
    if (++waiting_ == launch->threads) {
      waiting_ = 0, round_ ^= 1;
      for (uint32_t thread = 0; thread < launch->threads; ++thread) ready_.push_back(fibers_[thread].get());
      ++counts.barriers;
    }
    rest(fiber, Doing::kBarrier, line);
    ordering::acquire(&barriers_[round]);
  }

  const uint64_t* exchange(Fiber& fiber, uint32_t mask, uint64_t word, const Line& line) {
    Warp& warp = warps_[fiber.thread / kLanes];
    const uint32_t lane = fiber.thread % kLanes;
    if (!(mask >> lane & 1)) refuse("is not in its own mask", line);
    if (warp.arrived == 0) warp.mask = mask, warp.line = line;
    else if (warp.mask != mask) refuse("has another mask than the rest of its warp", line);
    else if (!(warp.line == line)) refuse(("is at another shuffle than " + text(warp.line)).c_str(), line);
    uint64_t* const words = warp.words[warp.round];
    words[lane] = word;
    warp.arrived |= 1u << lane;
    if (warp.arrived == mask) {
      warp.arrived = 0, warp.round ^= 1;
      for (uint32_t other = 0; other < kLanes; ++other)
        if (mask >> other & 1) ready_.push_back(fibers_[fiber.thread - lane + other].get());
      ++counts.shuffles;
    }
    rest(fiber, Doing::kShuffle, line);
    return words;
  }

  // Other blocks come between; long enough for all of them to end where ThreadSanitizer looks for what then goes wrong.
  void pause() {
    if (ordering::kIsWatched) usleep(random_() % 8000);
    else if (random_() % 8 == 0) sched_yield();
  }

  // Of the meeting that the warp of a fiber comes to next.
  void* meeting(const Fiber& fiber) {
    Warp& warp = warps_[fiber.thread / kLanes];
    return &warp.meetings[warp.round];
  }

  // What an atomic does to the order of things is between fences: what a thread wrote before its last fence is seen by
  // those that find the atomic's result, after their next. A stranger to all carries it, since the thread itself would
  // tell what it has done since. To be called by one thread at a time.
  void carry(Fiber& fiber, void* address) {
    ordering::become(stranger_);
    const ordering::Actor carrier = ordering::create();
    ordering::become(carrier);
    ordering::acquire(address);
    ordering::release(&fiber.seen);
    ordering::acquire(&fiber.written);
    ordering::release(address);
    ordering::become(fiber.context.actor);
    ordering::destroy(carrier);
  }

 private:
  std::minstd_rand random_;
  ordering::Actor stranger_;
  Context main_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> ready_;
  Warp warps_[1024 / kLanes] = {};
  Fiber* meeting_ = nullptr;  // the first at the barrier
  uint32_t waiting_ = 0, ended_ = 0, round_ = 0;
  char barriers_[2], start_, end_;  // addresses for `ordering`

  std::unique_ptr<Fiber> make(uint32_t thread) {
    const size_t page = sysconf(_SC_PAGESIZE);
    void* memory = mmap(nullptr, page + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
      perror("fibers: no memory for a stack");
      abort();
    }
    auto fiber = std::make_unique<Fiber>();
    fiber->processor = this;
    fiber->thread = thread;
    fiber->context.actor = ordering::create();
    getcontext(&fiber->context.beginning);
    fiber->context.beginning.uc_stack = {static_cast<char*>(memory) + page, 0, kStack};
    makecontext(&fiber->context.beginning, live, 0);
    return fiber;
  }

  // A fiber's life: it runs a kernel, and rests until the next.
  [[noreturn]] static void live() {
    Fiber& fiber = *running;
    for (;;) fiber.processor->run_thread(fiber);
  }

  [[gnu::noinline]] void run_thread(Fiber& fiber) {
    ordering::acquire(&start_);
    launch->kernel();
    ordering::release(&end_);
    ++ended_;
    rest(fiber, Doing::kEnded, {});
  }

  void run_block() {
    ended_ = 0;
    for (uint32_t thread = 0; thread < launch->threads; ++thread) ready_.push_back(fibers_[thread].get());
    ordering::release(&start_);
    leave(main_, next());
    ordering::acquire(&end_);
    if (ended_ < launch->threads) report_standstill();
  }

  // Lets others run until it is picked again.
  void rest(Fiber& fiber, Doing doing, const Line& line) {
    fiber.doing = doing;
    fiber.line = line;
    leave(fiber.context, next());
    fiber.doing = Doing::kRuns;
  }

  // Any of those that are ready; if there is none, then the block is done, or will never be.
  Context& next() {
    if (ready_.empty()) {
      running = nullptr;
      return main_;
    }
    std::swap(ready_[random_() % ready_.size()], ready_.back());
    running = ready_.back();
    ready_.pop_back();
    return running->context;
  }

  [[noreturn]] void report_standstill() {
    last_words.lock();
    fprintf(stderr, "fibers: block %u stands still:\n", block);
    for (uint32_t thread = 0; thread < launch->threads; ++thread)
      fprintf(stderr, "    %s\n", said(*fibers_[thread]).c_str());
    abort();
  }

  static std::string said(const Fiber& fiber) {
    const std::string thread = "thread " + std::to_string(fiber.thread);
    if (fiber.doing == Doing::kEnded) return thread + ", which has ended";
    const char* what = fiber.doing == Doing::kBarrier ? ", which waits at " : ", which waits for its warp at ";
    return thread + what + text(fiber.line);
  }
};

// All processors, and the one launch that they work on.
class Machine {
 public:
  void launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
    const std::lock_guard<std::mutex> alone(mutex_);
    Launch given{kernel, threads, std::vector<uint32_t>(blocks)};
    for (uint32_t block = 0; block < blocks; ++block) given.blocks[block] = block;
    std::shuffle(given.blocks.begin(), given.blocks.end(), random_);
    // For ThreadSanitizer, a block for each: the next one on the same stacks would look ordered, or race.
    const size_t busy = std::min<size_t>(blocks, ordering::kIsWatched ? blocks : kProcessors);
    while (processors_.size() < busy) processors_.push_back(std::make_unique<Processor>(random_()));
    std::vector<std::thread> threads_of_system;
    for (size_t i = 0; i < busy; ++i) threads_of_system.emplace_back([&, i] { processors_[i]->run(given); });
    for (std::thread& thread : threads_of_system) thread.join();
    ++counts.launches;
  }

 private:
  std::mutex mutex_;
  std::mt19937 random_{static_cast<uint32_t>(strtoul(variable("POLYAMP_FIBERS_SEED").c_str(), nullptr, 10))};
  std::vector<std::unique_ptr<Processor>> processors_;
};

std::atomic_flag atomics = ATOMIC_FLAG_INIT;  // while watched: one at a time, in the order that is told

}  // namespace

uint32_t most_blocks() { return ordering::kIsWatched ? 3 : 1 << 16; }

void launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
  static Machine* const machine = new Machine;  // for good: its fibers hold on to it
  machine->launch(blocks, threads, kernel);
}

Index thread() { return {running->thread, 0, 0}; }
Index block() { return {running->processor->block, 0, 0}; }
uint32_t threads() { return running->processor->launch->threads; }
uint32_t blocks() { return running->processor->launch->blocks.size(); }

void barrier(const Line& line) {
  if (!is_left_out(line)) running->processor->barrier(*running, line);
}

const uint64_t* exchange(uint32_t mask, uint64_t word, const Line& line) {
  return running->processor->exchange(*running, mask, word, line);
}

void meet(uint32_t mask, const Line& line) {
  void* const meeting = running->processor->meeting(*running);
  ordering::release(meeting);
  exchange(mask, 0, line);
  ordering::acquire(meeting);
}

void fence(const Line& line) {
  if (is_left_out(line)) return;
  ordering::acquire(&running->seen);
  ordering::release(&running->written);
  running->processor->pause();
}

Atomic::Atomic(void* address) {
  if (!ordering::kIsWatched) return;
  while (atomics.test_and_set()) sched_yield();
  running->processor->carry(*running, address);
}

Atomic::~Atomic() { atomics.clear(); }

void refuse(const char* what, const Line& line) {
  last_words.lock();
  fprintf(stderr, "fibers: block %u, thread %u %s (%s)\n", block().x, thread().x, what, text(line).c_str());
  abort();
}

}  // namespace fiber
