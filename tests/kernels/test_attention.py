"""Attention in one kernel gives what float64 gives, for every mask, layout and length; it compiles,
and is found in a graph.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cudal1
from tests.fake_gpu import graph_on_a_gpu, on_the_cpu
from tests.kernels.compare_attention import (
    CASES,
    CUT_OFF,
    HALF,
    attend_as_mingpt,
    program_of,
    with_relu,
)
from tests.kernels.traced_programs import AtenStep, trace_program
from tests.once import chosen_names, run_interpreted
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.cubin import check_launch, inspect_cubin
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import partition, splice
from torch_cudal1.graph.lower import lower as lower_graph
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Aten, Launch, Program, Value
from torch_cudal1.ir.records import Region
from torch_cudal1.judge.reference.float64 import compute_exact_outputs
from torch_cudal1.kernels import Proposal, build, propose
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.runtime.executor import prepare

ROOT = Path(__file__).parents[2]
# of the result's type; a chain of two products and an exponential, relative to results that are
# small beside their terms
ROUNDINGS = {"torch.float32": 200.0, "torch.float16": 2.0, "torch.bfloat16": 2.0}
WIDE = "softmax in fp32"  # and its weights rounded: cases whose names begin so
Facts = dict[str, list[dict[str, Any]]]
MASK = torch.tril(torch.ones(1, 1, 64, 64))


@pytest.fixture(scope="module")
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    names = [*chosen_names(request), CUT_OFF]
    return run_interpreted("tests.kernels.compare_attention", names, tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_attention_matches_float64(facts: Facts, name: str) -> None:
    assert len(facts[name]) >= 2
    for fact in facts[name]:
        assert fact["spec"], f"dtype, shape or strides differ: {fact}"
        assert fact["special"], f"NaN or infinity misplaced: {fact}"
        assert fact["error"] <= max(ROUNDINGS[fact["dtype"]], 2.0 * fact["eager"]), (
            f"too large an error: {fact}"
        )


def test_tf32_operands_are_rounded_before_tensor_cores_cut_them_off(facts: Facts) -> None:
    """As cuBLAS does: what is cut off has a bias, which sums of positive terms keep."""
    assert facts[CUT_OFF]
    for fact in facts[CUT_OFF]:
        assert fact["cut off"] > 3 * fact["nearest"], "the inputs do not tell the two apart"
        assert fact["error"] <= 1.5 * fact["nearest"], fact


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(WIDE)])
def test_scores_that_are_not_rounded_make_it_more_exact_than_eager(facts: Facts, name: str) -> None:
    for fact in facts[name]:
        assert 0.0 < fact["error"] < fact["eager"]


@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "log-sum-exp, padded beyond a tile",
        f"{WIDE}, bf16 on a GPU, causal, keys repeated",
        "bias, fp16",
        "decays, ragged",
    ],
)
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
def test_it_compiles_for_each_architecture(sm: int, name: str) -> None:
    reference = program_of(*CASES[name])
    built = build(reference, propose(reference, sm, most=8)[-1], sm)
    check_program(built)
    (launch,) = (step for step in built.steps if isinstance(step, Launch))
    check_launch(inspect_cubin(bytes(built.payloads[launch.payload].numpy())), launch, sm)


def test_causal_attention_looks_at_no_tile_beyond_the_diagonal() -> None:
    def text(name: str) -> str:
        program = program_of(*CASES[name])
        return lower(program, propose(program, 90)[0]).kernels[0].text

    assert "min(130, (block % 2 + 1) * 128)" in text("causal")
    assert (
        "min(" not in text("ragged").split("SYMBOL", 1)[-1].split("for start", 1)[1].splitlines()[0]
    )


def test_products_of_half_the_accuracy_need_the_right() -> None:
    reference = program_of(*CASES["ragged"])
    assert "tf32" not in {p.config["method"] for p in propose(reference, 90)}
    assert "tf32" in {p.config["method"] for p in propose(reference, 90, ["matmul"])}


@pytest.mark.parametrize(
    "config",
    [{"method": "half"}, {"method": "tf32x3", "rows": 128, "columns": 48, "warps": 8, "stages": 2}],
)
def test_a_nonsense_proposal_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match="none of the tiles"):
        lower(program_of(*CASES["ragged"]), Proposal("attention", config))


def test_queries_that_do_not_stay_in_registers_are_refused() -> None:
    wide = trace_program(with_relu, (torch.zeros(2, 64, 256),) * 3)
    assert propose(wide, 90) == ()
    with pytest.raises(NotLowerableError, match="more than 128"):
        lower(wide, Proposal("attention", {}))


def test_seeds_that_are_read_are_refused_since_pytorch_leaves_them_undefined() -> None:
    function, inputs = CASES["log-sum-exp, ragged"]
    program = program_of(function, inputs)
    (step,) = program.steps
    assert isinstance(step, Aten)
    assert propose(program, 90)
    assert (
        refusal(replace(program, outputs=step.outs))
        == "output 5 (int64 of shape ()) is a result that no kernel yields"
    )


def refusal(program: Program) -> str:
    """Why there is no kernel; nothing is proposed either."""
    assert propose(program, 90) == ()
    with pytest.raises(NotLowerableError) as caught:
        lower(program, Proposal("attention", {}))
    return str(caught.value)


def three(*dtypes: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, each a tensor of its own: tracing takes one tensor for one input."""
    return tuple(torch.zeros(2, 70, 16, dtype=dtype) for dtype in dtypes)


