"""PyTorch's one operator for an encoder layer taken apart: its values on the CPU to the last NaN,
no copy on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_cudal1.api import backend
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.lower import lower
from torch_cudal1.graph.rewrite import RULES, rewrite
from torch_cudal1.graph.rewrite.encoder_rules import ENCODER_RULES
from torch_cudal1.ir.cost import estimate_cost

from .helpers import capture, ops, run
from .test_projection_rules import EFFICIENT, ON_A_GPU, encoder, move_to_gpu
from .test_reduction_rules import draw

aten = torch.ops.aten
Fn = Callable[..., Any]


def layer_operator(
    flat: Any, *, gelu: bool, first: bool, heads: int = 3, **options: Any
) -> torch.Tensor:
    x, *weights = flat
    return aten._transformer_encoder_layer_fwd(
        x, x.shape[-1], heads, *weights[:4], gelu, first, 1e-5, *weights[4:], **options
    )


def layer_inputs(
    batch: int = 3, time: int = 5, width: int = 12, *, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    shapes = (
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        *[(width,)] * 4,
        (20, width),
        (20,),
        (width, 20),
        (width,),
    )
    return [x.to(dtype) for x in draw((batch, time, width), *shapes)]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_the_operator_of_a_whole_layer_is_taken_apart(gelu: bool, first: bool) -> None:
    fn: Fn = lambda *flat: layer_operator(flat, gelu=gelu, first=first)
    gm = capture(fn, *layer_inputs())
    rewritten = rewrite(gm, RULES, assume_finite=False)
    assert "encoder_layer" in rewritten.techniques
    assert "_transformer_encoder_layer_fwd.default" not in ops(rewritten.gm)
    assert ops(rewritten.gm)["addmm.default"] == 4
    for place in range(len(layer_inputs())):
        for value in (0.5, math.nan, math.inf, 1e25):
            inputs = layer_inputs()
            inputs[place].view(-1)[3] = value
            torch.testing.assert_close(
                run(rewritten.gm, *inputs)[0], fn(*inputs), equal_nan=True, rtol=1e-5, atol=1e-5
            )


def turned(flat: Any) -> torch.Tensor:
    return layer_operator(
        (flat[0].transpose(0, 1).contiguous().transpose(0, 1), *flat[1:]), gelu=False, first=False
    )


def test_the_layer_of_a_transposed_tensor_keeps_the_layout_that_tracing_saw() -> None:
    gm = capture(lambda *flat: turned(flat), *layer_inputs())
    (before,), (after,) = (
        run(gm, *layer_inputs()),
        run(rewrite(gm, RULES, assume_finite=False).gm, *layer_inputs()),
    )
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_a_mask_stays_with_the_operator() -> None:
    inputs = [*layer_inputs(), torch.zeros(3, 5, dtype=torch.bool)]
    gm = capture(
        lambda *flat: layer_operator(
            flat[:-1], gelu=False, first=False, mask=flat[-1], mask_type=1
        ),
        *inputs,
    )
    assert rewrite(gm, RULES, assume_finite=False).techniques == ()


def test_torch_compile_puts_the_operator_into_graphs_and_it_is_taken_apart() -> None:
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        (graph,) = trace(gm, inputs).graphs
        graphs.append((graph.module, inputs))
        return gm.forward

    module, x = encoder(2), torch.randn(3, 5, 16)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = torch.compile(module, backend=backend)(x)
    ((gm, inputs),) = graphs
    assert ops(gm)["_transformer_encoder_layer_fwd.default"] == 2
    rewritten = rewrite(gm, RULES, assume_finite=False)
    assert rewritten.sites["encoder_layer"] == 2
    assert {part for part in ops(rewritten.gm) if "encoder" in part} == set()
    lower(rewritten.gm)
    with torch.no_grad():
        torch.testing.assert_close(run(rewritten.gm, *inputs)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gelu", [False, True])
def test_a_layer_on_a_gpu_is_taken_apart_without_a_copy(
    gelu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = layer_inputs(width=16)
    gm = move_to_gpu(
        capture(lambda *flat: layer_operator(flat, gelu=gelu, first=False, heads=2), *inputs)
    )
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v: ON_A_GPU["efficient"](q, k, v)
    )
    rewritten = rewrite(gm, RULES, assume_finite=False)
    assert ops(rewritten.gm)[str(EFFICIENT).removeprefix("aten.")] == 1
    assert ops(rewritten.gm)["clone.default"] == 0
    assert [
        node.kwargs for node in rewritten.gm.graph.nodes if node.target is aten.gelu.default
    ] == [{"approximate": "tanh"}] * gelu


def test_the_gelu_of_the_operator_on_a_gpu_is_the_one_that_pytorch_decomposes_it_to() -> None:
    decomposed = torch._decomp.decomposition_table[aten._addmm_activation.default]
    with FakeTensorMode():
        fakes = [torch.empty(shape, device="cuda") for shape in ((6,), (5, 4), (4, 6))]
        decomposed_graph = make_fx(lambda b, x, w: decomposed(b, x, w, use_gelu=True))(*fakes)
    assert [
        node.kwargs for node in decomposed_graph.graph.nodes if node.target is aten.gelu.default
    ] == [{"approximate": "tanh"}]


@pytest.mark.parametrize(("batch", "time"), [(3, 5), (1, 8)])
def test_the_operator_is_estimated_as_what_it_is_made_of(batch: int, time: int) -> None:
    gm = capture(
        lambda *flat: layer_operator(flat, gelu=False, first=False), *layer_inputs(batch, time)
    )
    decomposed = rewrite(gm, ENCODER_RULES, assume_finite=False)
    assert decomposed.sites == {"encoder_layer": 1}
    whole_cost, parts = (
        estimate_cost(lower(module).region.program) for module in (gm, decomposed.gm)
    )
    assert whole_cost.flops == parts.flops
    assert whole_cost.min_bytes == parts.min_bytes
    assert whole_cost.steps == 10  # four products, attention, an activation, two sums and two norms


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_on_a_gpu_the_parts_are_as_close_to_float64_as_the_operator_is(
    gelu: bool, first: bool, dtype: torch.dtype
) -> None:
    x, *weights = layer_inputs(4, 40, 64)
    inputs = [x.to("cuda", dtype), *((w / 8).to("cuda", dtype) for w in weights)]
    fn: Fn = lambda *flat: layer_operator(flat, gelu=gelu, first=first, heads=4)
    rewritten = rewrite(capture(fn, *inputs), RULES, assume_finite=False)
    assert "_transformer_encoder_layer_fwd.default" not in ops(rewritten.gm)
    assert ops(rewritten.gm)["clone.default"] == 0
    wide = [
        t.double().cpu() for t in inputs
    ]  # on a GPU the operator takes the tanh form of gelu, on a CPU the exact one
    decomposed = rewrite(capture(fn, *wide), RULES, assume_finite=False).gm
    for node in decomposed.graph.find_nodes(op="call_function", target=aten.gelu.default):
        node.kwargs = {"approximate": "tanh"}
    (exact,) = run(decomposed, *wide)
    wrong, rewritten_error = (
        (out.double().cpu() - exact).abs().max().item()
        for out in (fn(*inputs), run(rewritten.gm, *inputs)[0])
    )
    assert rewritten_error <= 2 * wrong
    assert wrong < (1e-4 if dtype is torch.float32 else 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_torch_compile_on_a_gpu_searches_encoder_layers_apart_and_keeps_their_values(
    tmp_path: Path,
) -> None:
    module, x = encoder(2).cuda(), torch.randn(3, 5, 16, device="cuda")
    options = {"cache_dir": tmp_path, "on_miss": "tune", "budget_s": 20.0, "strictness": "error"}
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(module, backend=backend.cudal1, options=options)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
