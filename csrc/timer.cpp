// Timer(addresses, device_index, fail): times calls in the order of a schedule, with clocks that Python code cannot replace.
//
// timer.run(calls, schedule, flush, repeats) calls calls[i] for each i of the schedule and returns a tuple for each:
//   (i, wall_us, host_us, device_us)
// With repeats, calls[i] is called repeats[i] times in one sample, back to back, and the times are of them all; what each but the
// last returns dies at once, as in a loop that throws results away. host_us: until the (last) call returned; wall_us: until every stream of the context was joined; device_us: between two events around the
// call on PyTorch's current stream (None on the CPU, where wall_us is host_us). Before each call the whole device is joined, after
// `flush` = (address, bytes) was overwritten if given: that pushes everything else out of the L2 cache. Results of a call die after
// its clock has stopped. Work that a call leaves on other streams shows as wall_us without device_us.
//
// With addresses = None it is the same interface on the CPU with a monotonic clock.

#include "timer.h"

#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <ctime>
#include <exception>
#include <memory>
#include <vector>

#include "gil.h"

namespace cudal1 {

namespace {

struct Failed : std::exception {
  Failed(const char* call, int result) : call(call), result(result) {}
  const char* call;
  int result;
};

void must(const char* call, int result) {
  if (result != 0) throw Failed(call, result);
}

int64_t now_ns() {  // the clock that no one sets
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

struct Clock {  // addresses in libcuda and the context; all null on the CPU
  void* context = nullptr;
  int (*push)(void*) = nullptr;
  int (*pop)(void**) = nullptr;
  int32_t (*current_stream)(int32_t, void**) = nullptr;
  int (*join)() = nullptr;
  int (*fill)(uint64_t, unsigned char, size_t, void*) = nullptr;
  int (*make_event)(void**, unsigned) = nullptr;
  int (*record)(void*, void*) = nullptr;
  int (*elapsed)(float*, void*, void*) = nullptr;
  int (*destroy_event)(void*) = nullptr;
  void *begin = nullptr, *end = nullptr;  // events
};

struct Timer {
  PyObject_HEAD
  PyObject* fail;
  Clock* clock;
  int device;
};

struct Flush {
  uint64_t address;
  size_t bytes;
};

struct Sample {
  Py_ssize_t call;
  double wall_us, host_us, device_us;
};

class Inside {  // the timer's context, as a stack: calls may push and pop theirs
 public:
  explicit Inside(const Clock& clock) : clock_(clock) { must("cuCtxPushCurrent_v2", clock.push(clock.context)); }
  ~Inside() {
    void* popped = nullptr;
    clock_.pop(&popped);
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  const Clock& clock_;
};

void joined(const Clock& clock) {
  int result;
  {
    const WithoutGil released;
    result = clock.join();
  }
  must("cuCtxSynchronize", result);
}

// What to call, its number, and how often in one sample.
struct Timed {
  PyObject* call;
  Py_ssize_t index, repeats;
};

// The result of the last call; null after a Python exception.
THPObjectPtr called(const Timed& timed) {
  for (Py_ssize_t i = 1; i < timed.repeats; ++i) {
    const THPObjectPtr dies(PyObject_CallNoArgs(timed.call));
    if (!dies) return THPObjectPtr(nullptr);
  }
  return THPObjectPtr(PyObject_CallNoArgs(timed.call));
}

Sample on_cpu(const Timed& timed) {
  const int64_t begin = now_ns();
  const THPObjectPtr kept = called(timed);
  const double us = static_cast<double>(now_ns() - begin) / 1e3;
  if (!kept) throw python_error();
  return {timed.index, us, us, -1.0};
}

Sample on_device(const Timer* self, const Timed& timed, const Flush& flush) {
  const Clock& clock = *self->clock;
  const Inside inside(clock);
  void* stream = nullptr;
  must("the current stream", clock.current_stream(self->device, &stream));
  if (flush.bytes != 0) must("cuMemsetD8Async", clock.fill(flush.address, 0, flush.bytes, stream));
  joined(clock);
  const int64_t begin = now_ns();
  must("cuEventRecord", clock.record(clock.begin, stream));
  const THPObjectPtr kept = called(timed);
  const int64_t returned = now_ns();
  if (!kept) throw python_error();
  must("cuEventRecord", clock.record(clock.end, stream));
  joined(clock);
  const int64_t end = now_ns();
  float ms = 0.0F;
  must("cuEventElapsedTime", clock.elapsed(&ms, clock.begin, clock.end));
  const double host_us = static_cast<double>(returned - begin) / 1e3;
  return {timed.index, static_cast<double>(end - begin) / 1e3, host_us, 1e3 * static_cast<double>(ms)};
}

PyObject* as_tuple(const Sample& sample) {
  if (sample.device_us < 0) return Py_BuildValue("(nddO)", sample.call, sample.wall_us, sample.host_us, Py_None);
  return Py_BuildValue("(nddd)", sample.call, sample.wall_us, sample.host_us, sample.device_us);
}

PyObject* run(Timer* self, const std::vector<Timed>& calls, const std::vector<Py_ssize_t>& schedule, const Flush& flush) {
  std::vector<Sample> samples;
  samples.reserve(schedule.size());
  for (const Py_ssize_t index : schedule) {
    const Timed& timed = calls[static_cast<size_t>(index)];
    samples.push_back(self->clock->context == nullptr ? on_cpu(timed) : on_device(self, timed, flush));
    if (PyErr_CheckSignals() != 0) throw python_error();
  }
  THPObjectPtr list(PyList_New(0));
  if (!list) return nullptr;
  for (const Sample& sample : samples) {
    THPObjectPtr item(as_tuple(sample));
    if (!item || PyList_Append(list, item) != 0) return nullptr;
  }
  return list.release();
}

bool read_schedule(PyObject* given, Py_ssize_t calls, std::vector<Py_ssize_t>& schedule) {
  THPObjectPtr items(PySequence_Fast(given, "a schedule is a sequence of numbers of calls"));
  if (!items) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
    schedule.push_back(PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(items.get(), i)));
    if (PyErr_Occurred()) return false;
    if (schedule.back() < 0 || schedule.back() >= calls) {
      PyErr_Format(PyExc_ValueError, "the schedule names call %zd of %zd", schedule.back(), calls);
      return false;
    }
  }
  return true;
}

// What is called: a tuple of callables without arguments, and for each how often in one sample (null: once).
bool read_calls(PyObject* calls, PyObject* repeats, std::vector<Timed>& timed) {
  if (repeats != nullptr && PyTuple_GET_SIZE(repeats) != PyTuple_GET_SIZE(calls))
    return PyErr_Format(PyExc_ValueError, "%zd repeats for %zd calls", PyTuple_GET_SIZE(repeats), PyTuple_GET_SIZE(calls)), false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(calls); ++i) {
    PyObject* call = PyTuple_GET_ITEM(calls, i);
    if (!PyCallable_Check(call)) return PyErr_Format(PyExc_TypeError, "call %zd is not callable", i), false;
    const Py_ssize_t often = repeats == nullptr ? 1 : PyLong_AsSsize_t(PyTuple_GET_ITEM(repeats, i));
    if (PyErr_Occurred()) return false;
    if (often < 1) return PyErr_Format(PyExc_ValueError, "call %zd is to be called %zd times, expected at least 1", i, often), false;
    timed.push_back({call, i, often});
  }
  return true;
}

// run(calls: tuple of callables, schedule: sequence of int, flush: (address, bytes) or None, repeats: tuple of int)
PyObject* timer_run(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  auto* self = reinterpret_cast<Timer*>(object);
  PyObject *calls, *order, *flushed = Py_None, *repeats = nullptr;
  if (!PyArg_ParseTuple(args, "O!O|OO!", &PyTuple_Type, &calls, &order, &flushed, &PyTuple_Type, &repeats)) return nullptr;
  std::vector<Timed> timed;
  if (!read_calls(calls, repeats, timed)) return nullptr;
  std::vector<Py_ssize_t> schedule;
  if (!read_schedule(order, PyTuple_GET_SIZE(calls), schedule)) return nullptr;
  unsigned long long address = 0;
  Py_ssize_t bytes = 0;
  if (flushed != Py_None && !PyArg_ParseTuple(flushed, "Kn", &address, &bytes)) return nullptr;
  try {
    return run(self, timed, schedule, {address, static_cast<size_t>(bytes)});
  } catch (const Failed& failed) {
    THPObjectPtr ignored(PyObject_CallFunction(self->fail, "si", failed.call, failed.result));
    if (ignored) PyErr_SetString(PyExc_RuntimeError, "the driver failed, and its explanation raised nothing");
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

template <typename F>
void set(F*& function, PyObject* addresses, Py_ssize_t position) {
  function = reinterpret_cast<F*>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, position)));
}

