"""A forward that is several graphs with the user's Python between: Dynamo runs it, and each graph
gets this package's decision.

Only the user may run such a forward: what lies between the graphs may print, count or write a file.
So nothing is tried before the first call. The forward is compiled at that call and tuned there where
the settings say so, and the calls that follow are the trial: in turn they run the module's own
forward and the graphs, each on the clock, until the medians say which stays.

Without gradients a call is measured. With gradients a step is, from its first call to the next
step's: a way of running may save time forward and lose it backward. A step is over when a backward
has reached a result of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, partial, wraps
from statistics import median
from types import CodeType
from typing import Any, TypeAlias

import torch

from torch_cudal1.api.backend import cudal1, report_choices_to, run_graph
from torch_cudal1.api.gradients.double_backward import allow_graph_double_backward
from torch_cudal1.api.gradients.training_step import MIN_SPEEDUP_BEYOND_NOISE
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.dynamo import Entries, leaves_grad_mode
from torch_cudal1.graph.dynamo_guard_records import RecordCollector
from torch_cudal1.graph.dynamo_session import silence_dynamo
from torch_cudal1.graph.module_call import list_call_tensors
from torch_cudal1.graph.traced_code import (
    CodeKey,
    CodeVisitor,
    find_compiler_question,
    find_uncompared_read,
    list_own_code,
)
from torch_cudal1.runtime.guard import ModuleGuard, has_saved_tensor_hooks
from torch_cudal1.runtime.guard_records import GuardRecords
from torch_cudal1.search.tune import Choice

__all__ = ["Pieces"]

# Pairs of calls before a first decision. More follow, up to MAX_PAIRS, while the sides are close.
MIN_PAIRS = 8
MAX_PAIRS = 32
# A step in which something was compiled is not counted. This ends a trial where every step is one.
MAX_TRIAL_STEPS = 4 * MAX_PAIRS
# A step ends with a backward. This many calls end it where none comes: several losses share one
# backward, or the caller forgot `torch.no_grad()`.
MAX_CALLS_PER_STEP = 4
# The fraction of pairs that the graphs must win. A median alone is not enough: calls of a real
# program differ in their inputs, and so do their times.
MIN_WON_FRACTION = 0.75
# Steps before the first measured one: the first compiles, the second may compile another branch.
COMPILE_STEPS = 2
# Mirrored, so that a drift of the machine's speed falls on both sides alike.
_ORDER = ("own", "graphs", "graphs", "own")
OnSettled: TypeAlias = Callable[["Pieces", str, tuple[Any, ...], dict[str, Any]], None]


class _TrialStep:
    """What is measured: one call, or all calls up to a backward and whatever follows before the
    next call.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.begin = 0.0
        # Graphs compiled before the step; more of them after it mean that the step compiled.
        self.graphs = 0
        self.had_backward = False

    @property
    def is_over(self) -> bool:
        """Whether a call that comes now belongs to another step."""
        return self.had_backward or self.calls >= MAX_CALLS_PER_STEP

    def watch(self, result: Any) -> None:
        """Notice a backward that reaches `result`."""
        for node in {
            tensor.grad_fn
            for tensor in list_call_tensors((result,), {})
            if tensor.grad_fn is not None
        }:
            # A prehook sees a backward at its start and leaves the gradients as they are.
            node.register_prehook(self._note_backward)

    def _note_backward(self, gradients: Any) -> None:
        self.had_backward = True


