"""The Program: a kernel, a rewrite or a whole model as plain data (JSON steps plus binary
payloads).

A Program is a pure function from a list of tensors to a list of tensors. Values are numbered: first
the inputs, then the constants, then what each step yields, in order. This file is the data and its
JSON form; `check` decides whether a Program may run, `interpreter` and `runtime` run it. Nothing
here runs anything, and no Program ever holds Python code.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from torch_cudal1.core.errors import ProgramError

__all__ = [
    "FORMAT",
    "Alloc",
    "Aten",
    "Call",
    "Launch",
    "LaunchArg",
    "Program",
    "Step",
    "TensorSpec",
    "Value",
    "canonical_json",
]

# Counted up when a stored Program of the old form can no longer be read.
FORMAT = 1
# Value | int | float | bool | None | str | dtype | device | layout | memory_format | tuple of these
Arg: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Value:
    """A reference to value number `index` of the Program that it is part of."""

    index: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype name ("float32"), shape and strides in elements, and device type ("cpu" or "cuda";
    never an ordinal).
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The spec of a real or fake tensor with plain integer sizes."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device.type)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The `torch.dtype` of that name."""
        # The name may come from a file: torch has many other attributes.
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ProgramError("dtype", f"{self.dtype!r} is not a torch dtype")
        return dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements (not of the storage, which strides can make larger or smaller)."""
        return self.numel * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Aten:
    """One functional ATen overload, by name ("aten.addmm.default"). `many`: the op returns a tuple
    or list, one out each.
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int, ...]
    many: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        """The value numbers among its arguments, in their order. A value that is named twice comes
        twice.
        """
        return (*_iter_values(self.args), *(i for _, arg in self.kwargs for i in _iter_values(arg)))

    @property
    def writes(self) -> tuple[int, ...]:
        """The value numbers that it yields."""
        return self.outs


@dataclass(frozen=True, slots=True)
class Alloc:
    """A fresh, uninitialised tensor from PyTorch's caching allocator."""

    out: int
    spec: TensorSpec

    @property
    def reads(self) -> tuple[int, ...]:
        """Nothing."""
        return ()

    @property
    def writes(self) -> tuple[int, ...]:
        """The value number that it yields."""
        return (self.out,)


