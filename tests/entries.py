"""Hand-made cache entries: a decision is planted where a search would have left it, so that a
swapped path costs milliseconds.

The planted Program is the region's own, run step by step, so results are exact; `add_one_to_output` makes one
that is visibly different, for tests that must see which graph ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_cudal1
from torch_cudal1.api.signatures.known_calls import remember_call
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.lower import lower
from torch_cudal1.graph.swap import Swapped
from torch_cudal1.ir.program import Aten, Program, Value
from torch_cudal1.ir.records import Candidate, Entry, Region
from torch_cudal1.search.tune import Choice, make_end_to_end_name
from torch_cudal1.store.context import make_context

Change = Callable[[Program], Program]


@dataclass
class Runs:
    """How often a swapped callable ran, by kind of region."""

    inference: int = 0
    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        return self.inference + self.forward + self.backward


def count_runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Count every call that a swapped callable serves itself, from now on."""
    runs, original, direct = Runs(), Swapped.__call__, vars(Swapped)["direct"]

    def count(self: Swapped) -> None:
        kind = self._region.kind
        setattr(runs, kind, getattr(runs, kind) + 1)

    def count_call(self: Swapped, inputs: Sequence[torch.Tensor]) -> Any:
        count(self)
        return original(self, inputs)

    def count_direct_call(self: Swapped) -> Any:
        runner = direct.fget(self)
        return runner and (lambda inputs: count(self) or runner(inputs))

    monkeypatch.setattr(Swapped, "__call__", count_call)
    monkeypatch.setattr(Swapped, "direct", property(count_direct_call))
    return runs


def same(program: Program) -> Program:
    """No change: the region's own steps."""
    return program


def add_one_to_output(program: Program) -> Program:
    """The same Program with 1 added to its first output, so that a call of it is seen in its result."""
    first, new = program.outputs[0], program.value_count
    assert first is not None
    step = Aten("aten.add.Scalar", (Value(first), 1), (), (new,))
    return replace(program, steps=(*program.steps, step), outputs=(new, *program.outputs[1:]))


def entry_for(region: Region, candidate: Candidate, settings: Settings) -> Entry:
    """The entry that a search would have stored had `candidate` won by 10x."""
    place = make_context(torch.device("cpu"), settings)
    timing = {
        "speedup": 10.0,
        "low": 9.0,
        "high": 11.0,
        "candidate_us": 10.0,
        "baseline_us": 100.0,
        "baseline": "eager",
    }
    evidence = {"timing": timing, "checks": [], "baselines_us": {"eager": 100.0, "inductor": 100.0}}
    return Entry(
        region_key=region.key,
        region_name=region.name,
        target=place.target,
        contract=place.contract,
        choice=candidate,
        evidence={**evidence, "kind": region.kind, "granularity": region.granularity},
        tried=(),
        created="2026-01-01T00:00:00+00:00",
        package="0.1.0",
    )


def plant_regions(
    regions: Sequence[Region],
    cache_dir: Path,
    change: Change = same,
    schedule: Any = "eager",
    device: str = "cpu",
) -> None:
    """Store a winning entry for each region, and that the whole call was measured to be faster with
    them.
    """
    settings = Settings(cache_dir=cache_dir)
    place = make_context(torch.device(device), settings)
    choices = []
    for region in regions:
        changed = change(region.program) if region.kind != "backward" else region.program
        candidate = Candidate(changed, schedule, "rewrites", ("planted",))
        entry = replace(entry_for(region, candidate, settings), target=place.target)
        place.cache.put(entry)
        choices.append(Choice(region, candidate, entry, "planted"))
    note = {
        "winner": "cudal1",
        "note": "planted",
        "candidates": [choice.candidate.digest for choice in choices],
    }
    place.cache.put_decision_record(
        make_end_to_end_name(choices), note, place.target, place.contract
    )


def plant(
    module: torch.nn.Module,
    args: Any,
    cache_dir: Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    change: Change = same,
    schedule: Any = "eager",
) -> None:
    """Plant entries for `accelerate(module)` at these arguments, in the present grad and autocast
    mode.
    """
    call_args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
    device = next(
        (
            str(tensor.device)
            for tensor in (*module.parameters(), *call_args)
            if isinstance(tensor, torch.Tensor)
        ),
        "cpu",
    )
    plant_regions(capture_regions(module, call_args, kwargs), cache_dir, change, schedule, device)
    remember_call(
        module,
        call_args,
        dict(kwargs or {}),
        make_context(torch.device(device), Settings(cache_dir=cache_dir)),
    )


class Calls(nn.Module):
    """A module around a function: `make` gets the module, the input and whatever else was passed."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))
        self.make = make

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.make(self, x, *args, **kwargs)


def accelerate_planted(make: Any, args: Any, tmp_path: Path, **kwargs: Any) -> Calls:
    """A module around `make`, bound to a planted swap for these arguments."""
    module = make if isinstance(make, nn.Module) else Calls(make)
    plant(module, args, tmp_path, kwargs=kwargs)
    dispatcher = torch_cudal1.accelerate(
        module, cache_dir=tmp_path, strictness="error"
    )._compiled_call_impl
    dispatcher.prepare(tuple(args) if isinstance(args, (tuple, list)) else (args,), kwargs, None)
    return module


def find_left_out_reason(make: Any, args: Any, tmp_path: Path) -> str:
    """Accelerate, check that the module's own forward runs, and return the reason."""
    module = make if isinstance(make, nn.Module) else Calls(make)
    torch_cudal1.accelerate(module, args, cache_dir=tmp_path, strictness="error")
    call_args = args if isinstance(args, tuple) else (args,)
    for _ in range(3):
        module(*call_args)
    return " ".join(torch_cudal1.explain(module).left_out)


class PlantingBackend:
    """A Dynamo backend that plants entries for every graph it is given and runs the graph as it is."""

    def __init__(self, cache_dir: Path, change: Change = same, schedule: Any = "eager") -> None:
        self.cache_dir, self.change, self.schedule = cache_dir, change, schedule
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs = trace(gm, inputs).graphs
        regions = [
            lower(graph.module, static=graph.static, kind=graph.kind).region for graph in graphs
        ]
        device = next(
            (tensor.device for tensor in inputs if isinstance(tensor, torch.Tensor)),
            torch.device("cpu"),
        )
        plant_regions(regions, self.cache_dir, self.change, self.schedule, str(device))
        self.graphs += 1
        return gm.forward


def plant_compiled(
    call: Callable[[Any], object], target: Any, cache_dir: Path, change: Change = same
) -> int:
    """Plant entries for each graph that Dynamo finds in `target` (a module or function) during
    `call`; the number of graphs.

    `call` gets the compiled target.
    """
    recorder = PlantingBackend(cache_dir, change)
    torch._dynamo.reset()
    call(torch.compile(target, backend=recorder))
    torch._dynamo.reset()
    return recorder.graphs