class Pieces:
    """`call(args, kwargs)` is the module's result, from its graphs or from its own forward.

    `on_settled(self, note, args, kwargs)` is called once, at the call with which the trial ends.
    Any number of threads may call: one call at a time is part of the trial, the others run the
    module's own forward.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        settings: Settings,
        device: torch.device,
        *,
        trains: bool,
        example: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        """`trains`: whether gradients are wanted of the calls; `example`: the arguments of one."""
        self._module, self._settings, self._device, self._trains = module, settings, device, trains
        self._seconds: dict[str, list[float]] = {"own": [], "graphs": []}
        self._turn = threading.Lock()
        self._step = _TrialStep()
        # Steps that are over.
        self._steps = 0
        # One a frame that Dynamo compiled.
        self._frame_guards: list[ModuleGuard] = []
        # Dynamo does not compare arguments with the module's own tensors.
        tensors = (*module.parameters(), *module.buffers())
        self._own_tensors = frozenset(map(id, tensors))
        self._own_arguments = self._find_own_arguments(*example)
        # Of the frame that is being compiled.
        self._traced_code: dict[CodeKey, CodeType] = {}
        self.graphs = 0
        self.choices: list[Choice] = []
        self.on_settled: OnSettled = lambda *args: None
        # Whether the graphs stay; None during the trial.
        self.settled: bool | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of the user's calls. Raises what the module's own forward raises."""
        if self._trains and has_saved_tensor_hooks():
            # Activation checkpointing runs a forward again and compares what it saves. The trial
            # might pick another side in between.
            return self._module._call_impl(*args, **kwargs)
        if self.settled:
            return self._torch_compiled(*args, **kwargs)
        # Under capture of a CUDA graph a call cannot be timed: the clock needs `synchronize`, which
        # a capture forbids. Two calls at once would time each other.
        if self.settled is False or self._is_capturing() or not self._turn.acquire(blocking=False):
            return self._module._call_impl(*args, **kwargs)
        try:
            return self._run_on_trial(args, kwargs)
        finally:
            self._turn.release()

    def _run_on_trial(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the trial. The first step compiles; the next one of the graphs may compile what
        another branch needs, off the clock.
        """
        if self._trains and self._step.is_over:
            self._end_step(args, kwargs)
        side = self._choose_side()
        if not self._step.calls:
            # The clock starts with the first call of a step and runs on through the user's own
            # code.
            self._step.graphs, self._step.begin = self.graphs, self._read_clock()
        self._step.calls += 1
        try:
            result = (self._torch_compiled if side == "graphs" else self._module._call_impl)(
                *args, **kwargs
            )
        # Also KeyboardInterrupt: half a step must not be counted, and the next call begins a new
        # one.
        except BaseException:
            self._step = _TrialStep()
            self._steps += 1
            raise
        # Without gradients the call is the whole step; with them its backward ends it.
        if self._trains:
            self._step.watch(result)
        else:
            self._end_step(args, kwargs)
        return result

    def _choose_side(self) -> str:
        """What runs in the present step."""
        if self.settled is not None:
            return "graphs" if self.settled else "own"
        return "graphs" if self._steps < COMPILE_STEPS else _ORDER[self._steps % len(_ORDER)]

    def _end_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what the step took, unless something was compiled in it, and decide if that is
        enough.
        """
        step, self._step = self._step, _TrialStep()
        if self._steps >= COMPILE_STEPS and self.graphs == step.graphs:
            self._seconds[self._choose_side()].append(self._read_clock() - step.begin)
        self._steps += 1
        if self._steps > COMPILE_STEPS:
            self._settle_trial(args, kwargs)

    def _settle_trial(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The sides may have one step more or less, as steps that compiled are left out.
        pairs = list(zip(self._seconds["own"], self._seconds["graphs"], strict=False))
        more = len(pairs) < MAX_PAIRS and self._steps < MAX_TRIAL_STEPS
        if len(pairs) < MIN_PAIRS and more:
            return
        speedup = (
            median(own_s for own_s, _ in pairs) / median(graphs for _, graphs in pairs)
            if pairs
            else 0.0
        )
        won = sum(own_s >= graphs * MIN_SPEEDUP_BEYOND_NOISE for own_s, graphs in pairs)
        # Between a quarter and three quarters of won pairs nothing is plain yet.
        if more and 0.25 < won / len(pairs) < MIN_WON_FRACTION:
            return
        self.settled = speedup >= MIN_SPEEDUP_BEYOND_NOISE and won >= MIN_WON_FRACTION * len(pairs)
        note = (
            f"in {self.graphs} graphs with Python between: {speedup:.2f}x of the module's own "
            f"forward, faster in {won} of {len(pairs)} pairs of {self._unit}"
        )
        telemetry.record(
            "judge",
            "pieces",
            type(self._module).__name__,
            speedup=speedup,
            pairs=len(pairs),
            stays=self.settled,
        )
        self.on_settled(self, note, args, kwargs)

    @property
    def _unit(self) -> str:
        return "training steps" if self._trains else "calls"

    @cached_property
    def _torch_compiled(self) -> Callable[..., Any]:
        """`torch.compile` of the module, below the slot in which `accelerate` sits. Where Dynamo
        fails, eager runs and raises.
        """
        from torch._dynamo import config
        from torch._dynamo.eval_frame import OptimizeContext, optimize

        # Where Dynamo fails the user's call runs eager, unless the settings ask for an error.
        suppressed = self._settings.strictness != "error" and self._settings.on_miss != "error"
        context = optimize(self._compile_graph, guard_filter_fn=self._record_frame)
        # `optimize` returns a null context under TORCHDYNAMO_DISABLE=1.
        if not isinstance(context, OptimizeContext):
            return self._module._call_impl
        convert: Any = context.callback

        # `suppress_errors` and the silence must hold while Dynamo compiles this module, and only
        # then: the user may compile other models with other settings.
        @wraps(convert)
        def convert_quietly(*args: Any, **kwargs: Any) -> Any:
            with config.patch(suppress_errors=suppressed), silence_dynamo():
                return convert(*args, **kwargs)

        context.callback = convert_quietly
        # `_call_impl` lies below the slot in which the dispatcher sits; the module itself would
        # recurse.
        compiled: Callable[..., Any] = context(self._module._call_impl)
        return compiled

    def holds(self, call: dict[str, Any]) -> bool:
        """Whether Python still finds what the frames looked up, and the same arguments as before are
        tensors of the module; the values that the frames read are Dynamo's to compare.
        """
        return self._find_own_arguments(
            call["args"], call["kwargs"]
        ) == self._own_arguments and all(guard.holds() for guard in self._frame_guards)

    def _find_own_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[int, int], ...]:
        return tuple(
            (position, id(tensor))
            for position, tensor in enumerate(list_call_tensors(args, kwargs))
            if id(tensor) in self._own_tensors
        )

    def _record_frame(self, entries: Entries) -> list[bool]:
        # Dynamo keeps nothing of a frame without a graph.
        codes, self._traced_code = self._traced_code, {}
        collector = RecordCollector(GuardRecords.make_empty())
        visitor = CodeVisitor(codes, collector)
        for entry in entries:
            if entry.has_value:
                # An argument itself may be another object in the next call.
                visitor.visit(entry.value if isinstance(entry.value, type) else type(entry.value))
        visitor.visit_remaining(codes)
        self._frame_guards.append(ModuleGuard(collector.merge()))
        return [True] * len(entries)

    def _compile_graph(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        # Before torch 2.13 Dynamo restores the grad mode after such a graph, also behind
        # torch.compile's own backends. After this error it runs this part of the forward in eager.
        if leaves_grad_mode(gm):
            raise NotLowerableError("a part of its forward leaves the grad mode changed")
        from torch._guards import TracingContext

        context = TracingContext.try_get()
        self._traced_code = list_own_code(context.traced_code if context else ())
        codes = self._traced_code.values()
        if refusal := find_uncompared_read(codes) or find_compiler_question(codes):
            raise NotLowerableError(refusal.reason)
        self.graphs += 1
        options = {
            field.name: getattr(self._settings, field.name) for field in fields(self._settings)
        }
        with report_choices_to(self.choices.extend):
            # Without `fallback_random` Inductor draws other numbers than eager under the same seed.
            call = cudal1(gm, inputs, options={**options, "fallback_random": True})
        # AOTAutograd's backward has no derivative of its own.
        return allow_graph_double_backward(call, partial(run_graph, gm)) if self._trains else call

    def _read_clock(self) -> float:
        if self._device.type == "cuda":
            # Kernels run after the call returned; without waiting only launches would be timed.
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
