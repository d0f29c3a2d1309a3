// Replays captured CUDA graphs of a pure function: inputs are copied in, outputs are copied out, in one call without Python. graph.h
// says how one call is enqueued, captured.h how the copies become part of the graph. In place of copying outputs out, a Plan may run
// after the graph on what it yields (torch_cudal1/runtime/split_last_kernel.py).
//
// Static inputs (parameters, buffers) are read where they lie; a graph serves the addresses that it was captured with. What it does
// not serve goes to `slow`: torch_cudal1/runtime/cuda_graph.py, which captures and adds. Calls from several threads and streams take
// turns on the graph's buffers: a call on another stream than the last waits, on the device, for what that one had enqueued.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace cudal1 {

// Adds the type `Replay` to the module; false with an exception set.
bool add_replay_type(PyObject* module);

// Whether `object` is a Replay, and a call of it: a list of tensors and None, or nullptr with an exception set.
bool is_replay(PyObject* object);
PyObject* call_replay(PyObject* object, const std::vector<PyObject*>& inputs);

}  // namespace cudal1
