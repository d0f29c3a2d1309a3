"""Guards a bound call: compares the module with its state at binding in microseconds, and describes
the arguments and the global state of a call.

`bind_guard` takes the snapshot (`torch_cudal1.runtime.guard_builder` says what is in it),
`ModuleGuard.holds` compares it with the present at every call: in C++ where the extension is built,
else by the plain Python below, with the same answers. `signature` describes the arguments,
`call_state` the global switches. `find_tracing` says why a call must run the plain module: a tracer
or a mode records what happens inside it.

It runs nothing, decides nothing, and does not read the values of tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from torch_cudal1.core import native
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.runtime.guard_builder import record_module
from torch_cudal1.runtime.guard_comparison import PythonGuard, iter_differences
from torch_cudal1.runtime.guard_records import ABSENT, IGNORED, GuardRecords

__all__ = [
    "ModuleGuard",
    "bind_guard",
    "call_state",
    "find_tracing",
    "has_saved_tensor_hooks",
    "opaque_signature",
    "python_signature",
    "signature",
]

Implementation: TypeAlias = Literal["python", "native"]
_C: Any = torch._C


class ModuleGuard:
    """A snapshot of a module. `holds()` is True while a call would find everything as it was;
    `implementation` says who compares.

    `holds` is an attribute, not a method, so that the C++ one is called directly. Not thread-safe
    against writers: a change made by another thread during the check may be seen only by the next
    one, as with a plain module call.
    """

    # With `__weakref__`, because a guard may be stored in the module that it guards: the cycle has
    # to be collectable.
    __slots__ = ("__weakref__", "_tensors", "_watched", "holds", "implementation", "native")
    implementation: Implementation

    def __init__(self, watched: GuardRecords, implementation: Implementation | None = None) -> None:
        self.implementation = implementation or ("native" if native.status()[0] else "python")
        extension = native.extension() if self.implementation == "native" else None
        self._watched = watched
        # The records keep them alive, so that no other tensor gets their identity.
        self._tensors = frozenset(id(record.tensor) for record in watched.tensors)
        # The dispatch table asks this one from C++, without a call through Python.
        self.native: Any = (
            None if extension is None else extension.Guard(*_encode_for_native_guard(watched))
        )
        self.holds: Callable[[], bool] = (
            PythonGuard(watched).holds if self.native is None else self.native.holds
        )

    def find_own_tensors(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        """Which of a call's tensors are among those that the guard compares: position and identity.
        A forward may ask whether an argument is one of the module's own.
        """
        return tuple(
            (position, id(tensor))
            for position, tensor in enumerate(tensors)
            if id(tensor) in self._tensors
        )

    def explain_difference(self) -> str:
        """The first difference in words, "" if the guard holds. Slow; for reports."""
        return next(iter_differences(self._watched), "")


def bind_guard(
    module: nn.Module, *, implementation: Implementation | None = None
) -> ModuleGuard | Refusal:
    """A guard of `module` and everything below it; a Refusal says why it cannot have one.
    `implementation=None` takes the C++ one if it is there.
    """
    watched = record_module(module)
    if isinstance(watched, Refusal):
        return watched
    if implementation == "native" and native.extension() is None:
        return Refusal(f"the C++ guard was asked for, and is absent: {native.status()[1]}")
    return ModuleGuard(watched, implementation)


def _encode_for_native_guard(watched: GuardRecords) -> tuple[tuple[object, ...], ...]:
    """The records as the tuples that the C++ guard reads. It takes the facts of the tensors itself."""
    return (
        tuple((r.target, r.kind) for r in watched.type_matches),
        tuple((r.target, r.table) for r in watched.dict_identities),
        tuple(
            (
                # A class body is a mappingproxy, made anew at each vars(): C++ reads the dictionary
                # of the class itself.
                r.owner or r.table,
                r.keys,
                r.values,
                r.ignored_prefix if r.values is None else IGNORED if r.skips_ignored else None,
                r.mro,
                r.definitions_only,
            )
            for r in watched.dict_contents
        ),
        tuple((r.target, r.items) for r in watched.sequences),
        tuple((r.target, r.content) for r in watched.byte_arrays),
        tuple(r.hooks for r in watched.empty_hooks),
        tuple((r.table, r.key, r.value, r.value is ABSENT) for r in watched.names),
        tuple((r.function, r.code, r.defaults, r.kwdefaults) for r in watched.functions),
        tuple((r.cell, r.value) for r in watched.closure_cells),
        tuple(r.tensor for r in watched.tensors),
    )


# --- the call


def find_tracing() -> Refusal | None:
    """Why this call must run the plain module: something records or transforms what happens inside
    it.

    A default device (`torch.set_default_device`) is a mode too, but records nothing: it is part of
    `call_state` instead.
    """
    # A compiled or exported graph must hold the module's own operators, not a call of a Program.
    if torch.compiler.is_compiling():
        return Refusal("torch.compile or torch.export is tracing")
    # One mode that is a DeviceContext is `torch.set_default_device`, which records nothing.
    modes = _C._len_torch_function_stack()
    if modes and (modes > 1 or type(_C._get_function_stack_at(0)) is not DeviceContext):
        return Refusal("a torch function mode is active")
    if _C._len_torch_dispatch_stack():
        return Refusal("a torch dispatch mode is active")
    if _C._get_tracing_state() is not None:
        return Refusal("torch.jit is tracing")
    # Tensors inside a transform are wrappers, without memory of their own for a kernel to read.
    if _C._functorch.peek_interpreter_stack() is not None:
        return Refusal("a functorch transform (grad, vmap, jvp, functionalize) is active")
    # A kernel computes no tangent, and would drop it silently.
    if forward_ad._current_level >= 0:
        return Refusal("forward-mode automatic differentiation is active")
    return None


def has_saved_tensor_hooks() -> bool:
    """Whether hooks pack what autograd saves. Activation checkpointing does that: it runs a forward
    again and compares what both runs saved.
    """
    return _C._autograd._top_saved_tensors_default_hooks(True) is not None


def call_state(device_type: str) -> tuple[object, ...]:
    """The global switches that change what a call computes on `device_type` ("cuda", "cpu"),
    hashable.

    Grad mode, autocast and its dtype (of both devices, since a forward may ask for the other one's),
    default dtype and device, deterministic algorithms, and the precision switches of matmul,
    convolution and recurrent cells.
    """
    # The dtype only counts while autocast is on; a changed one alone is no reason to bind again.
    autocast = tuple(
        _C.get_autocast_dtype(each) if _C.is_autocast_enabled(each) else None
        for each in ("cpu", "cuda")
    )
    device = (
        getattr(_C._get_function_stack_at(0), "device", None)
        if _C._len_torch_function_stack()
        else None
    )
    common = (
        _C.is_grad_enabled(),
        autocast,
        _C._get_deterministic_algorithms(),
        torch.get_default_dtype(),
        device,
    )
    # The new interface (torch.backends.*.fp32_precision): the older flags raise once both were
    # used.
    precision = _C._get_fp32_precision_getter
    if device_type != "cuda":
        return (*common, precision("mkldnn", "matmul"), precision("mkldnn", "conv"))
    # How cuBLAS may accumulate half types: eager's results change with it.
    half = (
        _C._get_cublas_allow_fp16_reduced_precision_reduction(),
        _C._get_cublas_allow_bf16_reduced_precision_reduction(),
    )
    return (
        *common,
        *half,
        precision("cuda", "matmul"),
        precision("cuda", "conv"),
        precision("cuda", "rnn"),
    )


def signature(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable | None:
    """A hashable description of the arguments, the same for two calls exactly if one plan can serve
    both; None if none can.

    Nested lists, tuples and dicts of dense tensors and plain values (int, float, bool, str, None,
    dtype, device). Of a tensor: dtype, device, shape, strides, requires_grad, 16-byte alignment,
    whether it is a Parameter, whether it was computed, and which other inputs are the same object or
    overlap it; not its values. Of lists and dicts also which are the same object.
    """
    return _signature(args, kwargs)


# A list may hold itself (test_a_list_that_holds_itself_has_no_signature).
_MAX_DEPTH = 16
# The bits of a float: -0.0 is then not 0.0, and a NaN equals itself, as a plan needs it.
_BITS = struct.Struct("<d")


def python_signature(
    args: tuple[object, ...], kwargs: dict[str, object], *, opaque: bool = False
) -> Hashable | None:
    """`signature` in plain Python. `opaque`: an object of an unknown class is described by its class
    alone.
    """
    call = _Description(opaque)
    try:
        described = (
            tuple([call.describe(value, 0) for value in args]),
            call.describe(kwargs, 0),
        )
    except _NotServableError:
        return None
    if len(call.spans) < 2:
        return described
    return (*described, _overlaps(call.spans), _list_repetitions(call.tensors))


def opaque_signature(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable | None:
    """`signature` for calls with objects among the arguments, such as a cache or a config. It names
    the class of such an object only, so Dynamo's guards have to compare what the object holds. None
    where a tensor cannot be served.
    """
    return _opaque_signature(args, kwargs)


class _NotServableError(Exception):
    """Ends a description; becomes None."""


class _Description:
    """Describes the values of one call, and collects what is compared among them: addresses of
    tensors, and the identities of tensors and of what may be changed.
    """

    def __init__(self, opaque: bool) -> None:
        self._opaque = opaque
        self._containers: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.tensors: list[int] = []

    def describe(self, value: Any, depth: int) -> tuple[object, ...]:
        """The description of a value at that depth. Raises _NotServableError."""
        # The exact type: a subclass may have any behaviour of its own.
        kind = type(value)
        if kind is torch.Tensor or kind is nn.Parameter:
            return self._describe_tensor(value)
        if (
            value is None
            or kind is bool
            or kind is str
            or kind is torch.dtype
            or kind is torch.device
        ):
            return (kind, value)
        # C++ describes an int in 64 bits; a larger one is refused by both alike.
        if kind is int and -(2**63) <= value < 2**63:
            return (kind, value)
        if kind is float:
            return (kind, _BITS.pack(value))
        if depth < _MAX_DEPTH:
            if kind is tuple or kind is torch.Size:
                return (kind, *[self.describe(item, depth + 1) for item in value])
            if kind is list:
                repeated = self._find_repetitions(value)
                return (kind, repeated, *[self.describe(item, depth + 1) for item in value])
            if kind is dict and all(type(key) is str for key in value):
                repeated = self._find_repetitions(value)
                items = [self.describe(item, depth + 1) for item in value.values()]
                return (kind, repeated, tuple(value), *items)
        if self._opaque and not isinstance(value, torch.Tensor):
            return (kind,)
        raise _NotServableError

    def _find_repetitions(self, container: Any) -> tuple[int, ...]:
        """Which of the lists and dicts before are this one: what it gets they get too."""
        repeated = [
            number for number, before in enumerate(self._containers) if before == id(container)
        ]
        self._containers.append(id(container))
        return tuple(repeated)

    def _describe_tensor(self, tensor: Any) -> tuple[object, ...]:
        if (
            tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            raise _NotServableError
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            # A tensor inside a transform or a trace has no memory of its own.
            raise _NotServableError from None
        shape, strides = tensor.shape, tensor.stride()
        extent = (
            sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
            if tensor.numel()
            else 0
        )
        # Addresses themselves are no part of a signature, or every call would have its own.
        self.spans.append(
            (address, address + extent * tensor.element_size() if address else address)
        )
        self.tensors.append(id(tensor))
        return (
            type(tensor),
            tensor.dtype,
            shape,
            strides,
            tensor.device,
            tensor.requires_grad,
            # What no operator asks, but a forward may.
            tensor.requires_grad and not tensor.is_leaf,
            # Kernels are compiled for pointers that are multiples of 16 bytes (Triton's
            # tt.divisibility).
            address % 16 == 0,
        )


def _list_repetitions(identities: list[int]) -> tuple[tuple[int, int], ...]:
    """Pairs of tensors, by their order among the arguments, that are the same object."""
    if len(set(identities)) == len(identities):
        return ()
    return tuple(
        (i, j)
        for i, first in enumerate(identities)
        for j, second in enumerate(identities)
        if i < j and first == second
    )


def _overlaps(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Pairs of tensors, by their order among the arguments, whose memory ranges overlap."""
    # Nearly every call has no overlap: one pass over the sorted ranges finds that out, without
    # looking at all pairs.
    reached = 0
    for start, end in sorted(spans):
        if start < end and start < reached:
            break
        reached = max(reached, end)
    else:
        return ()
    ranges = list(enumerate(spans))
    return tuple(
        (i, j)
        for i, (a, b) in ranges
        for j, (c, d) in ranges[i + 1 :]
        if a < d and c < b and a < b and c < d
    )


def python_opaque_signature(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable | None:
    """`opaque_signature` in plain Python."""
    return python_signature(args, kwargs, opaque=True)


def _choose_signature(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable | None:
    """Chooses the implementation at the first call, so that importing this module loads no
    extension.
    """
    global _signature
    extension = native.extension()
    _signature = python_signature if extension is None else extension.signature
    return _signature(args, kwargs)


def _choose_opaque_signature(
    args: tuple[object, ...], kwargs: dict[str, object]
) -> Hashable | None:
    """The same for `opaque_signature`."""
    global _opaque_signature
    extension = native.extension()
    _opaque_signature = python_opaque_signature if extension is None else extension.opaque_signature
    return _opaque_signature(args, kwargs)


_Signature: TypeAlias = Callable[[tuple[object, ...], dict[str, object]], Hashable | None]
_signature: _Signature = _choose_signature
_opaque_signature: _Signature = _choose_opaque_signature
