"""Mutants: an honest Program with one thing changed by a named mutator. Dishonest ones must be refused, honest ones accepted.

`REGIONS` are small references; a mutator takes a region and the number of a step and yields a Program, or None where it does not
apply. The table mutator x region is the measured detection matrix; nothing is judged here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from tests.adversarial.plans import V, op, spec
from torch_cudal1.ir.program import Aten, Program, Value
from torch_cudal1.ir.records import Region

__all__ = ["DISHONEST", "HONEST", "REGIONS", "Mutant", "mutants"]

Mutator: TypeAlias = Callable[[Region, int], Program | None]
ROWS, WIDE = 48, 64


@dataclass(frozen=True)
class Mutant:
    """A Program made from a region's by one mutator at one step."""

    mutator: str
    region: str
    step: int
    program: Program
    honest: bool


def mutants(*, every_step: bool = False) -> Iterator[Mutant]:
    """Each mutator on each region: at the first step where it applies, or at every one."""
    for honest, table in ((False, DISHONEST), (True, HONEST)):
        for mutator, change in table.items():
            for name, region in REGIONS.items():
                for step in range(len(region.program.steps)):
                    program = change(region, step)
                    if program is not None:
                        yield Mutant(mutator, name, step, program, honest)
                        if not every_step:
                            break


# --- references


def _region(name: str, inputs: str, steps: tuple[Aten, ...], *shapes: tuple[int, ...]) -> Region:
    """`inputs`: one letter each, i for an input, p for a parameter. The last step's result is the output."""
    specs = tuple(spec(*shape) for shape in shapes)
    roles = tuple("input" if letter == "i" else "parameter" for letter in inputs)
    return Region(Program(specs, steps, (steps[-1].outs[0],)), roles, name=name)  # type: ignore[arg-type]


def _linear_relu() -> Region:
    steps = (
        op("aten.t.default", V(1), out=3),
        op("aten.addmm.default", V(2), V(0), V(3), out=4),
        op("aten.relu.default", V(4), out=5),
    )
    return _region("linear_relu", "ipp", steps, (ROWS, WIDE), (WIDE, WIDE), (WIDE,))


def _layer_norm() -> Region:
    steps = (
        op("aten.mean.dim", V(0), (-1,), True, out=3),
        op("aten.sub.Tensor", V(0), V(3), out=4),
        op("aten.mul.Tensor", V(4), V(4), out=5),
        op("aten.mean.dim", V(5), (-1,), True, out=6),
        op("aten.add.Scalar", V(6), 1e-5, out=7),
        op("aten.rsqrt.default", V(7), out=8),
        op("aten.mul.Tensor", V(4), V(8), out=9),
        op("aten.mul.Tensor", V(9), V(1), out=10),
        op("aten.add.Tensor", V(10), V(2), out=11),
    )
    return _region("layer_norm", "ipp", steps, (ROWS, WIDE), (WIDE,), (WIDE,))


def _softmax() -> Region:
    steps = (
        op("aten.amax.default", V(0), (1,), True, out=1),
        op("aten.sub.Tensor", V(0), V(1), out=2),
        op("aten.exp.default", V(2), out=3),
        op("aten.sum.dim_IntList", V(3), (1,), True, out=4),
        op("aten.div.Tensor", V(3), V(4), out=5),
    )
    return _region("softmax", "i", steps, (WIDE, WIDE))


def _gate() -> Region:
    steps = (
        op("aten.mm.default", V(0), V(1), out=4),
        op("aten.sigmoid.default", V(4), out=5),
        op("aten.mm.default", V(0), V(2), out=6),
        op("aten.tanh.default", V(6), out=7),
        op("aten.mul.Tensor", V(5), V(7), out=8),
        op("aten.add.Tensor", V(8), V(3), out=9),
        op("aten.gelu.default", V(9), out=10),
    )
    return _region("gate", "ippi", steps, (ROWS, WIDE), (WIDE, WIDE), (WIDE, WIDE), (ROWS, WIDE))


