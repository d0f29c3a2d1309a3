// FastPath: what an accelerated module bound, called from Python through one entry.
//
// fast(args, kwargs) describes the call (signature.h), looks whether the global switches and the module are as they were when it was
// bound, runs the plan and returns the module's result; or MISS, and the caller goes the slow way, which knows every case. The
// checks are those of torch_cudal1/api/dispatcher.py and runtime/guard.py; where this one is stricter, it misses. A runner that fails is a MISS too,
// and its binding is forgotten: the slow way runs it again, and tells and contains the failure.

#include "fast.h"

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "guard.h"
#include "plan_build.h"
#include "plan_type.h"
#include "replay.h"
#include "signature.h"

namespace cudal1 {

namespace {

PyObject* miss = nullptr;

struct Switches {  // torch_cudal1.runtime.guard.call_state, without the default device: that is a function mode, and a mode is a miss
  // Autocast of both devices: a forward may ask for that of the other one.
  bool grad, deterministic, cpu_autocast, cuda_autocast;
  at::ScalarType cpu_dtype, cuda_dtype;
  caffe2::TypeMeta dtype;
  at::Float32Precision cpu_matmul, cpu_conv, cuda_matmul, cuda_conv, cuda_rnn;
  at::CuBLASReductionOption half, bfloat;

