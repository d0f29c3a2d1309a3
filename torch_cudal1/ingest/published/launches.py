"""The child's side of user-defined Triton kernels: while a module is traced, `kernel[grid](...)`
becomes a nested Program.

The kernel is compiled for this GPU with the arguments of the call, which are constants of a traced
graph. Its outputs are the tensors from `torch.empty` that no kernel has written yet. All other
tensors are taken to be read only: a kernel that writes to them makes a wrong Program, which the
judge refuses. A kernel that tunes itself at run time, or writes to no such tensor, is not
lowerable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.program import Alloc, Launch, LaunchArg, Program, TensorSpec, Value
from torch_cudal1.kernels.codegen.compile import TritonOptions, compile_function
from torch_cudal1.runtime.operator import register, run_operator

__all__ = ["find_sm", "trace_launches"]

_EMPTY = frozenset(
    {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    }
)
_POINTERS: Mapping[torch.dtype, str] = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
# In bytes. Triton compiles another kernel for pointers and integers that are divisible by 16.
_ALIGNMENT = 16
# An object of its own, because None is a value that a kernel may be launched with.
_NOTHING = object()


def find_sm(device: torch.device) -> int | None:
    """The architecture to compile for (90 for sm_90); None where no Triton kernel can run."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@contextmanager
def trace_launches(sm: int | None) -> Iterator[None]:
    """Within, a Triton kernel that is launched is compiled for `sm` and traced. Without Triton
    there is nothing to do.
    """
    try:
        # Imported here: PyTorch without CUDA comes without Triton, and has no kernels to trace.
        from triton.runtime.jit import KernelInterface
    except ImportError:
        yield
        return
    fresh = _Fresh()

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: _trace_launch(kernel, grid, args, kwargs, sm, fresh)

    # Autotuned and heuristic kernels inherit `kernel[grid]` from this class too.
    original = KernelInterface.__getitem__
    KernelInterface.__getitem__ = launcher
    try:
        with fresh:
            yield
    finally:
        # Restored after an error too: the class is Triton's, for the whole process.
        KernelInterface.__getitem__ = original


class _Fresh(TorchFunctionMode):
    """Which tensors are memory that nothing has been written to; they are kept, so that no other
    one gets their identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            # The tensor is kept, not its id alone: the id of a freed tensor is given to the next
            # one.
            self._tensors[id(result)] = result
        return result

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._tensors

    def mark_written(self, tensor: torch.Tensor) -> None:
        """A kernel has written it."""
        self._tensors.pop(id(tensor), None)


@dataclass
class _Call:
    """The arguments of one launch, sorted: the tensors that are read, those that are written, and
    what the compiler gets.
    """

    read: list[torch.Tensor] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)
    signature: dict[str, str] = field(default_factory=dict)
    constants: dict[tuple[int, ...], Any] = field(default_factory=dict)
    attributes: dict[tuple[int, ...], Any] = field(default_factory=dict)
    # The kind of each LaunchArg, with its value.
    passed: list[tuple[str, torch.Tensor | int | float]] = field(default_factory=list)


def _trace_launch(
    kernel: Any,
    grid: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sm: int | None,
    fresh: _Fresh,
) -> None:
    function, arguments, options = _resolve_kernel(kernel, args, kwargs)
    if sm is None:
        raise NotLowerableError(
            f"Triton kernel {function.__name__} needs an NVIDIA GPU to be compiled for"
        )
    call = _sort_arguments(function, arguments, fresh)
    # Memory from elsewhere is taken as read only, so a launch without fresh memory has no result.
    if not call.written:
        raise NotLowerableError(
            f"Triton kernel {function.__name__} writes to no fresh memory (torch.empty) of its own"
        )
    program = _make_program(
        function, call, _read_grid(grid, arguments), TritonOptions(**options), sm
    )
    # The payload of machine code is a real tensor: under the tracing modes an operation on it would
    # become a part of the graph.
    with no_dispatch():
        check_program(program)
        digest = register(program)
    results = run_operator()(call.read, digest)
    for tensor, result in zip(call.written, results, strict=True):
        # The kernel's in-place write as a traced operation, which `tidy` later removes.
        tensor.copy_(result)
        # From now on the tensor holds a result: the next kernel reads it.
        fresh.mark_written(tensor)


def _resolve_kernel(
    kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The function, its arguments by name, and the compiler's options: what decorators would do,
    where they decide nothing.
    """
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    arguments = dict(kwargs)
    while not isinstance(kernel, JITFunction):
        if isinstance(kernel, Autotuner):
            # Which of several configurations runs is decided by timing at run time, and a hook is
            # Python: neither is data. With one configuration there is nothing to decide.
            if len(kernel.configs) != 1 or kernel.configs[0].pre_hook is not None:
                raise NotLowerableError(
                    f"a Triton kernel tunes itself among {len(kernel.configs)} configurations at "
                    f"run time"
                )
            arguments |= kernel.configs[0].all_kwargs()
        elif isinstance(kernel, Heuristics):
            for name, decide in kernel.values.items():
                arguments[name] = decide(
                    {**dict(zip(kernel.arg_names, args, strict=False)), **arguments}
                )
        else:
            raise NotLowerableError(f"a Triton kernel is wrapped in a {type(kernel).__name__}")
        kernel = kernel.fn
    options = {name: arguments.pop(name) for name in _OPTIONS if name in arguments}
    arguments |= dict(zip(kernel.arg_names, args, strict=False))
    unknown = set(arguments) - set(kernel.arg_names)
    # An option that is dropped in silence could change what the kernel computes.
    if unknown:
        raise NotLowerableError(
            f"Triton kernel {kernel.__name__} is launched with the options {sorted(unknown)}"
        )
    return kernel, arguments, options


