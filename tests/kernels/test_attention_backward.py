"""The kernels of attention's backward give what float64 gives, for every mask, layout and length;
they compile, and are found.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cudal1
from tests.fake_gpu import graph_on_a_gpu
from tests.kernels.compare_attention_backward import CASES, BackwardCase, _draw_three
from tests.kernels.compare_products import normal
from tests.once import chosen_names, run_interpreted
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.cubin import check_launch, inspect_cubin
from torch_cudal1.graph.fusion.partition import FusionGroup, partition
from torch_cudal1.graph.lower import lower as lower_graph
from torch_cudal1.graph.propose import find_product_groups
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.cost import estimate_cost
from torch_cudal1.ir.program import Aten, Launch, Program, Value
from torch_cudal1.ir.records import Region
from torch_cudal1.judge.reference.analysis import analyse
from torch_cudal1.judge.reference.float64 import compute_exact_outputs
from torch_cudal1.kernels import Proposal, build, propose
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.registry import is_shortlisted

FAMILY = "attention_backward"
ROOT = Path(__file__).parents[2]
# of the result's type: a chain of three products and an exponential, relative to results that are
# small beside their terms. In fp32 NumPy's order of sums differs between processors, up to 420
# times; factors in TF32 would be 10,000 off
ROUNDINGS = {"torch.float32": 1000.0, "torch.float16": 2.0, "torch.bfloat16": 2.0}
Facts = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    names = chosen_names(request)
    return run_interpreted("tests.kernels.compare_attention_backward", names, tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_gradients_match_float64(facts: Facts, name: str) -> None:
    assert {fact["of"] for fact in facts[name]} == set(CASES[name].wanted)
    assert len(facts[name]) >= 2 * len(CASES[name].wanted)
    for fact in facts[name]:
        assert fact["special"], f"NaN or infinity misplaced: {fact}"
        assert fact["error"] <= max(ROUNDINGS[fact["dtype"]], 2.0 * fact["eager"]), (
            f"too large an error: {fact}"
        )


@pytest.mark.parametrize(
    "name", ["causal", "heads of 128", "flash, fp16, shared keys, causal", "bias, fp16"]
)
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_it_compiles_for_each_architecture(sm: int, name: str) -> None:
    reference = CASES[name].program()
    built = build(reference, propose(reference, sm)[0], sm)
    check_program(built)
    launches = [step for step in built.steps if isinstance(step, Launch)]
    assert [launch.symbol.split("_")[1] for launch in launches] == ["delta", "queries", "keys"]
    for launch in launches:
        check_launch(inspect_cubin(bytes(built.payloads[launch.payload].numpy())), launch, sm)


def test_offsets_beyond_31_bits_are_computed_in_64() -> None:
    plain = CASES["causal"].program()
    far = replace(plain.inputs[2], strides=(1 << 33, 1 << 32, 32, 1))
    program = replace(plain, inputs=(*plain.inputs[:2], far, *plain.inputs[3:]))
    (proposal, *_) = propose(program, 90)
    assert all(
        ".to(tl.int64)" in kernel.text.split("SYMBOL")[-1]
        for kernel in lower(program, proposal).kernels
    )
    assert not any(".to(tl.int64)" in kernel.text for kernel in lower(plain, proposal).kernels)
    check_program(build(program, proposal, 90))


def test_tensor_memory_is_not_filled_beyond_what_there_is() -> None:
    """There Triton would emit a body that only traps."""
    case = BackwardCase(*_draw_three(1, 2, 128, 64))
    pieces = [(p.config["method"], p.config["own"]) for p in propose(case.program(), 100)]
    assert set(pieces) == {("tf32x3", 64), ("tf32x3", 32), ("bf16x6", 32)}
    assert ("bf16x6", 128) in [
        (p.config["method"], p.config["own"]) for p in propose(case.program(), 90)
    ]


def text_of(name: str, kernel: str) -> str:
    program = CASES[name].program()
    return next(
        k.text
        for k in lower(program, propose(program, 90)[0]).kernels
        if k.symbol.startswith(f"attention_{kernel}_")
    )


def test_a_causal_mask_skips_blocks_on_both_sides_of_the_diagonal() -> None:
    assert "range(0, min(150, (block % 3 + 1) * 64), 32)" in text_of("causal", "queries")
    assert "range(block % 3 * 64 // 32 * 32, 150, 32)" in text_of("causal", "keys")
    assert "range(0, 70, 32)" in text_of("ragged", "queries")


def test_no_kernel_is_made_for_gradients_that_are_not_read() -> None:
    def kernels(name: str) -> list[str]:
        program = CASES[name].program()
        return [
            kernel.symbol.split("_")[1]
            for kernel in lower(program, propose(program, 90)[0]).kernels
        ]

    assert kernels("queries' only") == ["delta", "queries"]
    assert kernels("values' only") == ["delta", "keys"]


def test_shared_memory_of_small_gpus_is_not_asked_for_in_vain() -> None:
    reference = BackwardCase(*_draw_three(1, 2, 128, 128)).program()
    assert {proposal.config["own"] for proposal in propose(reference, 90)} == {64, 32}
    assert {proposal.config["own"] for proposal in propose(reference, 86)} == {32}


def test_products_of_half_the_accuracy_need_the_right() -> None:
    reference = CASES["ragged"].program()
    assert "tf32" not in {p.config["method"] for p in propose(reference, 90)}
    plain = next(p for p in propose(reference, 90, ["matmul"]) if p.config["method"] == "tf32")
    for kernel in lower(reference, plain).kernels[1:]:  # the first has no product
        read = {
            name
            for pair in re.findall(r"tl\.dot\((\w+), (?:tl\.trans\()?(\w+)", kernel.text)
            for name in pair
        }
        assert read
        assert {
            name for name in read if f"{name} = nearest_tf32({name})" not in kernel.text
        } == set()
    build(reference, plain, 90)


@pytest.mark.parametrize(
    "config",
    [{"method": "half"}, {"method": "tf32x3", "own": 64, "other": 48, "warps": 4, "stages": 2}],
)
def test_a_nonsense_proposal_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match="none of the tiles"):
        lower(CASES["ragged"].program(), Proposal(FAMILY, config))


def test_tiles_that_the_compiler_gets_wrong_are_neither_proposed_nor_made() -> None:
    """Out of shared memory's range on an H100, Triton 3.6: TF32 products of 16 rows in eight warps."""
    program = CASES["heads of 128"].program()
    assert not [
        p
        for p in propose(program, 90)
        if p.config["method"] == "tf32x3" and p.config["other"] == 16
    ]
    config = {"method": "tf32x3", "own": 64, "other": 16, "warps": 8, "stages": 2}
    with pytest.raises(ProgramError, match="expected 32"):
        lower(program, Proposal(FAMILY, config))


