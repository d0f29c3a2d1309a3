"""The quick tier: before anything is searched for, PyTorch's own ways of running a call are
benchmarked in the user's process, and the fastest stays.

The contenders are the graphs under the schedules of `search.quick`, each against the fastest so
far, beginning with the module's own forward, and for a deep model what searches for its blocks have
left in the cache, be it those of another model. A training step is measured as a whole, as after a
search. What was decided is stored, so that the next process does not repeat it, but for what a busy
machine left open (`api.graphs.open_decisions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._guards import tracing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from torch_cudal1.api.contenders import ServedCall
from torch_cudal1.api.end_to_end import format_speedup, list_summary_facts
from torch_cudal1.api.gradients.training_step import MIN_SPEEDUP_BEYOND_NOISE
from torch_cudal1.api.graphs.open_decisions import (
    MEASURED_AGAIN,
    OpenCount,
    benchmark_quickly,
)
from torch_cudal1.api.module_trial import EndToEndDecision, ModuleTrial, remember_decision
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.sticky_errors import is_sticky
from torch_cudal1.graph.functional_module import preserve_random_state
from torch_cudal1.graph.swap import FAILURES
from torch_cudal1.ir.records import Candidate, Region
from torch_cudal1.ir.schedule import EAGER, INDUCTOR, INDUCTOR_GRAPH, REGIONAL, Schedule
from torch_cudal1.search.attention_choice import choose_attention
from torch_cudal1.search.convolution_choice import choose_convolutions
from torch_cudal1.search.operator_timing import OperatorChoice
from torch_cudal1.search.quick import explain_no_schedule, list_quick_schedules, make_quick_entry
from torch_cudal1.search.tune import Choice, compose_known_blocks, make_end_to_end_name
from torch_cudal1.store.cache.resolve import resolve
from torch_cudal1.store.context import TuneContext

__all__ = [
    "DECIDED_BLOCKS",
    "GraphCallDecision",
    "choose_decided_blocks",
    "choose_for_step",
    "choose_graph_call",
    "choose_graph_operators",
    "choose_schedule",
    "describe_failure",
    "make_quick_choices",
    "store_quick_choices",
]

# A callable of this type takes the graph's inputs one by one.
GraphCall: TypeAlias = Callable[..., Any]

# The first call of a graphed callable runs it directly, the second captures it.
CALLS_UNTIL_STEADY = 3
# A schedule replaces a simpler one that is faster than the own forward only beyond this.
MIN_SPEEDUP_OVER_SIMPLER = 1.01


# The name of the contender that is composed of what the cache knows of the blocks.
DECIDED_BLOCKS = "decided blocks"


@dataclass
class _Standing:
    """The fastest so far (`step`, of `call`, which runs `choices`; the own forward where `call` is
    None), and what was learnt of each contender by name. `compiled`: by base, the callables that a
    CUDA graph may replay.
    """

    step: Callable[[], Any]
    choices: tuple[Choice, ...]
    name: str = str(EAGER)
    call: ServedCall | None = None
    compiled: dict[str, ServedCall] = field(default_factory=dict)
    medians_us: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # Whether a busy machine left open which of two is the faster.
    is_open: bool = False
    # Why nothing is compared, where nothing is.
    alone_because: str = ""

    def compare(
        self,
        name: str,
        choices: tuple[Choice, ...],
        call: ServedCall,
        step: Callable[[], Any],
        context: TuneContext,
    ) -> None:
        """Benchmark another contender's step against the fastest; it takes that place if it is
        faster beyond noise.
        """
        needed = MIN_SPEEDUP_BEYOND_NOISE if self.call is None else MIN_SPEEDUP_OVER_SIMPLER
        summary, is_open = benchmark_quickly(self.step, step, context.device, needed)
        self.is_open |= is_open
        over = "the own forward" if self.call is None else self.name
        self.medians_us.setdefault(self.name, summary.a_us)
        self.medians_us[name] = summary.b_us
        self.notes.append(f"{name} is {format_speedup(summary)} of {over}")
        key, facts = choices[0].region.key, list_summary_facts(summary)
        telemetry.record("judge", "quick", key, contender=name, over=over, open=is_open, **facts)
        if summary.speedup >= needed:
            self.name, self.choices, self.call, self.step = name, choices, call, step

    @property
    def note(self) -> str:
        """A sentence on every schedule."""
        failures = [f"{name} failed ({reason})" for name, reason in self.failures.items()]
        sentences = [*self.notes, *failures] or [f"nothing to compare: {self.alone_because}"]
        return f"quick tier: {'; '.join(sentences)}"


def choose_schedule(
    trial: ModuleTrial,
    regions: Sequence[Region],
    context: TuneContext,
    build: Callable[[tuple[Choice, ...], ServedCall | None], ServedCall],
    check: Callable[[ServedCall, tuple[Choice, ...]], Refusal | None],
) -> tuple[tuple[Choice, ...], EndToEndDecision]:
    """The fastest schedule of an inference call, measured now, and its callable. The choices have
    entries, which are stored. `build(choices, compiled)` builds a contender; `compiled` is the one
    that a CUDA graph may replay, where it was built before. Where the cache knows the blocks of a
    deep region, what they compose is a contender too, once `check` finds its outputs right.

    A contender that fails, also for lack of memory, costs itself only. Raises what leaves the CUDA
    context unusable.
    """
    writes = bool(trial.written)
    operators = choose_graph_operators(regions, context, writes=writes)
    with trial.arguments(context.device) as (args, kwargs):
        # The own forward has PyTorch's own choice of operators.
        own_choices = make_quick_choices(regions, EAGER)
        standing = _Standing(trial.make_forward_step(args, kwargs), own_choices)

        def compare(name: str, choices: tuple[Choice, ...], compiled: ServedCall | None) -> bool:
            try:
                call = build(choices, compiled)
                schedule = choices[0].candidate.schedule
                if schedule.compiles and not schedule.cuda_graph:
                    standing.compiled[schedule.base] = call
                if (refusal := check(call, choices)) is not None:
                    raise NotLowerableError(refusal.reason)
                step = trial.make_served_step(call.with_refill(), args, kwargs, context)
                _raise_failure(call)
                standing.compare(name, choices, call, step, context)
            except FAILURES as error:
                if is_sticky(error):
                    raise
                standing.failures[name] = describe_failure(error)
                return False
            return True

        pending = list(list_quick_schedules(regions, context, writes=writes))
        if not pending:
            standing.alone_because = explain_no_schedule(regions, context)
        while pending:
            schedule = pending.pop(0)
            graphed = standing.compiled.get(schedule.base) if schedule.cuda_graph else None
            choices = make_quick_choices(regions, schedule, operators)
            if not compare(str(schedule), choices, graphed) and schedule == REGIONAL:
                # What fails cut in blocks may compile as a whole, as torch.compile does it.
                pending = [INDUCTOR, INDUCTOR_GRAPH, *pending[1:]]
        composed = choose_decided_blocks(regions, context, writes=writes)
        if composed is not None:
            compare(DECIDED_BLOCKS, composed, None)
    return _keep_fastest(standing, context)


def _keep_fastest(
    standing: _Standing, context: TuneContext
) -> tuple[tuple[Choice, ...], EndToEndDecision]:
    """The fastest, stored for later processes unless a busy machine left it open."""
    open_count = OpenCount.read(make_end_to_end_name(standing.choices), context)
    is_kept = not (standing.is_open and open_count.may_grow)
    choices = store_quick_choices(
        standing.choices, context, standing.medians_us, standing.failures, is_kept=is_kept
    )
    winner = "eager" if standing.call is None else "cudal1"
    if standing.call is not None:
        # The last one that was built stands in the trace that all contenders share.
        standing.call.filled.fill()
    note = standing.note
    if is_kept:
        remember_decision(winner, note, choices, context)
    else:
        note = f"{note}; {MEASURED_AGAIN}"
        open_count.grow()
    return choices, EndToEndDecision(winner, note, standing.call)


def choose_decided_blocks(
    regions: Sequence[Region], context: TuneContext, *, writes: bool
) -> tuple[Choice, ...] | None:
    """The one region composed of what the cache knows of its blocks; None where it does not know
    them, and for calls that write to their inputs.
    """
    if len(regions) > 1 or writes:
        return None
    composed = compose_known_blocks(regions[0], context)
    return None if isinstance(composed, Refusal) else (composed,)


def _raise_failure(call: ServedCall) -> None:
    # A callable that fails runs its reference from then on, and would be timed as that.
    reason = next(filter(None, (item.quarantined for item in call.filled.swapped)), "")
    if reason:
        raise NotLowerableError(reason)


def choose_for_step(regions: Sequence[Region], context: TuneContext) -> tuple[Choice, ...]:
    """The choices of a training step that was not searched for: Inductor graph by graph, which the
    end-to-end measurement of the step then compares with the own forward and with torch.compile.
    """
    schedule = next(iter(list_quick_schedules(regions, context)), EAGER)
    return store_quick_choices(make_quick_choices(regions, schedule), context, {}, {})


@dataclass(frozen=True)
class GraphCallDecision:
    """What runs for a graph of torch.compile, its callable (None: plain Inductor, not built here),
    the microseconds of the contenders that were benchmarked, and whether a busy machine left open
    which is the fastest.
    """

    runs: str
    call: GraphCall | None = None
    medians_us: Mapping[str, float] = field(default_factory=dict)
    is_open: bool = False


def choose_graph_call(
    contenders: Mapping[str, Callable[[], GraphCall]],
    inputs: Sequence[Any],
    written: frozenset[int],
    context: TuneContext,
    key: str,
) -> GraphCallDecision:
    """The fastest of `contenders`, of which the first stays unless another is faster beyond noise.
    It is empty where the graph cannot be called for the sake of measuring. Inputs in `written`,
    which calls write to, are put back.

    A contender that fails costs itself only; where the first one fails, this raises what it raised.
    """
    names = list(contenders)
    if not names:
        return GraphCallDecision("inductor")
    # A backend is called while Dynamo traces: with its fake mode the calls would run on no data.
    with (
        tracing(None),
        unset_fake_temporarily(),
        torch.no_grad(),
        preserve_random_state(),
        _put_back_written([inputs[position] for position in sorted(written)]) as put_back_positions,
    ):
        first_call = _run_until_steady(contenders[names[0]](), inputs, put_back_positions)
        decision = GraphCallDecision(names[0], first_call)
        for name in names[1:]:
            try:
                challenger = _run_until_steady(contenders[name](), inputs, put_back_positions)
                decision = _compare_graph_calls(
                    decision,
                    GraphCallDecision(name, challenger),
                    lambda call: partial(_run_step, call, inputs, put_back_positions),
                    context,
                    key,
                )
            except FAILURES as error:
                if is_sticky(error):
                    raise
                failed = describe_failure(error)
                telemetry.record("judge", "quick", key, contender=name, failed=failed)
    return decision


def _compare_graph_calls(
    fastest: GraphCallDecision,
    challenger: GraphCallDecision,
    make_step: Callable[[GraphCall | None], Callable[[], Any]],
    context: TuneContext,
    key: str,
) -> GraphCallDecision:
    """The faster of two, with the microseconds of all so far."""
    summary, is_open = benchmark_quickly(
        make_step(fastest.call),
        make_step(challenger.call),
        context.device,
        MIN_SPEEDUP_BEYOND_NOISE,
    )
    name, over, facts = challenger.runs, fastest.runs, list_summary_facts(summary)
    telemetry.record("judge", "quick", key, contender=name, over=over, open=is_open, **facts)
    # What was measured of the fastest first stays.
    medians_us = {over: summary.a_us, **fastest.medians_us, name: summary.b_us}
    winner = challenger if summary.speedup >= MIN_SPEEDUP_BEYOND_NOISE else fastest
    return replace(winner, medians_us=medians_us, is_open=fastest.is_open or is_open)


@contextmanager
def _put_back_written(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Put the values of `tensors` back at the end. Yields what puts the integers among them back,
    for use before each step: positions in a cache would leave it after enough of them.
    """
    saved = [tensor.clone() for tensor in tensors]
    pairs = [
        (tensor, value)
        for tensor, value in zip(tensors, saved, strict=True)
        if not (tensor.is_floating_point() or tensor.is_complex())
    ]

    def put_back_positions() -> None:
        if pairs:
            torch._foreach_copy_([tensor for tensor, _ in pairs], [value for _, value in pairs])

    try:
        with _unsafe_preserve_version_counter(tuple(tensors)):
            yield put_back_positions
    finally:
        with _unsafe_preserve_version_counter(tuple(tensors)):
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)


