"""Arguments and results of an accelerated module: every kind is served exactly or left to the
module itself, with a reason.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import torch_cudal1
from tests.entries import Calls, accelerate_planted, plant
from torch_cudal1.core import telemetry

pytestmark = pytest.mark.usefixtures("inference")

Pair = namedtuple("Pair", "left right")


class ModelOutput(
    OrderedDict
):  # as in transformers: an ordered dict with attributes, known to pytree
    def __getattr__(self, name: str) -> Any:
        return self[name]


pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: ModelOutput(zip(names, values, strict=True)),
    serialized_type_name="tests.ModelOutput",
)


@dataclass
class Unregistered:
    logits: torch.Tensor


def assert_same(actual: Any, expected_output: Any) -> None:
    """Equal structure, types and values, bit by bit."""
    (mine, form), (expected_leaves, expected_form) = (
        pytree.tree_flatten(actual),
        pytree.tree_flatten(expected_output),
    )
    assert form == expected_form
    for a, b in zip(mine, expected_leaves, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


x8 = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

# --- outputs

OUTPUTS = {
    "tensor": lambda m, x: m.linear(x),
    "tuple of one": lambda m, x: (m.linear(x),),
    "list": lambda m, x: [m.linear(x), x * 2],
    "nested dict": lambda m, x: {"a": m.linear(x), "b": {"c": [x + 1, (x * 2,)]}},
    "namedtuple": lambda m, x: Pair(m.linear(x), x + 1),
    "ordered dict": lambda m, x: OrderedDict(a=x + 1, b=m.linear(x)),
    "model output": lambda m, x: ModelOutput(logits=m.linear(x), hidden=(x + 1, x + 2)),
    "none, numbers and text": lambda m, x: {
        "y": m.linear(x),
        "past": None,
        "size": x.shape[0],
        "scale": 0.5,
        "ok": True,
        "how": "a",
    },
    "scalar": lambda m, x: m.linear(x).sum(),
    "integer and bool tensors": lambda m, x: (m.linear(x).argmax(1), x > 0),
    "same tensor twice": lambda m, x: (lambda y: (y, y))(m.linear(x)),
    "views of one another": lambda m, x: (lambda y: (y, y.t(), y[0]))(m.linear(x)),
    "a constant": lambda m, x: (torch.tensor([1.0, 2.0]), torch.arange(3), m.linear(x)),
    "empty tensor": lambda m, x: m.linear(x)[:0],
    "transposed": lambda m, x: m.linear(x).t(),
    "complex": lambda m, x: torch.complex(m.linear(x), x),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_has_the_form_and_values_of_the_module_s_own(output, runs, tmp_path):
    module = accelerate_planted(OUTPUTS[output], x8, tmp_path)
    assert_same(module(x8), module._call_impl(x8))
    assert runs.total == 1


def test_outputs_that_are_inputs_or_weights_are_the_very_same_memory(runs, tmp_path):
    def make(module: Calls, x: torch.Tensor) -> Any:
        return (
            x,
            x[0],
            module.linear.weight,
            module.linear.weight.t(),
            module.count,
            module.linear(x),
        )

    module = accelerate_planted(make, x8, tmp_path)
    same, row, weight, transposed, count, _ = module(x8)
    assert same is x8
    assert row.data_ptr() == x8.data_ptr()
    assert weight is module.linear.weight
    assert transposed.data_ptr() == weight.data_ptr()
    assert count.data_ptr() == module.count.data_ptr()
    assert runs.total == 1


@pytest.mark.parametrize("output", [name for name in OUTPUTS if name != "empty tensor"])
def test_outputs_never_share_memory_with_those_of_another_call(output, tmp_path):
    module = accelerate_planted(OUTPUTS[output], x8, tmp_path)
    first, copies = (
        module(x8),
        pytree.tree_map(
            lambda t: t.clone() if isinstance(t, torch.Tensor) else t, module._call_impl(x8)
        ),
    )
    for leaf in pytree.tree_leaves(module(x8)):
        if isinstance(leaf, torch.Tensor):
            leaf.zero_()
    assert_same(first, copies)


def test_an_output_of_a_plain_class_is_built_anew_at_each_call(runs, tmp_path):
    module = accelerate_planted(lambda m, x: Unregistered(m.linear(x)), x8, tmp_path)
    first, second = module(x8), module(x8)
    assert type(first) is Unregistered
    assert first is not second
    assert torch.equal(first.logits, module._call_impl(x8).logits)
    assert runs.total == 2


# --- arguments

ARGUMENTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "two tensors": (lambda m, x, y: m.linear(x) + y, (x8, x8 + 1), {}),
    "one tensor twice": (lambda m, x, y: m.linear(x) + y, (x8, x8), {}),
    "overlapping tensors": (lambda m, x, y: m.linear(x) + y, (x8[:2], x8[1:]), {}),
    "nested": (
        lambda m, x, more: m.linear(x) + more["y"][0] * more["scale"],
        (x8, {"y": [x8 + 1], "scale": 0.5}),
        {},
    ),
    "keyword": (
        lambda m, x, *, y, flip=False: m.linear(x) - y if flip else y,
        (x8,),
        {"y": x8 + 1, "flip": True},
    ),
    "plain values": (
        lambda m, x, n, s, none, dtype: (m.linear(x) * n * s).to(dtype),
        (x8, 3, 0.5, None, torch.float64),
        {},
    ),
    "not contiguous": (lambda m, x: m.linear(x.t()), (torch.randn(8, 3),), {}),
    "sliced": (lambda m, x: m.linear(x), (torch.randn(3, 16)[:, ::2],), {}),
    "expanded": (lambda m, x: m.linear(x), (torch.randn(1, 8).expand(5, 8),), {}),
    "channels last": (
        lambda m, x: m.linear(x),
        (torch.randn(2, 4, 6, 8).to(memory_format=torch.channels_last),),
        {},
    ),
    "misaligned": (lambda m, x: m.linear(x), (torch.randn(25)[1:].view(3, 8),), {}),
    "no rows": (lambda m, x: m.linear(x), (torch.randn(0, 8),), {}),
    "zero dimensions": (lambda m, x: m.linear.weight * x, (torch.tensor(2.0),), {}),
    "complex": (
        lambda m, x: x * m.linear.weight[0, 0] + 1j,
        (torch.randn(3, dtype=torch.complex64),),
        {},
    ),
    "integers": (lambda m, x: m.linear.weight[x], (torch.tensor([1, 0, 7]),), {}),
    "no tensor": (lambda m, n: m.linear.weight * n, (3,), {}),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_every_kind_give_the_module_s_own_result(kind, runs, tmp_path):
    make, args, kwargs = ARGUMENTS[kind]
    module = accelerate_planted(make, args, tmp_path, **kwargs)
    assert_same(module(*args, **kwargs), module._call_impl(*args, **kwargs))
    assert runs.total == 1


def test_example_inputs_may_be_a_dict_of_keyword_arguments(runs, tmp_path):
    module = Calls(lambda m, x, y=None: m.linear(x) if y is None else m.linear(x) + y)
    plant(module, (), tmp_path, kwargs={"x": x8, "y": x8})
    torch_cudal1.accelerate(module, {"x": x8, "y": x8}, cache_dir=tmp_path)
    assert_same(module(x=x8, y=x8), module._call_impl(x8, x8))
    assert runs.total == 1


def test_a_misaligned_input_of_a_known_shape_is_another_signature(runs, tmp_path):
    module = accelerate_planted(lambda m, x: m.linear(x), x8, tmp_path)
    misaligned = torch.empty(25)[1:].view(3, 8).copy_(x8)
    assert_same(module(misaligned), module._call_impl(misaligned))
    assert runs.total == 0


UNSERVED = {
    "sparse": (lambda m, x: x.to_dense() + 1, lambda: x8.to_sparse()),
    "quantised": (
        lambda m, x: x.dequantize() + 1,
        lambda: torch.quantize_per_tensor(x8, 0.1, 0, torch.qint8),
    ),
    "conjugate": (lambda m, x: x + 1, lambda: torch.randn(3, dtype=torch.complex64).conj()),
    "subclass": (lambda m, x: x + 1, lambda: x8.as_subclass(type("Mine", (torch.Tensor,), {}))),
}


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
@pytest.mark.parametrize("kind", UNSERVED)
def test_an_argument_that_cannot_be_described_is_left_to_the_module_with_the_reason(kind, tmp_path):
    make, argument = UNSERVED[kind][0], UNSERVED[kind][1]()
    module = torch_cudal1.accelerate(
        Calls(make), (argument,), cache_dir=tmp_path, strictness="error"
    )
    assert torch.equal(module(argument), make(module, argument))
    assert "plain" in " ".join(torch_cudal1.explain(module).left_out)


# --- signatures


def test_unseen_inputs_get_the_right_answer_at_once_and_are_counted_as_a_miss(runs, tmp_path):
    module = Calls(lambda m, x: m.linear(x))
    y = torch.randn(5, 8)
    plant(module, y, tmp_path)
    torch_cudal1.accelerate(module, cache_dir=tmp_path, strictness="error")
    assert torch.equal(module(y), module._call_impl(y))
    assert (telemetry.report().counters["misses"], runs.total) == (1, 0)
    assert torch.equal(module(y), module._call_impl(y))  # met again: looked up, found, bound
    assert (telemetry.report().counters["misses"], runs.total) == (1, 1)


def test_a_signature_that_the_cache_has_not_heard_of_is_not_captured_and_counted_each_time(
    monkeypatch, tmp_path
):
    looked: list[int] = []
    original = torch_cudal1.api.dispatcher.bind
    monkeypatch.setattr(
        "torch_cudal1.api.dispatcher.bind", lambda *args: looked.append(1) or original(*args)
    )
    module = torch_cudal1.accelerate(
        Calls(lambda m, x: m.linear(x)), cache_dir=tmp_path, on_miss="tune"
    )
    for _ in range(5):
        module(x8)
    assert (len(looked), telemetry.report().counters["misses"]) == (0, 5)
    assert telemetry.report().counters.get("candidates_judged", 0) == 0  # a call never searches


def test_several_signatures_are_served_side_by_side(runs, tmp_path):
    module = Calls(lambda m, x, n=1: m.linear(x) * n)
    inputs = [
        (torch.randn(3, 8), 1),
        (torch.randn(4, 8), 1),
        (torch.randn(2, 3, 8), 1),
        (torch.randn(3, 8), 2),
    ]
    torch_cudal1.accelerate(module, cache_dir=tmp_path, strictness="error")
    for args in inputs:
        plant(module, args, tmp_path)
        module._compiled_call_impl.prepare(args, {}, None)
    for _ in range(3):
        for args in inputs:
            assert torch.equal(module(*args), module._call_impl(*args))
    assert runs.total == 12


def test_ever_new_shapes_cost_no_memory_and_no_look_up(tmp_path):
    module = torch_cudal1.accelerate(Calls(lambda m, x: m.linear(x)), cache_dir=tmp_path)
    for rows in range(1, 90):
        module(x8[:1].expand(rows, 8))
    dispatcher = module._compiled_call_impl
    assert len(dispatcher.bindings) == 0
    assert len(dispatcher._unbound) <= 64


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
)
def test_modes_are_part_of_the_signature(mode, runs, tmp_path):
    module = accelerate_planted(lambda m, x: m.linear(x), x8, tmp_path)
    with mode():
        output, expected = module(x8), module._call_impl(x8)
    assert torch.equal(output, expected)
    assert (output.dtype, output.requires_grad, output.is_inference()) == (
        expected.dtype,
        expected.requires_grad,
        expected.is_inference(),
    )


def test_bound_in_inference_mode_and_used_outside_of_it(runs, tmp_path):
    module = Calls(lambda m, x: m.linear(x) + m.count.add_(1))
    with torch.inference_mode():
        plant(module, x8, tmp_path)
        torch_cudal1.accelerate(module, x8, cache_dir=tmp_path, strictness="error")
        assert module(x8).is_inference()
    assert not module(x8).is_inference()
    assert torch.equal(module.count, torch.full((8,), 2.0))
    assert runs.total == 2


def test_four_threads_at_once_get_right_answers_from_the_first_call_on(runs, tmp_path):
    module = Calls(lambda m, x: torch.tanh(m.linear(x)))
    inputs = [torch.randn(rows, 8) for rows in (3, 3, 5, 6)]
    for input in inputs:
        plant(module, input, tmp_path)
    expected = [module._call_impl(input) for input in inputs]
    torch_cudal1.accelerate(module, cache_dir=tmp_path, strictness="error")
    wrong: list[Any] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        with torch.no_grad():
            start.wait()
            for _ in range(60):
                try:
                    if not torch.equal(module(inputs[number]), expected[number]):
                        wrong.append(number)
                except BaseException as error:  # noqa: BLE001  a thread's failure must reach the test
                    wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []
    assert runs.total > 0
