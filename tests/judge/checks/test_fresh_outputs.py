"""An output that changed in the caller's hands is told by its position."""

from __future__ import annotations

import torch

from torch_cudal1.judge.checks.memory.fresh_outputs import _find_changed


def test_every_changed_output_is_found_and_no_other() -> None:
    before = [torch.ones(3), None, torch.zeros(2)]
    assert _find_changed(before, [torch.ones(3), None, torch.zeros(2)]) == []
    assert _find_changed(before, [torch.ones(3), None, -torch.zeros(2)]) == [2]
    assert _find_changed(before, [None, None, torch.zeros(2)]) == [0]
