"""A search over two generations: what is learned of it, what the second is asked for, and how long it
is waited for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.search.kernel_cases import (
    HELD_OUT,
    PROGRAM,
    family,
    features_of,
    make_learner,
    took_us,
)
from torch_cudal1.core import telemetry
from torch_cudal1.ir.records import Candidate, Region, Rejected
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.search.cost_model.learner import Learner
from torch_cudal1.search.cost_model.timings import read_timings
from torch_cudal1.search.evolution import evolutionary_search
from torch_cudal1.search.evolution.evolutionary_search import EvolutionarySearch


def make_candidates(proposals: Sequence[Proposal]) -> tuple[Candidate | Rejected, ...]:
    return tuple(Candidate(PROGRAM, "eager", "kernels", ("gemm",)) for _ in proposals)


def make_search(
    learner: Learner, compiled: list[Proposal], left_s: float = math.inf, *, ready: bool = True
) -> EvolutionarySearch:
    def compile(proposals: Sequence[Proposal]) -> Future[tuple[Candidate | Rejected, ...]]:
        compiled.extend(proposals)
        future: Future[tuple[Candidate | Rejected, ...]] = Future()
        if ready:
            future.set_result(make_candidates(proposals))
        return future

    return EvolutionarySearch(Region(PROGRAM, ("input", "input")), learner, lambda: left_s, compile)


def run(
    evolution: EvolutionarySearch, proposals: Sequence[Proposal]
) -> tuple[Candidate | Rejected, ...]:
    answers = make_candidates(proposals)
    evolution.record_builds(proposals, answers)
    subject = features_of(*HELD_OUT)
    evolution.record_times(
        [
            (candidate, took_us(subject, proposal))
            for candidate, proposal in zip(answers, proposals, strict=True)
            if isinstance(candidate, Candidate)
        ]
    )
    return evolution.build_next_generation()


def test_a_measured_time_is_stored_with_the_proposal_it_is_of(tmp_path: Path) -> None:
    learner, proposals, subject = (
        make_learner(tmp_path, has_timings=False),
        family(*HELD_OUT)[:3],
        features_of(*HELD_OUT),
    )
    evolution, answers = make_search(learner, []), make_candidates(proposals)
    evolution.record_builds(proposals, answers)
    evolution.record_times(
        [
            (item, us)
            for item, us in zip(answers, (5.0, None, 7.0), strict=True)
            if isinstance(item, Candidate)
        ]
    )
    stored = read_timings(learner.path)
    assert [(item.config, item.us) for item in stored] == [
        (dict(proposals[0].config), 5.0),
        (dict(proposals[2].config), 7.0),
    ]
    assert stored[0].sizes == subject.sizes
    assert not any(isinstance(value, str) for value in stored[0].sizes.values())


def test_children_are_new_and_built_for_the_second_generation(tmp_path: Path) -> None:
    compiled: list[Proposal] = []
    first = family(*HELD_OUT)[:4]
    children = run(make_search(make_learner(tmp_path), compiled), first)
    assert len(children) == len(compiled) > 0
    assert len(compiled) <= evolutionary_search._MAX_CHILDREN
    assert not set(compiled) & set(first)


def test_without_timings_there_is_one_generation(tmp_path: Path) -> None:
    compiled: list[Proposal] = []
    assert (
        run(make_search(make_learner(tmp_path, has_timings=False), compiled), family(*HELD_OUT)[:4])
        == ()
    )
    assert compiled == []


def test_no_time_no_second_generation(tmp_path: Path) -> None:
    compiled: list[Proposal] = []
    assert (
        run(
            make_search(
                make_learner(tmp_path),
                compiled,
                left_s=evolutionary_search._MIN_COMPILE_S
                / evolutionary_search._COMPILE_TIME_FRACTION
                - 1,
            ),
            family(*HELD_OUT)[:4],
        )
        == ()
    )
    assert compiled == []


def test_compilers_are_waited_for_within_the_share_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evolutionary_search, "_MIN_COMPILE_S", 0.0)
    compiled: list[Proposal] = []
    evolution = make_search(
        make_learner(tmp_path),
        compiled,
        left_s=0.2 / evolutionary_search._COMPILE_TIME_FRACTION,
        ready=False,
    )
    answers = make_candidates(family(*HELD_OUT)[:4])
    evolution.record_builds(family(*HELD_OUT)[:4], answers)
    subject = features_of(*HELD_OUT)
    times = [
        (candidate, took_us(subject, proposal))
        for candidate, proposal in zip(answers, family(*HELD_OUT)[:4], strict=True)
        if isinstance(candidate, Candidate)
    ]
    evolution.record_times(times)
    evolution.learner.get_model("gemm")  # made anew for what was heard; not what is timed here
    started_s = time.monotonic()
    assert evolution.build_next_generation() == ()
    assert compiled
    assert (
        time.monotonic() - started_s < 20.0
    )  # a share of 0.2 s, the proposals themselves, and a busy machine


def test_answers_of_compilers_that_were_not_done_in_time_name_no_proposal(tmp_path: Path) -> None:
    evolution = make_search(make_learner(tmp_path, has_timings=False), [])
    evolution.record_builds(family(*HELD_OUT)[:4], (Rejected("the budget was spent", "budget"),))
    evolution.record_times([(make_candidates(family(*HELD_OUT)[:1])[0], 3.0)])  # type: ignore[list-item]
    assert read_timings(evolution.learner.path) == []


def test_children_that_win_are_counted(tmp_path: Path) -> None:
    telemetry.reset()
    evolution = make_search(make_learner(tmp_path), [])
    children = run(evolution, family(*HELD_OUT)[:4])
    evolution.record_times([(child, 0.5) for child in children if isinstance(child, Candidate)])
    assert telemetry.report().counters["children_won"] == 1
    assert telemetry.report().counters["children_built"] == len(children)
