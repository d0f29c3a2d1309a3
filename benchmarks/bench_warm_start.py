"""From process start to the first answer: with nothing cached (cold) and on a warm cache, each in a
new process.

Contenders: eager; torch.compile with its own caches; this package, as `accelerate` and as a
backend. Every contender has caches of its own, filled by its cold run. A warm process of this
package must build and judge no candidate: its counters are read, and a row where they are not zero
fails. The answer itself is verified after the clock has stopped. The warm processes of all
contenders take turns, in an order that rotates, because the file system's cache is warmer for later
ones.

With `--offline` the warm processes of this package find no program on PATH, and any use of the
network raises; programs that they start all the same are in their row, and a compiler among them
fails it. The other contenders keep both: this package is compared with them as users run them.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import report
from benchmarks.bench_models import comma_list_of, kill_group, make_child_environment
from benchmarks.models import MODELS
from benchmarks.start_child import STARTS

__all__ = ["CONTENDERS", "Start", "check_counters", "main"]

_ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = tuple(STARTS)
_OPTIONS = (
    "models",
    "contenders",
    "sizes",
    "device",
    "runs",
    "budget_s",
    "time_limit_s",
    "offline",
)
_MAX_REASON_CHARS = 600  # characters of what ended a process
_COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "cicc")
# what a process on a warm cache must not do
_NO_SEARCH = (
    "regions_tuned",
    "candidates_built",
    "candidates_judged",
)


@dataclass(frozen=True)
class Start:
    """One line of the results: seconds from process start to the first answer, cold once and warm
    several times.
    """

    model: str
    contender: str
    status: Literal["ok", "failed"]
    reason: str = ""
    verified: bool = False
    error_ratio: float | None = None
    cold_s: float | None = None
    warm_s: float | None = None
    warm_runs_s: Sequence[float] = ()
    stages_s: Mapping[str, float] = field(default_factory=dict)
    cold_counters: Mapping[str, int] = field(default_factory=dict)
    warm_counters: Mapping[str, int] = field(default_factory=dict)
    # without the import of torch and the building of the module, alike for all contenders
    warm_after_import_s: float | None = None
    cold_after_import_s: float | None = None
    started: Sequence[str] = ()  # programs that the warm processes of this package started
    # what the cold process of this package recorded of its measurements and of what runs
    decisions: Sequence[str] = ()


class _ChildFailed(RuntimeError):
    """A measured process did not answer; the message says why."""


def check_counters(cold: Mapping[str, int], warm: Sequence[Mapping[str, int]]) -> str:
    """What is wrong with the counters of this package's processes; empty if nothing.

    A zero in the warm process proves nothing unless the cold one counted something under the same
    name.
    """
    if not any(cold.get(name, 0) for name in _NO_SEARCH):
        return f"the cold process counted none of {', '.join(_NO_SEARCH)}, so the warm counters prove nothing"
    for counters in warm:
        for name in _NO_SEARCH:
            if counters.get(name, 0):
                return f"a warm process has {name} = {counters[name]}; expected 0"
    return ""


def find_fallback(warm: Sequence[Mapping[str, Any]]) -> str:
    """Whether a warm process of this package ran a baseline because something of its own failed,
    and what; empty if not.
    """
    worst = max(warm, key=lambda run: int(run["counters"].get("fallbacks", 0)), default=None)
    if worst is None or not (count := worst["counters"].get("fallbacks", 0)):
        return ""
    why = "; ".join(decision for decision in worst["decisions"] if " fallback " in decision)
    return f"a warm process fell back to its baseline {count} times: {why}"


def find_recompilation(warm: Sequence[Mapping[str, Any]], *, offline: bool) -> str:
    """Whether a warm process of this package made Inductor compile, or (offline) started a
    compiler; empty if not.
    """
    for run in warm:
        if missed := run["inductor"].get("fxgraph_cache_miss", 0):
            return f"a warm process had Inductor compile {missed} graphs again"
        if offline and (compilers := sorted(set(run["started"]) & set(_COMPILERS))):
            return f"a warm process started {', '.join(compilers)}"
    return ""


def compare_with_compile(rows: Sequence[Start]) -> list[dict[str, Any]]:
    """For each start of this package: whether it is no later than a warm torch.compile, and how
    much sooner than a cold one.
    """
    comparisons = []
    for row in rows:
        other = next(
            (
                candidate
                for candidate in rows
                if candidate.model == row.model and candidate.contender == "torch.compile"
            ),
            None,
        )
        if (
            not row.contender.startswith("cudal1")
            or row.warm_s is None
            or other is None
            or other.warm_s is None
        ):
            continue
        assert other.cold_s is not None
        assert other.cold_after_import_s is not None
        assert row.warm_after_import_s is not None
        comparisons.append(
            {
                "model": row.model,
                "contender": row.contender,
                "not_later_than_warm_compile": row.warm_s <= other.warm_s,
                "sooner_than_cold_compile": other.cold_s / row.warm_s,
                "sooner_than_cold_compile_after_import": other.cold_after_import_s
                / row.warm_after_import_s,
            }
        )
    return comparisons


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every contender on every model; 0 when all rows are "ok"."""
    args = _parser().parse_args(argv)
    # an outer `timeout` must not leave a child on the GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment, rows = report.environment(), []
    print(json.dumps(environment), flush=True)
    deadline = time.monotonic() + args.total_limit_s
    options = {name: getattr(args, name) for name in _OPTIONS}
    for model in args.models:
        for row in _measure_model(args, model, deadline):
            rows.append(row)
            print(_format_row(row), flush=True)
            row_values = [asdict(r) for r in rows]
            report.save(
                args.out,
                report.make_document(
                    "warm_start",
                    options,
                    row_values,
                    environment=environment,
                    goals=compare_with_compile(rows),
                ),
            )
    print(
        json.dumps(
            {
                "out": args.out.name,
                "goals": compare_with_compile(rows),
                "rows": [_drop_counters(row) for row in rows],
            }
        )
    )
    return 0 if all(row.status == "ok" for row in rows) else 1


