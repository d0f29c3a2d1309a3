#include "captured.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace cudal1 {

namespace {

constexpr int invalid_value = 1, is_copy = 1, is_fill = 2;  // CUDA_ERROR_INVALID_VALUE; CUgraphNodeType
constexpr unsigned in_device_memory = 2;                    // CU_MEMORYTYPE_DEVICE
constexpr unsigned threads = 256;

struct Mover {  // a kernel node: (to, what, count of words)
  uint64_t words[3];
  void* places[3] = {words, words + 1, words + 2};
  KernelNode node{};

  Mover(void* function, uint64_t to, uint64_t what, uint64_t count) : words{to, what, count} {
    node.function = function;
    node.grid[0] = static_cast<unsigned>((count + threads - 1) / threads), node.grid[1] = node.grid[2] = 1;
    node.block[0] = threads, node.block[1] = node.block[2] = 1;
    node.parameters = places;
  }
  Mover(const Mover&) = delete;
};

size_t widest(uint64_t bits) {  // the index of the widest word that divides all of what was or'ed together
  size_t i = 0;
  while (bits % widths[i] != 0) ++i;
  return i;
}

void copying(const CaptureApi& api, uint64_t to, uint64_t from, size_t bytes, std::optional<Mover>& mover) {
  const size_t width = widest(to | from | bytes);
  mover.emplace(api.copy[width], to, from, bytes / widths[width]);
}

void filling(const CaptureApi& api, const MemoryFill& fill, std::optional<Mover>& mover) {
  const size_t bytes = fill.width * fill.element_bytes;
  if (fill.height != 1 || bytes == 0 || bytes > most_by_kernel) return;
  const uint32_t repeat = fill.element_bytes == 1 ? 0x01010101u : fill.element_bytes == 2 ? 0x00010001u : 1u;
  const uint32_t mask = fill.element_bytes == 1 ? 0xffu : fill.element_bytes == 2 ? 0xffffu : 0xffffffffu;
  const uint32_t word = (fill.value & mask) * repeat;
  const size_t width = widest(fill.to | bytes);
  if (widths[width] == 1 && word != (word & 0xff) * 0x01010101u) return;
  mover.emplace(api.fill[width], fill.to, word, bytes / widths[width]);
}

int as_kernel(const CaptureApi& api, void* node, std::optional<Mover>& mover) {  // stays empty for a node that stays what it is
  int type = 0;
  if (const int status = api.type(node, &type)) return status;
  if (type == is_fill) {
    MemoryFill fill{};
    if (const int status = api.fill_of(node, &fill)) return status;
    filling(api, fill, mover);
  } else if (type == is_copy) {
    MemoryCopy copy{};
    if (const int status = api.copy_of(node, &copy)) return status;
    const auto lies = [](const MemoryCopy::Side& side) {
      return side.type == in_device_memory && side.x == 0 && side.y == 0 && side.z == 0;
    };
    if (lies(copy.from) && lies(copy.to) && copy.height == 1 && copy.depth == 1 && copy.width != 0 && copy.width <= most_by_kernel)
      copying(api, copy.to.device, copy.from.device, copy.width, mover);
  }
  return 0;
}

}  // namespace

struct Executable::Lines {  // the nodes of a graph, and which waits for which
  std::vector<void*> nodes, from, to;

  int read(const CaptureApi& api, void* graph) {
    size_t count = 0, pairs = 0;
    if (const int status = api.nodes(graph, nullptr, &count)) return status;
    nodes.resize(count);
    if (const int status = api.nodes(graph, nodes.data(), &count)) return status;
    if (const int status = edges(api, graph, nullptr, nullptr, nullptr, &pairs)) return status;
    from.resize(pairs), to.resize(pairs);
    std::vector<EdgeData> data(pairs);
    return pairs == 0 ? 0 : edges(api, graph, from.data(), to.data(), data.data(), &pairs);
  }
  // The data is only asked for because the driver refuses to leave it out; the edges keep it.
  static int edges(const CaptureApi& api, void* graph, void** from, void** to, EdgeData* data, size_t* pairs) {
    return api.edges_with_data ? api.edges_with_data(graph, from, to, data, pairs) : api.edges(graph, from, to, pairs);
  }
  // Nodes that no pair has on this side: `to`: nothing comes before them; `from`: nothing comes after them.
  std::vector<void*> ends(const std::vector<void*>& side) const {
    std::vector<void*> found;
    std::copy_if(nodes.begin(), nodes.end(), std::back_inserter(found),
                 [&](void* node) { return std::find(side.begin(), side.end(), node) == side.end(); });
    return found;
  }
};

