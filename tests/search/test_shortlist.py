"""Among a product's kernels the fastest right one is taken; what was not asked for lack of time is
not remembered as useless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.search.scripted_kernels import (
    PROPOSED,
    build_by_name,
    capture_linear,
    make_job,
    patch_search,
)
from torch_cudal1 import judge
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import (
    Candidate,
    Contract,
    Region,
)
from torch_cudal1.judge.evaluate.prescreen import PrescreenResult
from torch_cudal1.search import shortlist
from torch_cudal1.search.operator_timing import OperatorChoice
from torch_cudal1.search.shortlist import list_tf32_rights, select_fastest_correct
from torch_cudal1.store.context import TuneContext


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneContext:
    return patch_search(tmp_path, monkeypatch)


@pytest.fixture
def region() -> Region:
    return capture_linear()


def test_the_fastest_right_kernel_is_taken_and_the_others_are_told(
    place: TuneContext, region: Region
) -> None:
    best, reasons, saved_us = select_fastest_correct(
        region, build_by_name(region, PROPOSED), place, make_job(place), deadline=float("inf")
    )
    assert best is not None
    assert saved_us > 0
    assert best.techniques == ("gemm", "best")
    assert [reason.reason for reason in reasons] == [
        "does not load",
        "takes 110 us, eager 100 us",
        "an error of 9x eager's",
    ]


def test_strict_precision_grants_no_tf32_even_where_the_user_does(place: TuneContext) -> None:
    granted = replace(place, contract=Contract(rights=("matmul",)))
    assert list_tf32_rights(granted) == ("matmul",)
    assert list_tf32_rights(replace(place, contract=Contract("strict", rights=("matmul",)))) == ()


def test_what_differs_from_eager_as_another_precision_does_comes_last(
    place: TuneContext, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = PrescreenResult(100.0, {0: 40.0, 1: 60.0}, {}, {0: 3e-4, 1: 1e-6})
    monkeypatch.setattr(shortlist, "prescreen", lambda region, candidates, job, eager: result)
    answers = build_by_name(region, PROPOSED[:2])
    best, *_ = select_fastest_correct(
        region, answers, place, make_job(place), deadline=float("inf"), check=False
    )
    assert best is not None
    assert best.techniques == ("gemm", "best")


def test_a_kernel_of_attention_must_beat_the_fastest_library(
    place: TuneContext, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(region.program, outputs=region.program.outputs[::-1])
    asked: list[Program] = []

    def prescreen(
        region: Region,
        candidates: Sequence[Candidate],
        job: judge.EvaluationConfig,
        eager: Program,
    ) -> PrescreenResult:
        asked.append(eager)
        return PrescreenResult(100.0, {0: 40.0}, {})

    monkeypatch.setattr(shortlist, "prescreen", prescreen)
    monkeypatch.setattr(shortlist, "choose_attention", lambda *_: OperatorChoice(other))
    select_fastest_correct(
        region,
        build_by_name(region, PROPOSED[:1]),
        place,
        make_job(place),
        deadline=float("inf"),
        check=False,
    )
    assert len(asked) == 1
    assert asked[0] is other


def test_what_beats_eager_and_not_one_pass_behind_the_product_has_no_place_in_a_model(
    place: TuneContext, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = PrescreenResult(100.0, {0: 80.0, 1: 75.0}, {}, one_pass_us=70.0)
    monkeypatch.setattr(shortlist, "prescreen", lambda region, candidates, job, eager: result)
    best, reasons, _ = select_fastest_correct(
        region,
        build_by_name(region, PROPOSED[:2]),
        place,
        make_job(place),
        deadline=float("inf"),
        check=False,
    )
    assert best is not None
    assert best.techniques == ("gemm", "best")
    assert [rejected.reason for rejected in reasons] == [
        "takes 80.0 us, eager 100 us, its product and one pass 70.0 us"
    ]
