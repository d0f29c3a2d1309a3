"""A source's module traced at given tensors: the reference is the region that `accelerate` looks up,
a candidate's inputs have names, and what a graph cannot repeat is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ingest.published_sources import REFERENCE, read_source, write_candidate
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ingest.published.trace_source import (
    TracedSource,
    run_once,
    trace_candidate,
    trace_reference,
)
from torch_cudal1.ir.interpreter import interpret
from torch_cudal1.judge.worker.modules.source_modules import import_source

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("dynamo")


def trace(text: str, folder: Path, reference: str = REFERENCE) -> TracedSource:
    """A candidate, traced with the state and inputs of the reference."""
    _, form, tensors = read_source(reference, folder)
    return trace_candidate(
        import_source(text, folder), replace(form, entry="ModelNew"), tensors, CPU
    )


def test_a_reference_is_the_region_that_accelerate_looks_up(tmp_path: Path) -> None:
    source, form, tensors = read_source(REFERENCE, tmp_path)
    traced = trace_reference(source, form, tensors, CPU)
    with torch.no_grad():
        (region,) = capture_regions(source.Model(16).eval(), tuple(source.get_inputs()))
    assert traced.program.digest == region.key
    assert traced.roles == region.roles
    assert set(traced.sources) == {0, 1, "scale", "shift"}
    assert (traced.same, traced.writes) == ({}, ())


def test_a_candidate_names_its_inputs_in_its_own_order(tmp_path: Path) -> None:
    _, form, (scale, shift, x, y) = read_source(REFERENCE, tmp_path)
    assert form.names == ("scale", "shift")
    traced = trace(write_candidate(), tmp_path)
    tensors = {"scale": scale, "shift": shift, 0: x, 1: y}
    (result,) = interpret(traced.program, CPU)([tensors[name] for name in traced.sources])
    torch.testing.assert_close(result, torch.relu(x - y) * scale + shift)
    assert [traced.roles[traced.sources.index(name)] for name in ("scale", 0)] == [
        "parameter",
        "input",
    ]
    assert traced.to_json() == {
        "sources": list(traced.sources),
        "roles": list(traced.roles),
        "same": {},
        "writes": [],
        "name": traced.name,
    }


def test_results_written_into_fresh_memory_are_plain_results(tmp_path: Path) -> None:
    body = "out = torch.empty_like(x)\nout.copy_(torch.relu(x - y) * self.scale + self.shift)\nreturn out"
    plain = "return torch.relu(x - y) * self.scale + self.shift"
    copied, direct = (trace(write_candidate(text), tmp_path) for text in (body, plain))
    assert copied.program == direct.program


def test_a_tied_parameter_has_its_other_name_and_a_written_buffer_is_said(tmp_path: Path) -> None:
    tied = REFERENCE.replace(
        "self.shift = torch.nn.Parameter(torch.randn(width))",
        "self.shift = self.scale\n        self.register_buffer('count', torch.zeros(1))",
    ).replace("        return torch.relu", "        self.count.add_(1)\n        return torch.relu")
    source, form, tensors = read_source(tied, tmp_path)
    traced = trace_reference(source, form, tensors, CPU)
    assert traced.same == {"shift": "scale"}
    assert traced.writes == ("count",)


@pytest.mark.parametrize(
    ("body", "init", "reason"),
    [
        ("return x * float(x.sum())", "pass", "its Python looks at the values of tensors"),
        (
            "self.calls += 1\nreturn x - y",
            "self.calls = 0",
            "its forward changes the module itself",
        ),
        ("return x - y", "self.seen = iter([1])", "list_iterator, which can change unseen"),
        ("return x - y + TABLE", "pass", "AOTAutograd cannot trace it"),
    ],
)
def test_what_a_graph_cannot_repeat_is_refused_with_the_reason(
    body: str, init: str, reason: str, tmp_path: Path
) -> None:
    top = "TABLE = torch.randn(400, 16)[:8]"
    with pytest.raises(NotLowerableError) as refusal:
        trace(write_candidate(body, init=init, top=top), tmp_path)
    assert reason in refusal.value.reason


def test_a_candidate_with_other_state_than_the_reference_is_refused(tmp_path: Path) -> None:
    text = write_candidate(init="self.extra = torch.nn.Parameter(torch.zeros(2))")
    with pytest.raises(RuntimeError, match="extra"):
        trace(text, tmp_path)


def test_the_users_module_is_as_it_was_after_it_was_run_once() -> None:
    class Counting(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    module = Counting()
    before = dict(vars(module))
    with torch.no_grad():
        (graph,) = run_once(module, (torch.ones(3),), {}).graphs
    assert vars(module) == before
    assert [
        str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"
    ] == ["aten.add.Tensor"]
