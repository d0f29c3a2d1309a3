"""Finds attention that a model writes out: a product, element-wise steps or a softmax, and a
product with what came of it.

    q ─┐                                            v ─┐
       bmm ── mul ── masked_fill ── softmax ── clone ── bmm ── view ── transpose ── clone
    k ─┘

Conversions between half types and fp32 may stand anywhere between products of one type; of two
types it is left in parts.

What is found has no other use of anything inside, so one kernel may stand for all of it. Copies
that only change the layout of an operand or of the result belong to it. So do, before one of
PyTorch's fused operators, the steps that repeat keys and values for several heads of queries: a
kernel reads the few there are. Nothing is decided about speed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_cudal1.graph.fusion.fusible_ops import EXPRESSED
from torch_cudal1.graph.fusion.uses import Uses
from torch_cudal1.ir.aten import is_random, overload
from torch_cudal1.ir.ops import attention_names
from torch_cudal1.ir.program import Aten, Step, TensorSpec, Value

__all__ = ["FUSED", "find_attention_chains"]

FUSED = attention_names.targets(attention_names.FORWARDS)

_BMM = "aten.bmm.default"
# Steps that move numbers and compute none: a kernel reads through them.
_LAYOUT = frozenset(
    f"aten.{name}"
    for name in (
        *(
            "view.default",
            "_unsafe_view.default",
            "expand.default",
            "clone.default",
            "transpose.int",
            "permute.default",
        ),
        *("unsqueeze.default", "squeeze.dim"),
    )
)
# element-wise, though torch does not say so: a model of half types takes its softmax in fp32,
# between two of them
_CONVERSION = "aten._to_copy.default"
_SOFTMAXES = frozenset({"aten._softmax.default", "aten._safe_softmax.default"})
# Elements of a query or a value: a longer one does not stay in registers.
_MAX_HEAD_ELEMENTS = 128
# The longest that is known has 43: capped scores between two conversions, repeated keys and values,
# layout of projections.
_MOST_STEPS = 64


def find_attention_chains(
    uses: Uses, specs: Mapping[int, TensorSpec]
) -> tuple[tuple[int, ...], ...]:
    """Positions of the steps of each written-out attention, and of each fused one that repeats its
    keys, in order.

    `specs`: of all values.
    """
    found_chains: list[tuple[int, ...]] = []
    used_positions: set[int] = set()
    for position, step in enumerate(uses.steps):
        inside: set[int] = set()
        if _is(step, _BMM) and position not in used_positions:
            # Each product is tried as the second one: the walk goes up from it to the first.
            inside = _find_chain(position, uses, specs)
        # A fused operator is a group already; only the copies of its keys and values are worth
        # taking in.
        elif isinstance(step, Aten) and step.target in FUSED:
            inside = _add_repeats(position, step, uses, specs)
        # A step runs in one kernel. In a chain of three products the first two win.
        if inside and not inside & used_positions:
            used_positions |= inside
            found_chains.append(tuple(sorted(inside)))
    return tuple(found_chains)


def _find_chain(last: int, uses: Uses, specs: Mapping[int, TensorSpec]) -> set[int]:
    """The attention that ends with the product `last`; empty if there is none.

    The weights may be on either side, since einsum may leave them on the right. There, at least one
    step between the products must compute something: otherwise any product of three matrices would
    match.
    """
    lhs, rhs = _read_factors(uses.steps[last])
    # The usual order, `softmax(q @ k.T) @ v`.
    if positions := _find_chain_of_operands(last, lhs, rhs, uses, specs):
        return positions
    turned = _find_chain_of_operands(last, rhs, lhs, uses, specs)
    return (
        turned
        if any(
            not _is_layout(uses.steps[position]) and not _is(uses.steps[position], _BMM)
            for position in turned
        )
        else set()
    )


def _find_chain_of_operands(
    last: int, weights: int, values: int, uses: Uses, specs: Mapping[int, TensorSpec]
) -> set[int]:
    inside: set[int] = {last}
    firsts = _find_path_to_product(weights, uses, inside)
    # Scores that are a sum of two products need two pairs of operands, which no template has.
    if len(firsts) != 1:
        return set()
    (first,) = firsts
    query, key_t = _read_factors(uses.steps[first])
    if (
        # Both widths count: queries stay in registers, and so does the accumulator of the values.
        specs[query].shape[-1] > _MAX_HEAD_ELEMENTS
        or _get_width(last, values, uses, specs) > _MAX_HEAD_ELEMENTS
    ):
        return set()
    # One kernel for products of two dtypes would need a method for each.
    if specs[query].dtype != specs[values].dtype:
        return set()
    # A use outside needs the scores in memory, and writing them is what a fused kernel saves.
    if not all(uses.is_used_only_in(position, inside) for position in inside - {last}):
        return set()
    # Before layout joins: only steps on scores can have operands of as many elements.
    between = inside - {first, last}
    for operand in (query, key_t, values):
        _take_layout_before(operand, uses, inside)
    _add_layout_after(last, uses, inside)
    _take_made_alike(between, specs[uses.steps[first].writes[0]].numel, inside, uses, specs)
    return inside if len(inside) <= _MOST_STEPS else set()


def _get_width(last: int, values: int, uses: Uses, specs: Mapping[int, TensorSpec]) -> int:
    """Elements of a value, which are its columns where the weights come first."""
    return specs[values].shape[-1 if values == _read_factors(uses.steps[last])[1] else -2]


def _add_repeats(
    position: int, step: Aten, uses: Uses, specs: Mapping[int, TensorSpec]
) -> set[int]:
    """The fused operator at `position` with the steps that repeat its keys and values; empty where
    none does.
    """
    inside = {position}
    for operand in step.args[1:3]:
        assert isinstance(operand, Value)
        steps: set[int] = {position}
        _take_layout_before(operand.index, uses, steps)
        # Layout alone is no reason for a kernel of its own.
        inside |= (
            steps if any(_is_repeat(uses.steps[position], specs) for position in steps) else set()
        )
    return inside if 1 < len(inside) <= _MOST_STEPS else set()


def _is_repeat(step: Step, specs: Mapping[int, TensorSpec]) -> bool:
    if not _is(step, "aten.expand.default"):
        return False
    (source,), (result,) = step.reads, step.writes
    # `expand` to the same size repeats nothing.
    return specs[result].numel > specs[source].numel


def _read_factors(step: Step) -> tuple[int, int]:
    assert isinstance(step, Aten)
    lhs, rhs = step.args[:2]
    assert isinstance(lhs, Value)
    assert isinstance(rhs, Value)
    return lhs.index, rhs.index


def _find_path_to_product(value: int, uses: Uses, inside: set[int]) -> set[int]:
    """Products that `value` is made of, through steps of attention; those steps go to `inside`."""
    position = uses.maker.get(value)
    if position is None:
        return set()
    step = uses.steps[position]
    if _is(step, _BMM):
        inside.add(position)
        return {position}
    # The bound also ends walks through large graphs of element-wise steps.
    if not _goes_between(step) or len(inside) > _MOST_STEPS:
        return set()
    positions: set[int] = set()
    for index in step.reads:
        positions |= _find_path_to_product(index, uses, inside)
    if positions:
        inside.add(position)
    return positions


def _goes_between(step: Step) -> bool:
    # Dropout: a kernel would draw other numbers than eager does.
    if not isinstance(step, Aten) or is_random(step.target, step.args, dict(step.kwargs)):
        return False
    return (
        step.target in _LAYOUT | _SOFTMAXES | {_CONVERSION}
        or torch.Tag.pointwise in overload(step.target).tags
    )


def _take_layout_before(value: int, uses: Uses, inside: set[int]) -> None:
    while (position := uses.maker.get(value)) is not None and _is_layout(uses.steps[position]):
        # A copy that another step reads is made anyway.
        if not uses.is_used_only_in(position, inside):
            return
        inside.add(position)
        value = next(iter(uses.steps[position].reads))


def _take_made_alike(
    between: set[int], scores: int, inside: set[int], uses: Uses, specs: Mapping[int, TensorSpec]
) -> None:
    """Add the steps that make a tensor of as many elements as there are scores (`scores`) for the
    steps `between`: computed in the kernel, it is neither written nor read.

    The decays of a state-space model are such a tensor (an exponential of differences). A smaller
    tensor is made once, outside, and read by every tile.
    """
    # From the scores' operands upwards, as far as the sizes stay those of the scores.
    waiting = [index for position in between for index in uses.steps[position].reads]
    while waiting:
        index = waiting.pop()
        position = uses.maker.get(index)
        if (
            position is None
            or position in inside
            or len(inside) >= _MOST_STEPS
            or specs[index].numel != scores
        ):
            continue
        step = uses.steps[position]
        if _is_made_alike(step) and uses.is_used_only_in(position, inside):
            inside.add(position)
            waiting += step.reads


def _is_made_alike(step: Step) -> bool:
    return _goes_between(step) and isinstance(step, Aten) and step.target in EXPRESSED | _LAYOUT


def _add_layout_after(last: int, uses: Uses, inside: set[int]) -> None:
    """Add the layout steps after the second product, up to and including a copy; none if no copy
    follows.
    """
    layout_positions: list[int] = []
    position = last
    while len(readers := uses.readers.get(uses.steps[position].writes[0], frozenset())) == 1:
        (position,) = readers
        # -1 is the result of the whole Program.
        if position < 0 or not _is_layout(uses.steps[position]):
            return
        layout_positions.append(position)
        # Up to the copy: a kernel writes its result where the copy would have put it. Views alone
        # cost nothing.
        if _is(uses.steps[position], "aten.clone.default"):
            inside.update(layout_positions)
            return


def _is_layout(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in _LAYOUT


def _is(step: Step, target: str) -> bool:
    return isinstance(step, Aten) and step.target == target
