"""The dispatcher of an accelerated module: picks the binding that serves a call, and handles a call
that no binding serves.

It sits in `module._compiled_call_impl`, the slot that `nn.Module.__call__` looks at first. Tuning
and building are in `api.binding`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree

from torch_cudal1.api.binding import bind, collect_weight_identities
from torch_cudal1.api.bound import Bound, Unbound
from torch_cudal1.api.explain import explain_bindings
from torch_cudal1.api.pieces import Pieces
from torch_cudal1.api.recording import recorder
from torch_cudal1.api.signatures.known_calls import is_known, remember_pieces
from torch_cudal1.api.signatures.signature_state import ModuleChange, UnboundSignature
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError
from torch_cudal1.core.report import Explanation
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.swap import on_withdrawal
from torch_cudal1.runtime import dispatch, guard
from torch_cudal1.runtime.guard import ModuleGuard
from torch_cudal1.runtime.kill_switch import is_disabled
from torch_cudal1.search.tune import Progress, fall_back_to_baseline

__all__ = ["LEFT_ALONE", "Dispatcher"]

# A caller with more signatures feeds ever new shapes: remembering them would only cost memory.
MAX_SIGNATURES = 64
# Signatures of a module that the quick tier compiles. A caller with more of them pads, or prepares
# them by `accelerate` with example inputs.
MAX_QUICK_SIGNATURES = 8
# A re-bind captures the module again. A module that changes for ever is cheaper to run as it is.
MAX_REBINDS = 16
# Dynamo keeps as many compilations of one frame (`recompile_limit`).
MAX_EARLIER_BINDINGS = 8
# A look-up may cost a tenth of the time that the signature's calls took so far.
LOOK_UP_COST_FACTOR = 10.0
# The expected duration of the first look-up; later ones are expected to take what the last one
# took.
EXPECTED_LOOK_UP_S = 0.5
# Modules that are best as they are, with what `explain` says of them. A dispatcher would cost each
# call 3 us for nothing.
LEFT_ALONE: weakref.WeakKeyDictionary[torch.nn.Module, Explanation] = weakref.WeakKeyDictionary()
# The code of the function in `nn.Module` that reads the slot; see `_find_calling_module`.
_MODULE_CALL = torch.nn.Module._wrapped_call_impl.__code__


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
        self._unbound: dict[Any, UnboundSignature] = {}
        # What served a signature before may serve it again: a hook may be removed, and
        # `functional_call` ends.
        self._earlier: dict[Any, list[Bound]] = {}
        self._look_up_s = EXPECTED_LOOK_UP_S
        self._changes: dict[Any, ModuleChange] = {}
        # Capturing runs Dynamo and copies the module: two threads must not do it for one module at
        # a time.
        self._binding = threading.Lock()
        self.bindings: dict[Any, Bound | Unbound] = {}
        self._table, self._miss = (
            dispatch.make_dispatch_table(cuda=False),
            dispatch.get_miss_sentinel(),
        )
        self._tally = recorder.Tally(module)
        # A shadow check that finds a kernel wrong must reach what is bound here too. The listener
        # is held weakly, so the dispatcher does not outlive its module for it.
        on_withdrawal(self.withdraw)
        recorder.watch_counts(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copied module is plain.

        `nn.Module.__getstate__` leaves this slot out; a module with its own `__getstate__` may not.
        """

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as None: a pickle with a dispatcher inside could only be loaded where this package
        # is installed.
        return type(None), ()

    @property
    def device(self) -> str:
        """Device type of the module's parameters."""
        return next((tensor.device.type for tensor in self._module.parameters()), "cpu")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, from what is bound for these arguments or from its own forward."""
        # Under an outer torch.compile or export the original operators must be seen, not what
        # replaced them.
        if is_compiling():
            return self._run_forward(args, kwargs)
        caller = _find_calling_module()
        # `DataParallel` gives each replica a copy of this module's `__dict__`, slot included, and
        # other weights. Bindings are of this module's weights.
        if caller is not None and caller is not self._module:
            return caller._call_impl(*args, **kwargs)
        # The table comes before all tests in Python: its C++ comparison makes them itself in 0.04
        # us, where they take microseconds.
        if self._table is not None:
            result = self._table(args, kwargs)
            if result is not self._miss:
                return result
        # A tracer or a transform (make_fx, vmap, jit.trace) would record the swapped call, or get
        # results without the operators inside.
        if is_disabled() or guard.find_tracing():
            return self._run_forward(args, kwargs)
        signature = _describe_call(args, kwargs)
        if signature is None:
            telemetry.count("not_servable_calls")
            return self._run_forward(args, kwargs)
        key = self._make_key(signature)
        bound = self.bindings.get(key)
        if recorder.is_on():
            self._tally.note(key, bound, args, kwargs)
        if (serving := self._find_serving_binding(key, bound, args, kwargs)) is not None:
            result = serving.call(args, kwargs)

            if self._table is not None and serving.direct is not None:
                serving.direct.add_to_table(
                    self._table, serving, serving.guard, self._module, args, kwargs
                )
            return result
        if not isinstance(bound, Unbound) or bound.guard is not None:
            # A binding decided for good is not looked at again; one with a guard was decided for a
            # state of the module that may have passed.
            bound = self._decide(key, args, kwargs)
            if isinstance(bound, Bound):
                return bound.call(args, kwargs)
        if bound.missed:
            telemetry.count("misses")
        record = self._unbound.get(key)
        return (
            self._run_forward(args, kwargs)
            if record is None
            else self._run_forward_timed(record, args, kwargs)
        )

    def _find_serving_binding(
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

    def current_bindings(self) -> list[Bound | Unbound]:
        """For each signature what would serve now, or what was decided last if nothing would."""
        bindings: list[Bound | Unbound] = []
        for key, last in list(self.bindings.items()):
            candidates = [last, *self._earlier.get(key, ())]
            bindings.append(
                next(
                    (each for each in candidates if isinstance(each, Bound) and each.guard.holds()),
                    last,
                )
            )
        return bindings

    def withdraw(self, candidate: str, reason: str) -> None:
        """Unbind every signature that runs the candidate of that digest: the module's own forward
        serves it from now on.
        """
        for key, bound in list(self.bindings.items()):
            # The choices stay in the report with the reason, so that `explain` can say what was
            # withdrawn.
            if isinstance(bound, Bound) and _runs_candidate(bound, candidate):
                self.bindings[key] = Unbound(
                    reason, tuple(fall_back_to_baseline(choice, reason) for choice in bound.choices)
                )
        self._earlier = {
            key: [bound for bound in bounds if not _runs_candidate(bound, candidate)]
            for key, bounds in self._earlier.items()
        }
        # The dispatch table holds the withdrawn callable too, and would go on serving it.
        self.begin_counting()

    @property
    def on_trial(self) -> bool:
        """Whether the calls that are made now still decide what runs."""
        pieces_in_use = [
            bound.pieces for bound in self.bindings.values() if isinstance(bound, Bound)
        ]
        return any(pieces is not None and pieces.settled is None for pieces in pieces_in_use)

    def leave_alone_if_best(self) -> bool:
        """Leave the module alone if its own forward is best for every prepared signature.

        Returns whether it is left alone; `explain` then says so.
        """
        decided = list(self.bindings.values())
        # A module without a dispatcher cannot count its calls, and a missed signature may be found
        # later.
        if (
            not decided
            or recorder.is_on()
            or any(isinstance(bound, Bound) or bound.missed for bound in decided)
        ):
            return False
        LEFT_ALONE[self._module] = explain_bindings(
            type(self._module).__name__, self.device, decided
        )
        return True

    def begin_counting(self) -> None:
        """Clear the dispatch table: each signature passes the Python path once more."""
        # The recording's thread reads the counts while a call may clear the table.
        with self._tally.lock:
            # The table's counts end with it, so they are added to the recording first.
            self.bring_counts()
            if self._table is not None:
                self._table.clear()
            self._tally.begin()

    def bring_counts(self) -> None:
        """Add the calls that the dispatch table served to the recording's counters."""
        with self._tally.lock:
            if self._table is not None:
                self._tally.bring(self._table.counts())

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Progress | None
    ) -> None:
        """Bind this signature now, tuning if the settings say so."""
        self._bind(args, kwargs, self._settings, progress)

    def _run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # What `module.compile()` put into the slot is the user's own forward, so it goes on
        # running.
        return (self.replaced or self._module._call_impl)(*args, **kwargs)

    def _run_forward_timed(
        self, record: UnboundSignature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        begin = time.perf_counter()
        result = self._run_forward(args, kwargs)
        record.seconds += time.perf_counter() - begin
        return result

    def _make_key(self, signature: Any) -> tuple[Any, ...]:
        # The switches are part of the key because the bound call has them inside: autocast is in
        # the graph as casts, TF32 is in the choice of kernels.
        return (signature, *map(guard.call_state, self._device_types))

    def _update_device_types(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which devices' switches (autocast, TF32, ...) are part of a key. What was bound under
        others is forgotten.
        """
        tensors = [
            *self._module.parameters(),
            *self._module.buffers(),
            *pytree.tree_leaves((args, kwargs)),
        ]
        device_types = {
            tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)
        }

        # Nothing is bound on other devices, so only the switches of these two are part of a key.
        types = tuple(sorted(device_types & {"cpu", "cuda"})) or ("cpu",)
        # Old keys have another length: they would never be found, and only keep their bindings
        # alive.
        if types != self._device_types:
            self.begin_counting()
            self._device_types = types
            self._table = dispatch.make_dispatch_table(cuda="cuda" in types)
            self.bindings.clear()
            self._unbound.clear()
            self._earlier.clear()
            self._changes.clear()

    def _decide(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | Unbound:
        """What to do with a call that no binding serves as it is. Never a search: this is inside a
        user's call.
        """
        # Activation checkpointing runs a forward twice and compares what it saves. A binding made
        # between the two runs would change what the second one saves.
        if guard.has_saved_tensor_hooks():
            return Unbound("saved tensors are packed by hooks", missed=True)
        # A look-up captures the module, which takes longer than many calls. Other threads do not
        # wait for it: they run the module's own forward meanwhile.
        if not self._binding.acquire(blocking=False):
            return Unbound("another thread is binding", missed=True)
        try:
            # Read again under the lock: another thread may have bound the signature since.
            bound = self.bindings.get(key)
            if bound is None:
                return self._look_up_when_it_pays(key, args, kwargs)
            if isinstance(bound, Unbound) and (bound.guard is None or bound.guard.holds()):
                return bound
            return self._rebind_after_change(key, bound, args, kwargs)
        finally:
            self._binding.release()

    def _look_up_when_it_pays(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Bound | Unbound:
        """A signature without a binding. A look-up captures the call, which takes longer than many
        calls of it: it is paid for where the cache has heard of the signature and it comes again,
        or where its own calls have taken several times as long.
        """
        first_calls = self._unbound.get(key)
        # The user asked for an error at the first call that is not in the cache.
        if self._settings.on_miss == "error":
            return self._look_up(args, kwargs)
        if self._settings.on_miss == "quick" and self._is_time_for_quick_tier(first_calls):
            return self._look_up(args, kwargs)
        if first_calls is None:
            if len(self._unbound) < MAX_SIGNATURES:
                self._unbound[key] = UnboundSignature(1)
            return Unbound("not seen before", missed=True)
        first_calls.calls += 1
        # Asked once, at the second call: it reads a small file and needs no capture.
        if first_calls.is_known is None:
            first_calls.is_known = is_known(self._module, args, kwargs, self._settings)
        if first_calls.is_known or first_calls.seconds > LOOK_UP_COST_FACTOR * self._look_up_s:
            begin = time.perf_counter()
            bound = self._look_up(args, kwargs)
            self._look_up_s = time.perf_counter() - begin
            return bound
        return Unbound("the cache does not know it", missed=True)

    def _is_time_for_quick_tier(self, first_calls: UnboundSignature | None) -> bool:
        """Whether a signature without a binding is compiled now: the module's first at once, as
        torch.compile does; further ones when they come again, since one that comes once would cost
        a compilation for nothing.
        """
        if first_calls is None:
            return not self.bindings and not self._unbound
        return len(self.bindings) < MAX_QUICK_SIGNATURES

    def _rebind_after_change(
        self, key: Any, previous: Bound | Unbound, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Bound | Unbound:
        """The module, or something else that the call depends on, is not what `previous` was decided
        for.

        A change that lasts is bound; one that does not (`functional_call`, a passing hook) costs a
        few calls of the module's own forward, and an earlier binding serves again as soon as it
        holds.
        """
        change = self._changes.setdefault(key, ModuleChange())
        change.calls += 1
        if change.current is None or not change.current.holds():
            # The module is looked at with calls 1, 2, 4, 8, ... only: walking a large one takes
            # milliseconds.
            if change.calls & (change.calls - 1) == 0:
                current = guard.bind_guard(self._module)
                change.current = current if isinstance(current, ModuleGuard) else None
            return Unbound("something changed since it was bound", missed=True)
        reason = previous.guard.explain_difference()
        # A module that stayed changed for two calls is taken as changed for good. Without a reason
        # from the guard something outside the module differs, which may be another thing at each
        # call, so each re-bind must wait twice as long as the one before.
        needed_calls = 2 if reason else 2 << change.rebound
        if change.calls < needed_calls or change.rebound >= MAX_REBINDS:
            return Unbound("something changed since it was bound", missed=True)
        current_guard, change.current = change.current, None
        telemetry.record("swap", "rebound", why=reason or "what Dynamo guards differs")
        change.calls, change.rebound = 0, change.rebound + 1
        # An earlier binding keeps its weights alive. Kept for a module whose weights were replaced,
        # it would hold a second copy of them in GPU memory.
        if isinstance(previous, Bound) and previous.weights == collect_weight_identities(
            self._module
        ):
            self._earlier[key] = [previous, *self._earlier.get(key, [])[: MAX_EARLIER_BINDINGS - 1]]
        else:
            self._earlier.pop(key, None)
        bound = self._look_up(args, kwargs)
        # With the guard the decision is not for good: the module may change again, or back.
        if isinstance(bound, Unbound):
            bound = self.bindings[key] = replace(bound, guard=current_guard)
        return bound

    def _look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | Unbound:
        """Bind what the cache knows."""
        settings = (
            # A search may take `budget_s` for each region. `accelerate` with example inputs makes
            # it; a user's call must not wait for one.
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
        self._update_device_types(args, kwargs)
        # What is bound now may be replaced here, and must not go on being served from the table.
        self.begin_counting()
        key = self._make_key(_describe_call(args, kwargs))
        bound = self.bindings[key] = self._try_to_bind(args, kwargs, settings, progress)
        if isinstance(bound, Bound) and bound.pieces is not None:
            bound.pieces.on_settled = partial(self._finish_trial_of_pieces, key)
        return bound

    def _finish_trial_of_pieces(
        self, key: Any, pieces: Pieces, note: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The trial of a forward in several graphs has ended, in a call of it."""
        choices, bound = tuple(pieces.choices), self.bindings.get(key)
        # A re-bind may have put something else there during the trial.
        if not isinstance(bound, Bound) or bound.pieces is not pieces:
            return
        if pieces.settled:
            self.bindings[key] = replace(bound, choices=choices, note=note)
            remember_pieces(self._module, args, kwargs, self._settings)
            return
        self.bindings[key] = Unbound(f"undone: {note}", choices)
        # The user may have called `m.compile()` or `accelerate` since, which own the slot then.
        if self._module._compiled_call_impl is self and self.leave_alone_if_best():
            self._module._compiled_call_impl = self.replaced
            if self.replaced is None:
                vars(self._module).pop("_compiled_call_impl", None)

    def _try_to_bind(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: Settings,
        progress: Progress | None,
    ) -> Bound | Unbound:
        if _describe_call(args, kwargs) is None:
            return Unbound(
                "an argument is not a plain tensor: it is sparse, quantised, nested, or a tensor subclass"
            )
        try:
            return bind(self._module, args, kwargs, settings, progress)
        except CacheMissError:
            raise
        # A user's call must not fail because binding it failed: the module's own forward can run.
        except Exception as error:  # noqa: BLE001
            telemetry.fallback("bind", error, strictness=settings.strictness)
            return Unbound(f"{type(error).__name__}: {error}")


def _runs_candidate(bound: Bound, candidate: str) -> bool:
    return any(choice.candidate.digest == candidate for choice in bound.choices)


def _describe_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The signature of a call; of one with objects among its arguments the coarser one, under which
    Dynamo's guards decide.
    """
    signature = guard.signature(args, kwargs)
    return signature if signature is not None else guard.opaque_signature(args, kwargs)


def _find_calling_module() -> torch.nn.Module | None:
    """The module that is being called; None where `nn.Module.__call__` did not call the dispatcher."""
    # `nn.Module.__call__` calls the slot without its `self`. The frame is the only place that knows
    # which module was called.
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_code is _MODULE_CALL else None
