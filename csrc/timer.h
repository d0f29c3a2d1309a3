#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace cudal1 {

// Adds the type `Timer` to the module; false with an exception set.
bool add_timer_type(PyObject* module);

}  // namespace cudal1
