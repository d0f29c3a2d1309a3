"""Compiles ahead, on all cores and without a GPU, the kernels that searches of the tasks will need.

Tasks are captured on fake tensors. A search on the GPU captures the same graphs but for a few
operators that PyTorch chooses by device (attention); kernels that were not met here it compiles
itself. Nothing is run or measured.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.kernelbench.job import Rights, get_dtype
from benchmarks.kernelbench.planning import capture_task
from benchmarks.kernelbench.processes import die_with_parent
from benchmarks.kernelbench.tasks import Task
from torch_cudal1 import kernels
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Rejected
from torch_cudal1.ir.schedule import EAGER
from torch_cudal1.kernels import Proposal
from torch_cudal1.search import build_cache
from torch_cudal1.search.group_kernels import list_proposals
from torch_cudal1.search.space import list_fusion_groups

__all__ = ["CompileSummary", "compile_ahead"]

_NICENESS = 19  # a measurement on the same machine comes first
_TF32_OP_CLASSES: dict[Rights, tuple[str, ...]] = {
    "default": ("conv",),
    "tf32": ("matmul", "conv"),
    "ieee": (),
    "bf16": (),
}


@dataclass(frozen=True)
class CompileSummary:
    """How many kernels there are, how many were compiled now and how many refused, which tasks were
    left out and why, and the seconds.
    """

    kernels: int
    compiled: int
    refused: int
    left_out: dict[str, str]
    wall_s: float


def compile_ahead(
    tasks: Sequence[Task],
    cache: Path,
    *,
    sm: int,
    rights: Rights = "default",
    processes: int = 1,
    until: float | None = None,
) -> CompileSummary:
    """Fill `cache` in the order of the tasks, until `until` on the monotonic clock. `rights`: those
    of the run that follows.
    """
    begin = time.monotonic()
    outcomes: Counter[str] = Counter()
    left_out: dict[str, str] = {}
    known_kernels: set[str] = set()
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_prepare_worker, initargs=(os.getpid(),)
    )
    try:
        listings = {task.key: pool.submit(_list_kernels, task, sm, rights) for task in tasks}
        building: list[Future[str]] = []
        for key, future in listings.items():
            try:
                new_kernels = [kernel for kernel in future.result() if kernel not in known_kernels]
            except Exception as error:  # noqa: BLE001
                # whatever a task's own file raises, its search must do without
                left_out[key] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                continue
            known_kernels.update(new_kernels)
            building += [
                pool.submit(_compile_kernel, cache, kernel, sm, until) for kernel in new_kernels
            ]
        for build in as_completed(building):
            outcomes[build.result()] += 1
    finally:
        # an interrupted run waits for what is being compiled, and for no more
        pool.shutdown(cancel_futures=True)
    return CompileSummary(
        sum(outcomes.values()),
        outcomes["compiled"],
        outcomes["refused"],
        left_out,
        round(time.monotonic() - begin, 1),
    )


def _prepare_worker(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        raise RuntimeError("the parent process has ended")
    os.nice(_NICENESS)
    torch.set_num_threads(1)


def _list_kernels(task: Task, sm: int, rights: Rights) -> list[str]:
    """The fusion group and the proposal of each kernel of a task, as JSON."""
    groups = list_fusion_groups(capture_task(task, get_dtype(rights)))
    regions = {group.region.key: group.region for group in groups}
    return [
        json.dumps([region.program.to_json(), proposal.to_json()])
        for region in regions.values()
        for proposal in list_proposals(region, sm, _TF32_OP_CLASSES[rights])
    ]


def _compile_kernel(cache: Path, kernel: str, sm: int, until: float | None) -> str:
    """Compile one kernel, unless it is cached: "known", "compiled", "refused", or "late"."""
    region_program, config = json.loads(kernel)
    program, proposal = Program.from_json(region_program, {}), Proposal.from_json(config)
    if not isinstance(build_cache.find_build(cache, program, proposal, sm), Refusal):
        return "known"
    if until is not None and time.monotonic() > until:
        return "late"
    answer: Candidate | Rejected
    try:
        answer = Candidate(
            kernels.build(program, proposal, sm), EAGER, "kernels", (proposal.family,)
        )
    except (NotLowerableError, ProgramError) as error:
        answer = Rejected(f"{type(error).__name__}: {error}", "build")
    build_cache.store_build(cache, program, proposal, sm, answer)
    return "compiled" if isinstance(answer, Candidate) else "refused"
