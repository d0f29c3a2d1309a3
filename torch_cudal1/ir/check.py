"""The static check of a Program (detector `contract`): everything that can be refused without
running anything.

It proves that the plan is well formed and within the contract of a pure function: known functional
operators, every value defined before it is used, outputs that this call computed, launches within
device limits. It cannot prove that a kernel stays inside its buffers; that is the judge's work.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.aten import is_functional, is_random, overload
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, Program, Step, TensorSpec, Value

__all__ = ["MAX_BLOCK_SHARED_BYTES", "check_program", "is_random_program"]

# A Program may come from a file: neither its length nor a size in it may fill the memory.
_MAX_STEPS = 100_000
_MAX_BYTES = 1 << 40
# CUDA C++ Programming Guide, technical specifications per compute capability.
_GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
# Opt-in shared memory of a block on sm_90 and sm_100, the largest of `device.specs.GPU_SPECS`.
MAX_BLOCK_SHARED_BYTES = 232_448
# ctypes and C++ would wrap an integer beyond these silently.
_ARG_RANGES = {"i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}
_DEVICES = ("cpu", "cuda")


def check_program(program: Program) -> None:
    """Raises ProgramError, naming the rule and what was found, unless every rule holds (nested
    Programs included).
    """
    if len(program.steps) > _MAX_STEPS:
        raise ProgramError("size", f"{len(program.steps)} steps, at most {_MAX_STEPS}")
    for spec in program.inputs:
        if (
            len(spec.shape) != len(spec.strides)
            or min(spec.shape, default=0) < 0
            # PyTorch has no negative strides.
            or min(spec.strides, default=0) < 0
        ):
            raise ProgramError("inputs", f"impossible sizes {spec}")
        if spec.device not in _DEVICES:
            raise ProgramError("inputs", f"device {spec.device!r}, expected one of {_DEVICES}")
        # Raises for a name that is no dtype.
        _ = spec.torch_dtype
    for name in program.constants:
        if name not in program.payloads:
            raise ProgramError("constants", f"no payload {name!r}")
    value_count = len(program.inputs) + len(program.constants)
    allocated: set[int] = set()
    # Value -> the Alloc whose memory it is.
    memory: dict[int, int] = {}
    for position, step in enumerate(program.steps):
        _check_step(step, program, value_count, allocated, position)
        _check_overlap(step, memory, position)
        for out in step.writes:
            # Values are numbered in order, so that two equal Programs have one form and every step
            # can read only what exists.
            if out != value_count:
                raise ProgramError(
                    "numbering", f"step {position} yields value {out}, expected {value_count}"
                )
            value_count += 1
        if isinstance(step, Alloc):
            allocated.add(step.out)
    for result in program.outputs:
        if result is not None and not 0 <= result < value_count:
            raise ProgramError("outputs", f"output {result} is no value; there are {value_count}")


def is_random_program(program: Program) -> bool:
    """Whether any step, nested Programs included, draws random numbers."""
    return any(_is_random_step(step) for step in program.steps)


def _is_random_step(step: Step) -> bool:
    if isinstance(step, Call):
        return is_random_program(step.program)
    return isinstance(step, Aten) and is_random(step.target, step.args, dict(step.kwargs))


def _iter_values(arg: object) -> Iterator[int]:
    if isinstance(arg, Value):
        yield arg.index
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from _iter_values(item)


def _check_step(
    step: Step, program: Program, value_count: int, allocated: set[int], position: int
) -> None:
    for index in step.reads:
        if not 0 <= index < value_count:
            raise ProgramError("order", f"step {position} uses value {index} before it exists")
    if isinstance(step, Aten):
        # A write to an argument could reach a weight or the caller's input.
        if not is_functional(step.target):
            raise ProgramError("aten", f"step {position}: {step.target} writes to its arguments")
        if not step.outs:
            raise ProgramError("aten", f"step {position}: {step.target} yields nothing")
        _ = overload(step.target)
    elif isinstance(step, Call):
        _check_call(step, position)
    elif isinstance(step, Alloc):
        if (
            min(step.spec.shape, default=0) < 0
            or min(step.spec.strides, default=0) < 0
            or _measure_extent_bytes(step.spec) > _MAX_BYTES
        ):
            raise ProgramError("alloc", f"step {position}: impossible size {step.spec}")
        # Two threads would write one address, and which value stays is a race.
        if _overlaps_itself(step.spec):
            raise ProgramError(
                "alloc",
                f"step {position}: elements share memory in {step.spec}, so a kernel could not write them",
            )
    else:
        _check_launch(step, program, allocated, position)


def _check_overlap(step: Step, memory: dict[int, int], position: int) -> None:
    """Raises ProgramError where a launch gets two values in the memory of one Alloc: it would read
    what it writes. Adds the step's views to `memory`.
    """
    if isinstance(step, Alloc):
        memory[step.out] = step.out
    elif isinstance(step, Aten):
        # By the schema: the results of a view are in its viewed operand's memory.
        arguments = zip(overload(step.target)._schema.arguments, step.args, strict=False)
        viewed = [
            index
            for schema_argument, argument_value in arguments
            if schema_argument.alias_info is not None
            for index in _iter_values(argument_value)
        ]
        memory |= {out: memory[index] for out in step.outs for index in viewed if index in memory}
    elif isinstance(step, Launch):
        first_by_memory: dict[int, int] = {}
        for index in dict.fromkeys(step.reads):
            # A value outside every Alloc has a negative key of its own: it is compared with no
            # other.
            first = first_by_memory.setdefault(memory.get(index, -1 - index), index)
            if first != index:
                conflict = f"values {first} and {index} are the same memory"
                raise ProgramError(
                    "launch", f"step {position}, launch of {step.symbol!r}: {conflict}"
                )


def _measure_extent_bytes(spec: TensorSpec) -> int:
    """Bytes from the first element to the last, or bytes of all elements, whichever is more."""
    last = (
        sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True))
        if spec.numel
        else 0
    )
    return max(spec.size_bytes, (last + 1) * spec.torch_dtype.itemsize)


def _overlaps_itself(spec: TensorSpec) -> bool:
    """Whether two elements may share memory: some stride is not larger than the reach of all
    smaller strides together.
    """
    reached = 0
    for stride, size in sorted(
        (stride, size) for size, stride in zip(spec.shape, spec.strides, strict=True) if size > 1
    ):
        if stride <= reached and spec.numel:
            return True
        reached += (size - 1) * stride
    return False


def _check_call(step: Call, position: int) -> None:
    check_program(step.program)
    if len(step.args) != len(step.program.inputs) or len(step.outs) != len(step.program.outputs):
        raise ProgramError(
            "call",
            f"step {position}: {len(step.args)} arguments and {len(step.outs)} results do not fit the callee",
        )
    # A nested Program is an operator that returns Tensor[], which holds no None.
    if any(out is None for out in step.program.outputs):
        raise ProgramError(
            "call", f"step {position}: a nested program must yield a tensor for every output"
        )


def _check_launch(step: Launch, program: Program, allocated: set[int], position: int) -> None:
    where = f"step {position}, launch of {step.symbol!r}"
    if step.payload not in program.payloads:
        raise ProgramError("launch", f"{where}: no payload {step.payload!r}")
    if any(not 1 <= size <= limit for size, limit in zip(step.grid, _GRID_LIMITS, strict=True)):
        raise ProgramError("launch", f"{where}: grid {step.grid}, expected 1 to {_GRID_LIMITS}")
    # 1024 threads a block is the limit of every GPU; Triton launches whole warps of 32.
    if not 1 <= step.block <= 1024 or step.block % 32:
        raise ProgramError(
            "launch", f"{where}: {step.block} threads a block, expected a multiple of 32 up to 1024"
        )
    if not 0 <= step.shared_bytes <= MAX_BLOCK_SHARED_BYTES:
        raise ProgramError(
            "launch",
            f"{where}: {step.shared_bytes} bytes of shared memory, at most {MAX_BLOCK_SHARED_BYTES}",
        )
    # 16 is the non-portable maximum of sm_90 (CUDA C++ Programming Guide, thread block clusters).
    if not 1 <= step.cluster <= 16:
        raise ProgramError("launch", f"{where}: cluster of {step.cluster}, expected 1 to 16")
    for arg in step.args:
        _check_argument(arg.kind, arg.value, where)
    # A kernel that may only write to inputs or constants has an effect outside of the call.
    if not any(isinstance(a.value, Value) and a.value.index in allocated for a in step.args):
        raise ProgramError(
            "launch",
            f"{where}: no argument is an alloc of this call, so the kernel has nowhere to write",
        )


def _check_argument(kind: str, value: object, where: str) -> None:
    if kind == "ptr" and isinstance(value, Value):
        return
    if kind == "null" and value is None:
        return
    if kind == "fp32" and isinstance(value, float):
        return
    if (
        kind in _ARG_RANGES
        # A bool is an int in Python, but no kernel parameter.
        and type(value) is int
        and _ARG_RANGES[kind][0] <= value <= _ARG_RANGES[kind][1]
    ):
        return
    raise ProgramError("launch", f"{where}: argument {kind} {value!r}")
