"""When a process of the judge gives back what it has freed of a GPU's memory."""

from __future__ import annotations

import pytest
import torch

from torch_cudal1.device import gpu_memory
from torch_cudal1.device.gpu_memory import make_room

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "size", "reserved", "given_back"),
    [
        (40 * GIB, 8 * GIB, 30 * GIB, True),
        (60 * GIB, 8 * GIB, 30 * GIB, False),  # there is room
        (0, GIB // 2, 30 * GIB, False),  # other processes need little
        (40 * GIB, 8 * GIB, 20 * GIB, False),  # all of it is in use
    ],
    ids=["short", "room", "small", "in use"],
)
def test_what_was_freed_goes_back_where_a_large_message_has_little_room(
    free: int, size: int, reserved: int, given_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    make_room(torch.device("cuda"), size)
    assert bool(calls) is given_back


def test_the_host_has_nothing_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu_memory, "release_cached_memory", lambda device: pytest.fail("there is no GPU")
    )
    make_room(torch.device("cpu"), 100 * GIB)
