// Registers the operators with PyTorch on the CPU: the emulated grid.
#include "operators.h"

namespace polyamp {
namespace {

struct Cpu {
  explicit Cpu(const Tensor&) {}
  Target target{kEmulated, nullptr, [](int) { return "cannot fail"; }};
};

}  // namespace
}  // namespace polyamp

STABLE_TORCH_LIBRARY_IMPL(polyamp, CPU, library) { polyamp::Operators<polyamp::Cpu>::implement(library); }
