"""Uses the GPU once, through the CUDA driver alone: a context, memory, a compiled kernel, a launch.

It shows that the sandbox lets a process use the GPU. It does not test the GPU.
"""

from __future__ import annotations

import ctypes
import errno

__all__ = ["use_gpu"]

_BYTES = 4096
# PTX, not a cubin: the driver compiles it for any GPU from sm_70 on, so its compiler is tried too.
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry store(.param .u64 out)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [out];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 42;
    st.global.u32 [%rd2], %r1;
    ret;
}
"""


def use_gpu() -> str:
    """Initialise the driver, allocate, compile, launch, copy back; a description of the success.

    Raises OSError that names the driver's call and its status.
    """
    # Raises OSError where the library is missing, or may not be read.
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, module, kernel, memory = (
        ctypes.c_int(),
        *(ctypes.c_void_p() for _ in range(3)),
        ctypes.c_uint64(),
    )
    result = ctypes.c_uint32()
    arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(memory), ctypes.c_void_p))
    by = ctypes.byref

    def call(name: str, *args: object) -> None:
        status = getattr(cuda, name)(*args)
        if status:
            raise OSError(errno.EIO, f"{name} answered {status}")

    call("cuInit", 0)
    call("cuDeviceGet", by(device), 0)
    call("cuDevicePrimaryCtxRetain", by(context), device)
    call("cuCtxSetCurrent", context)
    # cuda.h maps the plain names to these; the symbols without _v2 take 32-bit sizes.
    call("cuMemAlloc_v2", by(memory), ctypes.c_size_t(_BYTES))
    call("cuModuleLoadData", by(module), _PTX)
    call("cuModuleGetFunction", by(kernel), module, b"store")
    call(
        "cuLaunchKernel", kernel, *(ctypes.c_uint(1),) * 6, ctypes.c_uint(0), None, arguments, None
    )
    call("cuMemcpyDtoH_v2", by(result), memory, ctypes.c_size_t(4))
    if result.value != 42:
        raise OSError(errno.EIO, f"the kernel stored {result.value} instead of 42")
    call("cuMemFree_v2", memory)
    call("cuDevicePrimaryCtxRelease_v2", device)
    return "made a context, allocated, compiled, launched"
