"""The process of `test_ksl_compiles`: programs of the language compiled for sm_90 without a GPU;
prints one JSON.

Each program's launch is caught and its kernel compiled with the types, constants and divisibility
that the launch would have had.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from torch_cudal1.judge.pool.measured import Decoded
from torch_cudal1.judge.worker.modules.source_modules import import_source
from torch_cudal1.training.ksl.codec import KslCodec
from torch_cudal1.training.ksl.ops import make_task

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int64: "*i64"}
OPTIONS = ("num_warps", "num_stages")
SHARED: list[int] = []


def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **arguments: Any) -> None:
    """In place of a launch."""
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    bound = dict(zip(self.arg_names, args, strict=False)) | arguments
    constants = {param.name: bound[param.name] for param in self.params if param.is_constexpr}
    signature = {name: _type(name, bound[name], constants) for name in self.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(self.arg_names)
        if name not in constants
        and (isinstance(bound[name], torch.Tensor) or bound[name] % 16 == 0)
    }
    places = {(self.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(self, signature, places, aligned)
    SHARED.append(
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared
    )


def _type(name: str, value: Any, constants: dict[str, Any]) -> str:
    return (
        "constexpr"
        if name in constants
        else TYPES[value.dtype]
        if isinstance(value, torch.Tensor)
        else "i32"
    )


def main(programs: list[list[str]]) -> None:
    """`programs`: operation, shape as 1x2x3, program. Prints the bytes of shared memory of each one's
    kernels.
    """
    JITFunction.run = compile_launch  # type: ignore[method-assign]
    codec = KslCodec("cuda")
    shared_bytes = []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape, text in programs:
            sizes = tuple(map(int, shape.split("x")))
            task = make_task(
                name, sizes, "float16" if len(sizes) == 3 and "mm." in text else "float32"
            )
            decoded = codec.decode(task, text)
            assert isinstance(decoded, Decoded), decoded
            SHARED.clear()
            inputs = import_source(task.reference, Path(folder)).get_inputs()
            import_source(decoded.source, Path(folder)).ModelNew()(*inputs)
            shared_bytes.append(list(SHARED))
    print(json.dumps(shared_bytes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
