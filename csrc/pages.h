// Large results on the CPU in huge pages, for as long as one of our calls runs in a thread.
//
// A result over 32 MiB is memory that the C library maps for this result alone and unmaps with it, so each call pays for its pages
// anew: of 64 MB 16384 pages of 4 KiB, 12 of the 22 ms that diag(a) @ B took as one multiplication. In huge pages there are 32.
// Memory still comes from PyTorch's own allocator and goes back to it; only the advice to the kernel is ours, and it ends with the
// mapping. Outside of our calls nothing is advised. Where huge pages are off (or on for everything) this changes nothing.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace cudal1 {

class HugePages {  // what this thread allocates on the CPU while this lives is advised
 public:
  explicit HugePages(bool wanted);
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

 private:
  const bool before_;
};

// Adds `huge_pages(wanted: bool) -> bool`, which gives what this thread had before; false with an exception set.
bool add_pages(PyObject* module);

}  // namespace cudal1
