"""Two and four ranks, each on its own GPU (nccl), run what the first one knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent


def crew(world: int, folder: Path, kind: str) -> list[dict[str, Any]]:
    """What each rank saw."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_CUDAL1_")}
    commands = [
        [sys.executable, "-m", "tests.rank_crew", str(rank), str(world), str(store.port), str(folder), kind]
        for rank in range(world)
    ]
    running = [subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=240)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * world, "\n".join(error[-3000:] for error in errors)
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_every_gpu_runs_what_the_first_rank_knows(world, tmp_path):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} NVIDIA GPUs")
    first, *others = crew(world, tmp_path, "cuda")
    assert first["shift"] == 1.0
    assert first["graphs"] == [2]  # a forward and a backward
    for other in others:
        assert other["digests"] == first["digests"]
        assert (other["shift"], other["graphs"]) == (1.0, [2])
        assert other["gradient"] == pytest.approx(first["gradient"])
