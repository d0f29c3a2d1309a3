"""Divides Dynamo's guards of a captured call among its checkers: none is checked twice, all in C++.

        Dynamo's guards ──> implied by the arguments' signature and the state of the process: dropped
                        ├─> implied by the identity of a chain of objects: records for ModuleGuard, 5 ns each
                        └─> all else: kept in Dynamo's own tree

Where every step of a guard's source is one whose outcome a record can compare (the same object as
when the call was captured), the value is the same object, and a guard on something immutable holds.
A step that no record can compare proves nothing, and its guard is kept.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping
from typing import Any

import torch

from torch_cudal1.core.code_names import read_code_names
from torch_cudal1.graph.dynamo import Entries
from torch_cudal1.graph.dynamo_guard_records import RecordCollector, UnprovenError
from torch_cudal1.graph.dynamo_guard_sources import (
    ITEM_STEPS,
    NAMED,
    AttributeDict,
    GuardedFrame,
    SourceReader,
    find_root_source,
    find_source_kind,
    steps_of,
)
from torch_cudal1.graph.traced_code import CodeKey, CodeVisitor
from torch_cudal1.runtime.guard_records import GuardRecords
from torch_cudal1.runtime.opaque_types import PLAIN_TYPES

__all__ = ["GuardSplit", "find_owner_source"]

# Said by guard.call_state and guard.find_tracing, or by the arguments' signature where shapes are
# static.
_STATE = frozenset(
    {
        "GRAD_MODE",
        "DETERMINISTIC_ALGORITHMS",
        "GLOBAL_STATE",
        "TORCH_FUNCTION_STATE",
        "DEFAULT_DEVICE",
        "SHAPE_ENV",
    }
    | {"AUTOGRAD_SAVED_TENSORS_HOOKS", "DUAL_LEVEL", "FUNCTORCH_STACK_MATCH"}
)
_OF_IDENTITY = frozenset(
    {
        "ID_MATCH",
        "CLASS_MATCH",
        "MODULE_MATCH",
        "FUNCTION_MATCH",
        "CLOSURE_MATCH",
        "BUILTIN_MATCH",
        "CONSTANT_MATCH",
        "EQUALS_MATCH",
    }
)
_OF_TYPE = frozenset({"TYPE_MATCH", "NN_MODULE"})
_OF_CONTENT = frozenset(
    {
        "DICT_CONTAINS",
        "DICT_NOT_CONTAINS",
        "DICT_KEYS_MATCH",
        "DICT_CONST_KEYS",
        "DICT_VERSION",
        "SEQUENCE_LENGTH",
        "LENGTH_CHECK",
    }
    | {"NOT_PRESENT_IN_GENERIC_DICT"}
)
# The C++ signature stops at a depth too: a deeper argument keeps Dynamo's guard.
_MAX_LEVELS = 16  # of containers, in a signature
# Where the traced code reads one of these, Dynamo's own guard of the global state stays:
# guard.call_state says only what changes the operators of a call on its device.
_STATE_READS = frozenset(
    {
        "allow_tf32",
        "fp32_precision",
        "get_float32_matmul_precision",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "get_deterministic_debug_mode",
        "is_deterministic_algorithms_warn_only_enabled",
        "is_autocast_cache_enabled",
        "get_autocast_dtype",
        "get_autocast_gpu_dtype",
        "get_autocast_cpu_dtype",
    }
)
_WITHOUT_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class GuardSplit:
    """`keep` is for `DynamoCapture.guards`; after it ran, `merge_records()` is what the module's
    guard has to compare, `recorded_entries` are the guards for which records were added to those of
    the walk, and `kept_entries` those that Dynamo's tree goes on checking.
    """

    def __init__(self, capture: GuardedFrame, walked: GuardRecords) -> None:
        self.capture = capture
        self.kept_entries: list[Any] = []
        self.recorded_entries: list[Any] = []
        self._collector = RecordCollector(walked)
        self._reader = SourceReader(capture, self._collector)
        self._visitor = CodeVisitor(capture.traced_code, self._collector)
        self._reads_state = any(
            code is not None and _STATE_READS & read_code_names(code).names
            for code in capture.traced_code.values()
        )
        # Names of code that no value leads to, which another process cannot find.
        self.unreached_code: list[CodeKey] = []
        self._visitor.visit_walk(walked)
        # The call assigns a value that is there already. That is no effect only while it is still
        # there.
        for unchanged in capture.unchanged:
            self.add_attribute(unchanged.owner, unchanged.name)

    def keep(self, entries: Entries) -> list[bool]:
        """For each guard whether Dynamo's tree goes on checking it."""
        keeps = []
        for entry in entries:
            before = self._collector.count
            keeps.append(self._must_keep(entry))
            if keeps[-1]:
                self.kept_entries.append(entry)
            elif self._collector.count != before:
                self.recorded_entries.append(entry)
        codes = {key: code for key, code in self.capture.traced_code.items() if code is not None}
        self.unreached_code += self._visitor.visit_remaining(codes)
        return keeps

    @property
    def kept_guards(self) -> list[str]:
        """The names of the guards that Dynamo's tree goes on checking."""
        return [f"{entry.guard_type} {entry.name}" for entry in self.kept_entries]

    def add_attribute(self, owner: Any, name: str) -> None:
        """Compare what the attribute `name` in the dictionary of `owner` is."""
        self._collector.add_lookup(vars(owner), name, vars(owner)[name])

    def read(self, source: Any) -> Any:
        """What `source` reads, once records say that it stays this. Raises UnprovenError."""
        return self._reader.read(source)

    def visit(self, value: Any) -> None:
        """Record how traced code finds the methods of `value`."""
        self._visitor.visit(value)

    def merge_records(self) -> GuardRecords:
        """The records of the walk over the module, and those for Dynamo's guards."""
        return self._collector.merge()

    def holds_identity(self, source: Any) -> bool:
        """Whether `source` reads the very same tensor for as long as the records hold."""
        try:
            return self._collector.has_tensor(self._reader.read(source))
        except UnprovenError:
            return False

    def _must_keep(self, entry: Any) -> bool:
        # Dropped, because the dispatcher compares this state before each call anyway.
        if entry.guard_type in _STATE:
            return self._reads_state and entry.guard_type == "GLOBAL_STATE"
        source = entry.orig_guard.originating_source
        # Arguments are other objects in each call, so identity proves nothing about them.
        if getattr(find_root_source(source), "local_name", "") in ("args", "kwargs"):
            if entry.has_value:
                is_class = isinstance(entry.value, type)
                self._visitor.visit(entry.value if is_class else type(entry.value))
            return not _is_in_signature(entry, source, self.capture.locals)
        # Before any return: how Python finds the value's methods counts whatever becomes of this
        # guard.
        if entry.has_value:
            self._visitor.visit(entry.value)
        # the records of steps that were proven stay where a later one is not: they serve other
        # guards too
        try:
            if entry.guard_type == "HASATTR":
                return not self._collector.add_attributes(
                    self._reader.read(find_owner_source(entry, source))
                )
            return not self._is_implied(entry, self._reader.read(source))
        # Whatever could not be read keeps its guard: a slower check, never a missing one.
        except (UnprovenError, AttributeError, LookupError, TypeError):
            return True

    def _is_implied(self, entry: Any, value: Any) -> bool:
        """Whether the guard says nothing that the identity of its value does not. Notes what else
        must be compared.
        """
        kind = entry.guard_type
        if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            return (
                entry.name.endswith(_WITHOUT_HOOKS)
                or self._collector.has_table(value)
                or self._collector.add_content(value)
            )
        # The walk over the module records every tensor with its metadata, not only its identity.
        if kind == "TENSOR_MATCH":
            return self._collector.has_tensor(value)
        if kind == "DUPLICATE_INPUT":  # raises where the other one of the two is not proven
            return self._reader.read(entry.orig_guard.create_fn.keywords["source_b"]) is value
        if kind in _OF_CONTENT:
            is_attribute_dict = isinstance(value, AttributeDict)
            return self._collector.add_content(
                value.owner if is_attribute_dict else value,
                attributes=is_attribute_dict or kind.startswith("NOT_PRESENT"),
            )
        if kind in _OF_TYPE:
            return isinstance(value, AttributeDict) or self._collector.add_class(value)
        # Identity says nothing of a mutable object's content.
        if kind not in _OF_IDENTITY or not _is_immutable(value):
            return False
        # A function's `__code__` and defaults can be assigned while its identity stays.
        if isinstance(value, types.FunctionType):
            self._collector.add_function(value)
        return True


