"""The C++ dispatch table of bound modules: one entry from the user's arguments to the result.

`DirectCall` says how a graph's callable serves the user's call without AOTAutograd's wrapper around
it. `make_dispatch_table` makes the C++ table that such bindings go into (csrc/fast.cpp). For a call
that the table does not serve it returns `get_miss_sentinel()`, and the caller takes the slow path,
which serves every case. Nothing here binds, checks or decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.autograd import forward_ad

from torch_cudal1.core import native
from torch_cudal1.runtime import kill_switch

__all__ = [
    "Call",
    "DirectCall",
    "DispatchTable",
    "get_miss_sentinel",
    "make_dispatch_table",
    "try_table_first",
]

Call: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class DispatchTable(Protocol):
    """`_native.FastPath`: called with args and kwargs, it returns the module's result or
    `get_miss_sentinel()`.
    """

    served: int

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """The module's result, or `get_miss_sentinel()`."""

    def add(self, *binding: Any) -> bool:
        """Serve such calls from now on, in the present state of the global switches.

        `binding` is (owner, args, kwargs, guard, sources, runner, finish, conditions).
        `conditions` is None, or a check and the module: the check gets {module, args, kwargs} at
        each call.
        """

    def clear(self) -> None:
        """Forget every binding."""

    def counts(self) -> list[tuple[object, int]]:
        """Owners of what is bound, each with the calls served."""


# Compared by identity: the sources are tensors, whose == is an elementwise operation.
@dataclass(frozen=True, eq=False)
class DirectCall:
    """A graph that stands for the whole call: it writes to no input, and its outputs are the
    user's, in fresh memory.

    `sources` are the runner's inputs: the number of a tensor among the user's arguments, or a
    tensor of the module. `runner()` is the callable, None while it must not run. `finish` gives the
    outputs their form; None if the module returns the first of them as it is. `conditions` is the
    check that Dynamo makes at each call; None for no check.
    """

    runner: Callable[[], Callable[[Sequence[torch.Tensor]], Any] | None]
    sources: tuple[int | torch.Tensor, ...]
    finish: Callable[[Sequence[torch.Tensor]], Any] | None
    conditions: Callable[[dict[str, Any]], bool] | None = None

    def add_to_table(
        self,
        table: DispatchTable,
        owner: object,
        guard: Any,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Let `table` serve calls of `module` like this one while `guard` and the conditions hold.
        Does nothing if the table already does, or while `runner` may not run.
        """
        runner = self.runner()
        # The table is C++, and calls the C++ guard only.
        if runner is not None and guard.native is not None:
            conditions = None if self.conditions is None else (self.conditions, module)
            table.add(
                owner,
                args,
                dict(kwargs),
                guard.native,
                self.sources,
                runner,
                self.finish,
                conditions,
            )


def make_dispatch_table(*, cuda: bool) -> DispatchTable | None:
    """An empty table, or None without the extension. `cuda`: a binding also needs CUDA's precision
    switches to be as they were.
    """
    extension = native.extension()
    if extension is None:
        return None
    # The dictionaries of the modules, not the values in them: C++ looks the flags up at every call,
    # so a kill switch or a trace that begins later is seen.
    table: DispatchTable = extension.FastPath(
        cuda, vars(kill_switch), vars(forward_ad), vars(torch.compiler)
    )
    return table


def get_miss_sentinel() -> object:
    """The object that a table returns for a call that it does not serve."""
    extension = native.extension()
    return None if extension is None else extension.MISS


def try_table_first(table: DispatchTable, slow: Call) -> Call:
    """A callable that tries the C++ `table`, then `slow`."""
    absent = get_miss_sentinel()

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A runner that fails is a miss too: the table forgets the binding, and `slow` runs the call
        # again, reports the failure and contains it.
        result = table(args, kwargs)
        return slow(args, kwargs) if result is absent else result

    return call
