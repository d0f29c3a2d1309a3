"""Captures one call of a module through Dynamo, in one graph: what torch.compile sees, without its
run-time in the calls that follow.

        module(*args, **kwargs) ──Dynamo──> graph + where its inputs come from + the guards under which it holds
                                            + bytecode that gathers the inputs and builds the module's result

Dynamo reads the user's bytecode and runs none of it, so nothing of the user's is changed by a
capture: an assignment, a table that is filled, a counter are noted as effects of the call, not
made. A call that one graph cannot repeat (a graph break, an effect besides its result and the
tensors it writes) has no capture, with the reason. Nothing is compiled or decided here.
"""

from __future__ import annotations

import builtins
import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.graph.dynamo_effects import Unchanged, list_effects, returns_its_input
from torch_cudal1.graph.dynamo_session import (
    convert_dynamo_errors,
    enter_compilation,
    guard_environment,
)
from torch_cudal1.graph.traced_code import CodeKey, find_uncompared_read, list_own_code
from torch_cudal1.ir.ops.recurrent_ops import find_one_step_layers

__all__ = ["DynamoCapture", "Entries", "capture_call", "leaves_grad_mode"]

Entries: TypeAlias = Sequence[Any]  # torch._dynamo.types.GuardFilterEntry, one a guard
_ARGUMENT_LOCALS = ("args", "kwargs")  # the locals of `_call` that the user passes


def _call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The frame that Dynamo captures: a call below the slot in which `accelerate` sits."""
    # Through `__call__` the frame would enter the dispatcher, which sits in front of `_call_impl`.
    return module._call_impl(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class DynamoCapture:
    """A call as one graph.

    `inputs[i]` is the tensor of the graph's placeholder i and `sources[i]` Dynamo's name for where
    it was read. `globals` are the names that guards and bytecode look up besides the frame's
    locals.
    """

    graph: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    sources: tuple[Any, ...]
    globals: dict[str, Any]
    locals: dict[str, Any]
    unchanged: tuple[Unchanged, ...] = ()
    _output: Any = None
    _modes: frozenset[Any] = frozenset()
    _name: str = ""

    def from_arguments(self, number: int) -> bool:
        """Whether placeholder `number` was read from the arguments of the call."""
        source = self.sources[number]
        # Only the root of a source knows the local name.
        while (base := getattr(source, "base", None)) is not None:
            source = base
        return getattr(source, "local_name", "") in _ARGUMENT_LOCALS

    @cached_property
    def traced_code(self) -> dict[CodeKey, types.CodeType]:
        """The code that Dynamo traced, without torch's own."""
        return list_own_code(self._output.traced_code)

    @property
    def outputs_that_are_inputs(self) -> dict[int, int]:
        """Outputs of the graph that are, in eager, the very tensor of a placeholder: number of the
        output, and of the placeholder.
        """
        numbers = {
            node: number
            for number, node in enumerate(
                node for node in self.graph.graph.nodes if node.op == "placeholder"
            )
        }
        (output,) = (node for node in self.graph.graph.nodes if node.op == "output")
        placeholder_of_output = {}
        for number, node in enumerate(output.args[0]):
            # An in-place method returns its tensor: a functional graph would return a copy instead.
            while isinstance(node, fx.Node) and returns_its_input(node):
                node = node.args[0]
            if node in numbers:
                placeholder_of_output[number] = numbers[node]
        return placeholder_of_output

    def function(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo's bytecode around `compiled` (graph inputs in, a sequence of graph outputs out):
        takes module, args, kwargs.

        It makes the assignments that the call makes in vain too, with what was there before where
        `compiled` says so.
        """
        output = self._output
        # The bytecode looks these modules up among the globals of its function.
        imported = {
            alias: importlib.import_module(name) for alias, name in output.import_sources.items()
        }
        # A dict of its own for each callable: two of them must not share `compiled`.
        names = {**self.globals, **imported, self._name: compiled}
        return types.FunctionType(output.bytecode, names, "call", None, output.closure or ())

    def guards(
        self, keep: Callable[[Entries], Sequence[bool]] | None = None
    ) -> Callable[[dict[str, Any]], bool]:
        """The check of Dynamo's guards, all of them or those that `keep` says: takes the locals
        {module, args, kwargs}.

        Raises NotLowerableError where Dynamo cannot guard the call.
        """
        # Dynamo is imported where it is used, since its import takes long.
        from torch._dynamo.hooks import Hooks
        from torch._dynamo.utils import dynamo_timed

        # Dynamo expects one answer for each guard, in order.
        def filter_guards(entries: Entries) -> Sequence[bool]:
            return [True] * len(entries) if keep is None else keep(entries)

        # The capture's compile context has ended, and `build_guards` needs one.
        with convert_dynamo_errors(), enter_compilation(), dynamo_timed("cudal1_guards"):
            manager = self._output.build_guards(
                _call.__code__, hooks=Hooks(guard_filter_fn=filter_guards)
            ).guard_manager
        check: Callable[[dict[str, Any]], bool] = manager.root.check
        return check

    def release(self) -> None:
        """Let go of the weights: a fake mode knows them by weak references, and
        `torch.utils.swap_tensors` refuses such weights.
        """
        for mode in self._modes:
            # A new converter, so that the old one's weak references to the weights go with it.
            mode.fake_tensor_converter = type(mode.fake_tensor_converter)()


def capture_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DynamoCapture:
    """Capture `module(*args, **kwargs)` below its hooks' and dispatcher's slot, in the present grad
    and autocast modes.

    Raises NotLowerableError, with Dynamo's reason where it has one.
    """
    try:
        return _capture_frame(module, args, dict(kwargs), recurrent=_may_hold_recurrent(module))
    # Again with Dynamo's default, which breaks the graph at a recurrent layer and says so.
    except _NotOneStepError:
        return _capture_frame(module, args, dict(kwargs), recurrent=False)


class _NotOneStepError(Exception):
    """A recurrent layer was traced that this package does not run as one step."""


def _may_hold_recurrent(module: torch.nn.Module) -> bool:
    """Whether a recurrent layer may be one step of a graph: elsewhere Dynamo breaks the graph at
    it, as it does for everybody.
    """
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return not (torch.is_grad_enabled() or autocast) and any(
        isinstance(part, torch.nn.RNNBase) for part in module.modules()
    )


@dataclass
class _FrameBackend:
    """The backend that Dynamo compiles the frame with: keeps the graph, and what Dynamo knows of
    it while it compiles.
    """

    graph: fx.GraphModule | None = None
    inputs: tuple[Any, ...] = ()
    sources: tuple[Any, ...] = ()
    modes: frozenset[Any] = frozenset()
    effects: Sequence[str] = ()
    unchanged: tuple[Unchanged, ...] = ()

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Called by Dynamo, again if it starts over."""
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._guards import TracingContext

        # While Dynamo compiles: afterwards the set of guards is closed.
        guard_environment(as_keys=True)
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        # Overwritten when Dynamo restarts: only the last attempt counts.
        self.graph, self.inputs = graph, tuple(inputs)
        # The mode of the context and those of the inputs: each has weak references to the weights.
        fakes = [node.meta["example_value"] for node in placeholders]
        self.modes = frozenset(
            {
                TracingContext.get().fake_mode,
                *(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)),
            }
        )
        self.sources = tuple(node.meta["grapharg"].source for node in placeholders)
        self.effects, self.unchanged = list_effects(InstructionTranslator.current_tx().output)
        return graph.forward


