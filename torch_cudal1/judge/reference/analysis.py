"""What a reference Program says about itself without being run: shapes, longest reduction, FLOPs,
and what its inputs must be like.

Works on fake tensors; nothing is allocated. Where a step cannot be followed (a shape that depends
on values) the facts simply stop there: an unknown is left out, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.ops.recurrent_ops import TARGETS
from torch_cudal1.ir.program import Aten, Program, Value

__all__ = ["Facts", "analyse", "bound_arguments"]

# steps whose output holds values of their first argument and nothing else
_SAME_VALUES = frozenset(
    {
        *(
            "view",
            "reshape",
            "_unsafe_view",
            "expand",
            "unsqueeze",
            "squeeze",
            "permute",
            "transpose",
            "t",
            "slice",
            "select",
        ),
        *(
            "clone",
            "alias",
            "detach",
            "contiguous",
            "flatten",
            "_to_copy",
            "to",
            "split",
            "split_with_sizes",
            "unbind",
            "chunk",
        ),
        *("repeat", "narrow", "as_strided", "lift_fresh_copy", "movedim", "unfold"),
    }
)
# Names under which operators' schemas take variances and what is derived from them.
_POSITIVE_NAMES = frozenset(
    {"running_var", "var", "variance", "rstd", "invstd", "save_invstd", "save_var"}
)
# operator -> the argument that must be above 0, or its results are no numbers (or infinite)
_POSITIVE_ARGUMENT = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "reciprocal"), "self"),
    "xlogy": "other",
    **dict.fromkeys(("log_bessel_i", "log_bessel_k"), "x"),
}
_MATRIX_STEPS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear"}
)
_REDUCTIONS = frozenset(
    {
        *(
            "sum",
            "mean",
            "var",
            "std",
            "var_mean",
            "norm",
            "linalg_vector_norm",
            "prod",
            "logsumexp",
            "cumsum",
            "cumprod",
        ),
        *("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"),
        *("native_layer_norm", "native_group_norm", "native_batch_norm"),
        *(
            "_native_batch_norm_legit_functional",
            "_fused_rms_norm",
            "cudnn_batch_norm",
            "avg_pool2d",
            "_adaptive_avg_pool2d",
        ),
    }
)
_INDEX_ARGUMENT = {  # operator -> (index argument, how its bound is found)
    "embedding": ("indices", "rows of weight"),
    "embedding_dense_backward": ("indices", "num_weights"),
    "_embedding_bag": ("indices", "rows of weight"),
    "gather": ("index", "dim of self"),
    "scatter": ("index", "dim of self"),
    "scatter_add": ("index", "dim of self"),
    "scatter_reduce": ("index", "dim of self"),
    "index_select": ("index", "dim of self"),
    "index_add": ("index", "dim of self"),
    "index_copy": ("index", "dim of self"),
    "index_fill": ("index", "dim of self"),
    "take": ("index", "all of self"),
    "nll_loss_forward": ("target", "classes of self"),
    "nll_loss_backward": ("target", "classes of self"),
    "nll_loss2d_forward": ("target", "classes of self"),
    "nll_loss2d_backward": ("target", "classes of self"),
    "cross_entropy_loss": ("target", "classes of self"),
    "one_hot": ("self", "num_classes"),
    "max_pool2d_with_indices_backward": ("indices", "pixels of self"),
    "max_pool3d_with_indices_backward": ("indices", "voxels of self"),
}


@dataclass(frozen=True)
class Facts:
    """`bounds`: input -> exclusive upper bound of its integers. `positive`: inputs that must be
    above 0 (variances).

    `structural`: inputs whose values are structure (masks): they stay what the examples hold.
    `weights`: of recurrent layers; however they come, they are drawn as parameters are, or each
    step would multiply all rounding. `sequential_steps`: steps of recurrent layers that wait for
    one another.
    """

    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    longest_reduction: int = 1
    flops: int = 0
    bounds: Mapping[int, int] = field(default_factory=dict)
    positive: frozenset[int] = frozenset()
    structural: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    sequential_steps: int = 0


def analyse(program: Program) -> Facts:
    """The facts of a reference Program (ATen steps)."""
    shapes = _compute_shapes(program)
    # value -> the input whose values it holds
    origin = {index: index for index in range(len(program.inputs))}
    bounds: dict[int, int] = {}
    positive: set[int] = set()
    weights: set[int] = set()
    nonnegative = dict(origin)  # value -> input, also through "add an epsilon"
    longest, flops, chain = 1, 0, 0
    for step in program.steps:
        if not isinstance(step, Aten):
            continue
        name, bound = step.target.split(".")[1], bound_arguments(step)
        first = next((v.index for v in _iter_values(bound.values())), None)
        for index, limit in _index_bounds(name, bound, shapes):
            if (source := origin.get(index)) is not None:
                # Several consumers may read the same integers: the smallest bound is legal for all
                # of them.
                bounds[source] = min(limit, bounds.get(source, limit))
        positive |= {
            origin[v.index]
            for key, v in bound.items()
            if key in _POSITIVE_NAMES and _is_from(v, origin)
        }
        if step.target in TARGETS:
            # Weights of a recurrent layer may come as plain inputs: drawn as large as activations,
            # each step would multiply all rounding.
            weights |= {origin[v.index] for v in _iter_values(bound["params"]) if v.index in origin}
            steps, sequences, matrices = _analyse_recurrence(bound, shapes)
            longest = max(longest, *(columns for _, columns in matrices), 1)
            # A multiplication and an addition for each element of a weight matrix, step and
            # sequence.
            flops += 2 * steps * sequences * sum(rows * columns for rows, columns in matrices)
            # Two matrices a layer, of the input and of the hidden state; layers and steps wait for
            # one another.
            chain += steps * (len(matrices) // 2)
        constrained = bound.get(_POSITIVE_ARGUMENT.get(name, ""))
        # sqrt(x + eps) constrains x as sqrt(x) does, but an index plus something has another bound:
        # hence two tables.
        if isinstance(constrained, Value) and constrained.index in nonnegative:
            positive.add(nonnegative[constrained.index])
        if first is not None and (name in _SAME_VALUES or name == "add"):
            for table in (origin, nonnegative) if name in _SAME_VALUES else (nonnegative,):
                table.update({out: table[first] for out in step.outs if first in table})
        length = _find_reduction_length(name, bound, shapes)
        longest = max(longest, length)
        if name in _MATRIX_STEPS or "convolution" in name:
            flops += (
                2 * length * max((math.prod(shapes.get(out, ())) for out in step.outs), default=0)
            )
    return Facts(
        shapes,
        longest,
        flops,
        bounds,
        frozenset(positive),
        weights=frozenset(weights),
        sequential_steps=chain,
    )


def _analyse_recurrence(
    bound: Mapping[str, Any], shapes: Mapping[int, tuple[int, ...]]
) -> tuple[int, int, list[tuple[int, ...]]]:
    """Time steps, sequences, and the shapes of the weight matrices of a recurrent layer."""
    shape = _shape(bound["input"], shapes) or (0, 0, 0)
    steps, sequences = (shape[1], shape[0]) if bound["batch_first"] else (shape[0], shape[1])
    weight_shapes = [shapes.get(value.index, ()) for value in _iter_values(bound["params"])]
    return steps, sequences, [matrix for matrix in weight_shapes if len(matrix) == 2]


def bound_arguments(step: Aten) -> dict[str, Any]:
    """The arguments of a step by schema name, defaults left out."""
    names = [argument.name for argument in overload(step.target)._schema.arguments]
    # Arguments left at their defaults are not in the step.
    return dict(zip(names, step.args, strict=False)) | dict(step.kwargs)


def _is_from(value: object, origin: Mapping[int, int]) -> bool:
    return isinstance(value, Value) and value.index in origin


def _compute_shapes(program: Program) -> dict[int, tuple[int, ...]]:
    values: dict[int, Any] = {}
    # Fake tensors have shapes and strides and no memory: a region of gigabytes is analysed without
    # any.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        specs = program.inputs
        for index, spec in enumerate(specs):
            values[index] = torch.empty_strided(
                spec.shape, spec.strides, dtype=spec.torch_dtype, device=spec.device
            )
        for index, name in enumerate(program.constants, len(specs)):
            constant = program.payloads[name]
            values[index] = torch.empty(constant.shape, dtype=constant.dtype, device=program.device)
        for step in program.steps:
            if isinstance(step, Aten):
                values |= _fake_step(step, values)
    return {
        index: tuple(value.shape)
        for index, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def _fake_step(step: Aten, values: Mapping[int, Any]) -> dict[int, Any]:
    if any(
        # A step after one that could not be followed cannot be followed either.
        value.index not in values
        for value in _iter_values((*step.args, *(v for _, v in step.kwargs)))
    ):
        return {}
    args, kwargs = fill(step.args, values), {name: fill(arg, values) for name, arg in step.kwargs}
    try:
        result = overload(step.target)(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return {}  # a shape that depends on values, or an operator without a fake kernel
    return dict(zip(step.outs, result if step.many else (result,), strict=False))


def fill(arg: Any, values: Mapping[int, Any]) -> Any:
    """An argument with each `Value` replaced; tuples become lists, as operators expect."""
    if isinstance(arg, Value):
        return values[arg.index]
    return [fill(item, values) for item in arg] if isinstance(arg, tuple) else arg


def _iter_values(args: Any) -> Iterator[Value]:
    for arg in args:
        if isinstance(arg, Value):
            yield arg
        elif isinstance(arg, (tuple, list)):
            yield from _iter_values(arg)


def _shape(value: object, shapes: Mapping[int, tuple[int, ...]]) -> tuple[int, ...] | None:
    return shapes.get(value.index) if isinstance(value, Value) else None


def _index_bounds(
    name: str, bound: Mapping[str, Any], shapes: Mapping[int, tuple[int, ...]]
) -> Iterator[tuple[int, int]]:
    if name in ("index", "index_put", "_unsafe_index", "_unsafe_index_put"):
        shape = _shape(bound.get("self"), shapes)
        # Each index tensor points into the dimension at its own position; None leaves a dimension
        # whole.
        for position, value in enumerate(bound.get("indices", ())):
            if isinstance(value, Value) and shape is not None and position < len(shape):
                yield value.index, shape[position]
        return
    argument, rule = _INDEX_ARGUMENT.get(name, ("", ""))
    index = bound.get(argument)
    limit = _find_index_limit(rule, bound, shapes) if isinstance(index, Value) else None
    if isinstance(index, Value) and limit is not None:
        yield index.index, limit


def _find_index_limit(
    rule: str, bound: Mapping[str, Any], shapes: Mapping[int, tuple[int, ...]]
) -> int | None:
    if rule in ("num_weights", "num_classes"):
        value = bound.get(rule)
        # `one_hot` takes -1 for "as many as there are".
        return value if isinstance(value, int) and value > 0 else None
    shape = _shape(bound.get("weight" if rule == "rows of weight" else "self"), shapes)
    if shape is None:
        return None
    if rule == "rows of weight":
        return shape[0]
    if rule == "all of self":
        return math.prod(shape)
    if rule in ("pixels of self", "voxels of self"):
        return math.prod(shape[-2 if rule == "pixels of self" else -3 :])
    if rule == "classes of self":
        # Losses have the classes in the second dimension, or in the only one without a batch.
        return shape[1] if len(shape) > 1 else shape[0]
    # A scalar is indexed as a tensor of one element.
    return shape[bound["dim"]] if shape else 1


def _find_reduction_length(
    name: str, bound: Mapping[str, Any], shapes: Mapping[int, tuple[int, ...]]
) -> int:
    if name in _MATRIX_STEPS:
        operand = next(
            (bound[key] for key in ("mat1", "batch1", "mat", "input", "self") if key in bound), None
        )
        # A product sums over the columns of its first operand.
        return (_shape(operand, shapes) or (1,))[-1]
    if "convolution" in name:
        # A convolution sums over its weight without the output channels.
        return math.prod((_shape(bound.get("weight"), shapes) or (1, 1))[1:])
    if "scaled_dot_product" in name:
        return max(
            max((_shape(bound.get(operand_name), shapes) or (1,))[-2:])
            # Scores sum over the head's width, results over the keys; gradients of keys over the
            # queries.
            for operand_name in ("key", "query" if "backward" in name else "key")
        )
    if name not in _REDUCTIONS:
        return 1
    shape = _shape(bound.get("self", bound.get("input")), shapes) or ()
    dims = bound.get("dim", bound.get("normalized_shape"))
    if "normalized_shape" in bound:
        # `normalized_shape` is the sizes themselves, where `dim` is positions.
        return math.prod(dims) if isinstance(dims, Sequence) else 1
    if isinstance(dims, int):
        dims = (dims,)
    # No dimension means all of them.
    return math.prod(shape[d] for d in dims) if dims and shape else math.prod(shape)
