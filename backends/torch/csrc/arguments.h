// Checks the arguments of an operator, and converts them to plain pointers and numbers. Nothing is written before all
// checks of a call have passed.
#pragma once

#include "operators.h"

namespace polyamp {

using torch::headeronly::ScalarType;

// An operator's name, and the device that its tensors must be on.
class Call {
 public:
  Call(const char* name, const Tensor& on);

  template <class... Text>
  void require(bool holds, const Text&... text) const {
    STD_TORCH_CHECK(holds, "polyamp::", name_, ": ", text...);
  }

  // Dense memory on the device; checks the number of elements if it is passed.
  void* memory(const Tensor& tensor, const char* what, ScalarType type, int64_t numel = -1) const;

  // Numbers that the host reads.
  template <class Number>
  const Number* numbers(const Tensor& tensor, const char* what, int64_t count) const;

  void same_length(const TensorList& list, const char* what, size_t length) const;
  void same_layout(const Tensor& tensor, const char* what, const Tensor& like) const;

  // The code of the format of gradients or losses; does not check their memory, which `memory` does.
  Tag format(const Tensor& tensor, const char* what) const;

 private:
  const char* name_;
  int32_t type_, index_;
};

}  // namespace polyamp
