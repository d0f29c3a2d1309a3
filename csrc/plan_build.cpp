// Builds a Plan from the plain tuples that torch_cudal1/runtime/compiled.py writes.
//
// Arguments are converted by the very function that a call from Python would use, once instead of at every call. What a plan cannot
// hold raises NotImplementedError with its reason, and the Python executor runs the Program.

#include "plan_build.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include <algorithm>
#include <map>

namespace cudal1 {

namespace {

enum Held : char { nothing, tensor, number, other };  // what a value is known to be, before anything runs

[[noreturn]] void refuse(const std::string& reason) { throw Unsupported(reason); }

class Builder {
 public:
  Builder(Plan& plan, PyObject* value_type) : plan_(plan), value_type_(value_type), held_(plan.value_count, nothing) {
    std::fill_n(held_.begin(), plan.input_count + plan.constants.size(), tensor);
  }
  void add(py::handle step);
  void finish();  // after the outputs are known

 private:
  struct Life {
    size_t first, last;  // steps, as added
    int64_t bytes;
  };
  using Added = std::variant<AtenStep, AllocStep, LaunchStep>;
  std::vector<std::pair<Added, std::vector<int32_t>>> added_;

  std::map<int32_t, Life> lives() const;
  void place(const std::map<int32_t, Life>& lives);
  AtenStep aten(const py::tuple& step);
  AllocStep alloc(const py::tuple& step);
  LaunchStep launch(const py::tuple& step);
  Slot slot(const c10::Argument& argument, py::handle given, const std::string& where);
  Slot list_slot(const c10::TypePtr& type, py::handle given, const std::string& where);
  bool is_value(py::handle given) const { return Py_TYPE(given.ptr()) == reinterpret_cast<PyTypeObject*>(value_type_); }
  bool holds_value(py::handle given) const;
  int32_t number_of(py::handle value) const { return known(value.attr("index")); }
  int32_t known(py::handle number) const;
  std::vector<int32_t> numbers(py::handle many) const;

