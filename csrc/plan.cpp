#include "plan.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <string>

#include "fresh.h"
#include "pages.h"

namespace cudal1 {

namespace {

void push_list(const Slot& slot, const Values& values, torch::jit::Stack& stack) {
  if (slot.kind == Slot::tensors) {
    c10::List<at::Tensor> list;
    list.reserve(slot.indices.size());
    for (const int32_t index : slot.indices) list.push_back(values[index].toTensor());
    stack.emplace_back(std::move(list));
    return;
  }
  c10::List<std::optional<at::Tensor>> list;
  list.reserve(slot.indices.size());
  for (const int32_t index : slot.indices) {
    const bool none = index < 0 || values[index].isNone() || !values[index].toTensor().defined();
    list.push_back(none ? std::nullopt : std::make_optional(values[index].toTensor()));
  }
  stack.emplace_back(std::move(list));
}

uint64_t address_of(const LaunchStep& step, const Values& values, int32_t number, c10::Device device) {
  const c10::IValue& value = values[number];
  if (!value.isTensor() || !value.toTensor().defined()) throw LaunchFailure(LaunchFailure::absent, &step.symbol, number, 0);
  const at::Tensor& tensor = value.toTensor();
  if (tensor.device() != device) throw LaunchFailure(LaunchFailure::elsewhere, &step.symbol, number, tensor.get_device());
  return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
}

}  // namespace

void AtenStep::run(Values& values, torch::jit::Stack& stack) const {
  stack.clear();
  for (const Slot& slot : slots) {
    if (slot.kind == Slot::constant)
      stack.push_back(slot.fixed);
    else if (slot.kind == Slot::value)
      stack.push_back(values[slot.index]);
    else if (slot.kind == Slot::optional_value) {
      const c10::IValue& value = values[slot.index];
      stack.push_back(value.isTensor() && !value.toTensor().defined() ? c10::IValue() : value);
    } else
      push_list(slot, values, stack);
  }
  op.callBoxed(stack);
  if (list) {
    const c10::List<at::Tensor> results = stack.back().toTensorList();
    if (results.size() != outs.size())
      throw WrongValue(op.operator_name().name + " yields " + std::to_string(results.size()) + " tensors, the plan has " +
                       std::to_string(outs.size()));
    for (size_t i = 0; i < outs.size(); ++i) values[outs[i]] = results.get(i);
  } else {
    for (size_t i = 0; i < outs.size(); ++i) values[outs[i]] = std::move(stack[i]);
  }
  stack.clear();  // an argument must not outlive its last step
}

void Plan::run_steps(Values& values) const {
  torch::jit::Stack stack;
  std::optional<InContext> context;
  void* stream = nullptr;
  if (driver) {
    context.emplace(*driver);
    stream = stream_of(*driver, device);
  }
  at::Tensor pool;
  const auto address = [&](const LaunchStep& step, int32_t number) {
    const int64_t offset = arena.offsets[number];
    return offset < 0 ? address_of(step, values, number, device) : reinterpret_cast<uint64_t>(pool.const_data_ptr()) + offset;
  };
  for (size_t position = 0; position < steps.size(); ++position) {
    const Step& step = steps[position];
    if (arena.bytes != 0 && position == arena.first)
      pool = fresh({arena.bytes}, {1}, at::kByte, device);
    if (const auto* aten = std::get_if<AtenStep>(&step.what))
      aten->run(values, stack);
    else if (const auto* group = std::get_if<GroupStep>(&step.what))
      (*group)->run(*driver, stream, address);
    else {
      const auto& alloc = std::get<AllocStep>(step.what);
      values[alloc.out] = fresh(alloc.sizes, alloc.strides, alloc.dtype, device);
    }
    for (const int32_t index : step.dead) values[index] = c10::IValue();
    if (position == arena.last) pool = at::Tensor();
  }
}

Values Plan::run(Values&& given) const {
  Values values = std::move(given);
  values.reserve(value_count);
  for (const at::Tensor& constant : constants) values.emplace_back(constant);
  values.resize(value_count);
  {
    const OnDevice on(device);
    const HugePages pages(device.is_cpu());
    // Without gradients the autograd layer of every operator does nothing but cost time.
    std::optional<at::AutoDispatchBelowAutograd> below;
    if (!c10::GradMode::is_enabled()) below.emplace();
    run_steps(values);
  }
  Values results;
  results.reserve(outputs.size());
  for (const int32_t index : outputs) results.push_back(index < 0 ? c10::IValue() : values[index]);
  return results;
}

}  // namespace cudal1
