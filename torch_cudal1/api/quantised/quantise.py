"""`quantise(module, inputs, contract)`: a module of fewer bits beside the one it is made of.

The new module shares everything with the old one but its large linear layers, and the old one stays
exactly as it was, so going back is to use that. The new one is made only if the outputs of both, on
the caller's inputs, are as close as the limits say; layers whose own results deviate most stay as
they were until that holds. Weights are read once: after a change of the old module's, quantise it
again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from torch_cudal1.api.accelerate import split_example_inputs
from torch_cudal1.api.quantised.deviation import Deviation, measure_deviation
from torch_cudal1.api.quantised.layers import (
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
)
from torch_cudal1.core.errors import QuantisationError, SettingError

__all__ = ["CONTRACTS", "OutputLimits", "QuantisationReport", "QuantisedLayer", "quantise"]

M = TypeVar("M", bound=nn.Module)
Contract: TypeAlias = Literal["weight_only_int8", "weight_only_int4", "fp8"]
CONTRACTS: Mapping[str, type[QuantisedLinear]] = {
    "weight_only_int8": Int8Linear,
    "weight_only_int4": Int4Linear,
    "fp8": Fp8Linear,
}
# Elements of a weight from which on reading it takes longer than a launch.
_MIN_ELEMENTS = 1 << 16
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Where the whole deviates too much: this share of the layers, those that deviate most, goes back.
_SHARE_TAKEN_BACK = 0.25


@dataclass(frozen=True)
class OutputLimits:
    """What a quantised module's outputs must keep to, on the inputs that it is made with; see
    `Deviation`. The last two are for outputs that are logits.
    """

    relative_error: float = 0.05
    agreement: float = 0.98
    divergence: float = 0.02

    def are_kept(self, deviation: Deviation) -> bool:
        """Whether the deviation is within them; one that is not a number is not."""
        return (
            deviation.relative_error <= self.relative_error
            and (deviation.agreement is None or deviation.agreement >= self.agreement)
            and (deviation.divergence is None or deviation.divergence <= self.divergence)
        )


@dataclass(frozen=True)
class QuantisedLayer:
    """A linear layer by its name in the module. `error`: relative, of its own result on the inputs
    that it had in the module.
    """

    name: str
    shape: tuple[int, int]
    error: float


@dataclass(frozen=True)
class QuantisationReport:
    """What was quantised, what was left out and why, what that did to the outputs, and how many
    bytes the weights of the quantised layers took and take.
    """

    contract: str
    layers: tuple[QuantisedLayer, ...]
    left_out: Mapping[str, str]
    deviation: Deviation
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"{self.contract}: {len(self.layers)} linear layers, {self.bytes_before / mib:.1f} -> "
            f"{self.bytes_after / mib:.1f} MiB; {self.deviation}; {len(self.left_out)} left out"
        )


@dataclass
class _Plan:
    """The layers that may become quantised ones, by their first name, and why others may not."""

    layers: dict[str, nn.Linear] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    replacements: dict[str, QuantisedLinear] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def chosen(self) -> dict[str, QuantisedLinear]:
        """The quantised layers of those that are not left out."""
        return {name: self.replacements[name] for name in self.layers}

    def measure_layer(self, name: str, inputs: tuple[Any, ...], result: Tensor) -> None:
        """Note how far a layer's result in the module is from that of its quantised form."""
        error = measure_deviation(self.replacements[name](*inputs), result).relative_error
        # What is not a number is as far off as can be, so that it goes back first.
        finite = math.inf if math.isnan(error) else error
        self.errors[name] = max(finite, self.errors.get(name, 0.0))

    def leave_out_uncalled(self, called: Collection[str], reason: str) -> bool:
        """Leave out layers that were not called; whether there were any."""
        uncalled = [name for name in self.layers if name not in called]
        for name in uncalled:
            del self.layers[name]
            self.left_out[name] = reason
        return bool(uncalled)

    def take_back_worst(self) -> None:
        """Leave out the share of layers whose own results deviate most."""
        ranked = sorted(self.layers, key=lambda name: self.errors[name], reverse=True)
        for name in ranked[: max(1, int(_SHARE_TAKEN_BACK * len(ranked)))]:
            del self.layers[name]
            self.left_out[name] = f"its own result deviates by {self.errors[name]:.4f}"


