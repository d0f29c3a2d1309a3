"""Makes one fusion group of a product whose two halves meet: a gate and what it opens, of one weight.

    x ── mm ── view ── split ─┬─ silu ─┐                       ┌─ mm ── view ── silu ─┐
                              └─────── mul ──    becomes    x ─┤                      mul ──
                                                               └─ mm ── view ─────────┘

The products are of halves of the weight, views where it lies. ModernBERT, Phi-3 and GLM have such
layers. What one group computes is not what its steps are in the whole, but equal to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch_cudal1.graph.fusion.fusible_ops import ROW_RESHAPES, SHARED_LEFT_DTYPES, is_product
from torch_cudal1.graph.fusion.partition import FusionGroup
from torch_cudal1.graph.fusion.uses import Uses
from torch_cudal1.ir.program import Arg, Aten, Program, Step, TensorSpec, Value, renumber_step
from torch_cudal1.ir.records import Region, Role
from torch_cudal1.ir.value_specs import value_specs

__all__ = ["join_halves"]

# Where an operator has its bias and its right operand.
_OPERANDS: Mapping[str, tuple[int | None, int]] = {
    "aten.mm.default": (None, 1),
    "aten.addmm.default": (0, 2),
}


@dataclass(frozen=True)
class _Halved:
    """A group of one product, the steps that reshape its result outside, the `split` of that, and the
    group that alone reads both halves.
    """

    group: FusionGroup
    reshapes: tuple[int, ...]
    split: int
    reader: FusionGroup


def join_halves(
    region: Region,
    groups: Sequence[FusionGroup],
    uses: Uses,
    specs: Mapping[int, TensorSpec],
) -> tuple[FusionGroup, ...]:
    """`groups`, of `region`, with each product whose halves another group alone reads joined with
    that group.
    """
    joined = dict.fromkeys(groups)
    for group in groups:
        halved = _find_halved(group, groups, uses, specs)
        if halved is None or halved.reader not in joined or group not in joined:
            continue
        both = _join(region, halved, uses, specs)
        if both is not None:
            del joined[group], joined[halved.reader]
            joined[both] = None
    return tuple(sorted(joined, key=lambda group: group.steps))


def _find_halved(
    group: FusionGroup,
    groups: Sequence[FusionGroup],
    uses: Uses,
    specs: Mapping[int, TensorSpec],
) -> _Halved | None:
    product, *rest = (uses.steps[position] for position in group.steps)
    if not isinstance(product, Aten) or not _can_be_halved(product, specs):
        return None
    width = specs[product.writes[0]].shape[-1]
    if len(group.outputs) != 1 or not all(_keeps_columns(step, width, specs) for step in rest):
        return None
    (value,), reshapes = group.outputs, []
    while (position := _find_only_reader(value, uses)) is not None:
        step = uses.steps[position]
        if not _keeps_columns(step, width, specs):
            break
        reshapes.append(position)
        (value,) = step.writes
    if position is None or not _is_in_halves(uses.steps[position], specs[value]):
        return None
    readers = {p for half in uses.steps[position].writes for p in uses.readers.get(half, ())}
    for other in groups:
        if readers and readers <= set(other.steps) and not _has_product(other, uses):
            return _Halved(group, tuple(reshapes), position, other)
    return None


def _find_only_reader(value: int, uses: Uses) -> int | None:
    """The step that alone reads a value, which is no result of the whole."""
    positions = uses.readers.get(value, frozenset())
    return next(iter(positions)) if len(positions) == 1 and -1 not in positions else None


def _can_be_halved(product: Aten, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether its result is an even number of columns, each with a column of every operand that is cut."""
    if product.target not in _OPERANDS:
        return False
    spec = specs[product.writes[0]]
    operands = [product.args[place] for place in _OPERANDS[product.target] if place is not None]
    return (
        spec.dtype in SHARED_LEFT_DTYPES
        and spec.shape[-1] % 2 == 0
        and all(specs[operand.index].shape[-1] == spec.shape[-1] for operand in operands)
    )


