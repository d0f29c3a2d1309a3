#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "plan.h"

namespace cudal1 {

// Adds the type `Plan` to the module; false with an exception set.
bool add_plan_type(PyObject* module);

// The plan behind a Python object, or nullptr if that is something else.
const Plan* plan_of(PyObject* object);

// Runs without the GIL. Throws python_error with the exception set, or what an operator threw.
Values run_plan(PyObject* plan, Values&& inputs);

// The exception that belongs to a launch of the plan that failed.
[[noreturn]] void explain_launch(PyObject* plan, const LaunchFailure& failure);

// A list of tensors and None; nullptr with an exception set.
PyObject* as_list(Values&& values);

}  // namespace cudal1
