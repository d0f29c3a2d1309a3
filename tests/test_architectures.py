"""Models of the transformers library, unmodified: both doors capture them whole, under one key, and
answer as eager does.

Decisions are planted, so that what runs is a swapped graph. Before and after, every tensor,
attribute and random generator of the model is compared bit for bit. Models of timm are tried where
timm is installed, on a GPU.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torch_cudal1
from tests.architectures import ARCHITECTURES, TIMM, Architecture, build, build_timm
from tests.entries import Runs, plant_regions
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.lower import lower
from torch_cudal1.ir.records import Contract, Region
from torch_cudal1.judge.reference.float64 import compute_exact_outputs
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.region_reference import RegionReference

CPU = torch.device("cpu")
TRAINED = (
    *(
        "albert",
        "bert",
        "bloom",
        "clip_text",
        "deberta_v2",
        "distilbert",
        "electra",
        "falcon",
        "gemma2",
        "gpt2",
        "gpt_neox",
    ),
    *(
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "modernbert",
        "mpnet",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "roberta",
        "starcoder2",
    ),
)


def state_of(model: nn.Module) -> list[Any]:
    """Everything that a capture could have changed: tensors by value, version and identity,
    attributes, generators.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    values: list[Any] = [
        (name, id(tensor), tensor._version, tensor.detach().clone()) for name, tensor in tensors
    ]
    for part in model.modules():
        instance_attributes = {
            name: value for name, value in vars(part).items() if name != "_compiled_call_impl"
        }  # where accelerate sits
        plain = {
            name: value
            for name, value in instance_attributes.items()
            if isinstance(value, (bool, int, float, str, type(None)))
        }
        values.append(
            (
                type(part),
                sorted(plain.items(), key=repr),
                sorted(instance_attributes),
                part.training,
            )
        )
        values += [
            value.detach().clone()
            for value in vars(part).values()
            if isinstance(value, torch.Tensor)
        ]
    return [
        *values,
        torch.get_rng_state(),
        random.getstate(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    ]


def assert_equal(got: Any, expected: Any) -> None:
    """Bit for bit."""
    values, expected_values = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    assert len(values) == len(expected_values)
    for value, expected_value in zip(values, expected_values, strict=True):
        assert (
            torch.equal(value, expected_value)
            if isinstance(expected_value, torch.Tensor)
            else value == expected_value
        )


def assert_close(got: Any, expected: Any) -> None:
    """Results of one class, with equal fields and tensors that differ by rounding at most."""
    assert type(got) is type(expected)
    values, form = pytree.tree_flatten(got)
    expected_values, expected_form = pytree.tree_flatten(expected)
    assert form == expected_form
    for value, expected_value in zip(values, expected_values, strict=True):
        if isinstance(expected_value, torch.Tensor):
            torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-5)
        else:
            assert value == expected_value


def keys_of_backend(model: nn.Module, inputs: dict[str, Any]) -> list[str]:
    """The keys of the graphs that Dynamo brings to a backend."""
    keys: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs = trace(gm, inputs).graphs
        keys.extend(
            lower(graph.module, static=graph.static, kind=graph.kind).region.key for graph in graphs
        )
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(**inputs)
    torch._dynamo.reset()
    return keys


def assert_exact(regions: Sequence[Region], device: torch.device = CPU) -> None:
    """Each of them has a float64 run, which the judge compares candidates with."""
    for region in regions:
        inputs = make_inputs(RegionReference(region, Contract(), device), 1, "normal", device)
        answer = compute_exact_outputs(region.program, inputs, device)
        assert not isinstance(answer, Refusal), f"{region.name}: {answer.reason}"


