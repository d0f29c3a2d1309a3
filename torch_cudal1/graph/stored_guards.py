"""What a capture read besides the module itself, as steps that another process takes again without
Dynamo.

        capture ──> StoredGuards (JSON) ──another process──> the same records, of the objects that are there

Only captures have them whose guards are implied by records, but for two kinds that a check in
Python asks: whether a tensor among the arguments has an attribute, and what a property is. The
steps say where to look, not what to find: that is the digest of the records
(`runtime.record_digest`).
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.dynamo import DynamoCapture
from torch_cudal1.graph.dynamo_guard_records import UnprovenError
from torch_cudal1.graph.dynamo_guard_sources import (
    ITEM_STEPS,
    find_root_source,
    find_source_kind,
    steps_of,
)
from torch_cudal1.graph.dynamo_guards import GuardSplit, find_owner_source
from torch_cudal1.graph.traced_code import CodeKey
from torch_cudal1.runtime.guard_records import GuardRecords

__all__ = [
    "PresentGuards",
    "StoredGuards",
    "StoredSource",
    "encode_guards",
    "make_check",
    "read_stored_guards",
]

_BUILTINS = "__builtins_dict__"
_IMPORT = "import "
# Of a source, the attributes that say what its step reads.
_DETAILS = ("member", "index", "idx_key", "is_kw")
# A record with more is damaged.
_MAX_STEPS = 64
# Steps that read a property, and how.
_PROPERTY_STEPS: Mapping[str, Callable[[Any, str], Any]] = {
    "AttrSource": getattr,
    "GenericAttrSource": object.__getattribute__,
}
_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class StoredGuards:
    """`guards`: those that add records to a walk over the module, as (kind, source, other source);
    `inputs`: for each placeholder the number of a tensor among the arguments, or the source of a
    tensor of the module; `unchanged`: attributes that the call assigns what they are, as (source of
    the owner, name); `checks`: what no record implies and every call asks, see `make_check`;
    `codes`: the keys of the code that was traced.
    """

    guards: tuple[Any, ...]
    inputs: tuple[Any, ...]
    unchanged: tuple[Any, ...]
    checks: tuple[Any, ...]
    codes: tuple[Any, ...]

    def to_json(self) -> dict[str, Any]:
        """Lists, texts and numbers."""
        return {name: list(value) for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoredGuards:
        """Raises KeyError and TypeError for something else."""
        return cls(*(tuple(data[field.name]) for field in fields(cls)))


class StoredSource:
    """A source of Dynamo's, read from its steps. `stored_kind` is the name of its class there."""

    def __init__(self, steps: Sequence[Any]) -> None:
        *before, (self.stored_kind, details) = steps
        self.name = json.dumps(steps)
        self.base = StoredSource(before) if before else None
        for detail, value in details.items():
            if detail not in (*_DETAILS, "local_name", "global_name"):
                raise ValueError(f"a source with a {detail!r}")
            setattr(self, detail, StoredSource(value) if isinstance(value, list) else value)


@dataclass(frozen=True)
class _StoredEntry:
    """What `GuardSplit` asks of a guard."""

    guard_type: str
    orig_guard: Any
    name: str = ""
    has_value: bool = False
    value: Any = None


def encode_guards(
    split: GuardSplit, placeholders: Sequence[int | torch.Tensor], capture: DynamoCapture
) -> StoredGuards | Refusal:
    """The guards of a capture, and the sources of its graph's inputs; `placeholders` says which of
    these are arguments.
    """
    names = capture.globals
    if split.unreached_code:
        file, name, line = split.unreached_code[0]
        return Refusal(f"no value leads to the code of {name} ({file}:{line}), which was traced")
    try:
        return StoredGuards(
            tuple(_encode_guard(entry, names) for entry in split.recorded_entries),
            tuple(
                place if isinstance(place, int) else _encode_source(source, names)
                for source, place in zip(capture.sources, placeholders, strict=True)
            ),
            tuple([_encode_source(item.source, names), item.name] for item in capture.unchanged),
            tuple(_encode_check(entry, split, capture) for entry in split.kept_entries),
            tuple(map(list, sorted(capture.traced_code))),
        )
    except UnprovenError as error:
        return Refusal(f"a source that cannot be stored: {error}")


