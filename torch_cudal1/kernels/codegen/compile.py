"""Triton text, or CUDA C++, to a cubin, ahead of time and without a GPU.

Runs in the judge's build process only: it writes the text to a temporary folder, imports it from
there and leaves nothing behind. Refuses kernels that the compiler accepts and no device can run:
shared memory is not checked ahead of time, and some bodies are a `trap`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.cuda.nvrtc import compile_cuda
from torch_cudal1.device.specs import max_shared_bytes
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels.codegen.early_start import add_early_start, add_early_start_to_cuda
from torch_cudal1.kernels.codegen.sass import disassemble, find_unwritten_reads
from torch_cudal1.kernels.lowering import CompiledKernel, assemble, lower
from torch_cudal1.kernels.proposal import KernelSource, Proposal

__all__ = ["TritonOptions", "build", "compile_function", "compile_kernel"]

_GLOBAL = re.compile(r"^\.global [^\n=]*?([\w$]+)\[\d+\] = [^\n]*;\n", re.MULTILINE)
# Addresses are multiples of 16 bytes, so that loads may be vectors; `Launch.aligned` is a guard
# that is checked at every call.
_ALIGNED = [["tt.divisibility", 16]]


def build(program: Program, proposal: Proposal, sm: int) -> Program:
    """The Program of cubins for `sm_{sm}`, with outputs exactly as the reference's.

    Raises NotLowerableError when the fusion group is not covered, does not compile or needs more
    than the device has, and ProgramError when the proposal does not fit the fusion group.
    """
    lowered = lower(program, proposal)
    cubins: dict[str, CompiledKernel] = {}
    # Kernels of one CUDA C++ text share their machine code.
    machine_code: dict[str, bytes] = {}
    for kernel in lowered.kernels:
        if kernel.cuda is None:
            cubins[kernel.symbol] = compile_kernel(kernel, sm)
            continue
        # NVRTC does not know the dynamic shared memory, and a launch that asks for too much fails
        # only then.
        if (needed := kernel.cuda.shared_bytes) > max_shared_bytes(sm):
            raise NotLowerableError(
                f"{kernel.symbol} needs {needed} bytes of shared memory; sm_{sm} has {max_shared_bytes(sm)}"
            )
        # Kernels of one text are compiled once: the text holds all entry points.
        if kernel.text not in machine_code:
            machine_code[kernel.text] = compile_cuda_text(kernel, sm)
        cubins[kernel.symbol] = _make_cubin(
            machine_code[kernel.text], kernel.warps, kernel.cuda.shared_bytes
        )
    return assemble(program, lowered, cubins)


def compile_cuda_text(kernel: KernelSource, sm: int) -> bytes:
    """Machine code of a kernel's CUDA C++.

    Raises NotLowerableError with the compiler's log, and where NVRTC is missing.
    """
    assert kernel.cuda is not None
    defines = [f"-D{name}={value}" for name, value in kernel.cuda.defines]
    # as for Triton: no contraction across operators; the kernels ask for fused multiply-adds by
    # name
    built = compile_cuda(
        add_early_start_to_cuda(kernel.text, sm),
        # wgmma exists only in the architecture-specific targets.
        f"sm_{sm}a" if sm >= 90 else f"sm_{sm}",
        options=["--fmad=false", "--std=c++17", *defines],
    )
    if isinstance(built, Refusal):
        raise NotLowerableError(f"{kernel.symbol} does not compile for sm_{sm}: {built.reason}")
    return built.cubin


@dataclass(frozen=True)
class TritonOptions:
    """Triton's compile options, with its own defaults; None: it chooses."""

    num_warps: int = 4
    num_stages: int | None = None
    num_ctas: int = 1
    maxnreg: int | None = None
    enable_fp_fusion: bool = True


def compile_function(
    function: Any,
    signature: Mapping[str, str],
    constants: Mapping[tuple[int, ...], Any],
    attributes: Mapping[tuple[int, ...], Any],
    options: TritonOptions,
    sm: int,
) -> CompiledKernel:
    """Compile a foreign Triton function for `sm` as its launch would. Raises NotLowerableError as
    `compile_kernel` does.

    `constants` and `attributes` are by the position of an argument, in a tuple, as Triton has them.
    """
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=function, signature=dict(signature), constexprs=dict(constants), attrs=dict(attributes)
    )
    chosen = {name: value for name, value in asdict(options).items() if value is not None}
    name = function.__name__
    # Nothing is left on disk, and nothing that is there is read: a cached cubin would be code that
    # this process did not compile.
    with tempfile.TemporaryDirectory() as folder, _isolate_triton(folder):
        return _run_triton(source, chosen, name, sm)


