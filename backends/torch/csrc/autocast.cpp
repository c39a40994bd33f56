// Autocast by a policy's rules, as boxed kernels at PyTorch's Autocast dispatch keys. They replace the registrations of
// autocast/overrides.py and autocast/weights.py through torch.library, and are as fast as native autocast's own kernels.
//
// One kernel serves every operator: it finds the arguments' tensors on the stack. Python decides which region is active
// and what happens to an operator there; the kernel looks both up. What this thread cannot know (functions that
// checkpointing runs again, regions inside compiled code, regions of torch.autocast within ours) it asks Python.
//
// It needs dispatch keys and operators directly, which PyTorch's stable ABI does not offer. So it is built for one
// release of PyTorch, from its C++ headers alone (no CUDA, no Python).

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace {

using at::ScalarType;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// How an operation's tensors are handled. autocast/boxed.py has the same numbers.
enum class Behaviour : int8_t {
  undecided,
  native,
  float16,
  bfloat16,
  float32,
  widest,
  as_written,
  inner_float16,
  inner_bfloat16,
  norm,
  mixed_float32,  // these two if the tensors' types differ; else native
  mixed_bfloat16
};

// Regions are numbers from 0 on. None: only native autocast, or nothing.
constexpr int64_t kNoRegion = -1;
constexpr int64_t kUnknownRegion = -2;
constexpr int64_t kOutside = -3;  // this thread has entered no region, not even one that turns autocast off

struct Settings {
  at::DeviceType marked[2];  // the device types whose autocast dtypes mark regions
  int64_t unmarked;
  int64_t regions;  // number of possible regions
  int64_t (*choose)(int64_t place, int64_t region);  // returns the Behaviour; determines it for an unknown region
};
Settings settings;

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
struct Cast {
  Weak weight;  // keeps its address, which is in the key, from being reused for another tensor
  int64_t version;
  Tensor value;
};
using CastKey = std::tuple<const c10::TensorImpl*, ScalarType, bool>;

struct Thread {
  int64_t region = kOutside;
  int64_t state = 0;      // native autocast's state when the region was entered
  int64_t forgotten = 0;  // how often casts were dropped
  std::map<CastKey, Cast> casts;
};
thread_local Thread here;

constexpr int64_t kMarks = 0xffff;

// This thread's native autocast: its dtypes for the marked device types, and how many of its regions are active.
int64_t native_state() {
  at::autocast::increment_nesting();
  const auto depth = static_cast<int64_t>(at::autocast::decrement_nesting());
  const auto first = static_cast<int64_t>(at::autocast::get_autocast_dtype(settings.marked[0]));
  const auto second = static_cast<int64_t>(at::autocast::get_autocast_dtype(settings.marked[1]));
  return depth << 16 | second << 8 | first;
}

// The answer of `regions.current` in Python, if it does not need Python.
int64_t region_here() {
  const int64_t state = native_state();
  if (here.region != kOutside && here.state == state) {
    return here.region;
  }
  const bool marked = (state & kMarks) != settings.unmarked;
  return marked || torch::autograd::get_current_graph_task_id() != -1 ? kUnknownRegion : kNoRegion;
}

void forget_casts() {
  ++here.forgotten;
  here.casts.clear();
  at::autocast::clear_cache();
}

// Casts must not be kept outside regions, during graph capture and under transforms of torch.func.
bool may_keep_cast(const Tensor& weight) {
  return here.region != kOutside && at::autocast::is_autocast_cache_enabled() && !weight.is_inference() &&
      !weight.key_set().has(DispatchKey::Python) && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
      !c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// A leaf that requires gradients: the cast stays valid while nothing has changed the leaf in this region.
Tensor cast_weight(const Tensor& weight, ScalarType dtype) {
  if (!may_keep_cast(weight)) {
    return weight.to(dtype);
  }
  const CastKey key{weight.unsafeGetTensorImpl(), dtype, c10::GradMode::is_enabled()};
  const auto version = static_cast<int64_t>(weight._version());
  const auto kept = here.casts.find(key);
  if (kept != here.casts.end() && kept->second.version == version) {
    return kept->second.value;
  }
  Tensor value = weight.to(dtype);
  here.casts.insert_or_assign(key, Cast{Weak(weight.getIntrusivePtr()), version, value});
  return value;
}

// Data that an operator's kernel needs in every region.
class Kernel : public c10::OperatorKernel {
 protected:
  Kernel(const OperatorHandle& op, at::DeviceType device)
      : device_(device),
        key_(at::autocast::get_autocast_dispatch_key_from_device_type(device)),
        arguments_(op.schema().arguments().size()) {}

  IValue& argument(Stack& stack, size_t index) const {
    return torch::jit::peek(stack, index, arguments_);
  }

  // Continue as if there were no kernel at this key.
  void pass_on(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, key_), stack);
  }

  const at::DeviceType device_;
  const DispatchKey key_;
  const size_t arguments_;
};

