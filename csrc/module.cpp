// The extension module torch_cudal1._native: the guard, the call signature and the executor of Programs.
//
// It uses libtorch_python, so a build belongs to one minor release of torch; native.py reads TORCH_VERSION below. It opens no
// library: addresses of the CUDA driver's functions come from Python, so it builds and loads without CUDA.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/utils/object_ptr.h>
#include <torch/version.h>

#include "fast.h"
#include "guard.h"
#include "outermost.h"
#include "pages.h"
#include "plan_type.h"
#include "replay.h"
#include "signature.h"
#include "timer.h"

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "unknown"
#endif

namespace {

PyMethodDef methods[] = {
    {"signature", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(cudal1::signature)), METH_FASTCALL,
     "signature(args, kwargs) -> bytes | None"},
    {"opaque_signature", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(cudal1::opaque_signature)), METH_FASTCALL,
     "opaque_signature(args, kwargs) -> bytes | None"},
    {"call_outermost", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(cudal1::call_outermost)), METH_FASTCALL,
     "call_outermost(callable, args, kwargs) -> object, with no Python frame below it"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  THPObjectPtr module(PyModule_Create(&definition));
  if (!module) return nullptr;
  if (!cudal1::add_guard_type(module) || !cudal1::add_plan_type(module) || !cudal1::add_replay_type(module) ||
      !cudal1::add_timer_type(module) || !cudal1::add_fast_path(module) || !cudal1::add_pages(module))
    return nullptr;
  if (PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION) < 0) return nullptr;
  if (PyModule_AddIntConstant(module, "INTERFACE", 8) < 0) return nullptr;  // raised with what Python may ask; native.py has its twin
  if (PyModule_AddStringConstant(module, "COMPILER", COMPILER) < 0) return nullptr;
  return module.release();
}