def _sort_arguments(function: Any, arguments: Mapping[str, Any], fresh: _Fresh) -> _Call:
    call = _Call()
    for position, parameter in enumerate(function.params):
        name = parameter.name
        value = arguments.get(name, parameter.default if parameter.has_default else _NOTHING)
        if value is _NOTHING:
            raise NotLowerableError(
                f"Triton kernel {function.__name__} is launched without {name!r}"
            )
        if isinstance(value, torch.Tensor):
            _read_tensor(call, position, name, value, fresh)
        elif (
            parameter.is_constexpr
            or value is None
            or isinstance(value, bool)
            # Triton's own launcher makes 1 a constant too (its specialisation of integer
            # arguments). The compiled kernel must be the one that was judged as a source.
            or (type(value) is int and value == 1)
        ):
            call.signature[name] = "constexpr"
            call.constants[position,] = value
        elif type(value) is int:
            # As Triton's launcher chooses the type of an integer argument.
            call.signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % _ALIGNMENT == 0:
                call.attributes[position,] = [["tt.divisibility", _ALIGNMENT]]
            call.passed.append((call.signature[name], value))
        elif isinstance(value, float):
            # Triton passes every Python float as fp32.
            call.signature[name] = "fp32"
            call.passed.append(("fp32", value))
        else:
            raise NotLowerableError(
                f"Triton kernel {function.__name__}: argument {name!r} is a {type(value).__name__}"
            )
    return call


def _read_tensor(
    call: _Call, position: int, name: str, tensor: torch.Tensor, fresh: _Fresh
) -> None:
    if tensor.dtype not in _POINTERS:
        raise NotLowerableError(f"a Triton kernel is given a tensor of {tensor.dtype}")
    # With one memory under two parameters, reads and writes of the kernel depend on their order.
    if any(tensor is other for other in call.written):
        raise NotLowerableError("a Triton kernel is given the memory that it writes twice")
    if tensor in fresh:
        call.written.append(tensor)
    elif not any(tensor is other for other in call.read):
        # Compared by identity: `in` would call `==` of tensors, which is elementwise.
        call.read.append(tensor)
    call.signature[name] = _POINTERS[tensor.dtype]
    call.attributes[position,] = [["tt.divisibility", _ALIGNMENT]]
    call.passed.append(("ptr", tensor))


def _read_grid(grid: Any, arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    sizes = tuple(grid(dict(arguments)) if callable(grid) else grid)
    if not 1 <= len(sizes) <= 3 or not all(type(size) is int for size in sizes):
        raise NotLowerableError(
            f"a Triton kernel is launched on a grid of {sizes!r}; expected up to three whole "
            f"numbers"
        )
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _make_program(
    function: Any, call: _Call, grid: tuple[int, int, int], options: TritonOptions, sm: int
) -> Program:
    """A Program from the tensors that are read to those that are written."""
    with no_dispatch():
        cubin = compile_function(
            function, call.signature, call.constants, call.attributes, options, sm
        )
    numbers = {id(tensor): number for number, tensor in enumerate((*call.read, *call.written))}
    first = len(call.read)
    allocs = [
        Alloc(first + number, TensorSpec.of(tensor)) for number, tensor in enumerate(call.written)
    ]
    args = [
        LaunchArg(kind, Value(numbers[id(v)]) if isinstance(v, torch.Tensor) else v)
        for kind, v in call.passed
    ]
    launch = Launch(
        payload=cubin.payload,
        symbol=function.__name__,
        grid=grid,
        block=32 * cubin.warps,
        shared_bytes=cubin.shared_bytes,
        # Triton's kernels end with two more pointers, to global and profile scratch memory, which
        # are null here.
        args=(*args, LaunchArg("null"), LaunchArg("null")),
        # The kernel was compiled for pointers divisible by 16, so a launch must check that they
        # are.
        aligned=tuple(numbers.values()),
    )
    outputs = tuple(range(first, first + len(allocs)))
    return Program(
        tuple(map(TensorSpec.of, call.read)),
        (*allocs, launch),
        outputs,
        (),
        {cubin.payload: cubin.body},
    )
