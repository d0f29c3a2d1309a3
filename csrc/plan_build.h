#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdexcept>
#include <string>

#include "plan.h"

namespace cudal1 {

struct Unsupported : std::runtime_error {  // becomes NotImplementedError
  using std::runtime_error::runtime_error;
};

// args: (inputs, values, constants, outputs, device, driver, steps, Value, explain). Throws Unsupported, or what Python raised.
void build_plan(Plan& plan, PyObject* args);

// A new reference; nullptr with an exception set.
PyObject* to_python(c10::IValue&& value);

}  // namespace cudal1
