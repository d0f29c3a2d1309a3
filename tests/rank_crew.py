"""What each of N ranks does in `test_ranks_gpu`, on its own GPU (nccl) or on the CPU (gloo).

Run as `python -m tests.rank_crew RANK WORLD PORT FOLDER cuda|cpu`. Only rank 0's cache holds a decision.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_cudal1
from tests.entries import entry_for, shifted
from tests.rank_scenes import Net
from torch_cudal1.binding import captured_regions
from torch_cudal1.pipeline import Choice, end_to_end_name
from torch_cudal1.place import place_for
from torch_cudal1.records import Candidate
from torch_cudal1.settings import Settings


def plant_on(module: torch.nn.Module, x: torch.Tensor, cache_dir: Path) -> None:
    """Winning entries for `module` where it is, in the present grad mode: its own Programs, the first output shifted by 1."""
    settings = Settings(cache_dir=cache_dir)
    place = place_for(x.device, settings)
    choices = []
    for region in captured_regions(module, (x,)):
        program = region.program if region.kind == "backward" else shifted(region.program)
        candidate = Candidate(program, "eager", "rewrites", ("planted",))
        entry = replace(entry_for(region, candidate, settings), target=place.target, contract=place.contract)
        place.cache.put(entry)
        choices.append(Choice(region, candidate, entry, "planted"))
    note = {"winner": "cudal1", "note": "planted", "candidates": [choice.candidate.digest for choice in choices]}
    place.cache.put_alias(end_to_end_name(choices), note, place.target, place.contract)


def seen_by(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """Inference and a training step inside DDP, by what rank 0 knows."""
    module, x = Net().to(device), torch.ones(3, 8, device=device)
    own = folder / f"cache-{rank}"
    with torch.no_grad():
        if rank == 0:
            plant_on(module, x, own)
        torch_cudal1.accelerate(module, x, cache_dir=own, strictness="error")
        shift = float((module(x) - module._call_impl(x)).mean())
        (bound,) = module._compiled_call_impl.bindings.values()
    digests = [choice.candidate.digest for choice in bound.choices]
    if rank == 0:
        plant_on(module, x, own)
    torch_cudal1.accelerate(module, x, cache_dir=own, strictness="error")
    wrapped = DistributedDataParallel(module)
    wrapped(x * (1 + rank)).square().sum().backward()
    trained = [len(bound.choices) for bound in module._compiled_call_impl.bindings.values() if hasattr(bound, "call")]
    return {"shift": round(shift, 3), "digests": digests, "graphs": trained, "gradient": module.first.weight.grad.sum().item()}


def main(rank: int, world: int, port: int, folder: Path, kind: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=120))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen_by(rank, device, folder)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
