"""Measures the closed set of tasks and writes the landscape.

    python -m torch_cudal1.training.landscape --device cuda --budget-s 1700 --out DIR [--lanes 12] [--only FAMILY ...]

Run it again with the same DIR, or with `--resume rows.jsonl ...` of earlier ones, to go on:
`DIR/rows.jsonl` has every row that was ever measured, `DIR/landscape.json.gz` the tasks that are
whole, and how they were measured: what goes on must measure in the same way. With several GPUs of a
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
from torch_cudal1.core.settings import Settings
from torch_cudal1.core.version import __version__
from torch_cudal1.device.gpu_state import gpu_state
from torch_cudal1.ir.records import Contract
from torch_cudal1.judge.pool.evaluator import JudgeEvaluator
from torch_cudal1.judge.pool.measured import TrainingTask
from torch_cudal1.judge.pool.score import Rule
from torch_cudal1.judge.pool.slots import fitting
from torch_cudal1.judge.pool.terms import Terms
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.ops import OPS
from torch_cudal1.training.landscape.packed import Landscape, LandscapeError, read, write
from torch_cudal1.training.landscape.rows import Row
from torch_cudal1.training.landscape.survey import ROWS, Progress, Survey, complete, rows_on_record
from torch_cudal1.training.landscape.trusting import Trusting
from torch_cudal1.training.tasks import Split, load_split

__all__ = ["main"]

_LANDSCAPE = "landscape.json.gz"
_MOMENTARY = ("gpu_state",)  # facts of the moment, which differ between two parts
# On shared CPU cores no buckets agree within 2 %: there the paper's rule says what is too far
# apart.
_RULE: dict[str, Rule] = {"cuda": "strict", "cpu": "cudal1"}
_TENSOR_BYTES = 32 << 20  # of the largest tensors of any task on a GPU
# programs in a batch: what the last ones of it take, the other lanes wait (of 12 a fifth of all
# their time)
_PER_LANE = 24
_CONTRACT = Contract(
    assume_finite=True
)  # rewrites such as diag(d) @ x as d * x are right for finite values only


class _Told:
    """A line on stderr every few seconds."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self.last > 5:
            self.last = time.monotonic()
            rate = progress.fresh / max(progress.seconds, 1e-9)
            print(
                f"{progress.rows} rows, {rate:.1f} a second, {progress.seconds:.0f} s: {progress.task}",
                file=sys.stderr,
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 where something basic is wrong. The last line is JSON."""
    args = _parser().parse_args(argv)
    if args.join:
        return _join(args.join, args.out, args.device)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu measures the small set", file=sys.stderr)
        return 1
    torch.set_num_threads(args.threads)
    codec, split = KslCodec(args.device), load_split(args.device)
    number, parts = args.part
    turns = _in_turn(split)[number - 1 :: parts]
    tasks = [task for turn in turns for task in turn if not args.only or task.family in args.only]
    terms = Terms(Settings(), _CONTRACT, device, args.out, rule=_RULE[args.device], trust="own")
    facts = _facts(device, terms)
    if problem := _prepared(args.out, args.resume, facts):
        print(problem, file=sys.stderr)
        return 1
    lanes = fitting(args.lanes, device, _TENSOR_BYTES)
    began, fresh, steps, problem = time.monotonic(), 0, dict[str, float](), ""
    try:
        # A quarter as many trusting processes: they are asked about what is refused only, and are
        # quicker
        with (
            JudgeEvaluator(terms, lanes=lanes) as judge,
            Trusting(device, workers=-(-lanes // 4), folder=args.out) as naive,
        ):
            survey = Survey(args.out, codec, judge, naive, batch=max(16, _PER_LANE * lanes))
            fresh = survey.run(tasks, budget_s=args.budget_s, told=_Told())
            steps = {name: round(seconds, 1) for name, seconds in judge.seconds.most_common()}
    except Cudal1Error as error:
        problem = f"stopped: {error}"
        print(problem, file=sys.stderr)
    rows = rows_on_record(args.out)
    whole = complete(codec, tasks, rows)
    write(args.out / _LANDSCAPE, Landscape(facts, whole))
    outcomes = Counter(row.outcome for listed in rows.values() for row in listed)
    seconds = time.monotonic() - began
    told: dict[str, Any] = {
        "rows": sum(map(len, rows.values())),
        "fresh": fresh,
        "seconds": round(seconds, 1),
        "per_second": round(fresh / seconds, 2),
    }
    told |= {
        "lanes": lanes,
        "tasks": len(tasks),
        "whole": len(whole),
        "outcomes": dict(outcomes),
        "steps_s": steps,
    }
    print(json.dumps(told | ({"problem": problem} if problem else {})))
    return 1 if problem else 0


def _join(parts: Sequence[Path], out: Path, device: Literal["cpu", "cuda"]) -> int:
    """One landscape of the rows in several folders, which one kind of machine measured in one way;
    nothing is measured.
    """
    try:
        facts = _facts_in_common(parts)
    except LandscapeError as error:
        print(error, file=sys.stderr)
        return 1
    if problem := _made(out):
        print(problem, file=sys.stderr)
        return 1
    split = load_split(device)
    tasks = [task for turn in _in_turn(split) for task in turn]
    rows: dict[str, list[Row]] = {}
    for part in parts:
        for task, found in rows_on_record(part).items():
            rows.setdefault(task, []).extend(found)
    whole = complete(KslCodec(device), tasks, rows)
    write(out / _LANDSCAPE, Landscape(facts, whole))
    outcomes = Counter(row.outcome for listed in whole.values() for row in listed)
    print(
        json.dumps(
            {
                "rows": sum(outcomes.values()),
                "tasks": len(tasks),
                "whole": len(whole),
                "outcomes": dict(outcomes),
            }
        )
    )
    return 0


def _facts_in_common(parts: Sequence[Path]) -> dict[str, Any]:
    """Those of the first part. Raises LandscapeError where a part is none, or was measured
    otherwise.
    """
    first, *others = [dict(read(part / _LANDSCAPE).facts) for part in parts]
    for part, other in zip(parts[1:], others, strict=True):
        if differ := _differ(first, other):
            raise LandscapeError(
                f"{part} differs from {parts[0]} in {differ}; expected what was measured in one way"
            )
    return first


def _differ(facts: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return ", ".join(
        name for name in facts if name not in _MOMENTARY and other.get(name) != facts[name]
    )


def _prepared(folder: Path, earlier: Sequence[Path], facts: Mapping[str, Any]) -> str:
    """The folder of the run, with the rows of earlier ones where it has none, and how rows are
    measured in it; or what is wrong.
    """
    if problem := _made(folder):
        return problem
    own = folder / ROWS
    if problem := next(
        filter(
            None,
            (_measured_otherwise(rows, facts) for rows in ([own] if own.exists() else earlier)),
        ),
        "",
    ):
        return problem
    try:
        if earlier and not own.exists():
            own.write_text(
                "".join(f"{path.read_text(encoding='utf-8')}\n" for path in earlier),
                encoding="utf-8",
            )
        if not (folder / _LANDSCAPE).exists():
            write(
                folder / _LANDSCAPE, Landscape(facts, {})
            )  # now: whoever is killed has rows all the same
    except OSError as error:
        return f"cannot begin in {folder}: {error}"
    return ""


def _measured_otherwise(rows: Path, facts: Mapping[str, Any]) -> str:
    """Why rows of an earlier run may not stand beside those of this one, "" if they may."""
    try:
        other = read(rows.parent / _LANDSCAPE).facts
    except LandscapeError as error:
        return f"{rows}: expected a landscape beside it, which says how it was measured: {error}"
    differ = _differ(json.loads(json.dumps(facts)), other)
    return (
        f"{rows} was measured otherwise than now, in {differ}; take another --out, and no --resume of it"
        if differ
        else ""
    )


def _made(folder: Path) -> str:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot begin in {folder}: {error}"
    return ""


def _in_turn(split: Split) -> list[list[TrainingTask]]:
    """Two tasks of every family, one to train on and one held out, then the next two; kinds of
    operations by turns, products last.

    So whatever is whole when the time is up has something of most kinds, and nothing to train on
    without something to test it by.
    """
    families: dict[str, tuple[list[TrainingTask], list[TrainingTask]]] = {}
    for held_out, tasks in enumerate((split.train, split.held_out)):
        for task in tasks:
            families.setdefault(task.family, ([], []))[held_out].append(task)
    kinds: dict[str, list[str]] = {}
    for family in families:
        kinds.setdefault(OPS[family].kind, []).append(family)
    largest = kinds.pop("mm", [])  # three times as many programs as others
    ordered = [
        family for turn in zip_longest(*kinds.values()) for family in turn if family is not None
    ] + largest
    pairs = [list(zip_longest(*families[family])) for family in ordered]
    return [
        [task for task in pair if task is not None]
        for turn in zip_longest(*pairs)
        for pair in turn
        if pair
    ]


def _part(text: str) -> tuple[int, int]:
    """ "2/4" as (2, 4). Raises ValueError."""
    number, parts = map(int, text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(f"part {number} of {parts}")
    return number, parts


def _facts(device: torch.device, terms: Terms) -> dict[str, Any]:
    """What numbers of a landscape are worth nothing without."""
    cuda = device.type == "cuda"
    return {
        "label": "replay",
        "device": device.type,
        "gpu": torch.cuda.get_device_name() if cuda else "",
        "gpu_state": gpu_state(device) if cuda else {},
        "machine": platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "package": __version__,
        "plan": asdict(terms.plan),
        "contract": asdict(terms.contract),
        "rule": terms.rule,
        "clock": "GPU" if terms.queued else "wall",
        "baseline": terms.baseline,
    }


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m torch_cudal1.training.landscape",
        description=(__doc__ or "").splitlines()[0],
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument(
        "--budget-s", type=float, default=1_700.0, help="seconds after which no new batch is begun"
    )
    made.add_argument(
        "--out", type=Path, required=True, help="folder of the journal and the landscape"
    )
    made.add_argument(
        "--resume",
        type=Path,
        nargs="+",
        default=[],
        metavar="ROWS",
        help="rows.jsonl of earlier runs, for an --out without",
    )
    made.add_argument(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="N/M",
        help="the N-th of M parts of the tasks, for one of M GPUs",
    )
    made.add_argument(
        "--join",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="put together what these folders hold",
    )
    made.add_argument("--lanes", type=int, default=1, help="processes that judge at once")
    made.add_argument("--threads", type=int, default=1, help="of PyTorch, in every process")
    made.add_argument(
        "--only", nargs="*", default=[], metavar="FAMILY", help="these operations only"
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
