"""What Inductor compiles at a target's start is collected in a fresh process; a start that fails is a
reason and costs no other target.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_cudal1.api.fleet.warmup_task import WarmupOrder
from torch_cudal1.cli.commands import inductor_ahead
from torch_cudal1.cli.commands.inductor_ahead import collect
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.search import inductor_artifacts

KEYS = ["ab" * 32, "cd" * 32]


class Starts:
    """In place of fresh processes: each target's stdout, stderr and exit code."""

    def __init__(self, outcomes: dict[str, tuple[str, str, int] | Exception]) -> None:
        self.outcomes = outcomes
        self.environments: list[dict[str, str]] = []
        self.orders: list[dict[str, Any]] = []

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.environments.append(options["env"])
        self.orders.append(json.loads(options["input"]))
        folder = Path(options["env"]["TORCHINDUCTOR_CACHE_DIR"])
        assert list(folder.iterdir()) == []
        (folder / "compiled").write_text(command[-1])
        outcome = self.outcomes[command[-1]]
        if isinstance(outcome, Exception):
            raise outcome
        stdout, stderr, code = outcome
        return subprocess.CompletedProcess(list(command), code, stdout, stderr)


def say(keys: Sequence[str]) -> str:
    return f"a line of the user's\n{inductor_ahead._REGIONS_LINE}{json.dumps(list(keys))}\n"


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """What is stored: keys, and the target whose start compiled it."""
    stored: list[tuple[list[str], str]] = []

    def store(keys: list[str], folder: Path, place: Any) -> None:
        stored.append((keys, (folder / "compiled").read_text()))

    monkeypatch.setattr(inductor_artifacts, "store_artifacts", store)
    return stored


def collect_from(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcomes: dict[str, tuple[str, str, int] | Exception],
) -> tuple[Starts, dict[str, str]]:
    starts = Starts(outcomes)
    monkeypatch.setattr(subprocess, "run", starts.run)
    order = WarmupOrder(Settings(cache_dir=tmp_path), False, "cpu")
    return starts, collect(list(outcomes), order)


def test_each_target_starts_in_a_process_with_an_empty_cache_of_inductors(
    artifacts: list[tuple[list[str], str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts, problems = collect_from(
        monkeypatch, tmp_path, {"a": (say(KEYS), "", 0), "b": (say(KEYS[:1]), "", 0)}
    )
    assert problems == {}
    assert artifacts == [(KEYS, "a"), (KEYS[:1], "b")]
    folders = {environment["TORCHINDUCTOR_CACHE_DIR"] for environment in starts.environments}
    assert len(folders) == 2
    assert not any(Path(folder).exists() for folder in folders)
    assert all(
        environment["TRITON_CACHE_DIR"].startswith(environment["TORCHINDUCTOR_CACHE_DIR"])
        for environment in starts.environments
    )
    assert [order["device"] for order in starts.orders] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ((say(KEYS), "no compiler\nRuntimeError: it broke", 1), "code 1: RuntimeError: it broke"),
        (("nothing of ours", "", 0), "code 0: nothing was said"),
        ((say([]), "", 0), "no region of it has a stored decision"),
        (subprocess.TimeoutExpired("start", 5.0), "took longer than 1800 s"),
    ],
    ids=["it fails", "it says nothing", "nothing is decided", "it hangs"],
)
def test_a_start_that_fails_is_a_reason_and_costs_no_other_target(
    outcome: Any,
    reason: str,
    artifacts: list[tuple[list[str], str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    _, problems = collect_from(monkeypatch, tmp_path, {"a": outcome, "b": (say(KEYS), "", 0)})
    assert list(problems) == ["a"]
    assert reason in problems["a"]
    assert artifacts == [(KEYS, "b")]


def test_what_cannot_be_stored_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        inductor_artifacts, "store_artifacts", lambda *_: Refusal("the disk is full")
    )
    _, problems = collect_from(monkeypatch, tmp_path, {"a": (say(KEYS), "", 0)})
    assert problems == {"a": "the disk is full"}


def test_a_start_takes_decisions_from_the_cache_or_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    import cudal1

    (tmp_path / "model.py").write_text(
        "import torch\ndef make(): return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n"
    )
    used: list[Settings] = []

    def accelerate(module: torch.nn.Module, inputs: Any, *, settings: Settings) -> torch.nn.Module:
        used.append(settings)
        assert not torch.is_grad_enabled()
        return module

    monkeypatch.setattr(cudal1, "accelerate", accelerate)
    monkeypatch.setattr(
        cudal1, "explain", lambda module: cudal1.Explanation(target="t", device="cpu")
    )
    order = WarmupOrder(Settings(cache_dir=tmp_path, on_miss="tune"), False, "cpu")
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(order.to_json())))
    assert inductor_ahead.main(f"{tmp_path / 'model.py'}:make") == 0
    (settings,) = used
    assert (settings.on_miss, settings.strictness, settings.inductor_files) == (
        "error",
        "error",
        True,
    )
    assert capsys.readouterr().out.endswith(f"{inductor_ahead._REGIONS_LINE}[]\n")
