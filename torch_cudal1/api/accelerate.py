"""`accelerate(module)`: the same module, faster; and its undoing, switching off and explaining.

The module keeps its type, keys, hooks, pickle and deepcopy: only the slot that `nn.Module.__call__`
looks at first is used, with a dispatcher that runs the module's own forward whenever anything
differs from what was bound. Tuning and building are `binding`'s.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from torch_cudal1.api.binding import Bound, Unbound, bind, is_known, remember_pieces, weights_of
from torch_cudal1.api.explain import explanation_of
from torch_cudal1.api.pieces import Pieces
from torch_cudal1.api.recording import recorder
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError
from torch_cudal1.core.report import Explanation
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.swap import on_withdrawal
from torch_cudal1.runtime import dispatch, guard
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.kill_switch import disabled, is_disabled
from torch_cudal1.search.tune import Progress, withdrawn

__all__ = ["accelerate", "arguments_of", "disabled", "explain", "is_on_trial", "restore"]

M = TypeVar("M", bound=torch.nn.Module)
_MAX_SIGNATURES = (
    64  # beyond this a caller feeds ever new shapes; remembering more would only cost memory
)
# Modules that are best as they are, with what `explain` says of them. A dispatcher would cost each
# call 3 us for nothing.
_left_alone: weakref.WeakKeyDictionary[torch.nn.Module, Explanation] = weakref.WeakKeyDictionary()
_MAX_REBINDS = 16  # a module that changes for ever is cheaper to run as it is
_MAX_EARLIER = 8  # as many as Dynamo keeps of one frame
_PATIENCE, _LOOK_UP_S = (
    10.0,
    0.5,
)  # a look-up may cost a tenth of what a signature's calls took; what one takes, until it is known
_MODULE_CALL = (
    torch.nn.Module._wrapped_call_impl.__code__
)  # the function that looks at the slot we sit in


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
    that signature is prepared now, in the present train/eval, grad and autocast mode, searching if
    `on_miss="tune"`. A signature that was not prepared runs the module's own forward at once and is
    recorded as a miss; when it comes again, it is looked up in the cache, never searched for.
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
    chosen = settings.but(**options) if settings is not None else Settings.from_env(**options)
    restore(module)
    if not chosen.enabled:
        return module
    recorder.keep(chosen.record)
    dispatcher = Dispatcher(module, chosen)
    if (
        example_inputs is not None
    ):  # before the dispatcher is put in: where this raises, the module stays as it was
        args, kwargs = arguments_of(example_inputs)
        dispatcher.prepare(args, kwargs, progress)
    if not dispatcher.stands_aside():
        module._compiled_call_impl = dispatcher
    return module


def restore(module: M) -> M:
    """Undo `accelerate`: the module is exactly as it was, and keeps every change made to its
    weights meanwhile.
    """
    dispatcher = module._compiled_call_impl
    if isinstance(dispatcher, Dispatcher):
        vars(module).pop("_compiled_call_impl", None)
        if dispatcher.replaced is not None:
            module._compiled_call_impl = dispatcher.replaced
    _left_alone.pop(module, None)
    return module


def explain(module: torch.nn.Module) -> Explanation:
    """What runs in an accelerated module, what was tried, and why the rest was refused. Raises
    TypeError for any other module.
    """
    dispatcher = getattr(module, "_compiled_call_impl", None)
    if (known := _left_alone.get(module)) is not None:
        return known
    if not isinstance(dispatcher, Dispatcher):
        raise TypeError(
            f"{type(module).__name__} is not accelerated; call cudal1.accelerate(module, example_inputs) first"
        )
    return explanation_of(type(module).__name__, dispatcher.device, dispatcher.present())


def is_on_trial(module: torch.nn.Module) -> bool:
    """Whether an accelerated module's calls still decide what runs in it (see `pieces`)."""
    dispatcher = module._compiled_call_impl
    return isinstance(dispatcher, Dispatcher) and dispatcher.on_trial


@dataclass
class _Change:
    """Something is not as it was bound: for how many calls, what the module is now (None: not
    looked at), how often it was re-bound.
    """

    calls: int = 0
    now: ModuleGuard | None = None
    rebound: int = 0


