"""Whole models: inference and one training step under eager, torch.compile and this package.

`python -m benchmarks.bench_models -h` shows the options. Each model runs in its own process under a
time limit, so that a crash or a hang costs only the rows that this model lacks; rows are written
after every phase. Inductor's caches are filled beforehand, for all models at once, because compile
time is not measured here (`bench_warm_start.py` measures it). `report.summarise` says what counts
as a win.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import report
from benchmarks.models import MODELS, Inputs, build
from benchmarks.runner import (
    Call,
    Case,
    Contender,
    Phase,
    Row,
    StartedContender,
    compute_references,
    make_failed_row,
    measure_contenders,
    start_contender,
)
from torch_cudal1.core.telemetry import Event

__all__ = [
    "comma_list_of",
    "kill_group",
    "main",
    "make_child_environment",
    "make_contenders",
    "run_model",
]

_ROOT = Path(__file__).resolve().parent.parent
_EAGER, _COMPILE = "eager", "torch.compile"
_OURS = ("cudal1.accelerate", "cudal1 backend")


def make_contenders(
    phase: Phase, options: Mapping[str, Any]
) -> tuple[list[Contender], list[Contender]]:
    """The baselines, and the package's contenders with `options` (settings of the package), for one
    phase.
    """

    def backend(module: nn.Module, _: Inputs) -> Call:
        return torch.compile(_copy_forward(module), backend=_find_backend(), options=dict(options))

    def accelerate(module: nn.Module, inputs: Inputs) -> Call:
        # here, so that a package that does not import is a failed row and the baselines are still
        # measured
        import cudal1

        return cudal1.accelerate(module, inputs, **options)

    baselines = [
        Contender(_EAGER, lambda module, _: module, baseline=True),
        Contender(_COMPILE, lambda module, _: torch.compile(_copy_forward(module)), baseline=True),
    ]
    if phase == "inference":
        baselines.append(
            Contender(
                "reduce-overhead",
                lambda module, _: torch.compile(_copy_forward(module), mode="reduce-overhead"),
                baseline=True,
            )
        )
    # The wrapper first: it measures whole training steps, and the backend then finds what it
    # decided in the cache they share.
    return baselines, [Contender(_OURS[0], accelerate), Contender(_OURS[1], backend)]


def _copy_forward(module: nn.Module) -> nn.Module:
    """`module` with a copy of its `forward`: Dynamo stores marks such as "skip this frame" with the
    code object, and they would hold for every contender of the process.
    """
    forward = type(module).forward
    copied_forward = types.FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    module.forward = types.MethodType(copied_forward, module)  # type: ignore[method-assign]
    return module


def _find_backend() -> Any:
    """The registered name of the backend, or, in a checkout that is not installed, the backend
    itself.
    """
    if "cudal1" in torch._dynamo.list_backends():
        return "cudal1"
    from torch_cudal1.api.backend import cudal1

    return cudal1


# --- one model, in its own process ----------------------------------------------------------------


def run_model(args: argparse.Namespace) -> None:
    """Measure `args.child` in every phase and keep `args.out` up to date."""
    workload = build(args.child, sizes=args.sizes, device=args.device)
    finished_rows: list[Row] = []
    for phase in args.phases:
        case = Case(workload, phase)
        torch._dynamo.reset()
        baselines, package_contenders = make_contenders(
            phase, {"on_miss": "tune", "budget_s": args.budget_s, "cache_dir": args.cache_dir}
        )
        refs = compute_references(case)
        started: list[StartedContender] = []
        failures: list[Row] = []
        rows: list[Row] = []
        # baselines are timed alone first: a time limit that strikes during a search leaves their rows
        for group in (baselines, package_contenders):
            for contender in group:
                result = _start_with_telemetry(case, contender, refs)
                if isinstance(result, StartedContender):
                    started.append(result)
                else:
                    failures.append(result)
            more_s = args.more_s if group is package_contenders else 0.0
            rows = measure_contenders(
                case,
                started,
                refs,
                rounds=args.rounds,
                eager=_EAGER,
                compiled=_COMPILE,
                more_s=more_s,
            )
            _save_rows(args.out, [*finished_rows, *rows, *failures])
        finished_rows += [*rows, *failures]


def list_fallbacks(events: Sequence[Event]) -> tuple[str, ...]:
    """Why the package ran something other than a choice of its own: a failure, or a graph that it
    could not take.
    """
    return tuple(
        f"{'left out: ' if event.what == 'left_out' else ''}{event.facts.get('reason', '')}"[:300]
        for event in events
        if event.what == "fallback" or (event.stage, event.what) == ("capture", "left_out")
    )


def _start_with_telemetry(
    case: Case, contender: Contender, refs: Sequence[Any]
) -> StartedContender | Row:
    """Start a contender; one of the package carries what telemetry counted meanwhile."""
    if contender.baseline:
        return start_contender(case, contender, refs)
    import cudal1
    from benchmarks.decisions import collect_decisions, describe_explanation
    from torch_cudal1.core import telemetry

    telemetry.reset()
    result = start_contender(case, contender, refs)
    if isinstance(result, StartedContender):
        telemetry_report = telemetry.report()
        result.counters = dict(telemetry_report.counters)
        result.fallbacks = list_fallbacks(telemetry_report.events)
        result.decisions = [
            *collect_decisions(telemetry_report),
            *(
                describe_explanation(cudal1.explain(result.call))
                if contender.name == _OURS[0]
                else []
            ),
        ]
    return result


def prefill(args: argparse.Namespace) -> None:
    """Compile the baselines of one model, so that the caches hold them."""
    workload = build(args.prefill_child, sizes=args.sizes, device=args.device)
    for phase in args.phases:
        case = Case(workload, phase)
        for contender in make_contenders(phase, {})[0]:
            module = case.copy()
            with case.mode():
                case.outputs(contender.start(module, workload.inputs), module, workload.inputs)


def _save_rows(path: Path, rows: Sequence[Row]) -> None:
    report.save(path, {"rows": report.rows_as_json(rows)})


# --- all models -----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; 0 when every expected row is there and verified."""
    args = _parser().parse_args(argv)
    if args.child:
        run_model(args)
        return 0
    if args.prefill_child:
        prefill(args)
        return 0
    # an outer `timeout` must not leave a child on the GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scratch = Path(tempfile.mkdtemp(prefix="cudal1-bench-"))
    try:
        return _run_all(args, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_all(args: argparse.Namespace, scratch: Path) -> int:
    begin = time.monotonic()
    environment = report.environment()
    print(json.dumps(environment), flush=True)
    if args.prefill:
        prefilled = _prefill_all(args, scratch)
        print(f"caches filled in {time.monotonic() - begin:.0f} s: {prefilled}", flush=True)
    rows: list[Row] = []
    for model in args.models:
        remaining_s = args.total_limit_s - (time.monotonic() - begin)
        rows += _run_model_process(args, model, min(args.time_limit_s, remaining_s), scratch)
        print(report.format_table([row for row in rows if row.model == model]), flush=True)
        report.save(args.out, _make_document(args, environment, rows))
    print("\n" + report.format_table(rows))
    value = _make_document(args, environment, rows)
    print(
        json.dumps(
            {
                "out": args.out.name,
                "wall_s": round(time.monotonic() - begin, 1),
                "summary": value["summary"],
            }
        )
    )
    return 0 if all(row.status == "ok" for row in rows) else 1


def _make_document(
    args: argparse.Namespace, environment: Mapping[str, Any], rows: Sequence[Row]
) -> dict[str, Any]:
    names = (
        "models",
        "phases",
        "sizes",
        "device",
        "rounds",
        "more_s",
        "budget_s",
        "time_limit_s",
        "total_limit_s",
        "prefill",
    )
    options = {name: getattr(args, name) for name in names}
    summary = [report.summarise(rows, name) for name in _OURS]
    return report.make_document(
        "models", options, report.rows_as_json(rows), environment=environment, summary=summary
    )


def _run_model_process(
    args: argparse.Namespace, model: str, limit_s: float, scratch: Path
) -> list[Row]:
    """The rows of a model; rows that its process did not deliver are failures with the reason."""
    out = scratch / f"{model}.json"
    if limit_s < 5:
        return _make_missing_rows(args, model, [], "not started: the total limit was reached")
    reason = _run_process(
        [
            "--child",
            model,
            "--out",
            str(out),
            "--cache-dir",
            str(scratch / "cudal1"),
            *_list_common_options(args),
        ],
        scratch,
        limit_s,
    )
    rows = [Row(**row) for row in json.loads(out.read_text())["rows"]] if out.exists() else []
    return rows + _make_missing_rows(args, model, rows, reason)


def _make_missing_rows(
    args: argparse.Namespace, model: str, rows: Sequence[Row], reason: str
) -> list[Row]:
    delivered = {(row.phase, row.contender) for row in rows}
    expected = [
        (phase, c.name)
        for phase in args.phases
        for group in make_contenders(phase, {})
        for c in group
    ]
    return [
        make_failed_row(model, phase, name, reason)
        for phase, name in expected
        if (phase, name) not in delivered
    ]


def _run_process(arguments: list[str], scratch: Path, limit_s: float) -> str:
    """Run this file in a new process group; returns why it delivered less than expected, if it did."""
    errors = scratch / "stderr"
    with errors.open("w") as stderr:
        process = _start_process(arguments, scratch, stderr)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"time limit of {limit_s:.0f} s"
        finally:
            kill_group(process)
    last = errors.read_text(errors="replace").strip().splitlines()[-1:] or [""]
    return f"process ended with code {code}: {last[0][:300]}"


def make_child_environment(scratch: Path) -> dict[str, str]:
    """Variables of a process that imports this checkout and compiles into `scratch`."""
    search_path = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }


