"""Cheats are compared by their code, not by their names; a confirmed one is kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch_cudal1.ingest.llm.casebase import CaseBase, CheatCase, measure_likeness
from torch_cudal1.ingest.llm.database import StoredSample
from torch_cudal1.judge.pool.measured import Measured

SOURCE = "class ModelNew(nn.Module):\n    def forward(self, x):\n        return self.cache\n"


def test_likeness_is_the_share_of_common_runs() -> None:
    first, second = Counter({("a",): 2, ("b",): 1}), Counter({("a",): 1, ("c",): 1})
    assert measure_likeness(first, first) == 1.0
    assert measure_likeness(first, second) == 1 / 4
    assert measure_likeness(Counter(), Counter()) == 0.0


def test_a_confirmed_cheat_is_kept_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "grown.jsonl"
    cases = CaseBase([], path)
    sample = StoredSample("s", Measured("task", "p", "hack", detail="it caches"), SOURCE)
    assert isinstance(cases.confirm(sample), CheatCase)
    assert cases.confirm(sample) is None
    (match,) = CaseBase([], path).nearest(SOURCE.replace("x", "features"), 1)
    assert (match.likeness, match.case.mechanism) == (1.0, "it caches")
