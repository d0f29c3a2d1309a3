"""The float64 run of a reference Program: what the region would yield without rounding.

Floating inputs and constants are upcast and every floating dtype argument becomes float64. Fused
attention, which has no float64 kernel, is computed by its formula, its backward from the result and
the log-sum-exp that it is given; so are group norm, whose kernels turn an infinite weight into a
difference of infinities, and transposed convolutions, for which PyTorch takes 2 to 14 times as long
on a GPU as their matrix products do (bench_float64). It runs in the judge's own process and never
sees a candidate.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.aten import overload
from torch_cudal1.ir.ops import attention_names
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.judge.reference.analysis import bound_arguments, fill
from torch_cudal1.judge.wire.channel import storage_extent
from torch_cudal1.judge.wire.tensor_bits import to_float64

__all__ = ["compute_exact_outputs", "measure_input_sensitivity"]

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
_ATTENTION = frozenset((*attention_names.FORWARDS, *attention_names.FORWARDS_ELSEWHERE))
_LOG_SUM_EXPS = frozenset(attention_names.FORWARDS)  # natural ones
_ATTENTION_BACKWARD = frozenset(attention_names.BACKWARDS)
_ASKED = "compute_log_sumexp"  # an argument of some operators
_NUDGE_SIZE = 2.0**-24  # a round-off of float32: float64 keeps nine digits of what it moves
_NUDGES = 4  # one alone may by chance move an element hardly at all
# The bits of a float64 are not those of the float32 that the program reads as integers.
_REINTERPRETING = frozenset({"aten.view.dtype", "prims.view_element_type.default"})
# Views are of numbers, whatever memory a float64 step left them in; those in the second set say
# where in memory.
_VIEWS = frozenset(
    {"aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default"}
)
_BY_STRIDES = frozenset(
    f"aten.{name}.default" for name in ("as_strided", "as_strided_copy", "as_strided_scatter")
)


def compute_exact_outputs(
    program: Program, inputs: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor | None] | Refusal:
    """The outputs in float64 (integers and booleans as they are); None where only the baseline can
    be compared with.
    """
    # Values are freed after their last use: float64 takes twice the memory of what the region
    # takes.
    last = {index: position for position, step in enumerate(program.steps) for index in step.reads}
    returned = set(program.outputs)
    # Strides of all values are worked out only where a step says places in memory.
    by_strides = any(
        isinstance(step, Aten) and step.target in _BY_STRIDES for step in program.steps
    )
    try:
        strides = (
            {index: spec.strides for index, spec in value_specs(program).items()}
            if by_strides
            else {}
        )
        values: dict[int, Any] = {
            index: _widen_strided(tensor) for index, tensor in enumerate(inputs)
        }
        for index, name in enumerate(program.constants, len(inputs)):
            values[index] = to_float64(program.payloads[name].to(device))
        with torch.no_grad():
            for position, step in enumerate(program.steps):
                # Machine code is written for its own dtypes.
                if not isinstance(step, Aten):
                    return Refusal(f"step {position} is no ATen call")
                values |= {
                    index: _restore_strides(value, strides.get(index))
                    for index, value in _run_step(step, values, device).items()
                }
                for index in [
                    i for i in values if i not in returned and last.get(i, position) <= position
                ]:
                    del values[index]
    # An operator without a float64 kernel, or a shape that does not fit: then eager alone is
    # compared with.
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ValueError,
        KeyError,
        IndexError,
    ) as error:
        return Refusal(f"{type(error).__name__}: {str(error)[:300]}")
    return [None if out is None else values.get(out) for out in program.outputs]


def measure_input_sensitivity(
    run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None] | Refusal],
    inputs: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """How far a relative change of the inputs moves each float64 output, per unit of change,
    element by element: the largest of four random changes; None where there is no result.

    `run` yields float64 outputs, `exact` those on `inputs`. A sum that cancels moves by the size of
    its terms, however small it is, and no arithmetic is nearer than that times its round-off.
    """
    moved = [
        None if out is None or not out.is_floating_point() else torch.zeros_like(out)
        for out in exact
    ]
    for _ in range(_NUDGES):
        try:
            outputs = run([_perturb_tensor(tensor) for tensor in inputs])
        # The comparison is stricter without it, not wrong: it does not know which rows cancel.
        except torch.OutOfMemoryError as error:
            outputs = Refusal(str(error) or "out of memory")
        if isinstance(outputs, Refusal):
            return [None] * len(moved)
        for most, out, middle in zip(moved, outputs, exact, strict=True):
            if most is not None and out is not None and middle is not None:
                # An element that becomes infinite moves by nothing that a limit could hold.
                step = (out - middle).abs_().nan_to_num_(nan=0.0, posinf=0.0).div_(_NUDGE_SIZE)
                torch.maximum(most, step, out=most)
    return moved


def _perturb_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, every element of its memory times 1 + a random round-off; elements that are one
    in memory stay one.
    """
    # An integer that moves would choose another element.
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return tensor
    wide = _widen_strided(tensor)
    flat = wide.as_strided(
        (storage_extent(wide.shape, wide.stride()),), (1,), wide.storage_offset()
    )
    # the user's own sequence is not touched
    generator = torch.Generator(flat.device).manual_seed(secrets.randbits(62))
    factors = (
        torch.randn(flat.shape, dtype=torch.float64, device=flat.device, generator=generator)
        .mul_(_NUDGE_SIZE)
        .add_(1)
    )
    return (flat * factors).as_strided(wide.shape, wide.stride())


