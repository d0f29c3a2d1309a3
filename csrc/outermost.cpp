#include "outermost.h"

#include <type_traits>

namespace cudal1 {

namespace {

// Where this version of CPython keeps the frame that a new one gets as its predecessor (`f_back`); NULL in a new thread.
auto& top_frame(PyThreadState* state) {
#if PY_VERSION_HEX >= 0x030D0000
  return state->current_frame;
#elif PY_VERSION_HEX >= 0x030B0000
  return state->cframe->current_frame;
#else
  return state->frame;
#endif
}

class WithoutFrames {
 public:
  WithoutFrames() : state_(PyThreadState_Get()), saved_(top_frame(state_)) { top_frame(state_) = nullptr; }
  ~WithoutFrames() { top_frame(state_) = saved_; }
  WithoutFrames(const WithoutFrames&) = delete;
  WithoutFrames& operator=(const WithoutFrames&) = delete;

 private:
  PyThreadState* state_;
  std::remove_reference_t<decltype(top_frame(nullptr))> saved_;
};

}  // namespace

PyObject* call_outermost(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyTuple_Check(arguments[1]) || !PyDict_Check(arguments[2])) {
    PyErr_SetString(PyExc_TypeError, "call_outermost expects a callable, a tuple and a dict");
    return nullptr;
  }
  WithoutFrames hidden;
  return PyObject_Call(arguments[0], arguments[1], arguments[2]);
}

}  // namespace cudal1