def _capture_frame(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, recurrent: bool
) -> DynamoCapture:
    from torch._dynamo import config
    from torch._dynamo.convert_frame import compile_frame

    # Empty globals: the frame reads nothing but its locals, and what Dynamo adds can be told apart.
    names: dict[str, Any] = {"__builtins__": builtins}
    locals_ = {"module": module, "args": args, "kwargs": kwargs}
    backend = _FrameBackend()
    no_closure: Any = ()
    # A decision holds for exact shapes, so no size or number may become symbolic.
    static = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "specialize_int": True,
        "specialize_float": True,
    }
    with (
        convert_dynamo_errors(),
        enter_compilation(),
        config.patch({**static, "allow_rnn": recurrent}),
    ):
        output = compile_frame(
            _call.__code__,
            names,
            locals_,
            vars(builtins),
            no_closure,
            compiler_fn=backend.compile,
            # A graph break raises: half of a call cannot be repeated as one graph.
            one_graph=True,
            restart_reasons=set(),
        ).graph_capture_output(None, None)
    graph = _check_repeatable(backend, recurrent=recurrent)
    # The name under which the bytecode finds its compiled function.
    (name,) = (key for key in names if key.startswith("__compiled_fn"))
    capture = DynamoCapture(
        graph,
        backend.inputs,
        backend.sources,
        names,
        locals_,
        unchanged=backend.unchanged,
        _output=output,
        _modes=backend.modes,
        _name=name,
    )
    if refusal := find_uncompared_read(capture.traced_code.values()):
        raise NotLowerableError(refusal.reason)
    return capture


def _check_repeatable(backend: _FrameBackend, *, recurrent: bool) -> fx.GraphModule:
    """The captured graph. Raises NotLowerableError where a call of it would not do what the frame
    does.
    """
    if backend.graph is None:
        raise NotLowerableError("its forward calls no tensor operator")
    # Before the effects: the second capture reports its own.
    if recurrent and not all(find_one_step_layers(backend.graph.graph)):
        raise _NotOneStepError
    # The first effect is enough for the user to find the line.
    if backend.effects:
        raise NotLowerableError(
            f"its forward {backend.effects[0]}, which a kernel would not repeat"
        )
    if leaves_grad_mode(backend.graph):
        raise NotLowerableError("its forward leaves the grad mode changed")
    # A number that Dynamo did not make a constant becomes an input of the graph.
    if not all(isinstance(item, torch.Tensor) for item in backend.inputs):
        raise NotLowerableError("its graph takes a number that changes from call to call")
    return backend.graph


def leaves_grad_mode(graph: fx.GraphModule) -> bool:
    """Whether a call of the graph ends in another grad mode than the present one. Before torch 2.13
    its caller does not see it.
    """
    switched = [
        node.args[0] for node in graph.graph.nodes if node.target is torch._C._set_grad_enabled
    ]
    # Only the last switch matters: earlier ones are undone within the call.
    return bool(switched) and switched[-1] is not torch.is_grad_enabled()
