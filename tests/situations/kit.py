"""The doors of a scene, and the comparison of what was seen behind each.

Decisions are planted for every graph that is captured, so that a swapped callable really runs and
nothing is searched for; what has no graph runs as it does for a user.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import torch_cudal1
from tests.entries import plant, plant_regions
from torch_cudal1.api import module_trial, pieces
from torch_cudal1.api.backend import cudal1
from torch_cudal1.api.graphs import open_decisions
from torch_cudal1.core.errors import GraphBreakError, NotLowerableError
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.lower import lower
from torch_cudal1.judge.benchmark.statistics import PairedSummary

Door: TypeAlias = Callable[..., Callable[..., Any]]
Scene: TypeAlias = Callable[[Door], Any]
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
DOORS = (
    "accelerate",
    "backend",
    "pieces",
    "quick",
    "quick backend",
    "accelerate, training",
    "pieces, training",
    "quick, training",
)


class SceneLayer(nn.Module):
    """A linear layer with weights from a fixed seed; `h(x)` is what scenes compute around."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.register_buffer("scale", torch.rand(8, generator=generator) + 0.5)

    def h(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight) * self.scale


def plain(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """The door that changes nothing."""
    return module


class AcceleratedDoor:
    """The door `accelerate`, with planted decisions; `bound` counts the calls of it that ended in
    something that runs.
    """

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir, self.bound = cache_dir, 0
        self.reasons: list[str] = []

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        try:
            plant(module, args, self.cache_dir, kwargs=kwargs)
        except NotLowerableError as problem:
            self.reasons.append(problem.reason)
        torch_cudal1.accelerate(module, args, cache_dir=self.cache_dir)
        if kwargs:
            torch_cudal1.accelerate(module, kwargs, cache_dir=self.cache_dir)
        self.bound += isinstance(module._compiled_call_impl, torch_cudal1.api.dispatcher.Dispatcher)
        return module


class Compiled:
    """The door `torch.compile(backend=...)`: each graph is planted when Dynamo brings it, then goes
    through the package's backend.
    """

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return torch.compile(module, backend=self._backend)

    def _backend(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            graphs = trace(gm, inputs).graphs
            regions = [
                lower(graph.module, static=graph.static, kind=graph.kind).region for graph in graphs
            ]
        except NotLowerableError:
            return gm.forward
        plant_regions(regions, self.cache_dir)
        return cudal1(gm, inputs, options={"cache_dir": self.cache_dir})


class QuickDoor:
    """The doors as a user finds them who has tuned nothing: the quick tier decides at the first call,
    after it has called every contender several times, for what it builds.
    """

    def __init__(self, cache_dir: Path, *, backend: bool) -> None:
        self._options = {"cache_dir": cache_dir, "on_miss": "quick"}
        self._backend = backend

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if self._backend:
            return torch.compile(module, backend="cudal1", options=self._options)
        return torch_cudal1.accelerate(module, **self._options)


def measure_as_faster(
    first: Callable[[], Any], second: Callable[[], Any], *_: Any, **__: Any
) -> Any:
    """A benchmark that makes its calls, and in which the second wins."""
    for step in (first, second, second, first):
        step()
    return PairedSummary(2.0, 1.9, 2.1, 2.0, 1.0, 7, True, (2.0,) * 7, (2.0,) * 7)


def compile_to_same(
    gm: torch.fx.GraphModule, inputs: Any, config_patches: Any = None
) -> Callable[..., Any]:
    """Stands in for Inductor: the graph's own operators, at once."""
    return gm.forward


class InPieces(AcceleratedDoor):
    """The door `accelerate` for a forward that Dynamo breaks into several graphs, each planted when
    Dynamo brings it, and run in every call, as after a trial that they won.
    """

    def __init__(self, cache_dir: Path) -> None:
        super().__init__(cache_dir)
        self.compiled = Compiled(cache_dir)
        self.broken = 0

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        try:
            capture_regions(module, args, kwargs)
        except GraphBreakError:
            self.broken += 1
            torch_cudal1.accelerate(
                module, kwargs or args, cache_dir=self.cache_dir, on_miss="tune"
            )
        except NotLowerableError:
            pass
        return module


def check(scene: Scene, door: str, cache_dir: Path) -> None:
    """What is seen through `door` is what is seen in eager. Raises AssertionError.

    Behind the backend it is Dynamo that decides when a graph holds: what it gets wrong with a
    backend of PyTorch's own too is skipped.
    """
    torch._dynamo.reset()
    trains = door.endswith("training")
    expected = play_scene(scene, plain, trains=trains)
    torch._dynamo.reset()
    if door.startswith("pieces"):
        _check_in_pieces(scene, expected, cache_dir, trains=trains)
        return
    if door.startswith("quick"):
        _check_quick_tier(scene, expected, door, cache_dir, trains=trains)
        return
    opened = Compiled(cache_dir) if door == "backend" else AcceleratedDoor(cache_dir)
    answer = play_scene(scene, opened, trains=trains)
    try:
        assert_same(answer, expected)
    except AssertionError:
        if door != "backend" or _is_right(scene, expected):
            raise
        pytest.skip("torch.compile gets this wrong with a backend of its own too")


def _check_quick_tier(
    scene: Scene, expected: Any, door: str, cache_dir: Path, *, trains: bool
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for module in (open_decisions, module_trial):
            patched.setattr(module, "end_to_end_benchmark", measure_as_faster)
        patched.setattr("torch._inductor.compile_fx.compile_fx", compile_to_same)
        opened = QuickDoor(cache_dir, backend=door == "quick backend")
        answer = play_scene(scene, opened, trains=trains)
    try:
        assert_same(answer, expected)
    except AssertionError:
        if door != "quick backend" or _is_right(scene, expected):
            raise
        pytest.skip("torch.compile gets this wrong with a backend of its own too")


def _check_in_pieces(scene: Scene, expected: Any, cache_dir: Path, *, trains: bool) -> None:
    """With a break in every layer, beside those that the scene has itself."""
    doors, plain_h = InPieces(cache_dir), SceneLayer.h

    def broken(self: SceneLayer, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return plain_h(self, x)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SceneLayer, "h", broken)
        patched.setattr(
            pieces.Pieces,
            "_run_on_trial",
            lambda trial, args, kwargs: trial._torch_compiled(*args, **kwargs),
        )
        patched.setattr(
            pieces, "cudal1", lambda gm, inputs, *, options: doors.compiled._backend(gm, inputs)
        )
        answer = play_scene(scene, doors, trains=trains)
    if not doors.broken:
        pytest.skip("its forward is one graph, or none")
    assert_same(answer, expected)


def _is_right(scene: Scene, expected: Any) -> bool:
    """Whether torch.compile sees with a backend of PyTorch's own what is seen in eager."""
    torch._dynamo.reset()
    try:
        assert_same(
            play_scene(
                scene, lambda module, *args, **kwargs: torch.compile(module, backend="aot_eager")
            ),
            expected,
        )
    except AssertionError:
        return False
    return True


def play_scene(scene: Scene, door: Door, *, trains: bool = False) -> Any:
    """What the scene returns, or the exception that it ends with."""
    torch.manual_seed(11)
    with torch.set_grad_enabled(trains):
        return scene(door)


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a call, with the gradients of a loss over it where there are any, or the class
    of what it raises.
    """
    try:
        result = call(*args, **kwargs)
        tensors = [
            leaf
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        leaves = [tensor for tensor in getattr(call, "parameters", list)() if tensor.requires_grad]
        if tensors and leaves:
            loss = torch.stack([tensor.sum() for tensor in tensors]).sum()
            result = (
                result,
                torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True),
            )
        return copy.deepcopy(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result))
    except Exception as error:  # noqa: BLE001  what is raised is what is compared
        return type(error).__name__


def assert_same(got: Any, expected: Any) -> None:
    """Equal structure; tensors equal but for the last bits, of one dtype."""
    values, form = pytree.tree_flatten(got)
    expected_values, expected_form = pytree.tree_flatten(expected)
    assert form == expected_form, f"{form} is not {expected_form}"
    for number, (value, expected_value) in enumerate(zip(values, expected_values, strict=True)):
        if isinstance(expected_value, torch.Tensor):
            torch.testing.assert_close(
                value,
                expected_value,
                rtol=1e-5,
                atol=1e-6,
                equal_nan=True,
                msg=lambda text, n=number: f"value {n}: {text}",
            )
        else:
            assert value == expected_value, f"value {number}: {value!r} is not {expected_value!r}"


def scenes_of(names: dict[str, Any]) -> tuple[Scene, ...]:
    """The functions of a file that take a door and nothing else."""
    functions = [value for value in names.values() if isinstance(value, FunctionType)]
    return tuple(value for value in functions if list(value.__annotations__) == ["door", "return"])
