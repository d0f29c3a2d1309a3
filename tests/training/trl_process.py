"""One of several processes of a TRL run in the synthetic world: MODEL FOLDER cpu|cuda LORA_RANK."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.training.test_grpo_trl import CONFIG, SMALL, samples_of, step_in
from torch_cudal1.ingest.llm.extras import require_extra
from torch_cudal1.training.grpo_trl import train_with_trl


def main(model: str, folder: Path, device: str, lora_rank: int) -> None:
    """Train, and have the first process write what was logged and put on record."""
    torch.set_num_threads(1)
    state = require_extra("accelerate").PartialState(cpu=device == "cpu")
    first = state.process_index == 0
    step = step_in(folder if first else None, config=replace(CONFIG, beta=0.1))
    trl = replace(
        SMALL,
        cpu=device == "cpu",
        processes=state.num_processes,
        lora_rank=lora_rank,
        bf16=device == "cuda",
    )
    log = train_with_trl(model, step, trl, folder=folder / "trl")
    if first:
        samples = [
            [entry.name, entry.measured.task, list(entry.exemplars)] for entry in samples_of(step)
        ]
        kind = str(require_extra("accelerate").Accelerator().distributed_type)
        summary = {
            "kind": kind,
            "processes": state.num_processes,
            "log": [entry for entry in log if "reward" in entry],
            "samples": samples,
        }
        (folder / "summary.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
