"""Compiles ahead, on all cores and without a GPU, the kernels that searches of the tasks will ask
for.

Tasks are captured on fake tensors. What a search on the GPU captures is the same but for a few
operators that PyTorch chooses by device (attention); what was not met here it compiles itself.
Nothing is run or measured.
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

from benchmarks.kernelbench.planning import captured
from benchmarks.kernelbench.processes import die_with_parent
from benchmarks.kernelbench.tasks import Task
from torch_cudal1 import kernels
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import Program
from torch_cudal1.ir.records import Candidate, Rejected
from torch_cudal1.kernels import Proposal
from torch_cudal1.search import build_cache
from torch_cudal1.search.group_kernels import list_proposals
from torch_cudal1.search.space import list_fusion_groups

__all__ = ["Compiled", "compile_ahead"]

_NICENESS = 19  # whoever measures beside it comes first
_RIGHTS = {"default": ("conv",), "tf32": ("matmul", "conv"), "ieee": ()}


@dataclass(frozen=True)
class Compiled:
    """How many kernels there are, how many were compiled now and could not be, why tasks were left
    out, and the seconds it took.
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
    rights: str = "default",
    processes: int = 1,
    until: float | None = None,
) -> Compiled:
    """Fill `cache` in the order of the tasks, until `until` on the monotonic clock. `rights`: as of
    the run that comes after.
    """
    begin = time.monotonic()
    told: Counter[str] = Counter()
    left_out: dict[str, str] = {}
    seen: set[str] = set()
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=_prepared, initargs=(os.getpid(),)
    )
    try:
        asked = {task.key: pool.submit(_asked, task, sm, _RIGHTS[rights]) for task in tasks}
        building: list[Future[str]] = []
        for key, future in asked.items():
            try:
                fresh = [one for one in future.result() if one not in seen]
            except Exception as error:  # noqa: BLE001  whatever a task's own file raises, its search must do without
                left_out[key] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                continue
            seen.update(fresh)
            building += [pool.submit(_compiled, cache, one, sm, until) for one in fresh]
        for done in as_completed(building):
            told[done.result()] += 1
    finally:
        pool.shutdown(
            cancel_futures=True
        )  # who is interrupted waits for what is being compiled, and for no more
    return Compiled(
        sum(told.values()),
        told["compiled"],
        told["refused"],
        left_out,
        round(time.monotonic() - begin, 1),
    )


def _prepared(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        raise RuntimeError("whom this would compile for has ended")
    os.nice(_NICENESS)
    torch.set_num_threads(1)


def _asked(task: Task, sm: int, rights: tuple[str, ...]) -> list[str]:
    """The island and the proposal of each kernel of a task, as JSON."""
    regions = {island.region.key: island.region for island in list_fusion_groups(captured(task))}
    return [
        json.dumps([region.program.to_json(), proposal.to_json()])
        for region in regions.values()
        for proposal in list_proposals(region, sm, rights)
    ]


def _compiled(cache: Path, asked: str, sm: int, until: float | None) -> str:
    """What became of one kernel: "known", "compiled", "refused", or "late"."""
    island, config = json.loads(asked)
    program, proposal = Program.from_json(island, {}), Proposal.from_json(config)
    if not isinstance(build_cache.find_build(cache, program, proposal, sm), Refusal):
        return "known"
    if until is not None and time.monotonic() > until:
        return "late"
    answer: Candidate | Rejected
    try:
        answer = Candidate(
            kernels.build(program, proposal, sm), "eager", "kernels", (proposal.family,)
        )
    except (NotLowerableError, ProgramError) as error:
        answer = Rejected(f"{type(error).__name__}: {error}", "build")
    build_cache.store_build(cache, program, proposal, sm, answer)
    return "compiled" if isinstance(answer, Candidate) else "refused"
