"""Matrix products: every method and schedule against cuBLAS in fp32 and in TF32, of half types also
against Inductor's code for the product and what follows it; TFLOP/s and error against float64.

    python -m benchmarks.bench_gemm [--budget-s 240] [--processes 16] [--per-case 8] [--only NAME] [--out gemm.json]

Candidates are compiled first, by many processes at once. Another process measures them, one case
after the other, and writes each result to a journal before it goes on: a candidate that hangs or
kills that process is a row with the reason, and a new process measures the others
(`gemm_supervisor`). A second run with the same --out measures what is missing. A candidate is timed
on the device with a cold L2 cache; the best ones of each case are then timed against cuBLAS in
interleaved pairs, of fp32 with host work, of half types as CUDA graphs that call it on several sets of
inputs, one after the other, as the layers of a model do. Errors are those of rows
0-255 of the first matrix, in units of the rms of the result: rms and worst. The benchmark accepts
no kernel for use: that is the task of `torch_cudal1/judge`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks import report
from benchmarks.gemm_cases import CASES, GemmCase
from benchmarks.gemm_supervisor import append_journal, read_journal, supervise
from benchmarks.timing import collect_samples
from torch_cudal1.core.errors import Cudal1Error
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Program
from torch_cudal1.judge.benchmark.timing import measure_device_time_us
from torch_cudal1.judge.wire.transport import read_program, write_payloads
from torch_cudal1.runtime.executor import prepare

__all__ = ["main"]

Inputs: TypeAlias = tuple[torch.Tensor, ...]
Run: TypeAlias = Callable[[Inputs], torch.Tensor]

_CHECKED_ROWS = 256  # of C that are compared with float64
_MAX_METHOD_FAILURES = (
    2  # of this many candidates of one method that hang or crash, the method is left out
)
_MAX_FINALISTS = 3
# Calls of a product in one CUDA graph, each on inputs of its own, and bytes of all these.
_MAX_CHAIN, _CHAIN_BYTES = 8, 2 << 30
_BASELINES = ("cublas fp32", "cublas tf32")
# TF32 does not apply to half types. Inductor leaves the product to cuBLAS, and fuses what follows.
_HALF_BASELINES = ("cublas", "inductor")


@dataclass(frozen=True)
class GemmCandidate:
    """A case and a proposal for it; once compiled its Program (JSON and a file), or the reason why
    it does not compile.
    """

    case: GemmCase
    config: Mapping[str, Any]
    program: Mapping[str, Any] | None = None
    failed: str = ""
    compile_s: float = 0.0

    @property
    def name(self) -> str:
        """Unique among all candidates."""
        parts = [
            f"{k}={v}" for k, v in self.config.items() if k != "method" and v not in (0, False)
        ]
        return f"{self.case.name} / {self.config.get('method', '')} {' '.join(parts)}"


def list_candidates(
    cases: Sequence[GemmCase], sm: int, per_case: int, methods: Sequence[str]
) -> list[GemmCandidate]:
    """The candidates of each case: all in CUDA C++ and the most promising others; only those of
    `methods`, if any are given.
    """
    from torch_cudal1.kernels import propose

    candidates = []
    for case in cases:
        proposals = [
            p
            for p in propose(case.program(), sm, ("matmul",), most=100)
            if not methods or p.config["method"] in methods
        ]
        all_kept = [p for p in proposals if _is_cuda(p.config)]
        others = [p for p in proposals if not _is_cuda(p.config)]
        candidates += [
            GemmCandidate(case, dict(p.config))
            for p in (*all_kept, *_limit_per_method(others, per_case))
        ]
    return candidates


def _is_cuda(config: Mapping[str, Any]) -> bool:
    """Whether the method's kernels are CUDA C++ of ours."""
    return str(config["method"]).startswith(("packed", "wgmma"))


