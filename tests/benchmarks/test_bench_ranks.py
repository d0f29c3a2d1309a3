"""The benchmark of ranks calls it agreement only where every rank ran what the first one searched,
and computed what it should.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench_ranks import compare_ranks, main
from benchmarks.report import load


def make_report(**changed: Any) -> dict[str, Any]:
    agreement = {"leader": 0, "runs": "cudal1", "digests": ["d1"], "ranks": [0, 1]}
    first = {
        "agreements": [agreement],
        "swapped": 1,
        "searched": 0,
        "fallbacks": 0,
        "error": 1e-7,
        "seconds": 1.0,
    }
    return first | changed


def test_one_search_and_the_same_digests_everywhere_are_agreement() -> None:
    row = compare_ranks(2, "gloo", "data_parallel", [make_report(searched=2), make_report()])
    assert (row.status, row.reason) == ("ok", "")
    assert (row.digests, row.runs, row.searched) == (["d1"], ["cudal1"], [2, 0])


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            {"agreements": [{"leader": 0, "runs": "cudal1", "digests": ["d2"]}]},
            "rank 1 does not run what rank 0 runs",
        ),
        (
            {"agreements": [{"leader": 0, "runs": "eager", "digests": ["d1"]}]},
            "rank 1 does not run what rank 0 runs",
        ),
        ({"agreements": []}, "rank 1 does not run what rank 0 runs"),
        ({"searched": 1}, "rank 1 searched too"),
        ({"error": 0.1}, "rank 1 differs by 0.1"),
        ({"error": float("nan")}, "rank 1 differs by nan"),
        ({"fallbacks": 1}, "rank 1 fell back"),
    ],
)
def test_whatever_one_rank_does_otherwise_fails_the_row(other: dict[str, Any], reason: str) -> None:
    row = compare_ranks(2, "gloo", "data_parallel", [make_report(searched=2), make_report(**other)])
    assert (row.status, row.reason) == ("failed", reason)


def test_ranks_that_never_met_have_not_agreed() -> None:
    assert (
        compare_ranks(
            2, "gloo", "s", [make_report(agreements=[]), make_report(agreements=[])]
        ).reason
        == "nothing was agreed upon"
    )


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="has the GPUs")
def test_a_machine_without_the_gpus_gets_rows_that_say_so(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    assert main(["--kind", "cuda", "--counts", "2", "--out", str(out)]) == 1
    assert {row["reason"] for row in load(out)["rows"]} == {
        f"needs 2 GPUs, torch finds {torch.cuda.device_count()}"
    }
