// The module guard and the call signature in C++: the same answers as the plain Python in torch_cudal1/runtime/guard.py, in microseconds.
//
// Guard(kins, homes, tables, items, raws, empties, lookups, codes, cells, tensors) takes the records of torch_cudal1.runtime.guard_records as
// tuples and compares them with the present: identity everywhere, facts for tensors. Nothing here runs Python code of the user's:
// no attribute access, no comparison by value. signature.h describes the arguments of a call.
//
// A large model is thousands of objects, which a call finds outside the processor's caches: the time is that of waiting for memory.
// So what is looked at lies in flat arrays, whose next objects are fetched while one is compared.

#include "guard.h"

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "fetch.h"

namespace {

using cudal1::each, cudal1::fetch_line, cudal1::line;

// --- tensors

enum class Address : uint8_t { none, unaligned, aligned };

Address address_of(const at::Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return address == 0 ? Address::none : address % 16 ? Address::unaligned : Address::aligned;
}

struct Facts {  // torch_cudal1.runtime.guard_records.read_tensor_facts
  PyObject* tensor;  // borrowed from Guard::records
  PyTypeObject* kind;
  c10::DispatchKeySet keys;  // while they are the same, so are layout, storage, conjugation and negation
  const void *body, *storage, *autograd;  // where it was last: only to be fetched in advance, never read through
  at::ScalarType dtype;
  c10::Device device;
  bool requires_grad, conjugated, negated;
  Address address;
  c10::DimVector sizes, strides;  // inline up to five dimensions: one cache miss less a tensor

  Facts(PyObject* object, const at::Tensor& t)
      : tensor(object), kind(Py_TYPE(object)), keys(t.key_set()), body(t.unsafeGetTensorImpl()),
        storage(t.storage().unsafeGetStorageImpl()), autograd(t.unsafeGetTensorImpl()->autograd_meta()), dtype(t.scalar_type()),
        device(t.device()), requires_grad(t.requires_grad()), conjugated(t.is_conj()), negated(t.is_neg()), address(address_of(t)),
        sizes(t.sizes()), strides(t.strides()) {}

  void fetch() const {
    fetch_line(tensor);
    for (size_t offset = 0; offset < sizeof(c10::TensorImpl); offset += line) fetch_line(body, offset);
    fetch_line(storage), fetch_line(storage, line), fetch_line(autograd);
  }

  bool hold() const {
    if (Py_TYPE(tensor) != kind) return false;
    const at::Tensor& t = THPVariable_Unpack(tensor);
    const bool same_kind = t.key_set() == keys ||
        (t.layout() == at::kStrided && t.has_storage() && t.is_conj() == conjugated && t.is_neg() == negated);
    return same_kind && t.scalar_type() == dtype && t.device() == device && t.requires_grad() == requires_grad &&
        t.sizes() == at::IntArrayRef(sizes) && t.strides() == at::IntArrayRef(strides) && address_of(t) == address;
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
  PyTypeObject* owner;  // the class whose body `dict` is, or nullptr
  PyObject* mro;
  bool definitions_only;  // methods, classes and other descriptors count, no data of the class
  uint64_t version = 0;  // at which the content was last found right; 0: never

  bool hold() {
    if (owner != nullptr && owner->tp_mro != mro) return false;  // its bases were assigned
    const uint64_t now = version_of(dict);
    if (now != 0 && now == version) return true;
    if (!same_content()) return false;
    version = PyODict_CheckExact(dict) ? 0 : now;  // move_to_end leaves the version as it is
    return true;
  }

  bool same_content() const {
    if (values == Py_None) return same_names();
    const Py_ssize_t size = PyTuple_GET_SIZE(keys);
    const Py_ssize_t now = PyDict_GET_SIZE(dict);
    if (definitions_only) return hold_plain(size);
    if (now != size && !(ignored != nullptr && now == size + 1)) return false;
    return PyODict_CheckExact(dict) ? hold_ordered(size) : hold_plain(size);
  }

  bool same_names() const {  // bytes, in any order, but for those with the prefix `ignored`
    const char* prefix = PyBytes_AS_STRING(ignored);
    const size_t length = PyBytes_GET_SIZE(ignored), size = PyTuple_GET_SIZE(keys);
    size_t now = 0;
    Py_ssize_t position = 0;
    for (PyObject *key, *value; PyDict_Next(dict, &position, &key, &value);)
      if (!PyBytes_Check(key) || strncmp(PyBytes_AS_STRING(key), prefix, length) != 0) ++now;
    if (now != size) return false;
    for (size_t i = 0; i < size; ++i) {
      const int there = PyDict_Contains(dict, at_(keys, i));
      if (there < 0) throw python_error();
      if (there == 0) return false;
    }
    return true;
  }

  bool hold_plain(Py_ssize_t size) const {
    Py_ssize_t position = 0, i = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &position, &key, &value)) {
      if (ignored != nullptr && is_ignored(key)) continue;
      if (definitions_only && !is_definition(value)) continue;
      if (i == size || key != at_(keys, i) || value != at_(values, i)) return false;
      ++i;
    }
    return i == size;
  }