def check_inference(
    architecture: Architecture,
    inputs: dict[str, Any],
    runs: Runs,
    cache_dir: Path,
    *,
    doors: bool = True,
) -> None:
    """One form of call: its regions are the backend's, nothing is changed before it, and it answers
    as eager does.
    """
    model = architecture.model
    with torch.no_grad():
        expected = model(**inputs)
        before = state_of(model)
        regions = capture_regions(model, (), inputs)
        plant_regions(regions, cache_dir, device=str(next(iter(model.parameters())).device))
        if doors:
            assert_exact(regions)
        torch_cudal1.accelerate(model, inputs, cache_dir=cache_dir, strictness="error")
        assert_equal(state_of(model), before)
        assert not torch_cudal1.explain(model).left_out
        started = runs.total
        for _ in range(2):
            assert_close(model(**inputs), expected)
        assert runs.total == started + 2
        torch_cudal1.restore(model)
        if doors:
            assert [region.key for region in regions] == keys_of_backend(model, inputs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_both_doors_capture_it_whole_and_answer_as_eager_does(
    name: str, runs: Runs, tmp_path: Path
) -> None:
    architecture = build(name)
    check_inference(architecture, architecture.masked, runs, tmp_path)
    if architecture.masked.keys() != architecture.inputs.keys():
        check_inference(architecture, architecture.inputs, runs, tmp_path, doors=False)


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_is_eager_s(name: str, runs: Runs, tmp_path: Path) -> None:
    architecture = build(name)
    eager_model, inputs = copy.deepcopy(architecture.model), architecture.masked
    before = state_of(architecture.model)
    regions = capture_regions(architecture.model, (), inputs)
    plant_regions(regions, tmp_path)
    assert_exact(regions)
    torch_cudal1.accelerate(architecture.model, inputs, cache_dir=tmp_path, strictness="error")
    assert_equal(state_of(architecture.model), before)
    for model in (
        architecture.model,
        eager_model,
    ):  # of a result that is not used, eager has no gradient where a compiled step has zeros
        outputs = [
            leaf
            for leaf in pytree.tree_leaves(model(**inputs))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
    assert (runs.forward, runs.backward) == (1, 1)
    for (parameter_name, parameter), eager_parameter in zip(
        architecture.model.named_parameters(), eager_model.parameters(), strict=True
    ):
        assert (parameter.grad is None) == (eager_parameter.grad is None), parameter_name
        if parameter.grad is not None:
            torch.testing.assert_close(
                parameter.grad,
                eager_parameter.grad,
                rtol=1e-3,
                atol=1e-6,
                msg=lambda text, name=parameter_name: f"{name}: {text}",
            )


@pytest.mark.gpu
@pytest.mark.parametrize("name", TIMM)
def test_models_of_timm_are_captured_by_both_doors(name: str, runs: Runs, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    architecture = build_timm(name, torch.device("cuda"))
    model, (x,) = architecture
    with torch.no_grad():
        expected = model(x)
        before = state_of(model)
        regions = capture_regions(model, (x,))
        plant_regions(regions, tmp_path, device="cuda:0")
        torch_cudal1.accelerate(model, x, cache_dir=tmp_path, strictness="error")
        assert_equal(state_of(model), before)
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
        assert runs.total == 1
        keys: list[str] = []

        def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            keys.extend(
                lower(g.module, static=g.static, kind=g.kind).region.key
                for g in trace(gm, inputs).graphs
            )
            return gm.forward

        torch_cudal1.restore(model)
        torch._dynamo.reset()
        torch.compile(model, backend=backend)(x)
    assert keys == [region.key for region in regions]


@pytest.mark.gpu
@pytest.mark.parametrize("name", TIMM)
@torch.no_grad()
def test_models_of_timm_in_half_precision_have_a_float64_run(name: str) -> None:
    pytest.importorskip("timm")
    model, (x,) = build_timm(name, torch.device("cuda"))
    model, x = model.bfloat16(), x.bfloat16()
    model(x)  # some fill a table at their first call
    assert_exact(capture_regions(model, (x,)), torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_models_of_transformers_in_half_precision_have_a_float64_run_on_a_gpu(name: str) -> None:
    def on_gpu(leaf: Any) -> Any:
        return (
            leaf.to("cuda", torch.bfloat16 if leaf.is_floating_point() else None)
            if isinstance(leaf, torch.Tensor)
            else leaf
        )

    architecture = build(name)
    regions = capture_regions(
        architecture.model.to("cuda", torch.bfloat16),
        (),
        pytree.tree_map(on_gpu, architecture.masked),
    )
    assert_exact(regions, torch.device("cuda"))


def test_there_are_at_least_37_and_14_and_20() -> None:
    assert len(ARCHITECTURES) >= 37
    assert len(TIMM) >= 14
    assert len(TRAINED) >= 20
