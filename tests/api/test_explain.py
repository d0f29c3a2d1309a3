"""An explanation says of every baseline what it measured, or why it did not, and what of them runs."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entries import entry_for, same
from torch_cudal1.api.explain import report_entry
from torch_cudal1.cli.view.tables import show_explanation
from torch_cudal1.cli.view.terminal import Screen
from torch_cudal1.core.report import Explanation
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.records import Candidate, Entry

MEDIANS = {"eager": 300.0, "inductor": 200.0, "eager+graph": 150.0}
WHY = "inductor failed: RuntimeError: Could not find an active GPU backend"


def entry(
    tmp_path: Path,
    origin: str,
    schedule: Any,
    medians: dict[str, float] | None = None,
    **evidence: Any,
) -> Entry:
    with torch.no_grad():
        (region,) = capture_regions(torch.nn.Linear(4, 4), (torch.randn(2, 4),))
    candidate = Candidate(
        same(region.program), schedule, origin, ("planted",) if origin != "baseline" else ()
    )
    planned = entry_for(region, candidate, Settings(cache_dir=tmp_path))
    raced = {"baselines_us": medians or MEDIANS, "baseline_failures": {"inductor+graph": WHY}}
    return replace(planned, evidence={**planned.evidence, **raced, **evidence})


def test_every_baseline_is_there_with_its_reason(tmp_path: Path) -> None:
    rows = report_entry(entry(tmp_path, "baseline", "eager+graph", timing=None)).raced
    assert [(row["label"], row["decision"], row["reason"]) for row in rows] == [
        ("eager+graph", "runs", "150 us, the fastest baseline"),
        ("inductor", "beaten", "200 us, 1.333x of the fastest baseline"),
        ("eager", "beaten", "300 us, 2.000x of the fastest baseline"),
        ("inductor+graph", "failed", WHY),
    ]


def test_a_choice_that_never_met_inductor_says_so(tmp_path: Path) -> None:
    alone = entry(
        tmp_path, "rewrites", "eager", {"eager": 300.0}, baseline_failures={"inductor": WHY}
    )
    assert report_entry(alone).reason.endswith(f"; tuned without Inductor: {WHY}")
    assert "without Inductor" not in report_entry(entry(tmp_path, "rewrites", "eager")).reason


def test_a_tie_and_a_swap_are_told(tmp_path: Path) -> None:
    tied = {"eager": 101.0, "inductor": 100.0}
    rows = report_entry(entry(tmp_path, "baseline", "eager", tied, timing=None)).raced
    assert (
        rows[0]["reason"]
        == "100 us, the fastest baseline; eager is as fast within noise, and simpler"
    )
    assert [row["decision"] for row in rows] == ["beaten", "runs", "failed"]
    rows = report_entry(entry(tmp_path, "rewrites", "eager", tied)).raced
    assert [row["decision"] for row in rows] == ["beaten", "beaten", "failed"]
    assert rows[0]["reason"] == "100 us, the fastest baseline; what runs takes 10.0 us"


@pytest.mark.parametrize(
    "word", ["inductor+graph", "failed", "active GPU backend", "the fastest baseline"]
)
def test_the_terminal_shows_them(word: str, tmp_path: Path) -> None:
    out = StringIO()
    report = report_entry(entry(tmp_path, "baseline", "eager+graph", timing=None))
    show_explanation(
        Screen(out=out, width=200), Explanation(target="net", device="cuda", regions=(report,))
    )
    assert word in out.getvalue()
