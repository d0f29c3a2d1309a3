// A captured graph with the buffers that it reads and writes, and a call of it: fresh inputs in, fresh results out.
//
// A result is never memory that a later call writes. Calls take turns on the buffers; see replay.h.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "captured.h"
#include "plan.h"

namespace cudal1 {

struct GraphDriver : Driver {  // addresses in libcuda
  int (*copy)(uint64_t, uint64_t, size_t, void*) = nullptr;
  int (*replay)(void*, void*) = nullptr;
  int (*capture_status)(void*, int*) = nullptr;
  int (*make_event)(void**, unsigned) = nullptr;
  int (*record_event)(void*, void*) = nullptr;
  int (*wait_event)(void*, void*, unsigned) = nullptr;
  CaptureApi captures;
};

struct Failed : std::exception {  // a driver function and its result; becomes a DriverError
  Failed(const char* call, int result) : call(call), result(result) {}
  const char* what() const noexcept override { return call; }
  const char* call;
  int result;
};

inline void must(const char* call, int result) {
  if (result != 0) throw Failed(call, result);
}

struct Output {
  at::Tensor tensor;  // undefined: None, or
  int64_t input;      // the number of the input that the function returns itself; -1: none
};

struct Graph {
  std::vector<uintptr_t> addresses;  // of the static inputs
  void* captured;
  std::vector<at::Tensor> moving;  // our copies of the inputs that are not static
  std::vector<Output> outputs;
  std::vector<Passage> passages;  // of what goes in one piece: moving inputs, then outputs
  THPObjectPtr owner;             // keeps what was captured and its memory; dies after the executables
  // With the copies inside, one for each of the last few sets of addresses, the last used last: a caller who holds a result while the
  // next is made has two places for it, in turns, and to tell the driver an address costs more than the launch.
  std::vector<std::unique_ptr<Executable>> whole;
  size_t room = 3;                   // for how many of them; 0: the driver did not take the copies as nodes
  std::unique_ptr<Executable> bare;  // without the copies; each is made when it is first needed

  void know_passages(bool outward);  // once the tensors are known; `outward`: results are copied out
};

class Turns {  // of calls on the buffers: one at a time, and on the device after what the last one had enqueued
 public:
  std::unique_lock<std::mutex> take(const GraphDriver& driver, void* stream);

 private:
  std::mutex turn_;
  std::optional<void*> last_stream_;
  void* event_ = nullptr;  // left to the context: destroying it may fail when the process ends
};

// The outputs that are fresh memory, in order; an undefined tensor for one that is an input or None. Needs no GIL, and the graph's
// context to be current. Throws Failed and WrongValue.
std::vector<at::Tensor> enqueue(
    const GraphDriver& driver, Turns& turns, Graph& graph, const std::vector<at::Tensor>& moving, void* stream);

// What `last` makes of the graph's outputs, where they lie, and of the inputs; none of it is memory that a later call writes. Throws
// what an operator throws and LaunchFailure, too.
std::vector<at::Tensor> enqueue(const GraphDriver& driver, Turns& turns, Graph& graph, const std::vector<at::Tensor>& moving, void* stream,
                                const Plan& last, const std::vector<at::Tensor>& inputs);

}  // namespace cudal1
