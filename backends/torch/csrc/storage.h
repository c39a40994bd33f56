// Maps the code of a storage to its type.
#pragma once

#include "abi.h"
#include "steps.h"

namespace polyamp {

// Calls `work` with an object of the storage's type.
template <class Work>
int with_storage(Storage storage, const Work& work) {
  switch (storage) {
    case kPlain: return work(Plain{});
    case kMasterFloat16: return work(Master<Float16>{});
    case kMasterBFloat16: return work(Master<BFloat16>{});
    case kRemainder: return work(Remainder{});
    case kStochasticFloat16: return work(Stochastic<Float16>{});
    default: return work(Stochastic<BFloat16>{});
  }
}

}  // namespace polyamp
