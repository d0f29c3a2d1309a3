"""Which device a command works on, and why there is no GPU if there is none.

It asks torch; it changes nothing and initialises CUDA only if torch says that a device is there.
"""

from __future__ import annotations

import torch

from torch_cudal1.core.errors import SettingError

__all__ = ["choose", "without_cuda"]


def without_cuda() -> str:
    """Empty when a CUDA device can be used, else the reason it cannot."""
    # Asked first: where torch has no CUDA, the state of the driver explains nothing.
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    # `is_available` asks the driver; it makes no context on a GPU.
    if not torch.cuda.is_available():
        return f"torch was built for CUDA {torch.version.cuda} but finds no usable driver or GPU (see nvidia-smi)"
    return ""


def choose(requested: str | None) -> str:
    """ "cpu" or "cuda": what was asked for, or cuda where there is one. Raises SettingError for a
    device this machine lacks.
    """
    why = without_cuda()
    # An explicit wish is never replaced in silence: the numbers would be of another machine.
    if requested == "cuda" and why:
        raise SettingError("device", requested, f"'cpu' on this machine: {why}")
    return requested or ("cpu" if why else "cuda")
