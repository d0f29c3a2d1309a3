"""What the judge catches, and what KernelBench's rule does: `python -m benchmarks.catch_rate --out
FILE.json`.

Every case of `tests/adversarial` and its honest twin is evaluated by both. The judge:
`judge.evaluate.source_evaluator` at the weakest profile that must catch the case, timed only where
the case says that time shows it. KernelBench's rule as published: reference and candidate in one
process, modules made from one seed, five trials on random inputs, `allclose` at 1e-4 (today's,
float32) and at 1e-2 (the one before); it is written here from its description, and runs in a
confined child. The rule does not take Programs, so those cases have no answer from it.

A file that exists is continued. `--table` writes docs/judge.md from the committed results;
`--check` only compares.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from benchmarks.report import environment, load, save
from tests.adversarial.case import CaseFile, case_files
from tests.adversarial.fork_server import fork_children
from torch_cudal1.core.settings import Settings
from torch_cudal1.ir.records import Contract, Verdict
from torch_cudal1.judge import EvaluationConfig, validate_candidate
from torch_cudal1.judge.benchmark.timing_plan import TIMING_PLANS
from torch_cudal1.judge.checks.static.contract import contract
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig, SourceEvaluator
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.wire.channel import load_tensors

__all__ = ["SIDES", "TOLERANCES", "apply_kernelbench_rule", "main", "make_table"]

Side: TypeAlias = Literal["cheat", "honest"]
Row: TypeAlias = dict[str, Any]
SIDES: tuple[Side, ...] = ("cheat", "honest")
TOLERANCES = (1e-4, 1e-2)
_ROOT = Path(__file__).resolve().parent.parent
_RESULTS = _ROOT / "benchmarks" / "results" / "catch-rate"
_PAGE = _ROOT / "docs" / "judge.md"
_BEGIN, _END = "<!-- catch rate: begin", "<!-- catch rate: end -->"
_TIMEOUT_S = 30.0  # cases that hang do so for ever
_files: dict[str, CaseFile] = {}  # of a worker process
_RULE = """
import torch

TRIALS, TOLERANCES = 5, {tolerances}
REFERENCE, CANDIDATE = {reference!r}, {candidate!r}


def loaded(text):
    names = {{}}
    exec(compile(text, "source", "exec"), names)
    return names


def seeded(seed, make):
    torch.manual_seed(seed)
    return make()


def rule(device):
    reference, candidate = loaded(REFERENCE), loaded(CANDIDATE)
    given = seeded(42, reference["get_init_inputs"])
    args, kwargs = (given[0], given[1]) if len(given) == 2 and isinstance(given[1], dict) else (given, {{}})
    with torch.no_grad():
        model = seeded(42, lambda: reference["Model"](*args, **kwargs)).to(device)
        new = seeded(42, lambda: candidate["ModelNew"](*args, **kwargs)).to(device)
        passed = [True for _ in TOLERANCES]
        for seed in seeded(42, lambda: [int(torch.randint(0, 2**31 - 1, (1,))) for _ in range(TRIALS)]):
            inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in seeded(seed, reference["get_inputs"])]
            expected = seeded(seed, lambda: model(*inputs))
            found = seeded(seed, lambda: new(*inputs))
            if found.shape != expected.shape:
                return [False for _ in TOLERANCES]
            alike = [torch.allclose(expected, found, atol=limit, rtol=limit) for limit in TOLERANCES]
            passed = [before and now for before, now in zip(passed, alike)]
    return passed


class Model(torch.nn.Module):
    pass


def get_init_inputs():
    return []


def get_inputs():
    return [torch.tensor(rule("{device}"))]
