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
import logging
import operator
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor

from torch_cudal1.core.errors import GraphBreakError, NotLowerableError
from torch_cudal1.ir.ops.recurrent_ops import served

__all__ = [
    "DynamoCapture",
    "Entries",
    "Unchanged",
    "capture_call",
    "guard_the_environment",
    "have_dynamo_settled",
    "leaves_grad_mode",
    "quiet_dynamo",
]

Entries: TypeAlias = Sequence[Any]  # torch._dynamo.types.GuardFilterEntry, one a guard
_IN_PLACE = tuple(
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)
_NOT_OF_VALUES = (  # in place, but on what a tensor is, not on what is in it
    *("set_", "resize_", "resize_as_", "as_strided_", "detach_", "squeeze_", "unsqueeze_"),
    *("transpose_", "swapaxes_", "swapdims_"),
)
# Dynamo's name for the module, among the globals, where a function of it is traced
_OS = "__import_os"
_SLOTS = {"_buffers": "buffer", "_parameters": "parameter", "_modules": "submodule"}
_LOGGERS = ("torch._dynamo", "torch._subclasses", "torch.fx")
_ROOTS = ("args", "kwargs")  # the locals of `_call` that the user passes


def _call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The frame that Dynamo captures: a call below the slot in which `accelerate` sits."""
    return module._call_impl(*args, **kwargs)


@dataclass(frozen=True)
class Unchanged:
    """An attribute that the call assigns the value it has already: no effect, for as long as it has
    that value.
    """

    thing: Any
    name: str
    value: object


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
        while (base := getattr(source, "base", None)) is not None:
            source = base
        return getattr(source, "local_name", "") in _ROOTS

    @property
    def passed_through(self) -> dict[int, int]:
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
        found = {}
        for number, node in enumerate(output.args[0]):
            while isinstance(node, fx.Node) and _returns_itself(node):
                node = node.args[0]
            if node in numbers:
                found[number] = numbers[node]
        return found

    def function(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Dynamo's bytecode around `compiled` (graph inputs in, a sequence of graph outputs out):
        takes module, args, kwargs.

        It makes the assignments that the call makes in vain too, with what was there before where
        `compiled` says so.
        """
        output = self._output
        imported = {
            alias: importlib.import_module(name) for alias, name in output.import_sources.items()
        }
        names = {**self.globals, **imported, self._name: compiled}
        return types.FunctionType(output.bytecode, names, "call", None, output.closure or ())

    def guards(
        self, keep: Callable[[Entries], Sequence[bool]] | None = None
    ) -> Callable[[dict[str, Any]], bool]:
        """The check of Dynamo's guards, all of them or those that `keep` says: takes the locals
        {module, args, kwargs}.

        Raises NotLowerableError where Dynamo cannot guard the call.
        """
        from torch._dynamo.hooks import Hooks
        from torch._dynamo.utils import dynamo_timed

        def kept(entries: Entries) -> Sequence[bool]:
            return [True] * len(entries) if keep is None else keep(entries)

        with _dynamo_errors(), _compiling(), dynamo_timed("cudal1_guards"):
            manager = self._output.build_guards(
                _call.__code__, hooks=Hooks(guard_filter_fn=kept)
            ).guard_manager
        check: Callable[[dict[str, Any]], bool] = manager.root.check
        return check

    def release(self) -> None:
        """Let go of the weights: a fake mode knows them by weak references, and
        `torch.utils.swap_tensors` refuses such weights.
        """
        for mode in self._modes:
            mode.fake_tensor_converter = type(mode.fake_tensor_converter)()


def capture_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DynamoCapture:
    """Capture `module(*args, **kwargs)` below its hooks' and dispatcher's slot, in the present grad
    and autocast modes.

    Raises NotLowerableError, with Dynamo's reason where it has one.
    """
    try:
        return _captured(module, args, dict(kwargs), recurrent=_may_hold_recurrent(module))
    except _NotOneStepError:
        return _captured(module, args, dict(kwargs), recurrent=False)


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