def _drop_counters(row: Start) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if "counters" not in name}


def _measure_model(args: argparse.Namespace, model: str, deadline: float) -> list[Start]:
    """All contenders on one model: the cold process of each, then rounds of warm ones. A contender
    that fails once gets no further process.
    """
    scratch = Path(tempfile.mkdtemp(prefix="cudal1-start-"))
    names: list[str] = args.contenders
    runs: dict[str, list[dict[str, Any]]] = {contender: [] for contender in names}
    failures: dict[str, str] = {}
    round_s = 0.0
    try:
        for index in range(1 + args.runs):
            begin = time.monotonic()
            if index > 1 and begin + 1.2 * round_s > deadline:
                # fewer warm runs for all, rather than a last round that only some would finish
                break
            turn = index % len(names)
            for contender in (*names[turn:], *names[:turn]):
                if contender in failures:
                    continue
                limit_s = min(args.time_limit_s, deadline - time.monotonic())
                contender_folder, state = (
                    scratch / contender.replace(" ", "_"),
                    "warm" if index else "cold",
                )
                try:
                    runs[contender].append(
                        _run_process(args, (model, contender), state, contender_folder, limit_s)
                    )
                except _ChildFailed as error:
                    failures[contender] = str(error)
            round_s = time.monotonic() - begin
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [
        Start(model, name, "failed", reason=failures[name])
        if name in failures
        else _make_row(model, name, runs[name], offline=args.offline)
        for name in names
    ]


def _make_row(
    model: str, contender: str, runs: Sequence[Mapping[str, Any]], *, offline: bool
) -> Start:
    cold, *warm = runs
    reason = next((run["reason"] for run in runs if not run["verified"]), "")
    if not reason and contender.startswith("cudal1"):
        counters = [run["counters"] for run in warm]
        reason = (
            check_counters(cold["counters"], counters)
            or find_fallback(warm)
            or find_recompilation(warm, offline=offline)
        )
    return Start(
        model,
        contender,
        "failed" if reason else "ok",
        reason=reason,
        verified=all(run["verified"] for run in runs),
        error_ratio=max(
            (run["error_ratio"] for run in runs if run["error_ratio"] is not None), default=None
        ),
        cold_s=cold["first_answer_s"],
        warm_s=statistics.median(run["first_answer_s"] for run in warm),
        warm_runs_s=[run["first_answer_s"] for run in warm],
        stages_s={
            name: statistics.median(run["stages_s"][name] for run in warm)
            for name in cold["stages_s"]
        },
        cold_counters=cold["counters"],
        warm_counters=warm[-1]["counters"],
        warm_after_import_s=statistics.median(_after_import_s(run) for run in warm),
        cold_after_import_s=_after_import_s(cold),
        started=sorted({name for run in warm for name in run["started"]}),
        decisions=cold["decisions"],
    )


