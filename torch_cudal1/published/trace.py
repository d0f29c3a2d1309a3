"""The child's side of lowering: a source's module, traced at given tensors, as a Program of ATen calls and kernel launches.

The trace is the package's own capture, so that a reference's Program is the very region that `accelerate` will look up. It runs
somebody's Python and is imported where that may happen, in a child of the judge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from torch_cudal1.binding import captured
from torch_cudal1.errors import NotLowerableError
from torch_cudal1.graph.capture import Traced
from torch_cudal1.graph.lower import lower
from torch_cudal1.judge.modules import CallForm, ModuleRunner, Way, unpack
from torch_cudal1.program.model import Program
from torch_cudal1.published import launches, tidy

__all__ = ["TracedSource", "traced"]

_WRAPPED = "inner."  # the capture traces a module around the user's


@dataclass(frozen=True)
class TracedSource:
    """A module as a Program. `sources[i]`: the name of the parameter or buffer, or the number of the argument, that input i is.

    `same`: names of parameters that are another one's tensor, with that one's name. `writes`: sources that a call writes to.
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


def traced(source: ModuleType, form: CallForm, tensors: Sequence[torch.Tensor], device: torch.device) -> TracedSource:
    """Construct the module, give it the state among `tensors`, and trace one call in eval mode without gradients.

    Raises NotLowerableError for what has no data form.
    """
    count = len(form.names)
    module = ModuleRunner(source, form, Way(), device).fresh()
    module.load_state_dict(dict(zip(form.names, tensors[:count], strict=True)), strict=True)
    given = unpack(form.call, tensors[count:])
    with torch.no_grad(), launches.traceable(launches.sm_of(device)):
        _, found = _captured(module, given)
        (graph,) = found.graphs
        tidy.without_copies(graph.module)
        lowered = lower(graph.module, static=graph.static, name=f"{type(module).__name__}.{graph.kind}", kernels=True)
    origins = [graph.origins[position] for position in lowered.order]
    if None in origins:
        raise NotLowerableError("an input of its graph is neither an argument nor a parameter or buffer")
    return TracedSource(
        lowered.region.program,
        tuple(_source(origin) for origin in origins),
        lowered.region.roles,
        _same(module),
        tuple(_source(origin) for origin in graph.writes),
        lowered.region.name,
    )


def _captured(module: torch.nn.Module, given: Mapping[str, Any]) -> tuple[Any, Traced]:
    """As everybody's capture, with words for what published sources often do."""
    try:
        return captured(module, tuple(given["args"]), dict(given["kwargs"]))
    except NotLowerableError as error:
        if isinstance(error.__cause__, DataDependentOutputException):
            raise NotLowerableError(f"its Python looks at the values of tensors ({error.__cause__})") from error
        raise


def _source(origin: str | int | None) -> str | int:
    assert origin is not None
    return origin if isinstance(origin, int) else origin.removeprefix(_WRAPPED)


def _same(module: torch.nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    found = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found
