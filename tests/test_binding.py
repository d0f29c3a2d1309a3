"""The last gate: what the whole call measures in the user's process decides, and the cache remembers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.entries import entry_for, same
from torch_cudal1 import binding
from torch_cudal1.binding import captured_regions
from torch_cudal1.judge.statistics import PairedSummary
from torch_cudal1.pipeline import Choice
from torch_cudal1.place import Place, place_for
from torch_cudal1.records import Candidate
from torch_cudal1.settings import Settings

CPU = torch.device("cpu")
NET, X = torch.nn.Linear(4, 4), torch.randn(2, 4)


class Trial:
    """Stands in for the measurement: each contender is a word, its result is looked up."""

    def __init__(self, results: dict[str, tuple[float, float, float]]) -> None:
        self.results = results

    def arguments(self, device: torch.device) -> Any:
        from contextlib import nullcontext

        return nullcontext(((X,), {}))

    def against_own(self, call: Any, args: Any, kwargs: Any, place: Place) -> PairedSummary:
        low, speedup, high = self.results[call]
        return PairedSummary(speedup, low, high, speedup, 1.0, 56, True, (speedup,) * 7, (speedup,) * 7)


def choices(place: Place, origin: str, schedule: Any = "inductor") -> tuple[Choice, ...]:
    with torch.no_grad():
        (region,) = captured_regions(NET, (X,))
    candidate = Candidate(same(region.program), schedule, origin, ("planted",) if origin != "baseline" else ())
    return (Choice(region, candidate, entry_for(region, candidate, place.settings), "test"),)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return place_for(CPU, Settings(cache_dir=tmp_path))


NOISY_GAIN, CLEAR_GAIN, LOSS = (0.97, 1.10, 1.20), (1.05, 1.08, 1.12), (0.90, 0.95, 0.99)
CASES = [  # origin of the choice, results by contender, winner
    ("rewrites", {"cudal1": CLEAR_GAIN}, "cudal1"),
    ("rewrites", {"cudal1": NOISY_GAIN}, "eager"),  # a swap must win beyond its noise
    ("baseline", {"cudal1": NOISY_GAIN}, "cudal1"),  # between the user's own baselines the better centre runs
    ("baseline", {"cudal1": LOSS}, "eager"),
    ("rewrites", {"torch.compile": CLEAR_GAIN, "cudal1": NOISY_GAIN}, "torch.compile"),
    ("rewrites", {"torch.compile": CLEAR_GAIN, "cudal1": (1.10, 1.20, 1.30)}, "cudal1"),
]


@pytest.mark.parametrize(("origin", "results", "winner"), CASES)
def test_the_gate_lets_through_what_wins(
    origin: str, results: dict[str, tuple[float, float, float]], winner: str, place: Place
) -> None:
    chosen = choices(place, origin)
    settled = binding._end_to_end(Trial(results), {name: name for name in results}, chosen, place)  # type: ignore[arg-type]
    assert settled.winner == winner
    assert settled.note.startswith("undone: ") is (winner == "eager")
    again = binding._settled({name: name for name in results}, chosen, place)
    assert again is not None
    assert (again.winner, again.note, again.call) == (settled.winner, settled.note, None)


def test_a_decision_about_other_candidates_is_not_taken_over(place: Place) -> None:
    binding._end_to_end(Trial({"cudal1": CLEAR_GAIN}), {"cudal1": "cudal1"}, choices(place, "rewrites"), place)  # type: ignore[arg-type]
    assert binding._settled({"cudal1": "cudal1"}, choices(place, "rewrites", "eager"), place) is None