REGIONS = {region.name: region for region in (_linear_relu(), _layer_norm(), _softmax(), _gate())}


# --- changes


def _replace_step(region: Region, at: int, *steps: Aten) -> Program:
    """The step `at` replaced by `steps`, of which the last takes its place; later values are renumbered."""
    program = region.program
    first, extra = program.steps[at].outs[0], len(steps) - 1  # type: ignore[union-attr]

    def shift_values(value: object) -> object:
        if isinstance(value, Value):
            return V(value.index + extra) if value.index >= first else value
        return tuple(map(shift_values, value)) if isinstance(value, tuple) else value

    later = []
    for step in program.steps[at + 1 :]:
        assert isinstance(step, Aten)
        kwargs = tuple((name, shift_values(value)) for name, value in step.kwargs)
        later.append(
            replace(
                step,
                args=shift_values(step.args),
                kwargs=kwargs,
                outs=tuple(out + extra for out in step.outs),
            )
        )
    outputs = tuple(
        None if out is None else out + extra if out >= first else out for out in program.outputs
    )
    return replace(program, steps=(*program.steps[:at], *steps, *later), outputs=outputs)


def _step(region: Region, at: int, *targets: str) -> Aten | None:
    step = region.program.steps[at]
    return step if isinstance(step, Aten) and (not targets or step.target in targets) else None


def _replace_operator(target: str, *replacements: str, **kwargs: object) -> Mutator:
    """Another operator with the same arguments."""

    def change(region: Region, at: int) -> Program | None:
        step = _step(region, at, target)
        return (
            None
            if step is None
            else _replace_step(
                region,
                at,
                *(op(other, *step.args, out=step.outs[0], **kwargs) for other in replacements),
            )
        )

    return change


def _parameter_at(region: Region, step: Aten) -> int | None:
    positions = [
        i
        for i, arg in enumerate(step.args)
        if isinstance(arg, Value) and arg.index < len(region.roles)
    ]
    return next((i for i in positions if region.roles[step.args[i].index] == "parameter"), None)


def _drop_parameter(region: Region, at: int) -> Program | None:
    step = _step(region, at, "aten.add.Tensor", "aten.mul.Tensor")
    place = None if step is None else _parameter_at(region, step)
    if step is None or place is None:
        return None
    return _replace_step(
        region, at, op("aten.clone.default", step.args[1 - place], out=step.outs[0])
    )


def _drop_bias(region: Region, at: int) -> Program | None:
    step = _step(region, at, "aten.addmm.default")
    return (
        None
        if step is None
        else _replace_step(region, at, op("aten.mm.default", *step.args[1:], out=step.outs[0]))
    )


def _drop_step(region: Region, at: int) -> Program | None:
    step = _step(
        region,
        at,
        *(f"aten.{name}.default" for name in ("relu", "exp", "sigmoid", "tanh", "gelu", "rsqrt")),
    )
    return (
        None
        if step is None
        else _replace_step(region, at, op("aten.clone.default", step.args[0], out=step.outs[0]))
    )


def _cast(dtype: torch.dtype) -> Mutator:
    """A product in a narrower type."""

    def change(region: Region, at: int) -> Program | None:
        step = _step(region, at, "aten.mm.default", "aten.addmm.default")
        if step is None:
            return None
        out = step.outs[0]
        narrow = [
            op("aten._to_copy.default", arg, dtype=dtype, out=out + i)
            for i, arg in enumerate(step.args)
        ]
        product = op(step.target, *(V(out + i) for i in range(len(narrow))), out=out + len(narrow))
        back = op(
            "aten._to_copy.default",
            V(out + len(narrow)),
            dtype=torch.float32,
            out=out + len(narrow) + 1,
        )
        return _replace_step(region, at, *narrow, product, back)

    return change


