"""The demo: what it measures, how it spends its time, and what it does when a model fails.
Acceleration is a stand-in.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands import demo, doctor, end_to_end_measurement
from torch_cudal1.cli.commands.demo_modules import Model
from torch_cudal1.core.errors import CacheMissError
from torch_cudal1.core.machine_load import LoadSample
from torch_cudal1.core.report import Explanation, RegionReport

REGION = RegionReport(
    name="forward",
    key="k" * 64,
    kind="inference",
    granularity="whole",
    runs="x -> eager",
    origin="builtin",
    techniques=("x",),
)


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Acceleration that returns its module; the settings it was given are kept."""
    calls: list[Any] = []

    def accelerate(
        module: torch.nn.Module, inputs: object, *, settings: Any, progress: Any
    ) -> torch.nn.Module:
        calls.append(settings)
        assert not torch.is_grad_enabled()
        progress("judging", 0.5)
        return module

    monkeypatch.setattr(
        demo,
        "cudal1",
        SimpleNamespace(
            accelerate=accelerate,
            explain=lambda m: Explanation(target="T", device="cpu", regions=(REGION,)),
        ),
    )
    monkeypatch.setattr(
        demo, "MODELS", (Model("Twice", "adds", lambda: (Twice().eval(), (torch.randn(64),))),)
    )
    monkeypatch.setattr(end_to_end_measurement, "_compile_module", lambda module, inputs: None)
    monkeypatch.setattr(doctor, "as_environment", lambda settings: {"torch": torch.__version__})
    return calls


def run(tmp_path: Path, *options: str) -> int:
    return main(
        ["demo", "--device", "cpu", "--out", str(tmp_path / "page.html"), "--quiet", *options]
    )


def test_the_demo_measures_writes_its_page_and_tells_the_same_as_json(
    stand_in: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--json", "--budget-s", "4") == 0
    document = json.loads(capsys.readouterr().out)
    (model,) = document["models"]
    timed = model["explanation"]["end_to_end"]
    assert timed["vs_eager"]["low"] <= timed["vs_eager"]["value"] <= timed["vs_eager"]["high"]
    assert 0.3 < timed["vs_eager"]["value"] < 3
    assert timed["vs_inductor"] is None
    assert model["worst_error"] == model["eager_error"] < 1e-6
    content = (tmp_path / "page.html").read_text()
    assert "Twice" in content
    assert "adds" in content


def test_the_demo_tunes_into_a_cache_of_its_own_that_is_gone_afterwards(
    stand_in: list[Any], tmp_path: Path
) -> None:
    run(tmp_path, "--budget-s", "4")
    (settings,) = stand_in
    assert settings.on_miss == "tune"
    assert settings.budget_s <= 4
    assert not settings.cache_dir.exists()


def test_a_cache_folder_that_was_named_is_used(stand_in: list[Any], tmp_path: Path) -> None:
    run(tmp_path, "--budget-s", "4", "--cache-dir", str(tmp_path / "kept"))
    assert stand_in[0].cache_dir == tmp_path / "kept"


def test_a_model_that_fails_stays_in_the_table_and_exits_1(
    stand_in: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CacheMissError("k" * 20, "forward")

    monkeypatch.setattr(demo, "cudal1", SimpleNamespace(accelerate=fail))
    assert run(tmp_path) == 1
    shown = capsys.readouterr()
    assert "failed" in shown.out
    assert "Twice: CacheMissError" in shown.err
    assert "CacheMissError" in (tmp_path / "page.html").read_text()


def test_models_without_time_left_are_skipped_and_say_so(
    stand_in: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--budget-s", "0.000001") == 1
    assert "the time for the demo was used up" in capsys.readouterr().err
    assert stand_in == []


def test_an_unknown_model_is_refused_with_the_known_ones(
    stand_in: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--only", "Nothing") == 2
    assert "one of Twice" in capsys.readouterr().err


@pytest.mark.parametrize("elsewhere_s", [0.0, 10.0])
def test_a_busy_machine_is_told_beside_the_numbers(
    elsewhere_s: float,
    stand_in: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    samples = iter([LoadSample(0.0, 0.0, 0.0), LoadSample(elsewhere_s, 0.0, 20.0)])
    monkeypatch.setattr(demo, "sample_load", lambda: next(samples))
    assert main(["demo", "--out", str(tmp_path / "demo.html"), "--device", "cpu", "--quiet"]) == 0
    sentence = "Other processes used 50% of this machine's processors meanwhile"
    assert (sentence in " ".join(capsys.readouterr().out.split())) == bool(elsewhere_s)
    assert (sentence in (tmp_path / "demo.html").read_text().replace("&#39;", "'")) == bool(
        elsewhere_s
    )