@dataclass(frozen=True, slots=True)
class LaunchArg:
    """One kernel parameter. `kind`: "ptr" (value is a `Value`), "i32", "i64", "fp32" or "null" (a
    hidden pointer that is 0).
    """

    kind: str
    value: Value | int | float | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `symbol` in the cubin payload `payload`, on the current stream, writing into
    earlier Alloc values.

    `block` is in threads, `shared_bytes` is dynamic shared memory, `aligned` lists the values whose
    pointer the kernel assumes to be a multiple of 16 bytes (Triton's `tt.divisibility`): a guard,
    checked at every call.
    """

    payload: str
    symbol: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    args: tuple[LaunchArg, ...]
    aligned: tuple[int, ...] = ()
    cluster: int = 1

    @property
    def reads(self) -> tuple[int, ...]:
        """The value numbers whose memory the kernel gets, including those that it fills."""
        return tuple(arg.value.index for arg in self.args if isinstance(arg.value, Value))

    @property
    def writes(self) -> tuple[int, ...]:
        """Nothing: it yields no value, and fills those of earlier Allocs."""
        return ()


@dataclass(frozen=True, slots=True)
class Call:
    """A nested Program. Under Inductor it is one opaque operator; plain ATen steps around it stay
    fusible.
    """

    program: Program
    args: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def reads(self) -> tuple[int, ...]:
        """The value numbers that it hands to the nested Program."""
        return self.args

    @property
    def writes(self) -> tuple[int, ...]:
        """The value numbers that it yields."""
        return self.outs


Step: TypeAlias = Aten | Alloc | Launch | Call


@dataclass(frozen=True, slots=True)
class Program:
    """`inputs`, then `constants` (names of payload tensors), then steps; `outputs` are value
    numbers, or None for "no tensor".

    `payloads` holds every binary by name: cubins as uint8 tensors, constants as themselves. It
    takes no part in equality; `digest` covers it.
    """

    inputs: tuple[TensorSpec, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int | None, ...]
    constants: tuple[str, ...] = ()
    # Tensors have no usable == or hash. `digest` covers their bytes.
    payloads: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False, hash=False)

    @property
    def value_count(self) -> int:
        """How many values exist, inputs and constants included."""
        return len(self.inputs) + len(self.constants) + sum(len(step.writes) for step in self.steps)

    @property
    def device(self) -> str:
        """The device type it runs on: "cuda" if any input or step names it, else "cpu"."""
        # Constants do not count: they are moved to wherever the Program runs.
        specs = [*self.inputs, *(step.spec for step in self.steps if isinstance(step, Alloc))]
        inner = [step.program.device for step in self.steps if isinstance(step, Call)]
        named = [
            arg.type
            for step in self.steps
            if isinstance(step, Aten)
            for _, arg in step.kwargs
            if isinstance(arg, torch.device)
        ]
        return "cuda" if "cuda" in (*(spec.device for spec in specs), *inner, *named) else "cpu"

    @property
    def launches(self) -> bool:
        """Whether machine code is launched anywhere inside, nested Programs included."""
        return any(
            isinstance(s, Launch) or (isinstance(s, Call) and s.program.launches)
            for s in self.steps
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON value: everything but the payload bytes, which appear as digests."""
        return {
            "format": FORMAT,
            "inputs": [_encode_spec(spec) for spec in self.inputs],
            "constants": list(self.constants),
            "steps": [_encode_step(step) for step in self.steps],
            "outputs": list(self.outputs),
            # Digests in place of bytes, sorted, because the order of a dict is no part of a
            # Program.
            "payloads": {
                name: tensor_digest(self.payloads[name]) for name in sorted(self.payloads)
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], payloads: Mapping[str, torch.Tensor]) -> Program:
        """Read `to_json`'s value back. Raises ProgramError for a wrong format, a missing or altered
        payload.
        """
        if data.get("format") != FORMAT:
            raise ProgramError(
                "format", f"format {data.get('format')!r}, this version reads {FORMAT}"
            )
        used_payloads: dict[str, torch.Tensor] = {}
        try:
            for name, digest in data["payloads"].items():
                # A payload is machine code or a constant from a file. Its digest is part of the
                # region's key, so altered bytes would run under a choice that was judged with
                # others.
                if name not in payloads or tensor_digest(payloads[name]) != digest:
                    raise ProgramError(
                        "payload", f"payload {name!r} is missing or its digest differs"
                    )
                used_payloads[name] = payloads[name]
            return cls(
                inputs=tuple(_decode_spec(spec) for spec in data["inputs"]),
                constants=tuple(data["constants"]),
                # All payloads, because a nested Program looks up its own and compares their digests
                # itself.
                steps=tuple(_decode_step(step, payloads) for step in data["steps"]),
                outputs=tuple(data["outputs"]),
                payloads=used_payloads,
            )
        # A damaged or forged file fails anywhere in here; callers handle one exception.
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ProgramError("schema", f"{type(error).__name__}: {error}") from error

    def all_payloads(self) -> dict[str, torch.Tensor]:
        """Payloads of this Program and of every nested one, by name. Names are content digests, so
        equal names are equal bytes.
        """
        payloads = dict(self.payloads)
        for step in self.steps:
            if isinstance(step, Call):
                payloads |= step.program.all_payloads()
        return payloads

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON: the identity of the Program, payload bytes included."""
        return hashlib.sha256(canonical_json(self.to_json()).encode()).hexdigest()

    def with_constant(self, name: str, tensor: torch.Tensor) -> Program:
        """A copy that also carries `tensor` as payload `name` (the caller numbers its value)."""
        return replace(self, payloads={**self.payloads, name: tensor})


def _iter_values(arg: Arg) -> Iterator[int]:
    if isinstance(arg, Value):
        yield arg.index
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from _iter_values(item)


def renumber_steps(
    steps: Iterable[Step], numbers: Mapping[int, int]
) -> tuple[tuple[Step, ...], dict[int, int]]:
    """Steps of a whole-graph Program with new value numbers, and the new number of every value.
    `numbers` gives the values in front of the steps their new numbers 0, 1, ...
    """
    renumbered_steps, new_numbers = [], dict(numbers)
    for step in steps:
        # Dense and in order, as check_program demands.
        outs = tuple(range(len(new_numbers), len(new_numbers) + len(step.writes)))
        renumbered_steps.append(renumber_step(step, new_numbers, outs))
        new_numbers.update(zip(step.writes, outs, strict=True))
    return tuple(renumbered_steps), new_numbers


def renumber_step(
    step: Step, numbers: Mapping[int, int] | Sequence[int], outs: tuple[int, ...]
) -> Step:
    """A step of a whole-graph Program (ATen or call) with its values under other numbers. Raises
    TypeError for any other step.
    """
    if isinstance(step, Aten):
        kwargs = tuple((name, renumber_arg(arg, numbers)) for name, arg in step.kwargs)
        return Aten(step.target, renumber_arg(step.args, numbers), kwargs, outs, step.many)
    if isinstance(step, Call):
        return Call(step.program, tuple(numbers[index] for index in step.args), outs)
    raise TypeError(f"a whole-graph Program holds ATen and call steps, found {type(step).__name__}")


def renumber_arg(arg: Arg, numbers: Mapping[int, int] | Sequence[int]) -> Arg:
    """An argument with the values in it under other numbers."""
    if isinstance(arg, Value):
        return Value(numbers[arg.index])
    return tuple(renumber_arg(item, numbers) for item in arg) if isinstance(arg, tuple) else arg


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of dtype, shape and bytes of a tensor (copied to the CPU)."""
    # By value, whatever the device and strides: equal constants have equal digests on every
    # machine.
    flat = tensor.detach().cpu().contiguous()
    # dtype and shape come first, because the same bytes mean other numbers in another type.
    body = hashlib.sha256(f"{flat.dtype}|{tuple(flat.shape)}|".encode())
    body.update(
        # Not `.numpy()`, which does not know bfloat16.
        ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
        if flat.numel()
        else b""
    )
    return body.hexdigest()


def canonical_json(value: object) -> str:
    """One text for one value: sorted keys, no spaces, no NaN (floats outside JSON are encoded by
    `encode_arg`).
    """
    # Every option here is part of all keys in all caches: another separator would be another key.
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True
    )


