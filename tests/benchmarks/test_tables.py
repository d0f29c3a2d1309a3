"""The tables of the README are the committed results, row for row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.report import load
from benchmarks.tables import main, render_pages, summarise
from tests.benchmarks.kernelbench.test_tables import make_row as measured

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_the_readme_holds_what_was_measured():
    assert main(["--check"]) == 0, "run `python -m benchmarks.tables`"


NAMED_BY = {
    "models": ("model", "contender"),
    "warm_start": ("model", "contender"),
    "overhead": ("name",),
    "repeatability": ("kernel",),
    "cache": ("name",),
    "judge": ("candidate", "form"),
    "same_source": ("source",),
    "gemm": ("name",),
    "order": ("kind", "case", "strategy"),
    "families": ("case",),
    "early-start": ("case",),
    "real_models": ("model",),
    "real_models.blocks": ("model",),
    "real_models.depth": ("model",),
    "real_models.generate": ("way",),
    "real_models.start": ("model",),
    "fleet": ("workers", "tasks"),
    "ranks": ("devices", "backend", "scene"),
    "training": ("name",),
    "float64": ("case",),
    "evaluator": ("programs", "trust"),
    "siege": ("kind",),
}


def test_no_row_is_left_out():
    text = "\n".join(render_pages(RESULTS).values())
    for path in RESULTS.glob("*.json"):
        document = load(path)
        assert document["command"] in text
        section = text[text.index(f"`benchmarks/results/{path.name}`") :]
        for row in document["rows"]:
            words = [word for name in NAMED_BY[document["kind"]] for word in list_words(row[name])]
            assert any(all(word in line for word in words) for line in section.splitlines())


def list_words(value: object) -> list[str]:
    return [str(item) for item in (value.values() if isinstance(value, dict) else [value])]


def test_kernelbench_has_a_headline_only_where_every_task_was_measured(tmp_path: Path):
    results = tmp_path / "results"
    shutil.copytree(RESULTS, results)
    for path in results.glob("kernelbench-*"):
        path.unlink()
    out = results / "kernelbench-today.jsonl"
    rows = [
        {"schema": 1, "kind": "kernelbench", **measured(f"1/{number}", 2.0, of=2)}
        for number in (1, 2)
    ]
    for row, tasks in zip(rows, ("1", "2"), strict=True):
        row["task"]["sha256"] = tasks
    out.write_text(json.dumps(rows[0]) + "\n")
    assert "| 1/1 Task <1/1> |" in render_pages(results)["kernelbench-today.md"]
    assert "vs the best |" not in summarise(results).replace("| vs the better |", "")
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (line,) = [line for line in summarise(results).splitlines() if line.startswith("| KernelBench")]
    assert line.endswith("| 2 | 2.00x | 2.00x | 2.50x |")
    assert "TF32 in convolutions only (PyTorch's default), for everyone" in line
