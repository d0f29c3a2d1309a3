"""`cudal1 warmup` with many workers: `--devices`, `--workers`, `--cluster`. Picks the crew and
turns its answers into results.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_cudal1.api.fleet.cluster import RayCrew
from torch_cudal1.api.fleet.local import LocalCrew, cpu_seats, gpu_seats
from torch_cudal1.api.fleet.pool import Crew, carry_out
from torch_cudal1.api.fleet.task import Answer, Order, Task, signature_of
from torch_cudal1.api.fleet.warmup_journal import journal_for
from torch_cudal1.api.recording.replay import read_recording, recorded_calls
from torch_cudal1.api.targets import Loaded, load
from torch_cudal1.api.warmup import WarmupResult
from torch_cudal1.cli.commands import device
from torch_cudal1.cli.view.terminal import ProgressCallback
from torch_cudal1.core.errors import SettingError, TargetError
from torch_cudal1.core.settings import Settings
from torch_cudal1.store.recording_file import ReadBack, Seen

__all__ = ["Warmed", "crew_asked", "warmed"]


@dataclass(frozen=True)
class Warmed:
    """What came of it: results, targets that cannot be used, what an earlier run had finished, and
    other problems.
    """

    results: tuple[WarmupResult, ...]
    unusable: tuple[str, ...]
    resumed: tuple[str, ...]
    problems: tuple[str, ...]


def crew_asked(args: argparse.Namespace) -> bool:
    """Whether more than this process is to work."""
    return args.devices is not None or args.workers is not None or args.cluster is not None


def warmed(
    args: argparse.Namespace, targets: Sequence[str], settings: Settings, progress: ProgressCallback
) -> Warmed:
    """Warm single targets with the crew that was asked for. Raises SettingError for one that this
    machine cannot have.
    """
    if args.devices is not None and args.device == "cpu":
        raise SettingError(
            "devices",
            args.devices,
            "no --device cpu beside it; workers for the CPU are `--workers N`",
        )
    chosen = device.choose("cuda" if args.devices is not None else args.device)
    order = Order(settings.but(cache_dir=settings.cache_dir.absolute()), args.training, chosen)
    unmatched: list[str] = []
    tasks = _tasks(targets, args.recorded, unmatched)
    done = carry_out(tasks, _crew(args, order), journal_for(order, tasks), progress)
    return Warmed(
        tuple(_result(answer) for answer in done.answers if not answer.unusable),
        (*unmatched, *(answer.unusable for answer in done.answers if answer.unusable)),
        tuple(answer.task.target for answer in done.answers if answer.resumed),
        done.problems,
    )


def _tasks(targets: Sequence[str], recording: Path | None, unmatched: list[str]) -> list[Task]:
    """A task a target, or one for each recorded form of its calls; targets that have none are told
    in `unmatched`.
    """
    if recording is None:
        return [Task(target) for target in targets]
    lines = read_recording(recording).seen
    found: list[Task] = []
    for target in targets:
        try:
            (loaded,) = load(target)
            own = [Task(target, signature_of(seen)) for seen in lines if _belongs(loaded, seen)]
            if not own:
                recorded_calls(loaded, ReadBack(lines, ()))  # which says why there are none
        except TargetError as error:
            unmatched.append(str(error))
            continue
        found += own
    return found


def _belongs(loaded: Loaded, seen: Seen) -> bool:
    try:
        recorded_calls(loaded, ReadBack((seen,), ()))
    except TargetError:
        return False
    return True


def _crew(args: argparse.Namespace, order: Order) -> Crew:
    cores = sorted(os.sched_getaffinity(0))
    if args.cluster is not None:
        return RayCrew(order, args.cluster)
    if args.devices is not None:
        return LocalCrew(order, gpu_seats(args.devices, torch.cuda.device_count(), cores))
    if order.device == "cuda":
        raise SettingError(
            "workers",
            args.workers,
            "`--devices all` for the GPUs of this machine, or `--device cpu` beside it",
        )
    return LocalCrew(order, cpu_seats(args.workers, cores))


def _result(answer: Answer) -> WarmupResult:
    if answer.result is not None:
        return answer.result
    return WarmupResult(answer.task.target, None, answer.died, 0.0, 0, 0)
