"""Runs the module of a KernelBench-style source as a function of flat tensors.

The flat order is that of `wire.call_spec`. The source is untrusted Python, which runs in this
disposable process only. The parent compares the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.judge.wire.call_spec import (
    CallSpec,
    RunMode,
    count_tensors,
    find_tensor_order,
    unpack_arguments,
)
from torch_cudal1.judge.wire.tensor_bits import to_float64
from torch_cudal1.judge.worker.headers import keep_headers
from torch_cudal1.judge.worker.modules.containers import (
    describe_change,
    has_containers,
    list_members,
)
from torch_cudal1.judge.worker.modules.gradient_call import call_with_gradients
from torch_cudal1.judge.worker.modules.ordinary_call import call_as_main
from torch_cudal1.judge.worker.modules.training_run import take_training_steps
from torch_cudal1.judge.worker.modules.transforms import call_transformed

__all__ = ["ModuleRunner"]

# The tree of a result that is one tensor.
_LEAF = pytree.tree_flatten(0)[1]


class ModuleRunner:
    """`runner(inputs)` calls the module with these parameters, buffers and arguments.

    Inputs with the same parameter tensors as in the previous call use the same instance. Other
    parameters use a new instance, unless the request `update` wrote them into the present one.
    """

    def __init__(
        self, source: ModuleType, spec: CallSpec, mode: RunMode, device: torch.device
    ) -> None:
        self._source, self._spec, self._mode = source, spec, mode
        self._device = _choose_device(mode, device)
        # Id of a tensor -> the tensor, kept alive, and its copy on the other GPU.
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._instance: torch.nn.Module | None = None
        # Kept alive: another tensor could take the place of a dead one.
        self._loaded: tuple[torch.Tensor, ...] = ()
        self._order = find_tensor_order(spec.call)
        # Of the last call's result.
        self._tree: tuple[object, list[str | None]] | None = None
        self._compiled: Callable[..., Any] | None = None
        # Of the last call: what became of the lists and dictionaries that it was handed.
        self._changed = ""
        self._has_containers = has_containers(spec.call)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of parameters and buffers, in flat order."""
        return self._spec.names

    @property
    def tree(self) -> str:
        """The nesting of the last call's result and its leaves that are not tensors, as text, and what
        became of containers among its arguments; "" before the first call.
        """
        return "" if self._tree is None else f"{self._tree[0]}{self._tree[1]}{self._changed}"

    @property
    def instance(self) -> torch.nn.Module:
        """The present instance. Raises SandboxError before the first call."""
        if self._instance is None:
            raise SandboxError("module", "no call has made an instance yet")
        return self._instance

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The tensors of the result; then, in training mode, buffers; then, with gradients, those of
        all that want one.
        """
        if self._mode.other_gpu:
            return self._call_on_other_gpu(inputs)
        return self._call([tensor.cpu() for tensor in inputs] if self._mode.on_host else inputs)

    def _call(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        count = len(self._spec.names)
        self._prepare_instance(inputs[:count], inputs[count:])
        if self._mode.gradients:
            return self._call_with_gradients(inputs)
        if self._mode.plain:
            with torch.enable_grad():
                results = self._run(self._unpack(inputs[count:]))
            return [None if out is None else out.detach() for out in results]
        if self._mode.steps:
            return self._train(inputs[count:])
        mode = (
            torch.inference_mode()
            if self._mode.inference
            else torch.no_grad()
            if torch.is_grad_enabled()
            else nullcontext()
        )
        # No context where there is nothing to set: when calls are timed, its cost would be in the
        # time of each.
        with mode:
            if self._mode.transform:
                return self._transform(inputs[count:])
            return self._run(self._unpack(inputs[count:]))

    def _train(self, moving: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        # It will not hold the state that it was loaded with, so the next call makes another one.
        self._loaded = ()
        # What eval keeps of the state before training must not outlive it.
        self._call_in_eval(moving)
        result = take_training_steps(
            self.instance,
            lambda inputs: self._call_module(self._unpack(inputs)),
            moving,
            self._mode.steps,
            self._spec.seed,
        )
        evaluated = self._call_in_eval(moving)
        state = [each.detach().clone() for each in self.state()]
        return [*self._list_results(result), *state, *evaluated]

    def _call_in_eval(self, moving: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        self.instance.eval()
        torch.manual_seed(self._spec.seed)
        with torch.no_grad():
            results = self._list_results(self._call_module(self._unpack(moving)))
        self.instance.train()
        return results

    def _transform(self, moving: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        wide = [to_float64(t) for t in moving] if self._mode.double else moving
        result = call_transformed(
            self._mode.transform,
            lambda inputs: self._call_module(self._unpack(inputs)),
            wide,
            self._spec.seed,
        )
        return self._list_results(result)

    def _call_on_other_gpu(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Call the module with copies of the inputs on another GPU; the results, copied back.

        Raises SandboxError for a result on any other device.
        """
        for tensor in inputs:
            # The same copy for the same tensor: other parameter tensors would make a new instance.
            _, copied = self._copies.setdefault(
                id(tensor), (tensor, torch.empty_like(tensor, device=self._device))
            )
            copied.copy_(tensor)
        results = self._call([self._copies[id(tensor)][1] for tensor in inputs])
        for out in results:
            if out is not None and out.device != self._device:
                raise SandboxError(
                    "module",
                    f"a result on {out.device}, expected {self._device}, where its inputs are",
                )
        return [
            None if out is None else out.to(inputs[0].device) if inputs else out for out in results
        ]

    def replace(self, instance: torch.nn.Module) -> None:
        """Replace the present instance by a copy of it."""
        self._instance, self._compiled = instance, None

    def share(self, other: ModuleRunner) -> None:
        """Call the instance of another runner, which calls it in another way."""
        self._instance, self._loaded, self._compiled = other.instance, other._loaded, None

    def adopt(self, state: Sequence[torch.Tensor]) -> None:
        """Note that these tensors have just been written into the present instance."""
        self._loaded = tuple(state)

    def holds(self, state: Sequence[torch.Tensor]) -> bool:
        """Whether the present instance was loaded with these tensor objects."""
        same = len(state) == len(self._loaded) and all(
            a is b for a, b in zip(state, self._loaded, strict=True)
        )
        return self._instance is not None and same

    def state(self) -> list[torch.Tensor]:
        """Parameters and buffers of the present instance, in flat order. Raises SandboxError when
        one is missing.
        """
        state = self.instance.state_dict(keep_vars=True)
        missing = [name for name in self._spec.names if name not in state]
        if missing:
            raise SandboxError("module", f"its state has lost {missing}")
        return [state[name] for name in self._spec.names]

    def make_instance(self) -> torch.nn.Module:
        """A new instance from the constructor, on the device, in the run mode."""
        # Tensors that a constructor draws may be outside the state dict; the reference draws alike.
        torch.manual_seed(self._spec.seed)
        arguments = unpack_arguments(self._spec.init, ())
        instance = call_as_main(
            getattr(self._source, self._spec.entry), tuple(arguments["args"]), arguments["kwargs"]
        )
        if not isinstance(instance, torch.nn.Module):
            raise SandboxError(
                "module",
                f"{self._spec.entry} made a {type(instance).__name__}, expected a torch.nn.Module",
            )
        instance = instance.to(self._device).train(self._mode.training)
        for path in self._mode.frozen or ():
            instance.get_submodule(path).eval()
        return instance.double() if self._mode.double else instance

    def _prepare_instance(
        self, state: Sequence[torch.Tensor], moving: Sequence[torch.Tensor]
    ) -> None:
        """Keep the instance that holds `state`, or construct another and load `state` into it."""
        if self.holds(state):
            return
        self._instance = self.make_instance()
        # strict: a module with other names or shapes of its state is no drop-in replacement.
        self._instance.load_state_dict(dict(zip(self._spec.names, state, strict=True)), strict=True)
        self._loaded = tuple(state)
        # torch.compile holds the previous instance.
        self._compiled = None
        if self._mode.dtype and not self._mode.double:
            self._cast(moving)

    def _cast(self, moving: Sequence[torch.Tensor]) -> None:
        """Cast the module to the dtype of the run mode, after one call in its own dtype."""
        # A user casts models that have run: what the module keeps from its first call must follow.
        floats = [
            t.float() if t.dtype.is_floating_point else t
            for t in moving[: count_tensors(self._spec.call)]
        ]
        with torch.no_grad():
            self._run(unpack_arguments(self._spec.call, floats))
        self.instance.to(getattr(torch, self._mode.dtype))

    def _unpack(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        wide = [to_float64(t) for t in tensors] if self._mode.double else tensors
        if self._order is not None:
            return {"args": [wide[number] for number in self._order], "kwargs": {}}
        arguments: Mapping[str, Any] = unpack_arguments(self._spec.call, wide)
        return arguments

    def _run(self, arguments: Mapping[str, Any]) -> list[torch.Tensor | None]:
        if self._mode.training:
            # Dropout: the same masks for the same draws.
            torch.manual_seed(self._spec.seed)
        results = self._list_results(self._call_module(arguments))
        if self._mode.training:
            # Training updates buffers, such as running means, and they are results too. Cloned: the
            # next call changes them.
            results += [
                value.detach().clone()
                for value in self.state()
                if not isinstance(value, torch.nn.Parameter)
            ]
        return results

    def _list_results(self, output: object) -> list[torch.Tensor | None]:
        leaves, spec = (
            ([output], _LEAF) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        )
        self._tree = (
            spec,
            [None if isinstance(leaf, torch.Tensor) else _describe_leaf(leaf) for leaf in leaves],
        )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _call_module(self, arguments: Mapping[str, Any]) -> object:
        kind = self._device.type
        if self._mode.temporaries:
            # In an expression of its own: no name here may hold what the call is handed.
            return call_as_main(
                self._find_callable(),
                tuple(map(self._make_temporary, arguments["args"])),
                {name: self._make_temporary(item) for name, item in arguments["kwargs"].items()},
            )
        if not self._mode.autocast and not torch.is_autocast_enabled(kind):
            return self._call_plainly(arguments)
        dtype = getattr(torch, self._mode.autocast) if self._mode.autocast else None
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            return self._call_plainly(arguments)

    def _call_plainly(self, arguments: Mapping[str, Any]) -> object:
        before = list_members(arguments) if self._has_containers else None
        result = call_as_main(self._find_callable(), tuple(arguments["args"]), arguments["kwargs"])
        if before is not None:
            self._changed = describe_change(before, list_members(arguments))
        return result

    def _make_temporary(self, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        return argument[...] if self._mode.temporaries == "view" else argument.detach()

    def _find_callable(self) -> Callable[..., Any]:
        if not self._mode.compiled:
            return self.instance
        if self._compiled is None:
            mode = None if self._mode.compiled == "default" else self._mode.compiled
            if self._device.type == "cpu":
                keep_headers()
            self._compiled = torch.compile(self.instance, mode=mode)
        return self._compiled

    def _call_with_gradients(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        count, total = len(self._spec.names), len(self._spec.names) + count_tensors(self._spec.call)
        tree: tuple[object, list[str | None]] | None = None

        def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            nonlocal tree
            results = self._run(self._unpack(tensors))
            tree = tree or self._tree
            return results

        results = call_with_gradients(
            call, self.state(), inputs[count:total], inputs[total:], self._mode
        )
        # Of the first call, whose results these are.
        self._tree = tree
        return results


def _choose_device(mode: RunMode, device: torch.device) -> torch.device:
    if mode.on_host:
        return torch.device("cpu")
    return _find_next_gpu(device) if mode.other_gpu else device


def _find_next_gpu(device: torch.device) -> torch.device:
    """The GPU after `device`. Raises SandboxError where there is no other GPU."""
    count = torch.cuda.device_count()
    if device.type != "cuda" or count < 2:
        raise SandboxError("module", f"there is no other GPU than {device} here")
    return torch.device("cuda", ((device.index or 0) + 1) % count)


def _describe_leaf(leaf: Any) -> str:
    """A leaf that is no tensor, as text for comparison."""
    # A float may differ by its rounding.
    return f"{leaf:.4g}" if type(leaf) is float else repr(leaf)[:80]
