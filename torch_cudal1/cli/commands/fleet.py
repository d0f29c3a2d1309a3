"""`cudal1 warmup` with many workers: `--devices`, `--workers`, `--cluster`. Picks the worker
pool and turns its answers into results.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_cudal1.api.fleet.cluster import RayPool
from torch_cudal1.api.fleet.local import LocalPool, list_cpu_slots, list_gpu_slots
from torch_cudal1.api.fleet.pool import WorkerPool, run_tasks
from torch_cudal1.api.fleet.warmup_journal import find_journal
from torch_cudal1.api.fleet.warmup_task import (
    WarmupAnswer,
    WarmupOrder,
    WarmupTask,
    encode_signature,
)
from torch_cudal1.api.recording.replay import list_recorded_calls, read_recording
from torch_cudal1.api.targets import LoadedTarget, load
from torch_cudal1.api.warmup import WarmupResult
from torch_cudal1.cli.commands import device
from torch_cudal1.cli.view.terminal import ProgressCallback
from torch_cudal1.core.errors import SettingError, TargetError
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.recording_file import CallRecord, RecordingContents

__all__ = ["FleetWarmup", "wants_pool", "warm_with_pool"]


@dataclass(frozen=True)
class FleetWarmup:
    """Results, targets that cannot be used, what an earlier run had finished, and
    other problems.
    """

    results: tuple[WarmupResult, ...]
    unusable: tuple[str, ...]
    resumed: tuple[str, ...]
    problems: tuple[str, ...]


def wants_pool(args: argparse.Namespace) -> bool:
    """Whether more than this process is to work."""
    return args.devices is not None or args.workers is not None or args.cluster is not None


def warm_with_pool(
    args: argparse.Namespace, targets: Sequence[str], settings: Settings, progress: ProgressCallback
) -> FleetWarmup:
    """Warm single targets with the worker pool that was asked for. Raises SettingError for one that this
    machine cannot have.
    """
    # Two contradicting wishes: neither is preferred in silence.
    if args.devices is not None and args.device == "cpu":
        raise SettingError(
            "devices",
            args.devices,
            "no --device cpu beside it; workers for the CPU are `--workers N`",
        )
    chosen = device.choose("cuda" if args.devices is not None else args.device)
    order = WarmupOrder(
        # Absolute, because a worker may run in another folder.
        settings.but(cache_dir=settings.cache_dir.absolute()),
        args.training,
        chosen,
    )
    unmatched: list[str] = []
    tasks = _make_tasks(targets, args.recorded, unmatched)
    outcome = run_tasks(tasks, _open_pool(args, order), find_journal(order, tasks), progress)
    return FleetWarmup(
        tuple(_read_result(answer) for answer in outcome.answers if not answer.unusable),
        # Both are targets that no second attempt changes.
        (*unmatched, *(answer.unusable for answer in outcome.answers if answer.unusable)),
        tuple(answer.task.target for answer in outcome.answers if answer.resumed),
        outcome.problems,
    )


def _make_tasks(
    targets: Sequence[str], recording: Path | None, unmatched: list[str]
) -> list[WarmupTask]:
    """A task a target, or one for each recorded form of its calls; targets that have none join
    `unmatched`.
    """
    if recording is None:
        return [WarmupTask(target) for target in targets]
    lines = read_recording(recording).seen
    tasks: list[WarmupTask] = []
    for target in targets:
        try:
            # Loaded here to match recorded lines with modules; workers load it again.
            (loaded,) = load(target)
            matches = [
                WarmupTask(target, encode_signature(line))
                for line in lines
                if _matches_target(loaded, line)
            ]
            if not matches:
                # Called for its error, which says why there are none.
                list_recorded_calls(loaded, RecordingContents(lines, ()))
        except TargetError as error:
            unmatched.append(str(error))
            continue
        tasks += matches
    return tasks


def _matches_target(loaded: LoadedTarget, line: CallRecord) -> bool:
    try:
        list_recorded_calls(loaded, RecordingContents((line,), ()))
    except TargetError:
        return False
    return True


def _open_pool(args: argparse.Namespace, order: WarmupOrder) -> WorkerPool:
    # The affinity, not `cpu_count`: a container or a job may be given fewer cores.
    cores = sorted(os.sched_getaffinity(0))
    # Asked first: a cluster needs no GPU and no cores of this machine.
    if args.cluster is not None:
        return RayPool(order, args.cluster)
    if args.devices is not None:
        return LocalPool(order, list_gpu_slots(args.devices, torch.cuda.device_count(), cores))
    # Workers that share a GPU would time each other.
    if order.device == "cuda":
        raise SettingError(
            "workers",
            args.workers,
            "`--devices all` for the GPUs of this machine, or `--device cpu` beside it",
        )
    return LocalPool(order, list_cpu_slots(args.workers, cores))


def _read_result(answer: WarmupAnswer) -> WarmupResult:
    if answer.result is not None:
        return answer.result
    # A dead worker is a result with an error, so that the table has a row for every target.
    return WarmupResult(answer.task.target, None, answer.died, 0.0, 0, 0)
