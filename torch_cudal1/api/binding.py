"""Binds one call signature of a module: capture, choose for each graph, build what won, and check
end to end that it pays.

The result is `Bound` (call this, as long as the guard holds) or `Unbound` (the module's own forward
is best, or cannot be served, and why). Looking up signatures at call time is `module`'s work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from torch_cudal1.api.double_backward import differentiable_twice
from torch_cudal1.api.gate import COMPILE, in_words, raced, those_that_pay, told
from torch_cudal1.api.pieces import Pieces
from torch_cudal1.api.ranks.consensus import Apart, Told, agreed, choices_from, has_ranks
from torch_cudal1.api.shadow import NotWatched, watched
from torch_cudal1.api.trial_step import gradients
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, GraphBreakError, NotLowerableError
from torch_cudal1.core.settings import Settings
from torch_cudal1.device.target import device_of
from torch_cudal1.graph.capture import Traced, backward_repeatable
from torch_cudal1.graph.captured import captured_call, examples_of, lower_captured
from torch_cudal1.graph.dynamo import have_dynamo_settled
from torch_cudal1.graph.functional_module import keeping_versions, random_kept, running_statistics
from torch_cudal1.graph.lower import Lowered
from torch_cudal1.graph.module_call import Call, ModuleCall, tensors_among
from torch_cudal1.graph.swap import Swapped, in_graph_order, swap
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.records import NOT_EAGERS, Miss
from torch_cudal1.judge import kept_warm
from torch_cudal1.judge.benchmark.statistics import PairedSummary
from torch_cudal1.runtime.dispatch import Direct, entry, through
from torch_cudal1.runtime.guard import ModuleGuard, call_state, python_signature
from torch_cudal1.runtime.guard_builder import watch
from torch_cudal1.runtime.guard_records import Refusal, without_state
from torch_cudal1.runtime.index_checks import as_eager_raises, cpu_index_checks
from torch_cudal1.search.inductor_artifacts import inductor_options, ready
from torch_cudal1.search.tune import Choice, Progress, choose, end_to_end_name
from torch_cudal1.store.context import Place, place_for

__all__ = [
    "Bound",
    "Unbound",
    "bind",
    "is_known",
    "make_known",
    "remember_pieces",
    "weights_of",
]


@dataclass(frozen=True)
class Bound:
    """`call(args, kwargs)` is right for a call that it `serves`; `choices` say what runs in it.

    `guard` compares the module; `conditions`, given {module, args, kwargs}, what else Dynamo guards
    (None: nothing); `apart` says whether the call's arguments share no memory with what the call
    writes to (None: they cannot). `pieces`: what `call` belongs to where the forward is several
    graphs; Dynamo guards each of them.
    """

    call: Call
    guard: Any
    choices: tuple[Choice, ...]
    note: str = ""
    weights: frozenset[int] = (
        frozenset()
    )  # identities of the module's tensors that `call` keeps alive
    direct: Direct | None = (
        None  # the same call without AOTAutograd's wrapper, where nothing needs that
    )
    conditions: Callable[[dict[str, Any]], bool] | None = None
    apart: Call | None = None
    pieces: Pieces | None = None

    def serves(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether everything that the call depends on, besides values of tensors, is as it was when
        it was captured.
        """
        return (
            self.guard.holds()
            and (
                self.conditions is None
                or self.conditions({"module": module, "args": args, "kwargs": kwargs})
            )
            and (self.apart is None or self.apart(args, kwargs))
        )


@dataclass(frozen=True)
class Unbound:
    """The module's own forward runs, and why.

    `missed`: nothing is known yet, so a later warm-up may change that. After a change of the
    module, `guard` is what this was decided for (None: for good).
    """

    reason: str
    choices: tuple[Choice, ...] = ()
    missed: bool = False
    guard: Any = None