def _restore_strides(value: Any, strides: tuple[int, ...] | None) -> Any:
    """A result in the strides that it has in eager, where a later step reads memory by strides."""
    if (
        strides is None
        or not isinstance(value, torch.Tensor)
        or value.stride() == strides
        # Elements that share memory cannot be copied to one by one.
        or 0 in strides
    ):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(
        value
    )


def _widen_strided(tensor: torch.Tensor) -> torch.Tensor:
    """As `to_float64`, with the strides kept whatever they are: a step may depend on them."""
    extent = storage_extent(tensor.shape, tensor.stride())
    flat: torch.Tensor = to_float64(tensor.as_strided((extent,), (1,), tensor.storage_offset()))
    return flat.as_strided(tensor.shape, tensor.stride())


def _run_step(step: Aten, values: Mapping[int, Any], device: torch.device) -> dict[int, Any]:
    """The step's results in float64: by a formula where PyTorch's kernel is no reference, else by
    PyTorch's kernel.
    """
    name = step.target.split(".")[1]
    # The program would read the bits of a float64 that was a float32.
    if step.target in _REINTERPRETING and any(isinstance(a, torch.dtype) for a in step.args):
        raise NotImplementedError(f"{step.target} reads the bits of its argument")
    if name in _ATTENTION:
        return _run_attention(name, step, _bind(step, values))
    if name in _ATTENTION_BACKWARD:
        bound = {key.removesuffix("_"): value for key, value in _bind(step, values).items()}
        return dict(zip(step.outs, _attention_backward(bound), strict=False))
    if name in ("_grouped_mm", "grouped_mm"):
        return {step.outs[0]: _multiply_groups(_bind(step, values))}
    if name == "native_group_norm":
        # PyTorch's kernels fold mean, rstd and weight into a factor and an addend, which turns an
        # infinite weight into a difference of infinities: NaN where the formula has an infinity.
        return dict(zip(step.outs, _group_norm(_bind_wide(step, values, device)), strict=True))
    if name == "convolution":
        bound = _bind_wide(step, values, device)
        if _is_plain_transposed(bound):
            return {step.outs[0]: _convolve_transposed(bound)}
    return _run_operator(name, step, values, device)


def _bind(step: Aten, values: Mapping[int, Any]) -> dict[str, Any]:
    return {key: fill(arg, values) for key, arg in bound_arguments(step).items()}


def _bind_wide(step: Aten, values: Mapping[int, Any], device: torch.device) -> dict[str, Any]:
    return {key: _widen_argument(arg, values, device) for key, arg in bound_arguments(step).items()}


def _run_attention(name: str, step: Aten, bound: Mapping[str, Any]) -> dict[int, Any]:
    """Weighted values, and the log-sum-exp of the operators that yield it."""
    scores, value = _attention_scores(bound)
    # PyTorch's operators yield 0 where a bias hides all keys from a row; the plain softmax yields
    # NaN.
    weights = (
        scores.softmax(-1)
        if _attention_bias(bound) is None
        else torch.ops.aten._safe_softmax(scores, -1)
    )
    results = {step.outs[0]: _weigh_values(weights, value, _causal_mask(bound, scores))}
    if name in _LOG_SUM_EXPS and bound.get(_ASKED, True):
        results[step.outs[1]] = _log_sum_exp(name, scores)
    return results


def _is_plain_transposed(bound: Mapping[str, Any]) -> bool:
    """Whether a convolution is one that `_convolve_transposed` computes."""
    # PyTorch's transposed convolution in float64 takes 2 to 14 times as long on a GPU as the
    # products (bench_float64).
    return (
        bool(bound["transposed"])
        and bound["groups"] == 1
        and bound["input"].dim() == bound["weight"].dim()
    )


