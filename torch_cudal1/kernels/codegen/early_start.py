"""Programmatic dependent launch: on sm_90 and newer a kernel lets the next one begin at once, and
waits for the one before it ahead of all that it reads and writes.

In a CUDA graph the blocks of the next kernel are then placed, and its arguments fetched, while this
one still computes. What a kernel needs for that stands in its first two instructions, so its text
is extended where it is compiled, for those architectures alone. `device.cuda.early_start` looks for
them in the machine code, and only a kernel that has them is launched before another has ended
(source: PTX ISA, griddepcontrol; CUDA C++ Programming Guide, "Programmatic Dependent Launch").
"""

from __future__ import annotations

import re

from torch_cudal1.device.cuda.early_start import MIN_SM

__all__ = ["add_early_start", "add_early_start_to_cuda"]

_IMPORT = "import triton.language as tl\n"
_FUNCTIONS = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
# A kernel of CUDA C++ from its first word to the brace that opens its body.
_CUDA_ENTRY = re.compile(r'^extern "C" __global__ [^{;]*\{\n', re.MULTILINE)
_INSTRUCTIONS = "".join(
    f'  asm volatile("griddepcontrol.{name};" ::: "memory");\n'
    for name in ("launch_dependents", "wait")
)
_CALLS = "    gdc_launch_dependents()\n    gdc_wait()\n"


def add_early_start(text: str, symbol: str, sm: int) -> str:
    """The Triton text of a kernel with both calls ahead of its body; as it is for an older `sm`, and
    with a Triton that lacks them.
    """
    entry = re.search(rf"^def {re.escape(symbol)}\([^)]*\):\n", text, re.MULTILINE)
    if sm < MIN_SM or entry is None or not _triton_has_calls():
        return text
    extended = text[: entry.end()] + _CALLS + text[entry.end() :]
    return extended.replace(_IMPORT, _IMPORT + _FUNCTIONS, 1)


def add_early_start_to_cuda(text: str, sm: int) -> str:
    """CUDA C++ with both instructions ahead of the body of each kernel; as it is for an older `sm`, and
    where the text says itself what comes before it waits.
    """
    if sm < MIN_SM or "griddepcontrol" in text:
        return text
    return _CUDA_ENTRY.sub(lambda entry: entry[0] + _INSTRUCTIONS, text)


def _triton_has_calls() -> bool:
    # Triton is absent on some machines, where importing this package must still work.
    from triton.language.extra import cuda

    return hasattr(cuda, "gdc_wait") and hasattr(cuda, "gdc_launch_dependents")
