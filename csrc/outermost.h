// A call below which there is no Python frame: what is called cannot walk the stack to its caller.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace cudal1 {

// call_outermost(callable, args, kwargs): `args` a tuple, `kwargs` a dict. The caller's frames are on the stack again
// afterwards, whatever the call raised.
PyObject* call_outermost(PyObject* module, PyObject* const* arguments, Py_ssize_t count);

}  // namespace cudal1
