"""`accelerate(module)`: the same module, faster; and its undoing, switching off and explaining.

The module keeps its type, keys, hooks, pickle and deepcopy: only the slot that `nn.Module.__call__` looks at first is used, with a
dispatcher that runs the module's own forward whenever anything differs from what was bound. Tuning and building are `binding`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from torch_cudal1 import guard, observe
from torch_cudal1.binding import Bound, Unbound, bind
from torch_cudal1.errors import CacheMissError
from torch_cudal1.explanation import Explanation
from torch_cudal1.pipeline import Progress
from torch_cudal1.reporting import explanation_of
from torch_cudal1.settings import Settings
from torch_cudal1.switch import disabled, is_disabled

__all__ = ["accelerate", "disabled", "explain", "restore"]

M = TypeVar("M", bound=torch.nn.Module)
_MAX_SIGNATURES = 64  # beyond this a caller feeds ever new shapes; remembering more would only cost memory


def accelerate(
    module: M,
    example_inputs: Any = None,
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> M:
    """Make `module` faster in place and return it.

    `example_inputs` is a tensor, a tuple of positional arguments or a dict of keyword arguments: that signature is prepared now, in
    the present train/eval, grad and autocast mode, searching if `on_miss="tune"`. A signature that was not prepared runs the module's
    own forward at once and is recorded as a miss; when it comes again, it is looked up in the cache, never searched for.
    `options` are fields of `Settings`.

    Raises TypeError for something that is not a module, SettingError for a bad option, CacheMissError under on_miss="error".
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"accelerate expects an nn.Module, got {type(module).__name__}; for a function use torch.compile")
    chosen = settings.but(**options) if settings is not None else Settings.from_env(**options)
    restore(module)
    if not chosen.enabled:
        return module
    dispatcher = Dispatcher(module, chosen)
    module._compiled_call_impl = dispatcher
    if example_inputs is not None:
        args, kwargs = _arguments(example_inputs)
        dispatcher.prepare(args, kwargs, progress)
    return module


def restore(module: M) -> M:
    """Undo `accelerate`: the module is exactly as it was, and keeps every change made to its weights meanwhile."""
    if isinstance(module._compiled_call_impl, Dispatcher):
        module._compiled_call_impl = None
    return module


def explain(module: torch.nn.Module) -> Explanation:
    """What runs in an accelerated module, what was tried, and why the rest was refused. Raises TypeError for any other module."""
    dispatcher = getattr(module, "_compiled_call_impl", None)
    if not isinstance(dispatcher, Dispatcher):
        raise TypeError(f"{type(module).__name__} is not accelerated; call cudal1.accelerate(module, example_inputs) first")
    return explanation_of(type(module).__name__, dispatcher.device, list(dispatcher.bindings.values()))


class Dispatcher:
    """Stands in `module._compiled_call_impl`. Holds what was bound for each signature; all else goes to the module itself."""

    def __init__(self, module: torch.nn.Module, settings: Settings) -> None:
        self._module, self._settings = module, settings
        self._device_type = next((t.device.type for t in module.parameters()), "cpu")
        self._met: set[Any] = set()
        self.bindings: dict[Any, Bound | Unbound] = {}

    @property
    def device(self) -> str:
        """Device type of the module's parameters."""
        return self._device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, from what is bound for these arguments or from its own forward."""
        if is_disabled() or guard.tracing_reason():
            return self._module._call_impl(*args, **kwargs)
        signature = guard.signature(args, kwargs)
        if signature is None:
            observe.count("not_servable_calls")
            return self._module._call_impl(*args, **kwargs)
        key = (signature, guard.call_state(self._device_type))
        bound = self.bindings.get(key)
        if isinstance(bound, Bound) and (bound.guard.holds() or isinstance(bound := self._look_up(key, args, kwargs), Bound)):
            return bound.call(args, kwargs)
        if bound is None and isinstance(bound := self._first_met(key, args, kwargs), Bound):
            return bound.call(args, kwargs)
        if isinstance(bound, Unbound) and bound.missed:
            observe.count("misses")
        return self._module._call_impl(*args, **kwargs)

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], progress: Progress | None) -> None:
        """Bind this signature now, tuning if the settings say so."""
        signature = guard.signature(args, dict(kwargs))
        key = (signature, guard.call_state(self._device_type))
        self.bindings[key] = self._try(args, kwargs, self._settings, progress)

    def _first_met(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | Unbound:
        """A signature without a binding. Met for the first time it gets the baseline at once; met again, it is worth a look-up."""
        if key not in self._met:
            if len(self._met) < _MAX_SIGNATURES:
                self._met.add(key)
            return Unbound("not seen before", missed=True)
        return self._look_up(key, args, kwargs)

    def _look_up(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | Unbound:
        """Bind what the cache knows. Never a search: this is inside a user's call."""
        old = self.bindings.get(key)
        if isinstance(old, Bound):
            observe.record("swap", "rebound", why=old.guard.why())
        settings = self._settings.but(on_miss="baseline") if self._settings.on_miss == "tune" else self._settings
        bound = self.bindings[key] = self._try(args, kwargs, settings, None)
        return bound

    def _try(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: Settings, progress: Progress | None
    ) -> Bound | Unbound:
        if guard.signature(args, dict(kwargs)) is None:
            return Unbound("an argument is neither a plain tensor nor a plain value")
        self._module._compiled_call_impl = None  # while we look at it, the module is only itself
        try:
            return bind(self._module, args, kwargs, settings, progress)
        except CacheMissError:
            raise
        except Exception as error:  # noqa: BLE001  the wrapper's door: a user's call must not fail because of us
            observe.fallback("bind", error, strictness=settings.strictness)
            return Unbound(f"{type(error).__name__}: {error}")
        finally:
            self._module._compiled_call_impl = self


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}
