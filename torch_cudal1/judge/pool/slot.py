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
from functools import wraps
from secrets import randbits
from typing import TypeAlias

import torch

from torch_cudal1.core.errors import SandboxError, TargetError
from torch_cudal1.ir.records import Check
from torch_cudal1.judge.benchmark.candidate_timing import Timed
from torch_cudal1.judge.benchmark.cross_process import ChildSpinner
from torch_cudal1.judge.benchmark.quick import CLOCKS, Ready, begun
from torch_cudal1.judge.checks import Detector
from torch_cudal1.judge.checks.environment import env_diff, env_diff_calls
from torch_cudal1.judge.checks.modes import state_dict
from torch_cudal1.judge.checks.numerics import numerics
from torch_cudal1.judge.checks.process import isolation, resource
from torch_cudal1.judge.checks.profiles import TimingPlan, profile_for
from torch_cudal1.judge.checks.static.contract import source_contract
from torch_cudal1.judge.checks.validate import detectors_of, validate
from torch_cudal1.judge.evaluate.confirm import confirm
from torch_cudal1.judge.evaluate.decide import Unstable
from torch_cudal1.judge.evaluate.source_baselines import Baselines, rank, seat_eager, slot_of
from torch_cudal1.judge.pool.failures import failure_of
from torch_cudal1.judge.pool.gpu_rw_lock import Gate
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask
from torch_cudal1.judge.pool.processes import Processes
from torch_cudal1.judge.pool.score import score_of
from torch_cudal1.judge.pool.terms import Terms
from torch_cudal1.judge.reference.input_set import Book
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import (
    PairSubject,
    SourceCandidate,
    load_module,
    read_reference,
)
from torch_cudal1.judge.reference.trial import Trial
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.worker.kernel_compile import has_kernels

__all__ = ["Lane", "Lap", "NoMemory"]

Clock: TypeAlias = Callable[[Trial, ChildSpinner, TimingPlan], Ready]
# They look at the process, and call the program a few times: on a CPU too little to disturb a race,
# and too long to hold one up. A GPU takes turns between processes, and a single kernel of another
# one shows in a sample of a race.
_BESIDE: frozenset[Detector] = frozenset(
    (state_dict, env_diff, env_diff_calls, resource, isolation)
)
# of a program whose buckets are too far apart: another race costs less than all that came before it
_RACES = 3
_NO_MEMORY = "CUDA out of memory"  # torch.OutOfMemoryError, as another process tells it
_REFERENCES = 16  # that one oracle process holds before it is replaced
_SHARED_BYTES = (
    64 << 20
)  # of one input set: sets of smaller ones are drawn once for all programs of a reference
_REFERENCE = "reference"


class NoMemory(TargetError):
    """This GPU has too little memory left for one more lane at this task."""

    def __str__(self) -> str:
        return f"task {self.target}: this GPU has too little memory left to judge it, use fewer lanes: {self.problem}"


@dataclass(frozen=True)
class Lap:
    """One measurement, and how many seconds each step of it took."""

    measured: Measured
    seconds: dict[str, float]


@dataclass
class _Bench:
    subject: PairSubject
    examples: list[torch.Tensor]
    book: Book = field(default_factory=dict)
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