def _keeps_columns(step: Step, width: int, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether a step gives a tensor of so many columns another shape of its rows."""
    is_reshape = isinstance(step, Aten) and step.target in ROW_RESHAPES
    return is_reshape and specs[step.writes[0]].shape[-1] == width


def _is_in_halves(step: Step, spec: TensorSpec) -> bool:
    """Whether a step cuts the last dimension of a tensor in two equal parts."""
    if not isinstance(step, Aten) or step.target != "aten.split.Tensor" or len(step.writes) != 2:
        return False
    size = step.args[1]
    dim = step.args[2] if len(step.args) > 2 else 0
    return dim in (-1, len(spec.shape) - 1) and size * 2 == spec.shape[-1]


def _has_product(group: FusionGroup, uses: Uses) -> bool:
    return any(is_product(uses.steps[position]) for position in group.steps)


class _HalvesWriter:
    """Steps of a new Program over values of the whole; `numbers`: of those that it takes."""

    def __init__(self, values: Sequence[int]) -> None:
        self.steps: list[Step] = []
        self.numbers = {value: number for number, value in enumerate(values)}
        self._count = len(values)

    def add(self, step: Aten, args: tuple[Arg, ...]) -> int:
        """A step like another one, with these arguments; the number of its result."""
        self.steps.append(replace(step, args=args, outs=(self._count,)))
        self._count += 1
        return self._count - 1

    def add_renumbered(self, step: Step, numbers: dict[int, int]) -> None:
        """A step of another Program, whose values have these `numbers` here."""
        outs = tuple(range(self._count, self._count + len(step.writes)))
        self.steps.append(renumber_step(step, numbers, outs))
        numbers.update(zip(step.writes, outs, strict=True))
        self._count += len(outs)


def _join(
    region: Region, halved: _Halved, uses: Uses, specs: Mapping[int, TensorSpec]
) -> FusionGroup | None:
    """One group of both; None where its results would lie in memory in another way."""
    group, reader = halved.group, halved.reader
    halves = uses.steps[halved.split].writes
    inputs = tuple(dict.fromkeys((*group.inputs, *(i for i in reader.inputs if i not in halves))))
    writer = _HalvesWriter(inputs)
    values = [_write_half(writer, halved, side, uses, specs) for side in range(2)]
    of_whole = {**writer.numbers, **dict(zip(halves, values, strict=True))}
    program = reader.region.program
    if program.constants:
        return None
    numbers = {number: of_whole[value] for number, value in enumerate(reader.inputs)}
    for step in program.steps:
        writer.add_renumbered(step, numbers)
    outputs = tuple(None if out is None else numbers[out] for out in program.outputs)
    joined = Program(tuple(specs[value] for value in inputs), tuple(writer.steps), outputs)
    new_specs = value_specs(joined)
    if any(
        out is None or new_specs[out] != specs[value]
        for out, value in zip(outputs, reader.outputs, strict=True)
    ):
        return None
    positions = (*group.steps, *halved.reshapes, halved.split, *reader.steps)
    roles: tuple[Role, ...] = tuple("input" for _ in inputs)
    name = f"{region.name}/halves{group.steps[0]}"
    return FusionGroup(
        Region(joined, roles, region.kind, "island", name),
        tuple(sorted(positions)),
        inputs,
        reader.outputs,
    )


def _write_half(
    writer: _HalvesWriter, halved: _Halved, side: int, uses: Uses, specs: Mapping[int, TensorSpec]
) -> int:
    """The product with a half of its right operand, reshaped as the whole was; its number."""
    product, *rest = (uses.steps[position] for position in halved.group.steps)
    assert isinstance(product, Aten)
    bias, right = _OPERANDS[product.target]
    args: list[Arg] = [
        Value(writer.numbers[arg.index]) if isinstance(arg, Value) else arg for arg in product.args
    ]
    for place in (bias, right):
        if place is not None:
            index = product.args[place].index
            args[place] = Value(_write_slice(writer, index, side, specs[index]))
    value = writer.add(product, tuple(args))
    for step in (*rest, *(uses.steps[position] for position in halved.reshapes)):
        assert isinstance(step, Aten)
        *sizes, last = step.args[1]
        value = writer.add(step, (Value(value), (*sizes, last // 2)))
    return value


def _write_slice(writer: _HalvesWriter, value: int, side: int, spec: TensorSpec) -> int:
    """A half of a tensor's last dimension, as a view."""
    dim, size = len(spec.shape) - 1, spec.shape[-1] // 2
    step = Aten("aten.slice.Tensor", (), (), (0,))
    return writer.add(step, (Value(writer.numbers[value]), dim, side * size, (side + 1) * size))
