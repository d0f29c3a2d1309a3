"""Imports a KernelBench-style source from its text, and describes a reference file.

The text is untrusted Python, which runs in this disposable process only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.kernelbench_format import constructor_arguments
from torch_cudal1.ir.cost import make_flop_counter
from torch_cudal1.judge.wire.call_spec import CallSpec, pack_arguments, unpack_arguments
from torch_cudal1.judge.worker.modules.ordinary_call import call_as_main

__all__ = ["describe_reference", "import_source"]

_WORDS = (
    *("attention", "block", "encoder", "experiment", "fast", "forward", "fused", "head", "impl"),
    *("kernel", "kernels", "layer", "layers", "main_model", "model", "models", "module", "modules"),
    *("net", "network", "norm", "ops", "optimised", "optimized", "solution", "submission", "utils"),
)
# The sha256 of a text -> the name of its module in this process.
_imported: dict[str, str] = {}


def import_source(text: str, folder: Path) -> ModuleType:
    """Import a source text as a module, once per process."""
    # By its text, so the same source is imported once.
    digest = hashlib.sha256(text.encode()).hexdigest()
    name = _imported.get(digest) or _draw_name()
    if name in sys.modules:
        return sys.modules[name]
    # A file, because Triton and tracebacks read the source of a function from it.
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SandboxError("import", f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before its code runs, as dataclasses and pickle look their module up by name.
    sys.modules[name] = module
    _imported[digest] = name
    try:
        call_as_main(spec.loader.exec_module, (module,), {})
    except BaseException:
        # A module that was executed in part must not be found by the next import of its text.
        del sys.modules[name]
        raise
    return module


def _draw_name() -> str:
    """A name as people give it, of no module that there is: a source shall not learn from its name
    who has imported it.
    """
    while True:
        words = [secrets.choice(_WORDS) for _ in range(1 + secrets.randbelow(2))]
        name = "_".join(words) + secrets.choice(("", f"_{secrets.randbelow(100)}", "_v2", "_new"))
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            return name


def describe_reference(
    source: ModuleType, entry: str, device: torch.device, seed: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The call spec, tensor roles and operation count of a reference file (JSON), and its example
    tensors: parameters and buffers, then those of the call.

    Raises SandboxError for a file without class `entry`, get_inputs or get_init_inputs, and for
    arguments that are neither tensors nor plain values.
    """
    missing = [
        name
        for name in (entry, "get_inputs", "get_init_inputs")
        if not callable(getattr(source, name, None))
    ]
    if missing:
        raise SandboxError("reading the reference", f"it defines no {', no '.join(missing)}")
    # Anew before each step, so that none depends on how much the one before it drew.
    torch.manual_seed(seed)
    args, kwargs = constructor_arguments(source.get_init_inputs())
    init = pack_arguments({"args": args, "kwargs": kwargs}, None)
    torch.manual_seed(seed)
    arguments = unpack_arguments(init, ())
    model = getattr(source, entry)(*arguments["args"], **arguments["kwargs"]).to(device).eval()
    state = model.state_dict(keep_vars=True)
    torch.manual_seed(seed)
    tensors: list[torch.Tensor] = []
    call = pack_arguments({"args": list(source.get_inputs()), "kwargs": {}}, tensors)
    tensors = [tensor.to(device) for tensor in tensors]
    roles = [
        "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
        for value in state.values()
    ]
    spec = CallSpec(entry, init, tuple(state), call, seed)
    description = {
        "form": spec.to_json(),
        "roles": roles + ["input"] * len(tensors),
        "flops": _count_flops(model, call, tensors),
    }
    return description, [*state.values(), *tensors]


def _count_flops(model: torch.nn.Module, call: Any, tensors: Sequence[torch.Tensor]) -> int:
    """Multiplications and additions of one call, in matrix products, convolutions and attention
    only; 0 where the call fails.
    """
    # Copies: a model may write to its inputs, and these are the examples.
    arguments = unpack_arguments(call, [tensor.clone() for tensor in tensors])
    try:
        with torch.no_grad(), make_flop_counter() as counter:
            model(*arguments["args"], **arguments["kwargs"])
    except (
        RuntimeError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        AssertionError,
    ):
        # The failure is reported where a result is needed.
        return 0
    return int(counter.get_total_flops())