"""


@dataclass(frozen=True)
class _Task:
    """One side of a case; `sha256` of its file, so that a changed case is judged again."""

    case: str
    side: Side
    sha256: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.case, self.side, self.sha256


def apply_kernelbench_rule(reference: str, candidate: str, device: torch.device) -> dict[str, Any]:
    """Whether each tolerance of the rule accepts a candidate; and why neither did, where something
    other than a comparison failed.
    """
    text = _RULE.format(
        tolerances=TOLERANCES, reference=reference, candidate=candidate, device=device.type
    )
    with Child(
        make_limits(Settings(candidate_timeout_s=_TIMEOUT_S), device, trust="foreign"), Contract()
    ) as child:
        path = child.reserve_file()
        try:
            response = child.call("read_source", text=text, entry="Model", seed=0, path=str(path))
        except CandidateFailure as error:
            return {"accepted": [False for _ in TOLERANCES], "reason": error.found[:300]}
        (verdict,) = load_tensors(response["layout"], path, torch.device("cpu"))
    assert verdict is not None
    return {"accepted": [bool(value) for value in verdict.tolist()], "reason": ""}


def make_table(results: Mapping[str, Any]) -> str:
    """Cheats refused and twins accepted, by group of cases; then the names of the wrong verdicts."""
    rows = results["rows"]
    header = [
        "| cases | cheats | refused by the judge | by 5 x allclose, 1e-4 | by 5 x allclose, 1e-2 | twins accepted by the judge |"
    ]
    lines = [*_make_heading(results), "", *header, "|---|---|---|---|---|---|"]
    for group in (*dict.fromkeys(row["group"] for row in rows), ""):
        group_rows = [row for row in rows if group in ("", row["group"])]
        lines.append(f"| {group or '**all**'} | {' | '.join(_make_cells(group_rows))} |")
    wrong = [row for row in rows if row["judge"]["refused"] != (row["side"] == "cheat")]
    lines += ["", f"Wrong verdicts of the judge: {len(wrong) or 'none'}."]
    lines += [f"- `{row['case']}`, {row['side']}: {_describe_verdict(row)}" for row in wrong]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate what --out lacks; or write, or check, the page. 1 when a verdict is wrong or the
    page differs.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.catch_rate", description=__doc__)
    parser.add_argument("--out", type=Path, help="results, continued if the file exists")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="processes; with more than one, what is timed is timed on a busy machine",
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--table",
        action="store_true",
        help="write the table of docs/judge.md from the committed results",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare that table with the committed results"
    )
    args = parser.parse_args(argv)
    if args.table or args.check:
        return _update_page(write=args.table)
    if args.out is None:
        parser.error("--out, --table or --check is needed")
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    files = {file.id: file for file in case_files() if _applies(file, args.device)}
    tasks = [_Task(name, side, _digest(file)) for name, file in files.items() for side in SIDES]
    known_rows = {
        (row["case"], row["side"], row["sha256"]): row
        for row in (load(args.out)["rows"] if args.out.exists() else [])
    }
    machine = environment()
    rows_by_task = {task.key: known_rows[task.key] for task in tasks if task.key in known_rows}
    missing = [task for task in tasks if args.only in task.case and task.key not in rows_by_task]
    for number, (task, row) in enumerate(_evaluate_tasks(missing, args), 1):
        rows_by_task[task.key] = row
        print(
            f"{number}/{len(missing)} {task.case}, {task.side}: {_describe_verdict(row)}",
            flush=True,
        )
        rows = [rows_by_task[task.key] for task in tasks if task.key in rows_by_task]
        command = f"python -m benchmarks.catch_rate --device {args.device} --out {args.out.name}"
        head = {
            "schema": 1,
            "kind": "catch_rate",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
        }
        save(args.out, {**head, "environment": machine, "tolerances": TOLERANCES, "rows": rows})
    return int(
        any(row["judge"]["refused"] != (row["side"] == "cheat") for row in rows_by_task.values())
    )


def _evaluate_tasks(
    tasks: Sequence[_Task], args: argparse.Namespace
) -> Iterator[tuple[_Task, Row]]:
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), _start_worker) as pool:
        running = {pool.submit(_evaluate_task, task, args.device): task for task in tasks}
        for future in as_completed(running):
            try:
                row = future.result()
            except BaseException:
                # or all the others would be judged first, and nothing saved
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            yield running[future], row


def _start_worker() -> None:
    """Set up a worker: its children are forked from one process that has done the imports, which
    saves three starts a task.
    """
    stack = ExitStack()
    stack.enter_context(fork_children())
    atexit.register(stack.close)
    _files.update({file.id: file for file in case_files()})


def _evaluate_task(task: _Task, device_name: str) -> Row:
    device = torch.device(device_name)
    file = _files[task.case]
    case, module = file.case, file.module
    row: Row = {
        "case": task.case,
        "side": task.side,
        "sha256": task.sha256,
        "number": case.number,
        "group": case.group,
    }
    row |= {
        "form": case.form,
        "expected": case.expected,
        "profile": case.first_profile,
        "kernelbench": None,
    }
    if case.form == "program":
        return row | {"judge": _summarise_verdict(_validate_program(file, task.side, device))}
    reference = (
        getattr(module, "TWIN_REFERENCE", module.REFERENCE)
        if task.side == "honest"
        else module.REFERENCE
    )
    candidate = getattr(module, task.side.upper())
    config = SourceEvaluationConfig(
        Settings(candidate_timeout_s=_TIMEOUT_S),
        Contract(),
        device,
        case.first_profile,
        all_pairs=True,
    )
    with SourceEvaluator(config) as evaluator:
        evaluation = evaluator.evaluate(reference, candidate, timed=case.timed)
    return row | {
        "judge": _summarise_verdict(evaluation.verdict),
        "kernelbench": apply_kernelbench_rule(reference, candidate, device),
    }


def _validate_program(file: CaseFile, side: Side, device: torch.device) -> Verdict:
    region, candidate = file.module.reference(), getattr(file.module, side)()
    failed = [each for each in contract(region, candidate) if not each.passed]
    plan = TIMING_PLANS[file.case.first_profile]
    return (
        Verdict(tuple(failed))
        if failed
        else validate_candidate(
            region, candidate, EvaluationConfig(Settings(), Contract(), device, plan=plan)
        )
    )


def _summarise_verdict(verdict: Verdict) -> dict[str, Any]:
    failure = verdict.failure
    if failure is None:
        return {"refused": False, "detector": "", "reason": ""}
    return {"refused": True, "detector": failure.name, "reason": failure.detail[:300]}


def _applies(file: CaseFile, device: str) -> bool:
    """On a GPU all cases, on the CPU those that need none. Attacks on the package's own runtime are
    tests of their own and have no answers here.
    """
    return file.case.form != "runtime" and (file.case.device == "cpu" or device == "cuda")


def _digest(file: CaseFile) -> str:
    return hashlib.sha256(file.path.read_bytes()).hexdigest()


def _describe_verdict(row: Row) -> str:
    answer = row["judge"]
    return (
        f"refused by {answer['detector']}: {answer['reason'][:120]}"
        if answer["refused"]
        else "accepted"
    )


def _make_heading(results: Mapping[str, Any]) -> list[str]:
    where = results["environment"]
    machine = where["gpu"] or where["cpu"]
    return [f"On {machine} with torch {where['torch']}, by `{results['command']}`."]


def _make_cells(rows: Sequence[Row]) -> list[str]:
    cheats, twins = ([row for row in rows if row["side"] == side] for side in SIDES)
    ruled = [row for row in cheats if row["kernelbench"]]
    by_rule = [
        sum(not row["kernelbench"]["accepted"][index] for row in ruled)
        for index in range(len(TOLERANCES))
    ]
    refused, accepted = (
        sum(row["judge"]["refused"] for row in cheats),
        sum(not row["judge"]["refused"] for row in twins),
    )
    return [
        str(len(cheats)),
        _share(refused, len(cheats)),
        *(_share(n, len(ruled)) for n in by_rule),
        _share(accepted, len(twins)),
    ]


def _share(count: int, total: int) -> str:
    return f"{count} of {total}" if total else "-"


def _update_page(*, write: bool) -> int:
    paths = sorted(_RESULTS.glob("*.json"))
    tables = "\n\n".join(make_table(load(path)) for path in paths) or "Not measured yet."
    text = _PAGE.read_text(encoding="utf-8")
    lines = text.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith(_BEGIN))
    page = "\n".join([*lines[: begin + 1], tables, *lines[lines.index(_END) :]]) + "\n"
    if write:
        _PAGE.write_text(page, encoding="utf-8")
        return 0
    return int(text != page)


if __name__ == "__main__":
    sys.exit(main())