def _scalar(factor: float) -> Mutator:
    def change(region: Region, at: int) -> Program | None:
        step = _step(region, at, "aten.add.Scalar")
        return (
            None
            if step is None
            else _replace_step(
                region, at, op(step.target, step.args[0], step.args[1] * factor, out=step.outs[0])
            )
        )

    return change


def _after(*targets: str, **arguments: object) -> Callable[[str, tuple[object, ...]], Mutator]:
    """A further operator on the result of a step."""

    def make_mutator(name: str, rest: tuple[object, ...]) -> Mutator:
        def change(region: Region, at: int) -> Program | None:
            step = _step(region, at, *targets)
            if step is None:
                return None
            out = step.outs[0]
            return _replace_step(
                region, at, step, op(name, V(out), *rest, out=out + 1, **arguments)
            )

        return change

    return make_mutator


def _last_rows(region: Region, at: int) -> Program | None:
    """The last rows of the result are zero."""
    if at != len(region.program.steps) - 1:
        return None
    step = _step(region, at)
    assert step is not None
    rows, out = region.program.inputs[0].shape[0], step.outs[0]
    first_rows = op("aten.slice.Tensor", V(out), 0, 0, rows - 1, out=out + 1)
    return _replace_step(
        region,
        at,
        step,
        first_rows,
        op("aten.constant_pad_nd.default", V(out + 1), (0, 0, 0, 1), 0.0, out=out + 2),
    )


def _axis(region: Region, at: int) -> Program | None:
    step = _step(region, at, "aten.mean.dim", "aten.sum.dim_IntList", "aten.amax.default")
    return (
        None
        if step is None
        else _replace_step(region, at, op(step.target, step.args[0], (0,), True, out=step.outs[0]))
    )


def _swap_operands(region: Region, at: int) -> Program | None:
    step = _step(region, at, "aten.sub.Tensor", "aten.div.Tensor")
    return (
        None
        if step is None
        else _replace_step(
            region, at, op(step.target, step.args[1], step.args[0], out=step.outs[0])
        )
    )


def _freeze_parameter(region: Region, at: int) -> Program | None:
    """A parameter replaced by a constant of its shape, once for the Program."""
    if at or "parameter" not in region.roles:
        return None
    program, index = region.program, region.roles.index("parameter")
    count = len(program.inputs)

    def renumber(value: object) -> object:
        if isinstance(value, Value):
            return (
                V(count)
                if value.index == index
                else V(value.index + 1)
                if value.index >= count
                else value
            )
        return tuple(map(renumber, value)) if isinstance(value, tuple) else value

    aten_steps = [step for step in program.steps if isinstance(step, Aten)]
    steps = tuple(
        replace(step, args=renumber(step.args), outs=tuple(out + 1 for out in step.outs))
        for step in aten_steps
    )
    outputs = tuple(None if out is None else out + 1 for out in program.outputs)
    return Program(
        program.inputs,
        steps,
        outputs,
        ("frozen",),
        {"frozen": torch.ones(program.inputs[index].shape)},
    )


def _input_returned(region: Region, at: int) -> Program | None:
    if at or region.program.inputs[0].shape != (ROWS, WIDE):
        return None
    return replace(
        region.program,
        steps=(op("aten.clone.default", V(0), out=len(region.roles)),),
        outputs=(len(region.roles),),
    )


def _constant(region: Region, at: int) -> Program | None:
    first = region.program.inputs[0]
    filled = op(
        "aten.full.default",
        first.shape,
        0.5,
        dtype=torch.float32,
        device=torch.device("cpu"),
        out=len(region.roles),
    )
    return None if at else replace(region.program, steps=(filled,), outputs=(len(region.roles),))


def _one_pass(region: Region, at: int) -> Program | None:
    """The variance as mean of squares minus square of mean."""
    if region.name != "layer_norm" or at != 3:
        return None
    steps = (
        op("aten.mul.Tensor", V(0), V(0), out=6),
        op("aten.mean.dim", V(6), (-1,), True, out=7),
        op("aten.mul.Tensor", V(3), V(3), out=8),
        op("aten.sub.Tensor", V(7), V(8), out=9),
    )
    return _replace_step(region, at, *steps)