def _limit_per_method(proposals: Sequence[Any], count: int) -> list[Any]:
    """The first `count`, at most half of them of one method."""
    selected: list[Any] = []
    for proposal in proposals:
        same = sum(k.config["method"] == proposal.config["method"] for k in selected)
        if len(selected) < count and same < max(2, count // 2):
            selected.append(proposal)
    return selected


def compile_candidate(candidate: GemmCandidate, sm: int, path: Path) -> GemmCandidate:
    """The candidate with its Program. Runs in a process of the pool."""
    from torch_cudal1.kernels import Proposal, build

    torch.set_num_threads(1)
    begin = time.perf_counter()
    try:
        proposal = Proposal(candidate.case.family, dict(candidate.config))
        program = build(candidate.case.program(), proposal, sm)
    except (Cudal1Error, OSError) as error:
        return replace(
            candidate,
            failed=" ".join(str(error).split())[:300],
            compile_s=time.perf_counter() - begin,
        )
    stored = {"program": program.to_json(), "payloads": write_payloads(program, path)}
    return replace(candidate, program=stored, compile_s=time.perf_counter() - begin)


def load_program(candidate: GemmCandidate) -> Program:
    """The candidate's Program."""
    assert candidate.program is not None
    return read_program(candidate.program["program"], candidate.program["payloads"])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same values and strides."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def _take_first(runner: Runner) -> Run:
    """The first result of a prepared Program."""

    def run(inputs: Inputs) -> torch.Tensor:
        result = runner(list(inputs))[0]
        assert result is not None
        return result

    return run


class GemmMeasurer:
    """The measuring process: one case's inputs, reference and baselines at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, case: GemmCase) -> list[dict[str, Any]]:
        """Make the inputs and the float64 result of the compared rows; returns the rows of the
        baselines.
        """
        self.case, self.inputs = case, case.inputs(str(self.device))
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.inputs)
        copies = min(_MAX_CHAIN, _CHAIN_BYTES // max(1, size)) - 1 if self.runs_in_chains else 0
        self.chain = [self.inputs, *(tuple(map(_copy, self.inputs)) for _ in range(copies))]
        # Dynamo would stop compiling one function for more than a few cases.
        torch._dynamo.reset()
        self.compiled = torch.compile(case.run, dynamic=False)
        rows = [
            t.narrow(t.dim() - 2, 0, min(_CHECKED_ROWS, t.shape[-2])) if self._has_rows(i) else t
            for i, t in enumerate(self.inputs)
        ]
        few = [t[:1] if case.batch else t for t in rows[:2]] + rows[2:]
        self.exact = self._small(replace(case, batch=min(case.batch, 1)), [t.double() for t in few])
        self.scale = float(self.exact[self.exact.isfinite()].pow(2).mean().sqrt())
        return [self.row(name, self.get_baseline(name)) for name in self.baselines()]

    @property
    def runs_in_chains(self) -> bool:
        """Products of half types are so short that eager's launches and Dynamo's guards would be
        measured in their place.
        """
        return self.device.type == "cuda" and self.case.dtype != "float32"

    def _has_rows(self, position: int) -> bool:
        """Whether that input has a row for each row of the result: A and the residual."""
        is_residual = "residual" in self.case.tail and position == len(self.inputs) - 1
        return position == 0 or is_residual

    @staticmethod
    def _small(case: GemmCase, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        result = case.run(tuple(inputs))[0]
        return result[0] if case.batch else result

    def baselines(self) -> tuple[str, ...]:
        """The names of the baselines."""
        return _BASELINES if self.case.dtype == "float32" else _HALF_BASELINES

    def get_baseline(self, name: str) -> Run:
        """cuBLAS through PyTorch, or Inductor. Setting the TF32 switch costs a microsecond of host
        time in both baselines.
        """

        def run(inputs: Inputs) -> torch.Tensor:
            torch.backends.cuda.matmul.allow_tf32 = name.endswith("tf32")
            call = self.compiled if name == "inductor" else self.case.run
            # Of siblings the first is compared; all are computed.
            return call(inputs)[0]

        return run

    def row(self, name: str, run: Run, **more: Any) -> dict[str, Any]:
        """A row: errors, then device time."""
        errors = self.errors(run(self.inputs))
        row: dict[str, Any] = {"case": self.case.name, "name": name, **more, **errors}
        us = measure_device_time_us(self.capture(run), self.device, calls=10) / len(self.chain)
        return {
            **row,
            "device_us": round(us, 2),
            "tflops": round(self.case.flops / us / 1e6, 2) if us else None,
        }

    def capture(self, run: Run) -> Callable[[], torch.Tensor]:
        """What is timed: the call, or for half types a CUDA graph of one on each set of inputs."""
        if not self.runs_in_chains:
            return lambda: run(self.inputs)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(3):
                run(self.inputs)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for inputs in self.chain:
                result = run(inputs)
        # the result lives as long as what writes it
        return lambda: (graph.replay(), result)[1]

    def errors(self, got: torch.Tensor) -> dict[str, Any]:
        """Errors of the compared rows against float64, and whether NaN and infinity are at the same
        places.
        """
        part = (got[0] if self.case.batch else got)[:_CHECKED_ROWS]
        relative_error = (part.double() - self.exact).abs() / self.scale
        finite = self.exact.isfinite()
        # A result of a half type is rounded: bf16 keeps eight bits.
        rounding = self.exact.abs() / self.scale * (0 if part.dtype == torch.float32 else 2**-8)
        wrong = (relative_error > 1e-2 + rounding) & finite
        special = torch.equal(part.isnan(), self.exact.isnan()) and torch.equal(
            part.isinf(), self.exact.isinf()
        )
        facts: dict[str, Any] = {"special": special, "wrong": int(wrong.sum())}
        if facts["wrong"] or not special:
            bad = (wrong | (part.isfinite() != finite)).nonzero()
            facts["first wrong"] = [
                [*at, float(part[*at].nan_to_num()), float(self.exact[*at].nan_to_num())]
                for at in bad[:6].tolist()
            ]
            facts["wrong rows, columns"] = [len(bad[:, 0].unique()), len(bad[:, 1].unique())]
        values = relative_error[finite].nan_to_num(1e30)
        return {**facts, "rms": float(values.pow(2).mean().sqrt()), "worst": float(values.max())}

    def measure(self, candidate: GemmCandidate) -> dict[str, Any]:
        """The row of a candidate."""
        runner = prepare(load_program(candidate), self.device)
        inputs = list(self.inputs)
        first, second = runner(inputs)[0], runner(inputs)[0]
        assert first is not None
        assert second is not None
        same = torch.equal(first.nan_to_num(), second.nan_to_num())
        facts = {
            "method": candidate.config["method"],
            "config": dict(candidate.config),
            "repeats": same,
            "compile_s": round(candidate.compile_s, 2),
        }
        return self.row(candidate.name, _take_first(runner), **facts)

    def try_measure(self, candidate: GemmCandidate) -> dict[str, Any]:
        """`measure`, or the reason why the Program cannot run here."""
        try:
            return self.measure(candidate)
        except Cudal1Error as error:
            return {
                "case": self.case.name,
                "name": candidate.name,
                "method": candidate.config["method"],
                "failed": str(error)[:300],
            }

    def final(self, chosen: Sequence[GemmCandidate]) -> list[dict[str, Any]]:
        """The best candidates against cuBLAS, in pairs."""
        runs = {name: self.get_baseline(name) for name in self.baselines()}
        for candidate in chosen:
            runner = prepare(load_program(candidate), self.device)
            runs[candidate.name] = _take_first(runner)
        chains = {name: self.capture(run) for name, run in runs.items()}
        samples = collect_samples(chains, device=str(self.device), rounds=14)
        rows = []
        for candidate in chosen:
            against = {base: samples.speedup(base, candidate.name) for base in self.baselines()}
            rows.append(
                {
                    "case": self.case.name,
                    "name": candidate.name,
                    "final": True,
                    "us": samples.median_us(candidate.name) / len(self.chain),
                    "against": against,
                }
            )
        return rows


def serve(folder: Path, deadline_s: float) -> int:
    """The measuring process: takes candidates from `folder`, skips those in the journal, and prints
    what it is about to do before it does it.
    """
    cuda = torch.cuda.is_available()
    measurer = GemmMeasurer(torch.device("cuda" if cuda else "cpu"))
    end = time.monotonic() + deadline_s
    candidates = [
        GemmCandidate(GemmCase(**values.pop("case")), **values)
        for values in json.loads((folder / "jobs").read_text())
    ]
    rows_by_name = {row["name"]: row for row in read_journal(folder)}
    finals = {row["case"] for row in rows_by_name.values() if row.get("final")}
    for case in dict.fromkeys(candidate.case for candidate in candidates):
        if case.name in finals or f"{case.name} / final" in rows_by_name:
            continue
        if time.monotonic() > end:
            print("late", flush=True)
            return 0
        of_case = [candidate for candidate in candidates if candidate.case == case]
        _measure_case(measurer, case, of_case, rows_by_name, folder, end)
        del measurer.inputs, measurer.chain, measurer.exact
        if cuda:
            torch.cuda.empty_cache()
    return 0


def _measure_case(
    measurer: GemmMeasurer,
    case: GemmCase,
    candidates: Sequence[GemmCandidate],
    rows_by_name: dict[str, dict[str, Any]],
    folder: Path,
    end: float,
) -> None:
    """The baselines, each candidate that has no row yet, and the pairs of the best ones."""
    print(f"start {case.name} / baselines", flush=True)
    for row in measurer.start(case):
        if f"{case.name} / {row['name']}" not in rows_by_name:
            append_journal(folder, {**row, "name": f"{case.name} / {row['name']}"})
    for candidate in candidates:
        measurable = candidate.program and not _is_given_up(candidate, rows_by_name)
        if candidate.name not in rows_by_name and measurable and time.monotonic() < end:
            print(f"start {candidate.name}", flush=True)
            rows_by_name[candidate.name] = measurer.try_measure(candidate)
            append_journal(folder, rows_by_name[candidate.name])
    rows = [rows_by_name.get(candidate.name, {}) for candidate in candidates]
    best = _pick_finalists([row for row in rows if row.get("tflops")])
    print(f"start {case.name} / final", flush=True)
    if best and time.monotonic() < end:
        for row in measurer.final([c for c in candidates if c.name in best]):
            append_journal(folder, {**row, "name": f"{row['name']} / final"})


def _is_given_up(candidate: GemmCandidate, rows_by_name: Mapping[str, Mapping[str, Any]]) -> bool:
    method = candidate.config["method"]
    failures = [
        row
        for row in rows_by_name.values()
        if row.get("method") == method and "failed" in row and "compile" not in row["failed"]
    ]
    return len(failures) >= _MAX_METHOD_FAILURES


def _pick_finalists(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of the fastest candidates of each precision class."""
    names: set[str] = set()
    for loose in (False, True):
        of_class = [row for row in rows if (row["rms"] > 1e-5) == loose and row["wrong"] == 0]
        # All rows are of a half type, or those of TF32 are beside fp32's.
        count = 1 if loose and len(of_class) < len(rows) else _MAX_FINALISTS - 1
        names |= {row["name"] for row in sorted(of_class, key=lambda row: row["device_us"])[:count]}
    return names


def format_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines for a terminal: of each case the baselines and candidates, fastest first, then the
    pairs.
    """
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case and not row.get("final")]
        yield from map(_format_row, sorted(mine, key=lambda row: row.get("device_us") or 0))
        for row in (row for row in rows if row["case"] == case and row.get("final")):
            ratios = [
                f"{base} {r['speedup']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
                for base, r in row["against"].items()
            ]
            yield f"  final: {row['name'][:100]:92} {row['us']:10.1f} us; {', '.join(ratios)}"


def _format_row(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name'][:100]:100} {row['failed'][:200]}"
    wrong = (
        ""
        if row["special"] and not row["wrong"]
        else f" WRONG {row['wrong']} special={row['special']} {row.get('first wrong')}"
    )
    note = wrong + ("" if row.get("repeats", True) else " DOES NOT REPEAT")
    speed = f"{row['device_us']:10.1f} us {row['tflops'] or 0:7.1f} TFLOP/s"
    return f"{row['name'][:100]:100} {speed} rms {row['rms']:.2e} worst {row['worst']:.2e}{note}"


def _make_compile_failure(candidate: GemmCandidate) -> dict[str, Any]:
    return {
        "case": candidate.case.name,
        "name": candidate.name,
        "method": candidate.config["method"],
        "failed": f"compile: {candidate.failed}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, measure, print, write; 1 when a candidate was wrong, lost or did not compile."""
    args = _parser().parse_args(argv)
    if args.serve:
        return serve(args.serve, args.budget_s)
    environment = report.environment()
    major, minor = environment["capability"] or divmod(args.sm or 90, 10)
    sm = 10 * major + minor
    cases = [
        case for case in CASES if not args.only or any(word in case.name for word in args.only)
    ]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="cudal1-gemm-") as scratch:
        folder = Path(scratch)
        candidates = list_candidates(cases, sm, args.per_case, args.method)
        candidates = _compile_all(candidates, sm, args.processes, folder)
        compile_s = time.perf_counter() - begin
        failed = [_make_compile_failure(candidate) for candidate in candidates if candidate.failed]
        print(
            f"{len(candidates)} candidates compiled in {compile_s:.0f} s, {len(failed)} failed",
            flush=True,
        )
        if candidates and len(failed) == len(candidates):
            print(f"nothing compiles: {failed[0]['failed']}")
            return 1
        (folder / "jobs").write_text(json.dumps([asdict(candidate) for candidate in candidates]))
        for row in report.load(args.out)["rows"] if args.out.exists() else ():
            if not str(row.get("failed", "")).startswith("compile"):
                append_journal(folder, row)
        supervise(folder, args.budget_s)
        rows = [*read_journal(folder), *failed]
    print("\n".join(format_table(rows)))
    options = {
        "budget_s": args.budget_s,
        "per_case": args.per_case,
        "compile_s": round(compile_s, 1),
    }
    shown = {case.name: asdict(case) for case in cases}
    report.save(
        args.out,
        report.make_document("gemm", options, rows, environment=environment, cases=shown),
    )
    return int(any("failed" in row or row.get("wrong") for row in rows))


def _compile_all(
    candidates: Sequence[GemmCandidate], sm: int, processes: int, folder: Path
) -> list[GemmCandidate]:
    paths = [folder / f"program{index}" for index in range(len(candidates))]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_candidate, candidates, [sm] * len(candidates), paths))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_gemm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget-s", type=float, default=240.0, help="for measuring; compiling comes first"
    )
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument(
        "--per-case", type=int, default=8, help="candidates of a case beside those in CUDA C++"
    )
    parser.add_argument("--only", action="append", default=[], help="cases whose name holds this")
    parser.add_argument(
        "--method", action="append", default=[], help="candidates of this method only"
    )
    parser.add_argument(
        "--sm", type=int, default=0, help="architecture to compile for without a GPU"
    )
    parser.add_argument("--out", type=Path, default=Path("gemm.json"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
