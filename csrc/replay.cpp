#include "replay.h"

#include <structmember.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <memory>
#include <string>

#include "fresh.h"
#include "gil.h"
#include "graph.h"
#include "plan_type.h"

namespace cudal1 {

namespace {

struct Replay {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *slow, *fail, *last;  // a Plan that runs after the graph, or null
  struct Parts {
    GraphDriver driver;
    c10::Device device = c10::Device(c10::kCPU);
    size_t input_count = 0, kept = 0;
    std::vector<size_t> still, moving;  // positions of inputs
    std::vector<std::shared_ptr<Graph>> graphs;
    Turns turns;
  }* parts;
};

PyTypeObject* replay_type = nullptr;

std::shared_ptr<Graph> find(const Replay::Parts& parts, const std::vector<PyObject*>& inputs) {
  const auto serves = [&](const std::shared_ptr<Graph>& graph) {
    for (size_t i = 0; i < parts.still.size(); ++i) {
      const at::Tensor& tensor = THPVariable_Unpack(inputs[parts.still[i]]);
      if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) != graph->addresses[i]) return false;
    }
    return true;
  };
  const auto found = std::find_if(parts.graphs.rbegin(), parts.graphs.rend(), serves);
  return found == parts.graphs.rend() ? nullptr : *found;
}

PyObject* slowly(Replay* self, const std::vector<PyObject*>& inputs, bool capturing) {
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(inputs.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < inputs.size(); ++i) PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), Py_NewRef(inputs[i]));
  return PyObject_CallFunctionObjArgs(self->slow, list.get(), capturing ? Py_True : Py_False, nullptr);
}

// `own`: these are the graph's own outputs, of which one may be an input.
PyObject* as_results(const Graph& graph, bool own, const std::vector<at::Tensor>& fresh, const std::vector<PyObject*>& inputs) {
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(fresh.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < fresh.size(); ++i) {
    const int64_t input = own ? graph.outputs[i].input : -1;
    PyObject* item = input >= 0 ? Py_NewRef(inputs[input]) : THPVariable_Wrap(fresh[i]);  // None for an undefined tensor
    if (item == nullptr) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), item);
  }
  return list.release();
}

PyObject* call(Replay* self, const std::vector<PyObject*>& inputs) {
  Replay::Parts& parts = *self->parts;
  const std::shared_ptr<Graph> graph = find(parts, inputs);
  if (graph == nullptr) return slowly(self, inputs, false);
  const Plan* const last = self->last == nullptr ? nullptr : plan_of(self->last);
  std::vector<at::Tensor> moving, given, fresh;
  for (const size_t position : parts.moving) moving.push_back(THPVariable_Unpack(inputs[position]));
  if (last != nullptr)
    for (PyObject* input : inputs) given.push_back(THPVariable_Unpack(input));
  int capturing = 0;
  {
    const WithoutGil released;
    const OnDevice on(parts.device);
    const InContext context(parts.driver);
    void* stream = stream_of(parts.driver, parts.device);
    must("cuStreamIsCapturing", parts.driver.capture_status(stream, &capturing));
    if (capturing == 0 && last == nullptr) fresh = enqueue(parts.driver, parts.turns, *graph, moving, stream);
    if (capturing == 0 && last != nullptr) fresh = enqueue(parts.driver, parts.turns, *graph, moving, stream, *last, given);
  }
  return capturing != 0 ? slowly(self, inputs, true) : as_results(*graph, last == nullptr, fresh, inputs);
}

[[noreturn]] void tell(Replay* self, const char* name, int result) {
  THPObjectPtr ignored(PyObject_CallFunction(self->fail, "si", name, result));
  if (ignored) PyErr_SetString(PyExc_RuntimeError, "the driver failed, and its explanation raised nothing");
  throw python_error();
}

