#include "replay.h"

#include <ATen/EmptyTensor.h>
#include <structmember.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "fresh.h"
#include "gil.h"
#include "launch.h"

namespace cudal1 {

namespace {

struct GraphDriver : Driver {  // addresses in libcuda
  int (*copy)(uint64_t, uint64_t, size_t, void*) = nullptr;
  int (*replay)(void*, void*) = nullptr;
  int (*capture_status)(void*, int*) = nullptr;
  int (*make_event)(void**, unsigned) = nullptr;
  int (*record_event)(void*, void*) = nullptr;
  int (*wait_event)(void*, void*, unsigned) = nullptr;
};
constexpr unsigned without_timing = 2;  // CU_EVENT_DISABLE_TIMING

struct Failed : std::exception {  // a driver function and its result; becomes a DriverError
  Failed(const char* call, int result) : call(call), result(result) {}
  const char* what() const noexcept override { return call; }
  const char* call;
  int result;
};

void must(const char* call, int result) {
  if (result != 0) throw Failed(call, result);
}

struct Output {
  at::Tensor tensor;  // undefined: None, or
  int64_t input;      // the number of the input that the function returns itself; -1: none
};

struct Graph {
  std::vector<uintptr_t> addresses;  // of the static inputs
  void* executable;
  std::vector<at::Tensor> moving;  // our copies of the inputs that are not static
  std::vector<Output> outputs;
  THPObjectPtr owner;  // keeps the executable and its memory
};

struct Replay {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *slow, *fail;
  struct Parts {
    GraphDriver driver;
    c10::Device device = c10::Device(c10::kCPU);
    size_t input_count = 0, kept = 0;
    std::vector<size_t> still, moving;  // positions of inputs
    std::vector<std::shared_ptr<Graph>> graphs;
    std::mutex turn;
    std::optional<void*> last_stream;
    void* event = nullptr;
  }* parts;
};

PyTypeObject* replay_type = nullptr;

// Bytes from the first element to the last, gaps included. Copying them copies a tensor of any strides to one of the same strides.
size_t extent(const at::Tensor& t) { return at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()); }

std::string shape_text(const at::Tensor& t) {
  std::string text = "[";
  for (const int64_t size : t.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

void copy(const GraphDriver& driver, const at::Tensor& to, const at::Tensor& from, void* stream) {
  if (to.sizes() != from.sizes())
    throw WrongValue("an input of shape " + shape_text(from) + ", the graph was captured for " + shape_text(to));
  const size_t bytes = extent(to);
  const bool alike = to.dtype() == from.dtype() && to.strides() == from.strides() && to.device() == from.device();
  if (!alike || bytes > 2 * to.nbytes()) {  // mostly gaps: element by element
    to.copy_(from);
  } else if (bytes != 0) {
    must("cuMemcpyDtoDAsync", driver.copy(reinterpret_cast<uint64_t>(to.data_ptr()),
                                          reinterpret_cast<uint64_t>(from.const_data_ptr()), bytes, stream));
  }
}

void take_turn(Replay::Parts& parts, void* stream) {  // with `turn` held
  if (parts.last_stream && *parts.last_stream != stream) {
    if (parts.event == nullptr) must("cuEventCreate", parts.driver.make_event(&parts.event, without_timing));
    must("cuEventRecord", parts.driver.record_event(parts.event, *parts.last_stream));
    must("cuStreamWaitEvent", parts.driver.wait_event(stream, parts.event, 0));
  }
  parts.last_stream = stream;
}

// The outputs that are fresh memory, in order; an undefined tensor for one that is an input or None. Needs no GIL.
std::vector<at::Tensor> enqueue(Replay::Parts& parts, const Graph& graph, const std::vector<at::Tensor>& moving, void* stream) {
  const std::lock_guard<std::mutex> turn(parts.turn);
  take_turn(parts, stream);
  for (size_t i = 0; i < moving.size(); ++i) copy(parts.driver, graph.moving[i], moving[i], stream);
  must("cuGraphLaunch", parts.driver.replay(graph.executable, stream));
  std::vector<at::Tensor> results;
  results.reserve(graph.outputs.size());
  for (const Output& output : graph.outputs) {
    results.emplace_back();
    if (!output.tensor.defined()) continue;
    const at::Tensor& held = output.tensor;
    results.back() = fresh(held.sizes(), held.strides(), held.scalar_type(), held.device());
    copy(parts.driver, results.back(), held, stream);
  }
  return results;
}

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

PyObject* as_results(const Graph& graph, const std::vector<at::Tensor>& fresh, const std::vector<PyObject*>& inputs) {
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(fresh.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < fresh.size(); ++i) {
    const int64_t input = graph.outputs[i].input;
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
  std::vector<at::Tensor> moving, fresh;
  for (const size_t position : parts.moving) moving.push_back(THPVariable_Unpack(inputs[position]));
  int capturing = 0;
  {
    const WithoutGil released;
    const OnDevice on(parts.device);
    const InContext context(parts.driver);
    void* stream = stream_of(parts.driver, parts.device);
    must("cuStreamIsCapturing", parts.driver.capture_status(stream, &capturing));
    if (capturing == 0) fresh = enqueue(parts, *graph, moving, stream);
  }
  return capturing != 0 ? slowly(self, inputs, true) : as_results(*graph, fresh, inputs);
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

// add(inputs, executable, moving, outputs, owner): a graph captured with these inputs.
PyObject* replay_add(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  auto& parts = *reinterpret_cast<Replay*>(object)->parts;
  PyObject *inputs, *moving, *outputs, *owner;
  unsigned long long executable = 0;
  if (!PyArg_ParseTuple(args, "O!KO!O!O", &PyTuple_Type, &inputs, &executable, &PyTuple_Type, &moving, &PyTuple_Type, &outputs, &owner))
    return nullptr;
  if (static_cast<size_t>(PyTuple_GET_SIZE(inputs)) != parts.input_count || !all_tensors(inputs) || !all_tensors(moving) ||
      static_cast<size_t>(PyTuple_GET_SIZE(moving)) != parts.moving.size() || executable == 0) {
    PyErr_SetString(PyExc_ValueError, "add: the tensors do not fit the inputs of this Replay, or there is no graph");
    return nullptr;
  }
  auto graph = std::make_shared<Graph>();
  for (const size_t position : parts.still) {
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(inputs, position));
    graph->addresses.push_back(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
  }
  graph->executable = reinterpret_cast<void*>(executable);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(moving); ++i) graph->moving.push_back(THPVariable_Unpack(PyTuple_GET_ITEM(moving, i)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i)
    if (!add_output(*graph, PyTuple_GET_ITEM(outputs, i), parts.input_count)) return nullptr;
  graph->owner = Py_NewRef(owner);
  parts.graphs.push_back(std::move(graph));
  if (parts.graphs.size() > parts.kept) {
    const std::shared_ptr<Graph> oldest = parts.graphs.front();
    parts.graphs.erase(parts.graphs.begin());
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

template <typename F>
void set(F*& function, PyObject* addresses, Py_ssize_t position) {
  function = reinterpret_cast<F*>(PyLong_AsVoidPtr(PyTuple_GetItem(addresses, position)));
}

bool read_driver(GraphDriver& driver, PyObject* addresses) {
  if (PyTuple_GET_SIZE(addresses) != 11) return PyErr_SetString(PyExc_ValueError, "eleven driver addresses expected"), false;
  driver.context = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, 0));
  set(driver.get_current, addresses, 1), set(driver.push, addresses, 2), set(driver.pop, addresses, 3);
  set(driver.current_stream, addresses, 4), set(driver.copy, addresses, 5), set(driver.replay, addresses, 6);
  set(driver.capture_status, addresses, 7), set(driver.make_event, addresses, 8), set(driver.record_event, addresses, 9);
  set(driver.wait_event, addresses, 10);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(addresses); ++i)
    if (PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i)) == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a driver address is null");
      return false;
    }
  return true;
}

// Replay(slow, fail, inputs, static, device, addresses, kept)
PyObject* replay_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *slow, *fail, *still, *device, *addresses;
  Py_ssize_t inputs = 0, kept = 0;
  if (!PyArg_ParseTuple(args, "OOnO!O!O!n", &slow, &fail, &inputs, &PyTuple_Type, &still, &THPDeviceType, &device, &PyTuple_Type,
                        &addresses, &kept))
    return nullptr;
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
  made->parts = parts.release();
  return self.release();
  END_HANDLE_TH_ERRORS
}

int replay_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(reinterpret_cast<Replay*>(object)->slow);
  Py_VISIT(reinterpret_cast<Replay*>(object)->fail);
  return 0;
}

int replay_clear(PyObject* object) {
  Py_CLEAR(reinterpret_cast<Replay*>(object)->slow);
  Py_CLEAR(reinterpret_cast<Replay*>(object)->fail);
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
    {"add", replay_add, METH_VARARGS, "add(inputs, executable, moving, outputs, owner): a graph captured with these inputs."},
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