def _encode_guard(entry: Any, names: Mapping[str, Any]) -> list[Any]:
    source, other = entry.orig_guard.originating_source, None
    if entry.guard_type == "HASATTR":
        source = find_owner_source(entry, source)
    if entry.guard_type == "DUPLICATE_INPUT":
        other = _encode_source(entry.orig_guard.create_fn.keywords["source_b"], names)
    return [entry.guard_type, _encode_source(source, names), other]


def _encode_check(entry: Any, split: GuardSplit, capture: DynamoCapture) -> list[Any]:
    """A guard that only Dynamo checks: whether a tensor among the arguments has an attribute, or
    what a property of an object is.
    """
    source, kind = entry.orig_guard.originating_source, entry.guard_type
    if kind == "HASATTR":
        owner = find_owner_source(entry, source)
        steps = [*reversed([*steps_of(owner)])]
        indices, root = [getattr(step, "index", None) for step in steps], find_root_source(owner)
        is_item = all(find_source_kind(step) in ITEM_STEPS for step in steps)
        if is_item and all(type(index) in (int, str) for index in indices):
            tensor = _read_argument(capture.locals, root.local_name, indices)
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                name = (
                    source.member
                    if owner is not source
                    else entry.orig_guard.create_fn.keywords["attr"]
                )
                return ["has attribute", root.local_name, indices, name, hasattr(tensor, name)]
    if kind == "CONSTANT_MATCH" and find_source_kind(source) in _PROPERTY_STEPS:
        owner, value = split.read(source.base), entry.value
        is_property = isinstance(inspect.getattr_static(type(owner), source.member, None), property)
        if is_property and type(value) in _CONSTANTS:
            place = _encode_source(source.base, capture.globals)
            return ["property", place, find_source_kind(source), source.member, value]
    raise UnprovenError(f"only Dynamo checks {kind} {entry.name}")


def _read_argument(scope: Mapping[str, Any], root: str, indices: Sequence[Any]) -> Any:
    return functools.reduce(operator.getitem, indices, scope[root])


def make_check(stored: StoredGuards, split: GuardSplit) -> Callable[[dict[str, Any]], bool] | None:
    """What tells, given {module, args, kwargs}, whether tensors among the arguments have the
    attributes that they had, and no others of these, and whether properties are what they were;
    None where nothing is asked. Raises as `read_stored_guards`.
    """
    attributes: list[tuple[str, tuple[Any, ...], str, bool]] = []
    properties: list[tuple[Callable[[Any, str], Any], Any, str, Any]] = []
    for word, *details in stored.checks:
        if word == "has attribute":
            root, indices, name, is_there = details
            attributes.append((str(root), tuple(indices), str(name), bool(is_there)))
        else:
            place, kind, name, value = details
            owner = split.read(_decode_source(place))
            if not isinstance(inspect.getattr_static(type(owner), name, None), property):
                raise UnprovenError(f"{name} is no property")
            split.visit(owner)
            properties.append((_PROPERTY_STEPS[kind], owner, name, value))
    if not attributes and not properties:
        return None

    def check(scope: dict[str, Any]) -> bool:
        for read, owner, name, value in properties:
            now = read(owner, name)
            # `1 == True`, but the types differ, and so may what the forward does.
            if type(now) is not type(value) or now != value:
                return False
        return all(
            hasattr(_read_argument(scope, root, indices), name) is is_there
            for root, indices, name, is_there in attributes
        )

    return check


