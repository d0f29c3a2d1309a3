"""What a KernelBench-style file is: `Model`, `get_inputs`, and `get_init_inputs` with the arguments
of its constructor.

The conventions only: `api.targets` runs a user's own file, and `judge` runs any other in a
sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["NAMES", "constructor_arguments"]

NAMES = ("Model", "get_inputs", "get_init_inputs")


def constructor_arguments(init_inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments out of what `get_init_inputs` returned.

    Older tasks return the positional arguments, newer ones [args, kwargs].
    """
    # A list whose only two items are a list and a dict can be nothing but [args, kwargs].
    if (
        len(init_inputs) == 2
        and isinstance(init_inputs[0], (list, tuple))
        and isinstance(init_inputs[1], dict)
    ):
        return list(init_inputs[0]), dict(init_inputs[1])
    return list(init_inputs), {}
