"""On a GPU, machine code of attention, its gradients and batched products gives what float64 gives,
for every case that the interpreter is asked; and NaN, infinities and zeros where PyTorch's own
operator has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.kernels import compare_attention, compare_attention_backward, compare_products
from tests.kernels.compare import errors, outputs_of
from tests.kernels.test_device import place_on_gpu
from tests.kernels.traced_programs import trace_program
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels import Proposal, build, propose
from torch_cudal1.runtime.executor import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROUNDINGS = {
    torch.float32: 300.0,
    torch.float16: 3.0,
    torch.bfloat16: 3.0,
}  # of sums whose terms are larger than they are
LAYOUTS = [name for name in compare_products.CASES if "batch" in name or "heads" in name]


def check(
    program: Program, inputs: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Every proposal that has usable machine code, twice, against eager's results on this GPU and
    float64's. A search passes over one whose machine code is refused (`kernels.codegen.sass`); all
    of them refused is a failure here.
    """
    major, minor = torch.cuda.get_device_capability()
    built = [
        (proposal, accepted)
        for proposal in propose(program, 10 * major + minor)
        if (accepted := usable(program, proposal, 10 * major + minor))
    ]
    assert built
    for proposal, accepted in built:
        run = prepare(accepted, torch.device("cuda"))
        first, second = run(list(inputs)), run(list(inputs))
        for got, again, plain, wide in zip(first, second, eager, exact, strict=True):
            assert got is not None
            assert again is not None
            fact = errors(got, plain, wide)
            limit = max(ROUNDINGS[got.dtype], 2.5 * fact["eager"])
            assert fact["spec"], f"{proposal}: dtype, shape or strides differ: {fact}"
            assert fact["special"], f"{proposal}: NaN or infinity misplaced: {fact}"
            assert fact["error"] <= limit, f"{proposal}: error over {limit}: {fact}"
            assert torch.equal(got.nan_to_num(), again.nan_to_num()), (
                proposal
            )  # the same bits every time


def usable(program: Program, proposal: Proposal, sm: int) -> Program | None:
    """The proposal's program, None where ptxas made code of it that reads registers which nothing
    wrote.
    """
    try:
        return build(program, proposal, sm)
    except NotLowerableError as error:
        if "which nothing wrote" in str(error):
            return None
        raise


def by_pytorch(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What the Program's own steps give here: a fused operator is PyTorch's."""
    return [
        tensor
        for tensor in prepare(program, torch.device("cuda"))(list(inputs))
        if tensor is not None
    ]


@pytest.mark.parametrize("name", compare_attention.CASES)
def test_attention_matches_float64_and_the_operator(name: str) -> None:
    function, host_inputs = compare_attention.CASES[name]
    program, inputs = (
        compare_attention.program_of(function, host_inputs),
        [place_on_gpu(tensor) for tensor in host_inputs],
    )
    exact = [
        tensor.cuda()
        for tensor in outputs_of(function, [tensor.double() for tensor in host_inputs])
    ]
    check(program, inputs, by_pytorch(program, inputs), exact)


@pytest.mark.parametrize("name", compare_attention_backward.CASES)
def test_gradients_match_float64_and_the_operator(name: str) -> None:
    case = compare_attention_backward.CASES[name]
    program, inputs = case.program(), [place_on_gpu(tensor) for tensor in case.inputs()]
    check(
        program,
        inputs,
        by_pytorch(program, inputs),
        [tensor.cuda() for tensor in case.compute_gradients(torch.float64)],
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_batched_products_match_float64(name: str) -> None:
    function, host_inputs = compare_products.CASES[name]
    inputs = [place_on_gpu(tensor) for tensor in host_inputs]
    exact = outputs_of(function, [tensor.double() for tensor in inputs])
    check(trace_program(function, host_inputs), inputs, outputs_of(function, inputs), exact)


def test_in_plain_tf32_it_is_as_exact_as_pytorchs_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of positive terms, whose sums keep whatever bias the operands are rounded with."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    inputs = tuple(compare_products.normal(4, 256, 64).abs() for _ in range(3))
    program = compare_attention.program_of(compare_attention.with_relu, inputs)
    device_inputs = [tensor.cuda() for tensor in inputs]
    exact = compare_attention.with_relu(*(tensor.double() for tensor in device_inputs))

    def error(output: Tensor | None) -> float:
        assert output is not None
        return float((output.double() - exact).square().mean().sqrt())

    major, minor = torch.cuda.get_device_capability()
    sm = 10 * major + minor
    eager = error(compare_attention.with_relu(*device_inputs))
    plain = [
        proposal
        for proposal in propose(program, sm, ["matmul"])
        if proposal.config["method"] == "tf32"
    ]
    assert plain
    for proposal in plain:
        assert (
            error(prepare(build(program, proposal, sm), torch.device("cuda"))(device_inputs)[0])
            <= 1.5 * eager
        ), proposal
