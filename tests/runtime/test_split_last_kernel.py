# ruff: noqa: F811  fixtures of another file are arguments here
"""The step that yields the results, parted from a graph of the others: the same function, and
results that nothing else writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.device.test_cubin import build  # noqa: F401  (fixtures, here and below)
from tests.device.test_driver import cuda, number, recorder_path  # noqa: F401
from tests.runtime.executors import assert_same, draw_inputs, in_threads
from tests.runtime.test_cuda_graph import CPU, gpu, graph_runner, needs_extension  # noqa: F401
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.functional_module import FunctionalModule
from torch_cudal1.graph.fusion.partition import rebase_on_inputs
from torch_cudal1.graph.lower import lower
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.runtime import split_last_kernel
from torch_cudal1.runtime.cuda_graph import GraphCapture, GraphedRunner, _copy_if_in_graph
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.runtime.runner import build_runner
from torch_cudal1.runtime.split_last_kernel import SplitRunner, split_last_step


def program_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Program:
    class Plain(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return function(*tensors)

    with torch.no_grad():
        flat = FunctionalModule(Plain(), inputs, {})
        (graph,) = trace(flat, flat.tensors).graphs
    lowered = lower(graph.module, static=graph.static, kind=graph.kind)
    return rebase_on_inputs(
        lowered.region.program, lowered.order, tuple(map(TensorSpec.of, inputs))
    )


@pytest.fixture(autouse=True)
def small_results_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_last_kernel, "MIN_SPLIT_BYTES", 1)


def draw(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape) for shape in shapes)


X, W, B = (3, 4), (5, 4), (5,)
SPLITTABLE = {
    "a layer": (lambda x, w, b: torch.addmm(b, torch.relu(x), w.t()), (X, W, B)),
    "a view of the last one": (lambda x, w: (torch.relu(x) @ w.t()).view(5, 3).t(), (X, W)),
    "views between": (lambda x: torch.exp(torch.relu(x).t()[1:].unsqueeze(0)), (X,)),
    "several results": (lambda x: torch.relu(x).max(1), (X,)),
    "two views of one result": (lambda x: torch.exp(torch.relu(x)).split(2), ((4, 4),)),
    "what was given, once more": (lambda x: torch.relu(x) * 2 + x, (X,)),
    "two that were computed": (lambda x: torch.relu(x) * torch.exp(x), (X,)),
}
UNSPLITTABLE = {
    "one step": (lambda x: torch.relu(x), (X,)),
    "a result from before": (lambda x: (torch.relu(x), torch.relu(x) + 1), (X,)),
    "a view of one from before": (lambda x: ((y := torch.relu(x)).t(), y + 1), (X,)),
    "an input": (lambda x: (torch.exp(torch.relu(x)), x), (X,)),
    "nothing that was computed": (lambda x: (torch.relu(x) * 0, torch.exp(x))[1], (X,)),
}


@pytest.mark.parametrize("name", SPLITTABLE)
def test_both_parts_after_one_another_are_the_program(name: str) -> None:
    function, shapes = SPLITTABLE[name]
    program = program_of(function, *draw(*shapes))
    two = split_last_step(program)
    assert two is not None
    assert two.first.steps == program.steps[: len(two.first.steps)]
    first, last, run_all = (prepare(value, CPU) for value in (two.first, two.last, program))
    for _ in range(3):
        inputs = draw_inputs(program, CPU, 2)
        between = first(inputs)
        intermediates = [value for value in between if value is not None]
        assert len(intermediates) == len(between)
        assert all(
            value.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
            for value in intermediates
            for t in inputs
        )
        results = last([*intermediates, *inputs])
        assert_same(results, run_all(inputs), inputs)
        addresses = {value.untyped_storage().data_ptr() for value in (*intermediates, *inputs)}
        assert not any(
            out is not None and out.untyped_storage().data_ptr() in addresses for out in results
        )


@pytest.mark.parametrize("name", UNSPLITTABLE)
def test_what_cannot_be_split_stays_one_program(name: str) -> None:
    function, shapes = UNSPLITTABLE[name]
    assert split_last_step(program_of(function, *draw(*shapes))) is None


def test_small_results_are_copied_by_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(lambda x: torch.exp(torch.relu(x)), torch.randn(64, 64))
    for min_bytes, is_split in ((64 * 64 * 4, True), (64 * 64 * 4 + 1, False)):
        monkeypatch.setattr(split_last_kernel, "MIN_SPLIT_BYTES", min_bytes)
        assert (split_last_step(program) is not None) == is_split


@pytest.mark.parametrize(
    ("function", "shapes", "is_split", "may_be_padded"),
    [
        (lambda x, w: torch.relu(x * 2) @ w, (X, (X[1], 8)), True, False),
        (lambda x, w: (torch.relu(x * 2) @ w).view(-1), (X, (X[1], 8)), True, False),
        (lambda x, w: torch.exp(torch.relu(x * 2) @ w), (X, (X[1], 8)), False, False),
        # Its rows are no multiples of 16 bytes.
        (lambda x, w: torch.relu(x * 2) @ w, (X, (X[1], 6)), True, True),
        (lambda x, w: torch.addmm(w, torch.relu(x), x.t()), (X, (3, 3)), True, True),
        (
            lambda x, w: torch.conv2d(torch.relu(x), w),
            ((1, 2, 5, 5), (3, 2, 3, 3)),
            True,
            False,
        ),
        (lambda x: torch.exp(torch.relu(x)), (X,), False, False),
    ],
)
def test_before_a_compiled_part_only_what_is_fused_with_nothing_is_split_off(
    function: Callable[..., torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    is_split: bool,
    may_be_padded: bool,
) -> None:
    program = program_of(function, *draw(*shapes))
    two = split_last_step(program, is_fused=True)
    assert (two is not None) == is_split
    if two is not None:
        assert two.may_be_padded == may_be_padded
        run = SplitRunner(prepare(two.first, CPU), prepare(two.last, CPU))
        inputs = draw_inputs(program, CPU, 2)
        assert_same(run(inputs), prepare(program, CPU)(inputs), inputs)


def test_an_operator_that_may_hand_its_operand_on_is_no_last_step() -> None:
    spec = TensorSpec("float32", (4, 4), (4, 1), "cpu")
    relu, add = (
        Aten("aten.relu.default", (Value(0),), (), (1,)),
        Aten("aten.exp.default", (Value(1),), (), (2,)),
    )
    handed_on = Aten("aten._unsafe_view.default", (Value(2), (16,)), (), (3,))
    two = split_last_step(Program((spec,), (relu, add, handed_on), (3,)))
    assert two is not None
    assert [step.target for step in two.last.steps if isinstance(step, Aten)] == [
        "aten.exp.default",
        "aten._unsafe_view.default",
    ]
    assert (
        split_last_step(
            Program(
                (spec,),
                (relu, handed_on.__class__(handed_on.target, (Value(1), (16,)), (), (2,))),
                (2,),
            )
        )
        is None
    )


def test_pieces_of_one_result_are_no_operands_of_a_last_step() -> None:
    spec = TensorSpec("float32", (4, 4), (4, 1), "cpu")
    steps = (
        Aten("aten.relu.default", (Value(0),), (), (1,)),
        Aten(
            "aten.unsafe_split.Tensor", (Value(1), 2), (), (2, 3), many=True
        ),  # both are views of the same memory
        Aten("aten.add.Tensor", (Value(2), Value(3)), (), (4,)),
    )
    two = split_last_step(Program((spec,), steps, (4,)))
    assert two is not None
    assert [len(two.first.outputs), len(two.last.steps)] == [1, 2]


KERNEL = TensorSpec("float32", (4,), (1,), "cuda")


@pytest.mark.parametrize(
    ("yielded", "is_split"),
    [(1, True), (2, True), (0, False)],
    ids=["what it allocates", "a view of that", "what it is given"],
)
def test_a_kernel_is_a_last_step_if_it_yields_memory_of_its_own(
    yielded: int, is_split: bool
) -> None:
    view = Aten("aten.view.default", (Value(1), (2, 2)), (), (2,))
    launch = Launch("k", "k", (1, 1, 1), 32, 0, (LaunchArg("ptr", Value(1)),))
    inner = Program(
        (KERNEL,),
        (Alloc(1, KERNEL), launch, view),
        (yielded,),
        payloads={"k": torch.zeros(4, dtype=torch.uint8)},
    )
    relu = Aten("aten.relu.default", (Value(0),), (), (1,))
    two = split_last_step(Program((KERNEL,), (relu, Call(inner, (1,), (2,))), (2,)))
    assert (two is not None) == is_split


def test_steps_that_launch_by_themselves_are_not_split() -> None:
    launch = Launch("k", "k", (1, 1, 1), 32, 0, ())
    steps = (Aten("aten.relu.default", (Value(0),), (), (1,)), Alloc(2, KERNEL), launch)
    assert (
        split_last_step(
            Program((KERNEL,), steps, (2,), payloads={"k": torch.zeros(4, dtype=torch.uint8)})
        )
        is None
    )


# Behind a graph
# ----------------------------------------------------------------------------------------------------------------


def layers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b, torch.relu(x * 2), w.t())


LAYERS = program_of(
    layers, *draw(X, W, B)
)  # here, since nothing can be traced beside the recording driver
RELU = program_of(torch.relu, *draw(X))


def runner() -> GraphedRunner:
    two = split_last_step(LAYERS)
    assert two is not None
    return GraphedRunner(
        prepare(two.first, CPU), frozenset({1, 2}), CPU, last=prepare(two.last, CPU)
    )


@needs_extension
def test_results_are_fresh_memory_and_none_is_copied(graph_runner: Any, cuda: Any) -> None:
    x, w, b = draw(X, W, B)
    run, kept_results = runner(), []
    for _ in range(5):
        x = torch.randn(X)
        kept_results.append((x, run([x, w, b])))
    for then, (result,) in kept_results:
        assert torch.equal(result, layers(then, w, b))
    assert len({result.data_ptr() for _, (result,) in kept_results}) == 5
    assert (number(cuda, "replays"), number(cuda, "copies"), len(graph_runner.bodies)) == (5, 0, 1)
    w.mul_(3)
    assert torch.equal(run([x, w, b])[0], layers(x, w, b))
    moved = w.clone() + 1
    assert torch.equal(run([x, moved, b])[0], layers(x, moved, b))
    assert len(graph_runner.bodies) == 2


@needs_extension
def test_a_last_step_that_hands_on_what_the_graph_yields_has_it_copied(graph_runner: Any) -> None:
    (spec,) = RELU.inputs
    view = Program(
        (spec, spec), (Aten("aten.t.default", (Value(0),), (), (2,)),), (2, 0)
    )  # not what `parted` makes
    run = GraphedRunner(prepare(RELU, CPU), frozenset(), CPU, last=prepare(view, CPU))
    kept_results = [(x, run([x])) for x in draw(*[X] * 4)]
    for x, (turned, same) in kept_results:
        assert torch.equal(turned, torch.relu(x).t())
        assert turned.stride() == torch.relu(x).t().stride()
        assert torch.equal(same, torch.relu(x))


def test_python_copies_it_too() -> None:
    inside, outside = torch.randn(X), torch.randn(X)
    captured = GraphCapture(None, [], [inside, None, 0])  # type: ignore[arg-type]
    assert _copy_if_in_graph(None, captured) is None
    assert _copy_if_in_graph(outside, captured) is outside
    copied = _copy_if_in_graph(inside.t(), captured)
    assert copied is not None
    assert torch.equal(copied, inside.t())
    assert copied.untyped_storage().data_ptr() != inside.untyped_storage().data_ptr()


@needs_extension
def test_what_a_last_step_raises_reaches_the_caller_and_the_next_call_is_right(
    graph_runner: Any,
) -> None:
    x, w, b = draw(X, W, B)
    run = runner()
    run([x, w, b])
    with pytest.raises(RuntimeError):
        run([x, w, torch.randn(9)])
    assert torch.equal(run([x, w, b])[0], layers(x, w, b))


@needs_extension
def test_while_the_user_captures_both_parts_go_into_the_user_s_graph(
    graph_runner: Any, cuda: Any
) -> None:
    x, w, b = draw(X, W, B)
    run = runner()
    cuda.capturing = True
    assert torch.equal(run([x, w, b])[0], layers(x, w, b))
    assert (number(cuda, "replays"), len(graph_runner.bodies)) == (0, 0)


@needs_extension
def test_a_last_step_in_python_has_its_graph_replayed_by_python(graph_runner: Any) -> None:
    run = runner()
    run._last = lambda tensors: [tensors[0]]
    run._make_native(3)
    assert run.interpreted == "its last step runs in Python"
    assert run.direct is run


# On a GPU
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["eager+graph", "inductor+graph", "regional+graph"])
def on_gpu(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Any, list[torch.Tensor], Callable[..., torch.Tensor]]:
    """A graph with 8 MiB of results, its weights, and the function."""
    monkeypatch.undo()  # the true MIN_SPLIT_BYTES
    torch.manual_seed(0)
    weights = [torch.randn(4096, 64, device="cuda"), torch.randn(4096, device="cuda")]
    program = program_of(layers, torch.randn(512, 64, device="cuda"), *weights)
    assert split_last_step(program, is_fused=True) is not None
    run = build_runner(program, request.param, torch.device("cuda", 0), static=(1, 2))
    assert isinstance(run, GraphedRunner)
    assert run._last is not None
    return run, weights, layers


@pytest.mark.gpu
@gpu
def test_held_results_stay_what_they_are(on_gpu: Any) -> None:
    run, weights, function = on_gpu
    with torch.inference_mode():
        kept_results = [
            (x, run([x, *weights])[0])
            for x in (torch.randn(512, 64, device="cuda") for _ in range(20))
        ]
        torch.cuda.synchronize()
        assert all(torch.equal(out, function(x, *weights)) for x, out in kept_results)
    assert run.interpreted == ""


@pytest.mark.gpu
@gpu
def test_streams_and_threads_take_turns(on_gpu: Any) -> None:
    run, weights, function = on_gpu
    wrong: list[str] = []

    def work() -> None:
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(60):
                torch.cuda._sleep(50_000 * (turn % 3))
                x = torch.randn(512, 64, device="cuda")
                if not torch.allclose(
                    run([x, *weights])[0], function(x, *weights), rtol=1e-4, atol=1e-4
                ):
                    wrong.append("different")

    with torch.inference_mode():
        run([torch.randn(512, 64, device="cuda"), *weights])
    in_threads(work)
    assert not wrong


@pytest.mark.gpu
@gpu
def test_a_user_s_capture_gets_both_parts(on_gpu: Any) -> None:
    run, weights, function = on_gpu
    with torch.inference_mode():
        x = torch.randn(512, 64, device="cuda")
        run([x, *weights])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = run([x, *weights])[0]
        x.normal_()
        graph.replay()
        assert torch.equal(static, function(x, *weights))


@pytest.mark.gpu
@gpu
def test_a_product_that_inductor_pads_is_compiled_and_runs_after_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # the true MIN_SPLIT_BYTES
    weights = [torch.randn(4095, 64, device="cuda"), torch.randn(4095, device="cuda")]
    program = program_of(layers, torch.randn(512, 64, device="cuda"), *weights)
    run = build_runner(program, "inductor+graph", torch.device("cuda", 0), static=(1, 2))
    assert isinstance(run, GraphedRunner)
    with torch.inference_mode():
        inputs = [torch.randn(512, 64, device="cuda") for _ in range(20)]
        results = [run([x, *weights])[0] for x in inputs]
        for x, result in zip(inputs, results, strict=True):
            assert result is not None
            expected = layers(x, *weights)
            assert result.stride() == expected.stride()
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    assert run.interpreted == "its last step runs in Python"
