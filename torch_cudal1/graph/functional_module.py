"""A module as AOTAutograd wants it, flat tensors in and a flat tuple of tensors out, and the way
back to the user's convention.

Tracing replaces parameters by stand-ins and may leave them in attributes, so it never sees the
user's module: it sees a copy that shares every tensor and nothing else. What tracing would lose (an
assigned buffer, Python's random numbers) is refused here.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.refusal import Refusal

__all__ = [
    "Call",
    "FunctionalModule",
    "copy_module",
    "copy_sharing_tensors",
    "list_running_statistics",
    "preserve_random_state",
    "preserve_versions",
]

M = TypeVar("M", bound=torch.nn.Module)
# Takes the user's args and kwargs.
Call: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any]
# Values that are the same in each call of one signature.
_PLAIN_TYPES = (bool, int, float, str)
# deepcopy cannot copy these, and tracing does not change them.
_UNCOPIED_TYPES = (
    ModuleType,
    torch.Generator,
    torch.Stream,
    torch.Event,
)


class FunctionalModule(torch.nn.Module):
    """One call of a module. `tensors` are those among its arguments, `refusal` says why it cannot
    be served.
    """

    def __init__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self.inner = module
        # pytree treats its registered classes as containers, such as ModelOutput.
        leaves, self._in_spec = pytree.tree_flatten((args, kwargs))
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self._plain = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.tensors: list[torch.Tensor] = [
            leaf for leaf in leaves if isinstance(leaf, torch.Tensor)
        ]
        recurrent = [part for part in module.modules() if isinstance(part, torch.nn.RNNBase)]
        # Kept before tracing, which swaps the weights for stand-ins.
        self._recurrent = [(part, part._flat_weights, part._flat_weight_refs) for part in recurrent]
        # Two slots may hold one tensor.
        self._identities = {name: id(tensor) for name, tensor in _list_tensors(module).items()}
        self._out_spec: Any = None
        self._out_plain: list[Any] = []
        strange = next(
            (t for t in self.tensors if t.layout != torch.strided or t.is_quantized), None
        )
        self.refusal = (
            None
            if strange is None
            else Refusal(f"an input is {_describe(strange)}, only plain strided tensors are served")
        )

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The module's call. Raises NotLowerableError for what a graph of tensors cannot repeat."""
        args, kwargs = self.fill_arguments(tensors)
        # The names before the call: comparing them afterwards shows an assignment.
        slots = _list_tensors(self.inner)
        with preserve_random_state() as moved:
            # Below `__call__`, in whose place the dispatcher sits.
            output = self.inner._call_impl(*args, **kwargs)
        # Raised after the `with`: the generators are back where the user left them.
        if moved:
            raise NotLowerableError(
                f"its forward draws from or seeds {moved[0]}, which a kernel would not repeat"
            )
        self._check_slots(slots, _list_tensors(self.inner))
        results, self._out_spec = pytree.tree_flatten(output)
        for leaf in results:
            if not isinstance(leaf, torch.Tensor) and not (
                leaf is None or isinstance(leaf, _PLAIN_TYPES)
            ):
                raise NotLowerableError(
                    f"the output holds a {type(leaf).__name__}, which is neither a tensor nor a plain value"
                )
        # A tuple around each plain value tells a None result from the place of a tensor.
        self._out_plain = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in results]
        return tuple(leaf for leaf in results if isinstance(leaf, torch.Tensor))

    def _check_slots(self, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
        """Refuse what assigned or deleted a parameter or buffer. `self.c0 = self.h0` where both
        were one tensor changes nothing, though tracing gives each of them a stand-in of its own.
        """
        # Stand-ins differ for each slot even where two slots hold one tensor.
        stands_for = {id(tensor): self._identities.get(name) for name, tensor in before.items()}
        for name, tensor in after.items():
            same = name in self._identities and stands_for.get(id(tensor)) == self._identities[name]
            # An assigned buffer lives in the copy. The user's module would never see it.
            if before.get(name) is not tensor and not same:
                raise NotLowerableError(
                    f"its forward assigns {name}, which a kernel would not repeat; write it in place instead"
                )
        if deleted := before.keys() - after.keys():
            raise NotLowerableError(
                f"its forward deletes {min(deleted)}, which a kernel would not repeat"
            )

    def fill_arguments(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The user's call with `tensors` in the places of its tensors."""
        moving = iter(tensors)
        leaves = [
            next(moving) if is_tensor else plain
            for is_tensor, plain in zip(self._is_tensor, self._plain, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._in_spec)
        return args, kwargs

    def put_back(self) -> None:
        """Undo what tracing leaves in recurrent modules: they notice the stand-ins of their weights
        and list them anew.
        """
        for part, weights, references in self._recurrent:
            # Left as they are, they would be the stand-ins of a tracing that has ended.
            part._flat_weights, part._flat_weight_refs = weights, references

    def release(self) -> None:
        """Let go of the example tensors: what AOTAutograd returns holds on to this module for as
        long as it is used.
        """
        self.tensors, self._plain = [], []

    def wrap_compiled(self, compiled: Callable[..., Any]) -> Call:
        """A callable with the module's own calling convention around `compiled`, which takes and
        returns flat tensors.

        To be asked for after tracing; it keeps neither the example tensors nor the module.
        """
        finish = self.make_output_builder()
        # Positional tensors only: a call then needs no flattening, which costs microseconds.
        bare = all(self._is_tensor) and self._in_spec == pytree.tree_structure(
            (tuple(self.tensors), {})
        )

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            tensors = (
                args
                if bare
                else [
                    leaf
                    for leaf in pytree.tree_leaves((args, kwargs))
                    if isinstance(leaf, torch.Tensor)
                ]
            )
            results = compiled(*tensors)
            return results[0] if finish is None else finish(results)

        return call

    def make_output_builder(self) -> Callable[[Sequence[torch.Tensor]], Any] | None:
        """What gives flat results the form of the module's output; None if that is one tensor. To
        be asked for after tracing.
        """
        # Copied out of `self`, so that the closure does not keep the module alive.
        out_spec, out_plain = self._out_spec, list(self._out_plain)
        if out_spec.is_leaf() and out_plain == [None]:
            return None

        def unflatten(results: Sequence[torch.Tensor]) -> Any:
            moving = iter(results)
            return pytree.tree_unflatten(
                [next(moving) if plain is None else plain[0] for plain in out_plain], out_spec
            )

        return unflatten


def preserve_versions(call: Call, module: torch.nn.Module) -> Call:
    """`call` without a new version of batch norm statistics: eager writes them without one, and its
    graphs check for that.
    """
    # `num_batches_tracked += 1` does raise the version in eager.
    counted = {
        id(part.num_batches_tracked) for part in module.modules() if isinstance(part, _NormBase)
    }
    statistics = tuple(
        buffer for buffer in list_running_statistics(module) if id(buffer) not in counted
    )
    if not statistics:
        return call

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Autograd compares a saved tensor's version in the backward, and raises where it changed.
        with _unsafe_preserve_version_counter(statistics):
            return call(args, kwargs)

    return run


def list_running_statistics(module: torch.nn.Module) -> list[torch.Tensor]:
    """What batch norm in training writes beside its result, and does not read."""
    # In eval mode batch norm reads its statistics and writes nothing.
    norms = [part for part in module.modules() if isinstance(part, _NormBase) and part.training]
    buffers = [
        buffer
        for norm in norms
        for buffer in (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    ]
    return [buffer for buffer in buffers if buffer is not None]


def copy_sharing_tensors(module: torch.nn.Module) -> torch.nn.Module:
    """A copy to trace: same classes and attributes, the very same tensors. Raises NotLowerableError
    where there is no copy.
    """
    # Shared: a copy of the weights would double the memory, and its writes would not reach the
    # user's.
    shared: list[Any] = [*module.parameters(), *module.buffers()]
    for part in module.modules():
        shared += [
            value
            for value in vars(part).values()
            if isinstance(value, (torch.Tensor, *_UNCOPIED_TYPES))
        ]
    try:
        copied = copy_module(module, shared)
    # What `deepcopy` and the user's `__deepcopy__` or `__reduce__` raise.
    except (TypeError, RuntimeError, NotImplementedError, AttributeError, RecursionError) as error:
        raise NotLowerableError(
            f"it cannot be copied for tracing: {type(error).__name__}: {error}"
        ) from error
    for part in copied.modules():
        _register_tensor_attributes(part)
        # RNNBase.flatten_parameters asks weights for their addresses, which fake weights lack.
        if isinstance(part, torch.nn.RNNBase):
            # On the instance: the user's own layers share the class.
            part.__dict__["flatten_parameters"] = _keep_weight_memory
    return copied


def _register_tensor_attributes(part: torch.nn.Module) -> None:
    """Make buffers of the tensors in its plain attributes (`self.h0 = torch.zeros(...)`), which
    AOTAutograd makes inputs.

    A class attribute of that name, or an attribute look-up of the class's own, would come before a
    buffer: such a tensor stays what it is. So does one that takes gradients, which no buffer of the
    user's would.
    """
    # `nn.Module.__getattr__` is what finds buffers.
    if type(part).__getattr__ is not torch.nn.Module.__getattr__:
        return
    # A list, because the loop deletes from the dict.
    for name, value in list(vars(part).items()):
        if (
            type(value) is torch.Tensor
            and not value.requires_grad
            and not hasattr(type(part), name)
        ):
            del part.__dict__[name]
            # Not persistent: it must not appear in a state dict.
            part.register_buffer(name, value, persistent=False)


def copy_module(module: M, shared: Iterable[Any] = ()) -> M:
    """A deep copy that calls no layer of the original, and has what is in `shared` in common with
    it. Raises what deepcopy raises.

    deepcopy leaves functions as they are: after
    `m = self.mlp; self.mlpf = lambda x: m.act(m.fc(x))` a copy would compute with the original's
    weights. The copy's functions get its own modules.
    """
    # deepcopy's memo: what is in it already counts as copied.
    copies: dict[int, Any] = {id(value): value for value in shared}
    copied = copy.deepcopy(module, copies)
    for part in copied.modules():
        for name, value in vars(part).items():
            if isinstance(value, FunctionType):
                part.__dict__[name] = _rebind_closure(value, copies)
    return copied


def _rebind_closure(function: FunctionType, copies: dict[int, Any]) -> FunctionType:
    """`function` with the copies of the modules in its closure. What has no copy stays."""
    if (copied_function := copies.get(id(function))) is not None:
        return cast(FunctionType, copied_function)
    copies[id(function)] = function  # one that calls itself ends here
    closure = function.__closure__ or ()
    cells = tuple(_rebind_cell(cell, copies) for cell in closure)
    if all(new is old for new, old in zip(cells, closure, strict=True)):
        return function
    function_copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    function_copy.__kwdefaults__ = function.__kwdefaults__
    vars(function_copy).update(vars(function))
    # Now the copy: other closures over this function get it too.
    copies[id(function)] = function_copy
    return function_copy


def _rebind_cell(cell: CellType, copies: dict[int, Any]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # still empty
        return cell
    if isinstance(content, FunctionType):
        twin: Any = _rebind_closure(content, copies)
    else:
        twin = copies.get(id(content), content) if isinstance(content, torch.nn.Module) else content
    return cell if twin is content else CellType(twin)


def _keep_weight_memory() -> None:
    """What a traced layer does to the memory of its weights."""


@contextmanager
def preserve_random_state() -> Iterator[list[str]]:
    """Run the body and put the CPU's random generators back; the list then names those that the
    body drew from or seeded.

    It works while tracing, where random operators draw nothing: there, a generator that moved is
    one that no graph will repeat.
    """
    moved: list[str] = []
    # Not imported for this: a forward cannot draw from a module that is not loaded.
    numpy = sys.modules.get("numpy")
    # A mode that is active while tracing would make the state a fake, which cannot be compared.
    with no_dispatch():
        state = torch.get_rng_state()
    python_state, numpy_state = (
        random.getstate(),
        numpy.random.get_state(legacy=False) if numpy else {},
    )
    try:
        yield moved
    finally:
        with no_dispatch():
            # Compared before it is set, because the list has to say which generator moved.
            if not torch.equal(torch.get_rng_state(), state):
                torch.set_rng_state(state)
                moved.append("torch's generator")
        if random.getstate() != python_state:
            random.setstate(python_state)
            moved.append("Python's random module")
        if numpy and _format_state(numpy.random.get_state(legacy=False)) != _format_state(
            numpy_state
        ):
            numpy.random.set_state(numpy_state)
            moved.append("numpy.random")


def _format_state(state: Any) -> str:
    """numpy's generator state, whole: its own repr shortens arrays."""
    if isinstance(state, dict):
        return " ".join(f"{name} {_format_state(part)}" for name, part in state.items())
    return str(state.tolist() if hasattr(state, "tolist") else state)


def _list_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(
        [
            # With duplicates: a tied weight has two slots, and either may be assigned.
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    )


def _describe(tensor: torch.Tensor) -> str:
    return "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