def _run_operator(
    name: str, step: Aten, values: Mapping[int, Any], device: torch.device
) -> dict[int, Any]:
    """The results of PyTorch's own kernel on float64 arguments."""
    args = [_widen_argument(arg, values, device) for arg in step.args]
    kwargs = {key: _widen_argument(arg, values, device) for key, arg in step.kwargs}
    if name in ("_softmax", "_log_softmax"):
        args[2:3] = [False]  # "half to float" asks for a half input
    # A view by strides fails where a float64 step left its result in another layout.
    if step.target in _VIEWS:
        result = torch.reshape(*args[:2], **kwargs)
    else:
        result = overload(step.target)(*args, **kwargs)
    tensors = result if step.many else (result,)
    return {out: to_float64(value) for out, value in zip(step.outs, tensors, strict=True)}


def _widen_argument(arg: Any, values: Mapping[int, Any], device: torch.device) -> Any:
    if isinstance(arg, torch.dtype):
        # A cast to float32 inside the region would round.
        return torch.float64 if arg.is_floating_point else _WIDE.get(arg, arg)
    if isinstance(arg, torch.device):
        # A device argument of the region names the type without the index of this one.
        return device if arg.type == device.type else arg
    if isinstance(arg, tuple):
        return [_widen_argument(item, values, device) for item in arg]
    return fill(arg, values)


def _multiply_groups(bound: Mapping[str, Any]) -> torch.Tensor:
    """The products of groups of rows, columns or terms, which end at the offsets: 2-d and 3-d
    operands in any combination.
    """
    if bound.get("bias") is not None:
        raise NotImplementedError("grouped products with a bias")
    first: torch.Tensor = bound["self"]
    second: torch.Tensor = bound["mat2"]
    ends = bound.get("offs")
    if ends is None:
        return torch.bmm(first, second)
    groups = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends.tolist()])]
    if first.dim() == second.dim() == 2:
        return torch.stack([first[:, group] @ second[group] for group in groups])
    if first.dim() == 2:
        out = first.new_zeros(first.shape[0], second.shape[-1])
        for group, factors in zip(groups, second, strict=True):
            out[group] = first[group] @ factors
        return out
    out = first.new_zeros(first.shape[1], second.shape[-1])
    for group, factors in zip(groups, first, strict=True):
        out[:, group] = factors @ second[:, group]
    return out