class Lane:
    """Measures programs one after the other. Use it as a context manager, from one thread."""

    def __init__(self, terms: Terms, clock: Clock = begun) -> None:
        self.terms, self._clock = terms, clock
        self._stack = ExitStack()
        self._gate, self._processes = Gate(terms.folder, terms.device), Processes(terms)
        self._stack.callback(self._gate.close)
        self._stack.callback(self._processes.close)
        self._oracle: Child | None = None
        self._benches: dict[str, _Bench] = {}
        self._at = ""  # the reference that was measured last
        self._detectors: tuple[Detector, ...] = ()  # of the program that is measured

    def __enter__(self) -> Lane:
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
    ) -> Lap:
        """Judge one program. `best`: the task's highest score so far. `validated`: it was found
        right before, so it is only raced again, which looks at results of timed calls too. Raises
        TargetError, SandboxError.
        """
        watch = _Watch()
        self._detectors = (numerics,) if validated else detectors_of(profile_for("train"))
        candidate = SourceCandidate(program.source)
        checks = source_contract(candidate)
        found: tuple[float, tuple[float, ...]] | Check
        if failed := _failed(checks):
            found = replace(failed, name="compile")
        else:
            try:
                found = self._judged(task.reference, candidate, watch, best)
                if self._lacked_memory(found):
                    found = self._judged_again(task, candidate, watch, best)
                elif (
                    isinstance(found, Check)
                    and found.name == "wall_slope"
                    and failure_of(found, self.terms.device) == "hack"
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
        if isinstance(found, Check):
            kind = failure_of(found, self.terms.device)
            measured = Measured(
                task.id, program.program, kind, detail=f"{found.name}: {found.detail}"[:600]
            )
        else:
            measured = Measured(task.id, program.program, "ok", found[0], buckets=found[1])
        return Lap(measured, watch.seconds)

    def _judged_again(
        self, task: TrainingTask, candidate: SourceCandidate, watch: _Watch, best: float | None
    ) -> tuple[float, tuple[float, ...]] | Check:
        """After this process ran out of the GPU's memory: with all of it given back. Raises
        NoMemory if it is not enough.
        """
        self._dismiss()
        self._processes.empty()
        gc.collect()
        torch.cuda.empty_cache()
        try:
            found = self._judged(task.reference, candidate, watch, best)
        except torch.OutOfMemoryError as error:
            raise NoMemory(task.id, str(error)) from error
        except ReferenceFailure as error:
            raise TargetError(task.id, f"its reference cannot be used: {error.found}") from error
        # Whether the program takes too much or others do, nobody knows: it has no score, and is
        # asked again when it comes again.
        return (
            replace(found, name="unstable")
            if isinstance(found, Check) and self._lacked_memory(found)
            else found
        )

    @staticmethod
    def _accused_again(first: Check, second: tuple[float, tuple[float, ...]] | Check) -> Check:
        """Two clocks may differ by chance on a busy machine. In two processes: a cheat. In one: no
        score, which is no verdict.
        """
        return second if isinstance(second, Check) else replace(first, name="unstable")

    def _lacked_memory(self, found: object) -> bool:
        """Whether a process of the candidate found no memory on the GPU."""
        return (
            isinstance(found, Check)
            and self.terms.device.type == "cuda"
            and _NO_MEMORY in found.detail
        )

    def _judged(
        self, reference: str, candidate: SourceCandidate, watch: _Watch, best: float | None
    ) -> tuple[float, tuple[float, ...]] | Check:
        """The score with its bucket means, or the check that failed. Raises ReferenceFailure."""
        with watch.step("start"):
            self._processes.begin()  # while the oracle starts
            bench = self._bench(reference)
            child = self._processes.lend()
        child.sharing = self._gate
        found: tuple[float, tuple[float, ...]] | Check = Check(
            "resource", False, detail="it was not finished"
        )
        try:
            trial = Trial(
                *(
                    bench.subject,
                    candidate,
                    self.terms.contract,
                    self.terms.device,
                    child,
                    bench.examples,
                ),
                profile=profile_for("train"),
                gradients=self.terms.gradients,
                alone=False,
                book=bench.book
                if sum(spec.size_bytes for spec in bench.subject.specs) <= _SHARED_BYTES
                else {},
            )
            found = self._tried(trial, bench, watch, best)
        finally:
            self._give_back(child, found)
        if isinstance(found, Check) and found.name == "inputs":
            self._dismiss()
            raise ReferenceFailure("measuring", found.detail)
        return found

    def _tried(
        self, trial: Trial, bench: _Bench, watch: _Watch, best: float | None
    ) -> tuple[float, tuple[float, ...]] | Check:
        with watch.step("load"):
            try:
                trial.load("candidate", trial.candidate)
            except CandidateFailure as error:
                return Check(
                    "compile" if error.detector == "load_source" else error.detector,
                    False,
                    detail=error.found,
                )
        with watch.step("compile"):
            self._compile_ahead(trial)
        asked = [self._gated(detector, watch) for detector in self._detectors]
        if failed := _failed(validate(trial, detectors=asked).checks):
            return failed
        try:
            return self._timed(trial, bench, watch, best)
        except CandidateFailure as error:
            return Check(error.detector, False, detail=f"{error.stage}: {error.found}")

    def _timed(
        self, trial: Trial, bench: _Bench, watch: _Watch, best: float | None
    ) -> tuple[float, tuple[float, ...]] | Check:
        """Only the race itself holds the GPU alone, again where its buckets are too far apart.
        Raises CandidateFailure.
        """

        def race(one: Trial) -> Timed:
            side = self._baseline(one, bench, watch)
            with self._inside(self._gate.shared, watch, "inputs"):
                ready = self._clock(one, side, self.terms.plan)
            for _ in range(_RACES):
                with self._inside(self._gate.alone, watch, "timing"):
                    found = ready.measured()
                if isinstance(self._score(found), float):
                    break
            return self._examined(ready, found, watch) if ready.beside else found

        def afresh() -> Timed:
            with watch.step("again"):
                second = self._processes.second()
            second.sharing = self._gate
            with self._processes.keeping(second) as child, trial.elsewhere(child) as other:
                self._compile_ahead(other)
                return race(other)

        timed = confirm(race(trial), afresh, best)
        if failed := _failed(timed.checks):
            return failed
        score = self._score(timed)
        return (
            Check("unstable", False, detail=score.reason)
            if isinstance(score, Unstable)
            else (score, _means(timed))
        )

    def _examined(self, ready: Ready, found: Timed, watch: _Watch) -> Timed:
        """Beside others, and clocks that seem false once more without them."""
        with self._inside(self._gate.shared, watch, "examination"):
            timed = ready.examined(found)
        failed = _failed(timed.checks)
        if failed is not None and failed.name in CLOCKS:
            with self._inside(self._gate.alone, watch, "timing"):
                return ready.heard_again(timed)
        return timed

    def _baseline(self, trial: Trial, bench: _Bench, watch: _Watch) -> ChildSpinner:
        """What the candidate is raced against: in the oracle's process, or beside a program of ours
        in its own.
        """
        subject = bench.subject
        if self.terms.together:
            load_module(trial.child, _REFERENCE, subject.text, subject.form, subject.way)
            return ChildSpinner(trial.child, _REFERENCE, (), queued=self.terms.queued)
        bench.baselines = baselines = bench.baselines or self._ranked(bench, watch)
        return ChildSpinner(
            subject.oracle,
            slot_of(subject, baselines.best),
            list(baselines.sets),
            queued=self.terms.queued,
        )

    def _score(self, timed: Timed) -> float | Unstable:
        return score_of(_means(timed), self.terms.rule)

    def _ranked(self, bench: _Bench, watch: _Watch) -> Baselines:
        subject, examples = bench.subject, bench.examples
        sets = [
            make_inputs(subject, randbits(62), "normal", self.terms.device, examples=examples)
            for _ in range(2)
        ]
        if self.terms.baseline == "eager":
            with self._inside(self._gate.shared, watch, "baseline"):
                return seat_eager(subject, sets)
        with self._inside(self._gate.alone, watch, "baseline"):
            return rank(subject, sets)

    def _compile_ahead(self, trial: Trial) -> None:
        """What Triton compiles at a first call is not to hold the GPU's lock meanwhile; what is not
        ours runs once for that.
        """
        assert isinstance(trial.candidate, SourceCandidate)
        if self.terms.device.type != "cuda" or not has_kernels(trial.candidate.text):
            return
        try:
            other = trial.aside(trial.subject, "ahead")
            if self.terms.trust == "own":
                like = [
                    [list(spec.shape), str(spec.dtype).removeprefix("torch.")]
                    for spec in trial.subject.specs
                ]
                trial.child.call("ahead", slot="ahead", like=like)
                return
            other.book = {}  # inputs that no later look will use
            sample = other.draw("normal")
            other.run(sample)
            other.drop(sample)
        except CandidateFailure:
            return  # validation meets the same and says what it means

    def _gated(self, detector: Detector, watch: _Watch) -> Detector:
        way = (
            nullcontext
            if detector in _BESIDE and self.terms.device.type == "cpu"
            else self._gate.shared
        )

        @wraps(detector)
        def run(trial: Trial) -> list[Check]:
            with self._inside(way, watch, getattr(detector, "__name__", "detector")):
                return detector(trial)

        return run

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
        bench.book.clear()
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
        failed = failure_of(found, self.terms.device) if isinstance(found, Check) else ""
        in_order = failed != "hack" and not self._lacked_memory(found)
        self._processes.take_back(child, in_order=in_order, doubtful=failed in ("compile", "run"))


def _means(timed: Timed) -> tuple[float, ...]:
    return timed.measurement.summary.means


def _failed(checks: Sequence[Check]) -> Check | None:
    return next((check for check in checks if not check.passed), None)
