"""Six small kernels that copy or fill device memory, for the C++ parts that put them into CUDA
graphs (csrc/captured.cpp).

They are PTX, which the driver translates when it loads it, so they need no compiler and no build
for a GPU. Where a driver refuses them, its own copies and fills stay in use.

A driver launches a line of kernel nodes in a few microseconds and starts anew at every fill between
them: 61 fills cost a BERT-base 70 us a call (benchmarks/LOG.md, 2026-11-22).
"""

from __future__ import annotations

import ctypes
import functools

from torch_cudal1.core.errors import DriverError
from torch_cudal1.device.cuda.driver import Driver, open_driver

__all__ = ["WIDTHS", "load_copy_kernels", "ptx"]

# Bytes that one thread moves. 16 is the widest access of sm_80; the others serve addresses and
# sizes that are no multiple of it.
WIDTHS = (16, 4, 1)
# PTX ISA 7.0 is the first that knows sm_80, so every driver that serves a newer GPU reads it.
_HEAD = ".version 7.0\n.target sm_80\n.address_size 64\n"
# (to, from or the value, count of words): thread i of the grid moves word i.
_KERNEL = """
.visible .entry {name}(.param .u64 to, .param .u64 what, .param .u64 count)
{{
    .reg .pred %beyond;
    .reg .b32 %block, %size, %thread, %v<4>;
    .reg .b64 %i, %n, %offset, %to, %what;
    ld.param.u64 %to, [to];
    ld.param.u64 %what, [what];
    ld.param.u64 %n, [count];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    cvt.u64.u32 %i, %thread;
    mad.wide.u32 %i, %block, %size, %i;
    setp.ge.u64 %beyond, %i, %n;
    @%beyond bra done;
    mul.lo.u64 %offset, %i, {width};
    add.u64 %to, %to, %offset;
{work}
done:
    ret;
}}
"""
_WORDS = {16: ("v4.b32", "{%v0, %v1, %v2, %v3}"), 4: ("b32", "%v0"), 1: ("b8", "%v0")}


def ptx() -> str:
    """The kernels as PTX: cudal1_copy16, cudal1_copy4, cudal1_copy1, and the same with fill."""
    parts = [_HEAD]
    for width, (kind, words) in _WORDS.items():
        store = f"    st.global.{kind} [%to], {words};"
        load = f"    add.u64 %what, %what, %offset;\n    ld.global.{kind} {words}, [%what];"
        # A fill has its 32-bit value in the place of the source address: four copies make 16 bytes.
        spread = "    cvt.u32.u64 %v0, %what;\n" + "\n".join(
            f"    mov.b32 %v{i}, %v0;" for i in (1, 2, 3)
        )
        parts.append(
            _KERNEL.format(name=f"cudal1_copy{width}", width=width, work=f"{load}\n{store}")
        )
        parts.append(
            _KERNEL.format(name=f"cudal1_fill{width}", width=width, work=f"{spread}\n{store}")
        )
    return "".join(parts)


def load_copy_kernels(index: int) -> tuple[int, ...]:
    """The functions on device `index`, the copies and then the fills, each by WIDTHS; zeros where
    the driver refuses them.

    Loads them, once in a process, so it must not be called while a CUDA graph is captured.
    """
    return _load(open_driver(), index)


@functools.cache
def _load(driver: Driver, index: int) -> tuple[int, ...]:
    names = [f"cudal1_{operation}{width}" for operation in ("copy", "fill") for width in WIDTHS]
    module, functions = ctypes.c_void_p(), []
    try:
        with driver.make_current(driver.retain_context(index)):
            driver.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx().encode()))
            for name in names:
                function = ctypes.c_void_p()
                driver.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
                # With lazy loading the first launch would load the function; that may be inside a
                # capture.
                if hasattr(driver.library, "cuFuncLoad"):
                    driver.call("cuFuncLoad", function)
                functions.append(function.value or 0)
    except DriverError:
        # An older GPU, or a driver without its translator: not an error, only slower.
        return (0,) * len(names)
    return tuple(functions)
