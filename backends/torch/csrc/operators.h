// The operators torch.ops.polyamp.*, for any device; kernels/reference.py describes their arguments.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "abi.h"

namespace polyamp {

using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// Where a call's tables are processed.
struct Target {
  const Device& device;
  void* stream;
  const char* (*text)(int code);  // text of the device's error codes
};

void grad_stats(const Target&, const TensorList& grads, const TensorList& losses, const Tensor& scale,
                const Tensor& stats, const Tensor& workspace);
void unscale_clip(const Target&, const TensorList& grads, const Tensor& scale, const Tensor& stats, double max_norm);
void adam_step(const Target&, const TensorList& params, const TensorList& masters, const TensorList& grads,
               const TensorList& exp_avgs, const TensorList& exp_avg_sqs, const TensorList& steps,
               const Tensor& groups, const Tensor& rules, const TensorList& lrs, const Tensor& scale,
               const Tensor& stats, const Tensor& control, const Tensor& workspace, const Tensor& settings,
               const Tensor& report);
void sgd_step(const Target&, const TensorList& params, const TensorList& masters, const TensorList& grads,
              const TensorList& momenta, const Tensor& groups, const Tensor& rules, const TensorList& lrs,
              const Tensor& scale, const Tensor& stats, const Tensor& control, const Tensor& workspace,
              const Tensor& settings, const Tensor& report);

// One set of operators. A Place is made for each call, from a tensor on the device, and has the call's `target`.
template <class Place>
struct Operators {
  static void grad_stats(const TensorList& grads, const TensorList& losses, const Tensor& scale, const Tensor& stats,
                         const Tensor& workspace) {
    polyamp::grad_stats(Place(stats).target, grads, losses, scale, stats, workspace);
  }

  static void unscale_clip(const TensorList& grads, const Tensor& scale, const Tensor& stats, double max_norm) {
    polyamp::unscale_clip(Place(stats).target, grads, scale, stats, max_norm);
  }

  static void adam_step(const TensorList& params, const TensorList& masters, const TensorList& grads,
                        const TensorList& exp_avgs, const TensorList& exp_avg_sqs, const TensorList& steps,
                        const Tensor& groups, const Tensor& rules, const TensorList& lrs, const Tensor& scale,
                        const Tensor& stats, const Tensor& control, const Tensor& workspace, const Tensor& settings,
                        const Tensor& report) {
    polyamp::adam_step(Place(stats).target, params, masters, grads, exp_avgs, exp_avg_sqs, steps, groups, rules, lrs,
                       scale, stats, control, workspace, settings, report);
  }

  static void sgd_step(const TensorList& params, const TensorList& masters, const TensorList& grads,
                       const TensorList& momenta, const Tensor& groups, const Tensor& rules, const TensorList& lrs,
                       const Tensor& scale, const Tensor& stats, const Tensor& control, const Tensor& workspace,
                       const Tensor& settings, const Tensor& report) {
    polyamp::sgd_step(Place(stats).target, params, masters, grads, momenta, groups, rules, lrs, scale, stats, control,
                      workspace, settings, report);
  }

  static void implement(torch::stable::detail::StableLibrary& library) {
    library.impl("grad_stats", TORCH_BOX(&Operators::grad_stats));
    library.impl("unscale_clip_", TORCH_BOX(&Operators::unscale_clip));
    library.impl("adam_step_", TORCH_BOX(&Operators::adam_step));
    library.impl("sgd_step_", TORCH_BOX(&Operators::sgd_step));
  }
};

}  // namespace polyamp
