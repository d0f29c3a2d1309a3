"""The shared runner: the same contenders are verified and then timed, on the same module and
inputs.

`compute_references` computes what is right (float64) and how wrong eager is; `start_contender`
builds a contender on its own copy of the module and verifies it; `measure_contenders` times the
contenders in interleaved rounds, verifies them once more and returns one row each. A contender that
crashes or answers wrongly is a row with its reason, never left out. The runner chooses no models or
contenders (`bench_*.py`), starts no processes, and does not decide what is fast enough.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks.compare import Comparison, Reference, compare, make_reference
from benchmarks.models import Inputs, Workload, draw_inputs
from benchmarks.timing import Samples, collect_samples

__all__ = [
    "Case",
    "Contender",
    "Phase",
    "Row",
    "StartedContender",
    "compute_references",
    "make_failed_row",
    "measure_contenders",
    "start_contender",
]

Phase: TypeAlias = Literal["inference", "train"]
Call: TypeAlias = Callable[..., Any]

_EAGER_RUNS = 3
# input sets the timed calls rotate through, so that an answer kept from the last call is of no use
_INPUT_SETS = 4


@dataclass(frozen=True)
class Contender:
    """A way to run a module: `start(module, inputs)` returns the callable. A `baseline` is timed
    even when it is not verified.
    """

    name: str
    start: Callable[[nn.Module, Inputs], Call]
    baseline: bool = False


@dataclass(frozen=True)
class Case:
    """A workload in one phase: "inference" (eval mode, no_grad) or "train" (forward, loss,
    backward; no optimizer).
    """

    workload: Workload
    phase: Phase

    @property
    def device(self) -> str:
        """The device of the inputs, such as "cuda:0"."""
        return str(self.workload.inputs[0].device)

    def copy(self) -> nn.Module:
        """A copy of the module with the same weights, in the mode of the phase."""
        module = copy.deepcopy(self.workload.module).train(self.phase == "train")
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                # deepcopy loses cuDNN's one-chunk layout, and eager would then copy on every call
                layer.flatten_parameters()
        return module

    def mode(self) -> AbstractContextManager[Any]:
        """Gradient mode of the phase; entered once around many calls."""
        return torch.set_grad_enabled(self.phase == "train")

    def step(self, call: Call, module: nn.Module, inputs: Inputs) -> Any:
        """One call as timed. In training the gradients are in `module`'s parameters afterwards."""
        if self.phase == "inference":
            return call(*inputs)
        module.zero_grad(set_to_none=True)
        loss = self.workload.loss(call(*inputs))
        loss.backward()
        return loss

    def outputs(self, call: Call, module: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
        """Everything that must be right, as copies: the output; in training the loss and every
        gradient.

        Raises ValueError when a parameter has no gradient.
        """
        result = self.step(call, module, inputs)
        if self.phase == "inference":
            return {"output": result.detach().clone()}
        absent = [name for name, p in module.named_parameters() if p.grad is None]
        if absent:
            raise ValueError(
                f"no gradient for {', '.join(absent)}; expected one for every parameter"
            )
        gradients = {
            name: p.grad.detach().clone()
            for name, p in module.named_parameters()
            if p.grad is not None
        }
        return {"loss": result.detach().clone(), **gradients}


@dataclass(frozen=True)
class Row:
    """One line of the results: a contender on a case. `status`: "ok", "wrong" (not verified),
    "failed" (no answer); see README.
    """

    model: str
    phase: str
    contender: str
    status: Literal["ok", "wrong", "failed"]
    reason: str = ""
    verified: bool = False
    error_ratio: float | None = None
    outputs: int = 0
    void_outputs: int = 0
    first_call_s: float | None = None
    median_us: float | None = None
    vs_eager: Mapping[str, float] | None = None
    vs_compile: Mapping[str, float] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    # why the package ran no choice of its own: it failed, or left a graph out
    fallbacks: Sequence[str] = ()
    # what the package recorded: every contender and why it does not run
    decisions: Sequence[Mapping[str, Any]] = ()


@dataclass
class StartedContender:
    """A contender that runs: its own module, its callable, and its results so far."""

    contender: Contender
    module: nn.Module
    call: Call
    first_call_s: float
    verdict: Comparison
    counters: Mapping[str, int] = field(default_factory=dict)
    fallbacks: Sequence[str] = ()
    decisions: Sequence[Mapping[str, Any]] = ()

    @property
    def is_timed(self) -> bool:
        """Wrong contenders have no speed; a baseline is the denominator whatever its error."""
        return self.verdict.passed or self.contender.baseline


def compute_references(case: Case, *, draws: int = 2) -> list[tuple[Inputs, Reference]]:
    """Fresh inputs with their float64 results and eager's errors, `draws` times."""
    exact_module, eager = case.copy().double(), case.copy()
    reference_pairs = []
    with case.mode():
        for seed in range(1, draws + 1):
            inputs = draw_inputs(case.workload.inputs, seed)
            upcast = tuple(t.double() if t.is_floating_point() else t for t in inputs)
            exact = case.outputs(exact_module, exact_module, upcast)
            runs = [case.outputs(eager, eager, inputs) for _ in range(_EAGER_RUNS)]
            reference_pairs.append((inputs, make_reference(exact, runs)))
    return reference_pairs


def start_contender(
    case: Case, contender: Contender, refs: Sequence[tuple[Inputs, Reference]]
) -> StartedContender | Row:
    """Build the contender and verify it on every reference; a Row if it crashes."""
    try:
        with case.mode():
            begin = time.perf_counter()
            module = case.copy()
            call = contender.start(module, case.workload.inputs)
            case.outputs(call, module, case.workload.inputs)
            first_call_s = time.perf_counter() - begin
            return StartedContender(
                contender, module, call, first_call_s, _verify(case, call, module, refs)
            )
    except Exception as error:  # noqa: BLE001
        # whatever a contender raises is its result: a row with the reason
        return make_failed_row(
            case.workload.name, case.phase, contender.name, _describe_error(error)
        )


def measure_contenders(
    case: Case,
    started: Sequence[StartedContender],
    refs: Sequence[tuple[Inputs, Reference]],
    *,
    rounds: int,
    eager: str,
    compiled: str,
    more_s: float = 0.0,
) -> list[Row]:
    """Time the contenders, verify those timed once more, and return a row for each.

    `rounds` and `more_s` are `timing.collect_samples`'s.

    `eager` and `compiled` name the contenders that speed-ups refer to; one that is not among
    `started` leaves its column None.
    """
    crashed: dict[str, str] = {}
    input_sets = [draw_inputs(case.workload.inputs, 100 + seed) for seed in range(_INPUT_SETS)]
    runs = {
        live.contender.name: _make_timed_call(case, live, input_sets)
        for live in started
        if live.is_timed
    }
    with case.mode():
        for name in list(runs):
            try:
                runs[name]()
            except Exception as error:  # noqa: BLE001
                # as in `start_contender`: a contender that stops working is a row
                crashed[name] = _describe_error(error)
                del runs[name]
        samples = collect_samples(runs, device=case.device, rounds=rounds, more_s=more_s)
        for live in started:
            if live.contender.name in runs:
                live.verdict += _verify(case, live.call, live.module, refs[:1])
    return [
        _make_row(case, live, samples, crashed.get(live.contender.name, ""), (eager, compiled))
        for live in started
    ]


def make_failed_row(model: str, phase: str, contender: str, reason: str) -> Row:
    """The row of a contender without an answer."""
    return Row(model, phase, contender, "failed", reason=reason)


def _verify(
    case: Case, call: Call, module: nn.Module, refs: Sequence[tuple[Inputs, Reference]]
) -> Comparison:
    verdict = Comparison(True, None)
    for inputs, ref in refs:
        verdict += compare(case.outputs(call, module, inputs), ref)
    return verdict


def _make_timed_call(
    case: Case, live: StartedContender, input_sets: Sequence[Inputs]
) -> Callable[[], object]:
    turn = itertools.cycle(input_sets)
    return lambda: case.step(live.call, live.module, next(turn))


def _make_row(
    case: Case, live: StartedContender, samples: Samples, crash: str, references_to: tuple[str, str]
) -> Row:
    name, verdict = live.contender.name, live.verdict
    timed = name in samples.us and live.is_timed
    ratios = [
        samples.speedup(base, name) if timed and base in samples.us and base != name else None
        for base in references_to
    ]
    return Row(
        case.workload.name,
        case.phase,
        name,
        "failed" if crash else "ok" if verdict.passed else "wrong",
        reason=crash or verdict.reason,
        verified=verdict.passed and not crash,
        error_ratio=verdict.error_ratio,
        outputs=verdict.outputs,
        void_outputs=verdict.void,
        first_call_s=live.first_call_s,
        median_us=samples.median_us(name) if timed else None,
        vs_eager=ratios[0],
        vs_compile=ratios[1],
        counters=live.counters,
        fallbacks=live.fallbacks,
        decisions=live.decisions,
    )


def _describe_error(error: BaseException) -> str:
    """Type and message on one line, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