def _captured(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, recurrent: bool
) -> DynamoCapture:
    from torch._dynamo import config
    from torch._dynamo.convert_frame import compile_frame

    names: dict[str, Any] = {"__builtins__": builtins}
    found: dict[str, Any] = {}

    def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._guards import TracingContext

        guard_the_environment()
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        found.clear()  # Dynamo may start over
        found["graph"], found["inputs"] = graph, tuple(inputs)
        fakes = [node.meta["example_value"] for node in placeholders]
        found["modes"] = {
            TracingContext.get().fake_mode,
            *(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)),
        }
        found["sources"] = tuple(node.meta["grapharg"].source for node in placeholders)
        found["effects"], found["unchanged"] = _effects(InstructionTranslator.current_tx().output)
        return graph.forward

    no_closure: Any = ()
    locals_ = {"module": module, "args": args, "kwargs": kwargs}
    static = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "specialize_int": True,
        "specialize_float": True,
    }
    with _dynamo_errors(), _compiling(), config.patch({**static, "allow_rnn": recurrent}):
        output = compile_frame(
            _call.__code__,
            names,
            locals_,
            vars(builtins),
            no_closure,
            compiler_fn=keep,
            one_graph=True,
            restart_reasons=set(),
        ).graph_capture_output(None, None)
    if not found:
        raise NotLowerableError("its forward calls no tensor operator")
    if recurrent and not all(served(found["graph"].graph)):
        raise _NotOneStepError
    if found["effects"]:
        raise NotLowerableError(
            f"its forward {found['effects'][0]}, which a kernel would not repeat"
        )
    if leaves_grad_mode(found["graph"]):
        raise NotLowerableError("its forward leaves the grad mode changed")
    if not all(isinstance(item, torch.Tensor) for item in found["inputs"]):
        raise NotLowerableError("its graph takes a number that changes from call to call")
    (name,) = (key for key in names if key.startswith("__compiled_fn"))
    return DynamoCapture(
        found["graph"],
        found["inputs"],
        found["sources"],
        names,
        locals_,
        unchanged=found["unchanged"],
        _output=output,
        _modes=frozenset(found["modes"]),
        _name=name,
    )


@contextmanager
def _compiling() -> Iterator[None]:
    """What Dynamo expects around the work on a frame."""
    from torch._dynamo.convert_frame import compile_lock, get_compile_id
    from torch._dynamo.utils import get_metrics_context
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
    from torch._guards import CompileContext, compile_context
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as stack:
        stack.enter_context(compile_lock)
        stack.enter_context(quiet_dynamo())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch_function_mode_stack_state_mgr)
        stack.enter_context(get_metrics_context())
        stack.enter_context(compile_context(CompileContext(get_compile_id({}))))
        yield


@contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Keep Dynamo's warnings from the user's terminal, unless `TORCH_LOGS` asks for more: what it
    says of a forward that nobody asked it to compile is a reason in `explain`.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                if logger.getEffectiveLevel() >= logging.WARNING:
                    logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


@contextmanager
def _dynamo_errors() -> Iterator[None]:
    """Dynamo's refusals as ours."""
    from torch._dynamo.exc import TorchDynamoException, Unsupported, UserError

    try:
        yield
    except (Unsupported, UserError) as error:
        raise GraphBreakError(
            f"Dynamo cannot capture it in one graph: {_in_one_line(error)}"
        ) from error
    except (TorchDynamoException, AssertionError, RuntimeError, NotImplementedError) as error:
        raise NotLowerableError(
            f"Dynamo cannot capture it in one graph: {_in_one_line(error)}"
        ) from error


def _in_one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    told = ": ".join(
        [*lines[:1], *([explained.removeprefix("Explanation:").strip()] if explained else [])]
    )
    return f"{type(error).__name__}: {told}"


def have_dynamo_settled() -> None:
    """Have Dynamo put its own `__init__` into `nn.Module`, as it does when something is first
    compiled: what is recorded of that class before would differ after.
    """
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()


def leaves_grad_mode(graph: fx.GraphModule) -> bool:
    """Whether a call of the graph ends in another grad mode than the present one. Before torch 2.13
    its caller does not see it.
    """
    switched = [
        node.args[0] for node in graph.graph.nodes if node.target is torch._C._set_grad_enabled
    ]
    return bool(switched) and switched[-1] is not torch.is_grad_enabled()


