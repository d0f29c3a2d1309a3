"""Checks in production: a sampled call of a swapped region also runs the baseline, on the same
inputs, and the two are compared.

    call ──> nothing to check ──> kernel
      └─1 in 1/rate──> baseline, kernel ──> alike ──> the kernel's result
                                         └─> differ ──> the BASELINE's result; the candidate runs nowhere again, now and later

A sampled call pays for both runs, for the comparison and, on a GPU, for waiting until it is known;
every other call of a checked region pays for one Python call; at rate 0 nothing is put in the way.
The comparison is the judge's, without a float64 result: it finds what is wrong, not what is a
little less accurate. Where a call differs, float64 runs tell whether sums cancelled, which is not
wrong. A kernel that writes where it must not is not looked for here.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_cudal1.api.graphs.padding import ZERO_PADDING, PaddingWatch, makes_nested_tensors
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import SettingError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.graph.outputs import iter_leaves
from torch_cudal1.graph.swap import FAILURES, Around, Swapped, withdraw
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.interpreter import Runner
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.records import BY_BLOCKS, Candidate, Region
from torch_cudal1.ir.schedule import EAGER
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.judge.reference.analysis import analyse
from torch_cudal1.judge.reference.compare import compare, unit_roundoff
from torch_cudal1.judge.reference.float64 import (
    compute_exact_outputs,
    measure_input_sensitivity,
)
from torch_cudal1.search.tune import Choice
from torch_cudal1.store.cache.quarantine import QuarantineRecord, quarantine_candidate
from torch_cudal1.store.context import TuneContext

__all__ = ["check_capture", "check_composed", "check_recalled", "wrap_with_checks"]

# TF32 keeps 10 bits of mantissa, so it rounds to half of 2^-10.
TF32_ROUNDOFF = 2.0**-11
TENSOR_CORE_OPERATORS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "linear", "matmul")
# The fraction of integers chosen among rounded numbers, such as an argmax, that may differ:
# rounding makes ties, and two kernels break them differently.
MAX_OTHER_CHOICES_FRACTION = 0.1
# A start compares so few numbers on the host: on a GPU each operator of the comparison loads a kernel
# first, 0.5 s of a warm start in all.
_MAX_HOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class _Tolerance:
    """The arguments of `compare` for a region."""

    precision: str
    longest: int
    drift: float
    # Whether integer outputs may come from floating-point numbers.
    rounded_choices: bool


def wrap_with_checks(choice: Choice, context: TuneContext, *, writes: bool) -> Around | Refusal:
    """What to put in front of the callable built for `choice`, or why nothing is put there.
    `writes`: the call writes to its own inputs.

    Raises SettingError for an `on_mismatch` that cannot be found.
    """
    settings, region = context.settings, choice.region
    if not settings.shadow_rate or not choice.swapped:
        return Refusal("no call is sampled" if choice.swapped else "a baseline runs")
    reason = ""
    # Each reason names a case in which a second run cannot give the first one's result.
    if is_random_program(region.program) or is_random_program(choice.candidate.program):
        reason = "it draws random numbers, and a second run would draw others"
    elif writes:
        reason = "the call writes to its inputs, and a second run would start from what the first one wrote"
    elif region.kind == "backward":
        reason = "a training backward frees what its forward saved while it runs"
    if reason:
        telemetry.record("shadow", "left_out", region.key, reason=reason)
        return Refusal(reason)
    # The callback is loaded now: a misspelt name should fail when the module is bound, not when a
    # kernel is found wrong weeks later.
    reporter = _MismatchReporter(choice, context, _load_callback(settings.on_mismatch))
    tolerance = _choose_tolerance(choice, context)
    return lambda swapped, runner: _CheckedCallable(
        swapped, runner, settings.shadow_rate, tolerance, reporter
    )


def check_composed(
    choice: Choice, swapped: Swapped, inputs: Sequence[torch.Tensor] | None, context: TuneContext
) -> Refusal | None:
    """What is wrong with the outputs of a whole that was composed of decisions for its blocks, on
    these inputs; None for any other choice. Each block was validated alone; this is what validates
    the whole. A wrong one is quarantined.
    """
    entry = choice.entry
    if entry is None or entry.evidence.get("tier") != BY_BLOCKS or not choice.swapped:
        return None
    if inputs is None or is_random_program(choice.region.program):
        return Refusal("the whole that its blocks compose could not be checked")
    # Dynamo may be tracing the user's model: its modes must not reach these runs.
    with tracing(None), unset_fake_temporarily(), torch.no_grad():
        try:
            expected = swapped.reference(inputs)
            # The first call of a CUDA graph runs without it.
            results = [swapped.runner(inputs) for _ in range(2)]
        except FAILURES as error:
            if is_sticky(error):
                raise
            return Refusal(f"{type(error).__name__}: {error}".splitlines()[0])
        reporter = _MismatchReporter(choice, context, None)
        tolerance = _choose_tolerance(choice, context)
        for result in results:
            sensitivity = partial(reporter.measure_input_sensitivity, inputs)
            problem = _find_difference(result, expected, tolerance, sensitivity)
            if problem is not None:
                reporter.report_mismatch(str(problem))
                return Refusal(f"the whole that its blocks compose is wrong: {problem}")
    telemetry.count("compositions_checked")
    return None


def check_recalled(
    choice: Choice,
    call: Callable[..., Sequence[Any]],
    own_call: Callable[..., Sequence[Any]],
    inputs: Sequence[torch.Tensor],
    context: TuneContext,
) -> Refusal | None:
    """What is wrong with the outputs of `call`, whose Program comes from a record of an earlier
    process, by those of `own_call`, the user's own operators, on these inputs.
    """
    with tracing(None), unset_fake_temporarily(), torch.no_grad():
        try:
            expected, results = own_call(*inputs), call(*inputs)
            refusal = _find_gross_difference(results, expected, choice, context)
        except FAILURES as error:
            if is_sticky(error):
                raise
            refusal = Refusal(f"{type(error).__name__}: {error}".splitlines()[0])
    wrong = "" if refusal is None else refusal.reason
    telemetry.record("capture", "recalled", choice.region.key, wrong=wrong)
    return refusal


def check_capture(
    region: Region,
    own_call: Callable[..., Any],
    enter_arguments: Callable[
        [torch.device], AbstractContextManager[tuple[tuple[Any, ...], dict[str, Any]]]
    ],
    build: Callable[[tuple[Choice, ...]], Callable[[tuple[Any, ...], dict[str, Any]], Any]],
    context: TuneContext,
) -> Refusal | None:
    """What is wrong with a capture: its operators, one by one in the user's call (`build`), give
    other results than the module's own forward (`own_call`) on the user's arguments, which
    `enter_arguments` yields and puts back. The cause is Python that Dynamo sees differently, such
    as a function that remembers its results.
    """
    if is_random_program(region.program):
        return None
    choice = Choice(region, Candidate(region.program, EAGER, "baseline"), None, "its operators")
    module, watch = getattr(own_call, "__self__", None), PaddingWatch()
    # In the caller's grad mode: a forward may ask for it.
    try:
        with (
            enter_arguments(context.device) as (args, kwargs),
            watch if makes_nested_tensors(module) else nullcontext(),
        ):
            expected = _copy_tensors(own_call(*args, **kwargs))
        if watch.has_mask:
            return Refusal(ZERO_PADDING)
        with enter_arguments(context.device) as (args, kwargs):
            results = _copy_tensors(build((choice,))(args, kwargs))
        refusal = _find_gross_difference(results, expected, choice, context)
    except FAILURES as error:
        if is_sticky(error):
            raise
        refusal = Refusal(f"{type(error).__name__}: {error}".splitlines()[0])
    if refusal is None:
        return None
    telemetry.record("capture", "differs", choice.region.key, why=refusal.reason)
    return Refusal(f"its operators, as Dynamo traced them, differ from its forward: {refusal}")


def _find_gross_difference(
    results: Sequence[Any], expected: Sequence[Any], choice: Choice, context: TuneContext
) -> Refusal | None:
    results, expected = _copy_few_to_host(results, expected)
    narrow = _choose_narrow_tolerance(choice, context)
    if _find_difference(results, expected, narrow) is None:
        return None
    # Working out what the region's depth allows takes longer than the rest of a start.
    return _find_difference(results, expected, _choose_tolerance(choice, context))


def _copy_few_to_host(
    results: Sequence[Any], expected: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    tensors = [value for value in (*results, *expected) if isinstance(value, torch.Tensor)]
    # A result on another device than the baseline's is a difference, and stays one.
    is_alike = len({tensor.device for tensor in tensors}) == 1
    if not is_alike or sum(tensor.numel() for tensor in tensors) > _MAX_HOST_ELEMENTS:
        return results, expected
    on_host = [
        [value.cpu() if isinstance(value, torch.Tensor) else value for value in values]
        for values in (results, expected)
    ]
    return on_host[0], on_host[1]


def _copy_tensors(result: Any) -> list[torch.Tensor]:
    # What the call writes to is put back, and may be part of the result.
    return [leaf.detach().clone() for leaf in iter_leaves(result, torch.Tensor)]


class _CheckedCallable:
    """Takes the place of the kernel's callable, and checks a sample of the calls."""

    def __init__(
        self,
        swapped: Swapped,
        runner: Runner,
        rate: float,
        tolerance: _Tolerance,
        reporter: _MismatchReporter,
    ) -> None:
        self._swapped, self._runner, self._rate, self._tolerance, self._reporter = (
            swapped,
            runner,
            rate,
            tolerance,
            reporter,
        )
        # A generator of its own: drawing from the global one would change the user's numbers.
        self._random = random.Random()
        self._calls_left = self._draw_gap()

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        # Another check, or another thread, may have found the candidate wrong meanwhile.
        if self._swapped.quarantined:
            return self._swapped.reference(inputs)
        self._calls_left -= 1
        return self._runner(inputs) if self._calls_left > 0 else self._run_checked(inputs)

    def _draw_gap(self) -> int:
        """Calls until the next sample, so that each call is sampled with the same chance."""
        if self._rate >= 1:
            return 1
        # A geometric distribution. A fixed stride could meet only the even calls of a model that
        # alternates between two inputs. `1 - random()` is never 0, whose logarithm does not exist.
        return 1 + int(math.log(1.0 - self._random.random()) / math.log1p(-self._rate))

    def _run_checked(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        if any(tensor.is_cuda for tensor in inputs) and torch.cuda.is_current_stream_capturing():
            # A comparison waits for the GPU, which is not allowed while a stream is captured. The
            # gap is not drawn anew, so the next call is sampled.
            return self._runner(inputs)
        self._calls_left = self._draw_gap()
        # The baseline runs first: a kernel that damages its inputs cannot spoil what it is compared
        # with.
        try:
            expected = self._swapped.reference(inputs)
        except FAILURES as error:
            # The CUDA context is lost: running the kernel would only hide the first error.
            if is_sticky(error):
                raise
            telemetry.record(
                "shadow",
                "not_checked",
                self._reporter.key,
                reason=f"{type(error).__name__}: {error}",
            )
            return self._runner(inputs)
        results = self._runner(inputs)
        problem = _find_difference(
            results,
            expected,
            self._tolerance,
            partial(self._reporter.measure_input_sensitivity, inputs),
        )
        telemetry.count("shadow_checks")
        if problem is None:
            return results
        # Before the result is returned, so that no other thread runs the candidate longer than it
        # must.
        self._reporter.report_mismatch(str(problem))
        return expected


@dataclass(frozen=True)
class _MismatchReporter:
    """Reports a mismatch to the process, the disk, the log and the user's callback."""

    choice: Choice
    context: TuneContext
    callback: Callable[[Any], object] | None

    @property
    def key(self) -> str:
        return self.choice.region.key

    def measure_input_sensitivity(
        self, inputs: Sequence[torch.Tensor], position: int
    ) -> torch.Tensor | None:
        """How far an output moves with these inputs. Called where a difference was found: sums may
        have cancelled.
        """
        run = partial(compute_exact_outputs, self.choice.region.program, device=self.context.device)
        exact = run(inputs)
        return (
            None
            if isinstance(exact, Refusal)
            else measure_input_sensitivity(run, inputs, exact)[position]
        )

    def report_mismatch(self, problem: str) -> None:
        """Nothing of this candidate runs after this returns, here or in a later process."""
        digest, reason = self.choice.candidate.digest, f"a shadow check found it wrong: {problem}"
        # This process first: a full disk must not keep a wrong kernel running.
        withdraw(digest, f"quarantined: {reason}")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = QuarantineRecord(
            self.key, digest, reason, now, f"{self.context.target.sku} ({self.context.target.arch})"
        )
        # Later processes read it before they run the candidate.
        stored = quarantine_candidate(self.context.cache.root, record)
        facts = {
            "name": self.choice.region.name,
            "runs": self.choice.candidate.label,
            "candidate": digest,
            "reason": problem,
        }
        if isinstance(stored, Refusal):
            facts["not_stored"] = stored.reason
        event = telemetry.record("shadow", "mismatch", self.key, **facts)
        where = (
            f"not written down: {stored.reason}"
            if isinstance(stored, Refusal)
            else f"recorded in {stored.path}"
        )
        telemetry.log.error(
            "cudal1 quarantined %s of %s: %s; the baseline runs (%s)",
            facts["runs"],
            facts["name"] or self.key[:12],
            problem,
            where,
        )
        if self.callback is not None:
            try:
                self.callback(event)
            # The user's own function runs inside the user's own call, which must not fail for it.
            except Exception as error:  # noqa: BLE001
                telemetry.record(
                    "shadow", "callback_failed", self.key, reason=f"{type(error).__name__}: {error}"
                )
                telemetry.log.exception("cudal1: on_mismatch raised")


def _find_difference(
    results: Sequence[Any],
    expected: Sequence[Any],
    tolerance: _Tolerance,
    input_sensitivity: Callable[[int], torch.Tensor | None] = lambda position: None,
) -> Refusal | None:
    """What is wrong with the first wrong output; None if every output is right. An output that
    cannot be compared is not called wrong.
    """
    if len(results) != len(expected):
        return Refusal(f"{len(results)} outputs, expected {len(expected)}")
    # Outputs may require gradients; the comparison must not add to their graph.
    with torch.no_grad():
        for number, (result, baseline) in enumerate(zip(results, expected, strict=True)):
            if result is None or baseline is None:
                if result is not baseline:
                    present = "missing" if result is None else "there"
                    return Refusal(f"output {number} is {present}, and the baseline's is not")
                continue
            problem = _find_output_difference(
                result, baseline, tolerance, partial(input_sensitivity, number)
            )
            if problem is not None:
                return Refusal(f"output {number}: {problem}")
    return None


def _find_output_difference(
    result: torch.Tensor,
    baseline: torch.Tensor,
    tolerance: _Tolerance,
    input_sensitivity: Callable[[], torch.Tensor | None],
) -> Refusal | None:
    comparison = compare(
        result,
        baseline,
        None,
        precision=tolerance.precision,
        longest=tolerance.longest,
        drift=tolerance.drift,
        sensitivity=input_sensitivity,
    )
    if comparison.passed:
        return None
    is_choice = (
        not (baseline.dtype.is_floating_point or baseline.dtype.is_complex)
        and result.shape == baseline.shape
        and result.dtype == baseline.dtype
    )
    if (
        is_choice
        and tolerance.rounded_choices
        and int((result != baseline).sum()) <= max(1, MAX_OTHER_CHOICES_FRACTION * baseline.numel())
    ):
        return None
    return Refusal(comparison.detail or "it differs from the baseline's")


def _choose_tolerance(choice: Choice, context: TuneContext) -> _Tolerance:
    """How much two right evaluations of a region may differ: its sums, its depth, and the
    coarsest format it rounds to.
    """
    program = choice.region.program
    steps = max(1, len(program.steps))
    dtypes = {spec.torch_dtype for spec in value_specs(program).values()}
    units = [unit_roundoff(dtype) for dtype in dtypes if dtype.is_floating_point]
    # Where the contract allows TF32, the baseline and the kernel may each use it or not.
    if context.device.type == "cuda" and context.contract.rights and _has_products(program):
        units.append(TF32_ROUNDOFF)
    coarsest = max(units, default=0.0)
    # Errors of independent roundings add up like a random walk. Up to float32 `compare` has its own
    # limit.
    drift = math.sqrt(steps) * coarsest if coarsest > unit_roundoff(torch.float32) else 0.0
    return _Tolerance(
        context.contract.precision, analyse(program).longest_reduction * steps, drift, bool(units)
    )


def _choose_narrow_tolerance(choice: Choice, context: TuneContext) -> _Tolerance:
    """No more than `_choose_tolerance` allows, from what a Program says without being run on fakes:
    the formats of its inputs alone, and no sums.
    """
    program = choice.region.program
    dtypes = {spec.torch_dtype for spec in program.inputs}
    coarsest = max((unit_roundoff(dtype) for dtype in dtypes if dtype.is_floating_point), default=0)
    is_coarse = coarsest > unit_roundoff(torch.float32)
    drift = math.sqrt(max(1, len(program.steps))) * coarsest if is_coarse else 0.0
    return _Tolerance(context.contract.precision, 1, drift, False)


def _has_products(program: Program) -> bool:
    names = (step.target.split(".")[1] for step in program.steps if isinstance(step, Aten))
    return any(name.strip("_").endswith(TENSOR_CORE_OPERATORS) for name in names)


def _load_callback(setting: Callable[[Any], object] | str | None) -> Callable[[Any], object] | None:
    """The callback that the setting names. Raises SettingError when there is none of that name."""
    if setting is None or callable(setting):
        return setting
    module, _, name = setting.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            "on_mismatch", setting, f"the name of a function that can be imported ({error})"
        ) from error
    if not callable(function):
        raise SettingError(
            "on_mismatch", setting, f"a function, it names a {type(function).__name__}"
        )
    callback: Callable[[Any], object] = function
    return callback