def encode_arg(arg: Arg) -> Any:
    """An argument as JSON. Raises ProgramError for what a Program may not hold (symbolic integers,
    Python objects).
    """
    if arg is None or isinstance(arg, (bool, str)) or type(arg) is int:
        return arg
    if isinstance(arg, float):
        # Exact, and JSON has no word for inf and nan.
        return {"float": arg.hex()}
    if isinstance(arg, Value):
        return {"v": arg.index}
    if isinstance(arg, (tuple, list)):
        return [encode_arg(item) for item in arg]
    if isinstance(arg, complex):
        return {"complex": [arg.real.hex(), arg.imag.hex()]}
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(arg, kind):
            return {kind.__name__: str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.device):
        # Without the ordinal: a Program has to be the same on every GPU of a machine.
        return {"device": arg.type}
    raise ProgramError(
        "argument", f"{arg!r} of type {type(arg).__name__} cannot be part of a Program"
    )


def decode_arg(data: Any) -> Arg:
    """The inverse of `encode_arg`; lists come back as tuples."""
    if isinstance(data, list):
        return tuple(decode_arg(item) for item in data)
    if not isinstance(data, dict):
        return data
    # Exactly one entry: an object with more is no form of an argument.
    ((kind, value),) = data.items()
    if kind == "v":
        return Value(int(value))
    if kind == "float":
        return float.fromhex(value)
    if kind == "complex":
        return complex(*(float.fromhex(part) for part in value))
    if kind == "device":
        return torch.device(value)
    # The type is checked below: a forged name could lead to any attribute of torch.
    named = getattr(torch, value, None) if kind in ("dtype", "layout", "memory_format") else None
    if named is None or type(named).__name__ != kind:
        raise ProgramError("argument", f"{data!r} is not a known value")
    return named


def _encode_spec(spec: TensorSpec) -> list[Any]:
    return [spec.dtype, list(spec.shape), list(spec.strides), spec.device]


def _decode_spec(data: Any) -> TensorSpec:
    dtype, shape, strides, device = data
    return TensorSpec(str(dtype), tuple(map(int, shape)), tuple(map(int, strides)), str(device))


def _encode_step(step: Step) -> dict[str, Any]:
    if isinstance(step, Aten):
        return {
            "op": "aten",
            "target": step.target,
            "args": encode_arg(step.args),
            "kwargs": {name: encode_arg(value) for name, value in step.kwargs},
            "outs": list(step.outs),
            "many": step.many,
        }
    if isinstance(step, Alloc):
        return {"op": "alloc", "out": step.out, "spec": _encode_spec(step.spec)}
    if isinstance(step, Call):
        return {
            "op": "call",
            "program": step.program.to_json(),
            "args": list(step.args),
            "outs": list(step.outs),
        }
    return {
        "op": "launch",
        "payload": step.payload,
        "symbol": step.symbol,
        "grid": list(step.grid),
        "block": step.block,
        "shared_bytes": step.shared_bytes,
        "args": [[arg.kind, encode_arg(arg.value)] for arg in step.args],
        "aligned": list(step.aligned),
        "cluster": step.cluster,
    }


def _decode_step(data: Mapping[str, Any], payloads: Mapping[str, torch.Tensor]) -> Step:
    op = data["op"]
    if op == "aten":
        # Sorted, so that the digest does not depend on the order of keys in a file.
        kwargs = tuple((name, decode_arg(value)) for name, value in sorted(data["kwargs"].items()))
        return Aten(
            data["target"],
            decode_arg(data["args"]),
            kwargs,
            tuple(data["outs"]),
            bool(data["many"]),
        )
    if op == "alloc":
        return Alloc(int(data["out"]), _decode_spec(data["spec"]))
    if op == "call":
        return Call(
            Program.from_json(data["program"], payloads), tuple(data["args"]), tuple(data["outs"])
        )
    if op != "launch":
        raise ProgramError("schema", f"unknown step {op!r}")
    # Plain ints, whatever a file holds: a launch passes them to the driver as they are.
    x, y, z = map(int, data["grid"])
    return Launch(
        payload=data["payload"],
        symbol=data["symbol"],
        grid=(x, y, z),
        block=int(data["block"]),
        shared_bytes=int(data["shared_bytes"]),
        args=tuple(LaunchArg(kind, decode_arg(value)) for kind, value in data["args"]),
        aligned=tuple(data["aligned"]),
        cluster=int(data["cluster"]),
    )
