// The kernels' grid on the CPU: the same chunks, threads and arithmetic, one thread after another.
//
// Cooperation of a block's threads (barriers, shuffles, the ticket) needs no counterpart here.
#include <algorithm>

#include "gradients.h"
#include "steps.h"

namespace polyamp {
namespace {

constexpr uint32_t kBlocks = 4;  // enough that blocks skip chunks, as on a GPU

template <class Table>
uint32_t blocks_for(const Table& table) {
  return std::clamp(table.tensors.chunks(), 1u, kBlocks);
}

// The other threads of a block have nothing to do in a short chunk.
int threads_for(const Place& place) {
  return std::min<int>(kThreads, (place.length + kVector - 1) / kVector);
}

int grad_stats(const GradTable& table, void*) {
  const float inverse = inverse_of(*table.scale);
  double sums[3] = {};
  for (uint32_t block = 0; block < blocks_for(table); ++block) {
    Tally tally;
    uint32_t tensor = 0;
    for (uint32_t chunk = block; chunk < table.tensors.chunks(); chunk += blocks_for(table)) {
      const Place place = locate(table.tensors, chunk, tensor);
      tensor = place.tensor;
      for (int thread = 0; thread < threads_for(place); ++thread) tally_thread(table, place, thread, inverse, tally);
    }
    sums[0] += tally.squares, sums[1] += tally.grads, sums[2] += tally.losses;
  }
  for (int i = 0; i < 3; ++i) table.stats[i] = table.adds ? table.stats[i] + sums[i] : sums[i];
  return 0;
}

int unscale_clip(const GradTable& table, void*) {
  const float factor = factor_of(*table.scale, table.stats, table.max_norm);
  if (!is_applied(table.stats) || factor == 1) return 0;
  uint32_t tensor = 0;
  for (uint32_t chunk = 0; chunk < table.tensors.chunks(); ++chunk) {
    const Place place = locate(table.tensors, chunk, tensor);
    tensor = place.tensor;
    for (int thread = 0; thread < threads_for(place); ++thread) rescale_thread(table, place, thread, factor);
  }
  return 0;
}

template <class Rule, class Kept>
void step_block(const StepTable<Rule>& table, uint32_t block) {
  const uint32_t chunks = table.tensors.chunks();
  Coefficients<Rule> coefficients{};
  coefficients.count = NAN;
  uint32_t tensor = 0;
  for (uint32_t i = block; i < chunks; i += blocks_for(table)) {
    const Place place = locate(table.tensors, chunks - 1 - i, tensor);
    tensor = place.tensor;
    const float count = count_of(table, tensor);
    if (count != coefficients.count) coefficients.work_out(table, count, 0, 1);
    for (int thread = 0; thread < threads_for(place); ++thread)
      step_thread<Rule, Kept>(table, place, thread, coefficients.of(table, tensor));
  }
}

template <class Rule>
int step(const StepTable<Rule>& table, Storage storage, void*) {
  const int done = with_storage(storage, [&](auto kind) {
    for (uint32_t block = 0; is_applied(table.stats) && block < blocks_for(table); ++block)
      step_block<Rule, decltype(kind)>(table, block);
    return 0;
  });
  count_steps(table, 0, 1);
  if (table.is_last) finish(*table.control, table.stats, table.settings, *table.report);
  return done;
}

}  // namespace

const Device kEmulated = {grad_stats, unscale_clip, step<Adam>, step<Sgd>};

}  // namespace polyamp
