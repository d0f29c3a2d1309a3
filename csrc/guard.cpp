// The module guard and the call signature in C++: the same answers as the plain Python in torch_cudal1/guard.py, in microseconds.
//
// Guard(kins, homes, tables, items, raws, empties, lookups, codes, cells, tensors) takes the records of torch_cudal1.watched as
// tuples and compares them with the present: identity everywhere, facts for tensors. signature(args, kwargs) packs a description of
// the arguments into bytes. Nothing here runs Python code of the user's: exact types only, no attribute access, no comparison by value.
//
// It uses libtorch_python (THPVariable), so a build belongs to one minor release of torch; native.py reads TORCH_VERSION below.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/version.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

// --- tensors

enum class Address : uint8_t { none, unaligned, aligned };

Address address_of(const at::Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return address == 0 ? Address::none : address % 16 ? Address::unaligned : Address::aligned;
}

bool plain(const at::Tensor& t) {  // dense memory of its own, read as it stands
  return t.layout() == at::kStrided && t.has_storage() && !t.is_quantized() && !t.is_nested() && !t.is_conj() && !t.is_neg();
}

struct Facts {  // torch_cudal1.watched.tensor_facts
  PyObject* tensor;  // borrowed from Guard::records
  PyTypeObject* kind;
  at::ScalarType dtype;
  c10::Device device;
  bool requires_grad, conjugated, negated;
  Address address;
  c10::DimVector sizes, strides;  // inline up to five dimensions: one cache miss less a tensor

  Facts(PyObject* object, const at::Tensor& t)
      : tensor(object), kind(Py_TYPE(object)), dtype(t.scalar_type()), device(t.device()), requires_grad(t.requires_grad()),
        conjugated(t.is_conj()), negated(t.is_neg()), address(address_of(t)), sizes(t.sizes()), strides(t.strides()) {}

  bool hold() const {
    if (Py_TYPE(tensor) != kind) return false;
    const at::Tensor& t = THPVariable_Unpack(tensor);
    return t.layout() == at::kStrided && t.has_storage() && t.scalar_type() == dtype && t.device() == device &&
        t.requires_grad() == requires_grad && t.is_conj() == conjugated && t.is_neg() == negated && t.sizes() == at::IntArrayRef(sizes) &&
        t.strides() == at::IntArrayRef(strides) && address_of(t) == address;
  }
};

// --- records: borrowed pointers into the tuples that Guard::records keeps alive

PyObject* at_(PyObject* tuple, Py_ssize_t i) { return PyTuple_GET_ITEM(tuple, i); }

// CPython 3.11 and 3.12 give a dictionary a new version, unique in the process, at every change; later ones have none (0).
uint64_t version_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
  C10_DIAGNOSTIC_PUSH_AND_IGNORED_IF_DEFINED("-Wdeprecated-declarations")
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
  C10_DIAGNOSTIC_POP()
#else
  return 0;
#endif
}

struct Table {
  PyObject *dict, *keys, *values, *ignored;
  uint64_t version = 0;  // at which the content was last found right; 0: never

  bool hold() {
    const uint64_t now = version_of(dict);
    if (now != 0 && now == version) return true;
    if (!same_content()) return false;
    version = PyODict_CheckExact(dict) ? 0 : now;  // move_to_end leaves the version as it is
    return true;
  }

  bool same_content() const {
    const Py_ssize_t size = PyTuple_GET_SIZE(keys);
    const Py_ssize_t now = PyDict_GET_SIZE(dict);
    if (now != size && !(ignored != nullptr && now == size + 1)) return false;
    return PyODict_CheckExact(dict) ? hold_ordered(size) : hold_plain(size);
  }

  bool hold_plain(Py_ssize_t size) const {
    Py_ssize_t position = 0, i = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &position, &key, &value)) {
      if (ignored != nullptr && is_ignored(key)) continue;
      if (i == size || key != at_(keys, i) || value != at_(values, i)) return false;
      ++i;
    }
    return i == size;
  }

  bool is_ignored(PyObject* key) const {
    return key == ignored || (PyUnicode_CheckExact(key) && PyUnicode_Compare(key, ignored) == 0);
  }

  bool hold_ordered(Py_ssize_t size) const {  // move_to_end changes an order that PyDict_Next does not see
    THPObjectPtr iterator(PyObject_GetIter(dict));
    if (!iterator) throw python_error();
    for (Py_ssize_t i = 0; i < size; ++i) {
      THPObjectPtr key(PyIter_Next(iterator));
      if (!key) {
        if (PyErr_Occurred()) throw python_error();
        return false;
      }
      if (key.get() != at_(keys, i) || PyDict_GetItemWithError(dict, key) != at_(values, i)) return false;
    }
    return true;
  }
};

