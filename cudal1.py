"""The short import name: `import cudal1` offers what `torch_cudal1` offers, imported at first use.

It holds nothing of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch_cudal1

if TYPE_CHECKING:
    from torch_cudal1 import *  # noqa: F403
    from torch_cudal1 import log_bessel_i as log_bessel_i
    from torch_cudal1 import log_bessel_k as log_bessel_k


def __getattr__(name: str) -> Any:
    return getattr(torch_cudal1, name)


def __dir__() -> list[str]:
    return dir(torch_cudal1)