def attend_in_half_type(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1).to(v.dtype), v)


def attend_with_weights_rounded_twice(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    return torch.bmm(
        torch.bmm(q, k.transpose(1, 2)).softmax(-1, dtype=torch.float32).bfloat16().half(), v
    )


def test_products_of_two_types_are_refused() -> None:
    reason = refusal(trace_program(attend_in_half_type, three(torch.float32, torch.float32, HALF)))
    assert (
        reason == "a product of torch.float32 for the scores and of torch.float16 with the values"
    )
    assert (
        refusal(trace_program(attend_in_half_type, three(HALF, HALF, torch.float32)))
        == "a product of torch.float16 and torch.float32"
    )


@pytest.mark.parametrize(
    ("odd", "reason"),
    [(1, "keys have another type"), (2, "float32 with the values")],
    ids=["keys", "values"],
)
def test_a_fused_operator_of_two_types_is_refused(odd: int, reason: str) -> None:
    inputs = [torch.zeros(1, 2, 70, 16).half() for _ in range(3)]
    inputs[odd] = inputs[odd].float()
    args = (Value(0), Value(1), Value(2), 0.0, False)
    step = AtenStep("aten._scaled_dot_product_flash_attention.default", args, 9, lambda *_: None)
    assert reason in refusal(step.program(inputs, "cuda"))


def test_queries_and_keys_of_two_types_are_refused() -> None:
    half = trace_program(with_relu, three(HALF, HALF, HALF))
    assert propose(half, 90)
    keys = replace(half.inputs[1], dtype="float32")
    assert "expected scalar type" in refusal(
        replace(half, inputs=(half.inputs[0], keys, half.inputs[2]))
    )


def test_weights_rounded_to_another_type_than_the_values_are_refused() -> None:
    """The second product reads them in its own type, eager in one that holds less."""
    assert "rounded to another type" in refusal(
        trace_program(attend_with_weights_rounded_twice, three(HALF, HALF, HALF))
    )


def test_the_exact_result_has_no_rounded_weights() -> None:
    """The judge's run in float64, of what a GPU captures: conversions round nothing there, in
    whichever form they are.
    """
    for name in (f"{WIDE}, fp16 on a GPU", f"{WIDE}, decomposed"):
        function, inputs = CASES[name]
        exact = compute_exact_outputs(
            on_the_cpu(program_of(function, inputs)), inputs, torch.device("cpu")
        )
        assert not isinstance(exact, Refusal)
        torch.testing.assert_close(
            exact[0], function(*(tensor.double() for tensor in inputs)), rtol=1e-12, atol=1e-12
        )


def whole(*, inner: int = 32, also: bool = False) -> Region:
    """A model's graph: projections around attention. `also`: the weights are a result too."""

    def model(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> Any:
        out = attend_as_mingpt(x @ w, torch.sin(x), x * 2, mask)
        return (
            (torch.tanh(out) @ w, torch.bmm(x, x.transpose(1, 2)).softmax(-1))
            if also
            else torch.tanh(out) @ w
        )

    program: Program = trace_program(
        model, (torch.randn(2, 64, inner), torch.randn(inner, inner), MASK), device="cpu"
    )
    return Region(program, tuple("input" for _ in program.inputs), "inference", "whole", "model")


def targets(region: Region) -> list[str]:
    return [step.target.split(".")[1] for step in region.program.steps]  # type: ignore[union-attr]


def test_written_out_attention_is_one_fusion_group_and_splices_back() -> None:
    region = whole(also=True)
    groups = [
        i for i in partition(region, products=True).groups if targets(i.region).count("bmm") == 2
    ]
    assert len(groups) == 1
    assert "_softmax" in targets(groups[0].region)
    assert targets(groups[0].region)[-1] in (
        "view",
        "clone",
        "tanh",
    )  # heads go back inside rows, and what follows element by element
    inputs = [torch.randn(spec.shape) for spec in region.program.inputs]
    spliced = splice(
        region.program,
        {group: group.region.program for group in partition(region, products=True).groups},
    )
    for expected, got in zip(
        prepare(region.program, torch.device("cpu"))(inputs),
        prepare(spliced, torch.device("cpu"))(inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_attention_of_long_queries_or_without_products_stays_in_parts() -> None:
    assert all(
        targets(i.region).count("bmm") < 2
        for i in partition(whole(inner=512), products=True).groups
    )
    assert all("bmm" not in targets(i.region) for i in partition(whole()).groups)


def repeat_traced_heads(x: torch.Tensor, times: int) -> torch.Tensor:
    """What a graph holds of Hugging Face's `repeat_kv`."""
    aten = torch.ops.aten
    batch, key_heads, length, size = x.shape
    wide = aten.expand(aten.unsqueeze(x, 2), [batch, key_heads, times, length, size])
    return aten._unsafe_view(
        aten.clone(wide, memory_format=torch.contiguous_format),
        [batch, key_heads * times, length, size],
    )


def capture_fused_attention(*, times: int, also: bool = False) -> Region:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        keys, values = (repeat_traced_heads(x, times) if times > 1 else x for x in (k, v))
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, 0.0, True)[0] * 2
        return (out, keys) if also else out

    return lower_graph(
        graph_on_a_gpu(model, (2, 8, 70, 40), (2, 2, 70, 40), (2, 2, 70, 40), dtype=torch.float16)
    ).region


@pytest.mark.parametrize("times", [1, 4])
def test_a_fused_operator_reads_the_few_heads_of_keys_that_there_are(times: int) -> None:
    region = capture_fused_attention(times=times)
    (group,) = (
        i
        for i in partition(region, products=True).groups
        if "_scaled_dot_product_flash_attention" in targets(i.region)
    )
    assert sorted(spec.shape for spec in group.region.program.inputs) == [
        (2, 2, 70, 40),
        (2, 2, 70, 40),
        (2, 8, 70, 40),
    ]
    assert len(propose(group.region.program, 90)) >= 2


def test_repeated_keys_that_something_else_reads_are_written_once() -> None:
    region = capture_fused_attention(times=4, also=True)
    (group,) = (
        i
        for i in partition(region, products=True).groups
        if "_scaled_dot_product_flash_attention" in targets(i.region)
    )
    assert sorted(spec.shape for spec in group.region.program.inputs) == [
        (2, 2, 70, 40),
        (2, 8, 70, 40),
        (2, 8, 70, 40),
    ]


def test_heads_that_do_not_divide_are_refused() -> None:
    inputs = (torch.zeros(1, 6, 70, 16).half(), *(torch.zeros(1, 4, 70, 16).half(),) * 2)
    step = AtenStep(
        "aten._scaled_dot_product_flash_attention.default",
        (Value(0), Value(1), Value(2)),
        9,
        lambda *_: None,
    )
    with pytest.raises(NotLowerableError, match="1 x 4 heads for queries of 1 x 6"):
        lower(step.program(inputs, "cuda"), Proposal("attention", {}))


class GroupedQueryAttention(nn.Module):
    """Four heads of queries for each of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.shared = nn.Linear(256, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            heads.unflatten(-1, (-1, 32)).transpose(1, 2)
            for heads in (self.project(x), *self.shared(x).chunk(2, -1))
        ]
        return (
            nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_of_half_types_is_one_region_on_a_gpu_and_served(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    module, x = (
        GroupedQueryAttention().cuda().to(dtype).eval(),
        torch.randn(2, 512, 256, device="cuda", dtype=dtype),
    )
    with torch.no_grad():
        (region,) = capture_regions(module, (x,))
        assert any("_scaled_dot_product" in target for target in targets(region))
        expected = module(x)  # before: the module itself is what is accelerated
        served = cudal1.accelerate(
            module, (x,), cache_dir=tmp_path, on_miss="tune", budget_s=10.0, strictness="error"
        )
        torch.testing.assert_close(served(x), expected, rtol=2e-2, atol=2e-2)


def test_both_ways_of_fp32s_accuracy_are_proposed_with_and_without_a_softmax() -> None:
    """Six products without one were wrong on an H100 where ptxas made code that is refused now
    (`kernels.codegen.sass`).
    """
    methods = {}
    for name in ("relu", "ragged"):
        function, inputs = CASES[name]
        methods[name] = {
            proposal.config["method"] for proposal in propose(program_of(function, inputs), 90)
        }
    assert methods == {"relu": {"tf32x3", "bf16x6"}, "ragged": {"tf32x3", "bf16x6"}}
