"""Machine code that reads uniform registers which nothing wrote: what is found in text, and that
such a kernel is refused.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.codegen import compile as compiling
from torch_cudal1.kernels.codegen.sass import find_unwritten_reads

WRITTEN = """
        /*0060*/                   ULDC.64 UR8, c[0x0][0x208] ;
        /*2e30*/                   UIADD3 UR4, UR8, 0x1a000, URZ ;
        /*2f40*/                   USGXT.U32 UR4, UR4, 0xe ;
        /*2fe0*/                   UMOV UR5, 0xc0000010 ;
        /*3000*/                   UIMAD.WIDE UR10, UR4, 0x20, UR4 ;
        /*3010*/                   UIADD3.64 UR14, UR10, 0x20, URZ ;
        /*3020*/                   UMOV UR6, UR14 ;
        /*3030*/              @!P0 R2UR UR7, R31 ;
        /*3040*/                   LDGSTS.E.64 [R11+0x8800], desc[UR8][R32.64] ;
        /*7300*/                   HGMMA.64x16x16.F32.BF16 R24, R104, gdesc[UR4].tnspB, R24 ;
"""


def test_what_is_written_before_it_is_read_is_in_order() -> None:
    assert find_unwritten_reads(WRITTEN) == []


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        ("UIADD3 UR12, UP0, UR12, 0x20, URZ", "as ptxas 12.8 has it"),
        ("UIADD3.X UR20, UR5, -0x3ffffff0, UR21, UP0, !UPT", "a later operand"),
        ("UIADD3.64 UR20, UR5, 0x20, URZ", "the upper half of a pair: UR6 is not written yet"),
        ("@P1 MOV R7, UR30", "behind a predicate"),
        ("LDG.E R0, desc[UR30][R2.64]", "of a memory operand"),
        (
            "HGMMA.64x16x16.F32.BF16 R24, R104, gdesc[UR8].tnspB, R24",
            "the second pair of a descriptor: UR10 and UR11",
        ),
        (
            "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR2], R24",
            "the first pair, where A lies in shared memory too",
        ),
    ],
)
def test_what_nothing_wrote_is_found(instruction: str, why: str) -> None:
    before = "\n".join(WRITTEN.splitlines()[:5])
    assert find_unwritten_reads(f"{before}\n        /*2fe8*/  {instruction} ;") == [
        f"2fe8: {instruction.removeprefix('@P1 ')}"
    ], why


def test_after_a_subroutine_nothing_is_said() -> None:
    text = "/*0010*/ CALL.REL.NOINC 0x37e0 ;\n/*0020*/ MOV R42, UR10 ;"
    assert find_unwritten_reads(text) == []


def test_a_kernel_with_such_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = SimpleNamespace(
        shared=0, global_scratch_size=0, profile_scratch_size=0, name="kernel", num_warps=4
    )
    compiled = SimpleNamespace(
        metadata=metadata, asm={"ptx": "st.global wgmma.mma_async", "cubin": b"code"}
    )
    monkeypatch.setattr(
        compiling, "disassemble", lambda cubin: "/*2d30*/ UIADD3 UR12, UP0, UR12, 0x20, URZ ;"
    )
    with pytest.raises(NotLowerableError, match="nothing wrote, such as 2d30: UIADD3 UR12"):
        compiling._check_resources(compiled, "kernel", 90)
    monkeypatch.setattr(compiling, "disassemble", lambda cubin: None)
    before = telemetry.report().counters.get("kernels.machine_code_not_read", 0)
    assert compiling._check_resources(compiled, "kernel", 90).warps == 4
    assert telemetry.report().counters["kernels.machine_code_not_read"] == before + 1
