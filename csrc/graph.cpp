#include "graph.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <string>

#include "fresh.h"

namespace cudal1 {

namespace {

constexpr unsigned without_timing = 2;  // CU_EVENT_DISABLE_TIMING
constexpr size_t most_nodes = 4096;     // of all executables of a graph together: a node takes some kilobytes, host and device

// Bytes from the first element to the last, gaps included. Copying them copies a tensor of any strides to one of the same strides.
size_t extent(const at::Tensor& t) { return at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()); }

bool goes_in_one_piece(const at::Tensor& t) { return t.numel() != 0 && extent(t) <= 2 * t.nbytes(); }  // not mostly gaps

std::string shape_text(const at::Tensor& t) {
  std::string text = "[";
  for (const int64_t size : t.sizes()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

at::Tensor fresh_like(const at::Tensor& t) { return fresh(t.sizes(), t.strides(), t.scalar_type(), t.device()); }

uint64_t address_of(const at::Tensor& t) { return reinterpret_cast<uint64_t>(t.const_data_ptr()); }

// `given` itself, or a copy of it that lies in memory as `held` does.
at::Tensor like(const at::Tensor& held, const at::Tensor& given) {
  if (given.dtype() == held.dtype() && given.strides() == held.strides() && given.device() == held.device()) return given;
  return fresh_like(held).copy_(given);
}

bool is_memory_of(const Graph& graph, const at::Tensor& t) {  // that the next replay writes
  const auto shares = [&](const at::Tensor& held) { return held.defined() && held.storage().is_alias_of(t.storage()); };
  return std::any_of(graph.moving.begin(), graph.moving.end(), shares) ||
         std::any_of(graph.outputs.begin(), graph.outputs.end(), [&](const Output& output) { return shares(output.tensor); });
}

// The moving inputs: what `launch` copies goes to `outside` and is kept alive by `given`; the others are copied here.
void pass_in(const Graph& graph, const std::vector<at::Tensor>& moving, std::vector<at::Tensor>& given, std::vector<uint64_t>& outside) {
  given.reserve(moving.size()), outside.reserve(graph.passages.size());
  for (size_t i = 0; i < moving.size(); ++i) {
    const at::Tensor& held = graph.moving[i];
    if (held.sizes() != moving[i].sizes())
      throw WrongValue("an input of shape " + shape_text(moving[i]) + ", the graph was captured for " + shape_text(held));
    if (goes_in_one_piece(held))
      outside.push_back(address_of(given.emplace_back(like(held, moving[i]))));
    else
      held.copy_(moving[i]);
  }
}

// The graph with its copies as nodes and these addresses in them; null if the driver once did not take that, then never again.
Executable* with_copies(const GraphDriver& driver, Graph& graph, const std::vector<uint64_t>& outside) {
  auto& ready = graph.whole;
  const auto fits = std::find_if(ready.begin(), ready.end(), [&](const auto& one) { return one->has(outside); });
  if (fits != ready.end()) {
    std::rotate(fits, fits + 1, ready.end());
    return ready.back().get();
  }
  if (ready.size() < graph.room) {
    auto made = std::make_unique<Executable>(driver.captures, graph.captured);
    if (made->build_with(graph.passages, outside) == 0) {
      graph.room = std::min(graph.room, std::max<size_t>(1, most_nodes / (made->node_count() + 1)));
      ready.push_back(std::move(made));
      return ready.back().get();
    }
    graph.room = ready.size();
  }
  if (ready.empty()) return nullptr;
  std::rotate(ready.begin(), ready.begin() + 1, ready.end());  // the one that was not used for longest
  if (ready.back()->move(outside) == 0) return ready.back().get();
  graph.room = 0;
  ready.clear();
  return nullptr;
}

Executable& bare(const GraphDriver& driver, Graph& graph) {
  if (graph.bare == nullptr) {
    auto made = std::make_unique<Executable>(driver.captures, graph.captured);
    must("cuGraphInstantiate", made->build());
    graph.bare = std::move(made);
  }
  return *graph.bare;
}

// Copies in, the graph, copies out; those that are nodes of it go with it.
void launch(const GraphDriver& driver, Graph& graph, const std::vector<uint64_t>& outside, void* stream) {
  Executable* const ready = with_copies(driver, graph, outside);
  void* const handle = (ready != nullptr ? *ready : bare(driver, graph)).handle();
  const auto copy = [&](bool inward) {
    for (size_t i = 0; i < outside.size(); ++i) {
      const Passage& passage = graph.passages[i];
      if (passage.inward != inward || (ready != nullptr && passage.is_node())) continue;
      const auto [to, from] = inward ? std::pair(passage.inside, outside[i]) : std::pair(outside[i], passage.inside);
      must("cuMemcpyDtoDAsync", driver.copy(to, from, passage.bytes, stream));
    }
  };
  copy(true);
  must("cuGraphLaunch", driver.replay(handle, stream));
  copy(false);
}

}  // namespace

void Graph::know_passages(bool outward) {
  const auto add = [&](const at::Tensor& held, bool inward) {
    if (goes_in_one_piece(held)) passages.push_back({reinterpret_cast<uint64_t>(held.const_data_ptr()), extent(held), inward});
  };
  for (const at::Tensor& held : moving) add(held, true);
  for (const Output& output : outputs)
    if (outward && output.tensor.defined()) add(output.tensor, false);
}

std::unique_lock<std::mutex> Turns::take(const GraphDriver& driver, void* stream) {
  std::unique_lock<std::mutex> turn(turn_);
  if (last_stream_ && *last_stream_ != stream) {
    if (event_ == nullptr) must("cuEventCreate", driver.make_event(&event_, without_timing));
    must("cuEventRecord", driver.record_event(event_, *last_stream_));
    must("cuStreamWaitEvent", driver.wait_event(stream, event_, 0));
  }
  last_stream_ = stream;
  return turn;
}

std::vector<at::Tensor> enqueue(
    const GraphDriver& driver, Turns& turns, Graph& graph, const std::vector<at::Tensor>& moving, void* stream) {
  const auto turn = turns.take(driver, stream);
  std::vector<at::Tensor> given, results;  // alive until everything is enqueued
  std::vector<uint64_t> outside;
  pass_in(graph, moving, given, outside);
  for (const Output& output : graph.outputs) {
    results.emplace_back();
    if (!output.tensor.defined()) continue;
    const at::Tensor& held = output.tensor;
    results.back() = fresh_like(held);
    if (goes_in_one_piece(held)) outside.push_back(address_of(results.back()));
  }
  launch(driver, graph, outside, stream);
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].defined() && !goes_in_one_piece(graph.outputs[i].tensor)) results[i].copy_(graph.outputs[i].tensor);
  return results;
}

std::vector<at::Tensor> enqueue(const GraphDriver& driver, Turns& turns, Graph& graph, const std::vector<at::Tensor>& moving, void* stream,
                                const Plan& last, const std::vector<at::Tensor>& inputs) {
  const auto turn = turns.take(driver, stream);  // until what reads the graph's outputs is enqueued as well
  std::vector<at::Tensor> given, results;
  std::vector<uint64_t> outside;
  pass_in(graph, moving, given, outside);
  launch(driver, graph, outside, stream);
  Values values;
  values.reserve(last.value_count);
  for (const Output& output : graph.outputs) values.emplace_back(output.input >= 0 ? inputs[output.input] : output.tensor);
  values.insert(values.end(), inputs.begin(), inputs.end());
  for (const c10::IValue& made : last.run(std::move(values))) {
    const at::Tensor result = made.isTensor() ? made.toTensor() : at::Tensor();
    results.push_back(result.defined() && is_memory_of(graph, result) ? fresh_like(result).copy_(result) : result);
  }
  return results;
}

}  // namespace cudal1