  Plan& plan_;
  PyObject* value_type_;
  std::vector<Held> held_;
};

int32_t Builder::known(py::handle number) const {
  const auto found = number.cast<int64_t>();
  if (found < 0 || found >= static_cast<int64_t>(held_.size()))
    throw py::value_error("value " + std::to_string(found) + " of " + std::to_string(held_.size()));
  return static_cast<int32_t>(found);
}

std::vector<int32_t> Builder::numbers(py::handle many) const {
  std::vector<int32_t> found;
  for (const py::handle one : py::reinterpret_borrow<py::tuple>(many)) found.push_back(known(one));
  return found;
}

bool Builder::holds_value(py::handle given) const {
  if (is_value(given)) return true;
  if (!PyTuple_Check(given.ptr()) && !PyList_Check(given.ptr())) return false;
  for (const py::handle item : given)
    if (holds_value(item)) return true;
  return false;
}

bool is_tensor(const c10::TypePtr& type) { return type->kind() == c10::TypeKind::TensorType; }

c10::TypePtr within(const c10::TypePtr& type, c10::TypeKind outer) {  // the element of a list or optional type, or null
  return type->kind() == outer ? type->containedType(0) : nullptr;
}

bool is_integer(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::IntType || type->kind() == c10::TypeKind::SymIntType || type->kind() == c10::TypeKind::NumberType;
}

Slot Builder::slot(const c10::Argument& argument, py::handle given, const std::string& where) {
  const c10::TypePtr& type = argument.real_type();
  Slot made;
  if (is_value(given)) {
    const c10::TypePtr inner = within(type, c10::TypeKind::OptionalType);
    made.index = number_of(given);
    made.kind = inner ? Slot::optional_value : Slot::value;
    const Held held = held_[made.index];
    const c10::TypePtr& bare = inner ? inner : type;
    if (!(held == tensor && is_tensor(bare)) && !(held == number && is_integer(bare)))
      refuse(where + " gets a value that is not known to be a " + bare->str());
    return made;
  }
  if (holds_value(given)) return list_slot(type, given, where);
  made.fixed = torch::jit::toIValue(given, type, argument.N());
  return made;
}

Slot Builder::list_slot(const c10::TypePtr& type, py::handle given, const std::string& where) {
  const c10::TypePtr inner = within(type, c10::TypeKind::OptionalType);
  const c10::TypePtr element = within(inner ? inner : type, c10::TypeKind::ListType);
  const c10::TypePtr bare = element ? within(element, c10::TypeKind::OptionalType) : nullptr;
  if (!element || !is_tensor(bare ? bare : element)) refuse(where + " of type " + type->str() + " holds a value");
  Slot made;
  made.kind = bare ? Slot::optional_tensors : Slot::tensors;
  for (const py::handle item : given) {
    if (item.is_none() && bare) {
      made.indices.push_back(-1);
      continue;
    }
    if (!is_value(item) || held_[number_of(item)] != tensor) refuse(where + " holds something that is no tensor");
    made.indices.push_back(number_of(item));
  }
  return made;
}

bool numbers_may_be_tensors(const c10::FunctionSchema& schema) {
  const c10::Symbol name = c10::Symbol::fromQualString(schema.name());
  return name.is_prims() || (name.is_aten() && torch::should_allow_numbers_as_tensors(name.toUnqualString()));
}

// ("aten", name, overload, args, kwargs, outs, many)
AtenStep Builder::aten(const py::tuple& step) {
  const auto name = step[1].cast<std::string>(), overload = step[2].cast<std::string>();
  AtenStep made{c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), {}, numbers(step[5]), false};
  const c10::FunctionSchema& schema = made.op.schema();
  const auto args = py::reinterpret_borrow<py::tuple>(step[3]);
  const auto kwargs = py::reinterpret_borrow<py::dict>(step[4]);
  const torch::jit::ToIValueAllowNumbersAsTensors numbers(numbers_may_be_tensors(schema));
  size_t used = 0;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const std::string where = name + "(" + argument.name() + ")";
    if (i < args.size() && !argument.kwarg_only())
      made.slots.push_back(slot(argument, args[i], where));
    else if (kwargs.contains(argument.name().c_str()))
      made.slots.push_back(slot(argument, kwargs[argument.name().c_str()], where)), ++used;
    else if (argument.default_value())
      made.slots.push_back(Slot{Slot::constant, -1, {}, *argument.default_value()});
    else
      refuse(where + " is missing");
  }
  if (args.size() > schema.arguments().size() || used != kwargs.size()) refuse(name + " has more arguments than its schema");
  const bool many = step[6].cast<bool>();
  const auto& returns = schema.returns();
  const c10::TypePtr listed = returns.size() == 1 ? within(returns[0].real_type(), c10::TypeKind::ListType) : nullptr;
  made.list = many && listed && is_tensor(listed);
  if (!made.list && (many ? returns.size() < 2 || returns.size() != made.outs.size() : returns.size() != 1 || made.outs.size() != 1))
    refuse(name + " yields " + std::to_string(returns.size()) + " results, the Program has " + std::to_string(made.outs.size()));
  for (size_t i = 0; i < made.outs.size(); ++i) {
    const c10::TypePtr& type = made.list ? listed : returns[i].real_type();
    held_[made.outs[i]] = is_tensor(type) ? tensor : is_integer(type) ? number : other;
  }
  return made;
}

// ("alloc", out, shape, strides, dtype)
AllocStep Builder::alloc(const py::tuple& step) {
  const int32_t out = known(step[1]);
  if (!THPDtype_Check(step[4].ptr())) throw py::type_error("an alloc needs a dtype");
  held_[out] = tensor;
  return {out, step[2].cast<std::vector<int64_t>>(), step[3].cast<std::vector<int64_t>>(),
          reinterpret_cast<THPDtype*>(step[4].ptr())->scalar_type};
}

// ("launch", symbol, function, grid, block, shared_bytes, attributes, parameters, pointers)
LaunchStep Builder::launch(const py::tuple& step) {
  if (!plan_.driver) throw py::value_error("a launch needs a driver");
  LaunchStep made;
  made.symbol = step[1].cast<std::string>();
  made.function = reinterpret_cast<void*>(step[2].cast<uintptr_t>());
  const auto grid = step[3].cast<std::array<unsigned, 3>>();
  std::copy(grid.begin(), grid.end(), made.config.grid);
  made.config.block[0] = step[4].cast<unsigned>(), made.config.block[1] = made.config.block[2] = 1;
  made.config.shared_bytes = step[5].cast<unsigned>();
  for (const auto& [id, words] : step[6].cast<std::vector<std::pair<int, std::vector<uint32_t>>>>()) {
    LaunchAttribute attribute{id, {}, {}};
    if (words.size() > std::size(attribute.value)) throw py::value_error("a launch attribute has at most 16 words");
    std::copy(words.begin(), words.end(), attribute.value);
    made.attributes.push_back(attribute);
  }
  made.config.attribute_count = made.attributes.size();
  made.parameters = step[7].cast<std::vector<uint64_t>>();
  for (const auto& [parameter, value, mask] : step[8].cast<std::vector<std::tuple<uint32_t, int32_t, uint64_t>>>()) {
    if (parameter >= made.parameters.size()) throw py::value_error("a pointer beyond the parameters");
    made.pointers.push_back({parameter, known(py::int_(value)), mask});
  }
  return made;
}