bool same_items(PyObject* thing, PyObject* items) {
  const Py_ssize_t size = PyTuple_GET_SIZE(items);
  if (PyList_CheckExact(thing)) {
    if (PyList_GET_SIZE(thing) != size) return false;
    for (Py_ssize_t i = 0; i < size; ++i)
      if (PyList_GET_ITEM(thing, i) != at_(items, i)) return false;
    return true;
  }
  const Py_ssize_t now = PyObject_Size(thing);  // set or deque
  if (now < 0) throw python_error();
  if (now != size) return false;
  THPObjectPtr iterator(PyObject_GetIter(thing));
  if (!iterator) throw python_error();
  for (Py_ssize_t i = 0; i < size; ++i) {
    THPObjectPtr item(PyIter_Next(iterator));
    if (!item && PyErr_Occurred()) throw python_error();
    if (item.get() != at_(items, i)) return false;
  }
  return true;
}

bool same_bytes(PyObject* array, PyObject* content) {
  const Py_ssize_t size = PyBytes_GET_SIZE(content);
  return PyByteArray_GET_SIZE(array) == size && std::memcmp(PyByteArray_AS_STRING(array), PyBytes_AS_STRING(content), size) == 0;
}

bool same_home(PyObject* thing, PyObject* dict) {
  THPObjectPtr now(PyObject_GenericGetDict(thing, nullptr));
  if (!now) throw python_error();
  return now.get() == dict;
}

bool same_lookup(PyObject* dict, PyObject* key, PyObject* value) {
  PyObject* now = PyDict_GetItemWithError(dict, key);
  if (now == nullptr && PyErr_Occurred()) throw python_error();
  return now == value;
}

enum Kind { KINS, HOMES, TABLES, ITEMS, RAWS, EMPTIES, LOOKUPS, CODES, CELLS, TENSORS, KINDS };

struct Guard {
  PyObject_HEAD
  PyObject* records;  // the constructor's arguments; owns everything
  std::vector<Table>* tables;
  std::vector<Facts>* tensors;
};

template <typename Test>
bool every(const Guard* guard, Kind kind, Test test) {
  PyObject* records = at_(guard->records, kind);
  for (Py_ssize_t i = 0, n = PyTuple_GET_SIZE(records); i < n; ++i)
    if (!test(at_(records, i))) return false;
  return true;
}

bool holds(const Guard* g) {
  if (!every(g, EMPTIES, [](PyObject* hooks) { return PyDict_GET_SIZE(hooks) == 0; })) return false;
  if (!every(g, KINS, [](PyObject* r) { return reinterpret_cast<PyObject*>(Py_TYPE(at_(r, 0))) == at_(r, 1); })) return false;
  if (!every(g, HOMES, [](PyObject* r) { return same_home(at_(r, 0), at_(r, 1)); })) return false;
  for (Table& table : *g->tables)
    if (!table.hold()) return false;
  if (!every(g, ITEMS, [](PyObject* r) { return same_items(at_(r, 0), at_(r, 1)); })) return false;
  if (!every(g, RAWS, [](PyObject* r) { return same_bytes(at_(r, 0), at_(r, 1)); })) return false;
  if (!every(g, LOOKUPS, [](PyObject* r) { return same_lookup(at_(r, 0), at_(r, 1), at_(r, 2)); })) return false;
  if (!every(g, CODES, [](PyObject* r) { return PyFunction_GET_CODE(at_(r, 0)) == at_(r, 1); })) return false;
  if (!every(g, CELLS, [](PyObject* r) { return PyCell_GET(at_(r, 0)) == at_(r, 1); })) return false;
  for (const Facts& tensor : *g->tensors)
    if (!tensor.hold()) return false;
  return true;
}

// --- the Python type

