"""The last gate: what the whole call measures in the user's process decides, and the cache
remembers it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.scripted_trial import NET, X, make_choices, make_place
from torch_cudal1.api import binding, module_trial
from torch_cudal1.store.context import TuneContext


@pytest.fixture
def place(tmp_path: Path) -> TuneContext:
    return make_place(tmp_path)


def test_where_inductor_had_no_benchmark_the_whole_call_decides_and_only_in_a_search(
    place: TuneContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """eager was the fastest of what ran, and torch.compile, which could not run in the judge, is
    faster here.
    """
    measured: list[str] = []

    def end_to_end(trial: Any, contenders: Any, *_: Any) -> Any:
        measured.extend(contenders)
        return module_trial.EndToEndDecision("torch.compile", "measured", lambda args, kwargs: X)

    (choice,) = make_choices(place, "baseline", "eager")
    assert choice.entry is not None
    evidence = {
        **choice.entry.evidence,
        "timing": None,
        "baselines_us": {"eager": 1.0},
        "baseline_failures": {"inductor": "no"},
    }
    changed = replace(choice, entry=replace(choice.entry, evidence=evidence))
    monkeypatch.setattr(binding, "run_trial", end_to_end)
    monkeypatch.setattr(binding, "choose", lambda *_, **__: changed)
    with torch.no_grad():
        served = binding.bind(NET, (X,), {}, place.settings)
        assert (type(served), measured) == (binding.Unbound, [])
        served = binding.bind(NET, (X,), {}, place.settings.but(on_miss="tune"))
        assert (type(served), measured) == (binding.Bound, ["torch.compile"])
