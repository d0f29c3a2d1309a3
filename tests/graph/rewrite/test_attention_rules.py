"""Fused attention of wide heads as two products: the same values, only where nothing else is asked
of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F

from tests.fake_gpu import graph_on_a_gpu
from torch_cudal1.graph.rewrite import attention_rules, rewrite
from torch_cudal1.graph.rewrite.attention_rules import ATTENTION_RULES as RULES
from torch_cudal1.graph.rewrite.attention_rules import ATTENTION_SCALE_RULES

from .helpers import capture, close_to_float64, ops

CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


@pytest.fixture
def of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule for the operator that this machine can run, from heads of 17."""
    monkeypatch.setattr(attention_rules, "_FUSED", (CPU,))
    monkeypatch.setattr(attention_rules, "_LEAST_DEPTH", 17)


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


@pytest.mark.usefixtures("of_the_cpu")
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("turned", [False, True])
def test_wide_heads_become_two_products_with_the_same_values_and_layout(
    scale: float | None, turned: bool
) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v)) if turned else (q, k, v)
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    shapes = (
        ((2, 7, 3, 40), (2, 9, 3, 40), (2, 9, 3, 40))
        if turned
        else ((2, 3, 7, 40), (2, 3, 9, 40), (2, 3, 9, 40))
    )
    inputs = [heads(*shape) for shape in shapes]
    gm = capture(attend, *inputs)
    assert str(CPU).removeprefix("aten.") in ops(gm)
    out = rewrite(gm, RULES, assume_finite=False)
    assert out.techniques == ("attention_in_products",)
    assert ops(out.gm)["bmm.default"] == 2
    assert str(CPU).removeprefix("aten.") not in ops(out.gm)
    close_to_float64(out.gm, attend, *inputs)


REFUSED: dict[str, Any] = {
    "narrow heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q[..., :16], k[..., :16], v),
        torch.float32,
    ),
    "causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        torch.float32,
    ),
    "half": (F.scaled_dot_product_attention, torch.bfloat16),
}


@pytest.mark.usefixtures("of_the_cpu")
@pytest.mark.parametrize("name", REFUSED)
def test_all_else_stays(name: str) -> None:
    function, dtype = REFUSED[name]
    gm = capture(function, *(heads(2, 3, 7, 40, dtype=dtype) for _ in range(3)))
    assert rewrite(gm, RULES, assume_finite=False).techniques == ()


@pytest.mark.usefixtures("of_the_cpu")
def test_scores_that_would_fill_the_memory_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = capture(F.scaled_dot_product_attention, *(heads(2, 3, 7, 40) for _ in range(3)))
    monkeypatch.setattr(attention_rules, "_MOST_SCORES", 2 * 3 * 7 * 7 - 1)
    assert rewrite(gm, RULES, assume_finite=False).techniques == ()


def on_a_gpu(*, logsumexp: bool = False, masked: bool = False) -> fx.GraphModule:
    """What PyTorch makes of fp32 attention there; traced on tensors without memory."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> Any:
        results = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, mask if masked else None, logsumexp
        )
        return (results[0], results[1]) if logsumexp else results[0]

    return graph_on_a_gpu(attend, *[(2, 3, 7, 200)] * 3, (2, 3, 7, 7))


def test_the_operator_of_a_gpu_is_taken_with_its_layout() -> None:
    gm = on_a_gpu()
    (fused,) = (node for node in gm.graph.nodes if node.target is EFFICIENT)
    before = next(iter(fused.users)).meta["val"]
    out = rewrite(gm, RULES, assume_finite=False)
    assert out.techniques == ("attention_in_products",)
    (result,) = (node.args[0] for node in out.gm.graph.nodes if node.op == "output")
    assert (result.meta["val"].shape, result.meta["val"].stride()) == (
        before.shape,
        before.stride(),
    )


def test_what_training_keeps_for_its_backward_stays_with_the_operator() -> None:
    assert rewrite(on_a_gpu(logsumexp=True), RULES, assume_finite=False).techniques == ()


def test_a_mask_stays_with_the_operator_since_it_may_leave_rows_without_a_score() -> None:
    assert rewrite(on_a_gpu(masked=True), RULES, assume_finite=False).techniques == ()


def split_heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 7, 3, 8).transpose(1, 2).contiguous()


# name -> (function of query, key and value, how many factors go, the scale afterwards)
SCALED: dict[str, tuple[Any, int, float]] = {
    "Whisper's queries": (
        lambda q, k, v: F.scaled_dot_product_attention(
            split_heads(q * 0.125), split_heads(k), split_heads(v), scale=1.0
        ),
        1,
        0.125,
    ),
    "a division, and the default scale": (
        lambda q, k, v: F.scaled_dot_product_attention(
            split_heads(q) / 4, split_heads(k), split_heads(v)
        ),
        1,
        0.25 / 8**0.5,
    ),
    "both operands": (
        lambda q, k, v: F.scaled_dot_product_attention(
            split_heads(q * 0.5), split_heads(k * 3.0), split_heads(v), scale=2.0
        ),
        2,
        3.0,
    ),
    "under a causal mask": (
        lambda q, k, v: F.scaled_dot_product_attention(
            split_heads(q * 0.5), split_heads(k), split_heads(v), is_causal=True, scale=1.0
        ),
        1,
        0.5,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_factor_of_queries_or_keys_is_in_the_scale(name: str) -> None:
    attend, sites, scale = SCALED[name]
    inputs = [heads(2, 7, 24) for _ in range(3)]
    out = rewrite(capture(attend, *inputs), ATTENTION_SCALE_RULES, assume_finite=False)
    assert out.sites == {"scale_in_attention": sites}
    assert not {"mul.Tensor", "div.Tensor"} & set(ops(out.gm))
    (node,) = [node for node in out.gm.graph.nodes if node.target is CPU]
    assert node.kwargs["scale"] == pytest.approx(scale)
    close_to_float64(out.gm, attend, *inputs)


@pytest.mark.parametrize(
    "attend",
    [
        # Kernels look for the largest score before they scale.
        lambda q, k, v: F.scaled_dot_product_attention(q * -0.5, k, v),
        lambda q, k, v: F.scaled_dot_product_attention(q * 0.0, k, v),
        # No number.
        lambda q, k, v: F.scaled_dot_product_attention(q * v, k, v),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v * 0.5),
    ],
)
def test_other_factors_stay(attend: Any) -> None:
    inputs = [heads(2, 3, 7, 8) for _ in range(3)]
    out = rewrite(capture(attend, *inputs), ATTENTION_SCALE_RULES, assume_finite=False)
    assert not out.sites


def test_a_scaled_operand_that_something_else_reads_stays() -> None:
    def read_twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        scaled = q * 0.5
        return F.scaled_dot_product_attention(scaled, k, v), scaled

    def use_as_key(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scaled = q * 0.5
        return F.scaled_dot_product_attention(scaled, scaled, v)

    inputs = [heads(2, 3, 7, 8) for _ in range(3)]
    for attend, operands in ((read_twice, inputs), (use_as_key, inputs[:2])):
        gm = capture(attend, *operands)
        assert not rewrite(gm, ATTENTION_SCALE_RULES, assume_finite=False).sites