def _run_until_steady(
    call: GraphCall, inputs: Sequence[Any], put_back_positions: Callable[[], None]
) -> GraphCall:
    """`call`, after everything that compiles or captures later has done so. Raises
    NotLowerableError where it fell back meanwhile: it would be timed as what it fell back to.
    """
    for _ in range(CALLS_UNTIL_STEADY):
        _run_step(call, inputs, put_back_positions)
    if reason := getattr(call, "quarantined", ""):
        raise NotLowerableError(reason)
    return call


def _run_step(
    call: GraphCall | None, inputs: Sequence[Any], put_back_positions: Callable[[], None]
) -> Any:
    put_back_positions()
    assert call is not None
    return call(*inputs)


def choose_graph_operators(
    regions: Sequence[Region], context: TuneContext, *, writes: bool
) -> OperatorChoice | None:
    """The one region's Program with the fastest operators for attention and convolutions; None for
    a training step, and for a call that writes to its inputs, which is compiled as Dynamo traced
    it.
    """
    if len(regions) > 1 or writes:
        return None
    attention = choose_attention(regions[0].program, context.device)
    convolutions = choose_convolutions(attention.program, context.device)
    techniques = (*attention.techniques, *convolutions.techniques)
    return OperatorChoice(convolutions.program, techniques)


