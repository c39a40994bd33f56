// The operators torch.ops.polyamp.*, for any device: arguments in, tables out.
#include "operators.h"

#include "arguments.h"
#include "pack.h"

namespace polyamp {
namespace {

constexpr int64_t kRuleNumbers = 6, kSettings = 11, kStats = 3;

void check(const Call& call, const Target& target, int code) {
  call.require(code == 0, code == 0 ? "" : target.text(code));
}

void add_grads(const Call& call, std::vector<Item<1>>& items, const TensorList& list, const char* what, int extra) {
  for (const Tensor& tensor : list) {
    const Tag format = call.format(tensor, what);
    items.push_back({{call.memory(tensor, what, tensor.scalar_type())}, tensor.numel(), format | extra});
  }
}

GradTable blank_grads(const Call& call, const Tensor& scale, const Tensor& stats) {
  GradTable table{};
  table.scale = static_cast<const float*>(call.memory(scale, "scale", ScalarType::Float, 1));
  table.stats = static_cast<double*>(call.memory(stats, "stats", ScalarType::Double, kStats));
  return table;
}

// How parameters are stored, by their dtype and their masters'.
Storage storage_of(const Call& call, const TensorList& params, const TensorList& masters) {
  if (params.empty()) return kPlain;
  const Tag format = call.format(params[0], "params");
  call.require((format == kFloat32) == masters.empty(), "params are float32, or have 16 bits and masters");
  return format == kFloat32 ? kPlain : format == kFloat16 ? kMasterFloat16 : kMasterBFloat16;
}

// A stream of a step: a list with one tensor per parameter, or an empty one if that is allowed.
struct Source {
  const TensorList& list;
  const char* what;
  ScalarType type;
  bool may_be_empty;
  bool scalars;
};

template <int Streams>
std::vector<Item<Streams>> step_items(const Call& call, const Source (&sources)[Streams], const Tensor& groups,
                                      int64_t rules) {
  const TensorList& params = sources[kParam].list;
  const int64_t* group = call.numbers<int64_t>(groups, "groups", params.size());
  std::vector<Item<Streams>> items(params.size());
  for (size_t i = 0; i < items.size(); ++i) {
    call.require(0 <= group[i] && group[i] < rules, "groups has ", group[i], ", and there are ", rules, " rules");
    items[i].numel = params[i].numel();
    items[i].tag = group[i];
  }
  for (int stream = 0; stream < Streams; ++stream) {
    const Source& source = sources[stream];
    if (source.may_be_empty && source.list.empty()) continue;
    call.same_length(source.list, source.what, items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      items[i].data[stream] = call.memory(source.list[i], source.what, source.type, source.scalars ? 1 : -1);
      if (!source.scalars) call.same_layout(source.list[i], source.what, params[i]);
    }
  }
  return items;
}

uint32_t flags_of(double number) { return static_cast<uint32_t>(number); }

Adam::Group group_of(Adam, const double* rule, const float* lr) {
  const auto single = [&](int i) { return static_cast<float>(rule[i]); };
  return {single(0), single(1), single(2), single(3), single(4), flags_of(rule[5]), lr};
}

Sgd::Group group_of(Sgd, const double* rule, const float* lr) {
  const auto single = [&](int i) { return static_cast<float>(rule[i]); };
  return {single(0), single(1), single(2), flags_of(rule[3]), lr};
}

template <class Rule>
std::vector<typename Rule::Group> groups_of(const Call& call, const Tensor& rules, const TensorList& lrs) {
  const double* numbers = call.numbers<double>(rules, "rules", rules.numel() / kRuleNumbers * kRuleNumbers);
  std::vector<typename Rule::Group> groups(rules.numel() / kRuleNumbers);
  if (!lrs.empty()) call.same_length(lrs, "lrs", groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const void* lr = lrs.empty() ? nullptr : call.memory(lrs[i], "lrs", ScalarType::Float, 1);
    groups[i] = group_of(Rule{}, numbers + kRuleNumbers * i, static_cast<const float*>(lr));
  }
  return groups;
}

Settings settings_of(const double* n) {
  const auto single = [&](int i) { return static_cast<float>(n[i]); };
  const auto whole = [&](int i) { return static_cast<int32_t>(n[i]); };
  return {n[0],     single(2), single(3), single(4), single(5), whole(6), whole(7),
          whole(8), whole(9),  n[1] != 0, n[10] != 0};
}

// The tensors that every step has.
struct Shared {
  const Tensor &scale, &stats, &control, &workspace, &settings, &report;
};

template <class Rule>
StepTable<Rule> blank_step(const Call& call, const Shared& shared) {
  StepTable<Rule> table{};
  table.settings = settings_of(call.numbers<double>(shared.settings, "settings", kSettings));
  table.scale = static_cast<const float*>(call.memory(shared.scale, "scale", ScalarType::Float, 1));
  table.stats = static_cast<const double*>(call.memory(shared.stats, "stats", ScalarType::Double, kStats));
  table.control = static_cast<Control*>(call.memory(shared.control, "control", ScalarType::Int, kControl));
  table.workspace = static_cast<double*>(call.memory(shared.workspace, "workspace", ScalarType::Double, kWorkspace));
  table.report = static_cast<Report*>(call.memory(shared.report, "report", ScalarType::Int, kControl));
  return table;
}

template <class Rule, int Streams>
std::vector<StepTable<Rule>> step_tables(const Call& call, const Source (&sources)[Streams], const Tensor& groups,
                                         const Tensor& rules, const TensorList& lrs, const Shared& shared) {
  const auto all = groups_of<Rule>(call, rules, lrs);
  return pack(blank_step<Rule>(call, shared), step_items(call, sources, groups, all.size()), all);
}

ScalarType param_type(const TensorList& params) {
  return params.empty() ? ScalarType::Float : params[0].scalar_type();
}

}  // namespace

void grad_stats(const Target& target, const TensorList& grads, const TensorList& losses, const Tensor& scale,
                const Tensor& stats, const Tensor& workspace) {
  const Call call("grad_stats", stats);
  GradTable blank = blank_grads(call, scale, stats);
  blank.workspace = static_cast<double*>(call.memory(workspace, "workspace", ScalarType::Double, kWorkspace));
  std::vector<Item<1>> items;
  add_grads(call, items, grads, "grads", 0);
  add_grads(call, items, losses, "losses", kLoss);
  bool added = false;
  for (GradTable& table : pack(blank, items)) {
    table.adds = added;
    check(call, target, target.device.grad_stats(table, target.stream));
    added = true;
  }
}

void unscale_clip(const Target& target, const TensorList& grads, const Tensor& scale, const Tensor& stats,
                  double max_norm) {
  const Call call("unscale_clip_", stats);
  GradTable blank = blank_grads(call, scale, stats);
  blank.max_norm = max_norm;
  std::vector<Item<1>> items;
  add_grads(call, items, grads, "grads", 0);
  for (const GradTable& table : pack(blank, items))
    check(call, target, target.device.unscale_clip(table, target.stream));
}

void adam_step(const Target& target, const TensorList& params, const TensorList& masters, const TensorList& grads,
               const TensorList& exp_avgs, const TensorList& exp_avg_sqs, const TensorList& steps,
               const Tensor& groups, const Tensor& rules, const TensorList& lrs, const Tensor& scale,
               const Tensor& stats, const Tensor& control, const Tensor& workspace, const Tensor& settings,
               const Tensor& report) {
  const Call call("adam_step_", stats);
  const Storage storage = storage_of(call, params, masters);
  const Source sources[] = {{params, "params", param_type(params), false, false},
                            {masters, "masters", ScalarType::Float, true, false},
                            {grads, "grads", param_type(params), false, false},
                            {exp_avgs, "exp_avgs", ScalarType::Float, false, false},
                            {exp_avg_sqs, "exp_avg_sqs", ScalarType::Float, false, false},
                            {steps, "steps", ScalarType::Float, false, true}};
  const Shared shared{scale, stats, control, workspace, settings, report};
  for (const auto& table : step_tables<Adam>(call, sources, groups, rules, lrs, shared))
    check(call, target, target.device.adam_step(table, storage, target.stream));
}

void sgd_step(const Target& target, const TensorList& params, const TensorList& masters, const TensorList& grads,
              const TensorList& momenta, const Tensor& groups, const Tensor& rules, const TensorList& lrs,
              const Tensor& scale, const Tensor& stats, const Tensor& control, const Tensor& workspace,
              const Tensor& settings, const Tensor& report) {
  const Call call("sgd_step_", stats);
  const Storage storage = storage_of(call, params, masters);
  const Source sources[] = {{params, "params", param_type(params), false, false},
                            {masters, "masters", ScalarType::Float, true, false},
                            {grads, "grads", param_type(params), false, false},
                            {momenta, "momenta", ScalarType::Float, true, false}};
  const Shared shared{scale, stats, control, workspace, settings, report};
  for (const auto& table : step_tables<Sgd>(call, sources, groups, rules, lrs, shared))
    check(call, target, target.device.sgd_step(table, storage, target.stream));
}

}  // namespace polyamp