def _encode_source(source: Any, names: Mapping[str, Any]) -> list[Any]:
    chain = [*steps_of(source)]
    root = chain[-1].base if chain else source
    return [
        _encode_root(root, names),
        *([find_source_kind(step), _encode_details(step, names)] for step in reversed(chain)),
    ]


def _encode_root(root: Any, names: Mapping[str, Any]) -> list[Any]:
    if getattr(root, "local_name", "") == "module":
        return ["LocalSource", {"local_name": "module"}]
    name = str(getattr(root, "global_name", ""))
    # Dynamo numbers these names anew in each process.
    if name.startswith(_BUILTINS):
        return ["GlobalSource", {"global_name": _BUILTINS}]
    value = names.get(name)
    if isinstance(value, types.ModuleType):
        return ["GlobalSource", {"global_name": f"{_IMPORT}{value.__name__}"}]
    raise UnprovenError(name or type(root).__name__)


def _encode_details(step: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    details: dict[str, Any] = {}
    for name in _DETAILS:
        value = getattr(step, name, None)
        if hasattr(value, "base"):
            value = _encode_source(value, names)
        elif not isinstance(value, (str, int, bool, type(None))):
            raise UnprovenError(f"{name} {type(value).__name__}")
        if hasattr(step, name):
            details[name] = value
    return details


@dataclass(frozen=True)
class PresentGuards:
    """The guards of the present objects: the records to compare, where each placeholder's tensor
    lies (the tensor, or its number among the arguments), and the check of `make_check`.
    """

    records: GuardRecords
    placeholders: tuple[int | torch.Tensor, ...]
    check: Callable[[dict[str, Any]], bool] | None


def read_stored_guards(
    stored: StoredGuards, module: torch.nn.Module, walked: GuardRecords
) -> PresentGuards:
    """The stored guards, of `module` and the other objects that are there; `walked`: the records of
    a walk over the module.

    Raises UnprovenError, LookupError, TypeError, ValueError or AttributeError where the objects are
    not there, or where the steps are damaged.
    """
    codes = {(str(file), str(name), int(line)): None for file, name, line in stored.codes}
    frame = _StoredFrame({"module": module}, _PresentModules(), codes)
    split = GuardSplit(frame, walked)
    for owner, name in stored.unchanged:
        split.add_attribute(split.read(_decode_source(owner)), name)
    for kind, source, other in stored.guards:
        keywords = {} if other is None else {"source_b": _decode_source(other)}
        # `attr`: the source is the owner's already.
        create = types.SimpleNamespace(keywords={"attr": "", **keywords})
        guard = types.SimpleNamespace(originating_source=_decode_source(source), create_fn=create)
        value = split.read(guard.originating_source)
        entry = _StoredEntry(str(kind), guard, has_value=True, value=value)
        if any(split.keep([entry])):
            raise UnprovenError(f"{kind} is not implied by records here")
    placeholders = tuple(
        place if isinstance(place, int) else split.read(_decode_source(place))
        for place in stored.inputs
    )
    check = make_check(stored, split)
    return PresentGuards(split.merge_records(), placeholders, check)


def _decode_source(steps: Any) -> StoredSource:
    if not isinstance(steps, list) or not 0 < len(steps) <= _MAX_STEPS:
        raise ValueError("damaged steps of a source")
    return StoredSource(steps)


@dataclass(frozen=True)
class _StoredFrame:
    """What a `GuardSplit` asks of a capture."""

    locals: Mapping[str, Any]
    globals: Mapping[str, Any]
    traced_code: Mapping[CodeKey, types.CodeType | None]
    unchanged: tuple[Any, ...] = ()


class _PresentModules(dict[str, Any]):
    """The modules that this process has imported, by the names of stored sources."""

    def __contains__(self, name: object) -> bool:
        text = str(name)
        return text == _BUILTINS or text.removeprefix(_IMPORT) in sys.modules

    def __getitem__(self, name: str) -> Any:
        return None if name == _BUILTINS else sys.modules[name.removeprefix(_IMPORT)]
