"""A stored decision as FlashInfer-Trace records and back again, and what the format cannot say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.entries import entry_for
from tests.ingest.flashinfer_records import write_folder
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ingest.formats.flashinfer_export import ExportedEntry, export_entry
from torch_cudal1.ingest.formats.registry import read_tasks
from torch_cudal1.ingest.formats.task import PublishedTask
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Candidate, Region


def capture_region(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *inputs: torch.Tensor
) -> Region:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return forward(x, y)

    with torch.no_grad():
        (region,) = capture_regions(Module(), inputs)
    return region


def test_a_stored_decision_that_is_written_is_read_back_as_the_same_region_and_program(
    tmp_path: Path,
) -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 4)
    region = capture_region(
        lambda x, y: torch.softmax((x @ y).clamp(min=float("-inf"), max=2.5), -1).to(torch.float16),
        x,
        y,
    )
    faster = capture_region(
        lambda x, y: torch.softmax(torch.mm(x, y).clamp_max(2.5), -1).to(torch.float16), x, y
    )
    entry = entry_for(
        region, Candidate(faster.program, "inductor", "rewrites", ("planted",)), Settings()
    )
    exported = export_entry(region, entry)
    assert isinstance(exported, ExportedEntry)
    (task,) = read_tasks(
        write_folder(
            tmp_path,
            definitions=(exported.definition.to_json(),),
            solutions=(exported.solution.to_json(),),
            traces=(exported.trace.to_json(),),
        )
    )
    assert isinstance(task, PublishedTask)
    assert task.candidate is not None
    reference_names: dict[str, Any] = {}
    exec(task.reference, reference_names)
    inputs = reference_names["get_inputs"]()
    candidate_names: dict[str, Any] = {}
    exec(task.candidate, candidate_names)
    with torch.no_grad():
        assert capture_regions(reference_names["Model"](), tuple(inputs))[0].key == region.key
        assert (
            capture_regions(candidate_names["ModelNew"](), tuple(inputs))[0].program
            == faster.program
        )
    (evaluation,) = task.claims["evaluations"]
    assert evaluation["performance"]["speedup_factor"] == 10.0
    assert (
        evaluation["correctness"]["max_absolute_error"] == "NaN"
    )  # never measured, so never claimed


def test_what_the_format_cannot_say_is_said() -> None:
    spec = TensorSpec("float32", (2, 3), (1, 2), "cpu")
    step = Aten("aten.relu.default", (Value(0),), (), (1,))
    region = Region(Program((spec,), (step,), (1,)), ("input",))
    entry = entry_for(region, Candidate(region.program, "eager", "rewrites"), Settings())
    assert "strides [1, 2]" in refuse(region, entry)
    complex_region = Region(
        Program((replace(spec, dtype="complex64", strides=(3, 1)),), (step,), (1,)), ("input",)
    )
    assert "complex64" in refuse(
        complex_region,
        entry_for(
            complex_region, Candidate(complex_region.program, "eager", "rewrites"), Settings()
        ),
    )
    with_constant = Program(
        (), (replace(step, args=(Value(0),)),), (1,), ("c",), {"c": torch.ones(2)}
    )
    constant_region = Region(with_constant, ())
    assert "constants" in refuse(
        constant_region,
        entry_for(constant_region, Candidate(with_constant, "eager", "rewrites"), Settings()),
    )
    assert "baseline" in refuse(
        region, replace(entry, choice=Candidate(region.program, "eager", "baseline"))
    )


def refuse(region: Region, entry: Any) -> str:
    answer = export_entry(region, entry)
    assert isinstance(answer, Refusal)
    return answer.reason
