"""Test helper: a stand-in for a CUDA graph's replay, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torch_cudal1.graph import swap


class Replay:
    """Stands in for `GraphedRunner`: counts its runs, and raises while `fails` is set."""

    runs = 0
    fails = False

    def __init__(
        self,
        runner: Callable[..., Any],
        static: frozenset[int],
        device: torch.device,
        written: frozenset[int] = frozenset(),
    ) -> None:
        self.runner, self.static, self.written = runner, static, written

    def __call__(self, inputs: Sequence[Any]) -> Any:
        if Replay.fails:
            raise RuntimeError("no graph today")
        Replay.runs += 1
        return self.runner(inputs)


def patch_replay(monkeypatch: pytest.MonkeyPatch) -> type[Replay]:
    """Let swaps build a `Replay` in place of a CUDA graph; its counters start anew."""
    Replay.runs, Replay.fails = 0, False
    monkeypatch.setattr(swap, "GraphedRunner", Replay)
    return Replay
