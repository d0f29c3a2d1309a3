"""The framework keeps what a rule might forget: outputs' dtype, shape, strides and freshness,
randomness, mutation.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx as fx

from torch_cudal1.graph.rewrite import Rule, rewrite
from torch_cudal1.graph.rewrite.match import call, iter_calls, replace

from .helpers import capture, ops, run, same

aten = torch.ops.aten


def _swap(name: str, old: Any, build: Any, **kwargs: Any) -> Rule:
    def edit(gm: fx.GraphModule) -> int:
        sites = 0
        for node in iter_calls(gm, old):
            with gm.graph.inserting_before(node):
                replace(node, build(gm.graph, node))
            sites += 1
        return sites

    return Rule(name, edit, **kwargs)


DROP_CLONE = _swap("drop_clone", aten.clone.default, lambda g, n: n.args[0])
DROP_NEG = _swap("drop_neg", aten.neg.default, lambda g, n: n.args[0])
RELU_TO_ABS = _swap(
    "relu_to_abs", aten.relu.default, lambda g, n: call(g, aten.abs.default, n.args[0])
)


def test_the_callers_graph_is_untouched() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(3))
    before = gm.print_readable(print_output=False)
    out = rewrite(gm, [RELU_TO_ABS], assume_finite=False)
    assert gm.print_readable(print_output=False) == before
    assert out.techniques == ("relu_to_abs",)
    assert out.sites == {"relu_to_abs": 1}
    assert ops(out.gm) == {"abs.default": 1}
    assert torch.equal(out.gm(torch.tensor([-1.0, 2.0, -3.0]))[0], torch.tensor([1.0, 2.0, 3.0]))


def test_finite_only_rules_need_the_users_word() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(3))
    rule = Rule("relu_to_abs", RELU_TO_ABS.rewrite, finite_only=True)
    assert rewrite(gm, [rule], assume_finite=False).techniques == ()
    assert rewrite(gm, [rule], assume_finite=True).techniques == ("relu_to_abs",)


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_rule_that_meets_what_it_cannot_do_is_undone_and_the_others_go_on(
    error: type[Exception],
) -> None:
    def give_up(gm: fx.GraphModule) -> int:
        RELU_TO_ABS.rewrite(gm)
        raise error("cannot view it")

    gm = capture(lambda x: torch.relu(x).neg(), torch.randn(3))
    out = rewrite(gm, [Rule("given_up", give_up), DROP_NEG], assume_finite=False)
    assert out.techniques == ("drop_neg",)
    assert ops(out.gm) == {"relu.default": 1}


def test_every_node_has_its_fake_value_after_a_rewrite() -> None:
    gm = capture(lambda x: torch.relu(x.t()) + 1, torch.randn(3, 4))
    for node in rewrite(gm, [RELU_TO_ABS], assume_finite=False).gm.graph.nodes:
        if node.op != "output":
            assert node.meta["val"].shape in ((3, 4), (4, 3))


def test_an_output_that_would_alias_an_input_is_copied() -> None:
    gm = capture(lambda x: -x, torch.randn(3))
    out = rewrite(gm, [DROP_NEG], assume_finite=False)
    x = torch.randn(3)
    assert run(out.gm, x)[0].data_ptr() != x.data_ptr()


def test_two_outputs_that_would_alias_each_other_are_kept_apart() -> None:
    gm = capture(lambda x: ((y := torch.relu(x)), -y), torch.randn(3))
    out = rewrite(gm, [DROP_NEG], assume_finite=False)
    first, second = run(out.gm, torch.randn(3))
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "size one"])
def test_lost_output_strides_come_back(layout: str) -> None:
    x = {
        "transposed": torch.randn(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "size one": torch.randn(1, 3, 1, 5).contiguous(memory_format=torch.channels_last),
    }[layout]
    gm = capture(lambda x: torch.relu(x), x)
    lose = _swap(
        "lose",
        aten.relu.default,
        lambda g, n: call(g, aten.clone.default, n.args[0], memory_format=torch.contiguous_format),
    )
    out = rewrite(gm, [lose], assume_finite=False)
    assert out.techniques == ("lose",)
    same(run(out.gm, x), [x.clone()])


@pytest.mark.parametrize("edit", ["dtype", "shape", "overlap"])
def test_an_output_beyond_repair_undoes_the_rule(edit: str) -> None:
    build = {
        "dtype": lambda g, n: call(g, aten._to_copy.default, n.args[0], dtype=torch.float64),
        "shape": lambda g, n: call(g, aten.unsqueeze.default, n.args[0], 0),
        "overlap": lambda g, n: call(g, aten.abs.default, n.args[0]),
    }[edit]
    fn = (lambda x: torch.relu(x).expand(2, 3)) if edit == "overlap" else (lambda x: torch.relu(x))
    gm = capture(fn, torch.randn(3))
    old = aten.expand.default if edit == "overlap" else aten.relu.default
    if edit == "overlap":
        build = lambda g, n: call(g, aten.repeat.default, n.args[0], [2, 1])
    out = rewrite(gm, [_swap("bad", old, build), RELU_TO_ABS], assume_finite=False)
    assert out.techniques == ("relu_to_abs",)
    x = torch.randn(3)
    assert torch.equal(run(out.gm, x)[0], fn(x.abs()))


def test_random_calls_are_not_dead_code() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        return torch.relu(x) + torch.rand_like(x)

    gm = capture(fn, torch.randn(3))
    out = rewrite(gm, [RELU_TO_ABS], assume_finite=False)
    assert ops(out.gm)["rand_like.default"] == 2
    x = torch.rand(3)
    torch.manual_seed(1)
    want = fn(x)
    torch.manual_seed(1)
    assert torch.equal(run(out.gm, x)[0], want)


def test_a_mutation_before_the_end_is_left_alone() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(3))
    x = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(x):
        gm.graph.call_function(aten.add_.Tensor, (x, 1.0))
    assert rewrite(gm, [RELU_TO_ABS], assume_finite=False).techniques == ()


def test_rules_that_undo_each_other_stop() -> None:
    gm = capture(lambda x: torch.relu(x), torch.randn(3))
    back = _swap("back", aten.abs.default, lambda g, n: call(g, aten.relu.default, n.args[0]))
    out = rewrite(gm, [RELU_TO_ABS, back], assume_finite=False)
    assert set(out.techniques) == {"relu_to_abs", "back"}


def test_unused_results_of_a_tuple_are_cleaned_up() -> None:
    gm = capture(lambda x: torch.relu(x.max(1).values), torch.randn(3, 4))
    drop = _swap(
        "drop",
        aten.relu.default,
        lambda g, n: call(g, aten.sum.dim_IntList, next(iter(g.nodes)), [1]),
    )
    out = rewrite(gm, [drop], assume_finite=False)
    assert ops(out.gm) == {"sum.dim_IntList": 1}
    assert all(node.target is not operator.getitem for node in out.gm.graph.nodes)


def test_constants_of_the_module_travel_along() -> None:
    gm = capture(lambda x: torch.relu(torch.minimum(x, torch.tensor(0.5))), torch.randn(3))
    out = rewrite(gm, [RELU_TO_ABS], assume_finite=False)
    x = torch.tensor([-1.0, 0.2, 3.0])
    assert torch.equal(run(out.gm, x)[0], torch.tensor([1.0, 0.2, 0.5]))