@kept_warm()
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
    if settings.on_miss == "tune" and not is_known(module, args, dict(kwargs), settings):
        from torch_cudal1.judge import (
            expect,
        )  # loads the whole judge: only where there will be a search

        expect(settings, device_of([*tensors_among(args, kwargs), *module.parameters()]))
    try:
        captured, traced = captured_call(module, args, kwargs)
        lowered = [lower_captured(graph, module) for graph in traced.graphs]
    except GraphBreakError as problem:
        return _bind_in_pieces(module, args, dict(kwargs), settings, problem.reason)
    except NotLowerableError as problem:
        telemetry.record("capture", "left_out", reason=problem.reason)
        return Unbound(problem.reason)
    place = place_for(device_of([*captured.inputs, *module.parameters()]), settings)
    task = _Task(module, (args, dict(kwargs)), captured, traced, lowered, place)
    regions = [item.region for item in lowered]
    found = agreed(
        [region.key for region in regions],
        place,
        decide=lambda: task.decide(progress),
        follow=lambda told: task.bind(
            choices_from(told, regions, place), _Settled(told.runs, told.note)
        )[0],
    )
    if not isinstance(found, Apart):
        if settings.on_miss == "tune":
            make_known(module, args, dict(kwargs), place)
        return found
    if settings.on_miss == "error":
        raise CacheMissError(regions[0].key, f"{regions[0].name}: {found.reason}")
    return Unbound(found.reason, missed=True)


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
    leaves = [*tensors_among(args, kwargs), *module.parameters()]
    place = place_for(device_of(leaves), settings)
    why = ""
    if has_ranks(settings):
        why = "ranks could not agree on a trial of their own calls"
    elif settings.on_miss != "tune" and not is_known(module, args, kwargs, settings):
        why = "nothing was tuned for it"
    have_dynamo_settled()
    watched = watch(module)
    if isinstance(watched, Refusal):
        why = watched.reason
    if why or isinstance(watched, Refusal):
        telemetry.record("capture", "left_out", reason=reason)
        return Unbound(f"{reason}; {why}")
    trains = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    pieces = Pieces(module, settings, place.device, trains=trains)
    note = f"on trial in the module's own calls ({reason})"
    return Bound(
        pieces.call,
        ModuleGuard(without_state(watched)),
        (),
        note,
        conditions=pieces.holds,
        pieces=pieces,
    )


