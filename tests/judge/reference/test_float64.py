"""The float64 run: nothing in it is rounded to a narrower type, and what it cannot do it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.judge.programs import V, linear_relu, op, spec, subject
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Aten, Program, TensorSpec
from torch_cudal1.judge.reference.float64 import compute_exact_outputs
from torch_cudal1.judge.reference.inputs import make_inputs

CPU = torch.device("cpu")


def test_a_linear_layer_is_exact_to_float64() -> None:
    region = linear_relu(torch.bfloat16)
    x, w, b = make_inputs(subject(region), 1, "normal", CPU)
    exact = compute_exact_outputs(region.program, [x, w, b], CPU)
    assert not isinstance(exact, Refusal)
    torch.testing.assert_close(
        exact[0], torch.relu(x.double() @ w.double().T + b.double()), rtol=1e-14, atol=1e-14
    )


def test_casts_and_dtype_arguments_inside_become_float64() -> None:
    steps = (
        op("aten._to_copy.default", V(0), dtype=torch.float16, out=1),
        op("aten.full.default", (4,), 0.1, dtype=torch.float32, out=2),
        op("aten.mul.Tensor", V(1), V(2), out=3),
        op("aten.sum.dim_IntList", V(3), (0,), dtype=torch.float32, out=4),
    )
    x = torch.tensor([1 / 3, 2 / 3, 1e5, 1e-9])
    exact = compute_exact_outputs(Program((spec(4),), steps, (4,)), [x], CPU)
    assert not isinstance(exact, Refusal)
    assert exact[0] is not None
    assert float(exact[0]) == pytest.approx(float((x.double() * 0.1).sum()), rel=1e-15)


def test_half_softmax_with_a_float_result_is_widened() -> None:
    program = Program(
        (spec(3, 5, dtype=torch.float16),),
        (op("aten._softmax.default", V(0), -1, False, out=1),),
        (1,),
    )
    x = torch.randn(3, 5).half()
    exact = compute_exact_outputs(program, [x], CPU)
    assert not isinstance(exact, Refusal)
    torch.testing.assert_close(exact[0], x.double().softmax(-1))


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_follows_its_formula(causal: bool) -> None:
    shape = (2, 3, 7, 8)
    step = Aten(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (V(0), V(1), V(2), 0.0, causal),
        (),
        (3, 4),
        many=True,
    )
    program = Program((spec(*shape),) * 3, (step,), (3, 4))
    q, k, v = (torch.randn(shape) for _ in range(3))
    exact = compute_exact_outputs(program, [q, k, v], CPU)
    assert not isinstance(exact, Refusal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal
    )
    torch.testing.assert_close(exact[0], expected)
    assert exact[1] is None  # the log-sum-exp is compared with eager only


@pytest.mark.parametrize(("name", "outs"), [("efficient", 4), ("flash", 9), ("cudnn", 9)])
def test_fused_attention_has_its_log_sum_exp_in_the_form_of_the_operator(
    name: str, outs: int
) -> None:
    q, k, v = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    args = (V(0), V(1), V(2)) if name == "flash" else (V(0), V(1), V(2), None, True)
    step = Aten(
        f"aten._scaled_dot_product_{name}_attention.default",
        args,
        (),
        tuple(range(3, 3 + outs)),
        many=True,
    )
    exact = compute_exact_outputs(
        Program((spec(2, 3, 40, 8), *(spec(2, 3, 9, 8),) * 2), (step,), (4,)), [q, k, v], CPU
    )
    assert not isinstance(exact, Refusal)
    assert exact[0] is not None
    total = exact[0].squeeze(-1)
    torch.testing.assert_close(total[..., :40], (q.double() @ k.double().mT / 8**0.5).logsumexp(-1))
    assert (
        exact[0].shape
        == {"efficient": (2, 3, 64), "flash": (2, 3, 40), "cudnn": (2, 3, 40, 1)}[name]
    )
    assert bool((total[..., 40:] == float("inf")).all())


@pytest.mark.parametrize(
    "operator", ["flash_attention_for_cpu", "efficient_attention", "cudnn_attention"]
)
def test_a_row_that_a_mask_hides_all_keys_from_is_0_as_in_eager(operator: str) -> None:
    here = operator.endswith("cpu")
    args = (V(0), V(1), V(2), 0.0, False) if here else (V(0), V(1), V(2), V(3), False)
    kwargs = (("attn_mask", V(3)),) if here else ()
    outs = {"flash_attention_for_cpu": 2, "efficient_attention": 4, "cudnn_attention": 9}[operator]
    step = Aten(
        f"aten._scaled_dot_product_{operator}.default",
        args,
        kwargs,
        tuple(range(4, 4 + outs)),
        many=True,
    )
    program = Program((*(spec(2, 3, 7, 8),) * 3, spec(2, 3, 7, 7)), (step,), (4,))
    q, k, v, mask = (
        torch.randn(2, 3, 7, 8),
        torch.randn(2, 3, 7, 8),
        torch.randn(2, 3, 7, 8),
        torch.randn(2, 3, 7, 7),
    )
    mask[..., 2, :], mask[..., 3, 1:] = -torch.inf, -torch.inf
    exact = compute_exact_outputs(program, [q, k, v, mask], CPU)
    assert not isinstance(exact, Refusal)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(exact[0], expected.double(), rtol=1e-5, atol=1e-5)
    assert not expected[..., 2, :].any()


def test_a_log_sum_exp_that_is_not_requested_has_no_exact_values() -> None:
    step = Aten(
        "aten._scaled_dot_product_efficient_attention.default",
        (V(0), V(0), V(0), None, False),
        (),
        (1, 2, 3, 4),
        many=True,
    )
    exact = compute_exact_outputs(
        Program((spec(1, 1, 4, 8),), (step,), (1, 2)), [torch.randn(1, 1, 4, 8)], CPU
    )
    assert not isinstance(exact, Refusal)
    assert exact[1] is None


@pytest.mark.parametrize("heads", [1, 2])
def test_heads_of_queries_share_keys_as_in_eager(heads: int) -> None:
    step = Aten(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (V(0), V(1), V(2), 0.0, True),
        (),
        (3, 4),
        many=True,
    )
    program = Program(
        (spec(2, 4, 7, 8), spec(2, heads, 7, 8), spec(2, heads, 7, 8)), (step,), (3, None)
    )
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, heads, 7, 8), torch.randn(2, heads, 7, 8)
    exact = compute_exact_outputs(program, [q, k, v], CPU)
    assert not isinstance(exact, Refusal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(exact[0], expected)


def test_integers_pass_through_and_strides_are_kept() -> None:
    program = Program(
        (spec(4, 6), spec(3, dtype=torch.int64)),
        (op("aten.as_strided.default", V(0), (6,), (4,), out=2),),
        (2, 1),
    )
    x = torch.arange(24.0).reshape(6, 4).t()
    indices = torch.tensor([1, 2, 3])
    exact = compute_exact_outputs(program, [x, indices], CPU)
    assert not isinstance(exact, Refusal)
    assert exact[0] is not None
    assert exact[0].tolist() == [0, 4, 8, 12, 16, 20]
    assert torch.equal(exact[1], indices)


def test_a_program_that_reads_bits_has_no_float64_result() -> None:
    program = Program((spec(4),), (op("aten.view.dtype", V(0), torch.int32, out=1),), (1,))
    assert isinstance(compute_exact_outputs(program, [torch.ones(4)], CPU), Refusal)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_follows_its_formula_and_keeps_infinities(affine: bool) -> None:
    vectors = (V(1), V(2)) if affine else (None, None)
    step = Aten(
        "aten.native_group_norm.default",
        (V(0), *vectors, 2, 6, 35, 3, 1e-5),
        (),
        (3, 4, 5),
        many=True,
    )
    program = Program((spec(2, 6, 5, 7), spec(6), spec(6)), (step,), (3, 4, 5))
    x, weight, bias = torch.randn(2, 6, 5, 7) + 2, torch.randn(6), torch.randn(6)
    wide = [x.double(), *((weight.double(), bias.double()) if affine else (None, None))]
    expected = torch.ops.aten.native_group_norm(*wide, 2, 6, 35, 3, 1e-5)
    exact = compute_exact_outputs(program, [x, weight, bias], CPU)
    assert not isinstance(exact, Refusal)
    for actual_output, expected_output in zip(exact, expected, strict=True):
        torch.testing.assert_close(actual_output, expected_output)
    if affine:
        weight[1] = float("inf")
        exact = compute_exact_outputs(program, [x, weight, bias], CPU)
        assert not isinstance(exact, Refusal)
        assert exact[0] is not None
        assert exact[0][:, 1].isinf().all()
        assert not exact[0].isnan().any()


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation", "beyond"),
    [
        ((9,), (4,), (3,), (1,), (2,), (2,)),
        ((5, 7), (3, 2), (2, 1), (1, 0), (1, 3), (1, 0)),
        ((4, 1, 5), (3, 5, 2), (1, 2, 2), (2, 1, 0), (1, 1, 1), (0, 1, 1)),
        ((4, 3, 2), (3, 3, 3), (2,), (1,), (1,), (1,)),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_transposed_convolutions_are_sums_of_products(
    size, kernel, stride, padding, dilation, beyond, bias: bool
) -> None:
    x, weight, offset = torch.randn(2, 3, *size), torch.randn(3, 4, *kernel), torch.randn(4)
    lengths = [list(each) for each in (stride, padding, dilation)]
    step = op(
        "aten.convolution.default",
        V(0),
        V(1),
        V(2) if bias else None,
        *lengths,
        True,
        list(beyond),
        1,
        out=3,
    )
    exact = compute_exact_outputs(
        Program((spec(*x.shape), spec(*weight.shape), spec(4)), (step,), (3,)),
        [x, weight, offset],
        CPU,
    )
    assert not isinstance(exact, Refusal)
    wide = (x.double(), weight.double(), offset.double() if bias else None)
    torch.testing.assert_close(
        exact[0], torch.convolution(*wide, *lengths, True, list(beyond), 1), rtol=1e-12, atol=1e-12
    )


def test_a_transposed_convolution_in_groups_has_a_float64_result_too() -> None:
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 2, 2)
    step = op(
        "aten.convolution.default", V(0), V(1), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 2, out=2
    )
    exact = compute_exact_outputs(
        Program((spec(*x.shape), spec(*weight.shape)), (step,), (2,)), [x, weight], CPU
    )
    assert not isinstance(exact, Refusal)
    expected = torch.nn.functional.conv_transpose2d(x.double(), weight.double(), stride=2, groups=2)
    torch.testing.assert_close(exact[0], expected)


def test_a_view_of_what_float64_lays_out_otherwise_is_a_view_of_its_numbers() -> None:
    """Fused attention yields heads behind rows in memory, which the model then views as one row;
    its formula yields them before.
    """
    attend = Aten(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (V(0), V(1), V(2)),
        (),
        (3, 4),
        many=True,
    )
    steps = (
        attend,
        op("aten.transpose.int", V(3), 1, 2, out=5),
        op("aten.view.default", V(5), (2, 7, 24), out=6),
    )
    program = Program((spec(2, 3, 7, 8, dtype=torch.bfloat16),) * 3, steps, (6,))
    q, k, v = (torch.randn(2, 3, 7, 8).bfloat16() for _ in range(3))
    exact = compute_exact_outputs(program, [q, k, v], CPU)
    assert not isinstance(exact, Refusal)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(exact[0], expected.transpose(1, 2).reshape(2, 7, 24))


def test_as_strided_reads_memory_as_eager_lays_it_out() -> None:
    attend = Aten(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (V(0), V(1), V(2)),
        (),
        (3, 4),
        many=True,
    )
    steps = (attend, op("aten.as_strided.default", V(3), (2, 7, 24), (168, 24, 1), out=5))
    program = Program((spec(2, 3, 7, 8),) * 3, steps, (5,))
    q, k, v = (torch.randn(2, 7, 3, 8).transpose(1, 2) for _ in range(3))
    program = replace(program, inputs=tuple(TensorSpec.of(tensor) for tensor in (q, k, v)))
    exact = compute_exact_outputs(program, [q, k, v], CPU)
    assert not isinstance(exact, Refusal)
    torch.testing.assert_close(
        exact[0].float(), interpret(program, CPU)([q, k, v])[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "forms",
    [((12, 5), (3, 5, 4)), ((5, 12), (12, 4)), ((3, 6, 5), (5, 12)), ((3, 6, 5), (3, 5, 4))],
)
def test_grouped_products_follow_their_formula(
    forms: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    a, b = (torch.randn(form).bfloat16() for form in forms)
    grouped = not (a.dim() == b.dim() == 3)
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    specs = (TensorSpec.of(a), TensorSpec.of(b), *([TensorSpec.of(ends)] if grouped else []))
    step = op("aten._grouped_mm.default", V(0), V(1), *([V(2)] if grouped else []), out=len(specs))
    exact = compute_exact_outputs(
        Program(specs, (step,), (len(specs),)), [a, b, ends][: len(specs)], CPU
    )
    assert not isinstance(exact, Refusal)
    a, b = a.double(), b.double()
    cut = [slice(0, 4), slice(4, 4), slice(4, 12)]
    if not grouped:
        expected = a @ b
    elif a.dim() == 3:
        expected = torch.cat([a[g] @ b[:, part] for g, part in enumerate(cut)], 1)
    elif b.dim() == 3:
        expected = torch.cat([a[part] @ b[g] for g, part in enumerate(cut)])
    else:
        expected = torch.stack([a[:, part] @ b[part] for part in cut])
    torch.testing.assert_close(exact[0], expected)
