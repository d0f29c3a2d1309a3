"""`torch.compile(model, backend="cudal1")`: Dynamo's graphs in, the best known callable out.

Where nothing beats Inductor, Inductor compiles the user's graph exactly as `torch.compile` would,
with its own caches. Where an entry wins, the graph is captured with AOTAutograd and each ATen graph
gets its choice. Any failure of ours ends in plain Inductor, and where that cannot compile (a
machine without a compiler), in eager: a reason is recorded and logged either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor

from torch_cudal1.api import dynamo_rnn
from torch_cudal1.api.trial_step import MORE_THAN_NOISE
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, NotLowerableError, SettingError
from torch_cudal1.core.gc_pause import collector_paused
from torch_cudal1.core.settings import Settings

if TYPE_CHECKING:
    from torch_cudal1.api.ranks.consensus import Apart, Told

# what runs here (None: Inductor), what other ranks are told
_Answer: TypeAlias = "tuple[Callable[..., Any] | None, Told | Apart]"
__all__ = ["cudal1", "for_accelerate", "run_graph"]
_told: ContextVar[Callable[[Sequence[Any]], None] | None] = ContextVar(
    "cudal1_choices_told", default=None
)


def cudal1(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend. `options` may mix settings of this package and Inductor's; `mode` is
    Inductor's.

    Raises SettingError for an option neither knows, and CacheMissError under on_miss="error".
    """
    from torch_cudal1.api.recording import recorder
    from torch_cudal1.graph.dynamo import guard_the_environment

    guard_the_environment()
    dynamo_rnn.install(cudal1)
    settings, inductor_options = _split(options or {}, mode)
    if dynamo_rnn.left_to_dynamo(gm.graph, enabled=settings.enabled):
        from torch._dynamo.exc import (
            TensorifyScalarRestartAnalysis,
        )  # the one of Dynamo's own that it lets a backend raise

        raise TensorifyScalarRestartAnalysis(
            restart_reason="a recurrent layer that is no single step"
        )
    if not settings.enabled:
        telemetry.record("capture", "switched_off")
        return _inductor(gm, example_inputs, inductor_options)
    recorder.keep(settings.record)
    call = _best(gm, example_inputs, settings, inductor_options)
    return recorder.count_graph(call, gm, example_inputs) if recorder.is_on() else call


@contextmanager
def for_accelerate(tell: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    """Have the backend tell the choices (`pipeline.Choice`) of each graph that it decides
    meanwhile, and compile backwards that may be repeated as eager's may, which torch.compile does
    not promise.
    """
    token = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(token)


def _best(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    inductor_options: dict[str, Any],
) -> Callable[..., Any]:
    """The best known callable; plain Inductor where anything of ours fails, and eager where that
    fails too.
    """
    ways: tuple[tuple[str, Callable[[], Callable[..., Any] | None]], ...] = (
        ("backend", lambda: _ours(gm, example_inputs, settings, inductor_options)),
        ("inductor", lambda: _inductor(gm, example_inputs, inductor_options)),
    )
    for stage, way in ways:
        try:
            if (found := way()) is not None:
                return found
        except CacheMissError:
            raise
        except Exception as error:  # the backend's door: whatever fails inside, the user gets what is behind it and the reason
            if _is_control_flow(error):
                raise
            telemetry.fallback(stage, error, strictness=settings.strictness)
    return gm.forward


def _is_control_flow(error: Exception) -> bool:
    """Whether this is Dynamo talking to itself, such as "start over with this number as a tensor"."""
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        TorchDynamoException,
    )  # load Triton, so only where something was raised

    return isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)


def _ours(
    gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, options: dict[str, Any]
) -> Callable[..., Any] | None:
    """What beats Inductor for this graph; None where nothing does or nothing is known. `gm` itself
    is only read.
    """
    from torch_cudal1.api.ranks.consensus import Apart, agreed
    from torch_cudal1.device.target import device_of
    from torch_cudal1.graph.capture import is_dynamic
    from torch_cudal1.graph.graph_digest import Unnamed, graph_digest, graph_outline
    from torch_cudal1.store.context import place_for

    if is_dynamic(inputs):
        telemetry.record(
            "capture", "left_out", reason="dynamic shapes: Inductor compiles the graph"
        )
        return None
    place = place_for(device_of(list(inputs)), settings)
    digest = graph_digest(
        gm, inputs, extra=[repr(place.target), repr(sorted(options.items(), key=str))]
    )
    name = None if isinstance(digest, Unnamed) else digest
    found = agreed(
        [name or graph_outline(gm)],
        place,
        decide=lambda: _known_or_decided(gm, inputs, place, options, name),
        follow=lambda told: _followed(gm, inputs, place, options, told),
    )
    if isinstance(found, Apart) and settings.on_miss == "error":
        raise CacheMissError(name or "unnamed", f"a graph of torch.compile: {found.reason}")
    return None if isinstance(found, Apart) else found


