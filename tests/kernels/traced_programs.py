"""Test helper: a Python function as the reference Program of a fusion group, and emitted kernels run
under Triton's interpreter.

The interpreter runs the very source text and launch arguments of the emitted Program, on CPU
tensors. It cannot call libdevice, so those functions are stand-ins from PyTorch; bfloat16 stores
truncate there, and it multiplies such matrices as the whole numbers of their bits, so they are
given to it in fp32; races and misalignment do not show.
"""

from __future__ import annotations

import hashlib
import operator
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_cudal1.ir.program import Alloc, Aten, Launch, Program, TensorSpec, Value
from torch_cudal1.kernels.codegen.compile import load_source
from torch_cudal1.kernels.lowering import CompiledKernel, LoweredKernels, assemble, lower
from torch_cudal1.kernels.proposal import Proposal

GUARD = 64  # elements before and after each output that a kernel must not touch
LIBDEVICE = {
    "rint": torch.round,
    "pow": torch.pow,
    "trunc": torch.trunc,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "fma": lambda a, b, c: torch.addcmul(c.double(), a.double(), b.double()).float(),
    "ceil": torch.ceil,
}


def trace_program(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], device: str = "cuda"
) -> Program:
    """The ATen steps of `function` on tensors like `inputs`, as a Program on `device`."""
    if isinstance(function, AtenStep):
        return function.program(inputs, device)
    graph = make_fx(lambda *tensors: function(*tensors))(
        *inputs
    ).graph  # default arguments would be taken for inputs
    numbers: dict[Any, Any] = {}
    steps: list[Aten] = []
    specs = tuple(replace(TensorSpec.of(tensor), device=device) for tensor in inputs)
    count, outputs = len(specs), ()
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = Value(len(numbers))
        elif node.op == "output":
            indices = torch.utils._pytree.tree_map(lambda n: numbers[n].index, node.args[0])
            outputs = tuple(indices) if isinstance(indices, (list, tuple)) else (indices,)
        elif node.target is operator.getitem:
            numbers[node] = numbers[node.args[0]][node.args[1]]
        else:
            many = isinstance(node.meta["val"], (tuple, list))
            width = len(node.meta["val"]) if many else 1
            outs = tuple(range(count, count + width))
            args = torch.fx.map_arg(node.args, lambda n: numbers[n])
            kwargs = {
                k: v
                for k, v in torch.fx.map_arg(node.kwargs, lambda n: numbers[n]).items()
                if k not in ("device", "pin_memory")
            }
            steps.append(
                Aten(
                    _functional(str(node.target)),
                    _tuples(args),
                    tuple(sorted((k, _tuples(v)) for k, v in kwargs.items())),
                    outs,
                    many,
                )
            )
            numbers[node] = tuple(Value(o) for o in outs) if many else Value(outs[0])
            count += width
    return Program(specs, tuple(steps), outputs)


@dataclass(frozen=True)
class AtenStep:
    """A Program of one ATen op that CPU traces never show; `reference` computes the same on the
    CPU.
    """

    target: str
    args: tuple[Any, ...]
    outs: int
    reference: Callable[..., Any]
    kwargs: tuple[tuple[str, Any], ...] = ()
    read: int = 1

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """What eager gives: the outputs that the Program below yields."""
        return self.reference(*inputs)

    def program(self, inputs: Sequence[torch.Tensor], device: str) -> Program:
        """One step, whose first results (`read` of them) are the outputs."""
        specs = tuple(replace(TensorSpec.of(tensor), device=device) for tensor in inputs)
        outs = tuple(range(len(specs), len(specs) + self.outs))
        return Program(
            specs,
            (Aten(self.target, self.args, self.kwargs, outs, self.outs > 1),),
            outs[: self.read],
        )


def _functional(target: str) -> str:
    """`aten.add_.Scalar`, which rms_norm uses on its own temporary, as capture's functionalisation
    gives it.
    """
    return target if "__." in target else target.replace("_.", ".")


def _tuples(arg: Any) -> Any:
    return tuple(_tuples(a) for a in arg) if isinstance(arg, (list, tuple)) else arg


def emit_program(program: Program, proposal: Proposal) -> tuple[Program, LoweredKernels]:
    """The emitted Program with placeholder machine code, and the sources of its kernels."""
    lowered = lower(program, proposal)
    cubins = {}
    for kernel in lowered.kernels:
        body = torch.frombuffer(bytearray(kernel.text.encode()), dtype=torch.uint8)
        cubins[kernel.symbol] = CompiledKernel(
            hashlib.sha256(kernel.text.encode()).hexdigest(), body, kernel.warps, 0
        )
    return assemble(program, lowered, cubins), lowered


