"""What each of N ranks does in `test_ranks_gpu` and `test_ranks_sharded`, on its own GPU (nccl) or
on the CPU (gloo).

Run as `python -m tests.api.rank_crew RANK WORLD PORT FOLDER cuda|cpu`. Only rank 0's cache holds
decisions. `crew` starts all ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_cudal1
from tests.api import rank_sharded as sharded
from tests.api.rank_scenes import Net
from tests.entries import add_one_to_output, plant

ROOT = Path(__file__).parents[2]
_LIMIT_S = 900  # a rank that is not done then says where each of its threads stands, and ends


def run_data_parallel(rank: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """Inference and a training step inside DDP, by what rank 0 knows."""
    module, x = Net().to(device), torch.ones(3, 8, device=device)
    own_cache = folder / f"cache-{rank}"
    with torch.no_grad():
        if rank == 0:
            plant(module, x, own_cache, change=add_one_to_output)
        torch_cudal1.accelerate(module, x, cache_dir=own_cache, strictness="error")
        shift = float((module(x) - module._call_impl(x)).mean())
        (bound,) = module._compiled_call_impl.bindings.values()
    digests = [choice.candidate.digest for choice in bound.choices]
    if rank == 0:
        plant(module, x, own_cache, change=add_one_to_output)
    torch_cudal1.accelerate(module, x, cache_dir=own_cache, strictness="error")
    wrapped = DistributedDataParallel(module)
    wrapped(x * (1 + rank)).square().sum().backward()
    trained = [
        len(bound.choices)
        for bound in module._compiled_call_impl.bindings.values()
        if hasattr(bound, "call")
    ]
    return {
        "shift": round(shift, 3),
        "digests": digests,
        "graphs": trained,
        "gradient": module.first.weight.grad.sum().item(),
    }


def crew(world: int, folder: Path, kind: str) -> list[dict[str, Any]]:
    """Start the ranks and wait for them; what each one saw, by scene."""
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        None,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCH_CUDAL1_")
    } | {"TORCH_CUDAL1_ON_MISS": "baseline"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} if kind == "cpu" else {}
    commands = [
        [
            sys.executable,
            "-m",
            "tests.api.rank_crew",
            str(rank),
            str(world),
            str(store.port),
            str(folder),
            kind,
        ]
        for rank in range(world)
    ]
    running = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        errors = [process.communicate(timeout=_LIMIT_S + 60)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * world, "\n".join(
        error[-3000:] for error in errors
    )
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(world)]


def main(rank: int, world: int, port: int, folder: Path, kind: str) -> None:
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
    store = dist.TCPStore(
        "127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=_LIMIT_S)
    )
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=_LIMIT_S)
    )
    outcomes = {"data_parallel": run_data_parallel(rank, device, folder)} | sharded.run_scenes(
        rank, device, folder
    )
    (folder / f"seen-{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