// An operator that changes its first argument. If that may be a weight or a view of one, casts are dropped.
class Update final : public Kernel {
 public:
  Update(const OperatorHandle& op, at::DeviceType device) : Kernel(op, device) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    const IValue& updated = argument(*stack, 0);
    if (!updated.isTensor() || may_be_weight(updated.toTensor())) {
      forget_casts();
    }
    pass_on(op, keys, stack);
  }

 private:
  static bool may_be_weight(const Tensor& tensor) {
    return tensor.scalar_type() == ScalarType::Float && tensor.grad_fn() == nullptr &&
        (tensor.requires_grad() || !is_new(tensor));
  }

  // Whether memory was never written to and is not shared, as when an operator fills the memory of its result.
  static bool is_new(const Tensor& tensor) {
    return !tensor.is_inference() && tensor.has_storage() && tensor.storage().use_count() == 1 && tensor._version() == 0;
  }
};

// An operator whose class may differ from that of native autocast.
class Override final : public Kernel {
 public:
  Override(const OperatorHandle& op, at::DeviceType device, int64_t place, bool listed, bool only_the_first)
      : Kernel(op, device),
        place_(place),
        cast_(only_the_first ? 1 : arguments_),
        results_(op.schema().returns().size()),
        dtype_argument_(op.schema().argumentIndexWithName("dtype")),
        weight_(op.schema().argumentIndexWithName("weight")),
        bias_(op.schema().argumentIndexWithName("bias")),
        backward_(op.schema().name().find("_backward") != std::string::npos),
        ignores_numbers_(op.schema().name() == "aten::lerp" && op.schema().overload_name() == "Tensor"),
        chosen_(std::make_unique<std::atomic<Behaviour>[]>(settings.regions)) {
    if (listed) {
      native_.emplace(op.getComputedKernelForDispatchKey(key_));
    }
  }

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) const {
    const Behaviour chosen = choose();
    const bool only_mixed = chosen == Behaviour::mixed_float32 || chosen == Behaviour::mixed_bfloat16;
    const Behaviour behaviour = only_mixed && agree(*stack) ? Behaviour::native : chosen;
    if (behaviour != Behaviour::native) {
      c10::impl::ExcludeDispatchKeyGuard without_autocast(key_);
      const std::optional<ScalarType> rounded = rounding(behaviour, *stack);
      cast(behaviour, *stack);
      op.callBoxed(stack);
      if (rounded && results_ > 0) {
        cast_argument(torch::jit::peek(*stack, 0, results_), *rounded);
      }
    } else if (native_) {
      native_->callBoxed(op, keys, stack);
    } else {
      pass_on(op, keys, stack);
    }
  }

 private:
  Behaviour choose() const {
    const int64_t region = region_here();
    if (region == kNoRegion) {
      return Behaviour::native;
    }
    if (region == kUnknownRegion) {
      return ask(region);
    }
    Behaviour behaviour = chosen_[region].load(std::memory_order_relaxed);
    if (behaviour == Behaviour::undecided) {
      behaviour = ask(region);
      chosen_[region].store(behaviour, std::memory_order_relaxed);
    }
    return behaviour;
  }

  Behaviour ask(int64_t region) const {
    const auto behaviour = static_cast<Behaviour>(settings.choose(place_, region));
    TORCH_CHECK(behaviour != Behaviour::undecided, "interrupted while a policy's rules were looked up");
    return behaviour;
  }

  void cast(Behaviour behaviour, Stack& stack) const {
    switch (behaviour) {
      case Behaviour::float16:
        return cast_to(ScalarType::Half, stack);
      case Behaviour::bfloat16:
      case Behaviour::mixed_bfloat16:
        return cast_to(ScalarType::BFloat16, stack);
      case Behaviour::inner_float16:
      case Behaviour::inner_bfloat16:
      case Behaviour::mixed_float32:
      case Behaviour::float32:
        return gives_dtype(stack) ? void() : cast_to(ScalarType::Float, stack);
      case Behaviour::widest:
        return agree(stack) ? void() : cast_to(ScalarType::Float, stack);
      case Behaviour::norm:
        return cast_norm(stack);
      default:
        return;
    }
  }

  // Kernels of norms take 16-bit data with float32 parameters, but not under transforms, nor 16-bit parameters with
  // float32 data. All that is 16-bit then becomes float32, except for running statistics.
  void cast_norm(Stack& stack) const {
    if ((backward_ || argument(stack, 0).toTensor().scalar_type() != ScalarType::Float) && !is_transformed()) {
      return;
    }
    for (size_t index = 0; index < arguments_; ++index) {
      const auto place = static_cast<int>(index);
      if (backward_ || place == 0 || place == weight_ || place == bias_) {
        cast_argument(argument(stack, index), ScalarType::Float);
      }
    }
  }

  static bool is_transformed() {
    return c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
        torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
  }

  // The dtype that the first result is cast to, for an operator whose result only is in 16 bits.
  std::optional<ScalarType> rounding(Behaviour behaviour, Stack& stack) const {
    if (behaviour == Behaviour::norm) {
      const ScalarType dtype = argument(stack, 0).toTensor().scalar_type();
      const bool widened = !backward_ && dtype != ScalarType::Float && is_transformed();
      return widened ? std::make_optional(dtype) : std::nullopt;
    }
    const bool inner = behaviour == Behaviour::inner_float16 || behaviour == Behaviour::inner_bfloat16;
    if (!inner || gives_dtype(stack)) {
      return std::nullopt;
    }
    return behaviour == Behaviour::inner_float16 ? ScalarType::Half : ScalarType::BFloat16;
  }

  void cast_to(ScalarType dtype, Stack& stack) const {
    for (size_t index = 0; index < cast_; ++index) {
      cast_argument(argument(stack, index), dtype);
    }
  }

  bool gives_dtype(Stack& stack) const {
    return dtype_argument_ && !argument(stack, *dtype_argument_).isNone();
  }

  // Whether the tensors that autocast would cast have the same type.
  bool agree(Stack& stack) const {
    std::optional<ScalarType> common;
    for (size_t index = 0; index < arguments_; ++index) {
      const IValue& value = argument(stack, index);
      for (const IValue& one : value.isList() ? value.toListRef() : c10::ArrayRef<IValue>(value)) {
        const bool counts = is_castable(one) && !(ignores_numbers_ && one.toTensor().dim() == 0);
        if (counts && one.toTensor().scalar_type() != common) {
          if (common) {
            return false;
          }
          common = one.toTensor().scalar_type();
        }
      }
    }
    return true;
  }

  void cast_argument(IValue& value, ScalarType dtype) const {
    if (needs_cast(value, dtype)) {
      value = cast_tensor(value.toTensor(), dtype);
    } else if (value.isList()) {
      cast_list(value, dtype);
    }
  }

  void cast_list(IValue& value, ScalarType dtype) const {
    const auto needs = [&](const IValue& one) { return needs_cast(one, dtype); };
    const auto given = value.toListRef();
    if (std::none_of(given.begin(), given.end(), needs)) {
      return;
    }
    const c10::List<IValue> list = value.toList().copy();  // of the same type; the caller keeps its own
    for (size_t index = 0; index < list.size(); ++index) {
      const IValue one = list.get(index);
      if (needs(one)) {
        list.set(index, cast_tensor(one.toTensor(), dtype));
      }
    }
    value = list;
  }

  static Tensor cast_tensor(const Tensor& tensor, ScalarType dtype) {
    return tensor.requires_grad() && tensor.is_leaf() ? cast_weight(tensor, dtype) : tensor.to(dtype);
  }

  bool needs_cast(const IValue& value, ScalarType dtype) const {
    return value.isTensor() && value.toTensor().scalar_type() != dtype && is_castable(value);
  }

  // Not float64, integer, complex or 8-bit values, nor other devices' tensors. Undefined tensors have no type either.
  bool is_castable(const IValue& value) const {
    if (!value.isTensor()) {
      return false;
    }
    const Tensor& tensor = value.toTensor();
    const ScalarType dtype = tensor.scalar_type();
    const bool has_type = dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
    return has_type && tensor.device().type() == device_;
  }

  const int64_t place_;
  const size_t cast_;  // how many of the arguments are cast, starting with the first
  const size_t results_;
  const std::optional<int> dtype_argument_;
  const std::optional<int> weight_;
  const std::optional<int> bias_;
  const bool backward_;
  const bool ignores_numbers_;  // a tensor without dimensions may have any type
  std::optional<c10::SafeKernelFunction> native_;
  const std::unique_ptr<std::atomic<Behaviour>[]> chosen_;  // by region
};