bool read_clock(Clock& clock, PyObject* addresses) {
  if (!PyTuple_Check(addresses) || PyTuple_GET_SIZE(addresses) != 10)
    return PyErr_SetString(PyExc_ValueError, "ten driver addresses expected, or None"), false;
  for (Py_ssize_t i = 0; i < 10; ++i)
    if (PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, i)) == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a driver address is null");
      return false;
    }
  clock.context = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, 0));
  set(clock.push, addresses, 1), set(clock.pop, addresses, 2), set(clock.current_stream, addresses, 3);
  set(clock.join, addresses, 4), set(clock.fill, addresses, 5), set(clock.make_event, addresses, 6);
  set(clock.record, addresses, 7), set(clock.elapsed, addresses, 8), set(clock.destroy_event, addresses, 9);
  return true;
}

PyObject* timer_new(PyTypeObject* type, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *addresses, *fail;
  int device = 0;
  if (!PyArg_ParseTuple(args, "OiO", &addresses, &device, &fail)) return nullptr;
  auto clock = std::make_unique<Clock>();
  if (addresses != Py_None) {
    if (!read_clock(*clock, addresses)) return nullptr;
    try {
      const Inside inside(*clock);
      must("cuEventCreate", clock->make_event(&clock->begin, 0));
      must("cuEventCreate", clock->make_event(&clock->end, 0));
    } catch (const Failed& failed) {
      THPObjectPtr ignored(PyObject_CallFunction(fail, "si", failed.call, failed.result));
      return nullptr;
    }
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto* timer = reinterpret_cast<Timer*>(self);
  timer->fail = Py_NewRef(fail);
  timer->clock = clock.release();
  timer->device = device;
  return self;
  END_HANDLE_TH_ERRORS
}

void timer_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Timer*>(object);
  if (self->clock != nullptr && self->clock->end != nullptr) {
    self->clock->destroy_event(self->clock->begin);
    self->clock->destroy_event(self->clock->end);
  }
  delete self->clock;
  Py_XDECREF(self->fail);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef timer_methods[] = {
    {"run", timer_run, METH_VARARGS, "run(calls, schedule, flush=None, repeats=all 1) -> [(call, wall_us, host_us, device_us or None), ...]"},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot timer_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(timer_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(timer_dealloc)},
    {Py_tp_methods, timer_methods},
    {0, nullptr},
};
PyType_Spec timer_spec = {"torch_cudal1._native.Timer", sizeof(Timer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, timer_slots};

}  // namespace

bool add_timer_type(PyObject* module) {
  THPObjectPtr type(PyType_FromSpec(&timer_spec));
  return type && PyModule_AddObjectRef(module, "Timer", type) == 0;
}

}  // namespace cudal1
