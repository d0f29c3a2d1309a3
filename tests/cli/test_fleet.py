"""`cudal1 warmup` with many workers: what it shows, its exit codes, and machines that cannot do
what was asked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api import light
from tests.store.conftest import make_entry
from torch_cudal1.__main__ import main
from torch_cudal1.api.fleet import local
from torch_cudal1.api.recording.recorder import compute_module_identity
from torch_cudal1.cli.commands import device, doctor
from torch_cudal1.core.call_signature import describe
from torch_cudal1.ir.program import canonical_json
from torch_cudal1.store.cache.local_cache import LocalCache
from torch_cudal1.store.recording_file import CallRecord, Mode, append_calls

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a warm-up with light workers (see `tests.api.light`)."""
    monkeypatch.setattr(local, "_COMMAND", (sys.executable, "-S", light.__file__, str(tmp_path)))
    monkeypatch.setattr(doctor, "as_environment", lambda settings: {"torch": torch.__version__})
    monkeypatch.setenv("COLUMNS", "300")
    LocalCache(tmp_path / "cache").put(make_entry(region_key=light.KEY))
    return lambda *arguments: main(["warmup", *arguments, "--cache-dir", str(tmp_path / "cache")])


def test_results_are_told_in_the_order_of_the_targets(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "do:0.1",
        "do2:0",
        "--workers",
        "2",
        "--device",
        "cpu",
        "--html",
        str(tmp_path / "page.html"),
    )
    assert run(*arguments, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [result["target"] for result in document["results"]] == ["do:0.1", "do2:0"]
    assert (document["resumed"], document["failed"]) == ([], [])
    assert document["results"][0]["explanation"]["regions"][0]["key"] == light.KEY
    assert (
        "do2:0" in (tmp_path / "page.html").read_text()
        or "nothing beat it" in (tmp_path / "page.html").read_text()
    )


def test_a_dead_worker_is_exit_code_1_and_a_bad_target_2(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("do:0", "die", "--workers", "1", "--device", "cpu") == 1
    shown = capsys.readouterr()
    assert "die: given out 2 times: worker 0 died: SIGKILL" in shown.err
    assert "failed" in shown.out
    assert run("do:0", "die", "--workers", "1", "--device", "cpu") == 1
    assert "1 target had been finished by a run that was interrupted" in capsys.readouterr().out
    assert run("do:0", "unusable", "--workers", "1", "--device", "cpu") == 2
    assert "no such callable" in capsys.readouterr().err


def test_devices_are_gpus_with_one_worker_each(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "without_cuda", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pools: list[Any] = []
    real = local.LocalPool.__init__

    def spy_on_pool(self: local.LocalPool, order: Any, slots: Any) -> None:
        pools.extend((order.device, [slot.variables["CUDA_VISIBLE_DEVICES"] for slot in slots]))
        real(self, order, slots)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local.LocalPool, "__init__", spy_on_pool)
    assert run("do:0", "do2:0", "--devices", "all") == 0
    assert pools == ["cuda", ["0", "1"]]
    assert run("do:0", "--devices", "2") == 2
    assert "from 0 to 1" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--devices", "all"), "'cpu' on this machine: torch"),
        (("--devices", "all", "--device", "cpu"), "--workers N"),
        (("--workers", "1", "--device", "cuda"), "'cpu' on this machine: torch"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(
    run: Run, arguments: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("do:0", *arguments) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [("--workers", "0"), ("--workers", "2", "--devices", "all"), ("--workers", "2", "--cluster")],
)
def test_two_pools_or_none_are_wrong_usage(run: Run, arguments: Any) -> None:
    with pytest.raises(SystemExit):
        run("do:0", *arguments)


def test_workers_on_a_machine_with_a_gpu_ask_which_was_meant(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "without_cuda", lambda: "")
    assert run("do:0", "--workers", "2") == 2
    assert "--devices all" in capsys.readouterr().err


def test_each_recorded_form_of_a_target_is_a_task(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\ndef make(): return torch.nn.Linear(3, 2).eval(), (torch.ones(4, 3),)\nother = make\n"
    )
    mode = Mode(grad=False, training=False)
    for rows, calls in ((4, 30), (9, 10)):
        form = canonical_json(describe(((torch.ones(rows, 3),), {})))
        append_calls(
            tmp_path / "calls",
            [
                CallRecord(
                    "module",
                    "Linear",
                    compute_module_identity(torch.nn.Linear(3, 2)),
                    form,
                    mode,
                    calls,
                )
            ],
        )
    other = tmp_path / "other.py"
    other.write_text(
        "import torch\ndef make(): return torch.nn.Linear(3, 5).eval(), (torch.ones(4, 3),)\n"
    )
    arguments = (
        f"{file}:make",
        f"{other}:make",
        "--recorded",
        str(tmp_path / "calls"),
        "--workers",
        "1",
        "--device",
        "cpu",
    )
    assert run(*arguments, "--json") == 2
    shown = capsys.readouterr()
    assert len(json.loads(shown.out)["results"]) == 2
    assert "no call of Linear" in shown.err
    assert (tmp_path / "begun").read_text().split() == [f"{file}:make"] * 2