def refusal(program: Program) -> str:
    """Why there is no kernel; nothing is proposed either."""
    assert propose(program, 90) == ()
    with pytest.raises(NotLowerableError) as caught:
        lower(program, Proposal(FAMILY, {}))
    return str(caught.value)


def replace_argument(program: Program, position: int, argument: Any) -> Program:
    """The step with another argument at that place."""
    (step,) = program.steps
    assert isinstance(step, Aten)
    return replace(
        program,
        steps=(replace(step, args=(*step.args[:position], argument, *step.args[position + 1 :])),),
    )


def test_what_the_kernels_do_not_serve_is_refused_with_the_reason() -> None:
    plain = CASES["ragged"].program()
    (step,) = plain.steps
    assert isinstance(step, Aten)
    assert "no dropout" in refusal(replace_argument(plain, 9, 0.1))
    assert "a bias for every score" in refusal(replace_argument(plain, 4, step.args[1]))
    cudnn = CASES["cudnn, bf16"].program()
    assert "bias of the efficient operators" in refusal(replace_argument(cudnn, 8, Value(1)))
    assert "heads of at most 128" in refusal(BackwardCase(*_draw_three(1, 1, 40, 160)).program())
    assert "one log-sum-exp" in refusal(
        replace(plain, inputs=(*plain.inputs[:5], plain.inputs[4], *plain.inputs[6:]))
    )  # `out`
    mixed = replace(plain.inputs[0], dtype="float16")
    assert "one type" in refusal(replace(plain, inputs=(mixed, *plain.inputs[1:])))
    flash = CASES["flash, fp16"].program()
    (step,) = flash.steps
    assert isinstance(step, Aten)
    assert "no packed sequences" in refusal(replace_argument(flash, 6, step.args[-1]))
    odd = replace(flash.inputs[2], shape=(1, 3, 70, 64), strides=(3 * 70 * 64, 70 * 64, 64, 1))
    assert "which divide" in refusal(
        replace(flash, inputs=(*flash.inputs[:2], odd, odd, *flash.inputs[4:]))
    )


