"""The C++ executor gives what the Python one gives: values, layouts, identities, errors and the
moment when memory is freed.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import models
from tests.judge.programs import linear_relu
from tests.runtime.executors import MIXED_STEPS, assert_same, draw_inputs, in_threads
from torch_cudal1.core import native, telemetry
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.program import Alloc, Aten, Call, Program, TensorSpec, Value
from torch_cudal1.runtime import compiled
from torch_cudal1.runtime.compiled import compile_program
from torch_cudal1.runtime.executor import prepare

pytestmark = pytest.mark.skipif(
    native.extension() is None, reason=f"no C++ executor: {native.status()[1]}"
)

CPU = torch.device("cpu")
V = Value


def op(
    target: str, *args: object, outs: Sequence[int], many: bool = False, **kwargs: object
) -> Aten:
    return Aten(target, args, tuple(sorted(kwargs.items())), tuple(outs), many)


def program(
    inputs: Sequence[torch.Tensor],
    *steps: Any,
    outputs: Sequence[int | None],
    **constants: torch.Tensor,
) -> Program:
    return Program(
        tuple(map(TensorSpec.of, inputs)), tuple(steps), tuple(outputs), tuple(constants), constants
    )


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


X, Y, W = draw(4, 6), draw(6, 4), draw(6)
IMAGE, KERNEL = draw(1, 3, 8, 8), draw(2, 3, 3, 3)
NORM = ((6,), V(1), V(1), 1e-5)
INNER = program(
    [X], op("aten.tanh.default", V(0), outs=[2]), outputs=[2, 0], two=torch.full((1,), 2.0)
)

# name: inputs, steps, outputs, constants. Values are numbered: inputs, constants, then what the
# steps yield.
PROGRAMS: dict[str, Program] = {
    "three steps": linear_relu().program,
    "nested, many, none, constant": MIXED_STEPS,
    "a view of an input": program([X], op("aten.t.default", V(0), outs=[1]), outputs=[1]),
    "a view of a view, and the input itself": program(
        [X],
        op("aten.view.default", V(0), (2, -1), outs=[1]),
        op("aten.select.int", V(1), 0, 1, outs=[2]),
        outputs=[2, 0, 2],
    ),
    "an operator that returns its argument": program(
        [X], op("aten.contiguous.default", V(0), outs=[1]), outputs=[1]
    ),
    "no step": program([X, Y], outputs=[1, None, 0]),
    "a constant as output": program([X], outputs=[1, 0], c=W),
    "list of results": program(
        [X], op("aten.split.Tensor", V(0), 3, -1, outs=[1, 2], many=True), outputs=[2, 1]
    ),
    "several results": program(
        [X], op("aten.max.dim", V(0), 1, outs=[1, 2], many=True), outputs=[2, None, 1]
    ),
    "results that are not all used": program(
        [X, W],
        op("aten.native_layer_norm.default", V(0), *NORM, outs=[2, 3, 4], many=True),
        outputs=[3],
    ),
    "an absent result": program(
        [X, X],
        op(
            "aten.native_layer_norm.default",
            V(0),
            (6,),
            None,
            None,
            1e-5,
            outs=[2, 3, 4],
            many=True,
        ),
        op(
            "aten.native_layer_norm_backward.default",
            *(V(1), V(0), (6,), V(3), V(4), None, None, (True, False, False)),
            outs=[5, 6, 7],
            many=True,
        ),
        outputs=[5, 6],
    ),
    "an absent result as optional argument": program(
        [X, X],
        op(
            "aten.native_layer_norm.default",
            V(0),
            (6,),
            None,
            None,
            1e-5,
            outs=[2, 3, 4],
            many=True,
        ),
        op(
            "aten.native_layer_norm_backward.default",
            *(V(1), V(0), (6,), V(3), V(4), None, None, (True, False, False)),
            outs=[5, 6, 7],
            many=True,
        ),
        op(
            "aten.native_layer_norm.default",
            V(5),
            (6,),
            V(6),
            V(7),
            1e-5,
            outs=[8, 9, 10],
            many=True,
        ),
        outputs=[8],
    ),
    "list of tensors": program(
        [X, X], op("aten.cat.default", (V(1), V(0)), 1, outs=[2]), outputs=[2]
    ),
    "list with holes": program(
        [X, torch.tensor([0, 2])],
        op("aten.index.Tensor", V(0), (None, V(1)), outs=[2]),
        outputs=[2],
    ),
    "optional tensor absent and present": program(
        [X, Y, W[:4]],
        op("aten.linear.default", V(0), V(0), None, outs=[3]),
        op("aten.linear.default", V(0), V(0), V(2), outs=[4]),
        outputs=[3, 4],
    ),
    "optional numbers": program(
        [X], op("aten.clamp.default", V(0), None, 0.5, outs=[1]), outputs=[1]
    ),
    "a number for a tensor": program(
        [X],
        op("aten.mul.Tensor", V(0), 2.5, outs=[1]),
        op("aten.add.Tensor", V(1), 3, outs=[2], alpha=2),
        outputs=[2],
    ),
    "one number for a list": program(
        [IMAGE, KERNEL],
        op(
            "aten.convolution.default", V(0), V(1), None, (2,), (1,), (1,), False, (0,), 1, outs=[2]
        ),
        outputs=[2],
    ),
    "dtype, layout and device": program(
        [X],
        op(
            "aten.full.default",
            (2, 3),
            7,
            outs=[1],
            dtype=torch.int32,
            layout=torch.strided,
            device=CPU,
            pin_memory=False,
        ),
        op("aten._to_copy.default", V(0), outs=[2], dtype=torch.float64),
        op("aten.arange.start", 2, 9, outs=[3], device=CPU),
        outputs=[1, 2, 3],
    ),
    "memory format": program(
        [IMAGE],
        op("aten.clone.default", V(0), outs=[1], memory_format=torch.channels_last),
        outputs=[1],
    ),
    "text": program([X], op("aten.gelu.default", V(0), outs=[1], approximate="tanh"), outputs=[1]),
    "complex number": program([X], op("aten.mul.Scalar", V(0), 1 + 2j, outs=[1]), outputs=[1]),
    "infinity and truth": program(
        [X],
        op("aten.gt.Scalar", V(0), 0, outs=[1]),
        op("aten.masked_fill.Scalar", V(0), V(1), float("-inf"), outs=[2]),
        op("aten._softmax.default", V(2), 1, False, outs=[3]),
        outputs=[3, 1],
    ),
    "a tensor for a number": program(
        [X, torch.tensor(0.5)], op("aten.mul.Tensor", V(0), V(1), outs=[2]), outputs=[2]
    ),
    "keywords in any order": program(
        [X],
        op("aten.sum.dim_IntList", V(0), outs=[1], keepdim=True, dim=(1,), dtype=torch.float64),
        outputs=[1],
    ),
    "the same argument twice, and dead at once": program(
        [X],
        op("aten.mul.Tensor", V(0), V(0), outs=[1]),
        op("aten.add.Tensor", V(1), V(1), outs=[2]),
        outputs=[2],
    ),
    "alloc": program(
        [X],
        Alloc(1, TensorSpec("float16", (3, 2), (1, 4), "cpu")),
        op("aten.zeros_like.default", V(1), outs=[2]),
        outputs=[2],
    ),
    "an integer result as an integer argument": program(
        [X],
        op("aten.sym_size.int", V(0), 1, outs=[1]),
        op("aten.select.int", V(0), 0, 1, outs=[2]),
        outputs=[2, 1],
    ),
    "nested twice": Program(
        (TensorSpec.of(X),),
        (Call(INNER, (0,), (1, 2)), Call(INNER, (1,), (3, 4))),
        (3, 1, 2, 4),
        payloads={},
    ),
    "empty tensors": program(
        [X[:0]], op("aten.mm.default", V(0), V(1), outs=[2]), outputs=[2], c=Y
    ),
    "random": program([X], op("aten.rand_like.default", V(0), outs=[1]), outputs=[1]),
}


def inputs_of(program: Program) -> list[torch.Tensor]:
    return draw_inputs(program, CPU, integer_bound=1)  # an index of nothing


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_executors_agree(name, mode):
    tested_program = PROGRAMS[name]
    plan = compile_program(tested_program, CPU)
    assert not isinstance(plan, Refusal), plan
    inputs = inputs_of(tested_program)
    with MODES[mode]():
        for _ in range(2):
            torch.manual_seed(0)
            results = plan(inputs)
            torch.manual_seed(0)
            assert_same(results, interpret(tested_program, CPU)(inputs), inputs)


@pytest.mark.parametrize("model", ["lstm", "llama", "bert_base_b1", "vit_b16", "unet", "resnet50"])
def test_both_executors_agree_on_whole_models(model):
    benchmark_model = models.build(model, sizes="small", device="cpu")
    with torch.no_grad():
        (region,) = capture_regions(benchmark_model.module.eval(), benchmark_model.inputs)
    plan = compile_program(region.program, CPU)
    assert not isinstance(plan, Refusal), plan
    tensors = inputs_of(region.program)
    with torch.no_grad():
        assert_same(plan(tensors), interpret(region.program, CPU)(tensors), tensors)


UNSUPPORTED = {
    "a list of integers that holds a value": (
        program(
            [X],
            op("aten.sym_size.int", V(0), 1, outs=[1]),
            op("aten.view.default", V(0), (V(1), -1), outs=[2]),
            outputs=[2],
        ),
        "holds a value",
    ),
    "a number where a tensor stands": (
        program(
            [X],
            op("aten.sym_size.int", V(0), 1, outs=[1]),
            op("aten.mul.Tensor", V(0), V(1), outs=[2]),
            outputs=[2],
        ),
        "not known to be a Tensor",
    ),
    "several results as one value": (
        program([X], op("aten.max.dim", V(0), 1, outs=[1]), outputs=[1]),
        "yields 2 results",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_plan_cannot_hold_runs_in_python_with_the_reason(name):
    tested_program, reason = UNSUPPORTED[name]
    answer = compile_program(tested_program, CPU)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason
    telemetry.reset()
    tensors = inputs_of(tested_program)
    with torch.no_grad():
        prepared_results, interpreted_results = (
            prepare(tested_program, CPU)(tensors),
            interpret(tested_program, CPU)(tensors),
        )
    assert len(prepared_results) == len(interpreted_results)
    (event,) = [event for event in telemetry.report().events if event.what == "interpreted"]
    assert event.facts["reason"] == answer.reason


def test_without_the_extension_python_runs_it(monkeypatch):
    monkeypatch.setattr(compiled.native, "extension", lambda: None)
    monkeypatch.setattr(compiled.native, "status", lambda: (False, "not built: no compiler"))
    answer = compile_program(MIXED_STEPS, CPU)
    assert answer == Refusal("not built: no compiler")
    assert prepare(MIXED_STEPS, CPU)(inputs_of(MIXED_STEPS))[0].shape == (7, 6)


ERRORS = {
    "shapes that do not fit": (PROGRAMS["three steps"], [draw(2, 3)] * 3),
    "an index out of range": (PROGRAMS["list with holes"], [X, torch.tensor([99])]),
    "a wrong dtype": (
        program([X], op("aten.bitwise_not.default", V(0), outs=[1]), outputs=[1]),
        [X],
    ),
    "a wrong count of results": (PROGRAMS["list of results"], [draw(4, 12)]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_operator_that_refuses_raises_the_same_exception(name):
    tested_program, inputs = ERRORS[name]
    with torch.no_grad():
        with pytest.raises(
            Exception
        ) as interpreted_error:  # whatever it is, the C++ executor raises the same
            interpret(tested_program, CPU)(inputs)
        with pytest.raises(interpreted_error.type) as compiled_error:
            compile_program(tested_program, CPU)(inputs)
    if interpreted_error.type is not ValueError:  # the count of results is our own message
        assert (
            str(compiled_error.value).splitlines()[0]
            == str(interpreted_error.value).splitlines()[0]
        )


@pytest.mark.parametrize("bad_inputs", [[], [X, X], [3], None, 3, [None]], ids=repr)
def test_inputs_that_are_not_the_program_s_are_refused(bad_inputs):
    plan = compile_program(PROGRAMS["a view of an input"], CPU)
    with pytest.raises((TypeError, ValueError)):
        plan(bad_inputs)
    with pytest.raises(TypeError):
        plan()
    with pytest.raises(TypeError):
        plan([X], more=1)


def test_a_malformed_plan_is_an_exception():
    extension = native.extension()
    good = (
        1,
        2,
        (),
        (1,),
        CPU,
        None,
        ((("aten", "aten::neg", "", (V(0),), {}, (1,), False), ()),),
        Value,
        print,
    )
    assert torch.equal(extension.Plan(*good)([X])[0], -X)
    for position, bad in (
        (0, -1),
        (0, 3),
        (1, 0),
        (3, (2,)),
        (4, "cpu"),
        (5, (0,) * 6),
        (6, ((("what",), ()),)),
        (6, (((), ()),)),
        (2, (3,)),
    ):
        with pytest.raises((TypeError, ValueError, IndexError, NotImplementedError, OverflowError)):
            extension.Plan(*good[:position], bad, *good[position + 1 :])
    with pytest.raises(TypeError):
        extension.Plan()


def test_any_number_of_threads_may_run_one_plan():
    tested_program = PROGRAMS["three steps"]
    plan, inputs = compile_program(tested_program, CPU), inputs_of(tested_program)
    expected = interpret(tested_program, CPU)(inputs)[0]
    wrong: list[str] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(200):
                if not torch.equal(plan(inputs)[0], expected):
                    wrong.append("different")

    in_threads(work)
    assert not wrong


def test_calls_leak_nothing_whether_they_succeed_or_fail():
    tested_program = PROGRAMS["nested, many, none, constant"]
    plan, good, bad = (
        compile_program(tested_program, CPU),
        inputs_of(tested_program),
        [draw(2, 2), draw(3, 3)],
    )

    def calls(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                plan(good)
                with pytest.raises(RuntimeError):
                    plan(bad)

    calls(500)
    gc.collect()
    objects, peak = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(10_000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8_000
    )  # kB; a leaked 6x6 float tensor a call would be 5 MB


# Fresh memory
# ------------------------------------------------------------------------------------------------------------------

ALLOCS: dict[str, TensorSpec] = {
    "dense": TensorSpec("float32", (3, 4), (4, 1), "cpu"),
    "transposed": TensorSpec("bfloat16", (3, 4), (1, 3), "cpu"),
    "expanded": TensorSpec("int64", (3, 4), (0, 1), "cpu"),
    "gaps": TensorSpec("bool", (3, 4), (8, 2), "cpu"),
    "empty": TensorSpec("complex64", (0, 4), (4, 1), "cpu"),
    "number": TensorSpec("float64", (), (), "cpu"),
}


@pytest.mark.parametrize("name", ALLOCS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_alloc_is_what_empty_strided_gives(name, mode):
    spec = ALLOCS[name]
    plan = compile_program(program([X], Alloc(1, spec), outputs=[1]), CPU)
    with mode():
        for _ in range(2):
            (allocated,) = plan([X])
            eager_tensor = torch.empty_strided(spec.shape, spec.strides, dtype=spec.torch_dtype)
            assert (allocated.shape, allocated.stride(), allocated.dtype, allocated.device) == (
                eager_tensor.shape,
                eager_tensor.stride(),
                eager_tensor.dtype,
                eager_tensor.device,
            )
            assert (allocated.is_inference(), allocated.requires_grad, allocated.is_leaf) == (
                eager_tensor.is_inference(),
                False,
                True,
            )
            assert allocated.untyped_storage().nbytes() == eager_tensor.untyped_storage().nbytes()
            assert torch._C._dispatch_keys(allocated) == torch._C._dispatch_keys(eager_tensor)
            allocated.untyped_storage().resize_(1024)
            assert (
                eager_tensor.is_inference()
                or allocated.fill_(1)._version == eager_tensor.fill_(1)._version
            )


def test_dispatch_modes_see_an_alloc_and_deterministic_mode_fills_it():
    plan = compile_program(program([X], Alloc(1, ALLOCS["dense"]), outputs=[1]), CPU)
    calls: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        plan([X])
    assert calls == ["aten.empty_strided.default"]
    torch.use_deterministic_algorithms(True)
    try:
        assert plan([X])[0].isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
