// Dictionaries whose changes the interpreter tells of: while none changed, none needs to be read.
//
// Python 3.12 only: 3.11 tells nothing, and 3.13 sets attributes inside the object without telling the watchers of its dictionary.
// In 3.12 attributes lie in the dictionary once it exists and has a second owner (a guard is one). `told_changes` counts for the
// whole process and needs the GIL. The interpreter tells before it changes a dictionary; the order of an OrderedDict may change
// unsaid (move_to_end). A dictionary stays watched when nobody cares any more: that costs its changes a call, and nothing else.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace cudal1 {

inline uint64_t told_changes = 1;
inline int told_watcher = -1;  // -1: this Python tells nothing

// Off unless asked for when building: a test run with it on 3.12 ended in a crash whose cause is not known yet.
#if defined(CUDAL1_WATCH_DICTIONARIES) && PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000
inline int count_change(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
  ++told_changes;
  return 0;
}
inline void start_telling() {
  if (told_watcher >= 0) return;
  told_watcher = PyDict_AddWatcher(count_change);
  if (told_watcher < 0) PyErr_Clear();  // all eight places are taken
}
inline bool is_told(PyObject* dict) {  // from now on, if it can be
  if (told_watcher < 0 || !PyDict_Check(dict)) return false;
  if (PyDict_Watch(told_watcher, dict) == 0) return true;
  PyErr_Clear();
  return false;
}
#else
inline void start_telling() {}
inline bool is_told(PyObject*) { return false; }
#endif

}  // namespace cudal1
