"""The child's side of lowering: a source's module, traced at given tensors, as a Program of ATen
calls and kernel launches.

A reference is captured as a user's modules are, so that its Program is the very region that
`accelerate` will look up. A candidate launches kernels, which Dynamo would keep as calls of its
own: it is run once on fake tensors instead. That runs Python by others, so this module is imported
only in a child of the judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.capture import TracedModule, trace
from torch_cudal1.graph.captured import capture_call_graphs
from torch_cudal1.graph.functional_module import FunctionalModule, copy_sharing_tensors
from torch_cudal1.graph.lower import LoweredRegion, lower
from torch_cudal1.ingest.published import launches, tidy
from torch_cudal1.ir.program import Program
from torch_cudal1.judge.wire.call_spec import CallSpec, RunMode, unpack_arguments
from torch_cudal1.judge.worker.modules.module_runner import ModuleRunner
from torch_cudal1.runtime import guard

__all__ = ["TracedSource", "run_once", "trace_candidate", "trace_reference"]

# The capture wraps the user's module in another, so the names of its parameters begin with this.
_WRAPPED = "inner."


@dataclass(frozen=True)
class TracedSource:
    """A module as a Program. `sources[i]`: the name of the parameter or buffer, or the number of
    the argument, that input i is.

    `same`: names of parameters that are another one's tensor, with that one's name. `writes`:
    sources that a call writes to.
    """

    program: Program
    sources: tuple[str | int, ...]
    roles: tuple[str, ...]
    same: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str | int, ...] = ()
    name: str = ""

    def to_json(self) -> dict[str, Any]:
        """All but the Program."""
        return {
            "sources": list(self.sources),
            "roles": list(self.roles),
            "same": dict(self.same),
            "writes": list(self.writes),
            "name": self.name,
        }


def trace_candidate(
    source: ModuleType, form: CallSpec, tensors: Sequence[torch.Tensor], device: torch.device
) -> TracedSource:
    """Construct the module, give it the state among `tensors`, and trace one call in eval mode
    without gradients.

    Raises NotLowerableError for what has no data form.
    """
    module, arguments = _construct_module(source, form, tensors, device)
    # Traced in eval mode without gradients, as the region was: a graph with a backward is another
    # one.
    with torch.no_grad(), launches.trace_launches(launches.find_sm(device)):
        (graph,) = run_once(module, tuple(arguments["args"]), dict(arguments["kwargs"])).graphs
        # Before `lower`: a candidate's Program may not hold the `empty` that the copies write to.
        tidy.drop_copies(graph.module)
        lowered = lower(
            graph.module,
            static=graph.static,
            name=f"{type(module).__name__}.{graph.kind}",
            kernels=True,
        )
    origins = [graph.origins[position] for position in lowered.order]
    # Such an input is a constant of the foreign source, and the region has no input for it.
    if None in origins:
        raise NotLowerableError(
            "an input of its graph is neither an argument nor a parameter or buffer"
        )
    return _make_source(
        module,
        lowered,
        [_unwrap_source(origin) for origin in origins],
        [_unwrap_source(origin) for origin in graph.writes],
    )


def trace_reference(
    source: ModuleType, form: CallSpec, tensors: Sequence[torch.Tensor], device: torch.device
) -> TracedSource:
    """The same for a reference, captured through Dynamo. Raises NotLowerableError."""
    module, arguments = _construct_module(source, form, tensors, device)
    with torch.no_grad():
        call, capture = capture_call_graphs(
            module, tuple(arguments["args"]), dict(arguments["kwargs"])
        )
    if call.sources is None:
        raise NotLowerableError(call.form)
    (graph,) = capture.graphs
    lowered = lower(graph.module, static=graph.static, name=f"{type(module).__name__}.{graph.kind}")
    names: dict[int, str] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), name)

    def source_of(origin: str | int | None) -> str | int:
        source = (
            call.sources[origin] if isinstance(origin, int) and call.sources is not None else None
        )
        name = source if isinstance(source, int) else names.get(id(source))
        if name is None:
            raise NotLowerableError(
                "an input of its graph is neither an argument nor a parameter or buffer"
            )
        return name

    inputs = [source_of(graph.origins[position]) for position in lowered.order]
    return _make_source(module, lowered, inputs, [source_of(origin) for origin in graph.writes])


def _construct_module(
    source: ModuleType, form: CallSpec, tensors: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.nn.Module, Mapping[str, Any]]:
    """The source's module with the state among `tensors`, and the arguments of a call."""
    count = len(form.names)
    module = ModuleRunner(source, form, RunMode(), device).make_instance()
    # Strict: a candidate with other state than the reference can not be compared with it.
    module.load_state_dict(dict(zip(form.names, tensors[:count], strict=True)), strict=True)
    return module, unpack_arguments(form.call, tensors[count:])


def _make_source(
    module: torch.nn.Module,
    lowered: LoweredRegion,
    sources: Sequence[str | int],
    writes: Sequence[str | int],
) -> TracedSource:
    region = lowered.region
    return TracedSource(
        region.program,
        tuple(sources),
        region.roles,
        _find_shared_names(module),
        tuple(writes),
        region.name,
    )


def run_once(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TracedModule:
    """The module's graphs, by running a copy of it on fake tensors. Raises NotLowerableError for
    what a graph cannot repeat.
    """
    # A copy, because a foreign forward may change the module's attributes.
    copy = copy_sharing_tensors(module)
    bound_guard = guard.bind_guard(copy)
    if isinstance(bound_guard, Refusal):
        raise NotLowerableError(bound_guard.reason)
    functional = FunctionalModule(copy, args, kwargs)
    if functional.refusal:
        raise NotLowerableError(functional.refusal.reason)
    try:
        traced = trace(functional, functional.tensors)
    except NotLowerableError as error:
        if isinstance(error.__cause__, DataDependentOutputException):
            raise NotLowerableError(
                f"its Python looks at the values of tensors ({error.__cause__})"
            ) from error
        raise
    # Before the guard compares: tracing leaves stand-ins for the weights in recurrent modules.
    functional.put_back()
    if not bound_guard.holds():
        raise NotLowerableError(
            f"its forward changes the module itself ({bound_guard.explain_difference()}), which a kernel would "
            f"not repeat"
        )
    return traced


def _unwrap_source(origin: str | int | None) -> str | int:
    assert origin is not None
    return origin if isinstance(origin, int) else origin.removeprefix(_WRAPPED)


def _find_shared_names(module: torch.nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    same = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        # By identity: tied parameters are one tensor under two names, and equal values are no tie.
        if first.setdefault(id(tensor), name) != name:
            same[name] = first[id(tensor)]
    return same