@pytest.mark.parametrize(
    ("operator", "served"), [("efficient", True), ("flash", False), ("cudnn", False)]
)
def test_causal_masks_that_operators_align_differently_are_refused(
    operator: str, served: bool
) -> None:
    rows, columns = normal(1, 2, 40, 16).half(), normal(1, 2, 90, 16).half()
    program = BackwardCase(rows, columns, columns, causal=True, operator=operator).program()
    if served:
        assert propose(program, 90)
    else:
        assert "as many queries as keys" in refusal(program)


def test_the_gradient_of_a_bias_is_no_result_of_these_kernels() -> None:
    program = CASES["ragged"].program()
    (step,) = program.steps
    assert isinstance(step, Aten)
    assert "no gradient of queries" in refusal(
        replace(program, outputs=(step.outs[0], step.outs[3]))
    )


EXACT = (
    "ragged",
    "causal",
    "keys of another length",
    "own scale",
    "flash, fp16, shared keys, causal",
)


@pytest.mark.parametrize(
    "name", [*EXACT, "bias", "bias, a key for nobody and a query without keys"]
)
def test_the_exact_result_is_autograds_in_float64(name: str) -> None:
    """Of the result and log-sum-exp of a forward in float64."""
    case = CASES[name]
    bias = None if case.bias is None else case.bias.double()
    case = replace(
        case, query=case.query.double(), key=case.key.double(), value=case.value.double(), bias=bias
    )
    (grad, *_), rest = case.inputs(), case.inputs()[6:]
    out, total = case.forward(torch.float64)
    gradients = compute_exact_outputs(
        case.program(),
        [grad, case.query, case.key, case.value, out, total, *rest],
        torch.device("cpu"),
    )
    assert not isinstance(gradients, Refusal)
    leaves = [tensor.clone().requires_grad_() for tensor in (case.query, case.key, case.value)]
    how: dict[str, Any] = {
        "is_causal": case.causal,
        "scale": case.scale,
        "attn_mask": bias,
        "enable_gqa": True,
    }
    attended = nn.functional.scaled_dot_product_attention(*leaves, **how)
    for got, expected in zip(gradients, torch.autograd.grad(attended, leaves, grad), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["causal", "flash, bf16, causal, heads of 128"])
def test_causal_blocks_are_no_larger_than_pytorchs_so_that_a_hidden_nan_reaches_no_further(
    name: str,
) -> None:
    case = CASES[name]
    sizes = {
        max(int(p.config[side]) for side in ("own", "other")) for p in propose(case.program(), 90)
    }
    assert max(sizes) == 64
    plain = propose(replace(case, causal=False).program(), 90)
    assert max(int(proposal.config["own"]) for proposal in plain) == 128