void Builder::add(py::handle given) {  // (step, dead)
  const auto pair = py::reinterpret_borrow<py::tuple>(given);
  const auto step = py::reinterpret_borrow<py::tuple>(pair[0]);
  const auto kind = step[0].cast<std::string>();
  std::vector<int32_t> dead = numbers(pair[1]);
  if (kind == "aten")
    added_.emplace_back(aten(step), std::move(dead));
  else if (kind == "alloc")
    added_.emplace_back(alloc(step), std::move(dead));
  else if (kind == "launch")
    added_.emplace_back(launch(step), std::move(dead));
  else
    refuse("unknown step " + kind);
}

// Values that an alloc makes and only launches use: when they live, and how many bytes they need.
std::map<int32_t, Builder::Life> Builder::lives() const {
  std::map<int32_t, Life> found;
  const auto drop = [&](int32_t index) { found.erase(index); };
  for (size_t position = 0; position < added_.size(); ++position) {
    const Added& step = added_[position].first;
    if (const auto* alloc = std::get_if<AllocStep>(&step)) {
      const auto bytes = at::detail::computeStorageNbytes(alloc->sizes, alloc->strides, at::elementSize(alloc->dtype));
      found[alloc->out] = {position, position, static_cast<int64_t>(bytes)};
    } else if (const auto* launch = std::get_if<LaunchStep>(&step)) {
      for (const Pointer& pointer : launch->pointers)
        if (const auto known = found.find(pointer.value); known != found.end()) known->second.last = position;
    } else {
      for (const Slot& slot : std::get<AtenStep>(step).slots) {
        drop(slot.index);
        std::for_each(slot.indices.begin(), slot.indices.end(), drop);
      }
    }
  }
  std::for_each(plan_.outputs.begin(), plan_.outputs.end(), drop);
  return found;
}

// First fit: each value at the lowest place that no value living at the same time has.
void Builder::place(const std::map<int32_t, Life>& lives) {
  constexpr int64_t line = 512;  // as PyTorch's allocator aligns
  Arena& arena = plan_.arena;
  for (const auto& [value, life] : lives) {
    std::vector<std::pair<int64_t, int64_t>> taken;  // [begin, end), by begin
    for (const auto& [other, its] : lives)
      if (other < value && its.first <= life.last && life.first <= its.last)
        taken.emplace_back(arena.offsets[other], arena.offsets[other] + its.bytes);
    std::sort(taken.begin(), taken.end());
    int64_t offset = 0;
    for (const auto& [begin, end] : taken) {
      if (offset + life.bytes <= begin) break;
      offset = std::max(offset, (end + line - 1) / line * line);
    }
    arena.offsets[value] = offset;
    arena.bytes = std::max(arena.bytes, offset + std::max(life.bytes, int64_t{1}));
  }
}

// Allocs go before the launches around them, so that launches stand side by side and are enqueued together.
void Builder::finish() {
  plan_.arena.offsets.assign(plan_.value_count, -1);
  const std::map<int32_t, Life> in_arena = lives();
  if (in_arena.size() > 1) place(in_arena);  // one alone costs the same by itself
  const auto& offsets = plan_.arena.offsets;
  Step group{GroupStep(), {}};
  const auto flush = [&] {
    if (std::get<GroupStep>(group.what)) plan_.steps.push_back(std::move(group));
    group = Step{GroupStep(), {}};
  };
  bool used = false;
  for (auto& [step, dead] : added_) {
    dead.erase(std::remove_if(dead.begin(), dead.end(), [&](int32_t index) { return offsets[index] >= 0; }), dead.end());
    if (auto* launch = std::get_if<LaunchStep>(&step)) {
      auto& launches = std::get<GroupStep>(group.what);
      if (!launches) launches = std::make_unique<LaunchGroup>();
      const bool touches = std::any_of(launch->pointers.begin(), launch->pointers.end(),
                                       [&](const Pointer& pointer) { return offsets[pointer.value] >= 0; });
      if (touches && !used) plan_.arena.first = plan_.steps.size(), used = true;  // at the group, or at an alloc hoisted before it
      if (touches) plan_.arena.last = plan_.steps.size();
      launches->launches.push_back(std::move(*launch));
      group.dead.insert(group.dead.end(), dead.begin(), dead.end());
    } else if (auto* alloc = std::get_if<AllocStep>(&step)) {
      if (offsets[alloc->out] >= 0) continue;
      if (used && plan_.arena.last == plan_.steps.size()) ++plan_.arena.last;  // its group moves back by this step
      plan_.steps.push_back({std::move(*alloc), {}});
      (std::get<GroupStep>(group.what) ? group.dead : plan_.steps.back().dead)
          .insert((std::get<GroupStep>(group.what) ? group.dead : plan_.steps.back().dead).end(), dead.begin(), dead.end());
    } else {
      flush();
      plan_.steps.push_back({std::move(std::get<AtenStep>(step)), std::move(dead)});
    }
  }
  flush();
}

