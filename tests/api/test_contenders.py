"""Which callables are measured beside the module's own forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.api.scripted_trial import NET, make_choices, make_place
from torch_cudal1.api import contenders
from torch_cudal1.ir.records import DIFFERS_FROM_EAGER
from torch_cudal1.store.context import TuneContext


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    return make_place(tmp_path)


BENCHMARKED = {"eager": 100.0, "inductor": 80.0}


# origin, schedule, times of the benchmark, why Inductor had none, whether torch.compile must be measured
# beside the choice
BESIDE = [
    ("baseline", "inductor", BENCHMARKED, "", False),  # what runs is Inductor's
    ("baseline", "eager", BENCHMARKED, "", False),
    ("rewrites", "eager", BENCHMARKED, "", False),  # judged against the fastest of them
    ("baseline", "inductor+graph", {**BENCHMARKED, "inductor+graph": 60.0}, "", True),
    # Compiled once more it would be found slower: no machine is that busy.
    ("baseline", "inductor+graph", {**BENCHMARKED, "inductor+graph": 50.0}, "", False),
    ("baseline", "regional+graph", {**BENCHMARKED, "regional+graph": 60.0}, "", True),
    (
        "baseline",
        "eager+graph",
        {"eager": 100.0, "eager+graph": 90.0},
        "RuntimeError: no worker",
        True,
    ),
    ("baseline", "eager", {"eager": 100.0}, "RuntimeError: no worker", True),
    ("rewrites", "eager", {"eager": 100.0}, "RuntimeError: no worker", True),
    (
        "baseline",
        "eager",
        {"eager": 100.0},
        DIFFERS_FROM_EAGER,
        False,
    ),  # a result that is not eager's is nobody's rival
    (
        "baseline",
        "eager+graph",
        {"eager": 100.0, "eager+graph": 90.0},
        "",
        False,
    ),  # the user wants nothing compiled
]


@pytest.mark.parametrize(("origin", "schedule", "medians_us", "failed", "is_measured"), BESIDE)
def test_torch_compile_is_measured_where_the_benchmark_has_not_settled_it(
    origin: str,
    schedule: str,
    medians_us: dict[str, float],
    failed: str,
    is_measured: bool,
    place: TuneContext,
) -> None:
    (choice,) = make_choices(place, origin, schedule)
    assert choice.entry is not None
    evidence = {
        **choice.entry.evidence,
        "baselines_us": medians_us,
        "baseline_failures": {"inductor": failed} if failed else {},
    }
    changed = replace(choice, entry=replace(choice.entry, evidence=evidence))
    assert contenders._may_lose_to_inductor(changed) is is_measured
    built = contenders.build_contenders(NET, None, (changed,), lambda: None, frozenset())  # type: ignore[arg-type, return-value]
    assert ("torch.compile" in built) is is_measured
    assert ("cudal1" in built) is (origin != "baseline" or schedule != "eager")