def make_quick_choices(
    regions: Sequence[Region], schedule: Schedule, operators: OperatorChoice | None = None
) -> tuple[Choice, ...]:
    """Every region's own Program under `schedule`, without an entry; the one region's with
    `operators`.
    """
    if operators is not None:
        (region,) = regions
        candidate = Candidate(operators.program, schedule, "baseline", operators.techniques)
        return (Choice(region, candidate, None, "quick tier"),)
    return tuple(
        Choice(region, Candidate(region.program, schedule, "baseline"), None, "quick tier")
        for region in regions
    )


def store_quick_choices(
    choices: Sequence[Choice],
    context: TuneContext,
    medians_us: Mapping[str, float],
    failures: Mapping[str, str],
    *,
    is_kept: bool = True,
) -> tuple[Choice, ...]:
    """The choices with their entries, which are put into the cache where `is_kept`. A disk that
    refuses costs the next process the measurement, and this call nothing.
    """
    stored_choices = []
    for choice in choices:
        if choice.entry is None:
            entry = make_quick_entry(choice.region, context, choice.candidate, medians_us, failures)
            choice = Choice(choice.region, choice.candidate, entry, "quick tier")
        else:
            # Composed of decided blocks: no quick entry, which a search would take for a miss.
            entry = choice.entry
        hit = resolve(choice.region, context.sources, context.target, context.contract).hit
        # An entry of a search stays, also one in quarantine: the next search begins with it.
        if is_kept and (hit is None or hit.entry.is_quick):
            stored = context.cache.put(entry)
            if isinstance(stored, Refusal):
                telemetry.record("resolve", "not_stored", choice.region.key, reason=stored.reason)
        stored_choices.append(choice)
    return tuple(stored_choices)


def describe_failure(error: BaseException) -> str:
    """Its class and first line. After a lack of memory, what lies idle is given back."""
    if isinstance(error, torch.OutOfMemoryError):
        # What the failed capture held must not make the next contender fail too.
        torch.cuda.empty_cache()
    return f"{type(error).__name__}: {error}".splitlines()[0]
