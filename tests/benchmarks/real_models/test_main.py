"""The runner of real models: what counts, and what a failure counts as."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.real_models.__main__ as runner
from benchmarks.real_models.__main__ import compare_with_baselines, geometric_mean, main
from tests.benchmarks.test_ship import fill_cache, make_kernel_entry


def test_the_fastest_baseline_is_the_measure_and_a_failure_counts_as_one() -> None:
    columns = {
        "eager": {"us": 9.0},
        "torch.compile": {"us": 6.0},
        "reduce-overhead": {"us": 3.0},
        "accelerate": {"us": 2.0},
        "backend": {"failed": "not ready in 1 s"},
    }
    against = compare_with_baselines(columns)
    assert against["best"] == "reduce-overhead"
    assert against["speedups"] == {
        "accelerate": {"best": 1.5, "torch.compile": 3.0},
        "backend": {"best": 1.0, "torch.compile": 1.0},
    }
    assert compare_with_baselines({"eager": {"failed": "no"}}) == {}


def test_a_geometric_mean_needs_a_ratio() -> None:
    assert geometric_mean([4.0, 0.25, 8.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="at least one ratio"):
        geometric_mean([])


def test_what_searches_found_is_kept_and_a_broken_cache_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch, entries = tmp_path / "scratch", tmp_path / "entries"
    for number, column in enumerate(("bert.accelerate-tuned", "bert.reduce-overhead"), 1):
        fill_cache(scratch / column / "cache", make_kernel_entry(number))
    (scratch / "bert.eager").mkdir()
    assert runner.keep_entries(scratch, entries) == 2
    assert len(list(entries.rglob("*.safetensors"))) == 2
    (broken,) = (scratch / "bert.accelerate-tuned").rglob("*.safetensors")
    broken.write_bytes(b"broken")
    assert runner.keep_entries(scratch, entries) == 0
    assert "entries were not kept" in capsys.readouterr().err
    assert len(list(entries.rglob("*.safetensors"))) == 2


def test_an_unknown_model_is_refused_with_those_that_are_known(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "x.json"), "--models", "bert-giant"])
    assert "bert-base" in capsys.readouterr().err


def test_columns_are_prepared_in_processes_and_timed_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "real.json"
    arguments = ["--models", "volume-encoder", "--columns", "eager,reduce-overhead"]
    options = ["--precision", "fp32", "--device", "cpu", "--workers", "2", "--limit-s", "200"]
    options += ["--profile"]
    assert main(["--out", str(out), *arguments, *options]) == 0
    document = json.loads(out.read_text())
    (row,) = document["rows"]
    assert row["columns"]["eager"]["us"] > 0
    assert row["columns"]["eager"]["difference"] == 0.0
    assert row["columns"]["eager"]["floor"]["us"] > 0
    assert row["columns"]["reduce-overhead"]["profile"]["kernels"] == []
    assert row["against"]["best"] in ("eager", "reduce-overhead")
    assert document["command"].startswith("python -m benchmarks.real_models")


def test_all_columns_of_a_model_run_on_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus: dict[str, set[int | None]] = {}

    def start(model: str, column: str, args: Any, folder: Path, gpu: int | None) -> Any:
        gpus.setdefault(model, set()).add(gpu)
        return SimpleNamespace(model=model, column=column, facts={"failed": "no"}, is_ready=False)

    for name, stand_in in (("start_column", start), ("await_preparation", print), ("end", id)):
        monkeypatch.setattr(runner, name, stand_in)
    arguments = ["--models", "bert-base,gpt2,vit-base", "--columns", "eager,accelerate"]
    main(["--out", str(tmp_path / "x.json"), *arguments, "--gpus", "2", "--workers", "6"])
    assert gpus == {"bert-base": {0}, "gpt2": {1}, "vit-base": {0}}