bool well_formed(PyObject* args) {  // the caller is guard.py; this is against a wrong version of it, not against an attacker
  if (PyTuple_GET_SIZE(args) != KINDS) return false;
  const Py_ssize_t widths[KINDS] = {2, 2, 4, 2, 2, 0, 3, 2, 2, 0};  // 0: not a tuple
  for (int kind = 0; kind < KINDS; ++kind) {
    PyObject* records = at_(args, kind);
    if (!PyTuple_CheckExact(records)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(records); ++i) {
      PyObject* r = at_(records, i);
      if (widths[kind] && !(PyTuple_CheckExact(r) && PyTuple_GET_SIZE(r) == widths[kind])) return false;
      const bool right = kind == TABLES ? (PyDict_Check(at_(r, 0)) || PyType_Check(at_(r, 0))) && PyTuple_CheckExact(at_(r, 1)) &&
              PyTuple_CheckExact(at_(r, 2)) && PyTuple_GET_SIZE(at_(r, 1)) == PyTuple_GET_SIZE(at_(r, 2))
          : kind == ITEMS   ? PyTuple_CheckExact(at_(r, 1)) != 0
          : kind == RAWS    ? PyByteArray_CheckExact(at_(r, 0)) && PyBytes_CheckExact(at_(r, 1))
          : kind == EMPTIES ? PyDict_Check(r) != 0
          : kind == LOOKUPS ? PyDict_Check(at_(r, 0)) != 0
          : kind == CODES   ? PyFunction_Check(at_(r, 0)) != 0
          : kind == CELLS   ? PyCell_Check(at_(r, 0)) != 0
          : kind == TENSORS ? THPVariable_CheckExact(r)
                            : true;
      if (!right) return false;
    }
  }
  return true;
}

PyObject* guard_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  if ((kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0) || !well_formed(args)) {
    PyErr_SetString(PyExc_TypeError, "expected the ten tuples of records that torch_cudal1.guard makes");
    return nullptr;
  }
  THPObjectPtr self(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  auto* guard = reinterpret_cast<Guard*>(self.get());
  guard->records = Py_NewRef(args);
  guard->tables = new std::vector<Table>();
  guard->tensors = new std::vector<Facts>();
  every(guard, TABLES, [&](PyObject* r) {
    PyObject* owner = at_(r, 0);  // a class body cannot be replaced as a whole: its dictionary lives as long as the class
    PyObject* dict = PyType_Check(owner) ? reinterpret_cast<PyTypeObject*>(owner)->tp_dict : owner;
    guard->tables->push_back({dict, at_(r, 1), at_(r, 2), at_(r, 3) == Py_None ? nullptr : at_(r, 3), 0});
    return true;
  });
  every(guard, TENSORS, [&](PyObject* tensor) {
    guard->tensors->emplace_back(tensor, THPVariable_Unpack(tensor));
    return true;
  });
  return self.release();
  END_HANDLE_TH_ERRORS
}

int guard_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(reinterpret_cast<Guard*>(self)->records);
  return 0;
}

int guard_clear(PyObject* self) {
  auto* guard = reinterpret_cast<Guard*>(self);
  if (guard->tables) guard->tables->clear();
  if (guard->tensors) guard->tensors->clear();
  Py_CLEAR(guard->records);
  return 0;
}

void guard_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  guard_clear(self);
  auto* guard = reinterpret_cast<Guard*>(self);
  delete guard->tables;
  delete guard->tensors;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* guard_holds(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const auto* guard = reinterpret_cast<const Guard*>(self);
  return PyBool_FromLong(guard->records != nullptr && holds(guard));
  END_HANDLE_TH_ERRORS
}

// --- the signature

struct Span {
  uintptr_t begin, end;
};

class Writer {
 public:
  bool write(PyObject* value, int depth);  // false: not servable
  void write_overlaps();
  PyObject* finish() const { return PyBytes_FromStringAndSize(out_.data(), static_cast<Py_ssize_t>(out_.size())); }

 private:
  static constexpr int max_depth = 16;
  std::string out_;
  std::vector<Span> spans_;

