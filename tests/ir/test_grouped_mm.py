"""Products of groups: the operator against its formula, its gradients, and what it takes the place
of.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_cudal1.ir.ops.grouped_mm import operator_of, replace_library_operators

PRODUCTS = operator_of("cudal1.grouped_mm.default")
ENDS = torch.tensor([4, 4, 9], dtype=torch.int32)


def by_formula(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    groups = [slice(begin, end) for begin, end in itertools.pairwise([0, *ENDS.tolist()])]
    if b.dim() == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    rest = a.new_zeros(a.shape[0] - int(ENDS[-1]), b.shape[-1])
    return torch.cat([*(a[group] @ b[number] for number, group in enumerate(groups)), rest])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("columns", [8, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_its_formula_in_every_dtype_and_alignment(
    dtype: torch.dtype, columns: int, device: str
) -> None:
    a, b = torch.randn(9, 8).to(device, dtype), torch.randn(3, 8, columns).to(device, dtype)
    ends = ENDS.to(device)
    result = PRODUCTS(a, b, ends)
    assert result.is_contiguous()
    torch.testing.assert_close(result, by_formula(a, b))
    torch.testing.assert_close(PRODUCTS(a.t(), result, ends), by_formula(a.t(), result))


def test_rows_behind_the_last_group_are_zero() -> None:
    assert not bool(PRODUCTS(torch.randn(11, 5), torch.randn(3, 5, 5), ENDS)[9:].any())


def test_its_gradients_are_those_of_the_formula() -> None:
    first, second = (
        torch.randn(9, 6, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 6, 4, dtype=torch.float64),
    )
    second.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: PRODUCTS(a, b, ENDS), (first, second))


def test_operands_that_do_not_fit_are_refused_with_their_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"expected \(rows, terms\).*came \(9, 8\), \(3, 7, 4\) and \(3,\)"
    ):
        PRODUCTS(torch.randn(9, 8), torch.randn(3, 7, 4), ENDS)


def test_it_passes_pytorchs_own_checks_of_operators() -> None:
    torch.library.opcheck(
        PRODUCTS,
        (torch.randn(9, 8, requires_grad=True), torch.randn(3, 8, 4, requires_grad=True), ENDS),
    )


def test_the_operator_of_transformers_is_replaced_however_it_is_called() -> None:
    pytest.importorskip("transformers.integrations.moe")
    fallback = torch.ops.transformers.grouped_mm_fallback
    graph = torch.fx.Graph()
    a, b, ends = (graph.placeholder(name) for name in ("left", "right", "ends"))
    nodes = [
        graph.call_function(fallback, (a, b), {"offs": ends}),
        graph.call_function(fallback.default, (a, b, ends)),
    ]
    graph.output(tuple(nodes))
    replace_library_operators(graph)
    assert [node.target for node in nodes] == [PRODUCTS, PRODUCTS]
    inputs = torch.randn(9, 8), torch.randn(3, 8, 4), ENDS
    for result in torch.fx.GraphModule({}, graph)(*inputs):
        torch.testing.assert_close(result, fallback(*inputs))
