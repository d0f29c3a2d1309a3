"""Binds one call signature of a module: capture, choose for each graph, build what won, and check end to end that it pays.

The result is `Bound` (call this, as long as the guard holds) or `Unbound` (the module's own forward is best, or cannot be served,
and why). Looking up signatures at call time is `module`'s work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_cudal1 import guard, observe
from torch_cudal1.errors import NotLowerableError
from torch_cudal1.graph.capture import CapturedGraph, capture, compile_with
from torch_cudal1.graph.lower import Lowered, lower
from torch_cudal1.graph.swap import swap_all
from torch_cudal1.judge import timing
from torch_cudal1.machine import device_of
from torch_cudal1.pipeline import Choice, Place, Progress, choose, place_for
from torch_cudal1.records import Region
from torch_cudal1.settings import Settings

__all__ = ["Bound", "Unbound", "bind", "captured_regions"]

_GATE_BUDGET_S = 3.0


@dataclass(frozen=True)
class Bound:
    """`call(args, kwargs)` is right while `guard.holds()`; `choices` say what runs in it."""

    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    guard: Any
    choices: tuple[Choice, ...]
    note: str = ""


@dataclass(frozen=True)
class Unbound:
    """The module's own forward runs, and why. `missed`: nothing is known yet, so a later warm-up may change that."""

    reason: str
    choices: tuple[Choice, ...] = ()
    missed: bool = False


def bind(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    settings: Settings,
    progress: Progress | None = None,
) -> Bound | Unbound:
    """Bind `module(*args, **kwargs)` in the present grad and autocast mode. Raises CacheMissError under on_miss="error"."""
    held = guard.bind(module)
    if isinstance(held, guard.Refusal):
        return Unbound(held.reason)
    flat = _Flat(module, args, dict(kwargs))
    if flat.problem is not None:
        return Unbound(flat.problem)
    place = place_for(device_of([*flat.tensors, *module.parameters()]), settings)
    try:
        graphs = capture(flat, flat.tensors)
        lowered = [_lower(graph, module) for graph in graphs]
    except NotLowerableError as problem:
        observe.record("capture", "left_out", reason=problem.reason)
        return Unbound(problem.reason)
    if not held.holds():
        return Unbound(f"its forward changes the module itself ({held.why()}), which a kernel would not repeat")
    choices = tuple(
        choose(item.region, place, examples=_examples(item, graph, flat, module), progress=progress)
        for item, graph in zip(lowered, graphs, strict=True)
    )
    if any(choice.entry is None for choice in choices):
        return Unbound(next(choice.reason for choice in choices if choice.entry is None), choices, missed=True)
    contenders = _contenders(module, flat, choices, place)
    if not contenders:
        return Unbound("eager is the fastest baseline and nothing beat it", choices)
    winner, note = _end_to_end(module, flat, contenders, choices, place)
    if winner == "eager":
        return Unbound(note, choices)
    return Bound(contenders[winner], held, choices, note)


def captured_regions(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Region, ...]:
    """The regions of `module(*args)` in the present grad mode, without deciding anything. Raises NotLowerableError."""
    flat = _Flat(module, args, {})
    if flat.problem is not None:
        raise NotLowerableError(flat.problem)
    return tuple(_lower(graph, module).region for graph in capture(flat, flat.tensors))


