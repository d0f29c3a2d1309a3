"""Workers die, are killed and interrupted; every task is answered, none is done twice, and nothing
finished is lost.
"""

from __future__ import annotations

import pytest

from torch_cudal1.api.fleet import local
from torch_cudal1.api.fleet.local import list_gpu_slots
from torch_cudal1.core.errors import SettingError


def test_each_gpu_has_a_slot_that_sees_it_alone_and_has_its_own_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    slots = list_gpu_slots("all", 4, range(10))
    assert [slot.variables for slot in slots] == [
        {"CUDA_VISIBLE_DEVICES": str(number)} for number in range(4)
    ]
    assert sorted(core for slot in slots for core in slot.cores) == list(range(10))
    assert [len(slot.cores) for slot in slots] == [2, 3, 2, 3]
    assert list_gpu_slots("2", 4, range(10)) == (
        local.WorkerSlot("the worker of GPU 2", {"CUDA_VISIBLE_DEVICES": "2"}, tuple(range(10))),
    )


def test_gpus_are_numbered_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-ab12")
    assert [slot.variables["CUDA_VISIBLE_DEVICES"] for slot in list_gpu_slots("1,0", 2, [0])] == [
        "GPU-ab12",
        "5",
    ]


@pytest.mark.parametrize("devices", ["", "4", "-1", "0,0", "zero", "0;1", "all,1"])
def test_a_gpu_that_is_not_there_is_refused_by_name(devices: str) -> None:
    with pytest.raises(SettingError, match="from 0 to 3"):
        list_gpu_slots(devices, 4, range(8))
    with pytest.raises(SettingError, match="no GPU"):
        list_gpu_slots(devices or "all", 0, range(8))
