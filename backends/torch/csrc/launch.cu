// Launches the kernels on a stream, and reports whether this machine can run them.
#include <algorithm>

#include "kernels.cuh"

namespace polyamp {
namespace {

// A launch whose grid fits the device: no block waits for another to end.
template <class Table>
int launch(void (*kernel)(Table), const Table& table, void* stream) {
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const uint32_t most = std::min(kBlocksPerMultiprocessor * multiprocessors, kMaxBlocks);
  const uint32_t blocks = std::clamp(table.tensors.chunks(), 1u, most);  // one does the final work of an empty call
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(table);
  return cudaGetLastError();
}

int grad_stats(const GradTable& table, void* stream) { return launch(grad_stats_kernel, table, stream); }

int unscale_clip(const GradTable& table, void* stream) { return launch(unscale_clip_kernel, table, stream); }

template <class Rule>
int step(const StepTable<Rule>& table, Storage storage, void* stream) {
  return with_storage(storage, [&](auto kind) { return launch(step_kernel<Rule, decltype(kind)>, table, stream); });
}

}  // namespace

const Device kCuda = {grad_stats, unscale_clip, step<Adam>, step<Sgd>};

}  // namespace polyamp

int polyamp_cuda_toolkit() { return CUDART_VERSION; }

const char* polyamp_cuda_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// A driver runs code that any toolkit of its major version, or an older one, has built.
int polyamp_cuda_ready() {
  int driver = 0;
  cudaError_t error = cudaDriverGetVersion(&driver);
  if (error == cudaSuccess && driver / 1000 < CUDART_VERSION / 1000) error = cudaErrorInsufficientDriver;
  if (error != cudaSuccess) return error;
  cudaFuncAttributes attributes;  // the query fails without code for this device's architecture
  error = cudaFuncGetAttributes(&attributes, polyamp::grad_stats_kernel);
  cudaGetLastError();             // so that no launch reports it again
  return error;
}
