"""Check `cubin_scan`: what the machine code of a Program could do beside computing, read off its
bytes; nothing is run.

Exactly the kernels that the plan launches, built for this architecture and within its limits, no
memory that outlives a call, no call out of the kernel, no launch from the device, no clock or
counter, nothing ordered beyond the device. It looks at sections marked executable and decodes only
the instructions of its table, so it does not tell what an address or a loop does. sm_100 cubins
carry a second encoding of the same kernels (`.nv.capmerc`), which is not read. Programmatic
dependent launch (PREEXIT, ACQBULK) is no impurity: both do nothing in an ordinary launch, and only
kernels that wait ahead of all else are launched otherwise (`device.cuda.early_start`).

Source of the table: nvcc 13.0 built known positives (`tests/judge/checks/static/test_cubin_scan.py` builds
them again), nvdisasm named them; for special registers all 256 indices were decoded. sm_80, sm_90,
sm_100 and sm_120 agree: instructions of 128 bits, the opcode in bits 0-11, the index of a special
register in bits 72-79, a fence's scope in bits 76-78, an atomic's in bits 77-80.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.device.cuda.cubin import Cubin, Kernel, check_launch, inspect_cubin
from torch_cudal1.device.specs import GPU_SPECS
from torch_cudal1.ir.program import Call, Launch, Program
from torch_cudal1.ir.records import CheckResult
from torch_cudal1.judge.checks.spec import CheckName

__all__ = ["CUBIN_SCAN", "cubin_scan", "list_impurities"]

_OPCODE = 0xFFF
_READS_SPECIAL = {0x805: "CS2R", 0x919: "S2R", 0x9C3: "S2UR"}
# indices of registers that tell the time or count events; thread, block and lane indices are not
# among them
_SPECIAL = {
    0x01: "SR_CLOCK",
    0x50: "SR_CLOCKLO",
    0x51: "SR_CLOCKHI",
    0x52: "SR_GLOBALTIMERLO",
    0x53: "SR_GLOBALTIMERHI",
    **dict.fromkeys(range(0x64, 0x74), "SR_PM"),
    **dict.fromkeys(range(0x74, 0x84), "SR_SNAP_PM"),
}
_FENCE, _FENCE_SYSTEM = 0x992, 3
_ATOMICS = {
    0x98E: "RED",
    0x9A6: "REDG",
    0x98A: "ATOM",
    0x38B: "ATOM.CAS",
    0x9A8: "ATOMG",
    0x9A3: "ATOMG",
    0x3A9: "ATOMG.CAS",
}
_ATOMIC_SYSTEM = 0xA
_FROM_THE_DEVICE = ("__cudaCDP", "cudaGraphLaunch", "cudaLaunchDevice", "cudaGetParameterBuffer")
_REGISTERS = 65_536  # of a multiprocessor; allocated by warps in units of 256
_REGISTER_UNIT = 256
_RESERVED_SHARED = 1024  # what compilers of CUDA 13 add on sm_90 and later


def cubin_scan(program: Program, sm: int | None = None) -> list[CheckResult]:
    """`sm`: architecture of the device (90 for sm_90); None where there is none, then the code's
    own is believed.
    """
    scanned = 0
    try:
        for nested in _iter_programs(program):
            for payload, launches in _group_launches_by_payload(nested).items():
                if payload not in nested.payloads:
                    raise ProgramError("cubin_scan", f"no payload {payload!r}")
                cubin = inspect_cubin(bytes(nested.payloads[payload].contiguous().cpu().numpy()))
                # Without a device the code's own target sets the limits.
                _scan(cubin, launches, cubin.sm if sm is None else sm)
                scanned += len(cubin.kernels)
    except ProgramError as error:
        return [CheckResult("cubin_scan", False, detail=str(error))]
    return [
        CheckResult(
            "cubin_scan",
            True,
            float(scanned),
            detail=f"{scanned} kernels" if scanned else "not applicable: no machine code",
        )
    ]


def list_impurities(cubin: Cubin) -> Iterator[str]:
    """Each instruction that a pure function has no use for, with its section and offset."""
    for section, code in cubin.code:
        # Instructions have 16 bytes on all targets of the table.
        for position, (low, high) in enumerate(
            struct.iter_unpack("<QQ", code[: len(code) // 16 * 16])
        ):
            impurity = _find_impurity(low, high)
            if impurity:
                yield f"{impurity} at {section}+{position * 16:#x}"


def _find_impurity(low: int, high: int) -> str:
    opcode = low & _OPCODE
    # The index of a special register stands in bits 72 to 79: bits 8 to 15 of the upper half.
    if opcode in _READS_SPECIAL and high >> 8 & 0xFF in _SPECIAL:
        return f"{_READS_SPECIAL[opcode]} reads {_SPECIAL[high >> 8 & 0xFF]}"
    # Memory order beyond the device reaches the host and other GPUs.
    if opcode == _FENCE and high >> 12 & 0x7 == _FENCE_SYSTEM:
        return "MEMBAR of the system's scope"
    if opcode in _ATOMICS and high >> 13 & 0xF == _ATOMIC_SYSTEM:
        return f"{_ATOMICS[opcode]} of the system's scope"
    return ""


def _iter_programs(program: Program) -> Iterator[Program]:
    yield program
    for step in program.steps:
        if isinstance(step, Call):
            yield from _iter_programs(step.program)


def _group_launches_by_payload(program: Program) -> Mapping[str, list[Launch]]:
    launches: dict[str, list[Launch]] = {}
    for step in program.steps:
        if isinstance(step, Launch):
            launches.setdefault(step.payload, []).append(step)
    return launches


def _scan(cubin: Cubin, launches: list[Launch], sm: int) -> None:
    # Launching from the device escapes the streams that the clock joins.
    device_calls = [name for name in cubin.functions if name.startswith(_FROM_THE_DEVICE)]
    if device_calls:
        raise ProgramError("cubin_scan", f"holds {device_calls[0]}; a kernel may not launch")
    kernels = [check_launch(cubin, launch, sm) for launch in launches]
    # Code that no launch of the plan uses has nothing to do in the payload.
    unlaunched = {kernel.symbol for kernel in cubin.kernels} - {
        launch.symbol for launch in launches
    }
    if unlaunched:
        raise ProgramError(
            "cubin_scan", f"holds the kernel {min(unlaunched)!r}, which the plan never launches"
        )
    # A rest of fewer than 16 bytes would not be decoded, and so not be seen.
    odd = [name for name, code in cubin.code if len(code) % 16]
    if odd:
        raise ProgramError("cubin_scan", f"{odd[0]} is not made of 16-byte instructions")
    for impurity in list_impurities(cubin):
        raise ProgramError(
            "cubin_scan", f"{impurity}; expected neither clocks nor anything outside the grid"
        )
    for kernel, launch in zip(kernels, launches, strict=True):
        _check_limits(cubin, kernel, launch, sm)


def _check_limits(cubin: Cubin, kernel: Kernel, launch: Launch, sm: int) -> None:
    spec = GPU_SPECS.get(sm)
    # Compilers of CUDA 13 add a reserved kilobyte to what the kernel declares.
    static = max(0, cubin.static_shared.get(kernel.symbol, 0) - _RESERVED_SHARED)
    if spec is not None and launch.shared_bytes + static > spec.block_shared_bytes:
        problem = f"{launch.shared_bytes} bytes of dynamic and {static} of static shared memory, at most {spec.block_shared_bytes} on sm_{sm}"
        raise ProgramError("launch", f"{kernel.symbol}: {problem}")
    warps = launch.block // 32
    # Registers are allocated to warps in units of 256: a launch above the limit fails.
    needed = warps * -(-32 * kernel.registers // _REGISTER_UNIT) * _REGISTER_UNIT
    if needed > _REGISTERS:
        problem = f"{kernel.registers} registers a thread times {launch.block} threads, at most {_REGISTERS} a block"
        raise ProgramError("launch", f"{kernel.symbol}: {problem}")


CUBIN_SCAN = CheckName(
    name="cubin_scan",
    module=__name__,
    asks=(
        "of a Program's machine code: only the kernels its plan launches, no memory that outlives a "
        "call, no launches of its own"
    ),
)
