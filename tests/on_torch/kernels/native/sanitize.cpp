// Runs the kernels' code over the emulated grid, beside the same arithmetic in float64. To be built with
//     g++ -std=c++17 -g -O1 -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all
//         -I backends/torch/csrc tests/on_torch/kernels/native/sanitize.cpp backends/torch/csrc/emulate.cpp
// Every buffer has exactly the size it must have, so that the address sanitizer sees an access one element beyond.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "abi.h"
#include "pack.h"
#include "steps.h"

using namespace polyamp;

namespace {

int failures = 0;

void expect(bool holds, const char* what, const char* where, int64_t at) {
  if (!holds && ++failures < 20) std::printf("FAILED: %s, %s, element %lld\n", what, where, static_cast<long long>(at));
}

const int64_t kSizes[] = {40001, 0, 1, 7, 8, 9, 4095, 4096, 4097, 16383, 16384, 16385};
constexpr int kSteps = 4, kOverflow = 2;  // in which step a gradient is not finite
const float kScale = 1024, kMaxNorm = 30;

std::mt19937 generator(1);

float random_float() { return std::normal_distribution<float>()(generator); }

// Memory of exactly `numel` elements, that starts `offset` elements after an address that is aligned to 16 bytes.
class Buffer {
 public:
  Buffer(int64_t numel, size_t element, int offset)
      : memory_(std::malloc((numel + offset) * element), std::free),
        data_(static_cast<char*>(memory_.get()) + offset * element),
        bytes_(numel * element) {
    std::memset(data_, 0, bytes_);
  }
  template <class T>
  T* as() const { return reinterpret_cast<T*>(data_); }
  std::vector<char> copy() const { return {data_, data_ + bytes_}; }

 private:
  std::unique_ptr<void, decltype(&std::free)> memory_;
  char* data_;
  size_t bytes_;
};

// 16-bit formats, worked out from their definition.
struct Definition {
  Tag tag;
  int significand, bias;

  double decode(uint32_t bits) const {
    const int width = 15 - significand, exponent = bits >> significand & ((1 << width) - 1);
    const int fraction = bits & ((1 << significand) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == (1 << width) - 1) return fraction ? NAN : sign * INFINITY;
    const int implicit = exponent ? 1 << significand : 0;
    return sign * std::ldexp(fraction + implicit, std::max(exponent, 1) - bias - significand);
  }
  double spacing(double value) const {  // between its neighbours
    const int exponent = value == 0 ? 1 - bias : std::max(std::ilogb(value), 1 - bias);
    return std::ldexp(1.0, exponent - significand);
  }
};
const Definition kHalf = {kFloat16, 10, 15}, kBrain = {kBFloat16, 7, 127};

template <class Format>
void check_format(const Definition& format, const char* name) {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    const double exact = format.decode(bits);
    const float wide = Format::widen(bits);
    expect(std::isnan(exact) ? std::isnan(wide) : wide == exact && std::signbit(wide) == std::signbit(exact), name,
           "widen", bits);
    const uint32_t back = Format::narrow(wide);
    expect(std::isnan(exact) ? std::isnan(Format::widen(back)) : back == bits, name, "narrow", bits);
    const double next = format.decode(bits + 1);
    if (!std::isfinite(exact) || !std::isfinite(next)) continue;
    const float tie = static_cast<float>((exact + next) / 2);  // float32 has it
    expect(Format::narrow(tie) == bits + bits % 2, name, "tie", bits);
    expect(Format::narrow(std::nextafter(tie, wide)) == bits, name, "below a tie", bits);
    expect(Format::narrow(std::nextafter(tie, static_cast<float>(next))) == bits + 1, name, "above a tie", bits);
  }
}

struct Kind {
  Storage storage;
  const char* name;
  size_t param, master;         // bytes of an element
  const Definition* definition;  // of 16-bit parameters
};
const Kind kKinds[] = {{kPlain, "plain", 4, 0, nullptr},
                       {kMasterFloat16, "float16 and master", 2, 4, &kHalf},
                       {kMasterBFloat16, "bfloat16 and master", 2, 4, &kBrain}};

double read(const Kind& kind, const Buffer& param, const Buffer& master, int64_t i) {
  if (kind.master == 4) return master.as<float>()[i];
  return kind.definition ? kind.definition->decode(param.as<uint16_t>()[i]) : param.as<float>()[i];
}

void put(const Kind& kind, const Buffer& buffer, int64_t i, float value) {
  if (!kind.definition) buffer.as<float>()[i] = value;
  else buffer.as<uint16_t>()[i] = kind.definition == &kHalf ? Float16::narrow(value) : BFloat16::narrow(value);
}

