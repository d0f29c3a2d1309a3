"""The GPU's state is read where it can be; where it cannot, the answer says why."""

from __future__ import annotations

import json

import pytest
import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device import gpu_state as module
from torch_cudal1.device.gpu_state import read_gpu_state, reset_persisting_l2


def test_a_cpu_has_no_gpu_state() -> None:
    cpu = torch.device("cpu")
    assert read_gpu_state(cpu) == {"unknown": "not a CUDA device"}
    assert reset_persisting_l2(cpu) == Refusal("not a CUDA device")


def test_a_missing_library_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NVML", "libno-such-thing.so")
    assert "no NVML" in read_gpu_state(torch.device("cuda"))["unknown"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_gpu_tells_its_clocks_and_lets_its_cache_be_reset() -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    state = json.loads(json.dumps(read_gpu_state(device)))
    if "unknown" not in state:  # containers may come without the library
        assert 0 < state["sm_mhz"] <= state["most_sm_mhz"]
        assert 0 < state["celsius"] < 120
    assert reset_persisting_l2(device) is None