def _is_immutable(value: Any) -> bool:
    return isinstance(value, (*PLAIN_TYPES, types.CodeType, *NAMED, enum.Enum)) or (
        # Exact types: a subclass may carry attributes.
        type(value) in (tuple, frozenset) and all(map(_is_immutable, value))
    )


def find_owner_source(entry: Any, source: Any) -> Any:
    """The source of the thing that a guard on the presence of an attribute asks: PyTorch before
    2.13 names the attribute itself.
    """
    return source if "attr" in getattr(entry.orig_guard.create_fn, "keywords", {}) else source.base


def _is_in_signature(entry: Any, source: Any, locals_: Mapping[str, Any]) -> bool:
    """Whether it says no more than the arguments' signature (`guard.signature`): of plain
    containers, plain values and dense tensors in them. Of anything else among the arguments that
    says the class alone.
    """
    value: Any = locals_[find_root_source(source).local_name]
    steps = list(steps_of(source))
    # The signature describes no more levels than that.
    if len(steps) > _MAX_LEVELS:
        return False
    for step in reversed(steps):
        # The signature of an object that is no plain container says its class alone.
        if find_source_kind(step) not in ITEM_STEPS or not _is_described(value):
            return False
        try:
            value = value[step.index]
        except (LookupError, TypeError):
            return False
    if entry.guard_type == "TENSOR_MATCH":
        # A tensor subclass has state that dtype, shape and strides do not show.
        return type(value) in (torch.Tensor, torch.nn.Parameter)
    return bool(entry.has_value) and _is_described(value)


def _is_described(value: Any) -> bool:
    """Whether a signature tells this plain value, or this container apart from what is in it, from
    any other.
    """
    kind = type(value)
    if kind is int:
        # The C++ signature keeps integers in 64 bits.
        return bool(-(2**63) <= value < 2**63)
    if kind is dict:
        # Keys that are no strings are not part of the signature.
        return all(type(key) is str for key in value)
    return kind in (
        bool,
        str,
        float,
        type(None),
        torch.dtype,
        torch.device,
        tuple,
        list,
        torch.Size,
    )