def _known_or_decided(
    gm: fx.GraphModule, inputs: Sequence[Any], place: Any, options: dict[str, Any], name: str | None
) -> _Answer:
    """What the cache remembers of the graph of that name, else what is decided now."""
    from torch_cudal1.api.ranks.consensus import Told

    known = place.alias(name) if name else None
    if isinstance(known, dict) and known.get("runs") in ("inductor", "eager", "inductor+graph"):
        telemetry.count("graphs_remembered")
        return _remembered(gm, inputs, str(known["runs"]), place, options), Told(str(known["runs"]))
    if place.settings.on_miss != "tune" or isinstance(known, dict):
        return _decided(gm, inputs, place, options, name)
    from torch_cudal1.judge import expect, kept_warm

    with kept_warm():
        expect(place.settings, place.device)
        return _decided(gm, inputs, place, options, name)


def _followed(
    gm: fx.GraphModule, inputs: Sequence[Any], place: Any, options: dict[str, Any], told: Told
) -> Callable[..., Any] | None:
    """What another rank decided for this graph."""
    from torch_cudal1.api.ranks.consensus import choices_from
    from torch_cudal1.graph.capture import trace

    if told.runs != "swaps":
        return _remembered(gm, inputs, told.runs, place, options)
    traced = trace(gm, inputs)
    lowered = _lowered(traced)
    return _own_path(
        traced,
        lowered,
        choices_from(told, [item.region for item in lowered], place),
        place,
        options,
    )


def _lowered(traced: Any) -> list[Any]:
    from torch_cudal1.graph.lower import lower

    return [
        lower(graph.module, static=graph.static, kind=graph.kind, name=graph.kind)
        for graph in traced.graphs
    ]