def compile_kernel(kernel: KernelSource, sm: int) -> CompiledKernel:
    """Compile one kernel. Raises NotLowerableError with the compiler's reason, or for a resource
    over the limit of `sm`.
    """
    from triton.compiler import ASTSource

    # eager rounds after every op and keeps subnormals: no contraction across ops, no flush to zero
    # inside libdevice
    options = {"num_warps": kernel.warps, "enable_fp_fusion": False, "enable_reflect_ftz": False}
    options |= {} if kernel.stages is None else {"num_stages": kernel.stages}
    options |= {} if kernel.registers is None else {"maxnreg": kernel.registers}
    extended = replace(kernel, text=add_early_start(kernel.text, kernel.symbol, sm))
    with tempfile.TemporaryDirectory() as folder, _isolate_triton(folder):
        source = ASTSource(
            fn=getattr(load_source(extended, Path(folder)), kernel.symbol),
            signature={f"p{value}": kind for value, kind in kernel.arguments},
            constexprs={},
            attrs={(i,): _ALIGNED for i in range(len(kernel.arguments))},
        )
        return _run_triton(source, options, kernel.symbol, sm)


@contextmanager
def _isolate_triton(folder: str) -> Iterator[None]:
    """Triton's switches for compiling here: nothing is kept, nothing of this machine gets into a
    cubin.
    """
    # Triton is absent on some machines, where importing this package must still work
    from triton import knobs

    with knobs.compilation.scope(), knobs.cache.scope(), knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = _stages_hook
        # Line info would put the path of the temporary folder into the cubin: its bytes would
        # differ from build to build.
        knobs.compilation.disable_line_info = True
        knobs.cache.dir = folder
        yield


def load_source(kernel: KernelSource, folder: Path) -> ModuleType:
    """Write the kernel's text into `folder` and import it (Triton reads the source back from the
    file).
    """
    path = folder / f"{kernel.symbol}.py"
    path.write_text(kernel.text)
    spec = importlib.util.spec_from_file_location(kernel.symbol, path)
    if spec is None or spec.loader is None:
        raise NotLowerableError(f"cannot import {path.name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_triton(source: Any, options: Mapping[str, Any], symbol: str, sm: int) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.errors import TritonError

    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=dict(options))
    except (TritonError, RuntimeError) as error:
        raise NotLowerableError(f"Triton does not compile {symbol} for sm_{sm}: {error}") from error
    return _check_resources(compiled, symbol, sm)


def _stages_hook(*arguments: Any) -> tuple[str, str] | None:
    """Triton's pipeline hook: without arguments it names the pipeline, with (backend, stages, ...)
    it may wrap stages.
    """
    if not arguments:
        return "unreferenced globals dropped", "1"
    stages = arguments[1]
    to_ptx = stages["ptx"]
    stages["ptx"] = lambda module, metadata: drop_dead_globals(to_ptx(module, metadata))
    return None


def drop_dead_globals(ptx: str) -> str:
    """The PTX without module globals that nothing reads.

    Every libdevice call leaves the string "__CUDA_FTZ" of its resolved reflection behind; a cubin
    with module memory is refused when it is scanned, since such memory could outlive a call. A
    global that code does read stays, and so does the refusal.
    """
    for line, name in [(match[0], match[1]) for match in _GLOBAL.finditer(ptx)]:
        if len(re.findall(rf"(?<![\w$]){re.escape(name)}(?![\w$])", ptx)) == 1:
            ptx = ptx.replace(line, "")
    return ptx


def _check_resources(compiled: Any, symbol: str, sm: int) -> CompiledKernel:
    metadata = compiled.metadata
    # Triton does not check shared memory ahead of time: the kernel would fail at its first launch.
    if metadata.shared > max_shared_bytes(sm):
        raise NotLowerableError(
            f"{symbol} needs {metadata.shared} bytes of shared memory; sm_{sm} has {max_shared_bytes(sm)}"
        )
    if (
        metadata.global_scratch_size
        or metadata.profile_scratch_size
        or getattr(metadata, "num_ctas", 1) != 1
    ):
        raise NotLowerableError(f"{symbol} needs device scratch or a cluster")
    # Some bodies compile to a `trap`: a kernel that stores nothing is not what the text says.
    if metadata.name != symbol or "st.global" not in compiled.asm["ptx"]:
        raise NotLowerableError(f"{symbol} compiled to a body that stores nothing")
    # Only descriptors of wgmma operands come from such registers; disassembling costs 0.5 s a
    # kernel.
    if "wgmma" in compiled.asm["ptx"]:
        _refuse_unwritten(bytes(compiled.asm["cubin"]), symbol)
    return _make_cubin(bytes(compiled.asm["cubin"]), int(metadata.num_warps), int(metadata.shared))


def _refuse_unwritten(cubin: bytes, symbol: str) -> None:
    """Raises NotLowerableError for machine code with ptxas's error of uniform registers. Where the
    code cannot be disassembled, telemetry has a record of that.
    """
    sass = disassemble(cubin)
    if sass is None:
        telemetry.record("kernels", "machine_code_not_read", symbol)
    elif instructions := find_unwritten_reads(sass):
        raise NotLowerableError(
            f"{symbol}: ptxas made code that reads uniform registers which nothing wrote, such as {instructions[0]}"
        )


def _make_cubin(body: bytes, warps: int, shared_bytes: int) -> CompiledKernel:
    # `frombuffer` shares memory, and warns of a buffer that cannot be written: hence the copy.
    tensor = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return CompiledKernel(hashlib.sha256(body).hexdigest(), tensor, warps, shared_bytes)
