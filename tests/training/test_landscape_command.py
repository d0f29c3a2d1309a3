"""`python -m torch_cudal1.training.landscape` from its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.landscape_cases import CODEC, TASK, CountingEvaluator
from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.pool.judge_evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import Measured
from torch_cudal1.training.landscape.__main__ import main
from torch_cudal1.training.landscape.landscape_file import (
    Landscape,
    read_landscape,
    write_landscape,
)
from torch_cudal1.training.landscape.naive_pool import NaivePool


def test_the_command_measures_a_family_and_writes_what_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JudgeEvaluator, "measure_all", CountingEvaluator().measure_all)
    monkeypatch.setattr(NaivePool, "speedup", lambda *_: None)
    assert (
        main(
            ["--device", "cpu", "--budget-s", "60", "--out", str(tmp_path), "--only", "avg_pool1d"]
        )
        == 0
    )
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["whole"], summary["tasks"]) == (3, 3)
    assert summary["rows"] == summary["fresh"] == 3 * len(CODEC.programs(TASK))
    landscape = read_landscape(tmp_path / "landscape.json.gz")
    assert landscape.facts["label"] == "replay"
    assert len(landscape.rows) == 3


def test_the_command_goes_on_from_the_rows_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JudgeEvaluator, "measure_all", CountingEvaluator().measure_all)
    monkeypatch.setattr(NaivePool, "speedup", lambda *_: None)
    earlier, landscape = tmp_path / "first" / "rows.jsonl", tmp_path / "first" / "landscape.json.gz"
    assert (
        main(
            [
                "--device",
                "cpu",
                "--out",
                str(earlier.parent),
                "--part",
                "1/2",
                "--only",
                "avg_pool1d",
            ]
        )
        == 0
    )
    capsys.readouterr()
    options = [
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "second"),
        "--resume",
        str(earlier),
        "--only",
        "avg_pool1d",
    ]
    assert main(options) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        summary["rows"]
        == summary["fresh"] + len(earlier.read_text().splitlines())
        > summary["fresh"]
        > 0
    )
    assert (
        main(
            [
                *options[:3],
                str(tmp_path / "third"),
                "--resume",
                str(tmp_path / "nowhere" / "rows.jsonl"),
            ]
        )
        == 1
    )
    assert "nowhere" in capsys.readouterr().err
    facts = read_landscape(landscape).facts
    write_landscape(landscape, Landscape({**facts, "plan": {**facts["plan"], "side_us": 1.0}}, {}))
    options[3] = str(tmp_path / "fourth")
    assert main(options) == 1
    assert "otherwise than now, in plan" in capsys.readouterr().err
    assert not (tmp_path / "fourth" / "rows.jsonl").exists()
    options[3] = str(earlier.parent)
    assert main(options) == 1, "its own rows are of another way too"
    assert "otherwise than now, in plan" in capsys.readouterr().err


def test_parts_of_several_gpus_make_one_landscape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JudgeEvaluator, "measure_all", CountingEvaluator().measure_all)
    monkeypatch.setattr(NaivePool, "speedup", lambda *_: None)
    folders = [tmp_path / "first", tmp_path / "second"]
    for number, folder in enumerate(folders, 1):
        assert (
            main(
                [
                    "--device",
                    "cpu",
                    "--out",
                    str(folder),
                    "--part",
                    f"{number}/2",
                    "--only",
                    "diag_left",
                    "diag_right",
                ]
            )
            == 0
        )
    parts = [set(read_landscape(folder / "landscape.json.gz").rows) for folder in folders]
    assert all(parts)
    assert not parts[0] & parts[1]
    join = ["--device", "cpu", "--out", str(tmp_path / "all"), "--join", *map(str, folders)]
    assert main(join) == 0
    joined = read_landscape(tmp_path / "all" / "landscape.json.gz")
    assert set(joined.rows) == parts[0] | parts[1]
    assert joined.facts == read_landscape(folders[0] / "landscape.json.gz").facts
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["whole"] == len(parts[0] | parts[1])
    other = read_landscape(folders[1] / "landscape.json.gz")
    write_landscape(
        folders[1] / "landscape.json.gz", Landscape({**other.facts, "gpu": "another"}, other.rows)
    )
    assert main(join) == 1
    assert "differs from" in (message := capsys.readouterr().err), message
    assert "gpu" in message
    assert main([*join[:-1], str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--out", str(tmp_path), "--part", "3/2"])


def test_the_command_says_what_is_wrong_with_the_machine_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> list[Measured]:
        raise SandboxError("starting", "no namespaces here")

    monkeypatch.setattr(JudgeEvaluator, "measure_all", refuse)
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "no namespaces here" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_needs_the_device_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cuda", "--out", str(tmp_path)]) == 1
    assert "no CUDA device" in capsys.readouterr().err