  static Switches now(bool cuda) {
    const auto& context = at::globalContext();
    using at::Float32Backend, at::Float32Op;
    Switches s{};
    s.grad = c10::GradMode::is_enabled();
    s.deterministic = context.deterministicAlgorithms();
    s.cpu_autocast = at::autocast::is_autocast_enabled(at::kCPU);
    if (s.cpu_autocast) s.cpu_dtype = at::autocast::get_autocast_dtype(at::kCPU);
    s.cuda_autocast = at::autocast::is_autocast_enabled(at::kCUDA);
    if (s.cuda_autocast) s.cuda_dtype = at::autocast::get_autocast_dtype(at::kCUDA);
    s.dtype = c10::get_default_dtype();
    s.cpu_matmul = context.float32Precision(Float32Backend::MKLDNN, Float32Op::MATMUL);
    s.cpu_conv = context.float32Precision(Float32Backend::MKLDNN, Float32Op::CONV);
    if (!cuda) return s;
    s.half = context.allowFP16ReductionCuBLAS();
    s.bfloat = context.allowBF16ReductionCuBLAS();
    s.cuda_matmul = context.float32Precision(Float32Backend::CUDA, Float32Op::MATMUL);
    s.cuda_conv = context.float32Precision(Float32Backend::CUDA, Float32Op::CONV);
    s.cuda_rnn = context.float32Precision(Float32Backend::CUDA, Float32Op::RNN);
    return s;
  }
  bool operator==(const Switches& o) const {
    return grad == o.grad && deterministic == o.deterministic && cpu_autocast == o.cpu_autocast && cuda_autocast == o.cuda_autocast &&
        cpu_dtype == o.cpu_dtype && cuda_dtype == o.cuda_dtype && dtype == o.dtype && cpu_matmul == o.cpu_matmul &&
        cpu_conv == o.cpu_conv && cuda_matmul == o.cuda_matmul && cuda_conv == o.cuda_conv && cuda_rnn == o.cuda_rnn &&
        half == o.half && bfloat == o.bfloat;
  }
};

struct Source {  // of one input of the runner: a tensor among the arguments, or one that the module owns
  size_t position;
  PyObject* owned;  // nullptr: an argument
};

struct Binding {
  std::string signature;
  Switches switches;
  THPObjectPtr owner, guard, runner, finish;  // finish: nullptr where the module returns one tensor
  THPObjectPtr conditions, module;            // what else is asked at each call, and of which module; nullptr: nothing
  std::vector<Source> sources;
  std::vector<PyObject*> own_arguments;  // for each argument tensor: itself where it is a tensor of the module, else nullptr
  std::vector<THPObjectPtr> kept;  // what `sources` points to
  Py_ssize_t served = 0;
};

using Bindings = std::vector<std::shared_ptr<Binding>>;

struct FastPath {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *switch_table, *forward_table, *compile_table;  // dictionaries of modules whose globals are switches
  bool cuda;
  Bindings* bindings;
  Py_ssize_t served;
};

PyObject *depth_name, *level_name, *compiling_name;

// Whether something records or transforms what happens inside a call: torch_cudal1.runtime.guard.find_tracing, and the kill switch.
bool is_watched(const FastPath* self) {
  if (at::impl::PythonTorchFunctionTLS::stack_len() != 0 || c10::impl::TorchDispatchModeTLS::stack_len() != 0) return true;
  if (at::tracer::impl::is_dispatch_enabled()) return true;  // torch.jit.trace
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return true;
  PyObject* depth = PyDict_GetItem(self->switch_table, depth_name);
  PyObject* level = PyDict_GetItem(self->forward_table, level_name);
  if (depth == nullptr || level == nullptr || !PyLong_CheckExact(depth) || !PyLong_CheckExact(level)) return true;
  return PyLong_AsLong(depth) != 0 || PyLong_AsLong(level) >= 0 || PyDict_GetItem(self->compile_table, compiling_name) != Py_False;
}

PyObject* results_of_plan(Binding& binding, const Plan& plan, const std::vector<PyObject*>& tensors) {
  Values values;
  values.reserve(plan.value_count);
  for (const Source& source : binding.sources)
    values.emplace_back(THPVariable_Unpack(source.owned != nullptr ? source.owned : tensors[source.position]));
  Values results = run_plan(binding.runner.get(), std::move(values));
  return binding.finish.get() == nullptr ? to_python(std::move(results[0])) : as_list(std::move(results));
}

PyObject* first_or_all(const Binding& binding, PyObject* results) {
  if (results == nullptr || binding.finish.get() != nullptr) return results;
  THPObjectPtr all(results);
  return PySequence_GetItem(all, 0);
}

PyObject* results_of_replay(Binding& binding, const std::vector<PyObject*>& tensors) {
  std::vector<PyObject*> inputs;
  inputs.reserve(binding.sources.size());
  for (const Source& source : binding.sources) inputs.push_back(source.owned != nullptr ? source.owned : tensors[source.position]);
  return first_or_all(binding, call_replay(binding.runner.get(), inputs));
}

PyObject* results_of_callable(Binding& binding, const std::vector<PyObject*>& tensors) {
  THPObjectPtr inputs(PyList_New(static_cast<Py_ssize_t>(binding.sources.size())));
  if (!inputs) throw python_error();
  for (size_t i = 0; i < binding.sources.size(); ++i) {
    const Source& source = binding.sources[i];
    PyList_SET_ITEM(inputs.get(), static_cast<Py_ssize_t>(i),
                    Py_NewRef(source.owned != nullptr ? source.owned : tensors[source.position]));
  }
  return first_or_all(binding, PyObject_CallOneArg(binding.runner.get(), inputs));
}

// What the runner yields, or nullptr with an exception set.
PyObject* run(Binding& binding, const std::vector<PyObject*>& tensors) {
  HANDLE_TH_ERRORS
  // As around every graph of AOTAutograd's: casts are written out in it, and it is below autograd.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const c10::AutoGradMode no_grad(false);
  if (const Plan* plan = plan_of(binding.runner.get())) return results_of_plan(binding, *plan, tensors);
  return is_replay(binding.runner.get()) ? results_of_replay(binding, tensors) : results_of_callable(binding, tensors);
  END_HANDLE_TH_ERRORS
}

bool stays_with_the_caller() {  // an exception that is no failure of the runner's: an interrupt, an exit
  return !PyErr_ExceptionMatches(PyExc_Exception);
}

PyObject* missed() { return Py_NewRef(miss); }

PyObject *module_name, *args_name, *kwargs_name;

// Whether Dynamo's guards of this binding hold for the call.
bool conditions_hold(Binding& binding, PyObject* args, PyObject* kwargs) {
  if (binding.conditions.get() == nullptr) return true;
  THPObjectPtr locals(PyDict_New());
  if (!locals || PyDict_SetItem(locals, module_name, binding.module.get()) < 0 || PyDict_SetItem(locals, args_name, args) < 0 ||
      PyDict_SetItem(locals, kwargs_name, kwargs) < 0)
    throw python_error();
  THPObjectPtr held(PyObject_CallOneArg(binding.conditions.get(), locals));
  if (!held) throw python_error();
  return held.get() == Py_True;
}

// For each tensor among the arguments: itself, if the module has it too.
std::vector<PyObject*> list_own_arguments(PyObject* guard, const std::vector<PyObject*>& tensors) {
  std::vector<PyObject*> own;
  own.reserve(tensors.size());
  for (PyObject* tensor : tensors) own.push_back(guard_has_tensor(guard, tensor) ? tensor : nullptr);
  return own;
}

// As when it was bound: the forward may compare them by identity. The guard keeps alive what it compares.
bool has_same_own_arguments(Binding& binding, const std::vector<PyObject*>& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* own = binding.own_arguments[i];
    if (own != nullptr ? tensors[i] != own : guard_has_tensor(binding.guard.get(), tensors[i])) return false;
  }
  return true;
}

void forget(FastPath* self, const std::shared_ptr<Binding>& binding) {
  const auto found = std::find(self->bindings->begin(), self->bindings->end(), binding);
  if (found != self->bindings->end()) self->bindings->erase(found);
}

PyObject* fast_call(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  auto* self = reinterpret_cast<FastPath*>(object);
  if (PyVectorcall_NARGS(flags) != 2 || names != nullptr || !PyTuple_CheckExact(given[0]) || !PyDict_CheckExact(given[1])) {
    PyErr_SetString(PyExc_TypeError, "fast(args: tuple, kwargs: dict) expected");
    return nullptr;
  }
  if (self->bindings->empty() || is_watched(self)) return missed();
  Writer call;
  if (!call.write_call(given[0], given[1])) return missed();
  const auto is_wanted = [&](const auto& one) { return one->signature == call.bytes(); };
  if (std::none_of(self->bindings->begin(), self->bindings->end(), is_wanted)) return missed();
  const Switches now = Switches::now(self->cuda);
  std::shared_ptr<Binding> binding;  // kept: a check or a runner may run Python code, which may clear the table
  for (size_t i = 0; i < self->bindings->size() && !binding; ++i) {
    const std::shared_ptr<Binding> one = (*self->bindings)[i];
    if (one->switches == now && is_wanted(one) && has_same_own_arguments(*one, call.tensors()) && guard_holds_now(one->guard.get()) &&
        conditions_hold(*one, given[0], given[1]))
      binding = one;
  }
  if (!binding) return missed();
  THPObjectPtr results(run(*binding, call.tensors()));
  if (!results) {
    if (stays_with_the_caller()) return nullptr;
    PyErr_Clear();
    forget(self, binding);
    return missed();
  }
  ++self->served;
  ++binding->served;
  return binding->finish.get() == nullptr ? results.release() : PyObject_CallOneArg(binding->finish.get(), results);
  END_HANDLE_TH_ERRORS
}

bool add_source(Binding& binding, PyObject* source, size_t tensors) {
  if (THPVariable_Check(source)) {
    binding.kept.emplace_back(Py_NewRef(source));
    binding.sources.push_back({0, source});
    return true;
  }
  const size_t position = PyLong_AsSize_t(source);
  if (PyErr_Occurred()) return false;
  if (position >= tensors) {
    PyErr_Format(PyExc_ValueError, "argument tensor %zu of %zu", position, tensors);
    return false;
  }
  binding.sources.push_back({position, nullptr});
  return true;
}

// add(owner, args, kwargs, guard, sources, runner, finish, conditions): bind these arguments, in the present state of the switches.
PyObject* fast_add(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto* self = reinterpret_cast<FastPath*>(object);
  if (count != 8 || !PyTuple_CheckExact(given[1]) || !PyDict_CheckExact(given[2]) || !is_guard(given[3]) ||
      !PyTuple_CheckExact(given[4]) || !PyCallable_Check(given[5]) || !(given[6] == Py_None || PyCallable_Check(given[6])) ||
      !(given[7] == Py_None || (PyTuple_CheckExact(given[7]) && PyTuple_GET_SIZE(given[7]) == 2))) {
    PyErr_SetString(PyExc_TypeError,
                    "add(owner, args: tuple, kwargs: dict, guard, sources: tuple, runner, finish, conditions) expected");
    return nullptr;
  }
  if (is_watched(self)) Py_RETURN_FALSE;  // a default device is a mode and a switch: what holds under it holds there only
  for (const auto& known : *self->bindings)
    if (known->owner.get() == given[0]) Py_RETURN_FALSE;
  Writer call;
  if (!call.write_call(given[1], given[2])) Py_RETURN_FALSE;
  auto made = std::make_shared<Binding>();
  made->signature = call.bytes();
  made->switches = Switches::now(self->cuda);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[4]); ++i)
    if (!add_source(*made, PyTuple_GET_ITEM(given[4], i), call.tensors().size())) return nullptr;
  const Plan* plan = plan_of(given[5]);
  if (plan != nullptr && (plan->input_count != made->sources.size() || (given[6] == Py_None && plan->outputs.empty()))) {
    PyErr_SetString(PyExc_ValueError, "the plan has another number of inputs than there are sources, or nothing to return");
    return nullptr;
  }
  made->owner = Py_NewRef(given[0]);
  made->guard = Py_NewRef(given[3]);
  made->own_arguments = list_own_arguments(given[3], call.tensors());
  made->runner = Py_NewRef(given[5]);
  if (given[6] != Py_None) made->finish = Py_NewRef(given[6]);
  if (given[7] != Py_None) {
    made->conditions = Py_NewRef(PyTuple_GET_ITEM(given[7], 0));
    made->module = Py_NewRef(PyTuple_GET_ITEM(given[7], 1));
  }
  self->bindings->push_back(std::move(made));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* fast_clear(PyObject* self, PyObject*) {
  Bindings gone;
  gone.swap(*reinterpret_cast<FastPath*>(self)->bindings);  // what dies may run Python code
  Py_RETURN_NONE;
}

