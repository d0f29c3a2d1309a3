"""The GPU's state is told where it can be, and its absence is told where it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torch_cudal1.judge import gpu_state as module
from torch_cudal1.judge.gpu_state import exclusive, gpu_state, reset_persisting_l2


def test_a_cpu_has_no_gpu_state() -> None:
    cpu = torch.device("cpu")
    assert gpu_state(cpu) == {"unknown": "not a CUDA device"}
    assert reset_persisting_l2(cpu) == "not a CUDA device"


def test_a_missing_library_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NVML", "libno-such-thing.so")
    assert "no NVML" in gpu_state(torch.device("cuda"))["unknown"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_gpu_tells_its_clocks_and_lets_its_cache_be_reset() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    state = json.loads(json.dumps(gpu_state(device)))
    if "unknown" not in state:  # containers may come without the library
        assert 0 < state["sm_mhz"] <= state["most_sm_mhz"]
        assert 0 < state["celsius"] < 120
    assert reset_persisting_l2(device) == ""


@pytest.fixture
def _made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="made-up"))


@pytest.mark.usefixtures("_made_up_gpu")
def test_one_judge_at_a_time_has_a_gpu_and_the_next_says_so(tmp_path: Path) -> None:
    gpu = torch.device("cuda", 0)
    with exclusive(gpu, tmp_path / "locks") as first, exclusive(gpu, tmp_path / "locks", wait_s=0.05) as second:
        assert first == ""
        assert "another judge" in second
    with exclusive(gpu, tmp_path / "locks", wait_s=0.05) as third:
        assert third == ""


@pytest.mark.usefixtures("_made_up_gpu")
def test_a_folder_that_cannot_hold_a_lock_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with exclusive(torch.device("cuda", 0), tmp_path / "file" / "locks") as shared:
        assert "no lock" in shared


def test_the_cpu_is_nobodys(tmp_path: Path) -> None:
    with exclusive(torch.device("cpu"), tmp_path) as shared:
        assert shared == "not a CUDA device"
    assert list(tmp_path.iterdir()) == []