// One parameter and all that belongs to it.
struct Parameter {
  int64_t numel;
  Buffer param, master, grad, first, second, count;
  std::vector<double> values, firsts, seconds;  // what must come out

  Parameter(const Kind& kind, int64_t size, int offset, int grad_offset)
      : numel(size), param(size, kind.param, offset), master(size, std::max<size_t>(kind.master, 1), offset),
        grad(size, kind.param, grad_offset), first(size, 4, offset), second(size, 4, offset), count(1, 4, 0),
        values(size), firsts(size), seconds(size) {
    *count.as<float>() = static_cast<float>(size % 3);  // tensors may have had other numbers of steps
    for (int64_t i = 0; i < size; ++i) {
      const float value = random_float();
      put(kind, param, i, value);  // a parameter is its master rounded
      if (kind.master == 4) master.as<float>()[i] = value;
    }
  }
  std::vector<std::vector<char>> copy() const {
    return {param.copy(), master.copy(), first.copy(), second.copy(), count.copy()};
  }
};

void expect_step(const Adam::Group& group, const Kind& kind, Parameter& p, double factor) {
  const double count = *p.count.as<float>() + 1, beta1 = group.beta1, beta2 = group.beta2;
  for (int64_t i = 0; i < p.numel; ++i) {
    double value = read(kind, p.param, p.master, i);
    const double raw = kind.definition ? kind.definition->decode(p.grad.as<uint16_t>()[i]) : p.grad.as<float>()[i];
    double grad = raw * factor * (group.flags & Adam::kMaximize ? -1 : 1);
    if (group.flags & Adam::kDecoupled) value *= 1 - static_cast<double>(group.lr) * group.weight_decay;
    else grad += group.weight_decay * value;
    p.firsts[i] = beta1 * p.first.as<float>()[i] + (1 - beta1) * grad;
    p.seconds[i] = beta2 * p.second.as<float>()[i] + (1 - beta2) * grad * grad;
    const double root = std::sqrt(p.seconds[i] / (1 - std::pow(beta2, count)));
    p.values[i] = value - group.lr * (p.firsts[i] / (1 - std::pow(beta1, count))) / (root + group.eps);
  }
}

void expect_step(const Sgd::Group& group, const Kind& kind, Parameter& p, double factor) {
  for (int64_t i = 0; i < p.numel; ++i) {
    const double value = read(kind, p.param, p.master, i);
    const double raw = kind.definition ? kind.definition->decode(p.grad.as<uint16_t>()[i]) : p.grad.as<float>()[i];
    const double grad = raw * factor * (group.flags & Sgd::kMaximize ? -1 : 1) + group.weight_decay * value;
    p.firsts[i] = static_cast<double>(group.momentum) * p.first.as<float>()[i] + grad;
    const double update = group.flags & Sgd::kNesterov ? grad + group.momentum * p.firsts[i] : p.firsts[i];
    p.values[i] = value - group.lr * update;
  }
}

// To the precision of float32, for sums of numbers of a size.
bool close(double found, double expected, double size) {
  return std::fabs(found - expected) <= 1e-6 * (size + std::fabs(expected));
}

void check_step(const Kind& kind, const Parameter& p, bool has_moments) {
  for (int64_t i = 0; i < p.numel; ++i) {
    const double found = read(kind, p.param, p.master, i);
    expect(close(found, p.values[i], 1), kind.name, "value", i);
    if (has_moments) expect(close(p.first.as<float>()[i], p.firsts[i], 0.2), kind.name, "first moment", i);
    expect(close(p.second.as<float>()[i], p.seconds[i], 1e-3), kind.name, "second moment", i);
    if (kind.master == 0) continue;
    const double rounded = kind.definition->decode(p.param.as<uint16_t>()[i]);
    expect(std::fabs(rounded - found) <= kind.definition->spacing(found) / 2, kind.name, "16 bits", i);
  }
}

Item<6> item_of(const Adam::Group&, const Parameter& p, const Kind& kind, bool, int64_t group) {
  void* master = kind.master ? p.master.as<void>() : nullptr;
  return {{p.param.as<void>(), master, p.grad.as<void>(), p.first.as<void>(), p.second.as<void>(), p.count.as<void>()},
          p.numel, group};
}

Item<4> item_of(const Sgd::Group&, const Parameter& p, const Kind& kind, bool has_moments, int64_t group) {
  void* master = kind.master ? p.master.as<void>() : nullptr;
  return {{p.param.as<void>(), master, p.grad.as<void>(), has_moments ? p.first.as<void>() : nullptr}, p.numel, group};
}

