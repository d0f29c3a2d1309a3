"""`torch.compile(model, backend="cudal1")`: Dynamo's graphs in, the best known callable out.

Where nothing beats Inductor, Inductor compiles the user's graph exactly as `torch.compile` would, with its own caches. Where an
entry wins, the graph is captured with AOTAutograd and each ATen graph gets its choice. Any failure of ours ends in plain Inductor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch.fx as fx

from torch_cudal1 import observe
from torch_cudal1.errors import CacheMissError, NotLowerableError, SettingError
from torch_cudal1.settings import Settings

__all__ = ["cudal1"]


def cudal1(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend. `options` may mix settings of this package and Inductor's; `mode` is Inductor's.

    Raises SettingError for an option neither knows, and CacheMissError under on_miss="error".
    """
    settings, inductor_options = _split(options or {}, mode)
    if not settings.enabled:
        observe.record("capture", "switched_off")
        return _inductor(gm, example_inputs, inductor_options)
    pristine = copy.deepcopy(gm)  # tracing may edit the graph; the fallback needs it as it came
    try:
        return _compile(gm, example_inputs, settings, inductor_options)
    except CacheMissError:
        raise
    except Exception as error:  # noqa: BLE001  the backend's door: whatever fails inside, the user gets Inductor and the reason
        observe.fallback("backend", error, strictness=settings.strictness)
        return _inductor(pristine, example_inputs, inductor_options)


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], settings: Settings, options: dict[str, Any]) -> Callable[..., Any]:
    from torch_cudal1.graph.capture import capture, is_dynamic
    from torch_cudal1.graph.identity import Unnamed, graph_digest
    from torch_cudal1.graph.lower import lower
    from torch_cudal1.machine import device_of
    from torch_cudal1.pipeline import choose, place_for

    if is_dynamic(inputs):
        observe.record("capture", "left_out", reason="dynamic shapes: Inductor compiles the graph")
        return _inductor(gm, inputs, options)
    place = place_for(device_of(list(inputs)), settings)
    digest = graph_digest(gm, inputs, extra=[repr(sorted(options.items(), key=str))])
    if not isinstance(digest, Unnamed):
        remembered = place.cache.get_alias(digest, place.target, place.contract)
        if isinstance(remembered, dict) and remembered.get("runs") == "inductor":
            observe.count("graphs_remembered")
            return _inductor(gm, inputs, options)
    lowered = []
    for graph in capture(gm, inputs):
        try:
            lowered.append(lower(graph.module, static=graph.static, kind=graph.kind, name=graph.kind))
        except NotLowerableError as problem:
            observe.record("capture", "left_out", reason=problem.reason, kind=graph.kind)
            return _inductor(gm, inputs, options)
    choices = {item.region.key: choose(item.region, place) for item in lowered}
    if not _worth_our_path(list(choices.values())):
        if not isinstance(digest, Unnamed) and all(choice.entry is not None for choice in choices.values()):
            keys = [item.region.key for item in lowered]
            place.cache.put_alias(digest, {"runs": "inductor", "regions": keys}, place.target, place.contract)
        return _inductor(gm, inputs, options)
    return _own_path(gm, inputs, choices, place, options)


def _worth_our_path(choices: Sequence[Any]) -> bool:
    """Our own tracing pays when a candidate won, or when every graph of a model without gradients runs best without Inductor."""
    if any(choice.swapped for choice in choices):
        return True
    known = all(choice.entry is not None for choice in choices)
    inference = all(choice.region.kind == "inference" for choice in choices)
    return known and inference and all(choice.candidate.schedule != "inductor" for choice in choices)


def _own_path(
    gm: fx.GraphModule, inputs: Sequence[Any], choices: Mapping[str, Any], place: Any, options: dict[str, Any]
) -> Callable[..., Any]:
    """Trace again, this time with each graph's choice as its callable. A graph nobody chose for runs through Inductor."""
    from torch_cudal1.graph.capture import compile_with
    from torch_cudal1.graph.lower import lower
    from torch_cudal1.graph.swap import in_graph_order, swap
    from torch_cudal1.records import Candidate

    def compiler(graph: fx.GraphModule, kind: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
        item = lower(graph, kind=kind, name=kind)
        choice = choices.get(item.region.key)
        known = choice is not None and choice.entry is not None
        region = choice.region if known else item.region
        candidate = choice.candidate if known else Candidate(region.program, "inductor", "baseline")
        observe.record("swap", "runs", region.key, what=candidate.label, known=known)
        swapped = swap(region, candidate, place.device, strictness=place.settings.strictness, options=options)
        return in_graph_order(swapped, item.order)

    return compile_with(gm, inputs, compiler)


def _inductor(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Exactly what torch.compile does: same function, same options, same caches."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Callable[..., Any] = compile_fx(gm, list(inputs), config_patches=options or None)
    return compiled


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
            raise SettingError(name, value, "a setting of torch_cudal1 or an option of torch._inductor.config")
        patches[name.replace("-", "_")] = value
    return settings, patches