def _decided(
    gm: fx.GraphModule, inputs: Sequence[Any], place: Any, options: dict[str, Any], name: str | None
) -> _Answer:
    """Trace, choose for each graph, and remember under `name` what needs no trace next time; None
    for plain Inductor.
    """
    from torch_cudal1.api.ranks.consensus import Apart, Told
    from torch_cudal1.graph.capture import trace
    from torch_cudal1.search.tune import choose

    try:
        traced = trace(gm, inputs)
        lowered = _lowered(traced)
    except NotLowerableError as problem:
        telemetry.record("capture", "left_out", reason=problem.reason)
        return None, Told("inductor")
    choices = [choose(item.region, place, examples=_examples(item, inputs)) for item in lowered]
    if (tell := _told.get()) is not None:
        tell(choices)
    unknown = next((choice.reason for choice in choices if choice.entry is None), "")
    if unknown:
        return None, Apart(unknown)
    runs = _measured_step(choices, place) or _what_runs(choices, place.settings.margin)
    if runs == "swaps" and _is_inductor_in_a_graph(gm, traced, choices):
        runs = "inductor+graph"
    entries = tuple(choice.entry for choice in choices if choice.entry is not None)

    def own(inductor: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        return _without_trace(gm, runs, inductor, place) or _own_path(
            traced, lowered, choices, place, options
        )

    asked, call = runs, None
    if place.settings.on_miss == "tune" and not _won_before(
        name, choices, place
    ):  # only a search measures
        runs, call = _in_place(
            gm, inputs, place, options, traced, (runs, own), raced=_raced(choices)
        )
    if name and (asked != "swaps" or call is not None):
        known = {
            "runs": runs,
            "regions": [item.region.key for item in lowered],
            "candidates": _digests(choices),
        }
        place.cache.put_alias(name, known, place.target, place.contract)
    if call is None and runs != "inductor":
        call = own(lambda: _inductor(gm, inputs, options))
    return call, Told(runs, entries=entries if runs == "swaps" else ())


def _in_place(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    place: Any,
    options: dict[str, Any],
    traced: Any,
    chosen: tuple[str, Callable[[Callable[[], Callable[..., Any]]], Callable[..., Any]]],
    *,
    raced: bool,
) -> tuple[str, Callable[..., Any] | None]:
    """What runs after a measurement here, and its callable (None: not made yet): what was chosen,
    Inductor or, in training, eager.

    A graph in which PyTorch itself records CUDA graphs is not called on copies: it would be
    recorded at their addresses.
    """
    from torch_cudal1.api.in_place import Graph, better, faster_step

    asked, own = chosen
    graph = Graph(
        inputs, place.device, cache(lambda: _inductor(gm, inputs, options)), traced.is_pure, raced
    )
    trains = any(part.kind == "backward" for part in traced.graphs)
    written = traced.written if trains and not options.get("triton.cudagraphs") else None
    if asked != "inductor":
        won, call = (
            better(graph, own)
            if written is None
            else faster_step(graph, own(graph.inductor), written)
        )
        if won == "ours" or written is None or asked == "eager":
            return asked if won == "ours" else "inductor", call
    if written is None:
        return asked, None
    won, call = faster_step(graph, gm.forward, written, floor=MORE_THAN_NOISE)
    return "eager" if won == "ours" else "inductor", call


def _remembered(
    gm: fx.GraphModule, inputs: Sequence[Any], runs: str, place: Any, options: dict[str, Any]
) -> Callable[..., Any] | None:
    """The callable of a decision that needs no trace of ours; None for plain Inductor."""
    return _without_trace(gm, runs, lambda: _inductor(gm, inputs, options), place)


def _without_trace(
    gm: fx.GraphModule, runs: str, inductor: Callable[[], Callable[..., Any]], place: Any
) -> Callable[..., Any] | None:
    if runs == "inductor+graph":
        from torch_cudal1.graph.capture import lifted_parameters
        from torch_cudal1.graph.swap import GraphedLater

        return GraphedLater(
            inductor(), lifted_parameters(gm), place.device, place.settings.strictness
        )
    return gm.forward if runs == "eager" else None


def _is_inductor_in_a_graph(gm: fx.GraphModule, traced: Any, choices: Sequence[Any]) -> bool:
    """Whether what won is Inductor's own result for this graph, replayed: then Inductor's own
    caches serve the next process.
    """
    (first, *_) = choices
    unchanged = (
        first.candidate.schedule == "inductor+graph"
        and first.candidate.program == first.region.program
    )
    return unchanged and traced.is_pure and all(node.op != "get_attr" for node in gm.graph.nodes)


def _measured_step(choices: Sequence[Any], place: Any) -> str:
    """What won when `accelerate` measured this very training step as a whole; "" if it never did."""
    from torch_cudal1.search.tune import end_to_end_name

    candidates = _digests(choices)
    known = place.alias(end_to_end_name(choices), candidates) if len(choices) > 1 else None
    if not isinstance(known, dict) or known.get("candidates") != candidates:
        return ""
    return {"eager": "eager", "torch.compile": "inductor", "cudal1": "swaps"}.get(
        str(known.get("winner")), ""
    )


def _won_before(name: str | None, choices: Sequence[Any], place: Any) -> bool:
    """Whether an earlier process measured what these candidates make of the graph of that name, and
    they did not lose.
    """
    known = place.alias(name, _digests(choices)) if name else None
    return isinstance(known, dict) and known.get("candidates") == _digests(choices)


def _digests(choices: Sequence[Any]) -> list[str]:
    return [choice.candidate.digest for choice in choices]


def _raced(choices: Sequence[Any]) -> bool:
    """Whether Inductor ran in every race that there was."""
    return all(
        "inductor" in raced
        for choice in choices
        if (raced := choice.entry.evidence["baselines_us"])
    )


def _what_runs(choices: Sequence[Any], margin: float) -> str:
    """ "swaps", "inductor" or "eager": by the measured time of all graphs together, forward and
    backward, against Inductor's.

    Our own tracing must pay for itself by the margin; leaving Inductor for plain eager needs more
    than noise.
    """
    ours = sum(_time_us(choice) for choice in choices)
    inductor = sum(_inductor_us(choice) for choice in choices)
    schedules = {choice.candidate.schedule for choice in choices}
    if not any(choice.entry.evidence["baselines_us"] for choice in choices):
        # nothing was raced: torch.compile was asked for, and torch.compile is what runs
        return "inductor"
    if any(choice.swapped for choice in choices) or schedules - {"eager", "inductor"}:
        return "swaps" if ours * margin <= inductor else "inductor"
    return "eager" if schedules == {"eager"} and ours * MORE_THAN_NOISE <= inductor else "inductor"


def _time_us(choice: Any) -> float:
    timing = choice.entry.evidence.get("timing") or {}
    return float(timing.get("candidate_us") or _baseline_us(choice, choice.candidate.schedule))


def _inductor_us(choice: Any) -> float:
    return _baseline_us(choice, "inductor")


def _baseline_us(choice: Any, schedule: str) -> float:
    """Microseconds of a baseline; 0 for a graph that was not raced, which Inductor keeps on either
    path.
    """
    raced = choice.entry.evidence["baselines_us"]
    return float(raced.get(schedule, math.inf)) if raced else 0.0


def _own_path(
    traced: Any, lowered: Sequence[Any], choices: Sequence[Any], place: Any, options: dict[str, Any]
) -> Callable[..., Any]:
    """The traced graphs, each with its choice as its callable."""
    from torch_cudal1.api.shadow import NotWatched, watched
    from torch_cudal1.graph.swap import in_graph_order, swap

    strictness, writes = place.settings.strictness, any(graph.writes for graph in traced.graphs)
    for item, choice in zip(lowered, choices, strict=True):
        telemetry.record("swap", "runs", choice.region.key, what=choice.candidate.label)
        around = watched(choice, place, writes=writes)
        front = None if isinstance(around, NotWatched) else around
        swapped = swap(
            choice.region,
            choice.candidate,
            place.device,
            strictness=strictness,
            options=options,
            around=front,
        )
        traced.fill(item.region.kind, in_graph_order(swapped, item.order))
    call: Callable[..., Any] = traced.call
    return call


def _examples(item: Any, inputs: Sequence[Any]) -> list[torch.Tensor] | None:
    """The user's tensors in the region's order, where Dynamo gave real ones; a backward graph has
    none.
    """
    if item.region.kind == "backward" or any(isinstance(tensor, FakeTensor) for tensor in inputs):
        return None
    return [inputs[position].detach() for position in item.order]


def _inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> Callable[..., Any]:
    """Exactly what torch.compile does: same function, same options, same caches. Where the program
    `file` is missing Triton gets the answer that it gives elsewhere, and so names what it builds as
    it does there. A recurrent layer, which torch.compile never hands to it, is eager's in one step.
    On a CPU an index out of range raises what eager raises, where it would end the process.
    """
    from torch_cudal1.core.path_shims import linkage_told
    from torch_cudal1.device.target import device_of
    from torch_cudal1.graph.capture import backward_repeatable
    from torch_cudal1.ir.ops.recurrent_ops import as_steps
    from torch_cudal1.runtime.index_checks import (
        as_eager_raises,
        cpu_index_checks,
        holds_indices,
        with_class_checks,
    )

    with collector_paused(keeps=True):
        from torch._inductor.compile_fx import compile_fx

    repeats = nullcontext() if _told.get() is None else backward_repeatable()
    device = device_of(list(inputs))
    checks = cpu_index_checks() if device.type == "cpu" and holds_indices(gm) else {}
    module = with_class_checks(as_steps(gm)) if checks else as_steps(gm)
    with linkage_told(device), repeats:
        compiled = cast(
            Callable[..., Any],
            compile_fx(module, list(inputs), config_patches=(checks | options) or None),
        )
    return as_eager_raises(compiled, lambda *given: run_graph(gm, *given)) if checks else compiled


def run_graph(gm: fx.GraphModule, *inputs: Any) -> Any:
    """What the graph's own operators yield. Before its first call Dynamo's graph goes through a
    wrapper that prints what is raised in it.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    _LazyGraphModule.force_recompile(gm)
    return gm.forward(*inputs)


def _split(options: Mapping[str, Any], mode: str | None) -> tuple[Settings, dict[str, Any]]:
    """Our settings, and Inductor's patches. Raises SettingError for a name that neither has."""
    import torch._inductor
    import torch._inductor.config as inductor_config

    ours = {f.name for f in fields(Settings)}
    settings = Settings.from_env(**{name: value for name, value in options.items() if name in ours})
    patches: dict[str, Any] = {}
    if mode is not None:
        try:
            patches.update(torch._inductor.list_mode_options(mode))
        except RuntimeError as error:
            raise SettingError("mode", mode, "a mode of torch.compile") from error
    known = set(inductor_config.get_config_copy())
    for name, value in options.items():
        if name in ours:
            continue
        if name.replace("-", "_") not in known:
            raise SettingError(
                name, value, "a setting of torch_cudal1 or an option of torch._inductor.config"
            )
        patches[name.replace("-", "_")] = value
    return settings, patches


dynamo_rnn.install(cudal1)
