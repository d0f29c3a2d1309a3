"""Hooks into PyTorch that accelerate a program without a change to it, for `cudal1 run`.

`torch.compile` gets this package's backend where the program names none, and a module that is
called outside torch.compile is accelerated at its first call. Only modules that the program itself
calls count: what a module calls inside is part of it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.compiler import is_compiling

from torch_cudal1.api.accelerate import accelerate, explain
from torch_cudal1.core.report import Explanation
from torch_cudal1.core.settings import Settings

__all__ = ["AcceleratedModule", "ScriptHooks"]

BACKEND = "cudal1"
# A program that makes new modules for ever would compile for ever.
MAX_MODULES_PER_CLASS = 8
MAX_MODULES = 64
# From PyTorch 2.13 on.
_HAS_DEFAULT_BACKEND = hasattr(torch.compiler, "set_default_backend")


@dataclass
class AcceleratedModule:
    """A module of the program: its class, how often the program called it, and what ran in it when
    it was last looked at. The program may have dropped the module since.
    """

    name: str
    explanation: Explanation
    calls: int = 0
    signatures: int = 0

    @property
    def saved_us(self) -> float:
        """About what was saved a call: the own forward's time less that of what runs, as the quick
        tier or the search measured them; 0 where nothing was measured.
        """
        return sum(
            max(0.0, region.baselines_us.get("eager", 0.0) - region.runs_us)
            for region in self.explanation.regions
            if region.runs_us is not None
        )


class ScriptHooks:
    """What was put between a program and PyTorch, and what came of it: `modules` in the order of
    their first calls, and the number of `torch.compile` calls.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.modules: list[AcceleratedModule] = []
        self.compilations = 0
        # Weak: a model that the program drops must not live on for a report.
        self._by_module: weakref.WeakKeyDictionary[torch.nn.Module, AcceleratedModule] = (
            weakref.WeakKeyDictionary()
        )
        self._classes: Counter[type] = Counter()
        self._thread = threading.local()

    @contextmanager
    def install(self) -> Iterator[None]:
        """Accelerate what runs in the body; afterwards PyTorch is as it was."""
        own_call, own_compile = torch.nn.Module.__call__, torch.compile
        torch.nn.Module.__call__ = self._make_call(own_call)  # type: ignore[method-assign]
        torch.compile = self._make_compile(own_compile)
        try:
            with _set_default_backend():
                yield
        finally:
            torch.nn.Module.__call__ = own_call  # type: ignore[method-assign]
            torch.compile = own_compile

    def _make_call(self, own_call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own_call)
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Dynamo must see nothing of this: to it the first condition is a constant.
            if is_compiling() or getattr(self._thread, "is_inside", False):
                return own_call(module, *args, **kwargs)
            self._thread.is_inside = True
            try:
                accelerated = self._by_module.get(module) or self._accelerate(module)
                result = own_call(module, *args, **kwargs)
                if accelerated is not None:
                    _count_call(accelerated, module)
                return result
            finally:
                self._thread.is_inside = False

        return call

    def _accelerate(self, module: torch.nn.Module) -> AcceleratedModule | None:
        """The program calls this module for the first time; None where it is left as it is."""
        # The program compiles it itself, or it computes with nothing of its own, as a loss does.
        has_owner = module._compiled_call_impl is not None or _is_compiled(module)
        if has_owner or next(module.parameters(), None) is None:
            return None
        kind = type(module)
        if len(self.modules) >= MAX_MODULES or self._classes[kind] >= MAX_MODULES_PER_CLASS:
            return None
        self._classes[kind] += 1
        accelerate(module, settings=self._settings)
        accelerated = AcceleratedModule(kind.__name__, _explain(module))
        self._by_module[module] = accelerated
        self.modules.append(accelerated)
        return accelerated

    def _make_compile(self, own_compile: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own_compile)
        def compile_with_backend(*args: Any, **kwargs: Any) -> Any:
            self.compilations += 1
            if not _HAS_DEFAULT_BACKEND and kwargs.get("backend") is None:
                kwargs["backend"] = BACKEND
            return own_compile(*args, **kwargs)

        return compile_with_backend


@contextmanager
def _set_default_backend() -> Iterator[None]:
    """Let torch.compile take this package's backend where its caller names none, however it was
    imported; nothing where PyTorch has no such setting.
    """
    if not _HAS_DEFAULT_BACKEND:
        yield
        return
    before = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend(BACKEND)
    try:
        yield
    finally:
        torch.compiler.set_default_backend(before)


def _count_call(accelerated: AcceleratedModule, module: torch.nn.Module) -> None:
    """Count a call, and look at what runs where that may have changed: a signature was bound, or a
    trial in the program's own calls has ended.
    """
    accelerated.calls += 1
    signatures = len(getattr(module._compiled_call_impl, "bindings", ()))
    is_power_of_two = accelerated.calls & (accelerated.calls - 1) == 0
    if signatures != accelerated.signatures or is_power_of_two:
        accelerated.signatures = signatures
        accelerated.explanation = _explain(module)


def _is_compiled(module: torch.nn.Module) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def _explain(module: torch.nn.Module) -> Explanation:
    try:
        return explain(module)
    except TypeError:
        # The program restored it, or compiled it itself since.
        return Explanation(target=type(module).__name__, device="")
