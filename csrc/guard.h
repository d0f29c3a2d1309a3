#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace cudal1 {

// Adds the type `Guard` to the module; false with an exception set.
bool add_guard_type(PyObject* module);

// Whether `object` is a Guard; whether nothing differs from its snapshot (throws python_error with an exception set).
bool is_guard(PyObject* object);
bool guard_holds_now(PyObject* object);
// Whether the tensor is one of those that the guard compares: a forward may ask whether an argument is one of the module's own.
bool guard_has_tensor(PyObject* object, PyObject* tensor);

}  // namespace cudal1
