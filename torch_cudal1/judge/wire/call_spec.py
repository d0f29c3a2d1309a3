"""How a list of tensors becomes a call of a module: `CallSpec`, the modes of a run (`RunMode`), and
arguments packed as JSON.

The parent makes these values and the worker runs calls by them. The flat order of tensors is:
parameters and buffers by name, tensors of the call, then (with gradients) one cotangent per output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_cudal1.core.errors import SandboxError

__all__ = [
    "CallSpec",
    "RunMode",
    "count_tensors",
    "find_tensor_order",
    "pack_arguments",
    "unpack_arguments",
]


@dataclass(frozen=True)
class RunMode:
    """The mode in which a module is run.

    - training: train mode instead of eval. gradients: also compute those of parameters and floating
      inputs. gradient_places: the places of those that want one, None for all; used: the places of
      the outputs that have a cotangent, None for all. step: as a step of training asks, in the
      middle of a model: inputs that are no leaves, another call before `backward`, and the leaves'
      `grad`; accumulate: which is added to an earlier one.
    - frozen: the paths of parts that are in eval mode while the whole trains.
    - retained: backward runs twice over one graph, and the second gradients count. doubled: the
      first result is doubled before `backward`: "in place" (by a candidate's caller), "copied" (the
      same for the reference), or "" for not.
    - plain: with gradients enabled, and no input that wants one.
    - double: in float64, for the reference. inference: under torch.inference_mode.
    - autocast: name of a dtype, "" for none.
    - compiled: "", or the mode of torch.compile, for a baseline: "default" or "reduce-overhead".
    - dtype: name of a dtype to which the module is cast after its first call.
    - double_backward: also gradients of the gradients. other_gpu: on a GPU that is not current.
      on_host: on the CPU, for the reference.
    - temporaries: with tensors that nothing but the call holds, in the memory of the inputs: "",
      "view" or "alias" (without a base).
    - steps: of training, in a row on one instance, between two calls in eval mode; the results are
      those of the last step, then the whole state, then those of the second call. transform: "",
      "jvp" or "vmap" of torch.func.
    """

    training: bool = False
    gradients: bool = False
    gradient_places: tuple[int, ...] | None = None
    used: tuple[int, ...] | None = None
    step: bool = False
    accumulate: bool = False
    frozen: tuple[str, ...] | None = None
    retained: bool = False
    doubled: str = ""
    plain: bool = False
    double: bool = False
    inference: bool = False
    autocast: str = ""
    compiled: str = ""
    dtype: str = ""
    double_backward: bool = False
    other_gpu: bool = False
    on_host: bool = False
    temporaries: str = ""
    steps: int = 0
    transform: str = ""

    def to_json(self) -> dict[str, Any]:
        """The mode as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class CallSpec:
    """How to construct and call a module.

    - entry: name of the class in its source. init: packed arguments of its constructor.
    - names: of its parameters and buffers. call: packed arguments of a call.
    - seed: for the random generators before construction.
    """

    entry: str
    init: Any
    names: tuple[str, ...]
    call: Any
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """The spec as JSON."""
        return {
            "entry": self.entry,
            "init": self.init,
            "names": list(self.names),
            "call": self.call,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CallSpec:
        """The inverse of `to_json`."""
        return cls(
            str(data["entry"]), data["init"], tuple(data["names"]), data["call"], int(data["seed"])
        )


def pack_arguments(value: Any, tensors: list[torch.Tensor] | None) -> Any:
    """A nested argument as JSON. Tensors are appended to `tensors` and replaced by their index.

    Raises SandboxError for a value that is neither plain nor a tensor, and for a tensor where
    `tensors` is None.
    """
    if isinstance(value, torch.Tensor) and tensors is not None:
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list):
        return [pack_arguments(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [pack_arguments(item, tensors) for item in value]}
    # A JSON object has one key, its kind, so a dict of the user cannot pass for a tensor.
    if isinstance(value, dict):
        return {"dict": {str(key): pack_arguments(item, tensors) for key, item in value.items()}}
    raise SandboxError(
        "reading the reference",
        f"an argument of type {type(value).__name__}; plain values and tensors are allowed",
    )


def unpack_arguments(packed: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `pack_arguments`."""
    if isinstance(packed, list):
        return [unpack_arguments(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "tuple":
        return tuple(unpack_arguments(item, tensors) for item in content)
    return {key: unpack_arguments(item, tensors) for key, item in content.items()}


def find_tensor_order(call: Any) -> list[int] | None:
    """The tensor indices of a packed call whose only arguments are positional tensors; None for any
    other call. Such a call needs no unpacking.
    """
    match call:
        case {"dict": {"args": {"tuple": [*args]}, "kwargs": {"dict": kwargs}}} if not kwargs:
            order = [arg["tensor"] for arg in args if isinstance(arg, dict) and "tensor" in arg]
            return order if len(order) == len(args) else None
    return None


def count_tensors(call: Any) -> int:
    """How many tensors a packed call takes."""
    if isinstance(call, list):
        return sum(map(count_tensors, call))
    if not isinstance(call, dict):
        return 0
    ((kind, content),) = call.items()
    if kind == "tensor":
        return 1
    return sum(map(count_tensors, content.values())) if kind == "dict" else count_tensors(content)
