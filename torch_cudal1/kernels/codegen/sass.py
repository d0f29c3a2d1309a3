"""Finds a known error of ptxas in the machine code of a kernel: uniform registers that are read and
that nothing wrote.

ptxas 12.8, which Triton 3.6 and 3.7 bring, takes descriptors of wgmma operands from such registers
in kernels with many of them: in a state-space kernel all steps of k but the first read shared
memory anywhere, another result each time, though its PTX is right and compute-sanitizer sees
nothing (benchmarks/LOG.md, 2026-11-25). ptxas 13.0 makes of the same PTX what it says. A judge may
miss what is random; so such machine code is refused where it is made.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

__all__ = ["disassemble", "find_unwritten_reads"]

# A kernel takes about 0.5 s of a core (benchmarks/LOG.md, 2026-11-25); the limit is for a tool that
# hangs.
_DISASSEMBLY_TIMEOUT_S = 60.0
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_UNIFORM = re.compile(r"(gdesc\[|desc\[)?\bUR(\d+)\b")
# What a subroutine or a table of jumps wrote is not followed.
_CONTROL_TRANSFERS = (
    "CALL",
    "BRX",
    "JMX",
)


def disassemble(cubin: bytes) -> str | None:
    """The machine code as text, by the disassembler that Triton brings; None where there is none,
    or it cannot read the code.
    """
    # Triton is absent on some machines, where importing this package must still work.
    from triton import knobs

    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(cubin)
            tool = knobs.nvidia.nvdisasm.path
            result = subprocess.run(
                [tool, "-c", "-ndf", str(path)],
                capture_output=True,
                text=True,
                timeout=_DISASSEMBLY_TIMEOUT_S,
                check=True,
            )
    # A missing or failing tool is an answer of its own: the caller records that nothing was read.
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return result.stdout


def find_unwritten_reads(sass: str) -> list[str]:
    """Instructions, with their addresses, that read a uniform register which no instruction before
    them writes.

    "Before" is by address. Blocks that ptxas moved in front of the code that leads to them are
    reported too: their kernel is refused without need.
    """
    written: set[int] = set()
    unwritten: list[str] = []
    for address, instruction in _INSTRUCTION.findall(sass):
        # A predicate in front of an instruction is no operand.
        plain = _PREDICATE.sub("", instruction.strip())
        name, _, rest = plain.partition(" ")
        # Behind such an instruction registers may have been written where this walk does not look:
        # to go on would refuse right code.
        if name.startswith(_CONTROL_TRANSFERS):
            break
        writes, reads = _split_registers(name, [operand.strip() for operand in rest.split(",")])
        if reads - written:
            unwritten.append(f"{address}: {plain}")
        written |= writes
    return unwritten


def _split_registers(name: str, operands: list[str]) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction writes, and those that it reads. Wide ones are
    pairs.
    """
    writes: set[int] = set()
    reads: set[int] = set()
    pairs = name.startswith("U") and (".64" in name or ".WIDE" in name)
    for place, operand in enumerate(operands):
        for kind, number in _UNIFORM.findall(operand):
            first = int(number)
            pair = {first, first + 1}
            if place == 0 and re.fullmatch(r"UR\d+", operand):
                writes |= pair if pairs else {first}
            # Descriptors of both operands; the first operand may be in registers instead.
            elif kind == "gdesc[":
                reads |= {first + 2, first + 3} | (set() if re.match(r"R\d", operands[1]) else pair)
            elif kind == "desc[" or (pairs and (".WIDE" not in name or place == len(operands) - 1)):
                reads |= pair
            else:
                reads.add(first)
    return writes, reads