int Executable::replace_others(Lines& lines) {
  for (void*& node : lines.nodes) {
    std::optional<Mover> mover;
    if (const int status = as_kernel(api_, node, mover)) return status;
    if (!mover) continue;
    std::vector<void*> before, after;
    for (size_t i = 0; i < lines.from.size(); ++i) {
      if (lines.to[i] == node) before.push_back(lines.from[i]);
      if (lines.from[i] == node) after.push_back(lines.to[i]);
    }
    void* kernel = nullptr;
    if (const int status = api_.add_kernel(&kernel, graph_, before.data(), before.size(), &mover->node)) return status;
    const std::vector<void*> same(after.size(), kernel);
    if (!after.empty())
      if (const int status = api_.depend(graph_, same.data(), after.data(), after.size())) return status;
    if (const int status = api_.destroy_node(node)) return status;
    std::replace(lines.from.begin(), lines.from.end(), node, kernel);
    std::replace(lines.to.begin(), lines.to.end(), node, kernel);
    node = kernel;
  }
  return 0;
}

int Executable::add_copies(const Lines& lines) {  // one after the other: a line is launched faster than what spreads
  std::vector<void*> last;
  const auto add = [&](bool inward) {
    for (Known& known : known_) {
      if (known.passage.inward != inward) continue;
      std::optional<Mover> mover;
      const auto [to, from] = inward ? std::pair(known.passage.inside, known.outside) : std::pair(known.outside, known.passage.inside);
      copying(api_, to, from, known.passage.bytes, mover);
      if (const int status = api_.add_kernel(&known.node, graph_, last.data(), last.size(), &mover->node)) return status;
      last = {known.node};
    }
    return 0;
  };
  if (const int status = add(true)) return status;
  const std::vector<void*> roots = lines.ends(lines.to);
  if (!last.empty() && !roots.empty()) {
    const std::vector<void*> same(roots.size(), last.front());
    if (const int status = api_.depend(graph_, same.data(), roots.data(), roots.size())) return status;
  }
  if (!lines.nodes.empty()) last = lines.ends(lines.from);
  return add(false);
}

int Executable::build() { return api_.instantiate(&handle_, captured_, 0); }

int Executable::build_with(const std::vector<Passage>& passages, const std::vector<uint64_t>& outside) {
  const auto absent = [](void* function) { return function == nullptr; };
  if (std::any_of(std::begin(api_.copy), std::end(api_.copy), absent) || std::any_of(std::begin(api_.fill), std::end(api_.fill), absent))
    return invalid_value;
  for (size_t i = 0; i < passages.size(); ++i)
    if (passages[i].is_node()) known_.push_back({passages[i], i, outside[i], nullptr});
  Lines lines;
  if (const int status = api_.clone(&graph_, captured_)) return status;
  if (const int status = lines.read(api_, graph_)) return status;
  if (const int status = replace_others(lines)) return status;
  if (const int status = add_copies(lines)) return status;
  node_count_ = lines.nodes.size() + known_.size();
  return api_.instantiate(&handle_, graph_, 0);
}

bool Executable::has(const std::vector<uint64_t>& outside) const {
  return std::all_of(known_.begin(), known_.end(), [&](const Known& known) { return known.outside == outside[known.position]; });
}

int Executable::move(const std::vector<uint64_t>& outside) {
  for (Known& known : known_) {
    const uint64_t now = outside[known.position];
    if (known.outside == now) continue;
    known.outside = now;
    std::optional<Mover> mover;
    const auto [to, from] = known.passage.inward ? std::pair(known.passage.inside, now) : std::pair(now, known.passage.inside);
    copying(api_, to, from, known.passage.bytes, mover);
    if (const int status = api_.set_kernel(handle_, known.node, &mover->node)) return status;
  }
  return 0;
}

}  // namespace cudal1