def guard_the_environment() -> None:
    """Have Dynamo guard which environment variables there are, where it read any: a name that it
    did not find it forgets.

    To be called by a backend, while Dynamo compiles.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    sources = {guard.originating_source for guard in guards}
    reads = {source for source in sources if getattr(source, "member", "") == "environ"}
    reads |= {
        AttrSource(source, "environ")
        for source in sources
        if getattr(source, "global_name", "") == _OS
    }  # as os.getenv does
    for source in reads:
        output = InstructionTranslator.current_tx().output
        scope = {"L": output.local_scope, "G": output.global_scope}
        if isinstance(source.get_value(scope, {}, {}), os._Environ):
            guards.add(AttrSource(source, "_data").make_guard(GuardBuilder.DICT_KEYS_MATCH))


def _effects(output: Any) -> tuple[list[str], tuple[Unchanged, ...]]:
    """What the call does to things that were there before it, besides writing to tensors, in words;
    and what it does in vain.
    """
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = output.side_effects
    told: list[str] = []
    unchanged: list[Unchanged] = []
    for variable in effects.id_to_variable.values():
        existing = isinstance(
            variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)
        )
        if not (existing and effects.is_modified(variable)):
            continue
        assigned = dict(effects.store_attr_mutations.get(variable) or {})
        thing = getattr(variable, "value", None)
        in_vain = [
            Unchanged(thing, name, vars(thing)[name])
            for name, value in assigned.items()
            if _is_assigned(thing, name, value)
        ]
        if len(in_vain) < len(assigned) or not (assigned or _puts_back(variable)):
            told.append(_effect_in_words(variable, assigned))
        unchanged += in_vain
    if effects.tensor_hooks:
        told.append("registers hooks on tensors")
    if getattr(output, "random_calls", None):
        told.append("draws from Python's random module")
    return told, tuple(unchanged)


def _puts_back(variable: Any) -> bool:
    """Whether a dict of Dynamo's holds under each key the very tensor that it held:
    `self.count += 1` stores the buffer again.
    """
    before, now = getattr(variable, "original_items", None), getattr(variable, "items", None)
    if not isinstance(before, dict) or not isinstance(now, dict) or len(before) != len(now):
        return False
    then = {id(getattr(key, "vt", key)): value for key, value in before.items()}
    return all(_is_same(then.get(id(getattr(key, "vt", key))), value) for key, value in now.items())


def _is_same(before: Any, now: Any) -> bool:
    """Whether two of Dynamo's variables are one, or one tensor."""
    if before is None or before is now:
        return before is now
    tensor = _example_of(before)
    return tensor is not None and tensor is _example_of(now)


def _is_assigned(thing: Any, name: str, value: Any) -> bool:
    """Whether the attribute is that already (one of Dynamo's variables): a plain value, or the very
    tensor.
    """
    attributes = getattr(thing, "__dict__", None)
    if type(attributes) is not dict or name not in attributes:
        return False
    now = attributes[name]
    if isinstance(now, torch.Tensor):
        return now is _example_of(value)
    if not value.is_python_constant():
        return False
    new = value.as_python_constant()
    return (
        type(now) is type(new)
        and isinstance(now, (bool, int, float, str, type(None)))
        and bool(now == new)
    )


def _example_of(variable: Any) -> torch.Tensor | None:
    """The real tensor behind a graph input; None for anything else."""
    node = getattr(getattr(variable.realize(), "proxy", None), "node", None)
    while node is not None and _returns_itself(node):
        node = node.args[0]
    argument = None if node is None else node.meta.get("grapharg")
    example = getattr(argument, "example", None)
    return example if isinstance(example, torch.Tensor) else None


def _returns_itself(node: fx.Node) -> bool:
    """Whether it is written in place, or `x.to(...)` of a tensor that is so already: PyTorch
    returns the tensor itself.
    """
    if node.op == "call_function" and node.target in _IN_PLACE:
        return isinstance(node.args[0], fx.Node)
    if node.op == "call_method" and re.fullmatch(r"[a-z]\w*[a-z]_", str(node.target)):
        return str(node.target) not in _NOT_OF_VALUES
    if (
        node.op != "call_method"
        or node.target != "to"
        or "copy" in node.kwargs
        or True in node.args
    ):
        return False
    before, after = (
        each.meta["example_value"] for each in (node.args[0], node) if isinstance(each, fx.Node)
    )
    return bool(
        before.dtype == after.dtype
        and before.device == after.device
        and before.stride() == after.stride()
    )


def _effect_in_words(variable: Any, attributes: Mapping[str, Any]) -> str:
    where = _spelled(variable.source)
    if attributes:
        return f"assigns {', '.join(f'{where}.{name}' for name in attributes)}"
    for slot, what in _SLOTS.items():
        if where.endswith(f".{slot}"):
            return (
                f"assigns a {what} of {where.removesuffix(f'.{slot}')}; write it in place instead"
            )
    return f"writes to {where}"


def _spelled(source: Any) -> str:
    """Dynamo's name of a thing as the user would write it."""
    name = str(getattr(source, "name", "an object it did not make"))
    name = (
        name.replace("L['module']", "self")
        .replace("L['args']", "args")
        .replace("L['kwargs']", "kwargs")
    )
    name = re.sub(
        r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), name
    ).replace(".__dict__", "")
    name = re.sub(r"\['(_buffers|_parameters|_modules)'\]", r".\1", name)
    return re.sub(r"\.(?:_modules|_buffers|_parameters)?\['(\w+)'\]", r".\1", name)
