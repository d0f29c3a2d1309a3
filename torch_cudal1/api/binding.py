"""Binds one call signature of a module: capture, choose for each graph, build what won, and check
end to end that it pays.

The result is `Bound` (call this, as long as the guard holds) or `Unbound` (the module's own forward
is best, or cannot be served, and why). What may run is built in `api.contenders` and measured in
`api.module_trial`; looking up signatures at call time is `api.dispatcher`'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from torch_cudal1.api.bound import Bound, Unbound
from torch_cudal1.api.contenders import (
    FilledGraphs,
    ServedCall,
    build_contenders,
    fill_graphs,
    fill_in_place,
    find_written_placeholders,
)
from torch_cudal1.api.end_to_end import TORCH_COMPILE
from torch_cudal1.api.graphs.padding import makes_nested_tensors
from torch_cudal1.api.module_trial import (
    EndToEndDecision,
    ModuleTrial,
    find_remembered_decision,
    run_trial,
)
from torch_cudal1.api.pieces import Pieces
from torch_cudal1.api.ranks.consensus import (
    Broadcast,
    NoConsensus,
    has_ranks,
    reach_consensus,
    read_broadcast_choices,
)
from torch_cudal1.api.signatures.known_calls import is_known, remember_call
from torch_cudal1.api.signatures.recalled_call import CachedCall
from torch_cudal1.api.signatures.recalled_capture import (
    CaptureRecord,
    RecalledGraph,
)
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, GraphBreakError, NotLowerableError
from torch_cudal1.core.inductor_start import start_compile_workers
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import find_device
from torch_cudal1.graph.capture import TracedModule
from torch_cudal1.graph.captured import get_examples, lower_captured, trace_call
from torch_cudal1.graph.dynamo_session import settle_dynamo
from torch_cudal1.graph.lower import LoweredRegion
from torch_cudal1.graph.module_call import (
    Call,
    ModuleCall,
    capture_module_call,
    list_call_tensors,
    shares_written_memory,
)
from torch_cudal1.graph.swap import Swapped
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.judge import pool_scope
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.guard_builder import record_module
from torch_cudal1.runtime.guard_records import drop_state
from torch_cudal1.search.tune import Choice, Progress, choose
from torch_cudal1.store.context import TuneContext, make_context

__all__ = ["bind", "collect_weight_identities"]

SHARED_WRITES = (
    "its forward writes to memory that several tensors share, so no call of it can be measured"
)


@pool_scope()
def bind(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    settings: Settings,
    progress: Progress | None = None,
) -> Bound | Unbound:
    """Bind `module(*args, **kwargs)` in the present grad and autocast mode. Raises CacheMissError
    under on_miss="error".
    """
    _prestart_judge(module, args, dict(kwargs), settings)
    cached_call = _find_cached_call(module, args, dict(kwargs), settings)
    try:
        if cached_call is not None and (recalled := _bind_recalled_call(cached_call)) is not None:
            return recalled
        captured = capture_module_call(module, args, kwargs)
        context = make_context(find_device([*captured.inputs, *module.parameters()]), settings)
        record = CaptureRecord(captured.graph, captured.inputs, context)
        recalled = _bind_recalled(module, (args, dict(kwargs)), captured, record, cached_call)
        if recalled is not None:
            return recalled
        # Nothing is known of this call, so kernels will be compiled.
        if settings.on_miss in ("quick", "tune"):
            start_compile_workers(context.device)
        traced = trace_call(captured)
        graphs = [lower_captured(graph, module) for graph in traced.graphs]
    # A break means that Python of the user stands between graphs. Only the user's own calls may run
    # it.
    except GraphBreakError as problem:
        return _bind_in_pieces(module, args, dict(kwargs), settings, problem.reason)
    except NotLowerableError as problem:
        telemetry.record("capture", "left_out", reason=problem.reason)
        return Unbound(problem.reason)
    task = _CapturedCall(module, (args, dict(kwargs)), captured, traced, graphs, context)
    regions = [item.region for item in graphs]
    # Ranks must run the same choice: two kernels that round differently would make replicas
    # diverge. Without a process group this only calls `decide`.
    result = reach_consensus(
        [region.key for region in regions],
        context,
        decide=lambda: task.decide(progress),
        follow=lambda broadcast: task.bind(
            read_broadcast_choices(broadcast, regions, context),
            EndToEndDecision(broadcast.runs, broadcast.note),
        )[0],
    )
    if not isinstance(result, NoConsensus):
        # A later process asks for this digest before it captures anything.
        if settings.on_miss in ("tune", "quick"):
            remember_call(module, args, dict(kwargs), context)
            record.remember(traced, graphs)
            if cached_call is not None:
                cached_call.remember(captured, traced, graphs)
        return result
    if settings.on_miss == "error":
        raise CacheMissError(regions[0].key, f"{regions[0].name}: {result.reason}")
    return Unbound(result.reason, missed=True)


def _bind_recalled(
    module: torch.nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    captured: ModuleCall,
    record: CaptureRecord,
    cached_call: CachedCall | None,
) -> Bound | Unbound | None:
    """The binding without a trace, where an earlier process left a record of it and what runs
    computes what the user's own operators compute; else None.
    """
    context = record.context
    # A search looks at the call as if nothing were known; ranks agree on regions by their traces.
    if context.settings.on_miss == "tune" or has_ranks(context.settings):
        return None
    recalled = record.recall(f"{type(module).__name__}.inference")
    if isinstance(recalled, Refusal):
        return None
    task = _CapturedCall(module, example, captured, recalled, [recalled.region], context)
    bound = _bind_checked(task, captured.graph.forward)
    if bound is not None and cached_call is not None and context.settings.on_miss == "quick":
        cached_call.remember(captured, recalled, [recalled.region])
    return bound


def _find_cached_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> CachedCall | None:
    if not settings.recall:
        return None
    tensors = [*list_call_tensors(args, kwargs), *module.parameters()]
    call = CachedCall(module, args, kwargs, make_context(find_device(tensors), settings))
    # Before a capture, which loads modules: the name says which are loaded.
    _ = call.name
    return call


def _prestart_judge(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> None:
    """Start the judge's first process where there will be a search, while the call is captured."""
    # A search took 57 s with it, and 63 s without.
    if settings.on_miss == "tune" and not is_known(module, args, kwargs, settings):
        # The import loads the whole judge, so it is made only where there will be a search.
        from torch_cudal1.judge import prestart_fork_server

        prestart_fork_server(
            settings, find_device([*list_call_tensors(args, kwargs), *module.parameters()])
        )


