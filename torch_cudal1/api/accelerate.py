"""`accelerate(module)` makes a module faster in place; `restore` undoes it, `explain` reports on it.

The module keeps its type, state_dict keys, hooks, pickle and deepcopy. A dispatcher
(`api.dispatcher`) in one slot of the module runs the module's own forward whenever anything differs
from what was bound. Tuning and building are in `api.binding`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from torch_cudal1.api.dispatcher import LEFT_ALONE, Dispatcher
from torch_cudal1.api.explain import explain_bindings
from torch_cudal1.api.recording import recorder
from torch_cudal1.core.inductor_start import hash_keys_ahead
from torch_cudal1.core.report import Explanation
from torch_cudal1.core.settings import Settings
from torch_cudal1.runtime.kill_switch import disabled
from torch_cudal1.search.tune import Progress

__all__ = ["accelerate", "disabled", "explain", "is_on_trial", "restore", "split_example_inputs"]

M = TypeVar("M", bound=torch.nn.Module)


def accelerate(
    module: M,
    example_inputs: Any = None,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> M:
    """Make `module` faster in place and return it.

    `example_inputs` is a tensor, a tuple of positional arguments or a dict of keyword arguments:
    that signature is prepared now, in the present train/eval, grad and autocast mode: from the
    cache, else by the quick tier (`on_miss="quick"`) or a search (`on_miss="tune"`). A signature
    that was not prepared is never searched for: under "quick" the first one of a module is prepared
    at its first call, as torch.compile would, further ones when they come again; otherwise the
    module's own forward runs, is recorded as a miss, and is looked up in the cache when it comes
    again.
    `options` are fields of `Settings`. Where the module's own forward turns out to be the fastest
    for what was prepared, nothing is put in its way at all: such a module costs what it cost
    before, and notices no other signature. (Not so while calls are recorded: see `cudal1.record`.)

    Raises TypeError for something that is not a module, SettingError for a bad option,
    CacheMissError under on_miss="error".
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"accelerate expects an nn.Module, got {type(module).__name__}; for a function use torch.compile"
        )
    # Settings are parsed before the module is touched: a bad option must leave it as it was.
    chosen = settings.but(**options) if settings is not None else Settings.from_env(**options)
    # A second `accelerate` must bind the module's own forward, not the dispatcher of the first.
    restore(module)
    if not chosen.enabled:
        return module
    hash_keys_ahead()
    recorder.keep_recording(chosen.record)
    dispatcher = Dispatcher(module, chosen)
    # The signature is bound before the dispatcher is installed. Where binding raises, the module
    # stays as it was.
    if example_inputs is not None:
        args, kwargs = split_example_inputs(example_inputs)
        dispatcher.prepare(args, kwargs, progress)
    # `_compiled_call_impl` is the slot that `nn.Module.__call__` reads first (`m.compile()` uses it
    # too). `__getstate__` drops it, so pickle and deepcopy see a plain module. Of nine ways tried
    # to hook a call it is the cheapest (0.2 us), and it keeps type, keys and hooks.
    if not dispatcher.leave_alone_if_best():
        module._compiled_call_impl = dispatcher
    return module


def restore(module: M) -> M:
    """Undo `accelerate`: the module is exactly as it was, and keeps every change made to its
    weights meanwhile.
    """
    dispatcher = module._compiled_call_impl
    if isinstance(dispatcher, Dispatcher):
        # The slot is a class attribute with value None. Deleting the instance's own value, instead
        # of setting it to None, leaves the module's `__dict__` as it was before `accelerate`.
        vars(module).pop("_compiled_call_impl", None)
        # The module was compiled with `module.compile()` before: that callable stood in the slot.
        if dispatcher.replaced is not None:
            module._compiled_call_impl = dispatcher.replaced
    LEFT_ALONE.pop(module, None)
    return module


def explain(module: torch.nn.Module) -> Explanation:
    """What runs in an accelerated module, what was tried, and why the rest was refused. Raises
    TypeError for any other module.
    """
    dispatcher = getattr(module, "_compiled_call_impl", None)
    # A module that is best as it is has no dispatcher that could be asked.
    if (left_alone := LEFT_ALONE.get(module)) is not None:
        return left_alone
    if not isinstance(dispatcher, Dispatcher):
        raise TypeError(
            f"{type(module).__name__} is not accelerated; call cudal1.accelerate(module, example_inputs) first"
        )
    return explain_bindings(type(module).__name__, dispatcher.device, dispatcher.current_bindings())


def is_on_trial(module: torch.nn.Module) -> bool:
    """Whether an accelerated module's calls still decide what runs in it (see `pieces`)."""
    dispatcher = module._compiled_call_impl
    return isinstance(dispatcher, Dispatcher) and dispatcher.on_trial


def split_example_inputs(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `example_inputs`."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}
