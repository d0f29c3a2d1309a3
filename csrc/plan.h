// A Program as the executor runs it: operators resolved, constant arguments converted, launches packed, deaths of values known.
//
// `Plan::run` is the C++ form of torch_cudal1/ir/interpreter.py and gives the same results; it needs no GIL. It checks no inputs
// (the guard in front of it does) and does no autograd. Immutable once built, so any number of threads may run one plan.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "group.h"
#include "launch.h"

namespace cudal1 {

using Values = std::vector<c10::IValue>;

struct Slot {  // one argument of an operator
  enum Kind : uint8_t { constant, value, optional_value, tensors, optional_tensors };
  Kind kind = constant;
  int32_t index = -1;             // value, optional_value
  std::vector<int32_t> indices;   // lists; -1 is None
  c10::IValue fixed;              // constant
};

struct AtenStep {
  c10::OperatorHandle op;
  std::vector<Slot> slots;
  std::vector<int32_t> outs;
  bool list;  // the operator returns one list, an element for each of `outs`
  void run(Values& values, torch::jit::Stack& stack) const;
};

struct AllocStep {
  int32_t out;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

using GroupStep = std::unique_ptr<LaunchGroup>;

struct Step {
  std::variant<AtenStep, AllocStep, GroupStep> what;
  std::vector<int32_t> dead;  // values that nobody needs afterwards
};

// One allocation for all values that only launches touch; those whose lives do not overlap share its bytes, as launches of one stream
// run in order. It lives from the first step that needs it to the last.
struct Arena {
  int64_t bytes = 0;
  size_t first = 0, last = 0;
  std::vector<int64_t> offsets;  // by value; -1: not in the arena
};

class Plan {
 public:
  size_t input_count = 0, value_count = 0;
  std::vector<at::Tensor> constants;  // the values after the inputs
  std::vector<Step> steps;
  Arena arena;
  std::vector<int32_t> outputs;  // -1: no tensor
  c10::Device device = c10::Device(c10::kCPU);
  std::optional<Driver> driver;  // of the launches, if there are any

  // Values of the outputs, in order. `values` holds the inputs; it is left empty.
  Values run(Values&& values) const;

 private:
  void run_steps(Values& values) const;
};

}  // namespace cudal1
