// The interface between files compiled with PyTorch's headers, with nvcc or with neither: functions over tables.
//
// Each processes a table, on the CPU at once and on the GPU on a stream, and returns 0 or the device's error code.
#pragma once

#include "update_rules.h"

namespace polyamp {

// How the parameters of one call are stored.
enum Storage { kPlain, kMasterFloat16, kMasterBFloat16 };

struct Device {
  int (*grad_stats)(const GradTable&, void* stream);
  int (*unscale_clip)(const GradTable&, void* stream);
  int (*adam_step)(const StepTable<Adam>&, Storage, void* stream);
  int (*sgd_step)(const StepTable<Sgd>&, Storage, void* stream);
};

extern const Device kEmulated;  // emulate.cpp
extern const Device kCuda;      // launch.cu

}  // namespace polyamp

extern "C" {
// Whether the kernels can run on the current CUDA device: 0, or an error code that polyamp_cuda_text explains.
__attribute__((visibility("default"))) int polyamp_cuda_ready();
__attribute__((visibility("default"))) const char* polyamp_cuda_text(int code);
// The CUDA version that the kernels were built with, such as 13000.
__attribute__((visibility("default"))) int polyamp_cuda_toolkit();
}
