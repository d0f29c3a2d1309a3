"""One lane of the evaluator: an oracle process with references, and a process for each candidate,
judged in the `train` profile.

    contract -> load -> compile -> validate (beside other lanes) -> time (alone on the GPU) -> re-verify if it surprises

It is the judge's own protocol (`judge.checks.validate`, `judge.benchmark.quick`,
`judge.evaluate.confirm`) with two things changed for speed: processes are forked
(`judge.sandbox.fork_server`) one ahead, and the denominator is eager alone, as in the paper, unless
asked otherwise. Whatever a program does wrong is a `Measured` value. A reference that cannot be
used raises TargetError with the task's name; a machine that cannot judge raises SandboxError. It
keeps no scores: see `measure`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from secrets import randbits
from typing import TypeAlias

import torch

from torch_cudal1.core.errors import SandboxError, TargetError
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer
from torch_cudal1.judge.benchmark.quick import CLOCK_CHECKS, PreparedBenchmark, prepare_benchmark
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.registry import select_checks
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.static.contract import check_source_contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.evaluate.confirm import confirm_measurement
from torch_cudal1.judge.evaluate.decide import Unstable
from torch_cudal1.judge.evaluate.source_baselines import (
    Baselines,
    load_eager_baseline,
    name_slot,
    rank_source_baselines,
)
from torch_cudal1.judge.pool.failures import classify_failure
from torch_cudal1.judge.pool.gpu_rw_lock import GpuReadWriteLock
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.measurement_settings import MeasurementSettings
from torch_cudal1.judge.pool.processes import Processes
from torch_cudal1.judge.pool.score import score_of
from torch_cudal1.judge.profiles import profile_for
from torch_cudal1.judge.reference.input_set import ReferenceCache
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import (
    SourceCandidate,
    SourceReference,
    load_module,
    read_reference,
)
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.worker.kernel_compile import has_kernels

__all__ = ["Slot", "Iteration", "OutOfDeviceMemory"]

Clock: TypeAlias = Callable[[Trial, ChildBatchTimer, TimingPlan], PreparedBenchmark]
# of a program whose buckets are too far apart: another race costs less than all that came before it
_RACES = 3
_NO_MEMORY = "CUDA out of memory"  # torch.OutOfMemoryError, as another process tells it
_REFERENCES = 16  # that one oracle process holds before it is replaced
_SHARED_BYTES = (
    64 << 20
)  # of one input set: sets of smaller ones are drawn once for all programs of a reference
_REFERENCE = "reference"


class OutOfDeviceMemory(TargetError):
    """This GPU has too little memory left for one more lane at this task."""

    def __str__(self) -> str:
        return f"task {self.target}: this GPU has too little memory left to judge it, use fewer lanes: {self.problem}"


@dataclass(frozen=True)
class Iteration:
    """One measurement, and how many seconds each step of it took."""

    measured: Measured
    seconds: dict[str, float]


@dataclass
class _Bench:
    reference: SourceReference
    examples: list[torch.Tensor]
    reference_cache: ReferenceCache = field(default_factory=dict)
    baselines: Baselines | None = None


@dataclass
class _Watch:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    def moved(self, name: str, to: str, seconds: float) -> None:
        """Count some of a step's time as another's."""
        self.seconds[name] -= seconds
        self.seconds[to] = self.seconds.get(to, 0.0) + seconds


class Slot:
    """Measures programs one after the other. Use it as a context manager, from one thread."""

    def __init__(self, terms: MeasurementSettings, clock: Clock = prepare_benchmark) -> None:
        self.terms, self._clock = terms, clock
        self._stack = ExitStack()
        self._gate, self._processes = GpuReadWriteLock(terms.folder, terms.device), Processes(terms)
        self._stack.callback(self._gate.close)
        self._stack.callback(self._processes.close)
        self._oracle: Child | None = None
        self._benches: dict[str, _Bench] = {}
        self._at = ""  # the reference that was measured last
        self._checks: tuple[CheckSpec, ...] = ()  # of the program that is measured

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        self._dismiss()
        self._stack.close()

    def measure(
        self,
        task: TrainingTask,
        program: Decoded,
        best: float | None = None,
        validated: bool = False,
    ) -> Iteration:
        """Judge one program. `best`: the task's highest score so far. `validated`: it was found
        right before, so it is only raced again, which looks at results of timed calls too. Raises
        TargetError, SandboxError.
        """
        watch = _Watch()
        self._checks = (NUMERICS,) if validated else select_checks(profile_for("train"))
        candidate = SourceCandidate(program.source)
        checks = check_source_contract(candidate)
        found: tuple[float, tuple[float, ...]] | CheckResult
        if failed := _failed(checks):
            found = replace(failed, name="compile")
        else:
            try:
                found = self._judged(task.reference, candidate, watch, best)
                if self._lacked_memory(found):
                    found = self._judged_again(task, candidate, watch, best)
                elif (
                    isinstance(found, CheckResult)
                    and found.name == "wall_slope"
                    and classify_failure(found, self.terms.device) == "hack"
                ):
                    found = self._accused_again(
                        found, self._judged(task.reference, candidate, watch, best)
                    )
            except torch.OutOfMemoryError:
                found = self._judged_again(task, candidate, watch, best)
            except ReferenceFailure as error:
                raise TargetError(
                    task.id, f"its reference cannot be used: {error.found}"
                ) from error
        if isinstance(found, CheckResult):
            kind = classify_failure(found, self.terms.device)
            measured = Measured(
                task.id, program.program, kind, detail=f"{found.name}: {found.detail}"[:600]
            )
        else:
            measured = Measured(task.id, program.program, "ok", found[0], buckets=found[1])
        return Iteration(measured, watch.seconds)

    def _judged_again(
        self, task: TrainingTask, candidate: SourceCandidate, watch: _Watch, best: float | None
    ) -> tuple[float, tuple[float, ...]] | CheckResult:
        """After this process ran out of the GPU's memory: with all of it given back. Raises
        OutOfDeviceMemory if it is not enough.
        """
        self._dismiss()
        self._processes.empty()
        gc.collect()
        torch.cuda.empty_cache()
        try:
            found = self._judged(task.reference, candidate, watch, best)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(task.id, str(error)) from error
        except ReferenceFailure as error:
            raise TargetError(task.id, f"its reference cannot be used: {error.found}") from error
        # Whether the program takes too much or others do, nobody knows: it has no score, and is
        # asked again when it comes again.
        return (
            replace(found, name="unstable")
            if isinstance(found, CheckResult) and self._lacked_memory(found)
            else found
        )

    @staticmethod
    def _accused_again(
        first: CheckResult, second: tuple[float, tuple[float, ...]] | CheckResult
    ) -> CheckResult:
        """Two clocks may differ by chance on a busy machine. In two processes: a cheat. In one: no
        score, which is no verdict.
        """
        return second if isinstance(second, CheckResult) else replace(first, name="unstable")

    def _lacked_memory(self, found: object) -> bool:
        """Whether a process of the candidate found no memory on the GPU."""
        return (
            isinstance(found, CheckResult)
            and self.terms.device.type == "cuda"
            and _NO_MEMORY in found.detail
        )

    def _judged(
        self, reference: str, candidate: SourceCandidate, watch: _Watch, best: float | None
    ) -> tuple[float, tuple[float, ...]] | CheckResult:
        """The score with its bucket means, or the check that failed. Raises ReferenceFailure."""
        with watch.step("start"):
            self._processes.begin()  # while the oracle starts
            bench = self._bench(reference)
            child = self._processes.lend()
        child.sharing = self._gate
        found: tuple[float, tuple[float, ...]] | CheckResult = CheckResult(
            "resource", False, detail="it was not finished"
        )
        try:
            trial = Trial(
                *(
                    bench.reference,
                    candidate,
                    self.terms.contract,
                    self.terms.device,
                    child,
                    bench.examples,
                ),
                profile=profile_for("train"),
                gradients=self.terms.gradients,
                is_alone_on_device=False,
                reference_cache=bench.reference_cache
                if sum(spec.size_bytes for spec in bench.reference.specs) <= _SHARED_BYTES
                else {},
            )
            found = self._tried(trial, bench, watch, best)
        finally:
            self._give_back(child, found)
        if isinstance(found, CheckResult) and found.name == "inputs":
            self._dismiss()
            raise ReferenceFailure("measuring", found.detail)
        return found

    def _tried(
        self, trial: Trial, bench: _Bench, watch: _Watch, best: float | None
    ) -> tuple[float, tuple[float, ...]] | CheckResult:
        with watch.step("load"):
            try:
                trial.load("candidate", trial.candidate)
            except CandidateFailure as error:
                return CheckResult(
                    "compile" if error.detector == "load_source" else error.detector,
                    False,
                    detail=error.found,
                )
        with watch.step("compile"):
            self._compile_ahead(trial)
        gated = [self._lock_out(check, watch) for check in self._checks]
        if failed := _failed(validate(trial, checks=gated).checks):
            return failed
        try:
            return self._timed(trial, bench, watch, best)
        except CandidateFailure as error:
            return CheckResult(error.detector, False, detail=f"{error.stage}: {error.found}")

    def _timed(
        self, trial: Trial, bench: _Bench, watch: _Watch, best: float | None
    ) -> tuple[float, tuple[float, ...]] | CheckResult:
        """Only the race itself holds the GPU alone, again where its buckets are too far apart.
        Raises CandidateFailure.
        """

        def race(one: Trial) -> BenchmarkResult:
            side = self._baseline(one, bench, watch)
            with self._inside(self._gate.shared, watch, "inputs"):
                ready = self._clock(one, side, self.terms.plan)
            for _ in range(_RACES):
                with self._inside(self._gate.alone, watch, "timing"):
                    found = ready.measure()
                if isinstance(self._score(found), float):
                    break
            return self._examined(ready, found, watch) if ready.has_concurrent_checks else found

        def afresh() -> BenchmarkResult:
            with watch.step("again"):
                second = self._processes.second()
            second.sharing = self._gate
            with self._processes.keeping(second) as child, trial.in_new_process(child) as other:
                self._compile_ahead(other)
                return race(other)

        timed = confirm_measurement(race(trial), afresh, best)
        if failed := _failed(timed.checks):
            return failed
        score = self._score(timed)
        return (
            CheckResult("unstable", False, detail=score.reason)
            if isinstance(score, Unstable)
            else (score, _means(timed))
        )

    def _examined(
        self, ready: PreparedBenchmark, found: BenchmarkResult, watch: _Watch
    ) -> BenchmarkResult:
        """Beside others, and clocks that seem false once more without them."""
        with self._inside(self._gate.shared, watch, "examination"):
            timed = ready.run_concurrent_checks(found)
        failed = _failed(timed.checks)
        if failed is not None and failed.name in CLOCK_CHECKS:
            with self._inside(self._gate.alone, watch, "timing"):
                return ready.recheck_clocks(timed)
        return timed

    def _baseline(self, trial: Trial, bench: _Bench, watch: _Watch) -> ChildBatchTimer:
        """What the candidate is raced against: in the oracle's process, or beside a program of ours
        in its own.
        """
        subject = bench.reference
        if self.terms.together:
            load_module(trial.child, _REFERENCE, subject.text, subject.form, subject.way)
            return ChildBatchTimer(trial.child, _REFERENCE, (), queued=self.terms.queued)
        bench.baselines = baselines = bench.baselines or self._ranked(bench, watch)
        return ChildBatchTimer(
            subject.oracle,
            name_slot(subject, baselines.best),
            list(baselines.sets),
            queued=self.terms.queued,
        )

    def _score(self, timed: BenchmarkResult) -> float | Unstable:
        return score_of(_means(timed), self.terms.rule)

    def _ranked(self, bench: _Bench, watch: _Watch) -> Baselines:
        subject, examples = bench.reference, bench.examples
        sets = [
            make_inputs(subject, randbits(62), "normal", self.terms.device, examples=examples)
            for _ in range(2)
        ]
        if self.terms.baseline == "eager":
            with self._inside(self._gate.shared, watch, "baseline"):
                return load_eager_baseline(subject, sets)
        with self._inside(self._gate.alone, watch, "baseline"):
            return rank_source_baselines(subject, sets)

    def _compile_ahead(self, trial: Trial) -> None:
        """What Triton compiles at a first call is not to hold the GPU's lock meanwhile; what is not
        ours runs once for that.
        """
        assert isinstance(trial.candidate, SourceCandidate)
        if self.terms.device.type != "cuda" or not has_kernels(trial.candidate.text):
            return
        try:
            other = trial.in_slot(trial.reference, "ahead")
            if self.terms.trust == "own":
                like = [
                    [list(spec.shape), str(spec.dtype).removeprefix("torch.")]
                    for spec in trial.reference.specs
                ]
                trial.child.call("ahead", slot="ahead", like=like)
                return
            other.reference_cache = {}  # inputs that no later look will use
            sample = other.draw("normal")
            other.run(sample)
            other.drop(sample)
        except CandidateFailure:
            return  # validation meets the same and says what it means

    def _lock_out(self, check: CheckSpec, watch: _Watch) -> CheckSpec:
        """The check behind the lock that keeps it from disturbing a benchmark.

        On a CPU a few calls disturb none. A GPU takes turns between processes, and a single kernel
        of another one shows in a sample.
        """
        way = (
            nullcontext
            if check.is_concurrent and self.terms.device.type == "cpu"
            else self._gate.shared
        )

        def run(trial: Trial) -> list[CheckResult]:
            with self._inside(way, watch, check.label):
                return check.run(trial)

        return replace(check, run=run)

    @contextmanager
    def _inside(
        self, way: Callable[[], AbstractContextManager[None]], watch: _Watch, name: str
    ) -> Iterator[None]:
        """A step that needs the GPU, shared or alone; waiting for it is told apart."""
        with ExitStack() as stack:
            with watch.step("wait"):
                stack.enter_context(way())
            waited_s = self._gate.waited_s
            try:
                with watch.step(name):
                    yield
            finally:
                watch.moved(name, "wait", self._gate.waited_s - waited_s)

    def _bench(self, reference: str) -> _Bench:
        if self._oracle is None or not self._oracle.usable or len(self._benches) >= _REFERENCES:
            self._dismiss()
            self._oracle = self._processes.start("own").result()
            self._oracle.sharing = self._gate
        if reference != self._at:
            self._leave()
            self._at = reference
        if reference not in self._benches:
            try:
                self._benches[reference] = _Bench(
                    *read_reference(self._oracle, reference, self.terms.device)
                )
            except SandboxError as error:
                self._dismiss()
                raise ReferenceFailure(error.stage, error.found) from error
        return self._benches[reference]

    def _leave(self) -> None:
        """Give back what belongs to the reference that was measured last: input sets of one are
        large, here and in the oracle.
        """
        if self.terms.device.type == "cuda":
            self._processes.empty()
        bench = self._benches.get(self._at)
        if bench is None or self._oracle is None:
            return
        bench.reference_cache.clear()
        if bench.baselines is not None:
            try:
                self._oracle.call("drop", names=list(bench.baselines.sets))
            except CandidateFailure:
                self._dismiss()
            bench.baselines = None
        if self.terms.device.type == "cuda":
            torch.cuda.empty_cache()

    def _dismiss(self) -> None:
        if self._oracle is not None:
            self._oracle.close()
        self._oracle, self._benches, self._at = None, {}, ""

    def _give_back(self, child: Child, found: object) -> None:
        """End the process, or keep it for the next of our own programs where this one left it in
        order.
        """
        failed = (
            classify_failure(found, self.terms.device) if isinstance(found, CheckResult) else ""
        )
        in_order = failed != "hack" and not self._lacked_memory(found)
        self._processes.take_back(child, in_order=in_order, doubtful=failed in ("compile", "run"))


def _means(timed: BenchmarkResult) -> tuple[float, ...]:
    return timed.measurement.summary.means


def _failed(checks: Sequence[CheckResult]) -> CheckResult | None:
    return next((check for check in checks if not check.passed), None)
