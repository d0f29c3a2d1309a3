"""A recurrent layer is one step of a Program, with eager's result on both executors and through
Inductor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.captured import capture_call_graphs
from torch_cudal1.graph.lower import lower
from torch_cudal1.ir.aten import is_random, name_of, overload
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.ir.ops import recurrent_ops
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.value_specs import output_specs
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.runtime.runner import build_runner

CPU = torch.device("cpu")
LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "projected lstm": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=3, **options),
}
SHAPES = [
    {"num_layers": 1},
    {"num_layers": 2, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "bias": False},
    {"num_layers": 1, "bidirectional": True, "batch_first": True},
]


class LastStepTagger(nn.Module):
    """A layer between others: reads the last time step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(7, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.head(self.layer(x * 2)[0][:, -1]))


def program_of(module: nn.Module, x: torch.Tensor) -> tuple[Program, list[torch.Tensor]]:
    """The module's region, and its inputs in the region's order."""
    with torch.no_grad():
        call, traced = capture_call_graphs(module, (x,), {})
    (graph,) = traced.graphs
    lowered = lower(graph.module, static=graph.static)
    origins = [graph.origins[position] for position in lowered.order]
    return lowered.region.program, [
        call.inputs[origin].detach() for origin in origins if isinstance(origin, int)
    ]


def steps_of(program: Program) -> list[str]:
    return [step.target for step in program.steps if isinstance(step, Aten)]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_the_step_has_eagers_result_and_knows_its_shape_beforehand(
    name: str, options: dict[str, Any]
) -> None:
    layer = LAYERS[name](5, 7, **options).eval()
    x = torch.randn(3, 4, 5)
    with torch.no_grad():
        expected = pytree.tree_leaves(layer(x))
        with recurrent_ops.OneStepRecurrence():
            results = pytree.tree_leaves(layer(x))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, recurrent_ops.OneStepRecurrence():
            fake_results = pytree.tree_leaves(layer(mode.from_tensor(x)))
    for real, same, fake in zip(expected, results, fake_results, strict=True):
        assert torch.equal(real, same)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_a_module_with_a_recurrent_layer_is_one_graph_with_one_step_for_it(name: str) -> None:
    module, x = LastStepTagger(LAYERS[name](5, 7, 2, batch_first=True)).eval(), torch.randn(3, 6, 5)
    with torch.no_grad():
        expected = module(x)
    program, inputs = program_of(module, x)
    assert steps_of(program).count(f"aten.{name}.input") == 1
    assert len(program.steps) < 12  # no loop over time steps
    again = Program.from_json(program.to_json(), program.all_payloads())
    assert again.digest == program.digest
    (spec,) = output_specs(program)
    assert spec is not None
    assert spec.shape == (3, 4)
    with torch.no_grad():
        for run in (prepare(program, CPU), interpret(program, CPU)):
            (result,) = run(inputs)
            torch.testing.assert_close(
                result, expected, rtol=1e-6, atol=1e-6
            )  # the head's product may be another one


def test_inductor_takes_the_layer_as_one_node() -> None:
    module, x = LastStepTagger(nn.LSTM(5, 7, batch_first=True)).eval(), torch.randn(3, 6, 5)
    program, inputs = program_of(module, x)
    (result,) = build_runner(program, "inductor", CPU)(inputs)
    torch.testing.assert_close(result, module(x).detach(), rtol=1e-6, atol=1e-6)


def test_weights_are_inputs_so_an_edit_is_seen() -> None:
    module, x = LastStepTagger(nn.GRU(5, 7, batch_first=True)).eval(), torch.randn(3, 6, 5)
    program, inputs = program_of(module, x)
    run = prepare(program, CPU)
    with torch.no_grad():
        before = run(inputs)[0]
        module.get_parameter("layer.weight_hh_l0").data.mul_(2)
        after = run(inputs)[0]
        assert before is not None
        assert after is not None
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, module(x), rtol=1e-6, atol=1e-6)


def test_tracing_leaves_the_layer_as_it_was() -> None:
    layer = nn.LSTM(5, 7)
    before, weights = set(vars(layer)), layer._flat_weights
    with torch.no_grad():
        capture_call_graphs(layer, (torch.randn(6, 3, 5),), {})
    assert set(vars(layer)) == before
    assert all(a is b for a, b in zip(layer._flat_weights, weights, strict=True))


def test_a_layer_whose_gradient_is_wanted_is_left_to_pytorch() -> None:
    layer = nn.LSTM(5, 7)
    with pytest.raises(NotLowerableError, match="LSTM"):  # Dynamo breaks the graph there
        capture_call_graphs(layer, (torch.randn(2, 3, 5),), {})


@pytest.mark.parametrize("case", ["packed", "dropout", "autocast", "gradient"])
def test_what_is_not_a_pure_step_is_left_to_pytorch(case: str) -> None:
    layer = nn.LSTM(5, 7, 2, dropout=0.5 if case == "dropout" else 0.0).train(case == "dropout")
    x: Any = torch.randn(6, 3, 5)
    sequence = (
        nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2])) if case == "packed" else x
    )
    functions: list[Any] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            functions.append(func)
            return func(*args, **(kwargs or {}))

    with (
        torch.backends.mkldnn.flags(
            enabled=case != "autocast"
        ),  # oneDNN has no bfloat16 LSTM on a CPU without such instructions
        torch.autocast("cpu", enabled=case == "autocast"),
        torch.set_grad_enabled(case == "gradient"),
        Watch(),
        recurrent_ops.OneStepRecurrence(),
    ):
        layer(sequence)
    assert functions
    assert not any(func.namespace == "cudal1" for func in functions)


def test_only_active_dropout_makes_a_step_random() -> None:
    def call(dropout: float, training: bool) -> tuple[Any, ...]:
        return (None, None, (), True, 2, dropout, training, False, False)

    assert not is_random("aten.lstm.input", call(0.0, True))
    assert not is_random("aten.lstm.input", call(0.5, False))
    assert is_random("aten.lstm.input", call(0.5, True))


@pytest.mark.parametrize("target", sorted(recurrent_ops.TARGETS))
def test_names_go_both_ways_and_the_schema_is_atens(target: str) -> None:
    operator = overload(target)
    original = getattr(torch.ops.aten, target.split(".")[1]).input
    assert name_of(operator) == name_of(original) == target
    assert [str(a.type) for a in operator._schema.arguments] == [
        str(a.type) for a in original._schema.arguments
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("schedule", ["eager", "eager+graph", "inductor", "inductor+graph"])
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh"])
def test_cudnns_layer_is_served_under_every_schedule(name: str, schedule: str) -> None:
    module, x = (
        LastStepTagger(LAYERS[name](5, 7, 2, batch_first=True)).eval().cuda(),
        torch.randn(3, 6, 5, device="cuda"),
    )
    program, inputs = program_of(module, x)
    run = build_runner(
        program,
        schedule,
        torch.device("cuda"),
        static=[i for i, t in enumerate(inputs) if t is not x],
    )
    with torch.no_grad():
        for _ in range(3):
            (result,) = run(inputs)
            torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
        module.get_parameter("layer.weight_hh_l0").data.mul_(2)
        (result,) = run(inputs)
        torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
