#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace cudal1 {

// Adds the type `FastPath` and the object `MISS` to the module; false with an exception set.
bool add_fast_path(PyObject* module);

}  // namespace cudal1
