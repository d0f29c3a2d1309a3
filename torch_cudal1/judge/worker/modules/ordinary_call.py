"""Calls a module as the main program of a script does: below the call there is one frame, which holds
the module and its arguments and nothing of the judge.

A candidate could otherwise walk the stack, read from the names of functions that it is judged or
timed, and reach the worker's objects. Without the C++ extension its frames stay on the stack.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch_cudal1.core import native

__all__ = ["call_as_main"]


def _main(model: Any, args: Any, kwargs: Any) -> Any:
    return model(*args, **kwargs)


_extension = native.extension()
_SCRIPT = FunctionType(
    _main.__code__.replace(co_name="main", co_filename="main.py", co_firstlineno=1),
    {"__name__": "__main__", "__builtins__": builtins},
)
# Bound at import, before any candidate is.
_call_outermost: Callable[..., Any] | None = getattr(_extension, "call_outermost", None)


def call_as_main(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`model(*args, **kwargs)`. The tuple alone must hold arguments that nothing else shall hold."""
    if _call_outermost is None:
        return _SCRIPT(model, args, kwargs)
    return _call_outermost(_SCRIPT, (model, args, kwargs), {})
