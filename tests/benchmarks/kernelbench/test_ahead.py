"""Kernels compiled ahead, without a GPU: what a search will ask for is there, once; a task that
cannot be captured is told.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kernelbench.__main__ import main
from benchmarks.kernelbench.planning import capture_task
from benchmarks.kernelbench.tasks import Task
from torch_cudal1.ir.records import Candidate
from torch_cudal1.search import build_cache
from torch_cudal1.search.group_kernels import list_proposals
from torch_cudal1.search.space import list_fusion_groups

SOFTMAX = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)

def get_inputs():
    return [torch.rand(256, 512)]

def get_init_inputs():
    return []
"""


def test_the_kernels_of_a_search_are_compiled_ahead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "level1"
    folder.mkdir()
    (folder / "1_Softmax.py").write_text(SOFTMAX)
    (folder / "2_Broken.py").write_text("raise OSError('no such thing')")
    command = ["compile", str(tmp_path), "--work", str(tmp_path / "work"), "--processes", "1"]
    region = list_fusion_groups(capture_task(Task(1, 1, "Softmax", SOFTMAX, "today")))[0].region
    proposals = list_proposals(region, 90, ())
    for compiled in (len(proposals), 0):
        assert main(command) == 0
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (summary["kernels"], summary["compiled"], summary["refused"]) == (
            len(proposals),
            compiled,
            0,
        )
        assert summary["left_out"] == {"1/2": "OSError: no such thing"}
    for proposal in proposals:
        build = build_cache.find_build(tmp_path / "work" / "cudal1", region.program, proposal, 90)
        assert isinstance(build, Candidate)
        assert build.program.launches