def quantise(
    module: M,
    example_inputs: Any,
    contract: Contract = "weight_only_int8",
    *,
    limits: OutputLimits | None = None,
    skip: Collection[str] = (),
) -> M:
    """A module of the same class whose large `nn.Linear` layers have fewer bits; `module` stays as
    it was. Its attribute `quantisation` is a `QuantisationReport`.

    `contract`: "weight_only_int8" and "weight_only_int4" (weights read in fewer bits, products in
    the module's dtype), or "fp8" (weights and inputs of the products in e4m3). `example_inputs` as
    for `accelerate`, typical ones: the outputs on them are what `limits` speaks of. `skip`: names of
    layers, or of modules with all that they hold, that stay as they are. Both modules are called in
    eval mode and without gradients; the new one is for inference.

    Raises TypeError for something else than a module, SettingError for another contract or a name in
    `skip` that is not there, QuantisationError where no layer can be quantised or the outputs
    deviate by more than the limits.
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"quantise expects an nn.Module in Python, got {type(module).__name__}")
    if contract not in CONTRACTS:
        raise SettingError("contract", contract, "one of " + ", ".join(map(repr, CONTRACTS)))
    limits = limits or OutputLimits()
    plan = _plan_layers(module, CONTRACTS[contract], skip)

    def call(callee: nn.Module) -> Any:
        # A forward may write to its arguments, as to a cache of keys and values.
        args, kwargs = split_example_inputs(copy.deepcopy(example_inputs))
        return callee(*args, **kwargs)

    # Not inference_mode: a tensor that a forward keeps for later would be of no use in training.
    with _restored_afterwards(module), torch.no_grad():
        module.eval()
        with _watch_calls(plan.layers, plan.measure_layer):
            expected = call(module)
        plan.leave_out_uncalled(plan.errors, "the example inputs do not reach it")
        while plan.layers:
            replica, names = _copy_with(module, plan), set[str]()
            with _watch_calls(plan.chosen, _note_names(names)):
                deviation = measure_deviation(call(replica), expected)
            # Who keeps a layer elsewhere than among the modules would go on calling the old one.
            if plan.leave_out_uncalled(names, "a copy of the module does not call its own"):
                continue
            if limits.are_kept(deviation):
                replica.__dict__["quantisation"] = _report(contract, plan, deviation)
                return replica
            plan.take_back_worst()
            if not plan.layers:
                raise QuantisationError(contract, str(deviation), str(limits))
    reasons = ", ".join(sorted(set(plan.left_out.values()))) or "it has none"
    raise QuantisationError(contract, f"no linear layer ({reasons})", "at least one")


@contextmanager
def _restored_afterwards(module: nn.Module) -> Iterator[None]:
    """Modes of all modules, and buffers that a call writes to, are afterwards as they were."""
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for part, was_training in modes:
            part.training = was_training
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def _note_names(names: set[str]) -> Callable[[str, tuple[Any, ...], Tensor], object]:
    return lambda name, *_: names.add(name)


@contextmanager
def _watch_calls(
    layers: Mapping[str, nn.Module], note: Callable[[str, tuple[Any, ...], Tensor], object]
) -> Iterator[None]:
    """`note` gets the name, the inputs and the result of each call of the layers."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], result: Tensor) -> None:
            note(name, inputs, result)

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _plan_layers(module: nn.Module, kind: type[QuantisedLinear], skip: Collection[str]) -> _Plan:
    names = dict(module.named_modules())
    if unknown := [name for name in skip if name not in names]:
        raise SettingError("skip", unknown[0], "names of modules in the module")
    plan = _Plan()
    for name, layer in names.items():
        # A subclass may compute something else.
        if type(layer) is not nn.Linear:
            continue
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in skip):
            plan.left_out[name] = "it was to be skipped"
        elif layer.weight.numel() < _MIN_ELEMENTS:
            plan.left_out[name] = f"its weight has fewer than {_MIN_ELEMENTS} elements"
        elif obstacle := _find_attachment(layer) or kind.find_obstacle(layer):
            plan.left_out[name] = obstacle
        else:
            plan.layers[name], plan.replacements[name] = layer, kind(layer)
    return plan


def _find_attachment(layer: nn.Linear) -> str:
    """What is attached to a layer that its replacement would not run, "" for nothing: a library that
    loads weights late, or LoRA, works so.
    """
    if any(getattr(layer, name, None) for name in _HOOKS):
        return "hooks are registered on it"
    return "its forward was replaced" if "forward" in vars(layer) else ""


def _copy_with(module: M, plan: _Plan) -> M:
    """The tree of modules anew, with its quantised layers; every tensor of the others is shared."""
    replicas: dict[int, nn.Module] = {
        id(plan.layers[name]): layer for name, layer in plan.chosen.items()
    }

    def copy_tree(original: nn.Module) -> nn.Module:
        # A module that stands at two places is one in the new tree, too.
        if (replica := replicas.get(id(original))) is not None:
            return replica
        replica = original.__new__(type(original))
        replica.__dict__ = {
            # Containers of its own: what is set on one module must not appear in the other.
            name: value.copy() if isinstance(value, dict) and name.startswith("_") else value
            for name, value in vars(original).items()
            # What runs in the old module, put there by `accelerate` or by `compile`.
            if name != "_compiled_call_impl"
        }
        replicas[id(original)] = replica
        for name, child in original._modules.items():
            replica._modules[name] = None if child is None else copy_tree(child)
        return replica

    root = copy_tree(module)
    assert isinstance(root, type(module))
    return root


def _report(contract: str, plan: _Plan, deviation: Deviation) -> QuantisationReport:
    layers = tuple(
        QuantisedLayer(name, (layer.out_features, layer.in_features), plan.errors[name])
        for name, layer in plan.layers.items()
    )
    before = sum(layer.weight.numel() * layer.weight.itemsize for layer in plan.layers.values())
    after = sum(
        tensor.numel() * tensor.itemsize
        for name in plan.layers
        for tensor in (plan.replacements[name].digits, plan.replacements[name].scale)
    )
    return QuantisationReport(contract, layers, plan.left_out, deviation, before, after)
