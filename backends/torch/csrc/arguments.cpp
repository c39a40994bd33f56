// The checks of arguments.h.
#include "arguments.h"

#include <algorithm>
#include <numeric>

namespace polyamp {
namespace {

int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type;
}

// Each element exactly once without gaps, in any order of dimensions.
bool is_dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return true;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (const size_t dimension : order) {
    if (sizes[dimension] == 1) continue;
    if (strides[dimension] != expected) return false;
    expected *= sizes[dimension];
  }
  return true;
}

template <class Number>
constexpr ScalarType kType = ScalarType::Undefined;
template <>
constexpr ScalarType kType<double> = ScalarType::Double;
template <>
constexpr ScalarType kType<int64_t> = ScalarType::Long;

}  // namespace

Call::Call(const char* name, const Tensor& on) : name_(name), type_(device_type(on)), index_(on.get_device_index()) {}

void* Call::memory(const Tensor& tensor, const char* what, ScalarType type, int64_t numel) const {
  const bool here = device_type(tensor) == type_ && tensor.get_device_index() == index_;
  require(here, what, " is on another device than stats");
  require(tensor.scalar_type() == type, what, " has another dtype than it must");
  require(numel < 0 || tensor.numel() == numel, what, " has ", tensor.numel(), " elements, not ", numel);
  require(is_dense(tensor), what, " overlaps itself or has gaps");
  return tensor.data_ptr();
}

template <class Number>
const Number* Call::numbers(const Tensor& tensor, const char* what, int64_t count) const {
  require(tensor.is_cpu(), what, " is not on the CPU");
  require(tensor.scalar_type() == kType<Number>, what, " has another dtype than it must");
  require(tensor.numel() == count, what, " has ", tensor.numel(), " elements, not ", count);
  require(tensor.is_contiguous(), what, " is not contiguous");
  return static_cast<const Number*>(tensor.data_ptr());
}

template const double* Call::numbers<double>(const Tensor&, const char*, int64_t) const;
template const int64_t* Call::numbers<int64_t>(const Tensor&, const char*, int64_t) const;

void Call::same_length(const TensorList& list, const char* what, size_t length) const {
  require(list.size() == length, what, " has ", list.size(), " tensors, not ", length);
}

// The stride of a dimension with one element has no meaning.
void Call::same_layout(const Tensor& tensor, const char* what, const Tensor& like) const {
  bool same = tensor.numel() == like.numel();
  if (same && tensor.numel() > 1) {
    same = tensor.dim() == like.dim();
    const auto sizes = tensor.sizes(), strides = tensor.strides(), its_sizes = like.sizes(), its = like.strides();
    for (int64_t i = 0; same && i < tensor.dim(); ++i)
      same = sizes[i] == its_sizes[i] && (sizes[i] == 1 || strides[i] == its[i]);
  }
  require(same, what, " has not the shape and strides of its parameter");
}

Tag Call::format(const Tensor& tensor, const char* what) const {
  const ScalarType type = tensor.scalar_type();
  const bool known = type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
  require(known, what, " is neither float32, float16 nor bfloat16");
  return type == ScalarType::Float ? kFloat32 : type == ScalarType::Half ? kFloat16 : kBFloat16;
}

}  // namespace polyamp