// counts(): [(owner, calls served)] of what is bound now.
PyObject* fast_counts(PyObject* object, PyObject*) {
  const auto* self = reinterpret_cast<FastPath*>(object);
  THPObjectPtr found(PyList_New(0));
  if (!found) return nullptr;
  const Bindings bindings = *self->bindings;  // making Python objects may run the collector, which may clear the table
  for (const auto& one : bindings) {
    THPObjectPtr pair(Py_BuildValue("(On)", one->owner.get(), one->served));
    if (!pair || PyList_Append(found.get(), pair.get()) < 0) return nullptr;
  }
  return found.release();
}

// FastPath(cuda, switch.__dict__, forward_ad.__dict__, torch.compiler.__dict__)
PyObject* fast_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  int cuda = 0;
  PyObject* tables[3];
  if ((kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0) ||
      !PyArg_ParseTuple(args, "pO!O!O!", &cuda, &PyDict_Type, &tables[0], &PyDict_Type, &tables[1], &PyDict_Type, &tables[2]))
    return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* fast = reinterpret_cast<FastPath*>(self);
  fast->call = fast_call;
  fast->cuda = cuda != 0;
  fast->switch_table = Py_NewRef(tables[0]);
  fast->forward_table = Py_NewRef(tables[1]);
  fast->compile_table = Py_NewRef(tables[2]);
  fast->bindings = new Bindings();
  return self;
}

