"""The child's side of a KernelBench-style source: a module made from text, run as a function of
flat tensors.

The text is somebody's Python; it is run here, in a disposable process, and nowhere else. The flat
order is the parameters and buffers by name, the tensors of the call, then (with gradients) one
cotangent per output. It compares nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.kernelbench_format import constructor_arguments
from torch_cudal1.ir.cost import counting_flops
from torch_cudal1.judge.reference.float64 import widen
from torch_cudal1.judge.worker.headers import keep_headers

__all__ = [
    "CallForm",
    "ModuleRunner",
    "Way",
    "described",
    "imported",
    "pack",
    "tensors_in",
    "unpack",
]

_LEAF = pytree.tree_flatten(0)[1]  # of a result that is one tensor


@dataclass(frozen=True)
class Way:
    """In which mode a module is run. `double`: in float64, the oracle's way; `compiled`: through
    torch.compile, a baseline's.

    `dtype`: cast to it after a first call in the type it was made in. `second`: gradients of the
    gradients too. `elsewhere`: on another GPU than the current one.
    """

    training: bool = False
    gradients: bool = False
    double: bool = False
    inference: bool = False
    autocast: str = ""  # dtype name
    compiled: str = ""  # "", "default" or "reduce-overhead"
    dtype: str = ""
    second: bool = False
    elsewhere: bool = False

    def to_json(self) -> dict[str, Any]:
        """For a frame."""
        return asdict(self)


@dataclass(frozen=True)
class CallForm:
    """How flat tensors become a call. `names` of parameters and buffers; `init` and `call` as
    `pack` makes them.
    """

    entry: str
    init: Any
    names: tuple[str, ...]
    call: Any
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """For a frame."""
        return {
            "entry": self.entry,
            "init": self.init,
            "names": list(self.names),
            "call": self.call,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CallForm:
        """The inverse of `to_json`."""
        return cls(
            str(data["entry"]), data["init"], tuple(data["names"]), data["call"], int(data["seed"])
        )


class ModuleRunner:
    """`runner(inputs)` calls the module with those parameters, buffers and arguments.

    A set with the same parameter tensors as the call before meets the same instance; other
    parameters meet a fresh one, unless `update` has been told to change the living instance.
    """

    def __init__(self, module: ModuleType, form: CallForm, way: Way, device: torch.device) -> None:
        self._source, self._form, self._way = module, form, way
        self._device = _next_gpu(device) if way.elsewhere else device
        self._carried: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # a tensor's id: itself, and its copy elsewhere
        self._instance: torch.nn.Module | None = None
        self._loaded: tuple[
            torch.Tensor, ...
        ] = ()  # kept alive: the id of a dead tensor is soon another's
        self._order = _order(form.call)
        self._tree: tuple[object, list[str | None]] | None = None  # of the last call's result
        self._compiled: Callable[..., Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of parameters and buffers, in flat order."""
        return self._form.names

    @property
    def tree(self) -> str:
        """How the last call's result was nested, and what in it was no tensor; "" before the first
        call.
        """
        return "" if self._tree is None else f"{self._tree[0]}{self._tree[1]}"

    @property
    def instance(self) -> torch.nn.Module:
        """The living instance. Raises SandboxError before the first call."""
        if self._instance is None:
            raise SandboxError("module", "no call has made an instance yet")
        return self._instance

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The tensors among the results; in training mode then the buffers; with gradients then
        those of all floating inputs.
        """
        if self._way.elsewhere:
            return self._elsewhere(inputs)
        return self._here(inputs)

    def _here(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        count = len(self._form.names)
        self._meet(inputs[:count], inputs[count:])
        if self._way.gradients:
            return self._with_gradients(inputs)
        mode = (
            torch.inference_mode()
            if self._way.inference
            else torch.no_grad()
            if torch.is_grad_enabled()
            else nullcontext()
        )
        # none where there is none to set, as when calls are timed: what this adds is in the time of
        # each
        with mode:
            return self._results(self._arguments(inputs[count:]))

    def _elsewhere(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The results of a call with copies of the inputs on the other device, brought back. Raises
        SandboxError for wrong ones.
        """
        for tensor in inputs:
            _, copied = self._carried.setdefault(
                id(tensor), (tensor, torch.empty_like(tensor, device=self._device))
            )
            copied.copy_(tensor)
        results = self._here([self._carried[id(tensor)][1] for tensor in inputs])
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
        """Put another instance in the living one's place: a copy of it."""
        self._instance, self._compiled = instance, None

    def adopt(self, state: Sequence[torch.Tensor]) -> None:
        """Take it that the living instance now holds these tensors: somebody has just written them
        into it.
        """
        self._loaded = tuple(state)

    def holds(self, state: Sequence[torch.Tensor]) -> bool:
        """Whether the living instance was given these very tensors."""
        same = len(state) == len(self._loaded) and all(
            a is b for a, b in zip(state, self._loaded, strict=True)
        )
        return self._instance is not None and same

    def state(self) -> list[torch.Tensor]:
        """Parameters and buffers of the living instance, in flat order. Raises SandboxError when
        one is gone.
        """
        found = self.instance.state_dict(keep_vars=True)
        missing = [name for name in self._form.names if name not in found]
        if missing:
            raise SandboxError("module", f"its state has lost {missing}")
        return [found[name] for name in self._form.names]

    def fresh(self) -> torch.nn.Module:
        """A new instance as its constructor leaves it, on the device, in the way's mode."""
        torch.manual_seed(self._form.seed)
        given = unpack(self._form.init, ())
        instance = getattr(self._source, self._form.entry)(*given["args"], **given["kwargs"])
        if not isinstance(instance, torch.nn.Module):
            raise SandboxError(
                "module",
                f"{self._form.entry} made a {type(instance).__name__}, expected a torch.nn.Module",
            )
        instance = instance.to(self._device).train(self._way.training)
        return instance.double() if self._way.double else instance

    def _meet(self, state: Sequence[torch.Tensor], moving: Sequence[torch.Tensor]) -> None:
        if self.holds(state):
            return
        self._instance = self.fresh()
        self._instance.load_state_dict(dict(zip(self._form.names, state, strict=True)), strict=True)
        self._loaded = tuple(state)
        self._compiled = None
        if self._way.dtype and not self._way.double:
            self._cast(moving)

    def _cast(self, moving: Sequence[torch.Tensor]) -> None:
        """Cast the module after a call: what it keeps from a first call has to follow."""
        made = [
            t.float() if t.dtype.is_floating_point else t
            for t in moving[: tensors_in(self._form.call)]
        ]
        with torch.no_grad():
            self._results(unpack(self._form.call, made))
        self.instance.to(getattr(torch, self._way.dtype))

    def _arguments(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        wide = [widen(t) for t in tensors] if self._way.double else tensors
        if self._order is not None:
            return {"args": [wide[number] for number in self._order], "kwargs": {}}
        given: Mapping[str, Any] = unpack(self._form.call, wide)
        return given

    def _results(self, given: Mapping[str, Any]) -> list[torch.Tensor | None]:
        if self._way.training:
            torch.manual_seed(self._form.seed)  # dropout: the same masks for the same draws
        output = self._output(given)
        leaves, spec = (
            ([output], _LEAF) if isinstance(output, torch.Tensor) else pytree.tree_flatten(output)
        )
        self._tree = (
            spec,
            [None if isinstance(leaf, torch.Tensor) else _told(leaf) for leaf in leaves],
        )
        results: list[torch.Tensor | None] = [
            leaf for leaf in leaves if isinstance(leaf, torch.Tensor)
        ]
        if self._way.training:
            results += [
                value.detach().clone()
                for value in self.state()
                if not isinstance(value, torch.nn.Parameter)
            ]
        return results

    def _output(self, given: Mapping[str, Any]) -> object:
        kind = self._device.type
        if not self._way.autocast and not torch.is_autocast_enabled(kind):
            return self._callable()(*given["args"], **given["kwargs"])
        dtype = getattr(torch, self._way.autocast) if self._way.autocast else None
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            return self._callable()(*given["args"], **given["kwargs"])

    def _callable(self) -> Callable[..., Any]:
        if not self._way.compiled:
            return self.instance
        if self._compiled is None:
            mode = None if self._way.compiled == "default" else self._way.compiled
            if self._device.type == "cpu":
                keep_headers()
            self._compiled = torch.compile(self.instance, mode=mode)
        return self._compiled

    def _with_gradients(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        count, total = len(self._form.names), len(self._form.names) + tensors_in(self._form.call)
        moving = [t.detach().requires_grad_(t.dtype.is_floating_point) for t in inputs[count:total]]
        with torch.enable_grad():
            given = self._arguments(moving)
            results = self._results(given)
        leaves = [t for t in (*self.state(), *moving) if t.requires_grad]
        pairs = [
            (out, c)
            for out, c in zip(results, inputs[total:], strict=False)
            if out is not None and out.requires_grad
        ]
        grads: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if pairs:
            grads = torch.autograd.grad(
                [out for out, _ in pairs],
                leaves,
                [c.to(out.dtype) for out, c in pairs],
                allow_unused=True,
                create_graph=self._way.second,
            )
        if self._way.second:
            grads = [*(g if g is None else g.detach() for g in grads), *_second(grads, leaves)]
        return [*(None if out is None else out.detach() for out in results), *grads]


def _second(
    grads: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """The gradients of the sum of all gradients."""
    live = [grad for grad in grads if grad is not None and grad.requires_grad]
    if not live:
        return [None] * len(leaves)
    return torch.autograd.grad(
        live, leaves, [torch.ones_like(grad) for grad in live], allow_unused=True
    )


def _next_gpu(device: torch.device) -> torch.device:
    """Raises SandboxError where there is no other."""
    count = torch.cuda.device_count()
    if device.type != "cuda" or count < 2:
        raise SandboxError("module", f"there is no other GPU than {device} here")
    return torch.device("cuda", ((device.index or 0) + 1) % count)


def imported(text: str, folder: Path) -> ModuleType:
    """Run a source text as a module of its own. It is a file in `folder`, because Triton and
    tracebacks read their source.
    """
    name = f"cudal1_source_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SandboxError("import", f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def described(
    source: ModuleType, entry: str, device: torch.device, seed: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What a reference file says of itself (JSON), and its example tensors: parameters, buffers,
    then the call's.

    Raises SandboxError for a file without Model, get_inputs or get_init_inputs, or with arguments
    that are not plain.
    """
    missing = [
        name
        for name in (entry, "get_inputs", "get_init_inputs")
        if not callable(getattr(source, name, None))
    ]
    if missing:
        raise SandboxError("reading the reference", f"it defines no {', no '.join(missing)}")
    torch.manual_seed(seed)
    args, kwargs = constructor_arguments(source.get_init_inputs())
    init = pack({"args": args, "kwargs": kwargs}, None)
    torch.manual_seed(seed)
    unpacked = unpack(init, ())
    model = getattr(source, entry)(*unpacked["args"], **unpacked["kwargs"]).to(device).eval()
    state = model.state_dict(keep_vars=True)
    torch.manual_seed(seed)
    tensors: list[torch.Tensor] = []
    call = pack({"args": list(source.get_inputs()), "kwargs": {}}, tensors)
    tensors = [tensor.to(device) for tensor in tensors]
    roles = [
        "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
        for value in state.values()
    ]
    form = CallForm(entry, init, tuple(state), call, seed)
    told = {
        "form": form.to_json(),
        "roles": roles + ["input"] * len(tensors),
        "flops": _flops(model, call, tensors),
    }
    return told, [*state.values(), *tensors]


def _flops(model: torch.nn.Module, call: Any, tensors: Sequence[torch.Tensor]) -> int:
    """Multiplications and additions of one call, products, convolutions and attention only; 0 where
    it fails.
    """
    given = unpack(call, [tensor.clone() for tensor in tensors])
    try:
        with torch.no_grad(), counting_flops() as counter:
            model(*given["args"], **given["kwargs"])
    except (
        RuntimeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        AssertionError,
    ):  # shows where the result is needed
        return 0
    return int(counter.get_total_flops())


def pack(value: Any, tensors: list[torch.Tensor] | None) -> Any:
    """A nested argument as JSON; tensors go to `tensors` and leave their number. Raises
    SandboxError for anything else.
    """
    if isinstance(value, torch.Tensor) and tensors is not None:
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list):
        return [pack(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [pack(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": {str(key): pack(item, tensors) for key, item in value.items()}}
    raise SandboxError(
        "reading the reference",
        f"an argument of type {type(value).__name__}; plain values and tensors are allowed",
    )


def unpack(data: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `pack`."""
    if isinstance(data, list):
        return [unpack(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in content)
    return {key: unpack(item, tensors) for key, item in content.items()}


def _order(call: Any) -> list[int] | None:
    """Which tensors a packed call takes, where these are all that it takes, one after the other;
    None for any other call.
    """
    match call:
        case {"dict": {"args": {"tuple": [*args]}, "kwargs": {"dict": kwargs}}} if not kwargs:
            order = [arg["tensor"] for arg in args if isinstance(arg, dict) and "tensor" in arg]
            return order if len(order) == len(args) else None
    return None


def _told(leaf: Any) -> str:
    """A leaf that is no tensor, for comparison: a float may differ by its rounding."""
    return f"{leaf:.4g}" if type(leaf) is float else repr(leaf)[:80]


def tensors_in(call: Any) -> int:
    """How many tensors a packed call takes."""
    if isinstance(call, list):
        return sum(map(tensors_in, call))
    if not isinstance(call, dict):
        return 0
    ((kind, content),) = call.items()
    if kind == "tensor":
        return 1
    return sum(map(tensors_in, content.values())) if kind == "dict" else tensors_in(content)
