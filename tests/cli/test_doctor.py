"""`cudal1 doctor`: its JSON form, its verdict, and that it touches nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from torch_cudal1.__main__ import main
from torch_cudal1.cli.commands import doctor
from torch_cudal1.core.settings import Settings
from torch_cudal1.judge.sandbox.confinement_level import Control, ProbeResult

SANDBOXES = ["sandbox, own code", "sandbox, sources of others"]
NAMES = [
    "python",
    "torch",
    "device",
    "C++ extension",
    "Inductor",
    "Triton",
    "nvcc",
    "cache",
    "trust",
    *SANDBOXES,
    "rich",
    "matplotlib",
]


def run_doctor(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, object]]:
    code = main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_the_json_form_holds_findings_settings_versions_and_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run_doctor(capsys, "--cache-dir", str(tmp_path))
    assert code == 0
    assert set(document) == {"versions", "findings", "settings", "state", "verdict"}
    assert [f["name"] for f in document["findings"]] == NAMES
    assert all(f["what"] for f in document["findings"])
    assert all(f["ok"] in (True, False, None) for f in document["findings"])
    assert set(document["settings"]) == {f.name for f in fields(Settings)}
    assert document["versions"]["torch"] == torch.__version__
    assert document["state"] in ("ready", "limited")
    assert str(document["verdict"]).startswith("Verdict: ")


def test_every_setting_tells_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_CUDAL1_PRECISION", "strict")
    _, document = run_doctor(capsys, "--cache-dir", str(tmp_path))
    sources = {name: value["from"] for name, value in document["settings"].items()}
    assert sources["precision"] == "TORCH_CUDAL1_PRECISION"
    assert sources["cache_dir"] == "command line"
    assert sources["margin"] == "default"


def test_a_cache_folder_that_cannot_be_written_is_broken_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code, document = run_doctor(capsys, "--cache-dir", str(file / "below"))
    assert code == 1
    assert document["state"] == "broken"
    assert "TORCH_CUDAL1_CACHE_DIR" in str(document["verdict"])


def test_looking_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_doctor(capsys, "--cache-dir", str(tmp_path / "not" / "there"))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    findings = {f.name: f for f in doctor.examine(Settings(cache_dir=tmp_path))}
    assert findings["Inductor"].ok is False
    assert "install g++" in findings["Inductor"].remedy
    assert findings["nvcc"].ok is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_hears_why(tmp_path: Path) -> None:
    findings = {f.name: f for f in doctor.examine(Settings(cache_dir=tmp_path))}
    assert "No GPU because torch" in findings["device"].what


@pytest.mark.parametrize("name", SANDBOXES)
def test_the_sandboxs_limits_are_said_plainly(tmp_path: Path, name: str) -> None:
    findings = {f.name: f for f in doctor.examine(Settings(cache_dir=tmp_path))}
    assert "tried act by act" in findings[name].what
    assert "Does not stop" in findings[name].what


def broken_probe(level: int) -> ProbeResult:
    right = Control("scratch", 0, True, "")
    if level == 1:
        return ProbeResult(1, (right, Control("file size", 1, True, "")))
    return ProbeResult(level, (), error="no Landlock here")


@pytest.mark.parametrize("unsafe", [False, True])
def test_sources_of_others_are_refused_below_level_2_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsafe: bool
) -> None:
    monkeypatch.setattr(
        doctor.probe, "find_levels", lambda limits: tuple(broken_probe(n) for n in (3, 2, 1))
    )
    findings = {
        f.name: f for f in doctor.examine(Settings(cache_dir=tmp_path, unsafe_sandbox=unsafe))
    }
    own_sources, foreign_sources = (findings[name] for name in SANDBOXES)
    assert own_sources.ok is True
    assert foreign_sources.ok is unsafe
    assert "no Landlock here" in foreign_sources.what
    assert "lsm=landlock" in foreign_sources.remedy
    assert "unsafe_sandbox" in foreign_sources.remedy


def test_a_cache_that_everybody_may_write_is_told(tmp_path: Path) -> None:
    def cache() -> doctor.HealthCheck:
        return next(f for f in doctor.examine(Settings(cache_dir=tmp_path)) if f.name == "cache")

    assert cache().ok
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1").chmod(0o777)
    assert (cache().ok, cache().remedy) == (False, f"chmod o-w {tmp_path / 'v1'}")