int run(const StepTable<Adam>& table, Storage storage) { return kEmulated.adam_step(table, storage, nullptr); }
int run(const StepTable<Sgd>& table, Storage storage) { return kEmulated.sgd_step(table, storage, nullptr); }

// What a call reads and writes besides parameters, each in its own memory.
struct Surroundings {
  Buffer scale{1, 4, 0}, stats{3, 8, 0}, workspace{kWorkspace, 8, 0}, control{1, sizeof(Control), 0},
      report{1, sizeof(Report), 0}, loss{1, 2, 0};
  Surroundings() {
    *scale.as<float>() = kScale;
    *loss.as<uint16_t>() = Float16::narrow(1);
    control.as<Control>()->state = {kScale, 0, 1, 0, 0, 0, 0, 0, 0, 0};
  }
};

double take_statistics(const Kind& kind, const std::vector<Parameter>& params, const Surroundings& around) {
  GradTable blank{};
  blank.scale = around.scale.as<float>(), blank.stats = around.stats.as<double>();
  blank.workspace = around.workspace.as<double>();
  std::vector<Item<1>> items;
  double squares = 0;
  for (const Parameter& p : params) {
    items.push_back({{p.grad.as<void>()}, p.numel, kind.definition ? kind.definition->tag : kFloat32});
    for (int64_t i = 0; i < p.numel; ++i) {
      const double grad = kind.definition ? kind.definition->decode(p.grad.as<uint16_t>()[i]) : p.grad.as<float>()[i];
      squares += grad / kScale * (grad / kScale);
    }
  }
  items.push_back({{around.loss.as<void>()}, 1, kFloat16 | kLoss});
  uint32_t adds = 0;
  for (GradTable& table : pack(blank, items)) {
    table.adds = adds++ > 0;
    kEmulated.grad_stats(table, nullptr);
  }
  return squares;
}

template <class Rule>
StepTable<Rule> blank_step(const Surroundings& around) {
  StepTable<Rule> blank{};
  blank.settings = {kMaxNorm, 2, 0.5, 1, 65536, 2000, 1, 0, 0, true, false};
  blank.scale = around.scale.as<float>(), blank.stats = around.stats.as<double>();
  blank.control = around.control.as<Control>(), blank.workspace = around.workspace.as<double>();
  blank.report = around.report.as<Report>();
  return blank;
}

template <class Group>
auto items_of(const std::vector<Parameter>& params, const std::vector<Group>& groups, const Kind& kind, bool moments) {
  std::vector<decltype(item_of(groups[0], params[0], kind, moments, 0))> items;
  for (size_t i = 0; i < params.size(); ++i)
    items.push_back(item_of(groups[0], params[i], kind, moments, i % groups.size()));
  return items;
}

void check_statistics(const Kind& kind, const double* stats, double squares, bool finite) {
  expect(stats[1] == !finite, kind.name, "non-finite gradients", 0);
  expect(stats[2] == !finite, kind.name, "non-finite losses", 0);
  expect(!finite || close(stats[0], squares, 0), kind.name, "sum of squares", 0);
}

template <class Rule>
void step_once(const Kind& kind, std::vector<Parameter>& params, const std::vector<typename Rule::Group>& groups,
               bool has_moments, const Surroundings& around, bool finite) {
  for (Parameter& p : params)
    for (int64_t i = 0; i < p.numel; ++i) put(kind, p.grad, i, kScale * random_float());
  if (!finite) put(kind, params.back().grad, params.back().numel - 1, INFINITY);
  *around.loss.template as<uint16_t>() = Float16::narrow(finite ? 1 : NAN);
  const double squares = take_statistics(kind, params, around);
  check_statistics(kind, around.stats.as<double>(), squares, finite);
  const double factor = std::min(1.0, kMaxNorm / (std::sqrt(squares) + 1e-6)) / kScale;
  std::vector<std::vector<std::vector<char>>> before;
  for (size_t i = 0; i < params.size(); ++i) {
    before.push_back(params[i].copy());
    expect_step(groups[i % groups.size()], kind, params[i], factor);
  }
  for (const auto& table : pack(blank_step<Rule>(around), items_of(params, groups, kind, has_moments), groups))
    run(table, kind.storage);
  for (size_t i = 0; i < params.size(); ++i) {
    if (finite) check_step(kind, params[i], has_moments);
    else expect(params[i].copy() == before[i], kind.name, "a skipped step keeps the bits", i);
  }
  expect(around.report.as<Report>()->applied == finite, kind.name, "report", 0);
}

