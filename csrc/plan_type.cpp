// `Plan(inputs, values, constants, outputs, device, driver, steps, Value, explain)`, and `plan(inputs) -> list[Tensor | None]`.
//
// The GIL is released once around all steps: a call may wait (for the allocator, for a full launch queue, for a long operator), and
// other threads then run. `explain(kind, symbol, value, detail)` raises the exception that belongs to a launch that failed.

#include "plan_type.h"

#include <structmember.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include "gil.h"
#include "plan_build.h"

namespace cudal1 {

namespace {

struct PlanObject {
  PyObject_HEAD
  vectorcallfunc call;
  Plan* plan;
  PyObject* explain;
};

PyTypeObject* plan_type = nullptr;

[[noreturn]] void explain(PyObject* explainer, const LaunchFailure& failure) {
  const char* symbol = failure.symbol == nullptr ? "" : failure.symbol->c_str();
  THPObjectPtr ignored(PyObject_CallFunction(explainer, "isLL", static_cast<int>(failure.kind), symbol,
                                             static_cast<long long>(failure.value), static_cast<long long>(failure.detail)));
  if (ignored) PyErr_SetString(PyExc_RuntimeError, "the launch failed, and its explanation raised nothing");
  throw python_error();
}

bool take(PyObject* item, size_t position, Values& values) {
  if (!THPVariable_Check(item)) {
    PyErr_Format(PyExc_TypeError, "input %zu is a %s, expected a tensor", position, Py_TYPE(item)->tp_name);
    return false;
  }
  values.emplace_back(THPVariable_Unpack(item));
  return true;
}

PyObject* plan_call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  if (PyVectorcall_NARGS(flags) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "plan(inputs): one sequence of tensors expected");
    return nullptr;
  }
  const Plan& plan = *reinterpret_cast<PlanObject*>(self)->plan;
  THPObjectPtr inputs(PySequence_Fast(args[0], "plan(inputs): one sequence of tensors expected"));
  if (!inputs) return nullptr;
  const size_t count = PySequence_Fast_GET_SIZE(inputs.get());
  if (count != plan.input_count) {
    PyErr_Format(PyExc_ValueError, "%zu inputs, the Program has %zu", count, plan.input_count);
    return nullptr;
  }
  Values values;
  values.reserve(plan.value_count);
  for (size_t i = 0; i < count; ++i)
    if (!take(PySequence_Fast_GET_ITEM(inputs.get(), i), i, values)) return nullptr;
  return as_list(run_plan(self, std::move(values)));
  END_HANDLE_TH_ERRORS
}

PyObject* plan_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  if (PyTuple_GET_SIZE(args) != 9 || (kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0)) {
    PyErr_SetString(PyExc_TypeError, "expected the nine arguments that torch_cudal1.runtime.compiled makes");
    return nullptr;
  }
  THPObjectPtr self(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  auto* made = reinterpret_cast<PlanObject*>(self.get());
  made->call = plan_call;
  made->plan = new Plan();
  made->explain = Py_NewRef(PyTuple_GET_ITEM(args, 8));
  try {
    build_plan(*made->plan, args);
  } catch (const Unsupported& reason) {
    PyErr_SetString(PyExc_NotImplementedError, reason.what());
    return nullptr;
  } catch (const py::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
    return nullptr;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const py::builtin_exception& error) {
    error.set_error();
    return nullptr;
  }
  return self.release();
  END_HANDLE_TH_ERRORS
}

void plan_dealloc(PyObject* self) {
  auto* object = reinterpret_cast<PlanObject*>(self);
  delete object->plan;
  Py_XDECREF(object->explain);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* plan_steps(PyObject* self, void*) { return PyLong_FromSize_t(reinterpret_cast<PlanObject*>(self)->plan->steps.size()); }

PyMemberDef plan_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PlanObject, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef plan_getset[] = {
    {"steps", plan_steps, nullptr, "How many steps a call runs, those of nested Programs included.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot plan_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(plan_dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_members, plan_members},
    {Py_tp_getset, plan_getset},
    {0, nullptr},
};
PyType_Spec plan_spec = {"torch_cudal1._native.Plan", sizeof(PlanObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_VECTORCALL, plan_slots};

}  // namespace

bool add_plan_type(PyObject* module) {
  PyObject* type = PyType_FromSpec(&plan_spec);
  if (type == nullptr) return false;
  plan_type = reinterpret_cast<PyTypeObject*>(type);  // lives as long as the process
  return PyModule_AddObjectRef(module, "Plan", type) == 0;
}

const Plan* plan_of(PyObject* object) {
  return Py_TYPE(object) == plan_type ? reinterpret_cast<PlanObject*>(object)->plan : nullptr;
}

void explain_launch(PyObject* plan, const LaunchFailure& failure) { explain(reinterpret_cast<PlanObject*>(plan)->explain, failure); }

Values run_plan(PyObject* object, Values&& inputs) {
  const auto* self = reinterpret_cast<PlanObject*>(object);
  try {
    const WithoutGil released;
    return self->plan->run(std::move(inputs));
  } catch (const LaunchFailure& failure) {
    explain(self->explain, failure);
  } catch (const WrongValue& wrong) {
    PyErr_SetString(PyExc_ValueError, wrong.what());
    throw python_error();
  }
}

PyObject* as_list(Values&& values) {
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(values.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < values.size(); ++i) {
    PyObject* item = to_python(std::move(values[i]));
    if (item == nullptr) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), item);
  }
  return list.release();
}

}  // namespace cudal1
