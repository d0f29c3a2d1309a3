"""A warm-up tunes each target and its recorded calls; whatever fails is the error of its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_cudal1.api import warmup as warmup_module
from torch_cudal1.api.targets import LoadedTarget
from torch_cudal1.api.warmup import warm, warmup
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import TargetError
from torch_cudal1.core.report import Explanation
from torch_cudal1.core.settings import Settings

X = torch.randn(2, 4)


class Accelerated:
    """In place of `accelerate`: notes its settings and modes, and does what a test asks for."""

    def __init__(self) -> None:
        self.settings: list[Settings] = []
        self.grad_modes: list[bool] = []
        self.restored: list[nn.Module] = []
        self.act = lambda: None

    def accelerate(
        self, module: nn.Module, inputs: Any, *, settings: Settings, progress: Any
    ) -> nn.Module:
        self.settings.append(settings)
        self.grad_modes.append(torch.is_grad_enabled())
        self.act()
        return module


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, clean: None) -> Accelerated:
    accelerated = Accelerated()
    monkeypatch.setattr(warmup_module, "accelerate", accelerated.accelerate)
    monkeypatch.setattr(warmup_module, "is_on_trial", lambda module: False)
    monkeypatch.setattr(warmup_module, "restore", accelerated.restored.append)
    monkeypatch.setattr(
        warmup_module, "explain", lambda module: Explanation(target="t", device="cpu")
    )
    return accelerated


def make_loaded() -> LoadedTarget:
    return LoadedTarget("t", nn.Linear(4, 4), (X,))


@pytest.fixture
def target(tmp_path: Path) -> str:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n"
        "def make_wrong():\n"
        "    return torch.nn.Linear(4, 4), (torch.ones(2, 5),)\n"
    )
    return f"{file}:make"


def test_a_warm_up_tunes_and_records_nothing_whatever_its_settings(
    target: str, accelerator: Accelerated, tmp_path: Path
) -> None:
    settings = Settings(cache_dir=tmp_path, on_miss="baseline", record=tmp_path / "calls")
    (result,) = warmup(target, settings=settings)
    (used,) = accelerator.settings
    assert (used.on_miss, used.record, used.cache_dir) == ("tune", None, tmp_path)
    assert (result.error, result.built, result.reused) == (None, 0, 0)
    assert result.explanation is not None
    assert len(accelerator.restored) == 1


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_on_for_training_only(training: bool, accelerator: Accelerated) -> None:
    warm(make_loaded(), Settings(), training=training)
    assert accelerator.grad_modes == [training]


def test_candidates_and_entries_of_this_target_are_counted(accelerator: Accelerated) -> None:
    telemetry.count("candidates_judged", 5)

    def count() -> None:
        telemetry.count("candidates_judged", 2)
        telemetry.count("entries_reused", 3)

    accelerator.act = count
    result = warm(make_loaded(), Settings())
    assert (result.built, result.reused) == (2, 3)


def test_a_failure_is_the_error_of_its_result(accelerator: Accelerated) -> None:
    def fail() -> None:
        raise ValueError("no such kernel")

    accelerator.act = fail
    result = warm(make_loaded(), Settings())
    assert result.error == "ValueError: no such kernel"
    assert result.explanation is None


@pytest.mark.parametrize(
    ("event", "error"),
    [("fallback", "it broke"), ("not_stored", "decided, but not stored: it broke")],
)
def test_a_failure_that_serving_survives_is_an_error_of_the_warm_up(
    event: str, error: str, accelerator: Accelerated
) -> None:
    telemetry.record("cache", event, "another region", reason="before this target")
    assert warm(make_loaded(), Settings()).error is None
    accelerator.act = lambda: telemetry.record("cache", event, "region", reason="it broke")
    result = warm(make_loaded(), Settings())
    assert result.error == error
    assert result.explanation is not None


def test_a_trial_of_several_graphs_gets_its_calls(
    accelerator: Accelerated, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, calls = make_loaded(), []
    loaded.module.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(warmup_module, "is_on_trial", lambda module: len(calls) < 3)
    warm(loaded, Settings(), training=True)
    assert len(calls) == 3
    assert loaded.module.weight.grad is None


def test_inputs_that_do_not_fit_are_the_targets_problem(
    target: str, accelerator: Accelerated
) -> None:
    with pytest.raises(TargetError):
        warmup(f"{target}_wrong", settings=Settings())
    assert accelerator.settings == []