int fast_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  const auto* self = reinterpret_cast<FastPath*>(object);
  Py_VISIT(self->switch_table);
  Py_VISIT(self->forward_table);
  Py_VISIT(self->compile_table);
  if (self->bindings == nullptr) return 0;
  for (const auto& one : *self->bindings) {
    if (one.use_count() > 1) continue;  // in use by a call: not garbage
    Py_VISIT(one->owner.get());
    Py_VISIT(one->guard.get());
    Py_VISIT(one->runner.get());
    Py_VISIT(one->finish.get());
    Py_VISIT(one->conditions.get());
    Py_VISIT(one->module.get());
    for (THPObjectPtr& kept : one->kept) Py_VISIT(kept.get());
  }
  return 0;
}

int fast_tp_clear(PyObject* object) {
  auto* self = reinterpret_cast<FastPath*>(object);
  if (self->bindings != nullptr) {
    Bindings gone;
    gone.swap(*self->bindings);
  }
  Py_CLEAR(self->switch_table);
  Py_CLEAR(self->forward_table);
  Py_CLEAR(self->compile_table);
  return 0;
}

void fast_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  fast_tp_clear(object);
  delete reinterpret_cast<FastPath*>(object)->bindings;
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef fast_methods[] = {
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fast_add)), METH_FASTCALL,
     "add(owner, args, kwargs, guard, sources, runner, finish, conditions) -> bool: serve such calls from now on; False if it does already."},
    {"clear", fast_clear, METH_NOARGS, "Forget every binding."},
    {"counts", fast_counts, METH_NOARGS, "counts() -> [(owner, calls served)] of the bindings."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef fast_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPath, call), READONLY, nullptr},
    {"served", T_PYSSIZET, offsetof(FastPath, served), READONLY, "How many calls were served."},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot fast_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(fast_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(fast_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(fast_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(fast_tp_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, fast_methods},
    {Py_tp_members, fast_members},
    {0, nullptr},
};
PyType_Spec fast_spec = {
    "torch_cudal1._native.FastPath", sizeof(FastPath), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_VECTORCALL, fast_slots};

}  // namespace

bool add_fast_path(PyObject* module) {
  depth_name = PyUnicode_InternFromString("_depth");
  level_name = PyUnicode_InternFromString("_current_level");
  compiling_name = PyUnicode_InternFromString("_is_compiling_flag");
  module_name = PyUnicode_InternFromString("module");
  args_name = PyUnicode_InternFromString("args");
  kwargs_name = PyUnicode_InternFromString("kwargs");
  for (PyObject* name : {depth_name, level_name, compiling_name, module_name, args_name, kwargs_name})
    if (name == nullptr) return false;
  miss = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  if (miss == nullptr || PyModule_AddObjectRef(module, "MISS", miss) < 0) return false;
  THPObjectPtr type(PyType_FromSpec(&fast_spec));
  return type && PyModule_AddObjectRef(module, "FastPath", type) == 0;
}

}  // namespace cudal1