template <class Rule>
void check_steps(const Kind& kind, const std::vector<typename Rule::Group>& groups, bool has_moments, int copies) {
  std::vector<Parameter> params;
  for (int copy = 0; copy < copies; ++copy)
    for (const int64_t size : kSizes)
      if (copies < 5 || size < 16) params.emplace_back(kind, size, copy % 2, copy % 4 == 1 || copy % 4 == 2);
  const Surroundings around;
  for (int step = 0; step < kSteps; ++step)
    step_once<Rule>(kind, params, groups, has_moments, around, step != kOverflow);
  const State& state = around.control.as<Control>()->state;
  expect(state.skipped == 1 && state.scale == kScale / 2, kind.name, "the loss scale", 0);
}

// The accesses of 16 bytes to a tensor of which one stream, or none (-1), is misaligned.
void expect_access(const char* what, int misaligned, int left, Access expected) {
  alignas(16) static char memory[32];
  StepTable<Adam> table{};
  for (int stream = 0; stream < kMoment + Adam::kMoments; ++stream)
    table.tensors.data[stream][0] = memory + (stream == misaligned ? 4 : 0);
  expect(access_of(table, 0, left) == expected, "access", what, 0);
  table.tensors.data[kMaster][0] = nullptr;  // no master
  expect(misaligned == kMaster || access_of(table, 0, left) == expected, "access, no master", what, 0);
}

void check_access() {
  expect_access("aligned", -1, kVector, Access::kAll);
  expect_access("a misaligned gradient", kGrad, kVector, Access::kAllButGrads);
  for (const int written : {int{kParam}, int{kMaster}, int{kMoment}, kMoment + 1})
    expect_access("what is written", written, kVector, Access::kNone);
  expect_access("a tensor's end", -1, kVector - 1, Access::kNone);
  expect_access("a tensor's end, and a misaligned gradient", kGrad, kVector - 1, Access::kNone);
}

template <class T>
void check_clipping(const Definition* definition, Tag tag) {
  const Kind kind = {kPlain, "unscale_clip", sizeof(T), 0, definition};
  for (const int64_t size : kSizes)
    for (const int offset : {0, 1}) {
      Parameter p(kind, size, offset, offset);
      const Surroundings around;
      around.stats.as<double>()[0] = 4.0 * kMaxNorm * kMaxNorm;
      GradTable blank{};
      blank.scale = around.scale.as<float>(), blank.stats = around.stats.as<double>(), blank.max_norm = kMaxNorm;
      for (const GradTable& table : pack(blank, {{{p.param.as<void>()}, size, tag}})) {
        for (int64_t i = 0; i < size; ++i) put(kind, p.param, i, static_cast<float>(p.values[i] = 64.0 * (i % 31)));
        kEmulated.unscale_clip(table, nullptr);
      }
      for (int64_t i = 0; i < size; ++i)
        expect(close(read(kind, p.param, p.master, i), p.values[i] / 2 / kScale, 0.01), kind.name, "value", i);
    }
}

}  // namespace

// With an argument in brief, for where every thread of the kernels takes its time.
int main(int arguments, char**) {
  const bool is_brief = arguments > 1;
  check_format<Float16>(kHalf, "float16");
  check_format<BFloat16>(kBrain, "bfloat16");
  check_access();
  const std::vector<Adam::Group> adam = {{1e-2f, 0.9f, 0.999f, 1e-8f, 0.1f, Adam::kDecoupled, nullptr},
                                         {1e-3f, 0.8f, 0.99f, 1e-6f, 0.01f, Adam::kMaximize, nullptr},
                                         {1e-3f, 0.5f, 0.9f, 1e-6f, 0, 0, nullptr}};
  const std::vector<Sgd::Group> momentum = {{1e-2f, 0.9f, 0.1f, Sgd::kNesterov, nullptr},
                                            {1e-3f, 0.5f, 0, Sgd::kMaximize, nullptr}};
  const std::vector<Sgd::Group> plain = {{1e-2f, 0, 0.1f, 0, nullptr}};
  const std::vector<Sgd::Group> many(30, momentum[0]);  // more than a table holds
  for (const Kind& kind : kKinds) {
    check_steps<Adam>(kind, adam, true, 1);
    if (is_brief) continue;
    check_steps<Adam>(kind, adam, true, 4);
    check_steps<Sgd>(kind, momentum, true, 4);
    check_steps<Sgd>(kind, plain, false, 4);
    check_steps<Adam>(kind, adam, true, 300);  // several launches
    check_steps<Sgd>(kind, many, true, 20);
  }
  check_clipping<float>(nullptr, kFloat32);
  check_clipping<uint16_t>(&kHalf, kFloat16);
  check_clipping<uint16_t>(&kBrain, kBFloat16);
  std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return failures > 0;
}
