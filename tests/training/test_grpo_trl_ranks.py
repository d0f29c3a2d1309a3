# ruff: noqa: F811  fixtures of another file are arguments here
"""TRL's trainer in several processes: the first one judges for all, and what is trained is one
model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_grpo_trl import CONFIG, taught  # noqa: F401  a fixture
from torch_cudal1.ingest.llm.policy import LanguageModel

pytest.importorskip("trl")
ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_processes(
    launcher: list[str], model: Path, folder: Path, device: str, lora_rank: int, **environment: str
) -> dict[str, Any]:
    """The summary that the first process of a run wrote."""
    command = [
        *launcher,
        "-m",
        "tests.training.trl_process",
        str(model),
        str(folder),
        device,
        str(lora_rank),
    ]
    process = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    answer: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert answer["processes"] == 2
    assert len(answer["log"]) == CONFIG.steps
    assert all("kl" in entry and entry["reward_std"] > 0 for entry in answer["log"])
    assert len(answer["samples"]) == CONFIG.steps * CONFIG.group * CONFIG.groups, (
        "each rank's completions, once"
    )
    groups = [
        answer["samples"][i : i + CONFIG.group]
        for i in range(0, len(answer["samples"]), CONFIG.group)
    ]
    assert all(len({(task, *shown) for _, task, shown in group}) == 1 for group in groups), (
        "one draw a group, on whichever rank"
    )
    return answer


def has_changed(before: Path, after: Path) -> bool:
    models = [LanguageModel.load(path).model.cpu() for path in (before, after)]
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return any(not torch.equal(a.float(), b.float()) for a, b in pairs)


def test_two_processes_on_a_cpu(taught: Path, tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    answer = run_processes(
        torchrun, taught, tmp_path, "cpu", 0, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1"
    )
    assert "MULTI_CPU" in answer["kind"]
    assert has_changed(taught, tmp_path / "trl" / "model")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize(("file", "kind"), [("fsdp.yaml", "FSDP"), ("zero3.yaml", "DEEPSPEED")])
def test_two_processes_as_the_page_launches_them(
    taught: Path, tmp_path: Path, file: str, kind: str
) -> None:
    if kind == "DEEPSPEED":
        pytest.importorskip("deepspeed")
    launcher = [
        *LAUNCH,
        "--config_file",
        str(ROOT / "docs" / "training" / file),
        "--num_processes",
        "2",
    ]
    answer = run_processes(launcher, taught, tmp_path, "cuda", 0)
    assert kind in answer["kind"]
    assert has_changed(taught, tmp_path / "trl" / "model"), "the whole model is put together again"


@pytest.mark.gpu
@two_gpus
def test_adapters_of_a_sharded_model(taught: Path, tmp_path: Path) -> None:
    launcher = [
        *LAUNCH,
        "--config_file",
        str(ROOT / "docs" / "training" / "fsdp.yaml"),
        "--num_processes",
        "2",
    ]
    assert "FSDP" in run_processes(launcher, taught, tmp_path, "cuda", 4)["kind"]
    assert (tmp_path / "trl" / "model" / "adapter_model.safetensors").is_file()