// Overriding is intended: PyTorch warns about it, once for all operators.
class Silence final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

OperatorHandle operator_named(const std::string& name) {
  const size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(), overload.c_str());
}

template <class Functor>
void register_kernel(const std::string& name, at::DeviceType device, std::unique_ptr<Functor> kernel) {
  const DispatchKey key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto* library = new torch::Library(torch::Library::IMPL, name.substr(0, name.find(':')), key, __FILE__, __LINE__);  // never destroyed
  library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

at::DeviceType type_named(const char* device) {
  return c10::Device(device).type();
}

// Returns null if `action` succeeds, else the error message, valid until this thread's next call.
template <class Action>
const char* failure_of(Action action) {
  thread_local std::string failure;
  try {
    action();
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}

}  // namespace

#define POLYAMP_EXPORT extern "C" __attribute__((visibility("default")))

// To be called first, before any region is entered.
POLYAMP_EXPORT const char* polyamp_autocast_set_up(
    const char* first_marked, const char* second_marked, int64_t regions, int64_t (*choose)(int64_t, int64_t)) {
  return failure_of([&] {
    settings = {{type_named(first_marked), type_named(second_marked)}, 0, regions, choose};
    settings.unmarked = native_state() & kMarks;
  });
}

POLYAMP_EXPORT const char* polyamp_autocast_override(
    const char* name, const char* device, int64_t place, int listed, int only_the_first) {
  return failure_of([&] {
    const OperatorHandle op = operator_named(name);
    const at::DeviceType type = type_named(device);
    register_kernel(name, type, std::make_unique<Override>(op, type, place, listed != 0, only_the_first != 0));
  });
}

POLYAMP_EXPORT const char* polyamp_autocast_watch(const char* name, const char* device) {
  return failure_of([&] {
    const at::DeviceType type = type_named(device);
    register_kernel(name, type, std::make_unique<Update>(operator_named(name), type));
  });
}

// This thread's native autocast, passed to `polyamp_autocast_become` while a region is the innermost.
POLYAMP_EXPORT int64_t polyamp_autocast_state() {
  return native_state();
}

POLYAMP_EXPORT void polyamp_autocast_become(int64_t region, int64_t state) {
  here.region = region;
  here.state = state;
  if (region == kOutside) {
    here.casts.clear();
  }
}

POLYAMP_EXPORT void polyamp_autocast_forget() {
  forget_casts();
}

// How often this thread's casts were dropped.
POLYAMP_EXPORT int64_t polyamp_autocast_forgotten() {
  return here.forgotten;
}