  template <typename T>
  void put(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put_device(c10::Device device) {
    put(static_cast<int8_t>(device.type()));
    put(static_cast<int8_t>(device.index()));
  }
  bool write_tensor(const at::Tensor& t);
  bool write_text(PyObject* text);
  bool write_sequence(char mark, PyObject* const* items, Py_ssize_t size, int depth);
  bool write_dict(PyObject* dict, int depth);
};

bool Writer::write_tensor(const at::Tensor& t) {
  if (!plain(t)) return false;
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  put('T');
  put(static_cast<int8_t>(t.scalar_type()));
  put_device(t.device());
  put(static_cast<uint8_t>((t.requires_grad() ? 1 : 0) | (begin % 16 ? 0 : 2)));
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

bool Writer::write_text(PyObject* text) {  // length, width of a character and the characters: one form for one string
  const Py_ssize_t bytes = PyUnicode_GET_LENGTH(text) * PyUnicode_KIND(text);
  put('S');
  put(static_cast<uint8_t>(PyUnicode_KIND(text)));
  put(bytes);
  out_.append(static_cast<const char*>(PyUnicode_DATA(text)), bytes);
  return true;
}

bool Writer::write_sequence(char mark, PyObject* const* items, Py_ssize_t size, int depth) {
  if (depth >= max_depth) return false;
  put(mark);
  put(size);
  for (Py_ssize_t i = 0; i < size; ++i)
    if (!write(items[i], depth + 1)) return false;
  return true;
}

bool Writer::write_dict(PyObject* dict, int depth) {
  if (depth >= max_depth) return false;
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

bool Writer::write(PyObject* value, int depth) {
  PyTypeObject* type = Py_TYPE(value);
  if (THPVariable_CheckTypeExact(type)) return write_tensor(THPVariable_Unpack(value));
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
  if (PyList_CheckExact(value))
    return write_sequence('[', reinterpret_cast<PyListObject*>(value)->ob_item, PyList_GET_SIZE(value), depth);
  if (PyDict_CheckExact(value)) return write_dict(value, depth);
  if (THPDtype_Check(value)) return put('D'), put(static_cast<int8_t>(reinterpret_cast<THPDtype*>(value)->scalar_type)), true;
  if (THPDevice_Check(value)) return put('d'), put_device(reinterpret_cast<THPDevice*>(value)->device), true;
  return false;
}

void Writer::write_overlaps() {  // pairs, by their order among the arguments; few tensors, so every pair is looked at
  for (size_t i = 0; i < spans_.size(); ++i)
    for (size_t j = i + 1; j < spans_.size(); ++j) {
      const Span &a = spans_[i], &b = spans_[j];
      if (a.begin < b.end && b.begin < a.end && a.begin < a.end && b.begin < b.end)
        put('A'), put(static_cast<uint32_t>(i)), put(static_cast<uint32_t>(j));
    }
}

PyObject* signature(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !PyTuple_CheckExact(args[0]) || !PyDict_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "signature(args: tuple, kwargs: dict) expected");
    return nullptr;
  }
  Writer writer;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); ++i)
    if (!writer.write(PyTuple_GET_ITEM(args[0], i), 0)) Py_RETURN_NONE;
  if (!writer.write(args[1], 0)) Py_RETURN_NONE;
  writer.write_overlaps();
  return writer.finish();
  END_HANDLE_TH_ERRORS
}

PyMethodDef guard_methods[] = {
    {"holds", guard_holds, METH_NOARGS, "True while nothing differs from the snapshot."},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot guard_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(guard_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(guard_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(guard_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(guard_clear)},
    {Py_tp_methods, guard_methods},
    {0, nullptr},
};
PyType_Spec guard_spec = {
    "torch_cudal1._guard.Guard", sizeof(Guard), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, guard_slots};
PyMethodDef module_methods[] = {
    {"signature", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(signature)), METH_FASTCALL,
     "signature(args, kwargs) -> bytes | None"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_guard", nullptr, -1, module_methods};

}  // namespace

PyMODINIT_FUNC PyInit__guard() {
  THPObjectPtr module(PyModule_Create(&definition));
  if (!module) return nullptr;
  THPObjectPtr type(PyType_FromSpec(&guard_spec));
  if (!type || PyModule_AddObjectRef(module, "Guard", type) < 0) return nullptr;
  if (PyModule_AddStringConstant(module, "TORCH_VERSION", TORCH_VERSION) < 0) return nullptr;
  return module.release();
}
