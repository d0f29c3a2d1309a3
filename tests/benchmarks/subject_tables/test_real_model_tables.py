"""Every model is a row: its times, and a failure with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.subject_tables.real_model_tables import (
    summarise_real_models,
    tabulate_real_models,
)


def make_document(kind: str) -> dict[str, Any]:
    """What every results file begins with."""
    return {
        "schema": 1,
        "kind": kind,
        "created": "2026-11-28",
        "command": f"python -m benchmarks.{kind}",
        "environment": {
            "gpu": "",
            "cores": 2,
            "cpu": "a CPU",
            "torch": "2",
            "triton": "3",
            "python": "3",
        },
    }


def test_a_failed_column_is_shown_with_its_reason_and_counts_as_one(tmp_path: Path) -> None:
    columns = {"eager": {"us": 2000.0}, "backend": {"failed": "out|of memory"}}
    against = {"best": "eager", "speedups": {"backend": {"best": 1.0, "torch.compile": 1.0}}}
    document = {
        **make_document("real_models"),
        "options": {"columns": list(columns)},
        "summary": {"models": 1, "backend": {"geomean_vs_best": 1.0, "worst": 1.0}},
        "rows": [
            {
                "model": "bert",
                "size": "small",
                "precision": "half",
                "columns": columns,
                "against": against,
            }
        ],
    }
    (tmp_path / "cpu-real-x.json").write_text(json.dumps(document))
    lines = tabulate_real_models(tmp_path)
    assert "| bert (small, half) | 2.000 | failed: out/of memory | 1.00x |" in lines
    assert lines[-2].endswith("a failure counting as 1.0: backend 1.00x.")


def test_a_search_has_the_seconds_that_it_took(tmp_path: Path) -> None:
    tuned = {"us": 1000.0, "first_call_s": 89.8}
    speedups = {"accelerate-tuned": {"best": 2.0, "torch.compile": 2.0}}
    document = {
        **make_document("real_models"),
        "options": {"columns": ["eager", "accelerate-tuned"]},
        "summary": {"accelerate-tuned": {"geomean_vs_best": 2.0, "worst": 2.0}},
        "rows": [
            {
                "model": "bert",
                "size": "small",
                "precision": "half",
                "columns": {"eager": {"us": 2000.0}, "accelerate-tuned": tuned},
                "against": {"best": "eager", "speedups": speedups},
            }
        ],
    }
    (tmp_path / "cpu-real-x.json").write_text(json.dumps(document))
    lines = tabulate_real_models(tmp_path)
    assert "| bert (small, half) | 2.000 | 1.000 | 2.00x | 90 |" in lines


def test_a_summary_has_the_newest_search_of_each_model(tmp_path: Path) -> None:
    rows = {}
    for name, created, us in (("old", "2026-11-28", 1000.0), ("new", "2026-11-29", 500.0)):
        row = make_row("bert", "small", 2000.0)
        row["columns"] = {"reduce-overhead": {"us": 1500.0}, "accelerate-tuned": {"us": us}}
        row["against"] = {
            "best": "reduce-overhead",
            "speedups": {"accelerate-tuned": {"best": 1500.0 / us}},
        }
        rows[name] = {**make_document("real_models"), "created": created, "rows": [row]}
        (tmp_path / f"h200-real-{name}.json").write_text(json.dumps(rows[name]))
    untuned = {**make_document("real_models"), "rows": [make_row("bert", "small", 2000.0)]}
    (tmp_path / "h200-real-untuned.json").write_text(json.dumps(untuned))
    lines = summarise_real_models(tmp_path)
    assert "| bert | 1.500 (reduce-overhead) | 0.500 | 3.00x |" in lines
    assert "| bert | 1.500 (reduce-overhead) | 1.000 | 1.50x |" not in lines
    assert "In 1 of 1 rows that was the only baseline of the run." in lines
    assert "| geometric mean | | | 3.00x |" in lines


BLOCKS = {
    "blocks": [{"occurrences": 11, "steps": 38}],
    "inductor": {"compiled_kernels": 41, "compile_s": 9.27},
    "regional": {"compiled_kernels": 9, "compile_s": 3.17},
    "whole_us": 622.0,
    "by_blocks_us": 618.0,
    "speedup": {"value": 1.0053},
}
DEPTH = {
    "seconds": 87.11,
    "counters": {"regions_tuned": 2, "candidates_judged": 13},
    "own_us": 44911.0,
    "us": 23279.0,
    "runs": ["regional+graph"],
}
STARTS = {
    "torch.compile": {"cold_s": 20.04, "warm_s": 2.5},
    "accelerate": {"cold_s": 25.0, "warm_s": None},
    "backend": {"failed": "no|memory", "warm_s": None},
}


@pytest.mark.parametrize(
    ("kind", "rows", "expected"),
    [
        (
            "real_models.blocks",
            [
                {"model": "bert", **BLOCKS},
                {"model": "mlp", "blocks": []},
                {"model": "x", "failed": "y"},
            ],
            [
                "| bert | 11 of 38 steps | 41 | 9 | 9.3 | 3.2 | 0.622 | 0.618 | 1.005x |",
                "| mlp | none | | | | | | | |",
                "| x | y | | | | | | | |",
            ],
        ),
        (
            "real_models.depth",
            [{"model": "32 layers", **DEPTH}, {"model": "64 layers", "failed": "MemoryError"}],
            [
                "| 32 layers | 87.1 | 2 | 13 | 44.91 | 23.28 | regional+graph |",
                "| 64 layers | failed: MemoryError | | | | | |",
            ],
        ),
        (
            "real_models.start",
            [{"model": "bert", "ways": STARTS}],
            ["| bert | 20.0 | 2.50 | 25.0 | not measured | failed: no/memory | |"],
        ),
    ],
)
def test_each_kind_of_results_has_its_rows(
    kind: str, rows: list[Any], expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "cpu-real-x.json"
    path.write_text(json.dumps({**make_document(kind), "rows": rows}))
    lines = tabulate_real_models(tmp_path)
    assert [line for line in expected if line not in lines] == []


def test_a_way_of_generating_has_its_rate(tmp_path: Path) -> None:
    rows = [
        {"way": "eager", "first_s": 1.24, "tokens_per_s": 81.6, "equal_tokens": 256},
        {"way": "accelerate", "failed": "out|of memory"},
    ]
    options = {"prompt": 512, "new": 128, "batch": 2}
    document = {**make_document("real_models.generate"), "options": options, "rows": rows}
    (tmp_path / "h200-real-generate.json").write_text(json.dumps(document))
    lines = tabulate_real_models(tmp_path)
    assert "| eager | 1.2 | 82 | 256 of 256 |" in lines
    assert "| accelerate | failed: out/of memory | | |" in lines


def make_row(model: str, size: str, accelerate_us: float) -> dict[str, Any]:
    """A model that takes 4 ms in each of PyTorch's ways."""
    baselines = {name: {"us": 4000.0} for name in ("eager", "torch.compile", "reduce-overhead")}
    ratio = 4000.0 / accelerate_us
    return {
        "model": model,
        "size": size,
        "precision": "half",
        "columns": {**baselines, "accelerate": {"us": accelerate_us}, "backend": {"failed": "no"}},
        "against": {
            "best": "eager",
            "speedups": {
                "accelerate": {"best": ratio, "torch.compile": ratio},
                "backend": {"best": 1.0, "torch.compile": 1.0},
            },
        },
    }