def interpret(
    program: Program,
    proposal: Proposal,
    inputs: Sequence[torch.Tensor],
    edit_text: Callable[[str], str] = str,
) -> list[torch.Tensor | None]:
    """Outputs of the emitted Program under the interpreter (set TRITON_INTERPRET=1 before Triton is
    imported).

    `edit_text` may change what the interpreter does not know in a kernel's text.

    Outputs start as a poison pattern inside guard bands; AssertionError when a kernel writes
    outside its output.
    """
    replace_libdevice()
    built, lowered = emit_program(program, proposal)
    sources = {
        kernel.symbol: replace(kernel, text=edit_text(kernel.text)) for kernel in lowered.kernels
    }
    values: dict[int, torch.Tensor] = dict(
        enumerate([*inputs, *(program.payloads[name] for name in program.constants)])
    )
    bands: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        for step in built.steps:
            if isinstance(step, Alloc):
                values[step.out], band = _allocate_guarded(step.spec)
                bands.append((band, band.clone(), step.spec.numel))
            elif isinstance(step, Launch):
                kernel = getattr(load_source(sources[step.symbol], Path(folder)), step.symbol)
                pointers = [values[a.value.index] for a in step.args if a.kind == "ptr"]
                kernel[step.grid](*pointers)
    for band, before, numel in bands:
        for part in (slice(0, GUARD), slice(GUARD + numel, None)):
            assert torch.equal(band[part], before[part]), "a kernel wrote outside its output"
    return [None if value is None else values[value] for value in built.outputs]


def _allocate_guarded(spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    poison: Any = (
        float("nan")
        if spec.torch_dtype.is_floating_point
        else True
        if spec.dtype == "bool"
        else -77
    )
    band = torch.full((spec.numel + 2 * GUARD,), poison, dtype=spec.torch_dtype)
    bits = band.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[band.element_size()]
    )
    return band.as_strided(spec.shape, spec.strides, GUARD), bits


def replace_libdevice() -> None:
    """Give libdevice functions a body that the interpreter can run, and reductions with our
    combiners a fast one.
    """
    import numpy
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

    def stand_in(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            arrays = numpy.broadcast_arrays(*(a.handle.data for a in args))
            result = function(*(torch.from_numpy(numpy.array(a)) for a in arrays)).numpy()
            kind = (
                tl.block_type(args[0].dtype, list(result.shape)) if result.shape else args[0].dtype
            )
            return tl.core.tensor(TensorHandle(result, args[0].handle.dtype), kind)

        return call

    names = "exp exp2 expm1 log log2 log10 log1p erf erfc rsqrt asin acos atan sinh cosh tanh asinh acosh atanh"
    for name in names.split():
        setattr(
            libdevice, name, stand_in(getattr(torch, name, None) or getattr(torch.special, name))
        )
    for name, function in LIBDEVICE.items():
        setattr(libdevice, name, stand_in(function))

    def reduce(self: Any, inputs: Any) -> list[Any]:
        ufunc = {"nan_max": numpy.maximum, "nan_min": numpy.minimum, "product": numpy.multiply}[
            self.combine_fn.fn.__name__
        ]
        values = inputs[0].handle.data
        return [
            self.to_tensor(
                ufunc.reduce(values, axis=self.axis, keepdims=self.keep_dims).astype(values.dtype),
                inputs[0].dtype,
            )
        ]

    def doubling(ufunc: Any) -> Callable[..., list[Any]]:
        def scan(self: Any, operand: Any) -> list[Any]:
            """As warps do it, in steps of 1, 2, 4, ...: numpy goes element by element, and its
            error grows with the length.
            """
            values, step = numpy.moveaxis(numpy.array(operand.handle.data), self.axis, -1), 1
            while step < values.shape[-1]:
                values = numpy.concatenate(
                    [values[..., :step], ufunc(values[..., :-step], values[..., step:])], -1
                )
                step *= 2
            return [self.to_tensor(numpy.moveaxis(values, -1, self.axis), operand.dtype)]

        return scan

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        operands = [
            self.cast_impl(operand, tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand
            for operand in (a, b)
        ]
        return plain_dot(self, *operands, *rest)

    plain_dot = getattr(InterpreterBuilder.create_dot, "plain", InterpreterBuilder.create_dot)
    wide_dot.plain = plain_dot  # type: ignore[attr-defined]  # a second call stands in for the first one's original
    InterpreterBuilder.create_dot = wide_dot
    ReduceOps.generic_reduce = reduce
    ScanOps.cumsum, ScanOps.cumprod = doubling(numpy.add), doubling(numpy.multiply)