  // torch_cudal1.runtime.guard_records.is_definition
  static bool is_definition(PyObject* value) { return PyType_Check(value) || Py_TYPE(value)->tp_descr_get != nullptr; }

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

struct Kin {
  PyObject* thing;
  PyTypeObject* kind;
};

struct Home {
  PyObject *thing, *dict, **place;  // where an object with this class's layout has its dictionary; nullptr: ask it

  Home(PyObject* thing, PyObject* dict) : thing(thing), dict(dict), place(_PyObject_GetDictPtr(thing)) {
    if (place != nullptr && *place != dict) place = nullptr;
  }
  bool hold() const {
    if (place != nullptr) return *place == dict;
    THPObjectPtr now(PyObject_GenericGetDict(thing, nullptr));
    if (!now) PyErr_Clear();  // it has none any more, or another one in another thread
    return now.get() == dict;
  }
};

// The names of a class, or of a dict itself. Classes made in C have none here from Python 3.12 on, and no record names one.
PyObject* names_of(PyObject* table) { return PyType_Check(table) ? reinterpret_cast<PyTypeObject*>(table)->tp_dict : table; }

struct Lookup {
  PyObject *key, *value;  // value: nullptr where the name was absent
};

struct Lookups {  // of names in one dict, or in the body of one class
  PyObject* dict;
  std::vector<Lookup> names;
  uint64_t version = 0;  // at which all were last found right; 0: never

