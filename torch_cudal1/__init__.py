"""torch-cudal1: a PyTorch model made faster with one line; never slower, never wrong, always
explainable.

The public names are below; they are imported at first use, so that importing the package costs
nothing and needs no GPU, compiler or optional package. Importing has no side effect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_cudal1.core.gc_pause import pause_gc
from torch_cudal1.core.version import __version__

if TYPE_CHECKING:
    from torch_cudal1.api.accelerate import accelerate, disabled, explain, restore
    from torch_cudal1.api.plan import plan
    from torch_cudal1.api.quantised.quantise import quantise
    from torch_cudal1.api.recording.recorder import record
    from torch_cudal1.api.special import log_bessel_i as log_bessel_i
    from torch_cudal1.api.special import log_bessel_k as log_bessel_k
    from torch_cudal1.api.warmup import warmup
    from torch_cudal1.core.report import Explanation
    from torch_cudal1.core.settings import Settings
    from torch_cudal1.core.telemetry import report

__all__ = [
    "Explanation",
    "Settings",
    "accelerate",
    "disabled",
    "explain",
    "plan",
    "quantise",
    "record",
    "report",
    "restore",
    "warmup",
]

# Every public name and where it is defined. The logarithms of Bessel functions are offered too, but
# are no part of what accelerates a model, so a star import leaves them out.
_HOME = {
    "Explanation": "core.report",
    "Settings": "core.settings",
    "accelerate": "api.accelerate",
    "disabled": "api.accelerate",
    "explain": "api.accelerate",
    "log_bessel_i": "api.special",
    "log_bessel_k": "api.special",
    "plan": "api.plan",
    "quantise": "api.quantised.quantise",
    "record": "api.recording.recorder",
    "report": "core.telemetry",
    "restore": "api.accelerate",
    "warmup": "api.warmup",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return __version__
    if name not in _HOME:
        raise AttributeError(
            f"module 'torch_cudal1' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    # No submodule has a public name of its own: importing it would replace the function of that
    # name here.
    with pause_gc(keeps=True):
        value = getattr(import_module(f"torch_cudal1.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