def _bind_recalled_call(record: CachedCall) -> Bound | Unbound | None:
    """The binding without a capture, where an earlier process left a record of one and what runs
    computes what the module's own forward computes; else None.
    """
    context = record.context
    if context.settings.on_miss == "tune" or has_ranks(context.settings):
        return None
    recalled = record.recall()
    if isinstance(recalled, Refusal):
        return None
    graph, example = recalled.graph, (record.args, record.kwargs)
    task = _CapturedCall(record.module, example, recalled.captured, graph, [graph.region], context)
    return _bind_checked(task, lambda *_: recalled.outputs)


def _bind_checked(
    task: _CapturedCall, own_call: Callable[..., Sequence[Any]]
) -> Bound | Unbound | None:
    """The binding of a recalled graph, if it computes what `own_call` does."""
    assert isinstance(task.traced, RecalledGraph)
    bound, _ = task.decide(None)
    if isinstance(bound, Unbound):
        return None if bound.missed else bound
    # Imported here, as where composed wholes are checked.
    from torch_cudal1.api.shadow import check_recalled

    (choice,) = bound.choices
    refusal = check_recalled(choice, task.traced.call, own_call, task.captured.inputs, task.context)
    return bound if refusal is None else None


def _bind_in_pieces(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: Settings,
    reason: str,
) -> Bound | Unbound:
    """A forward that is several graphs: on trial in the user's own calls, where it may be searched
    for or won before.
    """
    tensors = [*list_call_tensors(args, kwargs), *module.parameters()]
    context = make_context(find_device(tensors), settings)
    obstacle: Refusal | None = None
    if has_ranks(settings):
        # A trial is decided by the clock of each process, so ranks would settle on different sides.
        obstacle = Refusal("ranks could not agree on a trial of their own calls")
    elif settings.on_miss not in ("tune", "quick") and not is_known(module, args, kwargs, settings):
        obstacle = Refusal("nothing was tuned for it")
    elif makes_nested_tensors(module) and not torch.is_grad_enabled():
        obstacle = Refusal("its encoder may take batches apart by their padding")
    # Dynamo replaces `nn.Module.__init__` when something is first compiled. Recorded before that,
    # the class would differ at the first call, and the guard would fail for ever.
    settle_dynamo()
    record = record_module(module)
    if isinstance(record, Refusal) or obstacle is not None:
        telemetry.record("capture", "left_out", reason=reason)
        return Unbound(f"{reason}; {record if isinstance(record, Refusal) else obstacle}")
    # With gradients a call is half a step: a way of running may save time forward and lose it
    # backward.
    trains = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in tensors)
    pieces = Pieces(module, settings, context.device, trains=trains, example=(args, kwargs))
    note = f"on trial in the module's own calls ({reason})"
    # The guard has only what Dynamo does not guard when it runs a module: hooks and the bodies of
    # classes. A call may change the module's state.
    return Bound(
        pieces.call,
        ModuleGuard(drop_state(record)),
        (),
        note,
        conditions=pieces.holds,
        pieces=pieces,
    )


