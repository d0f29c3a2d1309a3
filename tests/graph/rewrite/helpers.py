"""Graphs as the backend sees them, and ways to compare what they compute: shared by all tests of
the rewrite rules.

The graphs come from AOTAutograd itself without decompositions, so a test pattern is never one that
only a test writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._functorch.aot_autograd import aot_function

from torch_cudal1.graph.rewrite import RewriteResult, Rule, rewrite
from torch_cudal1.graph.rewrite.match import iter_calls

__all__ = [
    "INF",
    "INTS",
    "NAN",
    "ODD",
    "capture",
    "capture_module",
    "check_exact",
    "check_removal",
    "check_untouched",
    "close_to_float64",
    "find_call",
    "ops",
    "run",
    "same",
]

NAN, INF = float("nan"), float("inf")
# NaN, both infinities, both zeros, subnormals and numbers near the end of float32
ODD = torch.tensor([[0.0, -0.0, NAN, INF], [-INF, 1.5, -2.0, 1e-40], [3e38, -1e-45, 0.5, 2.5]])
INTS = torch.tensor([[-3, 0, 2], [7, -1, 5]])


def capture(fn: Callable[..., Any], *inputs: Any, grad: bool = False) -> fx.GraphModule:
    """The functional ATen graph of `fn(*inputs)`: one placeholder per tensor of `inputs`, in order.

    Without `grad` the inference graph; with it the forward graph of training (its outputs then
    include the saved tensors).
    """
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return gm

    with torch.set_grad_enabled(grad):
        aot_function(fn, fw_compiler=keep, bw_compiler=keep, inference_compiler=keep)(*inputs)
    return graphs[0]


def capture_module(
    module: torch.nn.Module, *inputs: torch.Tensor
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The inference graph of a module with its parameters and buffers as leading placeholders, and
    the inputs to run it with.
    """
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    values = [value.detach() for value in state.values()]

    def fn(*flat: torch.Tensor) -> Any:
        return torch.func.functional_call(
            module, dict(zip(state, flat, strict=False)), flat[len(state) :]
        )

    flat = [*values, *inputs]
    return capture(fn, *flat), flat


def ops(gm: fx.GraphModule) -> Counter[str]:
    """How often each ATen overload occurs, as "mm.default"."""
    return Counter(
        str(node.target).removeprefix("aten.")
        for node in gm.graph.nodes
        if node.op == "call_function"
    )


def run(gm: fx.GraphModule, *inputs: Any) -> list[Any]:
    """Outputs of the graph as a flat list, computed on real inputs without gradients."""
    with torch.no_grad():
        out = fx.Interpreter(gm).run(*inputs)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Every output equal bit for bit up to the sign of zero, NaN where the other has NaN, with the
    same dtype and strides.
    """
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def close_to_float64(
    gm: fx.GraphModule,
    fn: Callable[..., Any],
    *inputs: Any,
    slack: float = 4.0,
    magnitude: float = 0.0,
) -> None:
    """`gm` is about as close to `fn` in float64 as `fn` itself: at most `slack` times its error
    plus a few units in the last place. `magnitude`: of what is summed, where it may cancel.

    Non-finite elements must be non-finite in the same way as those of `fn` at its own precision.
    """
    wide = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
    ]
    eager, exact = _flat(fn(*inputs)), _flat(fn(*wide))
    for got, base, true in zip(run(gm, *inputs), eager, exact, strict=True):
        assert (got.dtype, got.shape, got.stride()) == (base.dtype, base.shape, base.stride())
        if not got.is_floating_point():
            assert torch.equal(got, base)
            continue
        odd = ~torch.isfinite(base)
        torch.testing.assert_close(got[odd], base[odd], equal_nan=True, rtol=0, atol=0)
        good = ~odd & torch.isfinite(true)
        if not good.any():
            continue
        scale = true[good].abs().max().clamp(min=magnitude)
        limit = (
            slack * (base.double() - true)[good].abs().max()
            + 16 * torch.finfo(got.dtype).eps * scale
        )
        assert (got.double() - true)[good].abs().max() <= limit


def _flat(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def check_exact(
    rules: Sequence[Rule], fn: Callable[..., Any], *inputs: Any, finite: bool = False
) -> RewriteResult:
    """Rewrite the captured `fn` with `rules` and see that the outputs stay bit for bit what the
    captured graph gives.
    """
    gm = capture(fn, *inputs)
    out = rewrite(gm, rules, assume_finite=finite)
    same(run(out.gm, *inputs), run(gm, *inputs))
    return out


def check_removal(
    rules: Sequence[Rule], technique: str, fn: Callable[..., Any], x: torch.Tensor, removed_op: str
) -> None:
    """`technique` fires on `fn`, `removed_op` is gone afterwards, and every bit stays, signs of zero
    included.
    """
    out = check_exact(rules, fn, x)
    assert technique in out.techniques
    assert (
        sum(ops(out.gm).values()) < sum(ops(capture(fn, x)).values())
        or technique == "reduction_of_one"
    )
    assert not ops(out.gm)[removed_op]
    if x.is_floating_point():
        gm = capture(fn, x)
        for new, old in zip(run(out.gm, x), run(gm, x), strict=True):
            zeros = old == 0
            assert torch.equal(torch.signbit(new)[zeros], torch.signbit(old)[zeros])


def check_untouched(rules: Sequence[Rule], fn: Callable[..., Any], x: torch.Tensor) -> None:
    """No rule fires on `fn`, but for dead code and views that change nothing."""
    gm = capture(fn, x)
    out = rewrite(gm, rules, assume_finite=False)
    assert set(out.techniques) <= {"dead_code", "redundant_view"}
    names = {
        name: count
        for name, count in ops(gm).items()
        if name not in ("detach.default", "alias.default")
    }
    assert {name: ops(out.gm)[name] for name in names} == names


def find_call(gm: fx.GraphModule, overload: Any) -> fx.Node:
    """The one call of `overload` in the graph."""
    (node,) = iter_calls(gm, overload)
    return node