def test_in_the_exact_result_nothing_that_the_mask_hides_takes_part() -> None:
    case = BackwardCase(*_draw_three(1, 1, 70, 16), causal=True)
    inputs = [gradient.clone() for gradient in case.inputs()]
    inputs[0][0, 0, 20, 3] = inputs[1][0, 0, 30, 2] = float(
        "nan"
    )  # of the gradient's row 20, of query 30
    gradients = compute_exact_outputs(case.program(), inputs, torch.device("cpu"))
    assert not isinstance(gradients, Refusal)
    of_query, of_key, of_value = (
        [] if gradient is None else gradient.isnan().any(-1)[0, 0].nonzero().flatten().tolist()
        for gradient in gradients
    )
    assert of_query == [20, 30]
    assert of_key == of_value == list(range(31))


def test_it_counts_five_products_and_the_longest_sum() -> None:
    program = BackwardCase(
        normal(1, 2, 150, 16), normal(1, 2, 70, 16), normal(1, 2, 70, 48)
    ).program()
    assert estimate_cost(program).flops == 2 * (1 * 2 * 150 * 70) * (3 * 16 + 2 * 48)
    assert analyse(program).longest_reduction == 150
    assert is_shortlisted(FAMILY)


def capture_training_step(*, causal: bool) -> Region:
    """Attention between projections, forward and backward, as a GPU's process traces them."""
    aten = torch.ops.aten

    def model(x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> Any:
        q, k, v = (
            aten.select((x @ w).view(8, 1024, 3, 4, 32), 2, i).transpose(1, 2) for i in range(3)
        )
        results = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        out, total, seed, offset = results
        back = grad.view(8, 1024, 4, 32).transpose(1, 2) * 2
        mask = [True, True, True, False]
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            back, q, k, v, None, out, total, seed, offset, 0.0, mask, causal
        )
        packed = aten.stack([gradient.transpose(1, 2) for gradient in gradients[:3]], 2).reshape(
            8192, 384
        )
        return out, x.reshape(8192, 128).t() @ packed

    return lower_graph(graph_on_a_gpu(model, (8, 1024, 128), (128, 384), (8, 1024, 128))).region


def find_backward_group(region: Region) -> FusionGroup:
    groups = [
        i
        for i in find_product_groups(region)
        if "efficient_attention_backward" in str(i.region.program.steps)
    ]
    assert len(groups) == 1
    return groups[0]


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_of_a_training_step_is_a_fusion_group_of_its_own_with_proposals(
    causal: bool,
) -> None:
    group = find_backward_group(capture_training_step(causal=causal))
    assert len(group.steps) == 1
    assert len(group.region.program.outputs) == 3
    assert len(propose(group.region.program, 90)) >= 6
    assert [
        kernel.symbol.split("_")[1]
        for kernel in lower(group.region.program, propose(group.region.program, 90)[0]).kernels
    ] == [
        "delta",
        "queries",
        "keys",
    ]


def test_without_products_it_stays_with_inductor() -> None:
    assert all(
        "attention" not in str(i.region.program.steps)
        for i in partition(capture_training_step(causal=True)).groups
    )


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.back = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            heads_of_rows.unflatten(-1, (-1, 64)).transpose(1, 2)
            for heads_of_rows in self.project(x).chunk(3, -1)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.back(attended.transpose(1, 2).flatten(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_training_step_of_fp32_attention_has_eagers_gradients(tmp_path: Path) -> None:
    module, x = SelfAttention().cuda(), torch.randn(4, 1024, 256, device="cuda", requires_grad=True)
    leaves = (x, *module.parameters())
    weights = torch.randn(4, 1024, 256, device="cuda")
    expected = torch.autograd.grad(
        (module(x) * weights).sum(), leaves
    )  # before: the module itself is what is accelerated
    served = cudal1.accelerate(
        module, (x,), cache_dir=tmp_path, on_miss="tune", budget_s=60.0, strictness="error"
    )
    gradients = torch.autograd.grad((served(x) * weights).sum(), leaves)
    for got, plain in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))
