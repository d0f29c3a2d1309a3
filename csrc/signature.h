// signature(args, kwargs): the arguments of a call described in bytes, equal exactly where python_signature in torch_cudal1/runtime/guard.py
// is equal; None where one plan cannot serve. Exact types only, so that no code of the user's runs. The bytes mean nothing outside
// this process: they are compared and hashed, never stored. opaque_signature(args, kwargs) describes any other object by its class.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <vector>

namespace cudal1 {

inline bool plain(const at::Tensor& t) {  // dense memory of its own, read as it stands
  return t.layout() == at::kStrided && t.has_storage() && !t.is_quantized() && !t.is_nested() && !t.is_conj() && !t.is_neg();
}

struct Span {
  uintptr_t begin, end;
};

class Writer {
 public:
  explicit Writer(bool opaque = false) : opaque_(opaque) {}
  bool write(PyObject* value, int depth);  // false: not servable
  bool write_call(PyObject* args, PyObject* kwargs);
  const std::string& bytes() const { return out_; }
  const std::vector<PyObject*>& tensors() const { return tensors_; }  // borrowed, in the order of the arguments
  void clear() { out_.clear(), spans_.clear(), tensors_.clear(), containers_.clear(); }
  PyObject* finish() const { return PyBytes_FromStringAndSize(out_.data(), static_cast<Py_ssize_t>(out_.size())); }

 private:
  static constexpr int max_depth = 16;
  bool opaque_;  // whether an object that is no plain value is described by its class alone
  std::string out_;
  std::vector<Span> spans_;
  std::vector<PyObject*> tensors_;
  std::vector<PyObject*> containers_;  // lists and dicts, in the order of the arguments

  template <typename T>
  void put(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put_device(c10::Device device) {
    put(static_cast<int8_t>(device.type()));
    put(static_cast<int8_t>(device.index()));
  }
  static bool is_plain_value(PyObject* value, int depth);
  bool write_tensor(PyObject* object);
  bool write_text(PyObject* text);
  bool write_sequence(char mark, PyObject* const* items, Py_ssize_t size, int depth);
  bool write_dict(PyObject* dict, int depth);
  void write_repetition(PyObject* container);
  void write_overlaps();
};

inline bool Writer::write_tensor(PyObject* object) {
  const at::Tensor& t = THPVariable_Unpack(object);
  if (!plain(t)) return false;
  tensors_.push_back(object);
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  put('T');
  put(static_cast<int8_t>(t.scalar_type()));
  put_device(t.device());
  // The class and a grad_fn are nothing that an operator asks, but a forward may.
  const bool needs_grad = t.requires_grad();
  put(static_cast<uint8_t>((needs_grad ? 1 : 0) | (begin % 16 ? 0 : 2) | (needs_grad && !t.is_leaf() ? 4 : 0) |
                           (Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass) ? 0 : 8)));
  put(static_cast<uint8_t>(t.dim()));
  int64_t extent = 1;
  for (int64_t d = 0; d < t.dim(); ++d) {
    put(t.sizes()[d]);
    put(t.strides()[d]);
    extent += (t.sizes()[d] - 1) * t.strides()[d];
  }
  const bool some = begin != 0 && t.numel() != 0;
  spans_.push_back({begin, some ? begin + static_cast<uintptr_t>(extent) * t.element_size() : begin});
  return true;
}

inline bool Writer::write_text(PyObject* text) {  // length, width of a character and the characters: one form for one string
  const Py_ssize_t bytes = PyUnicode_GET_LENGTH(text) * PyUnicode_KIND(text);
  put('S');
  put(static_cast<uint8_t>(PyUnicode_KIND(text)));
  put(bytes);
  out_.append(static_cast<const char*>(PyUnicode_DATA(text)), bytes);
  return true;
}

inline bool Writer::write_sequence(char mark, PyObject* const* items, Py_ssize_t size, int depth) {
  if (depth >= max_depth) return false;
  put(mark);
  put(size);
  for (Py_ssize_t i = 0; i < size; ++i)
    if (!write(items[i], depth + 1)) return false;
  return true;
}

inline void Writer::write_repetition(PyObject* container) {  // that this list or dict is one of those before
  for (size_t i = 0; i < containers_.size(); ++i)
    if (containers_[i] == container) put('='), put(static_cast<uint32_t>(i));
  containers_.push_back(container);
}

inline bool Writer::write_dict(PyObject* dict, int depth) {
  if (depth >= max_depth) return false;
  write_repetition(dict);
  put('{');
  put(PyDict_GET_SIZE(dict));
  Py_ssize_t position = 0;
  PyObject *key, *value;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (!PyUnicode_CheckExact(key)) return false;
    write_text(key);
    if (!write(value, depth + 1)) return false;
  }
  return true;
}

