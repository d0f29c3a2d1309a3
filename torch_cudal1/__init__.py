"""torch-cudal1: a PyTorch model made faster with one line; never slower, never wrong, always explainable.

The public names are below; they are imported at first use, so that importing the package costs nothing and needs no GPU, compiler
or optional package. Importing has no side effect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_cudal1.core.collector import collector_paused
from torch_cudal1.core.version import __version__

if TYPE_CHECKING:
    from torch_cudal1.api.module import accelerate, disabled, explain, restore
    from torch_cudal1.api.planning import plan
    from torch_cudal1.api.recording.recording import record
    from torch_cudal1.api.special import log_bessel_i, log_bessel_k
    from torch_cudal1.api.warm_up import warmup
    from torch_cudal1.core.explanation import Explanation
    from torch_cudal1.core.observe import report
    from torch_cudal1.core.settings import Settings

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
    "Explanation": "core.explanation",
    "Settings": "core.settings",
    "accelerate": "api.module",
    "disabled": "api.module",
    "explain": "api.module",
    "log_bessel_i": "api.special",
    "log_bessel_k": "api.special",
    "plan": "api.planning",
    "record": "api.recording.recording",
    "report": "core.observe",
    "restore": "api.module",
    "warmup": "api.warm_up",
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