Driver driver_from(py::handle given) {
  const auto address = given.cast<std::array<uintptr_t, 14>>();
  Driver driver;
  driver.context = reinterpret_cast<void*>(address[0]);
  driver.launch = reinterpret_cast<decltype(driver.launch)>(address[1]);
  driver.get_current = reinterpret_cast<decltype(driver.get_current)>(address[2]);
  driver.push = reinterpret_cast<decltype(driver.push)>(address[3]);
  driver.pop = reinterpret_cast<decltype(driver.pop)>(address[4]);
  driver.current_stream = reinterpret_cast<decltype(driver.current_stream)>(address[5]);
  if (std::count(address.begin(), address.begin() + 6, 0) != 0) throw py::value_error("a driver address is null");
  if (std::count(address.begin() + 6, address.end(), 0) != 0) return driver;  // no graphs
  GraphApi& graphs = driver.graphs;
  graphs.capture_status = reinterpret_cast<decltype(graphs.capture_status)>(address[6]);
  graphs.replay = reinterpret_cast<decltype(graphs.replay)>(address[7]);
  graphs.make_graph = reinterpret_cast<decltype(graphs.make_graph)>(address[8]);
  graphs.add_kernel = reinterpret_cast<decltype(graphs.add_kernel)>(address[9]);
  graphs.instantiate = reinterpret_cast<decltype(graphs.instantiate)>(address[10]);
  graphs.set_kernel = reinterpret_cast<decltype(graphs.set_kernel)>(address[11]);
  graphs.destroy_executable = reinterpret_cast<decltype(graphs.destroy_executable)>(address[12]);
  graphs.destroy_graph = reinterpret_cast<decltype(graphs.destroy_graph)>(address[13]);
  return driver;
}

}  // namespace

void build_plan(Plan& plan, PyObject* args) {
  const c10::InferenceMode normal(false);  // constants made from numbers serve calls in every mode
  const c10::impl::ExcludeDispatchKeyGuard real(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const auto given = py::reinterpret_borrow<py::tuple>(args);
  plan.input_count = given[0].cast<size_t>();
  plan.value_count = given[1].cast<size_t>();
  for (const py::handle constant : py::reinterpret_borrow<py::tuple>(given[2])) {
    if (!THPVariable_Check(constant.ptr())) throw py::type_error("a constant is no tensor");
    plan.constants.push_back(THPVariable_Unpack(constant.ptr()));
  }
  if (plan.value_count < plan.input_count + plan.constants.size()) throw py::value_error("fewer values than inputs and constants");
  if (!THPDevice_Check(given[4].ptr())) throw py::type_error("a plan needs a torch.device");
  plan.device = reinterpret_cast<THPDevice*>(given[4].ptr())->device;
  if (!given[5].is_none()) plan.driver = driver_from(given[5]);
  Builder builder(plan, given[7].ptr());
  for (const py::handle step : py::reinterpret_borrow<py::tuple>(given[6])) builder.add(step);
  for (const py::handle out : py::reinterpret_borrow<py::tuple>(given[3])) {
    const int32_t index = out.is_none() ? -1 : out.cast<int32_t>();
    if (index < -1 || index >= static_cast<int32_t>(plan.value_count)) throw py::value_error("an output is no value");
    plan.outputs.push_back(index);
  }
  builder.finish();
}

PyObject* to_python(c10::IValue&& value) {
  if (value.isTensor()) return THPVariable_Wrap(value.toTensor());  // None for an undefined tensor
  return torch::jit::toPyObject(std::move(value)).release().ptr();
}

}  // namespace cudal1
