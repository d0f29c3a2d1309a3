"""The columns of the table: the ways of running a model. Each takes a module and the arguments of its
call, and returns what is called with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

__all__ = ["BASELINES", "COLUMNS", "OURS", "Column", "describe_runs"]

Prepare: TypeAlias = Callable[
    [nn.Module, tuple[Any, ...], dict[str, Any], Path], Callable[..., Any]
]


@dataclass(frozen=True)
class Column:
    """`prepare(module, args, kwargs, cache_dir)` makes the callable. `ours`: this package's, after a
    search if `tuned`.
    """

    name: str
    prepare: Prepare
    ours: bool = False
    tuned: bool = False


def _compiled(**options: Any) -> Prepare:
    return lambda module, *_: torch.compile(module, **options)


def _accelerate(**options: Any) -> Prepare:
    def prepare(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cache_dir: Path
    ) -> Callable[..., Any]:
        import cudal1

        # The first call prepares, as it does for a user who gives no inputs; a search needs them.
        inputs = (kwargs or args) if "on_miss" in options else None
        return cudal1.accelerate(module, inputs, cache_dir=cache_dir, **options)

    return prepare


def _in_order(prepare: Prepare) -> Prepare:
    """The same, but no kernel of ours begins before the one ahead of it has ended: what that brings
    is the difference.
    """

    def prepare_in_order(*arguments: Any) -> Callable[..., Any]:
        from torch_cudal1.device.cuda import driver

        driver.waits_first = lambda code: False
        return prepare(*arguments)

    return prepare_in_order


def _backend(**options: Any) -> Prepare:
    def prepare(module: nn.Module, _: Any, __: Any, cache_dir: Path) -> Callable[..., Any]:
        settings = {"cache_dir": cache_dir, **options}
        return torch.compile(module, backend="cudal1", options=settings)

    return prepare


_TUNE: Mapping[str, Any] = {"on_miss": "tune", "budget_s": 60}
COLUMNS = {
    column.name: column
    for column in (
        Column("eager", lambda module, *_: module),
        Column("torch.compile", _compiled()),
        Column("reduce-overhead", _compiled(mode="reduce-overhead")),
        Column("max-autotune", _compiled(mode="max-autotune")),
        Column("max-autotune-no-cudagraphs", _compiled(mode="max-autotune-no-cudagraphs")),
        Column("accelerate", _accelerate(), ours=True),
        Column("accelerate-recall", _accelerate(recall=True), ours=True),
        Column("backend", _backend(), ours=True),
        Column("accelerate-tuned", _accelerate(**_TUNE), ours=True, tuned=True),
        Column("accelerate-tuned-in-order", _in_order(_accelerate(**_TUNE)), ours=True, tuned=True),
        Column("backend-tuned", _backend(**_TUNE), ours=True, tuned=True),
    )
}
BASELINES = tuple(name for name, column in COLUMNS.items() if not column.ours)
OURS = tuple(name for name, column in COLUMNS.items() if column.ours)


def describe_runs(call: Any) -> str:
    """What runs in an accelerated module, in a few words; "" for any other callable."""
    import cudal1

    if not isinstance(call, nn.Module):
        return ""
    try:
        explanation = cudal1.explain(call)
    except TypeError:
        return ""
    runs = sorted({region.runs for region in explanation.regions})
    return "; ".join([*runs, *explanation.left_out, *explanation.gate, explanation.undone]).strip(
        "; "
    )
