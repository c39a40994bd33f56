// Registers the operators with PyTorch on CUDA: the kernels, on the tensors' device and its current stream.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include "operators.h"

namespace polyamp {
namespace {

using GetStream = AOTITorchError (*)(int32_t device, void** stream);

// Looked up by name instead of linked, so that this library also loads with a PyTorch without CUDA. That has no tensors
// on CUDA, and so never calls this.
GetStream stream_getter() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  STD_TORCH_CHECK(symbol != nullptr, "polyamp: this PyTorch has no aoti_torch_get_current_cuda_stream");
  return reinterpret_cast<GetStream>(symbol);
}

void* current_stream(int32_t device) {
  static const GetStream get = stream_getter();
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device, &stream));
  return stream;
}

struct Cuda {
  explicit Cuda(const Tensor& on)
      : guard(on.get_device_index()), target{kCuda, current_stream(on.get_device_index()), polyamp_cuda_text} {}
  torch::stable::accelerator::DeviceGuard guard;
  Target target;
};

}  // namespace
}  // namespace polyamp

STABLE_TORCH_LIBRARY_IMPL(polyamp, CUDA, library) { polyamp::Operators<polyamp::Cuda>::implement(library); }