def test_the_summary_has_the_newest_row_of_each_model_and_failures_count(tmp_path: Path) -> None:
    assert summarise_real_models(tmp_path) == []
    runs = {
        "2026-11-27": [make_row("bert", "small", 4000.0), make_row("vit", "small", 2000.0)],
        "2026-11-28": [make_row("bert", "small", 1000.0), make_row("vit", "large", 500.0)],
    }
    for number, (created, rows) in enumerate(runs.items()):
        document = {**make_document("real_models"), "created": created, "rows": rows}
        (tmp_path / f"h200-real-{9 - number}.json").write_text(json.dumps(document))
    lines = summarise_real_models(tmp_path)
    baselines = "4.000 | 4.000 | 4.000"
    assert f"| bert | {baselines} | 1.000 | 4.00x | failed: no | 1.00x |" in lines
    assert f"| vit | {baselines} | 2.000 | 2.00x | failed: no | 1.00x |" in lines
    assert "| geometric mean | | | | | 2.83x | | 1.00x |" in lines
    # What has no row is named.
    assert [line for line in lines if line.startswith("Not measured yet: bert-base, ")]
    assert lines[-2].startswith("With large batches (1 of ")
    assert lines[-2].endswith(
        "accelerate 8.00x (the least: vit, 8.00x), backend 1.00x (the least: vit, 1.00x)."
    )


def test_a_model_with_a_floor_says_which_share_of_it_is_reached(tmp_path: Path) -> None:
    measured = {"eager": {"us": 2000.0, "floor": {"us": 250.0}}, "accelerate": {"us": 500.0}}
    unmeasured = {"eager": {"us": 2000.0}, "accelerate": {"failed": "no"}}
    document = {
        **make_document("real_models"),
        "options": {"columns": ["eager", "accelerate"]},
        "summary": {"accelerate": {"geomean_vs_best": 2.0, "worst": 1.0}},
        "rows": [
            {
                "model": model,
                "size": "small",
                "precision": "half",
                "columns": columns,
                "against": {},
            }
            for model, columns in (("bert", measured), ("gpt2", unmeasured))
        ],
    }
    (tmp_path / "cpu-real-x.json").write_text(json.dumps(document))
    lines = tabulate_real_models(tmp_path)
    assert "| bert (small, half) | 2.000 | 0.500 |  | 0.250 | 50% |" in lines
    assert "| gpt2 (small, half) | 2.000 | failed: no |  |  |  |" in lines
    (head,) = [line for line in lines if line.startswith("| model")]
    assert head.endswith("| accelerate vs the best | floor, ms | accelerate: share of the floor |")
