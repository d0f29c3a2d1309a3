"""What a capture read besides the module itself, as steps that another process takes again without
Dynamo.

        capture ──> StoredGuards (JSON) ──another process──> the same records, of the objects that are there

Only captures have them whose guards are implied by records, but for the question whether a tensor
among the arguments has an attribute. The steps say where to look, not
what to find: that is the digest of the records (`runtime.record_digest`).
"""

from __future__ import annotations

import functools
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
from torch_cudal1.runtime.guard_records import GuardRecords

__all__ = [
    "StoredGuards",
    "StoredSource",
    "encode_guards",
    "make_presence_check",
    "read_stored_guards",
]

_BUILTINS = "__builtins_dict__"
_IMPORT = "import "
# Of a source, the attributes that say what its step reads.
_DETAILS = ("member", "index", "idx_key", "is_kw")
# A record with more is damaged.
_MAX_STEPS = 64


@dataclass(frozen=True)
class StoredGuards:
    """`guards`: those that add records to a walk over the module, as (kind, source, other source);
    `inputs`: for each placeholder the number of a tensor among the arguments, or the source of a
    tensor of the module; `unchanged`: attributes that the call assigns what they are, as (source of the
    owner, name); `presence`: which attributes tensors among the arguments have, as ("args" or "kwargs",
    indices, name, whether it is there).
    """

    guards: tuple[Any, ...]
    inputs: tuple[Any, ...]
    unchanged: tuple[Any, ...]
    presence: tuple[Any, ...]

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
    """The guards of a capture, and the sources of its graph's inputs; `placeholders` says which of these
    are arguments.
    """
    names = capture.globals
    try:
        return StoredGuards(
            tuple(_encode_guard(entry, names) for entry in split.recorded_entries),
            tuple(
                place if isinstance(place, int) else _encode_source(source, names)
                for source, place in zip(capture.sources, placeholders, strict=True)
            ),
            tuple([_encode_source(item.source, names), item.name] for item in capture.unchanged),
            tuple(map(_encode_presence, split.kept_entries)),
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


def _encode_presence(entry: Any) -> list[Any]:
    """A guard that only Dynamo checks, where it asks a tensor among the arguments for an attribute."""
    source, tensor = entry.orig_guard.originating_source, entry.value
    if entry.guard_type == "HASATTR" and type(tensor) in (torch.Tensor, torch.nn.Parameter):
        owner = find_owner_source(entry, source)
        steps = list(reversed([*steps_of(owner)]))
        indices = [getattr(step, "index", None) for step in steps]
        name = entry.orig_guard.create_fn.keywords["attr"] if owner is source else source.member
        if all(find_source_kind(step) in ITEM_STEPS for step in steps) and all(
            type(index) in (int, str) for index in indices
        ):
            return [find_root_source(owner).local_name, indices, name, hasattr(tensor, name)]
    raise UnprovenError(f"only Dynamo checks {entry.guard_type} {entry.name}")


def make_presence_check(
    presence: Sequence[Any],
) -> Callable[[dict[str, Any]], bool] | None:
    """What tells, given {module, args, kwargs}, whether tensors among the arguments have the attributes
    that they had, and no others of these; None where nothing is asked.
    """
    if not presence:
        return None
    wanted = [
        (str(root), tuple(indices), str(name), bool(is_there))
        for root, indices, name, is_there in presence
    ]

    def check(scope: dict[str, Any]) -> bool:
        return all(
            hasattr(functools.reduce(operator.getitem, indices, scope[root]), name) is is_there
            for root, indices, name, is_there in wanted
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


def read_stored_guards(
    stored: StoredGuards, module: torch.nn.Module, walked: GuardRecords
) -> tuple[GuardSplit, list[int | torch.Tensor]]:
    """The `GuardSplit` of the present objects, and the tensor or the number of each placeholder.

    Raises UnprovenError, LookupError, TypeError, ValueError or AttributeError where the objects are not there,
    or where the steps are damaged.
    """
    split = GuardSplit(_StoredFrame({"module": module}, _PresentModules()), walked)
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
    inputs = [place if isinstance(place, int) else _decode_source(place) for place in stored.inputs]
    placeholders = [place if isinstance(place, int) else split.read(place) for place in inputs]
    return split, placeholders


def _decode_source(steps: Any) -> StoredSource:
    if not isinstance(steps, list) or not 0 < len(steps) <= _MAX_STEPS:
        raise ValueError("damaged steps of a source")
    return StoredSource(steps)


@dataclass(frozen=True)
class _StoredFrame:
    """What a `GuardSplit` asks of a capture."""

    locals: Mapping[str, Any]
    globals: Mapping[str, Any]
    unchanged: tuple[Any, ...] = ()


class _PresentModules(dict[str, Any]):
    """The modules that this process has imported, by the names of stored sources."""

    def __contains__(self, name: object) -> bool:
        text = str(name)
        return text == _BUILTINS or text.removeprefix(_IMPORT) in sys.modules

    def __getitem__(self, name: str) -> Any:
        return None if name == _BUILTINS else sys.modules[name.removeprefix(_IMPORT)]