  bool hold() {
    const uint64_t now = version_of(dict);
    if (now != 0 && now == version) return true;
    for (const Lookup& name : names) {
      PyObject* value = PyDict_GetItemWithError(dict, name.key);
      if (value == nullptr && PyErr_Occurred()) throw python_error();
      if (value != name.value) return false;
    }
    // Read before the names: a key's own __eq__ may have changed the dict meanwhile.
    version = now;
    return true;
  }
};

bool same_function(PyObject* record) {
  PyObject *function = at_(record, 0), *defaults = PyFunction_GET_DEFAULTS(function), *named = PyFunction_GET_KW_DEFAULTS(function);
  return PyFunction_GET_CODE(function) == at_(record, 1) && (defaults == nullptr ? Py_None : defaults) == at_(record, 2) &&
      (named == nullptr ? Py_None : named) == at_(record, 3);
}

enum Kind { KINS, HOMES, TABLES, ITEMS, RAWS, EMPTIES, LOOKUPS, CODES, CELLS, TENSORS, KINDS };

struct Flat {  // the records that large models have many of
  std::vector<Kin> kins;
  std::vector<Home> homes;
  std::vector<PyObject*> empties;
  std::vector<Table> tables;
  std::vector<Lookups> lookups;
  std::vector<Facts> tensors;
  std::unordered_set<PyObject*> tensor_set;
};

struct Guard {
  PyObject_HEAD
  PyObject* records;  // the constructor's arguments; owns everything
  Flat* flat;
};

template <typename Test>
bool every(const Guard* guard, Kind kind, Test test) {
  PyObject* records = at_(guard->records, kind);
  for (Py_ssize_t i = 0, n = PyTuple_GET_SIZE(records); i < n; ++i)
    if (!test(at_(records, i))) return false;
  return true;
}

bool are_empty(std::vector<PyObject*>& dicts) {
  return each(dicts, [](PyObject* dict) { fetch_line(dict); }, [](PyObject* dict) { return PyDict_GET_SIZE(dict) == 0; });
}

bool hold_all(std::vector<Table>& tables) {
  return each(tables, [](const Table& table) { fetch_line(table.dict); }, [](Table& table) { return table.hold(); });
}

bool holds(const Guard* g) {
  Flat& flat = *g->flat;
  const auto fetch_kin = [](const Kin& kin) { fetch_line(kin.thing); };
  if (!each(flat.kins, fetch_kin, [](const Kin& kin) { return Py_TYPE(kin.thing) == kin.kind; })) return false;
  const auto fetch_home = [](const Home& home) { fetch_line(home.place); };
  if (!each(flat.homes, fetch_home, [](const Home& home) { return home.hold(); })) return false;
  if (!are_empty(flat.empties) || !hold_all(flat.tables)) return false;
  if (!every(g, ITEMS, [](PyObject* r) { return same_items(at_(r, 0), at_(r, 1)); })) return false;
  if (!every(g, RAWS, [](PyObject* r) { return same_bytes(at_(r, 0), at_(r, 1)); })) return false;
  const auto fetch_names = [](const Lookups& names) { fetch_line(names.dict); };
  if (!each(flat.lookups, fetch_names, [](Lookups& names) { return names.hold(); })) return false;
  if (!every(g, CODES, same_function)) return false;
  if (!every(g, CELLS, [](PyObject* r) { return PyCell_GET(at_(r, 0)) == at_(r, 1); })) return false;
  return each(flat.tensors, [](const Facts& tensor) { tensor.fetch(); }, [](const Facts& tensor) { return tensor.hold(); });
}

// --- the Python type

bool well_formed(PyObject* args) {  // the caller is guard.py; this is against another version of it, not against an attacker
  using Test = bool (*)(PyObject*);
  const Test any = [](PyObject*) { return true; };
  const Test table = [](PyObject* r) {
    PyObject *owner = at_(r, 0), *keys = at_(r, 1), *values = at_(r, 2);
    const bool ordered = PyType_Check(owner) ? PyTuple_CheckExact(at_(r, 4)) : at_(r, 4) == Py_None;
    const bool paired = ordered && PyTuple_CheckExact(keys) &&
        (values == Py_None ? PyBytes_CheckExact(at_(r, 3)) != 0
                           : PyTuple_CheckExact(values) && PyTuple_GET_SIZE(keys) == PyTuple_GET_SIZE(values));
    return (PyDict_Check(owner) || PyType_Check(owner)) && names_of(owner) != nullptr && paired;
  };
  const struct {
    Py_ssize_t width;  // of the record; 0: it is no tuple
    Test test;
  } forms[KINDS] = {
      {2, any}, {2, any}, {6, table},
      {2, [](PyObject* r) { return PyTuple_CheckExact(at_(r, 1)) != 0; }},
      {2, [](PyObject* r) { return PyByteArray_CheckExact(at_(r, 0)) && PyBytes_CheckExact(at_(r, 1)); }},
      {0, [](PyObject* r) { return PyDict_Check(r) != 0; }},
      {4, [](PyObject* r) {
         PyObject* table = at_(r, 0);
         return (PyDict_Check(table) || PyType_Check(table)) && names_of(table) != nullptr;
       }},
      {4, [](PyObject* r) { return PyFunction_Check(at_(r, 0)) != 0; }},
      {2, [](PyObject* r) { return PyCell_Check(at_(r, 0)) != 0; }},
      {0, [](PyObject* r) { return THPVariable_CheckExact(r); }},
  };
  if (PyTuple_GET_SIZE(args) != KINDS) return false;
  for (int kind = 0; kind < KINDS; ++kind) {
    PyObject* records = at_(args, kind);
    if (!PyTuple_CheckExact(records)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(records); ++i) {
      PyObject* r = at_(records, i);
      const Py_ssize_t width = forms[kind].width;
      if (width != 0 && !(PyTuple_CheckExact(r) && PyTuple_GET_SIZE(r) == width)) return false;
      if (!forms[kind].test(r)) return false;
    }
  }
  return true;
}

std::unique_ptr<Flat> flattened(const Guard* guard) {
  auto flat = std::make_unique<Flat>();
  every(guard, KINS, [&](PyObject* r) {
    return flat->kins.push_back({at_(r, 0), reinterpret_cast<PyTypeObject*>(at_(r, 1))}), true;
  });
  every(guard, HOMES, [&](PyObject* r) { return flat->homes.emplace_back(at_(r, 0), at_(r, 1)), true; });
  every(guard, EMPTIES, [&](PyObject* hooks) { return flat->empties.push_back(hooks), true; });
  every(guard, TABLES, [&](PyObject* r) {
    PyObject* owner = at_(r, 0);  // a class body cannot be replaced as a whole: its dictionary lives as long as the class
    auto* type = PyType_Check(owner) ? reinterpret_cast<PyTypeObject*>(owner) : nullptr;
    PyObject* ignored = at_(r, 3) == Py_None ? nullptr : at_(r, 3);
    flat->tables.push_back({names_of(owner), at_(r, 1), at_(r, 2), ignored, type, at_(r, 4), at_(r, 5) == Py_True, 0});
    return true;
  });
  std::unordered_map<PyObject*, size_t> numbers;  // of a dict among `lookups`
  every(guard, LOOKUPS, [&](PyObject* r) {  // (table, key, value, absent)
    PyObject* dict = names_of(at_(r, 0));
    const auto [place, is_new] = numbers.try_emplace(dict, flat->lookups.size());
    if (is_new) flat->lookups.push_back({dict, {}, 0});
    flat->lookups[place->second].names.push_back({at_(r, 1), at_(r, 3) == Py_True ? nullptr : at_(r, 2)});
    return true;
  });
  every(guard, TENSORS, [&](PyObject* tensor) {
    flat->tensors.emplace_back(tensor, THPVariable_Unpack(tensor));
    return flat->tensor_set.insert(tensor), true;
  });
  return flat;
}

PyObject* guard_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  HANDLE_TH_ERRORS
  if ((kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0) || !well_formed(args)) {
    PyErr_SetString(PyExc_TypeError, "expected the ten tuples of records that torch_cudal1.runtime.guard makes");
    return nullptr;
  }
  THPObjectPtr self(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  auto* guard = reinterpret_cast<Guard*>(self.get());
  guard->records = Py_NewRef(args);
  guard->flat = flattened(guard).release();
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
  Py_CLEAR(guard->records);
  return 0;
}

void guard_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  guard_clear(self);
  auto* guard = reinterpret_cast<Guard*>(self);
  delete guard->flat;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* guard_holds(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(cudal1::guard_holds_now(self));
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
    "torch_cudal1._native.Guard", sizeof(Guard), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, guard_slots};

PyTypeObject* guard_type = nullptr;

}  // namespace

namespace cudal1 {

bool add_guard_type(PyObject* module) {
  PyObject* type = PyType_FromSpec(&guard_spec);
  if (type == nullptr) return false;
  guard_type = reinterpret_cast<PyTypeObject*>(type);  // lives as long as the process
  return PyModule_AddObjectRef(module, "Guard", type) == 0;
}

bool is_guard(PyObject* object) { return Py_TYPE(object) == guard_type; }

bool guard_holds_now(PyObject* object) {
  const auto* guard = reinterpret_cast<const Guard*>(object);
  return guard->records != nullptr && holds(guard);
}

bool guard_has_tensor(PyObject* object, PyObject* tensor) {
  const auto& tensors = reinterpret_cast<const Guard*>(object)->flat->tensor_set;
  return tensors.find(tensor) != tensors.end();
}

}  // namespace cudal1
