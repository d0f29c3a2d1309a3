"""Fingerprints: equal computations share a key whatever they are called; anything that changes the
answer changes the key.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.fake_gpu import graph_on_a_gpu
from tests.graph.regions import CPU, TupleOutput
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.lower import lower, raise_to_fx
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.records import Candidate
from torch_cudal1.ir.value_specs import find_unaligned_values, value_specs
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.reference.analysis import analyse
from torch_cudal1.runtime.executor import prepare


class Block(nn.Module):
    """Two branches and a norm; `swapped` builds and computes the same in another order under other
    names.
    """

    def __init__(self, swapped: bool = False, width: int = 8, eps: float = 1e-5) -> None:
        super().__init__()
        if swapped:
            self.zeta, self.second, self.first = (
                nn.LayerNorm(width, eps=eps),
                nn.Linear(width, width),
                nn.Linear(width, width),
            )
        else:
            self.first, self.second, self.zeta = (
                nn.Linear(width, width),
                nn.Linear(width, width),
                nn.LayerNorm(width, eps=eps),
            )
        self.swapped = swapped

    def forward(self, x):
        if self.swapped:
            second_branch = torch.tanh(self.second(x))
            first_branch = torch.relu(self.first(x))
        else:
            first_branch = torch.relu(self.first(x))
            second_branch = torch.tanh(self.second(x))
        return self.zeta(first_branch + second_branch)


class OtherNames(nn.Module):
    """The same computation as Block, written by somebody else, with a dead branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.b = nn.Linear(8, 8)
        self.a = nn.Linear(8, 8)

    def forward(self, tokens):
        unused = tokens * 3
        del unused
        return self.norm(nn.functional.relu(self.a(tokens)) + self.b(tokens).tanh())


def key_of(module, *inputs):
    with torch.no_grad():
        (graph,) = trace(TupleOutput(module), list(inputs)).graphs
    return lower(graph.module, static=graph.static).region.key


X = torch.randn(4, 8)
BIG = torch.ones(600_000)


def test_the_same_block_has_one_key_whatever_the_order_and_the_names():
    keys = {
        key_of(Block(), X),
        key_of(Block(swapped=True), X),
        key_of(OtherNames(), X),
        key_of(copy.deepcopy(Block()), X),
    }
    assert len(keys) == 1


def test_weights_are_not_in_the_key():
    block = Block()
    before = key_of(block, X)
    nn.init.normal_(block.first.weight)
    assert key_of(block, X) == before


class Scaled(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


CHANGES = {
    "another epsilon": lambda: key_of(Block(eps=1e-6), X),
    "another width": lambda: key_of(Block(width=16), torch.randn(4, 16)),
    "another batch": lambda: key_of(Block(), torch.randn(5, 8)),
    "another dtype": lambda: key_of(Block().double(), X.double()),
    "another layout": lambda: key_of(Block(), torch.randn(8, 4).t()),
    "a negated branch": lambda: key_of(Scaled(lambda x: -x), X),
    "another order of operands": lambda: key_of(Scaled(lambda x: 1 - x), X),
    "an integer scalar": lambda: key_of(Scaled(lambda x: x + 1), X),
    "the same scalar as a float": lambda: key_of(Scaled(lambda x: x + 1.5), X),
    "another constant": lambda: key_of(Scaled(lambda x: x + torch.tensor([1.0] * 8)), X),
    "yet another constant": lambda: key_of(Scaled(lambda x: x + torch.tensor([2.0] * 8)), X),
    "two outputs": lambda: key_of(Scaled(lambda x: (x + 1, x * 2)), X),
    "the same two outputs, swapped": lambda: key_of(Scaled(lambda x: (x * 2, x + 1)), X),
    "a cast": lambda: key_of(Scaled(lambda x: (x + 1).half()), X),
    "an output twice": lambda: key_of(Scaled(lambda x: ((y := x + 1), y)), X),
}


def test_whatever_changes_the_answer_changes_the_key():
    keys = {name: make() for name, make in CHANGES.items()}
    keys["the block"] = key_of(Block(), X)
    assert len(set(keys.values())) == len(keys), keys


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(list(range(5))), scale=st.sampled_from([1.0, 2.0, 0.5]))
def test_the_order_in_which_terms_are_computed_does_not_matter(order, scale):
    functions = [torch.relu, torch.tanh, torch.sigmoid, torch.abs, lambda x: x * scale]

    def in_order(x):
        terms = {index: functions[index](x) for index in order}
        return terms[0] + terms[1] + terms[2] + terms[3] + terms[4]

    plain = key_of(
        Scaled(
            lambda x: torch.relu(x) + torch.tanh(x) + torch.sigmoid(x) + torch.abs(x) + x * scale
        ),
        X,
    )
    assert key_of(Scaled(in_order), X) == plain


