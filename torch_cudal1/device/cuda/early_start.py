"""Which kernels may be launched before the kernel ahead of them has ended (programmatic dependent
launch, sm_90 and newer): those that wait for it ahead of all that they read and write.

Read off the machine code, whoever wrote it: a launch with the attribute for a kernel that does not
wait would be a race, which a comparison of results may miss. A kernel passes whose instructions
before ACQBULK (`griddepcontrol.wait`) compute in registers, read parameters or prefetch, take no
branch and hold no other wait; so every thread of it waits, and its own end means that all kernels
ahead have ended too. Any other kernel is launched in the ordinary way, in which both instructions
of `griddepcontrol` do nothing.

Source of the table: nvdisasm on kernels of every template for sm_90, sm_100 and sm_120, whose lower
nine bits of the opcode name the instruction, as in `judge.checks.static.cubin_scan`.
"""

from __future__ import annotations

import struct

__all__ = ["MIN_SM", "waits_first"]

# The first architecture that has the instructions.
MIN_SM = 90
_INSTRUCTION_BYTES = 16
_NAME_BITS = 0x1FF
_WAIT = 0x2E  # ACQBULK
# A predicate in bits 12 to 15: 7 is always true, 15 never.
_PREDICATE_SHIFT, _PREDICATE_BITS, _ALWAYS = 12, 0xF, 7
# fmt: off
_REGISTERS_ONLY = frozenset({
    0x02, 0x03, 0x07, 0x08, 0x0B, 0x0C,  # MOV P2R SEL FSEL FSETP ISETP
    0x10, 0x11, 0x12, 0x13, 0x16, 0x19, 0x1A, 0x1C,  # IADD3 LEA LOP3 IABS PRMT SHF SGXT PLOP3
    0x20, 0x21, 0x23, 0x24, 0x25, 0x27,  # FMUL FADD FFMA IMAD (three forms)
    0x2D, 0x2F, 0x31, 0x35, 0x36, 0x3E,  # PREEXIT ELECT HFMA2 IADD VIADD F2FP
    0x46, 0x48, 0x4C,  # VIADDMNMX VIMNMX UVIRTCOUNT
    0x82, 0x87, 0x8C, 0x90, 0x91, 0x92, 0x97, 0x99, 0x9A, 0xA4, 0xA5, 0xBD,  # the same of a warp
    0xB9, 0xCA, 0x182, 0x1AC,  # ULDC R2UR LDC LDCU: parameters and constants
    0x05, 0x119, 0x1C3,  # CS2R S2R S2UR
    0x104, 0x105, 0x106, 0x108, 0x118,  # F2F F2I I2F MUFU NOP
    0x145,  # BSSY: where threads of a warp will meet again
    0x18F,  # CCTL: prefetches
})
# fmt: on


def waits_first(code: bytes) -> bool:
    """Whether a kernel with these instructions waits for the kernel ahead before anything else."""
    for low, _ in struct.iter_unpack(
        "<QQ", code[: len(code) // _INSTRUCTION_BYTES * _INSTRUCTION_BYTES]
    ):
        name = low & _NAME_BITS
        if name == _WAIT:
            # Under a predicate some thread might not wait.
            return bool(low >> _PREDICATE_SHIFT & _PREDICATE_BITS == _ALWAYS)
        if name not in _REGISTERS_ONLY:
            return False
    return False
