"""Attention of half types with its softmax in fp32 is one fusion group of a transformer's graph, as a
GPU's process captures it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fake_gpu import graph_on_a_gpu, on_the_cpu
from torch_cudal1.graph.fusion.partition import FusionGroup, partition, splice
from torch_cudal1.graph.lower import lower
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Aten, Program, Value
from torch_cudal1.ir.records import Region
from torch_cudal1.kernels import propose
from torch_cudal1.runtime.executor import prepare

BATCH, LENGTH, WIDTH, HEADS, SHARED, SIZE = 2, 70, 96, 6, 2, 16
BMM, SOFTMAX, CONVERSION = "aten.bmm.default", "aten._softmax.default", "aten._to_copy.default"


class Norm(nn.Module):
    """RMS norm in fp32, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions."""
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def repeat_heads(x: Tensor) -> Tensor:
    """Keys or values for each head of the queries."""
    wide = x.unsqueeze(2).expand(BATCH, SHARED, HEADS // SHARED, LENGTH, SIZE)
    return wide.reshape(BATCH, HEADS, LENGTH, SIZE)


class Layer(nn.Module):
    """A decoder layer as Hugging Face writes Llama's, with attention "eager". `capped`: scores as
    Gemma's, no rotary positions.
    """

    def __init__(self, *, capped: bool = False) -> None:
        super().__init__()
        self.capped = capped
        self.first, self.second = Norm(), Norm()
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, SHARED * SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attend(self.first(x), mask, angles)
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor, mask: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (
            projection(x).view(BATCH, LENGTH, -1, SIZE).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        q, k = (q, k) if self.capped else (rotate(q, angles), rotate(k, angles))
        scores = torch.matmul(q, repeat_heads(k).transpose(2, 3)) * SIZE**-0.5
        scores = torch.tanh(scores / 50.0) * 50.0 if self.capped else scores
        weights = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = F.dropout(weights, p=0.0, training=False)
        attended_values = torch.matmul(weights, repeat_heads(v)).transpose(1, 2)
        attended_values = attended_values.clone(
            memory_format=torch.contiguous_format
        )  # `contiguous` asks for a GPU even where nothing is computed
        return self.out(attended_values.reshape(BATCH, LENGTH, -1))


def layer_on_a_gpu(dtype: torch.dtype, *, capped: bool = False) -> Region:
    module = Layer(capped=capped)
    names, weights = zip(*module.named_parameters(), strict=True)

    def model(x: Tensor, mask: Tensor, angles: Tensor, *tensors: Tensor) -> Tensor:
        return torch.func.functional_call(
            module, dict(zip(names, tensors, strict=True)), (x, mask, angles)
        )

    shapes = (
        (BATCH, LENGTH, WIDTH),
        (BATCH, 1, LENGTH, LENGTH),
        (LENGTH, SIZE),
        *(weight.shape for weight in weights),
    )
    return lower(graph_on_a_gpu(lambda *tensors: model(*tensors), *shapes, dtype=dtype)).region


def targets(program: Program) -> list[str]:
    return [step.target for step in program.steps]  # type: ignore[union-attr]


def attention_in(region: Region) -> list[FusionGroup]:
    """Its fusion groups with a softmax or a batched product."""
    return [
        i
        for i in partition(region, products=True).groups
        if {BMM, SOFTMAX} & set(targets(i.region.program))
    ]


# fp16 scores need no conversion before a softmax that yields fp32
@pytest.mark.parametrize(("dtype", "conversions"), [(torch.bfloat16, 2), (torch.float16, 1)])
@pytest.mark.parametrize("capped", [False, True])
def test_the_whole_attention_of_a_layer_is_one_fusion_group_with_a_kernel(
    dtype: torch.dtype, conversions: int, *, capped: bool
) -> None:
    (fusion_group,) = attention_in(layer_on_a_gpu(dtype, capped=capped))
    operators = targets(fusion_group.region.program)
    assert (operators.count(BMM), operators.count(SOFTMAX), operators.count(CONVERSION)) == (
        2,
        1,
        conversions,
    )
    assert len(propose(fusion_group.region.program, 90)) >= 2


def test_its_fusion_group_reads_the_few_heads_of_keys_and_values_and_puts_heads_back_inside_rows() -> (
    None
):
    region = layer_on_a_gpu(torch.bfloat16)
    (fusion_group,) = attention_in(region)
    values = (
        BATCH * LENGTH,
        SHARED * SIZE,
    )  # rows of the projection: what makes heads of them is layout, and inside
    shapes = {spec.shape for spec in fusion_group.region.program.inputs}
    assert shapes == {(BATCH, n, LENGTH, SIZE) for n in (HEADS, SHARED)} | {
        (BATCH, 1, LENGTH, LENGTH),
        values,
    }
    readers = [
        step.target
        for step in region.program.steps
        if isinstance(step, Aten) and Value(fusion_group.outputs[0]) in step.args
    ]
    assert readers == ["aten.mm.default"]


def test_a_layer_whose_attention_is_spliced_back_computes_the_same() -> None:
    region = layer_on_a_gpu(torch.bfloat16)
    region = replace(region, program=on_the_cpu(region.program))
    (fusion_group,) = attention_in(region)
    spliced = splice(region.program, {fusion_group: fusion_group.region.program})
    check_program(spliced)
    assert len(spliced.steps) == len(region.program.steps) - len(fusion_group.steps) + 1
    inputs = [torch.randn(spec.shape).to(torch.bfloat16) for spec in region.program.inputs]
    (expected,), (output,) = (
        prepare(program, torch.device("cpu"))(inputs) for program in (region.program, spliced)
    )
    assert expected is not None
    assert expected.isfinite().all()
    assert torch.equal(output, expected)


def test_scores_of_another_type_than_the_values_are_left_in_parts() -> None:
    """As GPT-J has it: queries and keys in fp32, values of a half type; no one kernel multiplies
    both.
    """

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(2, 3)) * 0.25
        return torch.matmul(scores.softmax(-1).to(v.dtype), v)

    fusion_groups = attention_in(
        lower(
            graph_on_a_gpu(model, *[(BATCH, HEADS, LENGTH, SIZE)] * 3, dtype=torch.bfloat16)
        ).region
    )
    products = [
        targets(fusion_group.region.program)
        for fusion_group in fusion_groups
        if BMM in targets(fusion_group.region.program)
    ]
    assert [operators.count(BMM) for operators in products] == [1, 1]
    assert all(propose(fusion_group.region.program, 90) for fusion_group in fusion_groups)


def test_decays_as_many_as_the_scores_are_made_inside_and_smaller_tensors_outside() -> None:
    """A chunk of a state-space model: a mask of all heads is read, exponentials for each score are
    computed where they are used.
    """
    batch, length, heads = 2, 64, 3

    def model(c: Tensor, b: Tensor, a: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        decays = (a.unsqueeze(3) - a.unsqueeze(2)).masked_fill(mask == 0, -torch.inf).exp()
        scores = torch.einsum("blhn,bshn->blhs", c, b)
        return torch.einsum("blhs,bshp->blhp", scores * decays.permute(0, 2, 1, 3), x)

    wide, sums = (batch, length, heads, 16), (batch, heads, length)
    region = lower(graph_on_a_gpu(model, wide, wide, sums, wide, (length, length))).region
    (fusion_group,) = attention_in(region)
    operators = targets(fusion_group.region.program)
    assert operators.count(BMM) == 2
    assert {"aten.sub.Tensor", "aten.masked_fill.Scalar", "aten.exp.default"} <= set(operators)
    assert "aten.eq.Scalar" not in operators
    assert (length, length) in {spec.shape for spec in fusion_group.region.program.inputs}
    assert len(propose(fusion_group.region.program, 90)) >= 2


def test_weights_on_the_right_of_the_second_product_are_weights() -> None:
    """So einsum contracts a chunk of a state-space model where opt_einsum is installed: values by
    weights, both transposed.
    """

    def model(c: Tensor, b: Tensor, decays: Tensor, x: Tensor) -> Tensor:
        weights = (torch.bmm(c, b.transpose(1, 2)) * decays).transpose(1, 2)
        return torch.bmm(x.transpose(1, 2), weights)

    region = lower(graph_on_a_gpu(model, (6, 64, 16), (6, 64, 16), (6, 64, 64), (6, 64, 32))).region
    (fusion_group,) = attention_in(region)
    assert targets(fusion_group.region.program).count(BMM) == 2
    assert {proposal.family for proposal in propose(fusion_group.region.program, 90)} == {
        "attention"
    }


def test_a_product_of_three_matrices_is_no_attention_for_being_read_from_the_right() -> None:
    def model(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.bmm(a, torch.bmm(b, c))

    products = [
        targets(fusion_group.region.program)
        for fusion_group in attention_in(lower(graph_on_a_gpu(model, *[(3, 64, 64)] * 3)).region)
    ]
    assert all(operators.count(BMM) < 2 for operators in products)


def test_what_is_computed_for_queries_as_many_as_scores_stays_outside() -> None:
    """Heads as large as the sequence is long: what makes queries of them has as many elements as
    the scores.
    """

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(q.sigmoid() * 2, k.transpose(1, 2)).relu(), v)

    (fusion_group,) = attention_in(lower(graph_on_a_gpu(model, *[(3, 64, 64)] * 3)).region)
    assert "aten.sigmoid.default" not in targets(fusion_group.region.program)
    assert len(propose(fusion_group.region.program, 90)) >= 2


def test_attention_that_pytorch_takes_apart_under_a_mask_is_one_fusion_group() -> None:
    """Its softmax is 0 where a row has no key: fp32 with few heads of keys has no fused operator."""

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask
        return torch.matmul(torch.ops.aten._safe_softmax(scores, -1), v)

    heads, mask = (BATCH, HEADS, LENGTH, SIZE), (BATCH, 1, LENGTH, LENGTH)
    (fusion_group,) = attention_in(lower(graph_on_a_gpu(model, heads, heads, heads, mask)).region)
    operators = targets(fusion_group.region.program)
    assert (operators.count(BMM), operators.count("aten._safe_softmax.default")) == (2, 1)
    assert mask in {
        spec.shape for spec in fusion_group.region.program.inputs
    }  # not written out for all heads
    assert len(propose(fusion_group.region.program, 90)) >= 2


@pytest.mark.parametrize("operator", ["efficient", "cudnn"])
def test_a_fused_operator_with_a_mask_has_kernels(operator: str) -> None:
    fused = getattr(torch.ops.aten, f"_scaled_dot_product_{operator}_attention")
    heads, mask = (BATCH, HEADS, LENGTH, SIZE), (BATCH, HEADS, LENGTH, LENGTH)
    graph = graph_on_a_gpu(
        lambda q, k, v, m: fused(q, k, v, m, False)[0],
        heads,
        heads,
        heads,
        mask,
        dtype=torch.float16,
    )
    (fusion_group,) = partition(lower(graph).region, products=True).groups
    assert len(propose(fusion_group.region.program, 90)) >= 2