def test_a_lowered_program_computes_what_the_module_does_and_survives_raising():
    block = Block()
    with torch.no_grad():
        (graph,) = trace(TupleOutput(block), [X]).graphs
        lowered = lower(graph.module, static=graph.static)
        named = dict(TupleOutput(block).named_parameters())
        tensors = [X if isinstance(o := graph.origins[p], int) else named[o] for p in lowered.order]
        (out,) = prepare(lowered.region.program, CPU)(tensors)
        torch.testing.assert_close(out, block(X), rtol=0, atol=0)
    again = lower(raise_to_fx(lowered.region.program))
    assert again.region.key == lowered.region.key
    assert again.order == tuple(range(len(again.order)))


def test_random_steps_keep_their_order():
    def noisy(x):
        first = torch.rand_like(x)
        second = torch.rand_like(x)
        return second - first

    def draw_swapped(x):
        second = torch.rand_like(x)
        first = torch.rand_like(x)
        return second - first

    assert key_of(Scaled(noisy), X) != key_of(Scaled(draw_swapped), X)


REFUSED = {
    "sparse": lambda: key_of(Scaled(lambda x: x.to_sparse()), X),
    "data-dependent": lambda: key_of(Scaled(lambda x: x[x > 0]), X),
    "item": lambda: key_of(Scaled(lambda x: x * x.sum().item()), X),
    "large constant": lambda: key_of(Scaled(lambda x: x.sum() + BIG), X),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_data_form_is_refused_with_its_reason(name):
    with pytest.raises(NotLowerableError) as caught:
        REFUSED[name]()
    assert len(str(caught.value)) > 10


def flash(q, k, v):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)


def test_numbers_that_nobody_reads_keep_no_graph_out():
    """Fused attention of half types yields some for its backward; every half-precision transformer
    on a GPU has it.
    """
    graph = graph_on_a_gpu(
        lambda q, k, v: flash(q, k, v)[0] * 2, *[(2, 3, 16, 64)] * 3, dtype=torch.float16
    )
    region = lower(graph).region
    assert [step.target for step in region.program.steps] == [
        "aten._scaled_dot_product_flash_attention.default",
        "aten.mul.Tensor",
    ]
    assert lower(raise_to_fx(region.program)).region.key == region.key
    specs = value_specs(region.program)
    assert [specs[out].shape for out in region.program.outputs] == [(2, 3, 16, 64)]
    assert not find_unaligned_values(region.program, 16)
    assert all(
        check.passed for check in contract(region, Candidate(region.program, "eager", "baseline"))
    )
    assert analyse(region.program).shapes[region.program.outputs[0]] == (2, 3, 16, 64)


def test_numbers_that_are_read_still_do():
    graph = graph_on_a_gpu(
        lambda q, k, v: flash(q, k, v)[0], *[(2, 3, 16, 64)] * 3, dtype=torch.float16
    )
    (fused,) = (
        node
        for node in graph.graph.nodes
        if node.target is torch.ops.aten._scaled_dot_product_flash_attention.default
    )
    (end,) = (node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(
        end
    ):  # as in the forward graph of training, which keeps it for the backward
        longest = graph.graph.call_function(operator.getitem, (fused, 4))
    end.args = ((end.args[0], longest),)
    with pytest.raises(NotLowerableError, match="yields a number"):
        lower(graph)


def test_a_program_with_such_a_step_runs():
    """With a stand-in for the kernel, which the CPU lacks: attention, and what a GPU's yields
    beside it.
    """

    def stand_in(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        empty = torch.empty(0)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        return out, empty, empty, empty, q.shape[2], k.shape[2], empty, empty, empty

    tensors = torch.randn(3, 2, 3, 16, 64).half()
    graph = graph_on_a_gpu(
        lambda q, k, v: flash(q, k, v)[0] * 2, *[(2, 3, 16, 64)] * 3, dtype=torch.float16
    )
    program = lower(graph).region.program
    on_cpu = replace(program, inputs=tuple(replace(spec, device="cpu") for spec in program.inputs))
    expected = nn.functional.scaled_dot_product_attention(*tensors, is_causal=True) * 2
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_scaled_dot_product_flash_attention", stand_in, "CPU")
        for executor in (prepare(on_cpu, CPU), interpret(on_cpu, CPU)):
            (output,) = executor([tensors[0], tensors[1], tensors[2]])
            torch.testing.assert_close(output, expected)
    finally:
        library._destroy()