def remember_pieces(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> None:
    """Note that calls like this one won in several graphs, for later processes."""
    make_known(
        module,
        args,
        kwargs,
        place_for(device_of([*tensors_among(args, kwargs), *module.parameters()]), settings),
    )


def is_known(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> bool:
    """Whether the cache has heard of a call like this one, told without capturing it. A hint only:
    a capture asks for the decision.
    """
    place = place_for(device_of([*tensors_among(args, kwargs), *module.parameters()]), settings)
    return not isinstance(place.alias(_call_digest(module, args, kwargs)), Miss)


def make_known(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place
) -> None:
    """Note that the cache holds a decision for a call like this one, for `is_known` in later
    processes.
    """
    name = _call_digest(module, args, kwargs)
    if isinstance(place.cache.get_alias(name, place.target, place.contract), Miss):
        place.cache.put_alias(name, {"decided": True}, place.target, place.contract)


def _call_digest(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What kind of module is called with what: classes, forms of weights and arguments, modes. The
    same in every process.
    """
    parts = [
        f"{name} {type(part).__module__}.{type(part).__qualname__} {part.training}"
        for name, part in module.named_modules()
    ]
    weights = [
        f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}"
        for tensor in (*module.parameters(), *module.buffers())
    ]
    described = repr(
        (
            parts,
            weights,
            python_signature(args, kwargs, opaque=True),
            call_state("cpu"),
            call_state("cuda"),
        )
    )
    return hashlib.sha256(described.encode()).hexdigest()


@dataclass(frozen=True)
class _Task:
    """One captured call, to be decided and bound."""

    module: torch.nn.Module
    example: tuple[tuple[Any, ...], dict[str, Any]]
    captured: ModuleCall
    traced: Traced
    lowered: Sequence[Lowered]
    place: Place

    def decide(self, progress: Progress | None) -> tuple[Bound | Unbound, Told | Apart]:
        """What this process makes of the call, and what it tells other ranks."""
        choices = tuple(
            choose(
                item.region,
                self.place,
                examples=examples_of(item, graph, self.captured),
                progress=progress,
            )
            for item, graph in zip(self.lowered, self.traced.graphs, strict=True)
        )
        entries = tuple(choice.entry for choice in choices if choice.entry is not None)
        if len(entries) < len(choices):
            reason = next(choice.reason for choice in choices if choice.entry is None)
            return Unbound(reason, choices, missed=True), Apart(reason)
        bound, settled = self.bind(choices, None)
        return bound, Told(settled.winner, settled.note, entries)

    def bind(
        self, choices: tuple[Choice, ...], settled: _Settled | None
    ) -> tuple[Bound | Unbound, _Settled]:
        """Build what `settled` says (None: what the cache remembers, else what is measured now)."""
        captured, traced, place = self.captured, self.traced, self.place

        def fill() -> tuple[Callable[..., Any], Direct | None]:
            built = _fill(traced, self.lowered, choices, place)
            return traced.call, _direct(traced, self.lowered, built, captured)

        builders = _contenders(self.module, captured, choices, fill, _written(traced))
        nothing = _Settled("eager", "eager is the fastest baseline and nothing beat it")
        settled = settled or _settled(builders, choices, place)
        # outside a search nobody waits for torch.compile where it is one baseline among others
        asked = [
            name
            for name in builders
            if name != COMPILE or len(choices) > 1 or place.settings.on_miss == "tune"
        ]
        if settled is None and not asked:
            settled = nothing
        if settled is None:
            trial = _Trial(
                self.module, self.example, captured, _written(traced), len(traced.graphs) > 1
            )
            settled = _end_to_end(trial, {name: builders[name]() for name in asked}, choices, place)
        if settled.winner == "eager":
            return Unbound(settled.note, choices), settled
        call = settled.call or builders[settled.winner]()
        direct, call = (call.direct, call.call) if isinstance(call, _Served) else (None, call)
        weights, apart = weights_of(self.module), captured.apart(_written(traced))
        return Bound(
            call, captured.guard, choices, settled.note, weights, direct, captured.conditions, apart
        ), settled


def weights_of(module: torch.nn.Module) -> frozenset[int]:
    """Identities of the parameters and buffers of `module`, and of the tensors in its plain
    attributes.
    """
    plain = (
        value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, torch.Tensor)
    )
    return frozenset(id(tensor) for tensor in (*module.parameters(), *module.buffers(), *plain))


def _written(traced: Traced) -> frozenset[int]:
    """The placeholders of Dynamo's graph that a call writes to."""
    return frozenset(
        origin for graph in traced.graphs for origin in graph.writes if isinstance(origin, int)
    )


@dataclass(frozen=True, eq=False)
class _Served:
    """A call graph by graph, and the short way to it if there is one; `guard` says how long that
    may be taken.
    """

    call: Call
    direct: Direct | None
    guard: ModuleGuard
    module: torch.nn.Module

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call(args, kwargs)

    def as_a_module_would(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place
    ) -> Call:
        """What calls like this one will cost: the short way in front."""
        table = entry(cuda=place.device.type == "cuda")
        if table is None or self.direct is None:
            return self.call
        self.direct.into(table, self, self.guard, self.module, args, kwargs)
        return through(table, self.call)


def _fill(
    traced: Traced, lowered: Sequence[Lowered], choices: Sequence[Choice], place: Place
) -> list[Swapped]:
    """Build every choice into its graph of the trace."""
    built, writes = [], any(graph.writes for graph in traced.graphs)
    how: dict[str, Any] = {
        "strictness": place.settings.strictness,
        "options": inductor_options(place),
    }
    with ready([choice.region.key for choice in choices], place):
        for item, choice in zip(lowered, choices, strict=True):
            around = watched(choice, place, writes=writes)
            front = None if isinstance(around, NotWatched) else around
            built.append(swap(choice.region, choice.candidate, place.device, around=front, **how))
            traced.fill(item.region.kind, in_graph_order(built[-1], item.order))
    return built


def _direct(
    traced: Traced, lowered: Sequence[Lowered], built: Sequence[Swapped], captured: ModuleCall
) -> Direct | None:
    """The short way to the one graph, if nothing of AOTAutograd's wrapper or of Dynamo's bytecode
    is needed around it.
    """
    if (
        not traced.direct
        or captured.sources is None
        or captured.outputs is None
        or captured.outputs.uses_arguments
    ):
        return None
    (item,), (graph,), (swapped,) = lowered, traced.graphs, built
    origins = [graph.origins[position] for position in item.order]
    sources = tuple(captured.sources[origin] for origin in origins if isinstance(origin, int))
    assert len(sources) == len(origins)  # `traced.direct` says so
    return Direct(lambda: swapped.direct, sources, captured.finisher(), captured.conditions)


def _contenders(
    module: torch.nn.Module,
    captured: ModuleCall,
    choices: tuple[Choice, ...],
    fill: Callable[[], tuple[Callable[..., Any], Direct | None]],
    written: frozenset[int],
) -> dict[str, Callable[[], Call]]:
    """Builders of what may run instead of the module's own forward: the choices graph by graph, and
    torch.compile where that is not known to be slower.
    """
    training = len(choices) > 1
    random = any(is_random_program(choice.region.program) for choice in choices)
    repeatable = not random and {id(captured.inputs[number]) for number in written} <= set(
        map(id, running_statistics(module))
    )
    on_cpu = choices[0].region.program.device == "cpu"

    def whole_step() -> Call:
        # Inductor's own random numbers would not be eager's; asked to, it draws from eager's
        # generator.
        options: dict[str, Any] = {"fallback_random": True} if random else {}
        if on_cpu:
            options |= cpu_index_checks()
        compiled = as_eager_raises(
            torch.compile(module._call_impl, backend=_inductor(options)), module._call_impl
        )
        return twice(lambda args, kwargs: compiled(*args, **kwargs))

    def graph_by_graph() -> Call:
        whole, direct = fill()
        return _Served(
            twice(keeping_versions(captured.around(whole, written), module)),
            direct,
            captured.guard,
            module,
        )

    def twice(call: Call) -> Call:
        return (
            differentiable_twice(call, module, captured.guard) if training and repeatable else call
        )

    found = {COMPILE: whole_step} if training or _may_lose_to_compile(choices[0]) else {}
    if any(choice.swapped for choice in choices) or not (
        training or choices[0].candidate.schedule == "eager"
    ):
        found["cudal1"] = graph_by_graph
    return found


def _inductor(options: dict[str, Any]) -> Callable[..., Any]:
    """torch.compile's default backend, for steps whose backward may be repeated."""

    def compile_graph(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with backward_repeatable():
            return compile_fx(gm, inputs, config_patches=options or None)

    return compile_graph


def _may_lose_to_compile(choice: Choice) -> bool:
    """Whether torch.compile itself must be measured beside what was chosen for an inference graph.

    A CUDA graph of a baseline won by medians, in another process; and where Inductor failed in that
    process, it had no race.
    """
    evidence = choice.entry.evidence if choice.entry is not None else {}
    failed = evidence.get("baseline_failures", {}).get("inductor", "")
    if failed:
        return bool(failed != NOT_EAGERS)
    return (
        not choice.swapped
        and choice.candidate.schedule.endswith("+graph")
        and "inductor" in evidence.get("baselines_us", {})
    )


@dataclass(frozen=True)
class _Settled:
    """What won end to end, a sentence about it, and its callable if it was built to be measured."""

    winner: str
    note: str
    call: Call | None = None


@dataclass(frozen=True)
class _Trial:
    """The example call of the end-to-end measurement, and the graph inputs that it writes to."""

    module: torch.nn.Module
    example: tuple[tuple[Any, ...], dict[str, Any]]
    captured: ModuleCall
    written: frozenset[int]
    training: bool

    @contextmanager
    def arguments(self, device: torch.device) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The user's arguments; afterwards every tensor that the call writes to and the random
        generators are as before.

        Only what is written is put back, with the version it had: anything else would count as a
        change to a graph that waits for its backward.
        """
        tensors = [self.captured.inputs[number] for number in sorted(self.written)]
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            with (
                torch.random.fork_rng(
                    [device.index or 0] if device.type == "cuda" else [], device_type="cuda"
                ),
                random_kept(),
            ):
                yield self.example
        finally:
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)

    def against_own(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place
    ) -> PairedSummary:
        """Paired times of the module's own forward and `call`; with their backward where gradients
        are wanted.
        """
        return raced(
            self._step(self.module._call_impl, args, kwargs),
            self._served(call, args, kwargs, place),
            place,
        )

    def between(
        self, a: Call, b: Call, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place
    ) -> PairedSummary:
        """The same for two contenders: the speed-up of `b` over `a`."""
        return raced(
            self._served(a, args, kwargs, place), self._served(b, args, kwargs, place), place
        )

    def _served(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place
    ) -> Callable[[], Any]:
        called = (
            call.as_a_module_would(args, kwargs, place)
            if isinstance(call, _Served) and not self.training
            else call
        )
        step = self._step(lambda *args, **kwargs: called(args, kwargs), args, kwargs)
        step()  # a first call may compile, and others wait for the clock
        return step

    def _step(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        """One measured step. A position in a cache is put back first, on whichever side: it would
        leave the cache at some call.
        """
        wanted = [leaf for leaf in self.captured.inputs if leaf.requires_grad]
        written = [self.captured.inputs[number] for number in sorted(self.written)]
        positions = [
            tensor for tensor in written if not (tensor.is_floating_point() or tensor.is_complex())
        ]
        began = [tensor.clone() for tensor in positions]

        def run() -> Any:
            if positions:
                with torch.no_grad(), _unsafe_preserve_version_counter(tuple(positions)):
                    torch._foreach_copy_(positions, began)
            return (
                gradients(call(*args, **kwargs), wanted) if self.training else call(*args, **kwargs)
            )

        return run


def _settled(
    builders: Mapping[str, Any], choices: tuple[Choice, ...], place: Place
) -> _Settled | None:
    """The end-to-end decision of an earlier process for these very candidates, if there is one."""
    candidates = [choice.candidate.digest for choice in choices]
    known = place.alias(end_to_end_name(choices), candidates)
    if not isinstance(known, dict) or known.get("candidates") != candidates:
        return None
    winner = str(known.get("winner"))
    return (
        _Settled(winner, str(known.get("note")))
        if winner == "eager" or winner in builders
        else None
    )


def _end_to_end(
    trial: _Trial, contenders: Mapping[str, Call], choices: tuple[Choice, ...], place: Place
) -> _Settled:
    """The whole call, in this process: a contender stays only if it beats the module's own forward.
    The cache remembers.
    """
    key, between = choices[0].region.key, ""
    with trial.arguments(place.device) as (args, kwargs):

        def against_own(call: Call) -> PairedSummary:
            return trial.against_own(call, args, kwargs, place)

        notes, winners = those_that_pay(
            contenders, against_own, key, swapped=any(choice.swapped for choice in choices)
        )
        winner = winners[0] if winners else "eager"
        if (
            len(winners) > 1
        ):  # two ratios to a slower forward, taken one after the other, say little of each other
            a, b = winners
            result = trial.between(contenders[a], contenders[b], args, kwargs, place)
            telemetry.record("judge", "end_to_end", key, contender=b, over=a, **told(result))
            between = f"; {b} is {in_words(result)} of {a}"
            winner = b if result.speedup > 1.0 else a
    note = f"{'undone: ' if winner == 'eager' else ''}end to end {', '.join(notes)} of the module's own forward{between}"
    note += f"; {COMPILE} runs" if winner == COMPILE else ""
    decided = {
        "winner": winner,
        "note": note,
        "candidates": [choice.candidate.digest for choice in choices],
    }
    place.cache.put_alias(end_to_end_name(choices), decided, place.target, place.contract)
    return _Settled(winner, note, contenders.get(winner))