def kill_group(process: subprocess.Popen[Any]) -> None:
    """End a process and everything it started in its group, unless the process has already ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start_process(
    arguments: list[str], scratch: Path, stderr: Any, threads: int = 0
) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(_ROOT), environment.get("PYTHONPATH", "")])
    )
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(scratch / "inductor"))
    environment.setdefault("TRITON_CACHE_DIR", str(scratch / "triton"))
    if threads:
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    command = [sys.executable, "-m", "benchmarks.bench_models", *arguments]
    return subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdout=stderr, stderr=stderr, start_new_session=True
    )


def _prefill_all(args: argparse.Namespace, scratch: Path) -> dict[str, str]:
    """All models at once: compiling needs the host's cores, and nothing is timed yet."""
    threads = max(2, len(os.sched_getaffinity(0)) // len(args.models))
    with (scratch / "prefill-stderr").open("w") as log:
        running = {
            m: _start_process(
                ["--prefill-child", m, *_list_common_options(args)], scratch, log, threads
            )
            for m in args.models
        }
        deadline = time.monotonic() + args.prefill_limit_s
        outcome = {}
        for model, process in running.items():
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
                outcome[model] = "ok" if code == 0 else f"code {code}"
            except subprocess.TimeoutExpired:
                outcome[model] = "time limit"
            finally:
                kill_group(process)
    return outcome


def _list_common_options(args: argparse.Namespace) -> list[str]:
    """The options that a child process shares with its parent."""
    pairs = {
        "--sizes": args.sizes,
        "--device": args.device,
        "--rounds": args.rounds,
        "--budget-s": args.budget_s,
    }
    pairs["--more-s"] = args.more_s
    return [
        *(str(part) for pair in pairs.items() for part in pair),
        "--phases",
        ",".join(args.phases),
    ]


def _parser() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_models", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--models",
        type=comma_list_of(MODELS),
        default=list(MODELS),
        help=f"comma-separated, of {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--phases", type=comma_list_of(("inference", "train")), default=["inference", "train"]
    )
    parser.add_argument("--sizes", choices=("full", "small"), default="full" if cuda else "small")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "benchmarks" / "results" / "models.json"
    )
    parser.add_argument(
        "--rounds", type=int, default=60, help="samples per contender and phase, at least 14"
    )
    parser.add_argument(
        "--more-s",
        type=float,
        default=0.0,
        help="seconds more per phase until intervals are narrow",
    )
    parser.add_argument(
        "--budget-s", type=float, default=10.0, help="the package's search budget per region"
    )
    parser.add_argument("--time-limit-s", type=float, default=90.0, help="per model, all phases")
    parser.add_argument(
        "--total-limit-s",
        type=float,
        default=470.0,
        help="whole run; models that do not fit are failed rows",
    )
    parser.add_argument(
        "--prefill",
        action=argparse.BooleanOptionalAction,
        default=cuda,
        help="compile all baselines beforehand",
    )
    parser.add_argument("--prefill-limit-s", type=float, default=120.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--prefill-child", help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", type=Path, help=argparse.SUPPRESS)
    return parser


def comma_list_of(choices: Sequence[str]) -> Any:
    """An argparse type: a comma-separated list of known names."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in choices]:
            raise argparse.ArgumentTypeError(
                f"no {', '.join(unknown)}; expected some of {', '.join(choices)}"
            )
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