def _commute_operands(region: Region, at: int) -> Program | None:
    step = _step(region, at, "aten.add.Tensor", "aten.mul.Tensor")
    return (
        None
        if step is None
        else _replace_step(
            region, at, op(step.target, step.args[1], step.args[0], out=step.outs[0])
        )
    )


def _split_k(region: Region, at: int) -> Program | None:
    step = _step(region, at, "aten.mm.default")
    if step is None:
        return None
    x, y, out = *step.args, step.outs[0]
    steps = [
        op("aten.slice.Tensor", x, 1, 0, WIDE // 2, out=out),
        op("aten.slice.Tensor", x, 1, WIDE // 2, WIDE, out=out + 1),
    ]
    steps += [
        op("aten.slice.Tensor", y, 0, 0, WIDE // 2, out=out + 2),
        op("aten.slice.Tensor", y, 0, WIDE // 2, WIDE, out=out + 3),
    ]
    steps += [
        op("aten.mm.default", V(out), V(out + 2), out=out + 4),
        op("aten.mm.default", V(out + 1), V(out + 3), out=out + 5),
    ]
    return _replace_step(
        region, at, *steps, op("aten.add.Tensor", V(out + 4), V(out + 5), out=out + 6)
    )


def _mean_as_sum(region: Region, at: int) -> Program | None:
    step = _step(region, at, "aten.mean.dim")
    if step is None:
        return None
    out = step.outs[0]
    total = op("aten.sum.dim_IntList", *step.args, out=out)
    return _replace_step(region, at, total, op("aten.mul.Scalar", V(out), 1 / WIDE, out=out + 1))


def _base_two(region: Region, at: int) -> Program | None:
    step = _step(region, at, "aten.exp.default")
    if step is None:
        return None
    out = step.outs[0]
    scaled = op("aten.mul.Scalar", step.args[0], math.log2(math.e), out=out)
    return _replace_step(region, at, scaled, op("aten.exp2.default", V(out), out=out + 1))


DISHONEST: dict[str, Mutator] = {
    "drop bias": _drop_bias,
    "drop parameter": _drop_parameter,
    "drop step": _drop_step,
    "freeze weight": _freeze_parameter,
    "return input": _input_returned,
    "constant": _constant,
    "bfloat16 product": _cast(torch.bfloat16),
    "half product": _cast(torch.float16),
    "one-pass variance": _one_pass,
    "tanh gelu": _replace_operator("aten.gelu.default", "aten.gelu.default", approximate="tanh"),
    "hard sigmoid": _replace_operator("aten.sigmoid.default", "aten.hardsigmoid.default"),
    "hard tanh": _replace_operator("aten.tanh.default", "aten.hardtanh.default"),
    "abs for relu": _replace_operator("aten.relu.default", "aten.abs.default"),
    "expm1 for exp": _replace_operator("aten.exp.default", "aten.expm1.default"),
    "wrong epsilon": _scalar(10.0),
    "no epsilon": _scalar(0.0),
    "skip tail": _last_rows,
    "wrong axis": _axis,
    "swap operands": _swap_operands,
    "scale by 1.001": _after("aten.mm.default", "aten.addmm.default")("aten.mul.Scalar", (1.001,)),
    "swallow NaN": _after()("aten.nan_to_num.default", (0.0,)),
    "clip": _after("aten.mm.default", "aten.addmm.default")("aten.clamp.default", (-3.0, 3.0)),
}

HONEST: dict[str, Mutator] = {
    "commute": _commute_operands,
    "split-K": _split_k,
    "mean as sum": _mean_as_sum,
    "base two": _base_two,
    "double product": _cast(torch.float64),
    "copy": _after()("aten.clone.default", ()),
}
