"""`cudal1 plan --compare`: what each GPU type costs, what is missing, and with which exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.api.gpu_decisions import H200, L4, make_decision
from torch_cudal1.__main__ import main
from torch_cudal1.api.recording.recorder import compute_module_identity
from torch_cudal1.api.targets import load
from torch_cudal1.core.call_signature import describe
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.recording_file import CallRecord, Mode, append_calls

SOURCE = """\
import torch
def make(): return torch.nn.Linear(3, 2).eval(), (torch.ones(4, 3),)
def reads(): return Reads(), (torch.ones(3),)
class Reads(torch.nn.Module):
    def forward(self, x): return x + 1 if x.sum() > 0 else x - 1
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    (loaded,) = load(f"{path}:make")
    with torch.no_grad():
        (captured,) = capture_regions(loaded.module, loaded.inputs)
    LocalCache(tmp_path / "h200").put(make_decision(captured, H200, 5.0, baseline_us=10.0))
    LocalCache(tmp_path / "l4").put(make_decision(captured, L4, 25.0))
    (tmp_path / "prices.json").write_text(
        json.dumps(
            {"currency": "EUR", H200: {"price_per_hour": 3.6}, "NVIDIA B200": {"watts": 1e3}}
        )
    )
    monkeypatch.setenv("TORCH_CUDAL1_READ_ONLY_CACHES", str(tmp_path / "l4"))
    return str(path)


def test_plan_compare_tells_what_each_type_costs_and_what_is_missing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "plan",
        f"{model}:make",
        "--device",
        "cpu",
        "--compare",
        "--cache-dir",
        str(tmp_path / "h200"),
    ]
    assert main([*line, "--prices", str(tmp_path / "prices.json")]) == 0
    shown = capsys.readouterr().out
    assert "EUR per million calls" in shown
    assert "0.005" in shown
    assert "missing for NVIDIA L4: no price was given" in shown
    assert "missing for NVIDIA B200: a price, but no decision" in shown
    assert main([*line, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["comparison"]["rows"]
    assert [(row["hardware"], row["us_per_call"], row["gain"]) for row in rows] == [
        (H200, 5.0, 2.0),
        (L4, 25.0, 1.0),
    ]


def test_plan_compare_of_what_cannot_be_looked_up_is_2(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "--device", "cpu", "--compare", "--cache-dir", str(tmp_path / "h200")]
    assert main([*line, f"{model}:reads", f"{model}:make"]) == 2
    shown = capsys.readouterr()
    assert "cannot be captured" in shown.err
    assert H200 in shown.out
    assert main([*line, f"{model}:make", "--prices", str(tmp_path / "none.json")]) == 2
    assert main([*line, f"{model}:make", "--precision", "strict"]) == 0
    assert "no decision that was made on a GPU" in capsys.readouterr().out


def test_plan_compare_weighs_by_what_was_recorded(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (loaded,) = load(f"{model}:make")
    mode = Mode(grad=False, training=False)
    forms = [canonical_json(describe(((torch.ones(rows, 3),), {}))) for rows in (4, 9)]
    for form, calls in zip(forms, (300, 100), strict=True):
        append_calls(
            tmp_path / "calls.jsonl",
            [
                CallRecord(
                    "module", "Linear", compute_module_identity(loaded.module), form, mode, calls
                )
            ],
        )
    with torch.no_grad():
        (other,) = capture_regions(loaded.module, (torch.ones(9, 3),))
    LocalCache(tmp_path / "h200").put(make_decision(other, H200, 45.0))
    line = ["plan", "--device", "cpu", "--compare", "--cache-dir", str(tmp_path / "h200")]
    line += ["--recorded", str(tmp_path / "calls.jsonl")]
    assert main([*line, f"{model}:make", "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)["comparison"]
    assert [line_shown.split(": ")[-1] for line_shown in comparison["workload"]] == [
        "75% of the calls",
        "25% of the calls",
    ]
    rows = {row["hardware"]: row for row in comparison["rows"]}
    assert rows[H200]["us_per_call"] == pytest.approx(0.75 * 5 + 0.25 * 45)
    assert rows[L4]["us_per_call"] is None
    assert "9x3, 100 calls" in rows[L4]["missing"][0]
    Path(model).write_text(SOURCE.replace("Linear(3, 2)", "Linear(3, 4)"))
    os.utime(
        model, (0, 0)
    )  # Python takes a file of the same size and second for the one that it compiled
    assert main([*line, f"{model}:make"]) == 2
    assert "holds no call of Linear" in capsys.readouterr().err
    assert main([*line[:-1], str(tmp_path / "none"), f"{model}:make"]) == 2
    assert "No such file" in capsys.readouterr().err
