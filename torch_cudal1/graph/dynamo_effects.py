"""Lists the effects of a captured call that a graph cannot repeat, in words for the user.

Dynamo notes what a frame does to objects that were there before it: attributes it assigns, hooks it
registers, random numbers of Python it draws. An assignment of the value that is there already is
no effect, for as long as it has that value (`Unchanged`).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

__all__ = ["Unchanged", "list_effects", "returns_its_input"]

_IN_PLACE = tuple(
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)
_IN_PLACE_ON_METADATA = (  # in place, but on what a tensor is, not on what is in it
    *("set_", "resize_", "resize_as_", "as_strided_", "detach_", "squeeze_", "unsqueeze_"),
    *("transpose_", "swapaxes_", "swapdims_"),
)
_SLOTS = {"_buffers": "buffer", "_parameters": "parameter", "_modules": "submodule"}


@dataclass(frozen=True)
class Unchanged:
    """An attribute that the call assigns the value it has already: no effect, for as long as it has
    that value. `source`: where Dynamo read the owner (None: it does not say).
    """

    owner: Any
    name: str
    value: object
    source: Any = None


def list_effects(output: Any) -> tuple[list[str], tuple[Unchanged, ...]]:
    """What the call does to things that were there before it, besides writing to tensors, in words;
    and what it does in vain.
    """
    # Importing Dynamo takes long: it waits until a call is captured.
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = output.side_effects
    effect_texts: list[str] = []
    unchanged: list[Unchanged] = []
    for variable in effects.id_to_variable.values():
        # Objects that the frame made itself vanish with the call.
        existing = isinstance(
            variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)
        )
        if not (existing and effects.is_modified(variable)):
            continue
        # Private Dynamo state: there is no public list of side effects.
        assigned = dict(effects.store_attr_mutations.get(variable) or {})
        owner = getattr(variable, "value", None)
        in_vain = [
            Unchanged(owner, name, vars(owner)[name], getattr(variable, "source", None))
            for name, value in assigned.items()
            if _is_assigned(owner, name, value)
        ]
        # One assignment that changes something makes the whole object an effect.
        if len(in_vain) < len(assigned) or not (assigned or _puts_back(variable)):
            effect_texts.append(_describe_effect(variable, assigned))
        unchanged += in_vain
    # Hooks run in the backward, outside of the graph.
    if effects.tensor_hooks:
        effect_texts.append("registers hooks on tensors")
    # A call that runs without Dynamo's bytecode would not draw them.
    if getattr(output, "random_calls", None):
        effect_texts.append("draws from Python's random module")
    return effect_texts, tuple(unchanged)


def _puts_back(variable: Any) -> bool:
    """Whether a dict of Dynamo's holds under each key the very tensor that it held:
    `self.count += 1` stores the buffer again.
    """
    before, now = getattr(variable, "original_items", None), getattr(variable, "items", None)
    if not isinstance(before, dict) or not isinstance(now, dict) or len(before) != len(now):
        return False
    # Dynamo wraps keys, and makes a new wrapper for each look-up. `vt` is what it wraps.
    then = {id(getattr(key, "vt", key)): value for key, value in before.items()}
    return all(_is_same(then.get(id(getattr(key, "vt", key))), value) for key, value in now.items())


def _is_same(before: Any, now: Any) -> bool:
    """Whether two of Dynamo's variables are one, or one tensor."""
    if before is None or before is now:
        return before is now
    tensor = _find_example_tensor(before)
    return tensor is not None and tensor is _find_example_tensor(now)


def _is_assigned(owner: Any, name: str, value: Any) -> bool:
    """Whether the attribute is that already (one of Dynamo's variables): a plain value, or the very
    tensor.
    """
    attributes = getattr(owner, "__dict__", None)
    if type(attributes) is not dict or name not in attributes:
        return False
    now = attributes[name]
    # Before the comparison by value: `==` of tensors is no bool.
    if isinstance(now, torch.Tensor):
        return now is _find_example_tensor(value)
    if not value.is_python_constant():
        return False
    new = value.as_python_constant()
    return (
        # `1 == True` and `1 == 1.0`, but the types differ, and so may what the next call does.
        type(now) is type(new)
        and isinstance(now, (bool, int, float, str, type(None)))
        and bool(now == new)
    )


def _find_example_tensor(variable: Any) -> torch.Tensor | None:
    """The real tensor behind a graph input; None for anything else."""
    # Dynamo's variables are lazy until realised.
    node = getattr(getattr(variable.realize(), "proxy", None), "node", None)
    # `self.count += 1` stores the result of an in-place call, which is the buffer itself.
    while node is not None and returns_its_input(node):
        node = node.args[0]
    argument = None if node is None else node.meta.get("grapharg")
    example = getattr(argument, "example", None)
    return example if isinstance(example, torch.Tensor) else None


def returns_its_input(node: fx.Node) -> bool:
    """Whether it is written in place, or `x.to(...)` of a tensor that is so already: PyTorch
    returns the tensor itself.
    """
    if node.op == "call_function" and node.target in _IN_PLACE:
        return isinstance(node.args[0], fx.Node)
    # PyTorch's rule: a method whose name ends in one underscore writes in place and returns self.
    if node.op == "call_method" and re.fullmatch(r"[a-z]\w*[a-z]_", str(node.target)):
        return str(node.target) not in _IN_PLACE_ON_METADATA
    if (
        node.op != "call_method"
        or node.target != "to"
        or "copy" in node.kwargs
        # `x.to(dtype, non_blocking, copy)`: a positional True may be `copy`, which makes a new
        # tensor.
        or True in node.args
    ):
        return False
    before, after = (
        each.meta["example_value"] for each in (node.args[0], node) if isinstance(each, fx.Node)
    )
    return bool(
        before.dtype == after.dtype
        and before.device == after.device
        # `to(memory_format=...)` copies where strides change.
        and before.stride() == after.stride()
    )


def _describe_effect(variable: Any, attributes: Mapping[str, Any]) -> str:
    where = _spell_source(variable.source)
    if attributes:
        return f"assigns {', '.join(f'{where}.{name}' for name in attributes)}"
    for slot, noun in _SLOTS.items():
        if where.endswith(f".{slot}"):
            return (
                f"assigns a {noun} of {where.removesuffix(f'.{slot}')}; write it in place instead"
            )
    return f"writes to {where}"


def _spell_source(source: Any) -> str:
    """Dynamo's name of a thing as the user would write it."""
    name = str(getattr(source, "name", "an object it did not make"))
    name = (
        name.replace("L['module']", "self")
        .replace("L['args']", "args")
        .replace("L['kwargs']", "kwargs")
    )
    name = re.sub(
        r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), name
    ).replace(".__dict__", "")
    name = re.sub(r"\['(_buffers|_parameters|_modules)'\]", r".\1", name)
    return re.sub(r"\.(?:_modules|_buffers|_parameters)?\['(\w+)'\]", r".\1", name)
