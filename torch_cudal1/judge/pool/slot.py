"""One slot of the evaluator: a reference process, and candidates' processes, in which programs are
evaluated by the `train` profile.

    contract -> load -> compile -> validate (beside other slots) -> time (alone on the GPU)
             -> confirm a surprising score

It follows the judge's protocol (`judge.checks.validate`, `judge.benchmark.quick`,
`judge.evaluate.confirm`) with two changes for speed: processes are forked
(`judge.sandbox.fork_server`) one ahead, and the denominator is eager alone, as in the paper, unless
the settings name another. A failure of a program is a `Measured` value. A reference that cannot be
used raises TargetError with the task's name; a machine that cannot evaluate raises SandboxError.
`pool.judge_evaluator` keeps the scores.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from secrets import randbits
from typing import TypeAlias

import torch

from torch_cudal1.core.errors import TargetError
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.benchmark.candidate_timing import BenchmarkResult
from torch_cudal1.judge.benchmark.cross_process import ChildBatchTimer
from torch_cudal1.judge.benchmark.quick import CLOCK_CHECKS, PreparedBenchmark, prepare_benchmark
from torch_cudal1.judge.benchmark.quoted_speedup import Unstable
from torch_cudal1.judge.benchmark.timing_plan import TimingPlan
from torch_cudal1.judge.checks.numerics import NUMERICS
from torch_cudal1.judge.checks.registry import select_checks
from torch_cudal1.judge.checks.spec import CheckSpec
from torch_cudal1.judge.checks.static.contract import check_source_contract
from torch_cudal1.judge.checks.validate import validate
from torch_cudal1.judge.evaluate.confirm import confirm_measurement
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
from torch_cudal1.judge.pool.reference_process import LoadedReference, ReferenceProcess
from torch_cudal1.judge.pool.score import score_of
from torch_cudal1.judge.pool.stopwatch import Stopwatch
from torch_cudal1.judge.profiles import profile_for
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import SourceCandidate, load_module
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.worker.kernel_compile import has_kernels

__all__ = ["Iteration", "OutOfDeviceMemory", "Slot"]

# A score with its bucket means, or the check that failed.
_Outcome: TypeAlias = tuple[float, tuple[float, ...]] | CheckResult
Clock: TypeAlias = Callable[[Trial, ChildBatchTimer, TimingPlan], PreparedBenchmark]
# For a program whose buckets are too far apart: another benchmark costs less than the validation
# before it.
_MAX_BENCHMARKS = 3
# In the message of torch.OutOfMemoryError, which another process reports as text.
_NO_MEMORY_TEXT = "CUDA out of memory"
# Of one input set: smaller sets are drawn once for all programs of a reference.
_MAX_CACHED_SET_BYTES = 64 << 20
_REFERENCE_SLOT = "reference"


class OutOfDeviceMemory(TargetError):
    """This GPU has too little free memory for this slot at this task."""

    def __str__(self) -> str:
        return f"task {self.target}: this GPU has too little memory left to judge it, use fewer lanes: {self.problem}"


@dataclass(frozen=True)
class Iteration:
    """One measurement, and the seconds of each of its steps."""

    measured: Measured
    seconds: dict[str, float]


class Slot:
    """Measures programs one after the other. Use it as a context manager, from one thread."""

    def __init__(self, config: MeasurementSettings, clock: Clock = prepare_benchmark) -> None:
        self.config, self._clock = config, clock
        self._stack = ExitStack()
        self._gpu_lock = GpuReadWriteLock(config.folder, config.device)
        self._processes = Processes(config)
        self._references = ReferenceProcess(self._processes, config.device, self._gpu_lock)
        self._stack.callback(self._gpu_lock.close)
        self._stack.callback(self._processes.close)
        # Of the program that is measured now.
        self._checks: tuple[CheckSpec, ...] = ()

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Safe to call twice."""
        self._references.close()
        self._stack.close()

    def measure(
        self,
        task: TrainingTask,
        program: Decoded,
        best: float | None = None,
        validated: bool = False,
    ) -> Iteration:
        """Evaluate one program.

        `best`: the task's highest score so far. `validated`: the program was found correct before,
        so only the numerics check precedes the benchmark, which compares results of timed calls
        too. Raises TargetError, SandboxError.
        """
        stopwatch = Stopwatch()
        self._checks = (NUMERICS,) if validated else select_checks(profile_for("train"))
        candidate = SourceCandidate(program.source)
        checks = check_source_contract(candidate)
        outcome: _Outcome
        if failed := _find_failure(checks):
            outcome = replace(failed, name="compile")
        else:
            try:
                outcome = self._evaluate(task.reference, candidate, stopwatch, best)
                if self._has_lacked_memory(outcome):
                    outcome = self._evaluate_with_freed_memory(task, candidate, stopwatch, best)
                elif (
                    isinstance(outcome, CheckResult)
                    and outcome.name == "wall_slope"
                    and classify_failure(outcome, self.config.device) == "hack"
                ):
                    # On a GPU two clocks may differ by chance on a busy machine; an accusation
                    # needs a second process.
                    outcome = self._compare_accusations(
                        outcome, self._evaluate(task.reference, candidate, stopwatch, best)
                    )
            except torch.OutOfMemoryError:
                outcome = self._evaluate_with_freed_memory(task, candidate, stopwatch, best)
            except ReferenceFailure as error:
                raise TargetError(
                    task.id, f"its reference cannot be used: {error.found}"
                ) from error
        if isinstance(outcome, CheckResult):
            kind = classify_failure(outcome, self.config.device)
            measured = Measured(
                task.id, program.program, kind, detail=f"{outcome.name}: {outcome.detail}"[:600]
            )
        else:
            measured = Measured(task.id, program.program, "ok", outcome[0], buckets=outcome[1])
        return Iteration(measured, stopwatch.seconds)

    def _evaluate_with_freed_memory(
        self,
        task: TrainingTask,
        candidate: SourceCandidate,
        stopwatch: Stopwatch,
        best: float | None,
    ) -> _Outcome:
        """Evaluate again after running out of GPU memory, with all memory of this slot freed.

        Raises OutOfDeviceMemory where that is not enough.
        """
        self._references.close()
        self._processes.free_gpu_memory()
        gc.collect()
        torch.cuda.empty_cache()
        try:
            outcome = self._evaluate(task.reference, candidate, stopwatch, best)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(task.id, str(error)) from error
        except ReferenceFailure as error:
            raise TargetError(task.id, f"its reference cannot be used: {error.found}") from error
        # The program may take too much memory, or other processes may. It has no score, and is
        # measured again when it is requested again.
        return (
            replace(outcome, name="unstable")
            if isinstance(outcome, CheckResult) and self._has_lacked_memory(outcome)
            else outcome
        )

    @staticmethod
    def _compare_accusations(first: CheckResult, second: _Outcome) -> CheckResult:
        """The outcome after two evaluations of which the first found clocks that differ.

        In both processes: a cheat. In one only: no score, and no verdict.
        """
        return second if isinstance(second, CheckResult) else replace(first, name="unstable")

    def _has_lacked_memory(self, outcome: object) -> bool:
        """Whether the outcome is that a process found no GPU memory."""
        return (
            isinstance(outcome, CheckResult)
            and self.config.device.type == "cuda"
            and _NO_MEMORY_TEXT in outcome.detail
        )

    def _evaluate(
        self, reference: str, candidate: SourceCandidate, stopwatch: Stopwatch, best: float | None
    ) -> _Outcome:
        """The score with its bucket means, or the check that failed. Raises ReferenceFailure."""
        with stopwatch.step("start"):
            # In parallel to the start of the reference process.
            self._processes.begin()
            loaded = self._references.load(reference)
            child = self._processes.lend()
        child.sharing = self._gpu_lock
        outcome: _Outcome = CheckResult("resource", False, detail="it was not finished")
        try:
            trial = Trial(
                *(
                    loaded.reference,
                    candidate,
                    self.config.contract,
                    self.config.device,
                    child,
                    loaded.examples,
                ),
                profile=profile_for("train"),
                gradients=self.config.gradients,
                # Other slots change the memory in use on the whole GPU, which proves nothing about
                # this program.
                is_alone_on_device=False,
                reference_cache=loaded.reference_cache
                if sum(spec.size_bytes for spec in loaded.reference.specs) <= _MAX_CACHED_SET_BYTES
                else {},
            )
            outcome = self._check_and_time(trial, loaded, stopwatch, best)
        finally:
            self._give_back(child, outcome)
        if isinstance(outcome, CheckResult) and outcome.name == "inputs":
            self._references.close()
            raise ReferenceFailure("measuring", outcome.detail)
        return outcome

    def _check_and_time(
        self, trial: Trial, loaded: LoadedReference, stopwatch: Stopwatch, best: float | None
    ) -> _Outcome:
        with stopwatch.step("load"):
            try:
                trial.load("candidate", trial.candidate)
            except CandidateFailure as error:
                return CheckResult(
                    "compile" if error.detector == "load_source" else error.detector,
                    False,
                    detail=error.found,
                )
        with stopwatch.step("compile"):
            self._compile_ahead(trial)
        locked_checks = [self._lock_out(check, stopwatch) for check in self._checks]
        if failed := _find_failure(validate(trial, checks=locked_checks).checks):
            return failed
        try:
            return self._time(trial, loaded, stopwatch, best)
        except CandidateFailure as error:
            return CheckResult(error.detector, False, detail=f"{error.stage}: {error.found}")

    def _time(
        self, trial: Trial, loaded: LoadedReference, stopwatch: Stopwatch, best: float | None
    ) -> _Outcome:
        """Time the program, and confirm a surprising score in another process. Raises
        CandidateFailure.
        """

        def benchmark(current: Trial) -> BenchmarkResult:
            side = self._prepare_baseline(current, loaded, stopwatch)
            # Outside the exclusive lock, during which all other slots wait.
            with self._on_device(self._gpu_lock.hold_shared, stopwatch, "inputs"):
                ready = self._clock(current, side, self.config.plan)
            # Again on the same inputs, where the buckets are too far apart.
            for _ in range(_MAX_BENCHMARKS):
                with self._on_device(self._gpu_lock.hold_exclusively, stopwatch, "timing"):
                    result = ready.measure()
                if isinstance(self._score(result), float):
                    break
            return (
                self._check_timed_outputs(ready, result, stopwatch)
                if ready.has_concurrent_checks
                else result
            )

        def measure_in_new_process() -> BenchmarkResult:
            with stopwatch.step("again"):
                second = self._processes.take_second()
            second.sharing = self._gpu_lock
            # A new process: what the first one cached or prepared does not count.
            with (
                self._processes.lend_second(second) as child,
                trial.open_in_new_process(child) as other,
            ):
                self._compile_ahead(other)
                return benchmark(other)

        timed = confirm_measurement(benchmark(trial), measure_in_new_process, best)
        if failed := _find_failure(timed.checks):
            return failed
        score = self._score(timed)
        return (
            CheckResult("unstable", False, detail=score.reason)
            if isinstance(score, Unstable)
            else (score, _read_means(timed))
        )

    def _check_timed_outputs(
        self, ready: PreparedBenchmark, result: BenchmarkResult, stopwatch: Stopwatch
    ) -> BenchmarkResult:
        """Check the outputs and clocks of a benchmark beside other slots."""
        with self._on_device(self._gpu_lock.hold_shared, stopwatch, "examination"):
            timed = ready.run_concurrent_checks(result)
        failed = _find_failure(timed.checks)
        # Other slots make clocks differ: such a failure is checked once more alone.
        if failed is not None and failed.name in CLOCK_CHECKS:
            with self._on_device(self._gpu_lock.hold_exclusively, stopwatch, "timing"):
                return ready.recheck_clocks(timed)
        return timed

    def _prepare_baseline(
        self, trial: Trial, loaded: LoadedReference, stopwatch: Stopwatch
    ) -> ChildBatchTimer:
        """The timer of the baseline: in the reference process; for own programs in the program's."""
        subject = loaded.reference
        if self.config.together:
            load_module(trial.child, _REFERENCE_SLOT, subject.text, subject.form, subject.way)
            return ChildBatchTimer(trial.child, _REFERENCE_SLOT, (), queued=self.config.queued)
        loaded.baselines = baselines = loaded.baselines or self._measure_baselines(
            loaded, stopwatch
        )
        return ChildBatchTimer(
            subject.oracle,
            name_slot(subject, baselines.best),
            list(baselines.sets),
            queued=self.config.queued,
        )

    def _score(self, timed: BenchmarkResult) -> float | Unstable:
        return score_of(_read_means(timed), self.config.rule)

    def _measure_baselines(self, loaded: LoadedReference, stopwatch: Stopwatch) -> Baselines:
        subject, examples = loaded.reference, loaded.examples
        sets = [
            make_inputs(subject, randbits(62), "normal", self.config.device, examples=examples)
            for _ in range(2)
        ]
        if self.config.baseline == "eager":
            with self._on_device(self._gpu_lock.hold_shared, stopwatch, "baseline"):
                return load_eager_baseline(subject, sets)
        with self._on_device(self._gpu_lock.hold_exclusively, stopwatch, "baseline"):
            return rank_source_baselines(subject, sets)

    def _compile_ahead(self, trial: Trial) -> None:
        """Have Triton compile the program's kernels before any lock of the GPU is taken.

        For foreign code, that means one call of it.
        """
        assert isinstance(trial.candidate, SourceCandidate)
        if self.config.device.type != "cuda" or not has_kernels(trial.candidate.text):
            return
        try:
            other = trial.load_in_slot(trial.reference, "ahead")
            if self.config.trust == "own":
                like = [
                    [list(spec.shape), str(spec.dtype).removeprefix("torch.")]
                    for spec in trial.reference.specs
                ]
                # Own programs only: the call runs without its kernels, and computes garbage.
                trial.child.call("ahead", slot="ahead", like=like)
                return
            # Inputs that no later check uses.
            other.reference_cache = {}
            sample = other.draw("normal")
            other.run(sample)
            other.drop(sample)
        except CandidateFailure:
            # Validation meets the same failure, and reports it.
            return

    def _lock_out(self, check: CheckSpec, stopwatch: Stopwatch) -> CheckSpec:
        """The check, run under the lock that keeps it from disturbing a benchmark."""
        # On a CPU a few calls disturb no benchmark. A GPU gives processes turns, and a single
        # kernel of another process shows in a sample.
        way = (
            nullcontext
            if check.is_concurrent and self.config.device.type == "cpu"
            else self._gpu_lock.hold_shared
        )

        def run(trial: Trial) -> list[CheckResult]:
            with self._on_device(way, stopwatch, check.label):
                return check.run(trial)

        return replace(check, run=run)

    @contextmanager
    def _on_device(
        self, way: Callable[[], AbstractContextManager[None]], stopwatch: Stopwatch, name: str
    ) -> Iterator[None]:
        """Run a step under a lock of the GPU; time spent waiting is counted as step "wait"."""
        with ExitStack() as stack:
            with stopwatch.step("wait"):
                stack.enter_context(way())
            waited_s = self._gpu_lock.waited_s
            try:
                with stopwatch.step(name):
                    yield
            finally:
                # Time outside the lock, after giving way to a benchmark, is waiting too.
                stopwatch.move(name, "wait", self._gpu_lock.waited_s - waited_s)

    def _give_back(self, child: Child, outcome: object) -> None:
        """End the process, or keep it for the next own program where this one left it in order."""
        failed = (
            classify_failure(outcome, self.config.device)
            if isinstance(outcome, CheckResult)
            else ""
        )
        # A cheat may have changed anything in the process.
        in_order = failed != "hack" and not self._has_lacked_memory(outcome)
        self._processes.take_back(child, in_order=in_order, doubtful=failed in ("compile", "run"))


def _read_means(timed: BenchmarkResult) -> tuple[float, ...]:
    return timed.measurement.summary.means


def _find_failure(checks: Sequence[CheckResult]) -> CheckResult | None:
    return next((check for check in checks if not check.passed), None)