PyObject* checked_call(Replay* self, const std::vector<PyObject*>& inputs) {
  HANDLE_TH_ERRORS
  try {
    return call(self, inputs);
  } catch (const Failed& failed) {
    tell(self, failed.call, failed.result);
  } catch (const LaunchFailure& failure) {
    if (failure.symbol != nullptr && self->last != nullptr) explain_launch(self->last, failure);
    tell(self, failure.kind == LaunchFailure::no_stream ? "the current stream" : "cuCtxGetCurrent", static_cast<int>(failure.detail));
  } catch (const WrongValue& wrong) {
    PyErr_SetString(PyExc_ValueError, wrong.what());
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

PyObject* replay_call(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  auto* self = reinterpret_cast<Replay*>(object);
  if (PyVectorcall_NARGS(flags) != 1 || names != nullptr) {
    PyErr_SetString(PyExc_TypeError, "replay(inputs): one sequence of tensors expected");
    return nullptr;
  }
  THPObjectPtr given(PySequence_Fast(args[0], "replay(inputs): one sequence of tensors expected"));
  if (!given) return nullptr;
  PyObject** items = PySequence_Fast_ITEMS(given.get());
  const std::vector<PyObject*> inputs(items, items + PySequence_Fast_GET_SIZE(given.get()));
  if (inputs.size() != self->parts->input_count ||
      !std::all_of(inputs.begin(), inputs.end(), [](PyObject* item) { return THPVariable_Check(item); })) {
    PyErr_Format(PyExc_TypeError, "replay(inputs): %zu tensors expected", self->parts->input_count);
    return nullptr;
  }
  return checked_call(self, inputs);
  END_HANDLE_TH_ERRORS
}

bool add_output(Graph& graph, PyObject* given, size_t inputs) {
  if (given == Py_None) return graph.outputs.push_back({at::Tensor(), -1}), true;
  if (THPVariable_Check(given)) return graph.outputs.push_back({THPVariable_Unpack(given), -1}), true;
  const size_t number = PyLong_AsSize_t(given);
  if (PyErr_Occurred()) return false;
  if (number >= inputs) return PyErr_Format(PyExc_ValueError, "output is input %zu of %zu", number, inputs), false;
  graph.outputs.push_back({at::Tensor(), static_cast<int64_t>(number)});
  return true;
}

bool all_tensors(PyObject* tuple) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i)
    if (!THPVariable_Check(PyTuple_GET_ITEM(tuple, i))) return false;
  return true;
}

// add(inputs, captured, moving, outputs, owner): a graph (a CUgraph) captured with these inputs.
PyObject* replay_add(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  auto& parts = *reinterpret_cast<Replay*>(object)->parts;
  PyObject *inputs, *moving, *outputs, *owner;
  unsigned long long captured = 0;
  if (!PyArg_ParseTuple(args, "O!KO!O!O", &PyTuple_Type, &inputs, &captured, &PyTuple_Type, &moving, &PyTuple_Type, &outputs, &owner))
    return nullptr;
  if (static_cast<size_t>(PyTuple_GET_SIZE(inputs)) != parts.input_count || !all_tensors(inputs) || !all_tensors(moving) ||
      static_cast<size_t>(PyTuple_GET_SIZE(moving)) != parts.moving.size() || captured == 0) {
    PyErr_SetString(PyExc_ValueError, "add: the tensors do not fit the inputs of this Replay, or there is no graph");
    return nullptr;
  }
  auto graph = std::make_shared<Graph>();
  for (const size_t position : parts.still) {
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(inputs, position));
    graph->addresses.push_back(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
  }
  graph->captured = reinterpret_cast<void*>(captured);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(moving); ++i) graph->moving.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(moving, i)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i)
    if (!add_output(*graph, PyTuple_GET_ITEM(outputs, i), parts.input_count)) return nullptr;
  graph->know_passages(reinterpret_cast<Replay*>(object)->last == nullptr);
  graph->owner = Py_NewRef(owner);
  parts.graphs.push_back(std::move(graph));
  if (parts.graphs.size() > parts.kept) {
    const std::shared_ptr<Graph> oldest = parts.graphs.front();
    parts.graphs.erase(parts.graphs.begin());
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The tuple of torch_cudal1.device.cuda.addresses.find_replay_addresses, in its order.
bool read_driver(GraphDriver& driver, PyObject* addresses) {
  CaptureApi& captures = driver.captures;
  std::vector<void**> places{&driver.context};
  const auto take = [&](auto&... functions) { (places.push_back(reinterpret_cast<void**>(&functions)), ...); };
  take(driver.get_current, driver.push, driver.pop, driver.current_stream, driver.copy, driver.replay, driver.capture_status);
  take(driver.make_event, driver.record_event, driver.wait_event, captures.clone, captures.nodes, captures.edges, captures.type);
  take(captures.fill_of, captures.copy_of, captures.add_kernel, captures.depend, captures.destroy_node, captures.instantiate);
  take(captures.set_kernel, captures.destroy_executable, captures.destroy_graph);
  const size_t needed = places.size();
  take(captures.edges_with_data);
  for (void*& mover : captures.copy) places.push_back(&mover);
  for (void*& mover : captures.fill) places.push_back(&mover);
  if (static_cast<size_t>(PyTuple_GET_SIZE(addresses)) != places.size())
    return PyErr_Format(PyExc_ValueError, "%zu driver addresses expected", places.size()), false;
  for (size_t i = 0; i < places.size(); ++i) {
    *places[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i));
    if (*places[i] != nullptr || (i >= needed && !PyErr_Occurred())) continue;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a driver address is null");
    return false;
  }
  return true;
}

