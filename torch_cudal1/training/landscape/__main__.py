"""Measures the closed set of tasks and writes the landscape.

    python -m torch_cudal1.training.landscape --device cuda --budget-s 1700 --out DIR [--lanes 12] [--only FAMILY ...]

Run it again with the same DIR, or with `--resume rows.jsonl ...` of earlier ones, to go on:
`DIR/rows.jsonl` has every row that was ever measured, `DIR/landscape.json.gz` the tasks whose
programs are all measured, and how they were measured: a run that goes on must measure in the same
way. With several GPUs of a
kind, one process for each with `--part 1/4` and so on, `CUDA_VISIBLE_DEVICES` and a DIR of its own;
then `--join` with the DIRs of all puts them together, on any machine. It stops with a message where
a reference cannot be judged, or nothing can be judged on this machine; what was measured before is
kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.device.gpu_state import read_gpu_state
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.judge_evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.score import ScoreRule
from torch_cudal1.judge.pool.slots import count_fitting_slots
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.ops import OPS
from torch_cudal1.training.landscape.landscape_file import (
    Landscape,
    LandscapeError,
    read_landscape,
    write_landscape,
)
from torch_cudal1.training.landscape.naive_pool import NaivePool
from torch_cudal1.training.landscape.rows import LandscapeRow
from torch_cudal1.training.landscape.survey import (
    ROWS,
    Survey,
    SurveyProgress,
    read_rows,
    select_complete_tasks,
)
from torch_cudal1.training.tasks import Split, load_split

__all__ = ["main"]

_LANDSCAPE = "landscape.json.gz"
# Clocks, temperature and power of the moment: two parts of one landscape, which ran at different
# times, differ in them.
_MOMENTARY_FACTS = ("gpu_state",)
# On shared CPU cores no buckets agree within 2 %: there the paper's rule says what is too far
# apart.
_RULE: dict[str, ScoreRule] = {"cuda": "strict", "cpu": "cudal1"}
# The largest tensors of any task on a GPU. Memory limits the number of lanes: 14 of them with two
# inputs of 64 MiB did not fit into the 140 GiB of an H200.
_TENSOR_BYTES = 32 << 20
# programs of a batch for each lane: while the last ones are measured the other lanes wait (of 12
# lanes a fifth of all their time)
_PER_LANE = 24
# Rewrites such as diag(d) @ x as d * x are right for finite values only.
_CONTRACT = Contract(assume_finite=True)


class _ProgressPrinter:
    """Prints a line of progress on stderr every few seconds."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, progress: SurveyProgress) -> None:
        if time.monotonic() - self.last > 5:
            self.last = time.monotonic()
            rate = progress.fresh / max(progress.seconds, 1e-9)
            print(
                f"{progress.rows} rows, {rate:.1f} a second, {progress.seconds:.0f} s: {progress.task}",
                # stdout has the summary alone, whose last line is JSON.
                file=sys.stderr,
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 1 where the machine or the arguments are at fault. The last line
    on stdout is JSON.
    """
    args = _build_parser().parse_args(argv)
    # Before the device is looked for: parts are joined on any machine.
    if args.join:
        return _join_landscapes(args.join, args.out, args.device)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu measures the small set", file=sys.stderr)
        return 1
    # Before any process is forked, which inherits it. Several lanes with a thread for each core
    # would disturb each other's timings.
    torch.set_num_threads(args.threads)
    return _measure_landscape(args, device)


def _measure_landscape(args: argparse.Namespace, device: torch.device) -> int:
    codec = KslCodec(args.device)
    number, parts = args.part
    # Every M-th pair of tasks: each part gets all kinds, and a pair to train on and to test stays
    # in one part.
    turns = _order_tasks(load_split(args.device))[number - 1 :: parts]
    tasks = [task for turn in turns for task in turn if not args.only or task.family in args.only]
    measurement_settings = MeasurementSettings(
        Settings(), _CONTRACT, device, args.out, rule=_RULE[args.device], trust="own"
    )
    facts = _describe_conditions(device, measurement_settings)
    # Before the judge starts its processes, which takes the better part of a minute with many
    # lanes.
    if refusal := _prepare_folder(args.out, args.resume, facts):
        print(refusal, file=sys.stderr)
        return 1
    lanes = count_fitting_slots(args.lanes, device, _TENSOR_BYTES)
    start_s, new_rows, step_seconds, problem = time.monotonic(), 0, dict[str, float](), ""
    try:
        # a quarter as many naive processes: they are asked about refused programs only, and are
        # quicker
        with (
            JudgeEvaluator(measurement_settings, slots=lanes) as judge,
            NaivePool(device, workers=-(-lanes // 4), folder=args.out) as naive,
        ):
            survey = Survey(args.out, codec, judge, naive, batch=max(16, _PER_LANE * lanes))
            new_rows = survey.run(tasks, budget_s=args.budget_s, report=_ProgressPrinter())
            step_seconds = {
                name: round(seconds, 1) for name, seconds in judge.seconds.most_common()
            }
    # Not raised: rows that were measured before the fault are in the journal, and the complete
    # tasks among them are published below.
    except Cudal1Error as error:
        problem = f"stopped: {error}"
        print(problem, file=sys.stderr)
    rows = read_rows(args.out)
    complete_tasks = select_complete_tasks(codec, tasks, rows)
    # Complete tasks only: a look-up in a landscape must never miss.
    write_landscape(args.out / _LANDSCAPE, Landscape(facts, complete_tasks))
    seconds = time.monotonic() - start_s
    summary: dict[str, Any] = {
        "rows": sum(map(len, rows.values())),
        "fresh": new_rows,
        "seconds": round(seconds, 1),
        "per_second": round(new_rows / seconds, 2),
        "lanes": lanes,
        "tasks": len(tasks),
        "whole": len(complete_tasks),
        "outcomes": _count_outcomes(rows),
        "steps_s": step_seconds,
    }
    print(json.dumps(summary | ({"problem": problem} if problem else {})))
    # The landscape was written all the same; the exit code says that it may be shorter than the
    # budget allows.
    return 1 if problem else 0


def _join_landscapes(parts: Sequence[Path], out: Path, device: Literal["cpu", "cuda"]) -> int:
    """Join the rows in several folders, measured by one kind of machine in one way, into one
    landscape. Nothing is measured.
    """
    try:
        # Facts are compared before any row is read: rows of another clock, rule or baseline are
        # other quantities.
        facts = _read_common_facts(parts)
    except LandscapeError as error:
        print(error, file=sys.stderr)
        return 1
    if refusal := _make_folder(out):
        print(refusal, file=sys.stderr)
        return 1
    split = load_split(device)
    tasks = [task for turn in _order_tasks(split) for task in turn]
    rows: dict[str, list[LandscapeRow]] = {}
    for part in parts:
        for task, task_rows in read_rows(part).items():
            rows.setdefault(task, []).extend(task_rows)
    complete_tasks = select_complete_tasks(KslCodec(device), tasks, rows)
    write_landscape(out / _LANDSCAPE, Landscape(facts, complete_tasks))
    summary = {
        "rows": sum(map(len, complete_tasks.values())),
        "tasks": len(tasks),
        "whole": len(complete_tasks),
        "outcomes": _count_outcomes(complete_tasks),
    }
    print(json.dumps(summary))
    return 0


def _count_outcomes(rows: Mapping[str, Sequence[LandscapeRow]]) -> dict[str, int]:
    return dict(Counter(row.outcome for task_rows in rows.values() for row in task_rows))


def _read_common_facts(parts: Sequence[Path]) -> dict[str, Any]:
    """Return the facts of the first part. Raises LandscapeError where a folder holds no landscape,
    or one that was measured in another way.
    """
    first, *other_facts = [dict(read_landscape(part / _LANDSCAPE).facts) for part in parts]
    for part, other in zip(parts[1:], other_facts, strict=True):
        if differ := _list_differences(first, other):
            raise LandscapeError(
                f"{part} differs from {parts[0]} in {differ}; expected what was measured in one way"
            )
    return first


def _list_differences(facts: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(
        name for name in facts if name not in _MOMENTARY_FACTS and other.get(name) != facts[name]
    )


def _prepare_folder(
    folder: Path, earlier: Sequence[Path], facts: Mapping[str, Any]
) -> Refusal | None:
    """Make the folder of the run: with the rows of earlier runs if it has none, and with a
    landscape file that says how they are measured.
    """
    if refusal := _make_folder(folder):
        return refusal
    rows_path = folder / ROWS
    # Rows in the folder itself win over `--resume`: a run that is repeated with the same arguments
    # goes on from its own rows.
    for path in [rows_path] if rows_path.exists() else earlier:
        if refusal := _find_mismatch(path, facts):
            return refusal
    try:
        if earlier and not rows_path.exists():
            rows_path.write_text(
                # A newline after each part: a journal that a kill cut short ends without one, and
                # the next row must not be appended to the half line. Empty lines are no rows.
                "".join(f"{path.read_text(encoding='utf-8')}\n" for path in earlier),
                encoding="utf-8",
            )
        if not (folder / _LANDSCAPE).exists():
            # before the first row: a run that is killed leaves rows that another can go on from
            write_landscape(folder / _LANDSCAPE, Landscape(facts, {}))
    except OSError as error:
        return Refusal(f"cannot begin in {folder}: {error}")
    return None


def _find_mismatch(rows: Path, facts: Mapping[str, Any]) -> Refusal | None:
    """Return why rows of an earlier run cannot be mixed with rows of this one; None if they can."""
    try:
        earlier_facts = read_landscape(rows.parent / _LANDSCAPE).facts
    except LandscapeError as error:
        return Refusal(
            f"{rows}: expected a landscape beside it, which says how it was measured: {error}"
        )
    # Through JSON, as the earlier facts were: tuples of a plan come back as lists.
    differences = _list_differences(json.loads(json.dumps(facts)), earlier_facts)
    if not differences:
        return None
    return Refusal(
        f"{rows} was measured otherwise than now, in {differences}; "
        "take another --out, and no --resume of it"
    )


def _make_folder(folder: Path) -> Refusal | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Refusal(f"cannot begin in {folder}: {error}")
    return None


def _order_tasks(split: Split) -> list[list[TrainingTask]]:
    """Order the tasks in turns. A turn holds two tasks of one family, one to train on and one held
    out; kinds of operations alternate, products come last.

    When the time is up, the complete tasks are therefore of most kinds, and each task to train on
    has a held-out counterpart.
    """
    families: dict[str, tuple[list[TrainingTask], list[TrainingTask]]] = {}
    for held_out, tasks in enumerate((split.train, split.held_out)):
        for task in tasks:
            families.setdefault(task.family, ([], []))[held_out].append(task)
    kinds: dict[str, list[str]] = {}
    for family in families:
        kinds.setdefault(OPS[family].kind, []).append(family)
    # Products have three times as many programs, so they come last: other kinds are complete when
    # the time is up.
    product_families = kinds.pop("mm", [])
    ordered = [
        family for turn in zip_longest(*kinds.values()) for family in turn if family is not None
    ] + product_families
    pairs = [list(zip_longest(*families[family])) for family in ordered]
    return [
        [task for task in pair if task is not None]
        for turn in zip_longest(*pairs)
        for pair in turn
        if pair
    ]


def _parse_part(text: str) -> tuple[int, int]:
    """ "2/4" as (2, 4). Raises ValueError."""
    number, parts = map(int, text.split("/"))
    # argparse turns a ValueError into its usage message.
    if not 1 <= number <= parts:
        raise ValueError(f"part {number} of {parts}")
    return number, parts


def _describe_conditions(
    device: torch.device, measurement_settings: MeasurementSettings
) -> dict[str, Any]:
    """How a landscape is measured. Rows that were measured in another way cannot be mixed with it."""
    cuda = device.type == "cuda"
    return {
        "label": "replay",
        "device": device.type,
        "gpu": torch.cuda.get_device_name() if cuda else "",
        "gpu_state": read_gpu_state(device) if cuda else {},
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "package": __version__,
        # All that decides what a speed-up is: a change of any of these makes new rows incomparable
        # with old ones.
        "plan": asdict(measurement_settings.plan),
        "contract": asdict(measurement_settings.contract),
        "rule": measurement_settings.rule,
        "clock": "GPU" if measurement_settings.queued else "wall",
        "baseline": measurement_settings.baseline,
    }


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_cudal1.training.landscape",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument(
        "--budget-s", type=float, default=1_700.0, help="seconds after which no new batch is begun"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the journal and the landscape"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="+",
        default=[],
        metavar="ROWS",
        help="rows.jsonl of earlier runs, for an --out without",
    )
    parser.add_argument(
        "--part",
        type=_parse_part,
        default=(1, 1),
        metavar="N/M",
        help="the N-th of M parts of the tasks, for one of M GPUs",
    )
    parser.add_argument(
        "--join",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="put together what these folders hold",
    )
    parser.add_argument("--lanes", type=int, default=1, help="processes that judge at once")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, in every process")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="FAMILY", help="these operations only"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
