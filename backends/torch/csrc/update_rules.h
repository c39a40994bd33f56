// The arithmetic of a step: the update of one element, and of the loss scale.
//
// Float32, with each operation rounded separately (the compilers are told not to fuse them), so that the GPU, the
// emulated grid and the PyTorch reference agree. A rule's coefficients are computed once per group and step count.
#pragma once

#include "tables.h"

namespace polyamp {

// Adam: Kingma and Ba, ICLR 2015; with decoupled weight decay AdamW: Loshchilov and Hutter, ICLR 2019.
struct Adam {
  static constexpr int kMoments = 2, kCounts = 1;  // streams of moments, and one of step counts
  static constexpr bool kMayLackMoments = false;
  static constexpr uint32_t kDecoupled = 1, kMaximize = 2;

  struct Group {
    float lr, beta1, beta2, eps, weight_decay;
    uint32_t flags;
    const float* lr_on_device;  // or null
  };

  struct Coefficients {
    float factor, rest1, beta2, rest2, eps, step_size, root, decay, weight_decay;
  };

  // Bias corrections use the betas rounded to float32: with others, early steps were off by 1 part in 10**5.
  POLYAMP_EVERYWHERE static Coefficients coefficients(const Group& group, float lr, float count, float factor) {
    const double bias1 = 1 - pow(static_cast<double>(group.beta1), static_cast<double>(count));
    const double bias2 = 1 - pow(static_cast<double>(group.beta2), static_cast<double>(count));
    const bool decoupled = group.flags & kDecoupled;
    const double kept = 1 - static_cast<double>(lr) * static_cast<double>(group.weight_decay);
    return {group.flags & kMaximize ? -factor : factor,
            1 - group.beta1,
            group.beta2,
            1 - group.beta2,
            group.eps,
            static_cast<float>(lr / bias1),
            static_cast<float>(sqrt(bias2)),
            decoupled ? static_cast<float>(kept) : 1.0f,
            decoupled ? 0.0f : group.weight_decay};
  }

  template <int N>
  POLYAMP_EVERYWHERE static float update(float value, float grad, float (&moments)[kMoments][N], int i,
                                         const Coefficients& c) {
    grad *= c.factor;
    if (c.weight_decay != 0) grad = grad + c.weight_decay * value;  // not 0 * inf
    value *= c.decay;
    const float mean = moments[0][i] + c.rest1 * (grad - moments[0][i]);
    const float square = c.beta2 * moments[1][i] + (c.rest2 * grad) * grad;
    moments[0][i] = mean;
    moments[1][i] = square;
    return value - c.step_size * (mean / (sqrtf(square) / c.root + c.eps));
  }
};

// Stochastic gradient descent with momentum as in torch.optim.SGD, without dampening. A momentum of 0 has no stream of
// moments; they then read as zeros, with which the rule is plain gradient descent.
struct Sgd {
  static constexpr int kMoments = 1, kCounts = 0;
  static constexpr bool kMayLackMoments = true;
  static constexpr uint32_t kNesterov = 1, kMaximize = 2;

  struct Group {
    float lr, momentum, weight_decay;
    uint32_t flags;
    const float* lr_on_device;  // or null
  };

  struct Coefficients {
    float factor, lr, momentum, weight_decay;
    bool nesterov;
  };

  POLYAMP_EVERYWHERE static Coefficients coefficients(const Group& group, float lr, float, float factor) {
    return {group.flags & kMaximize ? -factor : factor, lr, group.momentum, group.weight_decay,
            (group.flags & kNesterov) != 0};
  }

  template <int N>
  POLYAMP_EVERYWHERE static float update(float value, float grad, float (&moments)[kMoments][N], int i,
                                         const Coefficients& c) {
    grad *= c.factor;
    if (c.weight_decay != 0) grad = grad + c.weight_decay * value;
    const float momentum = c.momentum * moments[0][i] + grad;
    moments[0][i] = momentum;
    return value - c.lr * (c.nesterov ? grad + c.momentum * momentum : momentum);
  }
};

POLYAMP_EVERYWHERE float inverse_of(float scale) { return 1 / scale; }

POLYAMP_EVERYWHERE bool is_applied(const double* stats) { return stats[1] == 0 && stats[2] == 0; }

// The factor for gradients. The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
POLYAMP_EVERYWHERE float factor_of(float scale, const double* stats, double max_norm) {
  const float inverse = inverse_of(scale);
  if (max_norm == static_cast<double>(INFINITY)) return inverse;
  const double clip = max_norm / (sqrt(stats[0]) + 1e-6);
  return static_cast<float>(static_cast<double>(inverse) * (clip > 1 ? 1 : clip));  // NaN stays NaN
}

POLYAMP_EVERYWHERE void count(int32_t& counter, bool more) {
  if (more && counter < INT32_MAX) counter += 1;
}

// polyamp.scale.advance, in place.
POLYAMP_EVERYWHERE void advance(State& state, bool finite, const Settings& config) {
  count(state.good_steps, finite);
  const int32_t good = finite ? state.good_steps : config.restart;
  const bool grow = good >= config.interval;  // never after an overflow: restart <= 0 < interval
  const int32_t tolerated = config.consecutive ? config.hysteresis : state.hysteresis;
  const int32_t refilled = finite ? tolerated : state.hysteresis - 1;
  const int32_t spent = refilled > 0 ? refilled : state.scale > config.min ? 0 : -1;
  const int32_t hysteresis = grow ? config.hysteresis : spent;
  const float grown = fminf(state.scale * config.growth, config.max);
  const float reduced = fmaxf(state.scale * config.backoff, config.min);
  const bool rose = grow && grown > state.scale;
  count(state.steps, true);
  count(state.calibrating, !finite && state.growths <= 0);
  count(state.growths, rose);
  if (rose) state.grown_at = state.steps;
  if (!finite) state.overflow_scale = state.scale;
  if (grow) state.scale = grown;
  if (!finite && hysteresis <= 0) state.scale = reduced;
  state.good_steps = grow ? config.after_growth : good;
  state.hysteresis = hysteresis;
  if (finite) state.skipped_in_a_row = 0;
  count(state.skipped_in_a_row, !finite);
  count(state.skipped, !finite);
}

// The end of a step, by the one remaining thread: advance the loss scale, and report.
POLYAMP_EVERYWHERE void finish(Control& control, const double* stats, const Settings& settings, Report& report) {
  const bool applied = is_applied(stats);
  if (settings.advance) advance(control.state, applied, settings);
  report = {control.state, applied, stats[2] == 0, {}};
}

}  // namespace polyamp