// Replay(slow, fail, inputs, static, device, addresses, kept, last)
PyObject* replay_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *slow, *fail, *still, *device, *addresses, *last;
  Py_ssize_t inputs = 0, kept = 0;
  if (!PyArg_ParseTuple(args, "OOnO!O!O!nO", &slow, &fail, &inputs, &PyTuple_Type, &still, &THPDeviceType, &device, &PyTuple_Type,
                        &addresses, &kept, &last))
    return nullptr;
  if (last != Py_None && plan_of(last) == nullptr) return PyErr_SetString(PyExc_TypeError, "last: a Plan or None expected"), nullptr;
  auto parts = std::make_unique<Replay::Parts>();
  if (!read_driver(parts->driver, addresses)) return nullptr;
  parts->device = reinterpret_cast<THPDevice*>(device)->device;
  parts->input_count = inputs, parts->kept = kept;
  std::vector<bool> is_static(inputs, false);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(still); ++i) {
    const size_t position = PyLong_AsSize_t(PyTuple_GET_ITEM(still, i));
    if (PyErr_Occurred()) return nullptr;
    if (position >= is_static.size()) return PyErr_SetString(PyExc_ValueError, "a static input beyond the inputs"), nullptr;
    is_static[position] = true;
  }
  for (size_t i = 0; i < is_static.size(); ++i) (is_static[i] ? parts->still : parts->moving).push_back(i);
  THPObjectPtr self(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  auto* made = reinterpret_cast<Replay*>(self.get());
  made->call = replay_call;
  made->slow = Py_NewRef(slow);
  made->fail = Py_NewRef(fail);
  made->last = last == Py_None ? nullptr : Py_NewRef(last);
  made->parts = parts.release();
  return self.release();
  END_HANDLE_TH_ERRORS
}

int replay_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(reinterpret_cast<Replay*>(object)->slow);
  Py_VISIT(reinterpret_cast<Replay*>(object)->fail);
  Py_VISIT(reinterpret_cast<Replay*>(object)->last);
  return 0;
}

int replay_clear(PyObject* object) {
  Py_CLEAR(reinterpret_cast<Replay*>(object)->slow);
  Py_CLEAR(reinterpret_cast<Replay*>(object)->fail);
  Py_CLEAR(reinterpret_cast<Replay*>(object)->last);
  return 0;
}

void replay_dealloc(PyObject* object) {  // the event is left to the context: destroying it may fail when the process ends
  PyObject_GC_UnTrack(object);
  replay_clear(object);
  delete reinterpret_cast<Replay*>(object)->parts;
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef replay_methods[] = {
    {"add", replay_add, METH_VARARGS, "add(inputs, captured, moving, outputs, owner): a graph captured with these inputs."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef replay_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Replay, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot replay_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(replay_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(replay_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(replay_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(replay_clear)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, replay_methods},
    {Py_tp_members, replay_members},
    {0, nullptr},
};
PyType_Spec replay_spec = {
    "torch_cudal1._native.Replay", sizeof(Replay), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_VECTORCALL, replay_slots};

}  // namespace

bool add_replay_type(PyObject* module) {
  PyObject* type = PyType_FromSpec(&replay_spec);
  if (type == nullptr) return false;
  replay_type = reinterpret_cast<PyTypeObject*>(type);  // lives as long as the process
  return PyModule_AddObjectRef(module, "Replay", type) == 0;
}

bool is_replay(PyObject* object) { return Py_TYPE(object) == replay_type; }

PyObject* call_replay(PyObject* object, const std::vector<PyObject*>& inputs) {
  return checked_call(reinterpret_cast<Replay*>(object), inputs);
}

}  // namespace cudal1