@dataclass(frozen=True)
class _CapturedCall:
    """One captured call, to be decided and bound."""

    module: torch.nn.Module
    example: tuple[tuple[Any, ...], dict[str, Any]]
    captured: ModuleCall
    traced: TracedModule | RecalledGraph
    graphs: Sequence[LoweredRegion]
    context: TuneContext

    def decide(self, progress: Progress | None) -> tuple[Bound | Unbound, Broadcast | NoConsensus]:
        """The binding in this process, and the decision for other ranks."""
        choices = tuple(
            choose(
                item.region,
                self.context,
                examples=get_examples(item, graph, self.captured),
                progress=progress,
            )
            for item, graph in zip(self.graphs, self.traced.graphs, strict=True)
        )
        decision: EndToEndDecision | None = None
        # A training step is bound as a whole or not at all: forward and backward share saved
        # tensors.
        missed = next((choice.reason for choice in choices if choice.entry is None), None)
        if missed is not None:
            if self.context.settings.on_miss != "quick":
                return Unbound(missed, choices, missed=True), NoConsensus(missed)
            if self._shares_written_memory:
                return Unbound(SHARED_WRITES, choices), NoConsensus(SHARED_WRITES)
            choices, decision = self._choose_quickly()
        if not choices and decision is not None:
            return Unbound(decision.note), NoConsensus(decision.note)
        bound, decision = self.bind(choices, decision)
        entries = tuple(choice.entry for choice in choices if choice.entry is not None)
        return bound, Broadcast(decision.winner, decision.note, entries)

    def _choose_quickly(self) -> tuple[tuple[Choice, ...], EndToEndDecision | None]:
        """The quick tier's choices; with its decision where it was measured already."""
        # Imported here: a start on a warm cache measures nothing.
        from torch_cudal1.api.quick_tier import choose_for_step, choose_schedule

        regions = [item.region for item in self.graphs]
        if len(regions) > 1:
            return choose_for_step(regions, self.context), None
        trial = self._make_trial(is_training=False)
        if (refusal := self._check_capture(trial)) is not None:
            return (), EndToEndDecision("eager", refusal.reason)
        return choose_schedule(
            trial, regions, self.context, self._build_served_call, self._check_composed
        )

    def bind(
        self, choices: tuple[Choice, ...], decision: EndToEndDecision | None
    ) -> tuple[Bound | Unbound, EndToEndDecision]:
        """Build what `decision` says (None: what the cache remembers, else what is measured
        now).
        """
        captured, written = self.captured, self._written
        builders = self._builders(choices)
        # An earlier process measured these very candidates on this target; timing them again would
        # take up to 3 s for each contender at every start, and noise could decide otherwise.
        decision = decision or find_remembered_decision(builders, choices, self.context)
        if decision is None:
            decision = self._measure(builders, choices)
        # No dispatcher is better than one that calls eager: it costs 3 us a call.
        if decision.winner == "eager":
            return Unbound(decision.note, choices), decision
        call = decision.call or builders[decision.winner]()
        direct, call = (call.direct, call.call) if isinstance(call, ServedCall) else (None, call)
        return Bound(
            call,
            captured.guard,
            choices,
            decision.note,
            collect_weight_identities(self.module),
            direct,
            captured.conditions,
            captured.make_overlap_check(written),
            own_arguments=captured.guard.find_own_tensors(list_call_tensors(*self.example)),
        ), decision

    @cached_property
    def _written(self) -> frozenset[int]:
        # Written inputs need care twice: a measurement must put them back, and an argument that
        # shares memory with one of them would be read after the write.
        return find_written_placeholders(self.traced)

    @property
    def _shares_written_memory(self) -> bool:
        """Whether what the call writes to is memory of several inputs. AOTAutograd then traces one
        tensor in place of them, and a measurement would not know what to put back.
        """
        written = self._written | self.traced.mutated_inputs
        return shares_written_memory(self.captured.inputs, written)

    def _builders(
        self, choices: tuple[Choice, ...], compiled: ServedCall | None = None
    ) -> dict[str, Callable[[], Call]]:
        def fill() -> FilledGraphs:
            if self._writes_in_place(choices):
                call = compiled.filled.call if compiled is not None else None
                return fill_in_place(self.captured, choices[0], self.context, self._written, call)
            swapped = compiled.filled.swapped if compiled is not None else ()
            built = [item for item in swapped if isinstance(item, Swapped)]
            return fill_graphs(
                self.traced, self.graphs, choices, self.context, self.captured, built
            )

        return build_contenders(self.module, self.captured, choices, fill, self._written)

    def _writes_in_place(self, choices: tuple[Choice, ...]) -> bool:
        """Whether Inductor compiles Dynamo's own graph, because it writes to what the user
        passes.
        """
        candidate = choices[0].candidate
        # A replay in place would draw the same random numbers again.
        may_replay = not is_random_program(candidate.program)
        is_inductor = candidate.origin == "baseline" and candidate.schedule.compiles and may_replay
        return is_inductor and bool(self._written) and self.traced.replay_writes == self._written

    def _build_served_call(
        self, choices: tuple[Choice, ...], compiled: ServedCall | None
    ) -> ServedCall:
        call = self._builders(choices, compiled)["cudal1"]()
        assert isinstance(call, ServedCall)
        return call

    def _measure(
        self, builders: Mapping[str, Callable[[], Call]], choices: tuple[Choice, ...]
    ) -> EndToEndDecision:
        # Outside a search no time is spent on compiling the module with torch.compile, except for a
        # training step, where it is in no benchmark of regions.
        is_search = len(choices) > 1 or self.context.settings.on_miss == "tune"
        contenders = [name for name in builders if name != TORCH_COMPILE or is_search]
        if not contenders:
            return EndToEndDecision("eager", "eager is the fastest baseline and nothing beat it")
        if self._shares_written_memory:
            return EndToEndDecision("eager", SHARED_WRITES)
        if len(choices) == 1 and (
            refusal := self._check_capture(self._make_trial(is_training=False))
        ):
            return EndToEndDecision("eager", refusal.reason)
        built = {name: builders[name]() for name in contenders}
        refusal = self._check_composed(built.get("cudal1"), choices)
        if refusal is not None:
            return EndToEndDecision("eager", f"undone: {refusal.reason}")
        trial = self._make_trial(is_training=len(choices) > 1)
        return run_trial(trial, built, choices, self.context)

    def _check_capture(self, trial: ModuleTrial) -> Refusal | None:
        from torch_cudal1.api.shadow import check_capture

        def build(choices: tuple[Choice, ...]) -> Call:
            filled = fill_graphs(self.traced, self.graphs, choices, self.context, self.captured)
            return self.captured.wrap_compiled(filled.call, self._written)

        (item,), own_call = self.graphs, self.module._call_impl
        return check_capture(item.region, own_call, trial.arguments, build, self.context)

    def _check_composed(self, call: Call | None, choices: tuple[Choice, ...]) -> Refusal | None:
        """What is wrong with choices that were composed of blocks, on the user's own inputs."""
        if not isinstance(call, ServedCall):
            return None
        # Imported here: a start on a warm cache checks nothing.
        from torch_cudal1.api.shadow import check_composed

        for item, graph, choice, swapped in zip(
            self.graphs, self.traced.graphs, choices, call.filled.swapped, strict=False
        ):
            inputs = get_examples(item, graph, self.captured)
            if isinstance(swapped, Swapped) and (
                refusal := check_composed(choice, swapped, inputs, self.context)
            ):
                return refusal
        return None

    def _make_trial(self, *, is_training: bool) -> ModuleTrial:
        return ModuleTrial(
            self.module, self.example, self.captured, self._written, is_training=is_training
        )


def collect_weight_identities(module: torch.nn.Module) -> frozenset[int]:
    """Identities of the parameters and buffers of `module`, and of the tensors in its plain
    attributes.
    """
    # A tensor in a plain attribute is neither a parameter nor a buffer, and a forward may read it
    # all the same.
    plain = (
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor)
    )
    return frozenset(id(tensor) for tensor in (*module.parameters(), *module.buffers(), *plain))