// Whether a value that is no tensor has a description of its own, as `write` gives it.
inline bool Writer::is_plain_value(PyObject* value, int depth) {
  PyTypeObject* type = Py_TYPE(value);
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow;
  }
  if (PyTuple_CheckExact(value) || PyList_CheckExact(value) || type == &THPSizeType) return depth < max_depth;
  if (PyDict_CheckExact(value)) {
    Py_ssize_t position = 0;
    PyObject *key, *item;
    while (PyDict_Next(value, &position, &key, &item))
      if (!PyUnicode_CheckExact(key)) return false;
    return depth < max_depth;
  }
  return value == Py_None || PyBool_Check(value) || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) || THPDtype_Check(value) ||
         THPDevice_Check(value);
}

inline bool Writer::write(PyObject* value, int depth) {
  PyTypeObject* type = Py_TYPE(value);
  if (THPVariable_CheckTypeExact(type)) return write_tensor(value);
  // The class by its address. Should another class get it later, the guards of the call, which compare classes, tell them apart.
  if (opaque_ && !is_plain_value(value, depth) && !THPVariable_Check(value)) return put('O'), put(reinterpret_cast<uintptr_t>(type)), true;
  if (value == Py_None) return put('N'), true;
  if (PyBool_Check(value)) return put(value == Py_True ? 'Y' : 'n'), true;
  if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) return false;
    return put('I'), put(number), true;
  }
  if (PyFloat_CheckExact(value)) return put('F'), put(PyFloat_AS_DOUBLE(value)), true;
  if (PyUnicode_CheckExact(value)) return write_text(value);
  if (PyTuple_CheckExact(value) || type == &THPSizeType) {
    const char mark = PyTuple_CheckExact(value) ? '(' : 'Z';
    return write_sequence(mark, reinterpret_cast<PyTupleObject*>(value)->ob_item, PyTuple_GET_SIZE(value), depth);
  }
  if (PyList_CheckExact(value)) {
    write_repetition(value);
    return write_sequence('[', reinterpret_cast<PyListObject*>(value)->ob_item, PyList_GET_SIZE(value), depth);
  }
  if (PyDict_CheckExact(value)) return write_dict(value, depth);
  if (THPDtype_Check(value)) return put('D'), put(static_cast<int8_t>(reinterpret_cast<THPDtype*>(value)->scalar_type)), true;
  if (THPDevice_Check(value)) return put('d'), put_device(reinterpret_cast<THPDevice*>(value)->device), true;
  return false;
}

inline void Writer::write_overlaps() {  // and which are the same object; pairs, by their order among the arguments; few tensors, so every pair is looked at
  for (size_t i = 0; i < spans_.size(); ++i)
    for (size_t j = i + 1; j < spans_.size(); ++j) {
      const Span &a = spans_[i], &b = spans_[j];
      if (tensors_[i] == tensors_[j]) put('E'), put(static_cast<uint32_t>(i)), put(static_cast<uint32_t>(j));
      if (a.begin < b.end && b.begin < a.end && a.begin < a.end && b.begin < b.end)
        put('A'), put(static_cast<uint32_t>(i)), put(static_cast<uint32_t>(j));
    }
}

inline bool Writer::write_call(PyObject* args, PyObject* kwargs) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i)
    if (!write(PyTuple_GET_ITEM(args, i), 0)) return false;
  if (!write(kwargs, 0)) return false;
  write_overlaps();
  return true;
}

inline PyObject* describe_call(PyObject* const* args, Py_ssize_t count, bool opaque) {
  HANDLE_TH_ERRORS
  if (count != 2 || !PyTuple_CheckExact(args[0]) || !PyDict_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "a signature is of args: tuple, kwargs: dict");
    return nullptr;
  }
  Writer writer(opaque);
  if (!writer.write_call(args[0], args[1])) Py_RETURN_NONE;
  return writer.finish();
  END_HANDLE_TH_ERRORS
}

inline PyObject* signature(PyObject*, PyObject* const* args, Py_ssize_t count) { return describe_call(args, count, false); }

inline PyObject* opaque_signature(PyObject*, PyObject* const* args, Py_ssize_t count) { return describe_call(args, count, true); }

}  // namespace cudal1
