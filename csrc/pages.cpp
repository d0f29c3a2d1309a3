#include "pages.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace cudal1 {

namespace {

// glibc serves less from memory that it keeps (its threshold for maps grows to this, no further): an advice would outlive results.
constexpr size_t least_bytes = size_t{32} << 20;

thread_local bool wanted_here = false;

void advise(void* data, size_t bytes) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + page - 1) & ~(page - 1), last = (begin + bytes) & ~(page - 1);
  // A kernel that refuses leaves small pages, which are right too.
  if (first < last) static_cast<void>(madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE));
}

class Advising final : public c10::Allocator {  // another allocator, and a word to the kernel about what it gave
 public:
  explicit Advising(c10::Allocator& plain) : plain_(plain) {}
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = plain_.allocate(bytes);
    if (wanted_here && bytes > least_bytes) advise(data.get(), bytes);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return plain_.raw_deleter(); }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return plain_.is_simple_data_ptr(data); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { plain_.copy_data(to, from, bytes); }

 private:
  c10::Allocator& plain_;
};

// Once in a process, at the first call of ours: from then on PyTorch asks us, and we ask whom it asked before. Never taken back, as
// storages remember their allocator. One that is set later takes our place, and nothing is advised then.
void install() {
  static const bool installed = [] {
    c10::SetCPUAllocator(new Advising(*c10::GetCPUAllocator()));
    return true;
  }();
  static_cast<void>(installed);
}

PyObject* huge_pages(PyObject*, PyObject* wanted) {
  const int now = PyObject_IsTrue(wanted);
  if (now < 0) return nullptr;
  if (now != 0) install();
  const bool before = wanted_here;
  wanted_here = now != 0;
  return PyBool_FromLong(before);
}

PyMethodDef methods[] = {
    {"huge_pages", huge_pages, METH_O, "huge_pages(wanted: bool) -> bool: large CPU results of this thread in huge pages; what was"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

HugePages::HugePages(bool wanted) : before_(wanted_here) {
  if (wanted) install();
  wanted_here = wanted;
}

HugePages::~HugePages() { wanted_here = before_; }

bool add_pages(PyObject* module) { return PyModule_AddFunctions(module, methods) == 0; }

}  // namespace cudal1