@dataclass
class _Met:
    """A signature without a binding: the calls of it, the seconds that they took, and whether the
    cache knows it (None: not asked).
    """

    calls: int = 0
    seconds: float = 0.0
    known: bool | None = None


class Dispatcher:
    """Stands in `module._compiled_call_impl`. Holds what was bound for each signature; all else
    goes to the module itself.

    Any number of threads may call; one of them binds, the others run the module's own forward
    meanwhile. `replaced` is what stood in the slot before: the result of `module.compile()`, or
    None.
    """

    def __init__(self, module: torch.nn.Module, settings: Settings) -> None:
        self._module, self._settings = module, settings
        self.replaced: Any = module._compiled_call_impl
        self._device_types: tuple[str, ...] = ("cpu",)
        self._met: dict[Any, _Met] = {}
        self._earlier: dict[Any, list[Bound]] = {}  # what served a signature before, and may again
        self._look_up_s = _LOOK_UP_S
        self._changes: dict[Any, _Change] = {}
        self._binding = threading.Lock()
        self.bindings: dict[Any, Bound | Unbound] = {}
        self._table, self._miss = dispatch.entry(cuda=False), dispatch.miss()
        self._tally = recorder.Tally(module)
        on_withdrawal(self.without)
        recorder.watch(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied module is plain. (`nn.Module` leaves this slot out of its state; modules with a
        state of their own may not.)
        """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # pickled as None, for the same reason

    @property
    def device(self) -> str:
        """Device type of the module's parameters."""
        return next((tensor.device.type for tensor in self._module.parameters()), "cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, from what is bound for these arguments or from its own forward."""
        if is_compiling():
            return self._own(args, kwargs)
        caller = _calling_module()
        if (
            caller is not None and caller is not self._module
        ):  # a replica or twin, which was given this module's `__dict__`
            return caller._call_impl(*args, **kwargs)
        if self._table is not None:
            result = self._table(args, kwargs)
            if result is not self._miss:
                return result
        if is_disabled() or guard.tracing_reason():
            return self._own(args, kwargs)
        signature = _signature(args, kwargs)
        if signature is None:
            telemetry.count("not_servable_calls")
            return self._own(args, kwargs)
        key = self._key(signature)
        bound = self.bindings.get(key)
        if recorder.is_on():
            self._tally.note(key, bound, args, kwargs)
        if (serving := self._serving(key, bound, args, kwargs)) is not None:
            result = serving.call(args, kwargs)
            if self._table is not None and serving.direct is not None:
                serving.direct.into(self._table, serving, serving.guard, self._module, args, kwargs)
            return result
        if not isinstance(bound, Unbound) or bound.guard is not None:
            bound = self._decide(key, args, kwargs)
            if isinstance(bound, Bound):
                return bound.call(args, kwargs)
        if bound.missed:
            telemetry.count("misses")
        met = self._met.get(key)
        return self._own(args, kwargs) if met is None else self._own_timed(met, args, kwargs)

    def _serving(
        self, key: Any, bound: Bound | Unbound | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Bound | None:
        """The binding under which this call may run: the latest of its signature, or one that
        served before.
        """
        if isinstance(bound, Bound) and bound.serves(self._module, args, kwargs):
            return bound
        for earlier in self._earlier.get(key, ()):
            if earlier.serves(self._module, args, kwargs):
                return earlier
        return None

    def present(self) -> list[Bound | Unbound]:
        """For each signature what would serve now, or what was decided last if nothing would."""
        found: list[Bound | Unbound] = []
        for key, last in list(self.bindings.items()):
            known = [last, *self._earlier.get(key, ())]
            found.append(
                next(
                    (each for each in known if isinstance(each, Bound) and each.guard.holds()), last
                )
            )
        return found

    def without(self, candidate: str, reason: str) -> None:
        """The candidate of that digest runs no more: what was bound with it goes back to the
        module's own forward.
        """
        for key, bound in list(self.bindings.items()):
            if isinstance(bound, Bound) and _runs(bound, candidate):
                self.bindings[key] = Unbound(
                    reason, tuple(withdrawn(choice, reason) for choice in bound.choices)
                )
        self._earlier = {
            key: [one for one in bounds if not _runs(one, candidate)]
            for key, bounds in self._earlier.items()
        }
        self.begin_counting()

    @property
    def on_trial(self) -> bool:
        """Whether the calls that are made now still decide what runs."""
        found = [bound.pieces for bound in self.bindings.values() if isinstance(bound, Bound)]
        return any(pieces is not None and pieces.settled is None for pieces in found)

    def stands_aside(self) -> bool:
        """Whether the module is best as it is for all that was asked of it: then it is left alone,
        and `explain` says so.
        """
        decided = list(self.bindings.values())
        if (
            not decided
            or recorder.is_on()
            or any(isinstance(one, Bound) or one.missed for one in decided)
        ):
            return False
        _left_alone[self._module] = explanation_of(
            type(self._module).__name__, self.device, decided
        )
        return True

    def begin_counting(self) -> None:
        """Forget the quick ways: each signature comes the slow way once more."""
        with self._tally.lock:
            self.bring_counts()
            if self._table is not None:
                self._table.clear()
            self._tally.begin()

    def bring_counts(self) -> None:
        """Add what the quick way has served to the recording's counters."""
        with self._tally.lock:
            if self._table is not None:
                self._tally.bring(self._table.counts())

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Progress | None
    ) -> None:
        """Bind this signature now, tuning if the settings say so."""
        self._bind(args, kwargs, self._settings, progress)

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (self.replaced or self._module._call_impl)(*args, **kwargs)

    def _own_timed(self, met: _Met, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = time.perf_counter()
        result = self._own(args, kwargs)
        met.seconds += time.perf_counter() - begin
        return result

    def _key(self, signature: Any) -> tuple[Any, ...]:
        return (signature, *map(guard.call_state, self._device_types))

    def _know_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which devices' switches (autocast, TF32, ...) are part of a key. What was bound under
        others is forgotten.
        """
        tensors = [
            *self._module.parameters(),
            *self._module.buffers(),
            *pytree.tree_leaves((args, kwargs)),
        ]
        found = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}
        types = tuple(sorted(found & {"cpu", "cuda"})) or (
            "cpu",
        )  # nothing is bound on other devices
        if types != self._device_types:
            self.begin_counting()
            self._device_types = types
            self._table = dispatch.entry(cuda="cuda" in types)
            self.bindings.clear()
            self._met.clear()
            self._earlier.clear()
            self._changes.clear()

    def _decide(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | Unbound:
        """What to do with a call that no binding serves as it is. Never a search: this is inside a
        user's call.
        """
        if (
            guard.saving_is_watched()
        ):  # a forward that checkpointing runs twice must save the same both times: change nothing
            return Unbound("saved tensors are packed by hooks", missed=True)
        if not self._binding.acquire(blocking=False):
            return Unbound("another thread is binding", missed=True)
        try:
            known = self.bindings.get(key)
            if known is None:
                return self._first_met(key, args, kwargs)
            if isinstance(known, Unbound) and (known.guard is None or known.guard.holds()):
                return known
            return self._changed(key, known, args, kwargs)
        finally:
            self._binding.release()

    def _first_met(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Bound | Unbound:
        """A signature without a binding. A look-up captures the call, which takes longer than many
        calls of it: it is paid for where the cache has heard of the signature and it comes again,
        or where its own calls have taken several times as long.
        """
        met = self._met.get(key)
        if self._settings.on_miss == "error":
            return self._look_up(args, kwargs)
        if met is None:
            if len(self._met) < _MAX_SIGNATURES:
                self._met[key] = _Met(1)
            return Unbound("not seen before", missed=True)
        met.calls += 1
        if met.known is None:
            met.known = is_known(self._module, args, kwargs, self._settings)
        if met.known or met.seconds > _PATIENCE * self._look_up_s:
            begin = time.perf_counter()
            bound = self._look_up(args, kwargs)
            self._look_up_s = time.perf_counter() - begin
            return bound
        return Unbound("the cache does not know it", missed=True)

    def _changed(
        self, key: Any, old: Bound | Unbound, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Bound | Unbound:
        """The module, or something else that the call depends on, is not what `old` was decided
        for.

        A change that lasts is bound; one that does not (`functional_call`, a passing hook) costs a
        few calls of the module's own forward, and an earlier binding serves again as soon as it
        holds.
        """
        change = self._changes.setdefault(key, _Change())
        change.calls += 1
        if change.now is None or not change.now.holds():
            if (
                change.calls & (change.calls - 1) == 0
            ):  # calls 1, 2, 4, 8, ...: walking a large module takes milliseconds
                found = guard.bind(self._module)
                change.now = found if isinstance(found, ModuleGuard) else None
            return Unbound("something changed since it was bound", missed=True)
        why = old.guard.why()
        believed = (
            2 if why else 2 << change.rebound
        )  # calls: what is outside the module may be another thing at each of them
        if change.calls < believed or change.rebound >= _MAX_REBINDS:
            return Unbound("something changed since it was bound", missed=True)
        now, change.now = change.now, None
        telemetry.record("swap", "rebound", why=why or "what Dynamo guards differs")
        change.calls, change.rebound = 0, change.rebound + 1
        if isinstance(old, Bound) and old.weights == weights_of(
            self._module
        ):  # else it would keep replaced weights alive
            self._earlier[key] = [old, *self._earlier.get(key, [])[: _MAX_EARLIER - 1]]
        else:
            self._earlier.pop(key, None)
        bound = self._look_up(args, kwargs)
        if isinstance(bound, Unbound):  # not for good: the module may change again, or back
            bound = self.bindings[key] = replace(bound, guard=now)
        return bound

    def _look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | Unbound:
        """Bind what the cache knows."""
        settings = (
            self._settings.but(on_miss="baseline")
            if self._settings.on_miss == "tune"
            else self._settings
        )
        return self._bind(args, kwargs, settings, None)

    def _bind(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Settings,
        progress: Progress | None,
    ) -> Bound | Unbound:
        self._know_devices(args, kwargs)
        # what is bound may be replaced now, and must not live on in the table
        self.begin_counting()
        key = self._key(_signature(args, kwargs))
        bound = self.bindings[key] = self._try(args, kwargs, settings, progress)
        if isinstance(bound, Bound) and bound.pieces is not None:
            bound.pieces.on_settled = partial(self._settled, key)
        return bound

    def _settled(
        self, key: Any, pieces: Pieces, note: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The trial of a forward in several graphs has ended, in a call of it."""
        choices, bound = tuple(pieces.choices), self.bindings.get(key)
        if not isinstance(bound, Bound) or bound.pieces is not pieces:
            return
        if pieces.settled:
            self.bindings[key] = replace(bound, choices=choices, note=note)
            remember_pieces(self._module, args, kwargs, self._settings)
            return
        self.bindings[key] = Unbound(f"undone: {note}", choices)
        if self._module._compiled_call_impl is self and self.stands_aside():
            self._module._compiled_call_impl = self.replaced
            if self.replaced is None:
                vars(self._module).pop("_compiled_call_impl", None)

    def _try(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Settings,
        progress: Progress | None,
    ) -> Bound | Unbound:
        if _signature(args, kwargs) is None:
            return Unbound(
                "an argument is not a plain tensor: it is sparse, quantised, nested, or a tensor subclass"
            )
        try:
            return bind(self._module, args, kwargs, settings, progress)
        except CacheMissError:
            raise
        except Exception as error:  # noqa: BLE001  the wrapper's door: a user's call must not fail because of us
            telemetry.fallback("bind", error, strictness=settings.strictness)
            return Unbound(f"{type(error).__name__}: {error}")


def _runs(bound: Bound, candidate: str) -> bool:
    return any(choice.candidate.digest == candidate for choice in bound.choices)


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The signature of a call; of one with objects among its arguments the coarser one, under which
    Dynamo's guards decide.
    """
    signature = guard.signature(args, kwargs)
    return signature if signature is not None else guard.opaque_signature(args, kwargs)


def _calling_module() -> torch.nn.Module | None:
    """The module whose call brought us here; None where it was not `nn.Module.__call__` that did."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_code is _MODULE_CALL else None


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `example_inputs`."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}
