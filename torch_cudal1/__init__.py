"""torch-cudal1: a PyTorch model made faster with one line; never slower, never wrong, always explainable.

The public names are below; they are imported at first use, so that importing the package costs nothing and needs no GPU, compiler
or optional package. Importing has no side effect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_cudal1.collector import collector_paused
from torch_cudal1.version import __version__

if TYPE_CHECKING:
    from torch_cudal1.explanation import Explanation
    from torch_cudal1.module import accelerate, disabled, explain, restore
    from torch_cudal1.observe import report
    from torch_cudal1.planning import plan
    from torch_cudal1.recording import record
    from torch_cudal1.settings import Settings
    from torch_cudal1.special import log_bessel_i, log_bessel_k
    from torch_cudal1.warm_up import warmup

__all__ = [
    "Explanation",
    "Settings",
    "accelerate",
    "disabled",
    "explain",
    "log_bessel_i",
    "log_bessel_k",
    "plan",
    "record",
    "report",
    "restore",
    "warmup",
]

_HOME = {
    "Explanation": "explanation",
    "Settings": "settings",
    "accelerate": "module",
    "disabled": "module",
    "explain": "module",
    "log_bessel_i": "special",
    "log_bessel_k": "special",
    "plan": "planning",
    "record": "recording",
    "report": "observe",
    "restore": "module",
    "warmup": "warm_up",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return __version__
    if name not in _HOME:
        raise AttributeError(f"module 'torch_cudal1' has no attribute {name!r}; it offers {', '.join(__all__)}")
    # No submodule has a public name of its own: importing it would replace the function of that name here.
    with collector_paused(keeps=True):
        value = getattr(import_module(f"torch_cudal1.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
