"""A reference source is described once, and asked in the oracle's process for all that it yields."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.judge.reference.in_process_child import CPU, InProcessChild
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.judge.reference import source_reference
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import (
    SourceCandidate,
    SourceReference,
    load_module,
    read_reference,
)
from torch_cudal1.judge.wire.call_spec import RunMode, pack_arguments

REFERENCE = """
import threading, torch
class Model(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(features)
        self.register_buffer("mask", torch.eye(features))
        {init}
    def forward(self, x, rows):
        {before}
        return self.norm(x @ self.mask)[rows], rows
def get_inputs(): return [torch.randn(16, 4), torch.tensor([0, 3, 9])]
def get_init_inputs(): return [4]
"""


@pytest.fixture
def oracle(tmp_path: Path) -> InProcessChild:
    return InProcessChild(tmp_path)


def read(
    oracle: Any, init: str = "pass", before: str = "pass"
) -> tuple[SourceReference, list[torch.Tensor]]:
    return read_reference(oracle, REFERENCE.format(init=init, before=before), CPU)


def find(reference: SourceReference, name: str) -> int:
    return reference.form.names.index(name)


def test_roles_bounds_and_structure_come_from_the_examples(oracle: InProcessChild) -> None:
    reference, examples = read(oracle)
    assert reference.specs == tuple(TensorSpec.of(tensor) for tensor in examples)
    assert reference.roles[-2:] == ("input", "input")
    assert reference.roles[find(reference, "norm.weight")] == "parameter"
    assert reference.bounds[len(examples) - 1] == 10, "no integer beyond the examples' largest"
    assert reference.structural == {find(reference, "mask")}, "zeros and ones, and both"
    assert reference.facts.positive == {find(reference, "norm.running_var")}
    assert reference.facts.longest_reduction == 16
    assert reference.flops == 2 * 16 * 4 * 4


def test_results_are_eagers_and_those_of_float64_more_exact(oracle: InProcessChild) -> None:
    reference, examples = read(oracle)
    assert reference.outputs == (True, True)
    eager, rows = reference.eager(examples).outputs
    exact = reference.exact(examples)
    assert not isinstance(exact, Refusal)
    assert eager is not None
    assert exact[0] is not None
    assert rows is not None
    assert (eager.dtype, exact[0].dtype, rows.dtype) == (torch.float32, torch.float64, torch.int64)
    torch.testing.assert_close(exact[0], eager.double())
    assert not torch.equal(exact[0], eager.double())
    assert oracle.session.sets == {}, "its inputs are dropped after each call"


def test_everything_that_changes_a_result_changes_the_key(
    oracle: InProcessChild, tmp_path: Path
) -> None:
    reference, _ = read(oracle)
    other_oracle: Any = InProcessChild(tmp_path)
    assert replace(reference, oracle=other_oracle).key == reference.key
    others = [
        reference.in_way(RunMode(training=True)),
        reference.with_specs([*reference.specs[:-2], *reference.specs[-1:]]),
        reference.with_init(pack_arguments({"args": [5], "kwargs": {}}, None)),
        replace(reference, text=reference.text + "# another"),
    ]
    assert len({reference.key, *(other.key for other in others)}) == 5


def test_each_output_gets_a_cotangent_and_integers_a_placeholder(oracle: InProcessChild) -> None:
    reference, examples = read(oracle)
    with_gradients = reference.with_gradients(RunMode(gradients=True))
    first, second = with_gradients.specs[reference.cotangents :]
    assert (first.dtype, first.shape) == ("float32", (3, 4))
    assert (second.dtype, second.shape) == ("float32", (3,))
    assert with_gradients.roles[len(examples) :] == ("input", "input")


@pytest.mark.parametrize(
    ("init", "how", "survives"),
    [
        ("pass", "deepcopy", True),
        ("pass", "pickle", True),
        ("self.lock = threading.Lock()", "deepcopy", False),
        ("self.hook = lambda: None", "pickle", False),
    ],
)
def test_whether_a_used_instance_can_be_copied_is_tried(
    oracle: InProcessChild, init: str, how: str, survives: bool
) -> None:
    reference, examples = read(oracle, init)
    assert reference.survives(how, examples) is survives


def test_a_living_instance_is_called_again_and_its_inputs_are_dropped(
    oracle: InProcessChild,
) -> None:
    reference, examples = read(oracle, "self.calls = []", "self.calls.append(1)")
    with reference.open_used_instance(examples) as call:
        call()
        call()
    (runner,) = oracle.session.slots.values()
    # One of these calls came before the caller's, for what an instance sets up in its first.
    assert len(vars(runner)["_instance"].calls) == 3
    assert oracle.session.sets == {}


def test_a_call_that_fails_is_a_failure_of_the_reference(oracle: InProcessChild) -> None:
    reference, examples = read(oracle, before="raise RuntimeError('not on a Sunday')")
    with pytest.raises(ReferenceFailure, match="not on a Sunday"):
        reference.eager(examples)
    exact = reference.exact(examples)
    assert isinstance(exact, Refusal)
    assert "not on a Sunday" in exact.reason


def test_without_a_gpu_nothing_can_be_captured(oracle: InProcessChild) -> None:
    if torch.cuda.is_available():
        pytest.skip("this process has a GPU")
    reference, examples = read(oracle)
    assert reference.can_be_captured(examples) is False


def test_a_file_without_a_model_is_unusable(oracle: InProcessChild) -> None:
    child: Any = oracle
    with pytest.raises(SandboxError, match="defines no Model"):
        read_reference(child, REFERENCE.replace("class Model", "class Other"), CPU)


def test_a_candidate_is_known_by_its_text_and_entry() -> None:
    candidate = SourceCandidate("text")
    assert candidate.digest == SourceCandidate("text", origin="elsewhere").digest
    assert candidate.digest != SourceCandidate("text", entry="Other").digest
    assert candidate.label == f"ModelNew {candidate.digest[:8]}"
    assert replace(candidate, techniques=("tiling", "fp16")).label == "tiling+fp16"


def test_integers_of_other_seeds_are_legal_too(oracle: InProcessChild) -> None:
    drawn = REFERENCE.replace("torch.tensor([0, 3, 9])", "torch.randint(0, 16, (3,))")
    text = drawn.format(init="pass", before="pass")
    reference, examples = read_reference(oracle, text, CPU)
    further = [items[-1] for items in reference.further_examples]
    rows = [item.tolist() for item in (examples[-1], *further) if item is not None]
    assert len(set(map(tuple, rows))) == 3
    # No weights are kept beside those of the first seed.
    assert all(item is None for items in reference.further_examples for item in items[:-1])
    # A call without integers has nothing to take from them.
    floating = text.replace("torch.randint(0, 16, (3,))", "torch.randn(3)").replace("[rows]", "")
    assert read_reference(oracle, floating, CPU)[0].further_examples == ()


def test_another_call_is_another_reference(oracle: InProcessChild) -> None:
    reference, _ = read(oracle)
    other = reference.with_call(pack_arguments({"args": (1.5,), "kwargs": {}}, None))
    assert other.form.call != reference.form.call
    assert other.key != reference.key


def test_on_a_gpu_indices_of_other_shapes_are_looked_at_on_the_host(
    oracle: InProcessChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, examples = read(oracle)
    asked: list[RunMode] = []

    def load(child: Any, slot: str, text: str, form: Any, way: RunMode) -> list[Any]:
        asked.append(way)
        return load_module(child, slot, text, form, way)

    monkeypatch.setattr(source_reference, "load_module", load)
    # The process is one of a CPU all the same.
    on_gpu = replace(reference, device=torch.device("cuda"))
    few = [*examples[:-2], examples[-2][:5], examples[-1]]
    shorter = on_gpu.with_specs([*map(TensorSpec.of, few)])
    with pytest.raises(ReferenceFailure, match="out of bounds"):
        shorter.eager(few)
    assert asked == [RunMode(on_host=True)], "its CUDA context never saw them"
    # Layouts of the examples' own shapes cannot make an index wrong.
    assert not on_gpu.with_specs(reference.specs).is_unproven
    assert shorter.with_specs(few_specs := shorter.specs).is_unproven
    assert [spec.shape for spec in few_specs] == [tuple(tensor.shape) for tensor in few]


def test_on_the_host_results_are_eagers(oracle: InProcessChild) -> None:
    reference, examples = read(oracle)
    results = reference.in_way(RunMode(on_host=True)).eager(examples).outputs
    for result, expected in zip(results, reference.eager(examples).outputs, strict=True):
        assert torch.equal(result, expected)  # type: ignore[arg-type]
