"""The records of a module guard: what is watched, what it was when the guard was bound, and where
it is.

Data only: `torch_cudal1.runtime.guard_builder` makes the records, `torch_cudal1.runtime.guard` and
`csrc/guard.cpp` compare them with the present.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

__all__ = [
    "ABSENT",
    "FACTS",
    "HEAP_TYPE",
    "IGNORED",
    "BytesMatch",
    "ClosureMatch",
    "DictContents",
    "DictIdentity",
    "EmptyHooks",
    "FunctionMatch",
    "GuardRecords",
    "NameMatch",
    "SequenceContents",
    "TensorMatch",
    "TypeMatch",
    "drop_state",
    "filter_names",
    "is_definition",
    "read_tensor_facts",
]

# accelerate() puts its callable here, and swapping it in is no change of the module. nn.Module
# drops this attribute when it is copied or pickled.
IGNORED = "_compiled_call_impl"
# Py_TPFLAGS_HEAPTYPE: a class made by Python code.
HEAP_TYPE = 1 << 9
_HOOKS_OF_ALL = "torch.nn.modules.module."
# In the order of `read_tensor_facts`.
FACTS = (
    "dtype",
    "device",
    "shape",
    "strides",
    "requires_grad",
    "layout",
    "address",
    "conjugate bit",
    "negative bit",
)


# Slots, because a large model has thousands of records, which every call goes through.
@dataclass(frozen=True, slots=True)
class TypeMatch:
    """The class of an object (Dynamo: TYPE_MATCH)."""

    where: str
    target: object
    kind: type


@dataclass(frozen=True, slots=True)
class DictIdentity:
    """The attribute dictionary of an object, which may be replaced as a whole."""

    where: str
    target: object
    table: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DictContents:
    """A dictionary whose keys and values stay the same objects in the same order, IGNORED left out
    where `skips_ignored`.

    Without `values` only its keys are compared: bytes, in any order, without those that begin with
    `ignored_prefix`. `entry_kind`: what one entry is, for messages ("parameter", "attribute").
    """

    where: str
    entry_kind: str
    table: Mapping[Any, Any]
    keys: tuple[object, ...]
    values: tuple[object, ...] | None
    skips_ignored: bool = False
    owner: type | None = None  # the class whose body `table` shows
    ignored_prefix: bytes = b""
    mro: tuple[type, ...] | None = None  # of `owner`: another one where its bases were assigned
    # Only what a class defines counts: methods, properties and the like, no counters.
    definitions_only: bool = False

    # For the environment, of which only the names count, and none that Inductor sets: by those
    # every Llama of transformers was bound anew until the module was given up.
    @classmethod
    def of_names(
        cls, where: str, entry_kind: str, table: dict[bytes, Any], *, ignored_prefix: bytes
    ) -> DictContents:
        """The record of which keys there are, whatever their values."""
        return cls(
            where,
            entry_kind,
            table,
            filter_names(table, ignored_prefix),
            None,
            ignored_prefix=ignored_prefix,
        )


def is_definition(value: object) -> bool:
    """Whether a value in the body of a class is a function, a class or another descriptor."""
    return isinstance(value, type) or hasattr(type(value), "__get__")


def filter_names(table: Iterable[bytes], prefix: bytes) -> tuple[bytes, ...]:
    """The names that do not begin with `prefix`."""
    return tuple(name for name in table if not name.startswith(prefix))


@dataclass(frozen=True, slots=True)
class SequenceContents:
    """A list, deque or set whose items stay the same objects in the same order."""

    where: str
    target: Any
    items: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class BytesMatch:
    """A bytearray and its bytes."""

    where: str
    target: bytearray
    content: bytes


@dataclass(frozen=True, slots=True)
class EmptyHooks:
    """A hook dictionary, empty at the walk."""

    where: str
    hooks: Mapping[Any, Any]


class _Absent:
    """The value of a `NameMatch` whose name was not there."""


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class NameMatch:
    """A name that a call looks up: in a dict, or in the body of a class. `value` is ABSENT where
    there was none.
    """

    where: str
    table: dict[Any, Any] | type
    key: Any
    value: object


@dataclass(frozen=True, slots=True)
class FunctionMatch:
    """A function, whose code reloading tools replace, and its default arguments."""

    where: str
    function: types.FunctionType
    code: types.CodeType
    defaults: tuple[object, ...] | None
    kwdefaults: dict[str, object] | None

    @classmethod
    def of(cls, where: str, function: types.FunctionType) -> FunctionMatch:
        """The record of a function as it is now."""
        return cls(
            where, function, function.__code__, function.__defaults__, function.__kwdefaults__
        )


@dataclass(frozen=True, slots=True)
class ClosureMatch:
    """A closure variable."""

    where: str
    cell: types.CellType
    value: object


@dataclass(frozen=True, slots=True)
class TensorMatch:
    """A parameter, buffer or attribute tensor. `p.data = t`, `.half()` and `.to()` change its facts
    but keep the object.
    """

    where: str
    tensor: torch.Tensor
    kind: type
    facts: tuple[object, ...]


@dataclass(frozen=True)
class GuardRecords:
    """Everything that a guard compares. It keeps the objects alive, so that their identities are
    not reused. It keeps no storage alive that a tensor has given up.
    """

    type_matches: tuple[TypeMatch, ...]
    dict_identities: tuple[DictIdentity, ...]
    dict_contents: tuple[DictContents, ...]
    sequences: tuple[SequenceContents, ...]
    byte_arrays: tuple[BytesMatch, ...]
    empty_hooks: tuple[EmptyHooks, ...]
    names: tuple[NameMatch, ...]
    functions: tuple[FunctionMatch, ...]
    closure_cells: tuple[ClosureMatch, ...]
    tensors: tuple[TensorMatch, ...]

    @classmethod
    def make_empty(cls) -> GuardRecords:
        """No record, for a collector to add to."""
        return cls(*(() for _ in fields(cls)))


def drop_state(watched: GuardRecords) -> GuardRecords:
    """The records that Dynamo's own guards do not cover when it runs a module: hooks, and the
    bodies and functions of classes. State is not among them.
    """
    # State is left out because a call that Dynamo runs may change it.
    bodies = tuple(table for table in watched.dict_contents if table.owner is not None)
    lookups = tuple(
        lookup
        for lookup in watched.names
        if isinstance(lookup.table, type) or lookup.where.startswith(_HOOKS_OF_ALL)
    )
    return replace(
        watched,
        dict_contents=bodies,
        sequences=(),
        byte_arrays=(),
        names=lookups,
        closure_cells=(),
        tensors=(),
    )


def read_tensor_facts(tensor: torch.Tensor) -> tuple[object, ...]:
    """The properties of a dense tensor that a compiled program relies on. Of the address only
    "none", "aligned" (to 16 bytes) or "unaligned" counts.
    """
    # Programs read the address at every call. Only its alignment is compiled into a kernel
    # (Triton's tt.divisibility, 16 bytes).
    address = tensor.data_ptr()
    place = "none" if not address else "unaligned" if address % 16 else "aligned"
    form = (
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.requires_grad,
        tensor.layout,
    )
    return (*form, place, tensor.is_conj(), tensor.is_neg())
