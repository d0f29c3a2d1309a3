"""Which kernels a search compiles is learned from this machine's timings, those of the same search among
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.search.kernel_cases import (
    HELD_OUT,
    PROGRAM,
    SIZES,
    family,
    features_of,
    make_learner,
    product,
    took_us,
)
from torch_cudal1.core import telemetry
from torch_cudal1.search.cost_model.learner import Learner
from torch_cudal1.search.cost_model.timings import KernelTiming, read_timings


def test_times_of_a_search_teach_its_next_fusion_groups(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, has_timings=False)
    for size in SIZES:
        subject = features_of(*size)
        learner.record_times(
            product(*size), {proposal: took_us(subject, proposal) for proposal in family(*size, 10)}
        )
    proposals = family(1000, 2048, 2048, 8)
    assert learner.select_proposals(product(1000, 2048, 2048), proposals, 4) != proposals[:4]
    assert len(read_timings(learner.path)) > 50


def test_a_file_that_cannot_be_written_stops_no_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    telemetry.reset()
    learner = Learner(tmp_path / "file" / "one.jsonl", 90, ())
    learner.record_times(PROGRAM, {family(*HELD_OUT)[0]: 3.0})
    assert telemetry.report().counters["search.timings_not_kept"] == 1


def test_the_file_is_not_read_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def reading(path: Path) -> list[KernelTiming]:
        reads.append(path)
        return []

    monkeypatch.setattr("torch_cudal1.search.cost_model.learner.read_timings", reading)
    learner = Learner(tmp_path / "one.jsonl", 90, ())
    assert reads == []
    learner.get_model("gemm")
    learner.get_model("conv")
    assert len(reads) == 1
