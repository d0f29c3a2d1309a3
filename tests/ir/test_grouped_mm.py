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


def by_formula(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    groups = [slice(begin, end) for begin, end in itertools.pairwise([0, *ENDS.tolist()])]
    if right.dim() == 2:
        return torch.stack([left[:, group] @ right[group] for group in groups])
    rest = left.new_zeros(left.shape[0] - int(ENDS[-1]), right.shape[-1])
    return torch.cat([*(left[group] @ right[number] for number, group in enumerate(groups)), rest])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("columns", [8, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_its_formula_in_every_dtype_and_alignment(
    dtype: torch.dtype, columns: int, device: str
) -> None:
    left, right = torch.randn(9, 8).to(device, dtype), torch.randn(3, 8, columns).to(device, dtype)
    ends = ENDS.to(device)
    found = PRODUCTS(left, right, ends)
    assert found.is_contiguous()
    torch.testing.assert_close(found, by_formula(left, right))
    torch.testing.assert_close(PRODUCTS(left.t(), found, ends), by_formula(left.t(), found))


def test_rows_behind_the_last_group_are_zero() -> None:
    assert not bool(PRODUCTS(torch.randn(11, 5), torch.randn(3, 5, 5), ENDS)[9:].any())


def test_its_gradients_are_those_of_the_formula() -> None:
    left, right = (
        torch.randn(9, 6, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 6, 4, dtype=torch.float64),
    )
    right.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: PRODUCTS(a, b, ENDS), (left, right))


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
    left, right, ends = (graph.placeholder(name) for name in ("left", "right", "ends"))
    nodes = [
        graph.call_function(fallback, (left, right), {"offs": ends}),
        graph.call_function(fallback.default, (left, right, ends)),
    ]
    graph.output(tuple(nodes))
    replace_library_operators(graph)
    assert [node.target for node in nodes] == [PRODUCTS, PRODUCTS]
    given = torch.randn(9, 8), torch.randn(3, 8, 4), ENDS
    for found in torch.fx.GraphModule({}, graph)(*given):
        torch.testing.assert_close(found, fallback(*given))