class _Flat(torch.nn.Module):
    """The module as AOTAutograd wants it: flat tensors in, a flat tuple of tensors out. Remembers how to put both back."""

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inner = module
        leaves, self._in_spec = pytree.tree_flatten((args, kwargs))
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self._plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.tensors: list[torch.Tensor] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._out_spec: Any = None
        self._out_plain: list[Any] = []
        strange = next((t for t in self.tensors if t.layout != torch.strided or t.is_quantized), None)
        self.problem = None if strange is None else f"an input is {_describe(strange)}, only plain strided tensors are served"

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moving = iter(tensors)
        leaves = [next(moving) if is_tensor else plain for is_tensor, plain in zip(self._is_tensor, self._plain, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self._in_spec)
        results, self._out_spec = pytree.tree_flatten(self.inner._call_impl(*args, **kwargs))
        for leaf in results:
            if not isinstance(leaf, torch.Tensor) and not (leaf is None or isinstance(leaf, (bool, int, float, str))):
                raise NotLowerableError(f"the output holds a {type(leaf).__name__}, which is neither a tensor nor a plain value")
        self._out_plain = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in results]
        return tuple(leaf for leaf in results if isinstance(leaf, torch.Tensor))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call, as the user made it."""
        moving = iter(self.tensors)
        leaves = [next(moving) if is_tensor else plain for is_tensor, plain in zip(self._is_tensor, self._plain, strict=True)]
        args, kwargs = pytree.tree_unflatten(leaves, self._in_spec)
        return args, kwargs

    def caller(self, compiled: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """A callable with the module's own calling convention around `compiled`, which takes and returns flat tensors."""
        single = self._out_spec.is_leaf() and self._out_plain == [None]
        bare = all(self._is_tensor) and self._in_spec == pytree.tree_structure((tuple(self.tensors), {}))

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = args if bare else [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            results = compiled(*tensors)
            return results[0] if single else self._unflatten(results)

        return call

    def _unflatten(self, results: Sequence[torch.Tensor]) -> Any:
        moving = iter(results)
        leaves = [next(moving) if plain is None else plain[0] for plain in self._out_plain]
        return pytree.tree_unflatten(leaves, self._out_spec)


def _lower(graph: CapturedGraph, module: torch.nn.Module) -> Lowered:
    return lower(graph.module, static=graph.static, kind=graph.kind, name=f"{type(module).__name__}.{graph.kind}")


def _examples(item: Lowered, graph: CapturedGraph, flat: _Flat, module: torch.nn.Module) -> list[torch.Tensor] | None:
    """The user's real tensors in the region's order; None for a backward graph, whose inputs exist only inside a step."""
    named = {**dict(flat.named_parameters(remove_duplicate=False)), **dict(flat.named_buffers(remove_duplicate=False))}
    found: list[torch.Tensor] = []
    for position in item.order:
        origin = graph.origins[position]
        tensor = flat.tensors[origin] if isinstance(origin, int) else named.get(str(origin))
        if tensor is None:
            return None
        found.append(tensor.detach())
    return found


def _contenders(module: torch.nn.Module, flat: _Flat, choices: tuple[Choice, ...], place: Place) -> dict[str, Any]:
    """What may run instead of the module's own forward. Training without a swap is left to torch.compile as a whole."""
    training = len(choices) > 1
    if not any(choice.swapped for choice in choices):
        if training:
            compiled = torch.compile(module._call_impl)
            return {"torch.compile": lambda args, kwargs: compiled(*args, **kwargs)}
        if choices[0].candidate.schedule == "eager":
            return {}
    chosen = [(choice.region, choice.candidate) for choice in choices]
    compiler = swap_all(chosen, place.device, strictness=place.settings.strictness)
    return {"cudal1": flat.caller(compile_with(flat, flat.tensors, compiler))}


def _end_to_end(
    module: torch.nn.Module, flat: _Flat, contenders: Mapping[str, Any], choices: tuple[Choice, ...], place: Place
) -> tuple[str, str]:
    """The whole call, in this process: a contender stays only if it beats the module's own forward. The cache remembers."""
    name = hashlib.sha256("|".join(["end to end", *(choice.region.key for choice in choices)]).encode()).hexdigest()
    known = place.cache.get_alias(name, place.target, place.contract)
    runs = [choice.candidate.digest for choice in choices]
    if isinstance(known, dict) and known.get("candidates") == runs and known.get("winner") in (*contenders, "eager"):
        return str(known["winner"]), str(known["note"])
    args, kwargs = flat.arguments()
    step = _training_step if len(choices) > 1 else _inference
    winner, note = "eager", ""
    with _preserved(module):
        for label, call in contenders.items():
            own = step(lambda: module._call_impl(*args, **kwargs), module)
            ours = step(lambda call=call: call(args, kwargs), module)
            result = timing.summarise(timing.sample_pairs(own, ours, place.device, budget_s=_GATE_BUDGET_S))
            observe.record("judge", "end_to_end", name, contender=label, speedup=result.speedup, low=result.low, high=result.high)
            note = f"end to end {label} is {result.speedup:.2f}x [{result.low:.2f}, {result.high:.2f}] of the module's own forward"
            if result.low >= 1.0:
                winner = label
    note = note if winner != "eager" else f"undone: {note}"
    place.cache.put_alias(name, {"winner": winner, "note": note, "candidates": runs}, place.target, place.contract)
    return winner, note


def _inference(call: Callable[[], Any], module: torch.nn.Module) -> Callable[[], Any]:
    return call


def _training_step(call: Callable[[], Any], module: torch.nn.Module) -> Callable[[], Any]:
    """Forward, a loss over every floating output, backward; gradients are returned, never accumulated into the user's."""
    wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def step() -> Any:
        outputs = [leaf for leaf in pytree.tree_leaves(call()) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        loss = torch.stack([output.float().sum() for output in outputs]).sum()
        return torch.autograd.grad(loss, wanted, allow_unused=True)

    return step


@contextmanager
def _preserved(module: torch.nn.Module) -> Iterator[None]:
    """Run the body, then put buffers (running statistics) and random generators back as they were."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


def _describe(tensor: torch.Tensor) -> str:
    return "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