def _group_norm(bound: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x - mean) rstd weight + bias, in the order in which that is written; then the mean and rstd
    of each group.
    """
    tensor, groups = bound["input"], bound["group"]
    parts = tensor.reshape(bound["N"], groups, -1)
    mean = parts.mean(-1)
    # Two passes: in E[x^2] - E[x]^2 the digits cancel where the mean is large.
    deviation = parts - mean[..., None]
    rstd = (deviation.square().mean(-1) + bound["eps"]).rsqrt()
    out = (deviation * rstd[..., None]).reshape(tensor.shape)
    form = (1, -1, *(1,) * (tensor.dim() - 2))
    if bound["weight"] is not None:
        out = out * bound["weight"].reshape(form)
    if bound["bias"] is not None:
        out = out + bound["bias"].reshape(form)
    return out, mean, rstd


def _convolve_transposed(bound: Mapping[str, Any]) -> torch.Tensor:
    """The product of the input with each tap of the kernel, added up where that tap puts it."""
    tensor, weight, bias = bound["input"], bound["weight"], bound["bias"]
    (batch, _, *size), (inner, outer, *kernel) = tensor.shape, weight.shape
    stride, padding, dilation, beyond = (
        list(bound[name]) * (len(size) // len(bound[name]))
        for name in ("stride", "padding", "dilation", "output_padding")
    )
    spans = [(n - 1) * step + 1 for n, step in zip(size, stride, strict=True)]
    sizes = [
        span + d * (k - 1) + extra
        for span, d, k, extra in zip(spans, dilation, kernel, beyond, strict=True)
    ]
    flat = tensor.reshape(batch, inner, -1)
    out = flat.new_zeros(batch, outer, *sizes)
    for tap in itertools.product(*map(range, kernel)):
        places = [
            slice(t * d, t * d + span, step)
            for t, d, span, step in zip(tap, dilation, spans, stride, strict=True)
        ]
        factors = weight[(slice(None), slice(None), *tap)].t().expand(batch, outer, inner)
        out[(slice(None), slice(None), *places)] += torch.bmm(factors, flat).view(
            batch, outer, *size
        )
    cut: torch.Tensor = out[
        (slice(None), slice(None), *(slice(p, n - p) for p, n in zip(padding, sizes, strict=True)))
    ]
    return cut.contiguous() if bias is None else cut + bias.reshape(1, -1, *(1,) * len(size))


def _attention_scores(bound: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """q k^T scale + bias, masked, with the arguments every fused variant has under the same names;
    and values, for each head.
    """
    query, key, value = bound["query"], bound["key"], bound["value"]
    # Which elements are dropped depends on the kernel's own use of the generator.
    if bound.get("dropout_p", 0.0):
        raise NotImplementedError("attention with dropout")
    if (
        query.dim() == 4 and (shared := query.shape[1] // key.shape[1]) > 1
    ):  # neighbouring queries share a head
        key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * _attention_scale(bound)
    if (bias := _attention_bias(bound)) is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    visible = _causal_mask(bound, scores)
    return scores if visible is None else scores.masked_fill(~visible, -math.inf), value


def _attention_bias(bound: Mapping[str, Any]) -> torch.Tensor | None:
    """What is added to scores, or hides some of them. PyTorch's operators give 0 for a row that it
    hides all keys from.
    """
    return next(
        (bound[name] for name in ("attn_bias", "attn_mask") if bound.get(name) is not None), None
    )


def _attention_scale(bound: Mapping[str, Any]) -> float:
    scale = bound.get("scale")
    return 1 / math.sqrt(bound["query"].shape[-1]) if scale is None else float(scale)


def _causal_mask(bound: Mapping[str, Any], scores: torch.Tensor) -> torch.Tensor | None:
    """The visible keys of each query under a causal mask; None without one."""
    if not bound.get("is_causal", False):
        return None
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


def _weigh_values(
    weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None
) -> torch.Tensor:
    """weights @ values, without the values that are not `visible`."""
    # A hidden value that is NaN must not enter as 0 times NaN, which kernels form in some blocks.
    plain = weights @ values
    # Without NaN among the values a weight of 0 hides them as a mask does.
    if visible is None or bool(values.isfinite().all()):
        return plain
    # A row that sees a value that is not finite has it in the sum; the others must not get 0 times
    # NaN.
    reached = visible.double() @ (~values.isfinite()).double() > 0
    return torch.where(reached, plain, weights @ values.nan_to_num(0.0, 0.0, 0.0))


def _log_sum_exp(name: str, scores: torch.Tensor) -> torch.Tensor:
    """Of each row, in the operator's form: the "efficient" kernels write 0 for a row without keys,
    and behind the rows infinities until there are a multiple of 32.
    """
    total = scores.logsumexp(-1)
    # The kernels' form is kept, because later steps and the backward read it.
    if "efficient" in name:
        total = total.masked_fill(total == -math.inf, 0.0)
        return torch.nn.functional.pad(total, (0, -total.shape[-1] % 32), value=math.inf)
    return total.unsqueeze(-1) if "cudnn" in name else total


def _attention_backward(
    bound: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values. What a mask hides takes no part, whatever NaN its row
    holds.
    """
    grad, query, key = bound["grad_out"], bound["query"], bound["key"]
    scores, value = _attention_scores(bound)
    heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    # The "efficient" kernels pad the rows to a multiple of 32.
    total = bound["logsumexp"].reshape(*scores.shape[:2], -1)[..., : scores.shape[2]]
    # From the log-sum-exp that the step is given, as the kernels do: the softmax of other scores
    # would hide that it is wrong.
    weights = (scores - total[..., None]).exp_()
    slopes = weights * (
        grad @ value.transpose(-2, -1) - (grad * bound["out"]).sum(-1, keepdim=True)
    )
    visible = _causal_mask(bound, scores)
    if visible is not None:
        weights, slopes = (tensor.masked_fill_(~visible, 0.0) for tensor in (weights, slopes))
    visible_transposed = None if visible is None else visible.t()
    d_key = _weigh_values(slopes.transpose(-2, -1), query, visible_transposed) * _attention_scale(
        bound
    )
    d_value = _weigh_values(weights.transpose(-2, -1), grad, visible_transposed)
    # Query heads that share a key head add up their gradients.
    d_key, d_value = (tensor.unflatten(1, (heads, shared)).sum(2) for tensor in (d_key, d_value))
    return (
        _weigh_values(slopes, key.repeat_interleave(shared, 1), visible) * _attention_scale(bound),
        d_key,
        d_value,
    )
