"""What the whole call measures in the user's process decides, and the cache remembers it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.scripted_trial import (
    CLEAR_GAIN,
    LOSS,
    NOISY_GAIN,
    Failing,
    Trial,
    make_choices,
    make_place,
)
from torch_cudal1.api import module_trial
from torch_cudal1.store.context import TuneContext


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    return make_place(tmp_path)


OVER = "cudal1 over torch.compile"


CASES = [  # origin of the choice, results by contender, winner
    ("rewrites", {"cudal1": CLEAR_GAIN}, "cudal1"),
    ("rewrites", {"cudal1": NOISY_GAIN}, "eager"),  # a swap must win beyond its noise
    (
        "baseline",
        {"cudal1": NOISY_GAIN},
        "cudal1",
    ),  # between the user's own baselines the better centre runs
    ("baseline", {"cudal1": LOSS}, "eager"),
    ("rewrites", {"torch.compile": CLEAR_GAIN, "cudal1": NOISY_GAIN}, "torch.compile"),
    (
        "rewrites",
        {"torch.compile": CLEAR_GAIN, "cudal1": (1.10, 1.20, 1.30), OVER: CLEAR_GAIN},
        "cudal1",
    ),
    (
        "baseline",
        {
            "torch.compile": (1.73, 1.79, 1.83),
            "cudal1": (1.33, 1.73, 1.98),
            OVER: (1.02, 1.05, 1.06),
        },
        "cudal1",
    ),
    (
        "baseline",
        {"torch.compile": CLEAR_GAIN, "cudal1": (1.10, 1.20, 1.30), OVER: LOSS},
        "torch.compile",
    ),
]


@pytest.mark.parametrize(("origin", "results", "winner"), CASES)
def test_what_wins_end_to_end_runs_from_then_on(
    origin: str, results: dict[str, tuple[float, float, float]], winner: str, place: TuneContext
) -> None:
    chosen = make_choices(place, origin)
    calls = {name: name for name in results if name != OVER}
    settled = module_trial.run_trial(Trial(results), calls, chosen, place)  # type: ignore[arg-type]
    assert settled.winner == winner
    assert ("x [" in settled.note and "of torch.compile" in settled.note) is (OVER in results)
    assert settled.note.startswith("undone: ") is (winner == "eager")
    again = module_trial.find_remembered_decision(calls, chosen, place)
    assert again is not None
    assert (again.winner, again.note, again.call) == (settled.winner, settled.note, None)


def test_a_decision_about_other_candidates_is_not_taken_over(place: TuneContext) -> None:
    module_trial.run_trial(
        Trial({"cudal1": CLEAR_GAIN}), {"cudal1": "cudal1"}, make_choices(place, "rewrites"), place
    )  # type: ignore[arg-type]
    assert (
        module_trial.find_remembered_decision(
            {"cudal1": "cudal1"}, make_choices(place, "rewrites", "eager"), place
        )
        is None
    )


def test_torch_compile_that_fails_is_out_and_told_and_ours_that_fails_is_heard(
    place: TuneContext,
) -> None:
    both = {"torch.compile": "torch.compile", "cudal1": "cudal1"}
    chosen = make_choices(place, "baseline", "eager+graph")
    settled = module_trial.run_trial(
        Failing("torch.compile", {"cudal1": CLEAR_GAIN}), both, chosen, place
    )  # type: ignore[arg-type]
    assert settled.winner == "cudal1"
    assert "torch.compile failed (RuntimeError: no compiler here)" in settled.note
    with pytest.raises(RuntimeError, match="no compiler"):
        module_trial.run_trial(Failing("cudal1", {"torch.compile": LOSS}), both, chosen, place)  # type: ignore[arg-type]