def _after_import_s(run: Mapping[str, Any]) -> float:
    """Seconds without the import of torch and the building of the module."""
    seconds: Mapping[str, float] = run["stages_s"]
    return sum(seconds[name] for name in seconds if name not in ("import", "build"))


def _run_process(
    args: argparse.Namespace,
    model_and_contender: tuple[str, str],
    state: str,
    scratch: Path,
    limit_s: float,
) -> dict[str, Any]:
    """The last line of output of a new process. Raises _ChildFailed."""
    if limit_s < 1:
        raise _ChildFailed(f"{state} process not started: the total limit was reached")
    offline = args.offline and state == "warm" and model_and_contender[1].startswith("cudal1")
    environment = make_child_environment(scratch)
    command = _make_command(args, model_and_contender, state, scratch)
    if offline:
        command.append("--offline")
        environment = _hide_programs(environment, scratch)
    # one clock for all processes of a Linux machine
    command += ["--spawned", repr(time.monotonic())]
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise _ChildFailed(f"{state} process: time limit of {limit_s:.0f} s") from None
    finally:
        kill_group(process)
    if process.returncode:
        raise _ChildFailed(
            f"{state} process ended with code {process.returncode}: {_find_error_line(errors)}"
        )
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer


def _make_command(
    args: argparse.Namespace, model_and_contender: tuple[str, str], state: str, scratch: Path
) -> list[str]:
    options = {
        "--sizes": args.sizes,
        "--device": args.device,
        "--budget-s": args.budget_s,
        "--cache-dir": scratch / "cudal1",
    }
    words = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "benchmarks.start_child", *model_and_contender, state, *words]


def _find_error_line(errors: str) -> str:
    """The last line that names an exception, else the last one: advice may follow the exception."""
    lines = errors.strip().splitlines() or [""]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failed)\b", line)]
    return (named or lines)[-1][:_MAX_REASON_CHARS]


def _hide_programs(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The environment without a program on PATH. Variables that name a compiler stay, for they are
    part of what Inductor calls its files: that none of them is started is what the row is looked
    through for.
    """
    empty = scratch / "no-programs"
    empty.mkdir(exist_ok=True)
    return {**environment, "PATH": str(empty)}


def _format_row(row: Start) -> str:
    if row.cold_s is None or row.warm_s is None:
        return f"{row.model:16} {row.contender:20} failed: {row.reason}"
    stages = ", ".join(f"{name} {value:.2f}" for name, value in row.stages_s.items())
    note = "" if row.status == "ok" else f"  failed: {row.reason}"
    return f"{row.model:16} {row.contender:20} cold {row.cold_s:7.2f} s  warm {row.warm_s:6.2f} s ({stages}){note}"


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_warm_start", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--models",
        type=comma_list_of(MODELS),
        default=["bert_base_b1"],
        help=f"of {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--contenders",
        type=comma_list_of(CONTENDERS),
        default=list(CONTENDERS),
        help=f"of {', '.join(CONTENDERS)}",
    )
    parser.add_argument("--sizes", choices=("full", "small"), default="full" if cuda else "small")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "benchmarks" / "results" / "warm_start.json"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="warm processes each, fewer near the total limit; the median counts",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=10.0,
        help="the package's search budget per region, cold process only",
    )
    parser.add_argument("--time-limit-s", type=float, default=120.0, help="per process")
    parser.add_argument(
        "--total-limit-s",
        type=float,
        default=300.0,
        help="whole run; what does not fit is a failed row",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="the package's warm processes: no network, no program on PATH",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
