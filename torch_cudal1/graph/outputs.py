"""The form of a module's result, learnt from Dynamo's bytecode, so that a call builds it without
running that.

The bytecode is run twice with markers in the place of the graph's outputs. What is a marker in both
results is that output; what is the same object in both was there before; what differs was made by
the call and is made anew for each call: containers, dataclasses, `ModelOutput`, plain objects. A
result with anything else in it has no template, with the reason, and keeps the bytecode.
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.errors import NotLowerableError

__all__ = ["OutputTemplate", "iter_leaves", "learn_outputs", "make_template"]

# Takes the graph's outputs and the call's argument tensors.
_Build: TypeAlias = Callable[[Sequence[Any], Sequence[torch.Tensor]], Any]
_IMMUTABLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    type(None),
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    enum.Enum,
)
# Each level is a Python call: in the capture, and whenever a result is built.
_MAX_DEPTH = 32


@dataclass(frozen=True, eq=False)
class OutputTemplate:
    """`build(results, arguments)` is the module's result. `first`: it is the graph's first output
    as it is. `uses_arguments`: a tensor that the user passed is part of the result.
    """

    build: _Build
    first: bool
    uses_arguments: bool


def learn_outputs(
    run: Callable[[Sequence[torch.Tensor]], Any],
    count: int,
    arguments: Sequence[torch.Tensor],
    guarded: Mapping[int, torch.Tensor],
    fixed: Mapping[int, torch.Tensor],
) -> OutputTemplate:
    """The template of what `run` makes of `count` graph outputs.

    `arguments`: the tensors that the user passed. `guarded`: by id, the tensors whose identity a
    guard compares in every call. `fixed`: by number, the outputs that are an argument or a guarded
    tensor itself; they have no marker. Raises NotLowerableError for a result that holds anything
    else.
    """
    markers = [
        # Two sets of empty tensors: only their identity is read, and equal results of two runs show
        # what does not depend on the call.
        [fixed[number] if number in fixed else torch.empty(0) for number in range(count)]
        for _ in range(2)
    ]
    # Two runs: one alone cannot tell an object that the call makes from one that was there before.
    first, second = (run(batch) for batch in markers)
    return make_template((first, second), markers, arguments, guarded, fixed)


def make_template(
    results: tuple[Any, Any],
    markers: Sequence[Sequence[torch.Tensor]],
    arguments: Sequence[torch.Tensor],
    guarded: Mapping[int, torch.Tensor],
    fixed: Mapping[int, torch.Tensor],
) -> OutputTemplate:
    """The template of two results, in which `markers[0]` and `markers[1]` stand for the graph's
    outputs. Everything else as `learn_outputs`.
    """
    (first, second), count = results, len(markers[0])
    reader = _Reader(
        markers,
        fixed,
        # Reversed, so that the first position wins where the user passes one tensor twice.
        {id(tensor): number for number, tensor in reversed(list(enumerate(arguments)))},
        guarded,
    )
    build = reader.make_builder(first, second, 0)
    # An attribute set on a marker would be lost: a later call returns another tensor.
    if any(
        vars(marker)
        for batch in markers
        for number, marker in enumerate(batch)
        if number not in fixed
    ):
        raise NotLowerableError("its forward sets attributes of a tensor that it returns")
    return OutputTemplate(
        # `first`: a caller returns the output itself, and nothing is built.
        build,
        bool(count) and 0 not in fixed and first is markers[0][0],
        reader.uses_arguments,
    )


def iter_leaves(value: Any, kind: type, depth: int = 0) -> Iterator[Any]:
    """The objects of class `kind` in a result, in an order that depends on its form alone; one that
    it holds twice comes twice. Raises NotLowerableError where it nests too deep.
    """
    if depth > _MAX_DEPTH:
        raise NotLowerableError(f"its result nests deeper than {_MAX_DEPTH}")
    if isinstance(value, kind):
        yield value
        return
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += [part for _, part in _list_items(value)]
    elif isinstance(value, (list, tuple)):
        parts += value
    if not isinstance(value, (*_IMMUTABLE, torch.Tensor)):
        parts += getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from iter_leaves(part, kind, depth + 1)


class _Reader:
    """One pass over a pair of results."""

    def __init__(
        self,
        markers: Sequence[Sequence[torch.Tensor]],
        fixed: Mapping[int, torch.Tensor],
        arguments: Mapping[int, int],
        guarded: Mapping[int, torch.Tensor],
    ) -> None:
        self._numbers = [
            {id(marker): number for number, marker in enumerate(batch) if number not in fixed}
            for batch in markers
        ]
        self._arguments, self._held = arguments, guarded
        # Ids of containers seen so far: the template builds a tree, so one list held at two places
        # would become two lists.
        self._made: set[int] = set()
        self.uses_arguments = False

    def make_builder(self, first: Any, second: Any, depth: int) -> _Build:
        """What builds this part of a result."""
        if depth > _MAX_DEPTH:
            raise NotLowerableError(f"its result nests deeper than {_MAX_DEPTH}")
        # Tensors before the comparison below, which would ask `==` for a truth value of many.
        if isinstance(first, torch.Tensor):
            return self._make_tensor_builder(first, second)
        if first is second or (
            isinstance(first, _IMMUTABLE) and type(first) is type(second) and first == second
        ):
            # A mutable object that outlives the call may hold something else in a later call.
            if not isinstance(first, _IMMUTABLE):
                raise NotLowerableError(
                    f"its result holds a {type(first).__name__} that was there before the call"
                )
            return lambda results, arguments: first
        if type(first) is not type(second):
            raise NotLowerableError(
                f"its result holds a {type(first).__name__} that cannot be built again"
            )
        return self._make_object_builder(first, second, depth)

    def _make_tensor_builder(self, first: torch.Tensor, second: Any) -> _Build:
        number = self._numbers[0].get(id(first))
        if number is not None and self._numbers[1].get(id(second)) == number:
            return lambda results, arguments: results[number]
        # The same tensor in both runs is no output of the graph: the caller passed it, or the
        # module owns it.
        if first is second and (position := self._arguments.get(id(first))) is not None:
            self.uses_arguments = True
            return lambda results, arguments: arguments[position]
        # Safe only while a guard compares this tensor by identity.
        if first is second and id(first) in self._held:
            return lambda results, arguments: first
        raise NotLowerableError(
            "its result holds a tensor that is neither computed, passed in, nor the module's own"
        )

    def _make_object_builder(self, first: Any, second: Any, depth: int) -> _Build:
        kind = type(first)
        # Tuples are exempt: they are immutable, and CPython shares the empty one.
        if kind is not tuple:
            if id(first) in self._made:
                raise NotLowerableError(f"its result holds one {kind.__name__} twice")
            self._made.add(id(first))
        if isinstance(first, (tuple, list)):
            return self._make_sequence_builder(first, second, depth)
        items = _list_items(first) if isinstance(first, dict) else ()
        if isinstance(first, dict) and (
            # The order of keys is part of a dict, and users iterate over it.
            first.keys() != second.keys() or list(first) != list(second)
        ):
            raise NotLowerableError("its result holds a dict whose keys differ from call to call")
        parts = [
            (key, self.make_builder(value, dict.__getitem__(second, key), depth + 1))
            for key, value in items
        ]
        # A mutable key is an object of one call.
        if not all(isinstance(key, _IMMUTABLE) for key, _ in parts):
            raise NotLowerableError("its result holds a dict with keys that are not plain values")
        if kind is dict:
            return lambda results, arguments: {
                key: build(results, arguments) for key, build in parts
            }
        return self._make_instance_builder(first, second, parts, depth)

    def _make_sequence_builder(
        self, first: Sequence[Any], second: Sequence[Any], depth: int
    ) -> _Build:
        kind = type(first)
        if len(first) != len(second):
            raise NotLowerableError(
                f"its result holds a {kind.__name__} whose length differs from call to call"
            )
        parts = [self.make_builder(a, b, depth + 1) for a, b in zip(first, second, strict=True)]
        if kind is list:
            return lambda results, arguments: [build(results, arguments) for build in parts]
        if kind is tuple:
            return lambda results, arguments: tuple([build(results, arguments) for build in parts])
        if kind.__module__ == "torch.return_types":  # torch.max(x, 0) and its kind
            return lambda results, arguments: kind([build(results, arguments) for build in parts])  # type: ignore[call-arg]
        # A NamedTuple without attributes of its own.
        if (
            isinstance(first, tuple)
            and hasattr(kind, "_fields")
            and not getattr(first, "__dict__", None)
        ):
            # Not the class's own `__new__`, which may have other parameters than the fields.
            new: Callable[..., Any] = tuple.__new__
            return lambda results, arguments: new(
                kind, [build(results, arguments) for build in parts]
            )
        raise NotLowerableError(f"its result holds a {kind.__name__}, which is no plain container")

    def _make_instance_builder(
        self, first: Any, second: Any, items: Sequence[tuple[Any, _Build]], depth: int
    ) -> _Build:
        """An object with a `__dict__`, such as a dataclass, or a dict of a class of its own, such
        as a ModelOutput.
        """
        kind = type(first)
        base: Any = (
            OrderedDict
            if isinstance(first, OrderedDict)
            else dict
            if isinstance(first, dict)
            else object
        )
        if kind is OrderedDict:
            return lambda results, arguments: OrderedDict(
                [(key, build(results, arguments)) for key, build in items]
            )
        # A `__new__` of its own or slots hold state that `__dict__` does not show.
        if (
            kind.__new__ not in (object.__new__, dict.__new__, OrderedDict.__new__)
            or kind.__basicsize__ > _size_of(base)
            or _has_slots(kind, base)
        ):
            raise NotLowerableError(
                f"its result holds a {kind.__name__}, which cannot be built again from its attributes"
            )
        attributes, second_attributes = vars(first), vars(second)
        if list(attributes) != list(second_attributes):
            raise NotLowerableError(
                f"its result holds a {kind.__name__} whose attributes differ from call to call"
            )
        parts = [
            (name, self.make_builder(value, second_attributes[name], depth + 1))
            for name, value in attributes.items()
        ]

        def build(results: Sequence[Any], arguments: Sequence[torch.Tensor]) -> Any:
            # Without `__init__`, which is the user's code and may do more than store attributes.
            instance = base.__new__(kind)
            for key, of in items:
                # Past the class's `__setitem__`: ModelOutput's also sets an attribute, which
                # follows below.
                base.__setitem__(instance, key, of(results, arguments))
            vars(instance).update({name: of(results, arguments) for name, of in parts})
            return instance

        return build


def _list_items(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Keys and values, whatever a subclass makes of `items`."""
    return [(key, dict.__getitem__(table, key)) for key in dict.__iter__(table)]


class _Plain:
    pass


class _PlainDict(dict[Any, Any]):
    pass


class _PlainOrdered(OrderedDict[Any, Any]):
    pass


def _has_slots(kind: type, base: type) -> bool:
    """Whether a class declares slots of its own. One without `__weakref__` and with a single slot
    is no larger than a class without slots, so the size alone does not tell.
    """
    own_classes = (each for each in kind.__mro__ if each not in base.__mro__)
    return any(
        isinstance(member, types.MemberDescriptorType)
        for each in own_classes
        for member in vars(each).values()
    )


def _size_of(base: Any) -> int:
    """The size of an instance that keeps nothing but its `__dict__`: one with slots is larger."""
    sample: type = _PlainDict if base is dict else _PlainOrdered if base is OrderedDict else _Plain
    return sample.__basicsize__
