"""Made inputs have the exact form, are the same for the same seed, and stay where their consumers
can read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.judge.programs import V, linear_relu, op, spec, subject
from torch_cudal1.ir.program import Aten, Program, TensorSpec
from torch_cudal1.ir.records import Region, Role
from torch_cudal1.judge.reference.analysis import Facts, analyse
from torch_cudal1.judge.reference.inputs import DISTRIBUTIONS, find_unproven_integers, make_inputs

CPU = torch.device("cpu")
SPECS = [
    TensorSpec("float32", (3, 4), (4, 1), "cpu"),
    TensorSpec("float32", (3, 4), (1, 3), "cpu"),  # transposed
    TensorSpec("bfloat16", (2, 3, 4, 5), (60, 1, 15, 3), "cpu"),  # channels last
    TensorSpec("float16", (6, 4), (0, 1), "cpu"),  # expanded
    TensorSpec("float32", (5,), (2,), "cpu"),  # step 2
    TensorSpec("float64", (), (), "cpu"),
    TensorSpec("float32", (0, 4), (4, 1), "cpu"),  # empty
    TensorSpec("int64", (7,), (1,), "cpu"),
    TensorSpec("bool", (7,), (1,), "cpu"),
    TensorSpec("complex64", (3,), (1,), "cpu"),
]


@dataclass(frozen=True)
class ReferenceWithFacts:
    specs: tuple[TensorSpec, ...]
    roles: tuple[Role, ...]
    facts: Facts


def _region(*specs: TensorSpec) -> Region:
    return Region(Program(specs, (), (0,)), ("input",) * len(specs))


@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
def test_every_form_is_made_exactly(distribution: str) -> None:
    inputs = make_inputs(subject(_region(*SPECS)), 1, distribution, CPU)
    assert [TensorSpec.of(t) for t in inputs] == SPECS
    assert all(bool(t.isfinite().all()) for t in inputs if t.dtype.is_floating_point)


def test_the_seed_decides_everything() -> None:
    region = _region(*SPECS)
    first, repeated, other = (
        make_inputs(subject(region), seed, "normal", CPU) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(
        first[0].reshape(-1)[:5], first[1].reshape(-1)[:5]
    )  # two inputs of one seed differ


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [("normal", 0, 1), ("shifted", 3, 1), ("large", 0, 1e4), ("small", 0, 1e-4)],
)
def test_a_distribution_is_what_its_name_says(
    distribution: str, mean: float, deviation: float
) -> None:
    (values,) = make_inputs(subject(_region(spec(100_000))), 5, distribution, CPU)
    assert float(values.mean()) == pytest.approx(mean, abs=0.03 * deviation)
    assert float(values.std()) == pytest.approx(deviation, rel=0.03)


def test_parameters_are_off_their_initial_values_and_keep_the_scale() -> None:
    region = linear_relu()
    x, weight, bias = make_inputs(subject(region), 1, "large", CPU)
    assert float((weight @ weight.T).diagonal().mean()) == pytest.approx(
        1, rel=0.2
    )  # N(0, 1) / sqrt(fan in)
    assert float(bias.abs().mean()) > 0.2
    assert float(x.abs().mean()) > 1e3


def _embedding(*between: Aten) -> Program:
    last = 2 + len(between)
    table = (spec(11, 4), spec(3, 5, dtype=torch.int64))
    return Program(
        table, (*between, op("aten.embedding.default", V(0), V(last - 1), out=last)), (last,)
    )


BOUNDED = [
    (_embedding(), 1, 11),
    (_embedding(op("aten.view.default", V(1), (15,), out=2)), 1, 11),
    (
        _embedding(
            op("aten.unsqueeze.default", V(1), 0, out=2),
            op("aten.slice.Tensor", V(2), 2, 0, 3, out=3),
        ),
        1,
        11,
    ),
    (
        Program(
            (spec(4, 9), spec(4, 2, dtype=torch.int64)),
            (op("aten.gather.default", V(0), -1, V(1), out=2),),
            (2,),
        ),
        1,
        9,
    ),
    (
        Program(
            (spec(4, 9), spec(3, dtype=torch.int64)),
            (op("aten.index_select.default", V(0), 0, V(1), out=2),),
            (2,),
        ),
        1,
        4,
    ),
    (
        Program(
            (spec(4, 9), spec(3, dtype=torch.int64)),
            (op("aten.index.Tensor", V(0), (None, V(1)), out=2),),
            (2,),
        ),
        1,
        9,
    ),
    (
        Program(
            (spec(6, 10), spec(6, dtype=torch.int64)),
            (
                op("aten._log_softmax.default", V(0), 1, False, out=2),
                Aten(
                    "aten.nll_loss_forward.default",
                    (V(2), V(1), None, 1, -100),
                    (),
                    (3, 4),
                    many=True,
                ),
            ),
            (3,),
        ),
        1,
        10,
    ),
    (
        Program(
            (spec(2, 3, 8, 6), spec(2, 3, 4, 3, dtype=torch.int64)),
            (
                op("aten.slice.Tensor", V(0), 2, 0, 4, out=2),
                op("aten.slice.Tensor", V(2), 3, 0, 3, out=3),
                op(
                    "aten.max_pool2d_with_indices_backward.default",
                    *(V(3), V(0), (2, 2), (2, 2), (0, 0), (1, 1), False, V(1)),
                    out=4,
                ),
            ),
            (4,),
        ),
        1,
        48,
    ),
]


@pytest.mark.parametrize(("program", "position", "bound"), BOUNDED)
def test_integers_stay_inside_what_they_index(program: Program, position: int, bound: int) -> None:
    region = Region(program, ("input", "input"))
    facts = analyse(program)
    assert facts.bounds == {position: bound}
    assert find_unproven_integers(subject(region)) == ()
    many = (program.inputs[0], replace(program.inputs[1], shape=(4000,), strides=(1,)))
    indices = make_inputs(ReferenceWithFacts(many, ("input", "input"), facts), 3, "normal", CPU)[
        position
    ]
    assert int(indices.min()) == 0
    assert int(indices.max()) == bound - 1


def test_unexplained_integers_are_reported_and_taken_from_the_examples() -> None:
    program = Program((spec(5, dtype=torch.int64),), (op("aten.add.Tensor", V(0), 1, out=1),), (1,))
    region = Region(program, ("input",))
    assert find_unproven_integers(subject(region)) == (0,)
    example = torch.tensor([3, 99, 5, 6, 7])
    (integers,) = make_inputs(subject(region), 1, "normal", CPU, examples=(example,))
    assert torch.equal(integers, example)
    assert integers.data_ptr() != example.data_ptr()


def test_variances_are_positive() -> None:
    program = Program(
        (spec(2, 8, 5), spec(8), spec(8)),
        (
            op("aten.add.Tensor", V(1), 1e-5, out=3),
            op("aten.rsqrt.default", V(3), out=4),
            op("aten.mul.Tensor", V(4), V(2), out=5),
        ),
        (5,),
    )
    facts = analyse(program)
    assert facts.positive == {1}
    region = Region(program, ("input", "buffer", "parameter"))
    assert float(make_inputs(subject(region), 1, "normal", CPU)[1].min()) >= 0.5


def test_the_argument_of_a_logarithm_is_positive() -> None:
    """As in `kl_div`, of whose targets `xlogy` is taken: drawn otherwise every result is NaN, and
    nothing can be judged.
    """
    program = Program(
        (spec(4, 5), spec(4, 5), spec(4, 5)),
        (
            op("aten.xlogy.Tensor", V(0), V(0), out=3),
            op("aten.xlogy.Tensor", V(1), V(2), out=4),
            op("aten.log2.default", V(2), out=5),
        ),
        (3, 4, 5),
    )
    assert analyse(program).positive == {0, 2}
    first, factor, last = make_inputs(subject(Region(program, ("input",) * 3)), 1, "normal", CPU)
    assert min(float(first.min()), float(last.min())) > 0 > float(factor.min())


def test_the_longest_reduction_and_the_work_are_known() -> None:
    facts = analyse(linear_relu().program)
    assert facts.longest_reduction == 48
    assert facts.flops == 2 * 32 * 48 * 64


def test_recurrent_weights_keep_what_is_rounded_small_however_they_come() -> None:
    steps, width, hidden = 200, 24, 64
    layer = torch.nn.LSTM(width, hidden)
    tensors = [
        torch.zeros(steps, 2, width),
        torch.zeros(1, 2, hidden),
        torch.zeros(1, 2, hidden),
        *layer._flat_weights,
    ]

    def arguments(values: Any) -> tuple[Any, ...]:
        return values[0], tuple(values[1:3]), tuple(values[3:]), True, 1, 0.0, False, False, False

    values = [V(number) for number in range(len(tensors))]
    program = Program(
        tuple(TensorSpec.of(tensor.detach()) for tensor in tensors),
        (Aten("aten.lstm.input", arguments(values), (), (7, 8, 9), True),),
        (7, 8, 9),
    )
    facts = analyse(program)
    assert (facts.weights, facts.sequential_steps, facts.longest_reduction) == (
        frozenset({3, 4, 5, 6}),
        steps,
        hidden,
    )
    assert facts.flops == 2 * steps * 2 * 4 * hidden * (width + hidden)
    group = Region(program, ("input",) * len(tensors), "inference", "island", "layer")
    inputs = make_inputs(subject(group), 3, "normal", torch.device("cpu"))
    out, _, _ = torch.lstm(*arguments(inputs))
    exact, _, _ = torch.lstm(*arguments([tensor.double() for tensor in inputs]))
    assert float((out - exact).norm() / exact.norm()) < 1e-5


def test_wrong_examples_and_unknown_distributions_are_refused() -> None:
    region = _region(spec(3))
    with pytest.raises(ValueError, match="examples"):
        make_inputs(subject(region), 1, "normal", CPU, examples=(torch.ones(4),))
    with pytest.raises(ValueError, match="gaussian"):
        make_inputs(subject(region), 1, "gaussian", CPU)


@pytest.mark.parametrize(
    ("distribution", "holds"),
    [
        ("log_uniform", lambda x: float(x.abs().max()) > 1e5 and float(x.abs().min()) < 1e-5),
        ("thousand", lambda x: abs(float(x.mean()) - 1000) < 1),
        ("impulse", lambda x: int((x != 0).sum()) == 1),
        ("constant_rows", lambda x: torch.equal(x, x[:, :1].expand_as(x))),
        ("sorted", lambda x: bool((x.diff(dim=1) >= 0).all())),
        ("sparse", lambda x: 0.85 < float((x == 0).float().mean()) < 0.95),
        ("integers", lambda x: set(x.unique().tolist()) == {0.0, 1.0}),
    ],
)
def test_a_structured_distribution_has_its_structure(
    distribution: str, holds: Callable[[torch.Tensor], bool]
) -> None:
    scale = Program((spec(64, 256),), (op("aten.mul.Scalar", V(0), 3.0, out=1),), (1,))
    reference = subject(Region(scale, ("input",)))
    (values,) = make_inputs(reference, 3, distribution, CPU)
    assert holds(values)
