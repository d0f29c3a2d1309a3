"""A recording and a target put together: which calls of the target's module production made, with
inputs of the recorded forms.

A line of a module belongs to the target's module, or a module inside it, of the same class and
weight shapes. A line of a backend's graph belongs to the target if its arguments are arguments of
the target's forward, by name, number of dimensions and kind of type. Tensors are made by `forms`,
with the target's own inputs as examples. What fits no target is left out.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_cudal1.api.recording.recorder import compute_module_identity
from torch_cudal1.api.targets import LoadedTarget
from torch_cudal1.core import telemetry
from torch_cudal1.core.call_signature import FormError, describe, make_inputs
from torch_cudal1.core.errors import TargetError
from torch_cudal1.device.target import find_device
from torch_cudal1.store.recording_file import CallRecord, Mode, RecordingContents, read_calls

__all__ = ["RecordedCall", "enter_recorded_modes", "list_recorded_calls", "read_recording"]


@dataclass(frozen=True)
class RecordedCall:
    """One call to warm: the module with its inputs (a dict: by name), the modes it was made in, and
    why it cannot be made.
    """

    loaded: LoadedTarget
    mode: Mode
    calls: int
    problem: str = ""


def read_recording(path: Path | str) -> RecordingContents:
    """What is whole in the file; the rest goes to the log and the report. Raises TargetError for
    a file that cannot be read.
    """
    try:
        contents = read_calls(Path(path).expanduser())
    except OSError as error:
        raise TargetError(str(path), f"the recording cannot be read: {error}") from error
    # A torn line is what a killed process leaves; the other lines are still good.
    for problem in contents.problems:
        telemetry.record("record", "line_not_used", reason=problem)
        telemetry.log.warning("cudal1: %s", problem)
    return contents


def list_recorded_calls(
    loaded: LoadedTarget, recording: RecordingContents
) -> tuple[RecordedCall, ...]:
    """Each recorded form of a call of the target's module once, the most frequent first. Raises
    TargetError where there is none.
    """
    calls: dict[tuple[int, str, Mode], RecordedCall] = {}
    for record in recording.seen:
        call = (
            _call_of_module(loaded, record)
            if record.kind == "module"
            else _call_of_graph(loaded, record)
        )
        if call is None:
            continue
        # Several processes record the same form, and a number of production may become the target's
        # own: such lines are one call to warm.
        form = call.problem or json.dumps(describe(call.loaded.inputs), sort_keys=True)
        calls.setdefault((id(call.loaded.module), form, call.mode), call)
    if not calls:
        names = sorted({f"{record.kind} {record.name}" for record in recording.seen})
        summary = f"it has {', '.join(names[:8])}" if names else "it has no whole line"
        kind = type(loaded.module).__qualname__
        raise TargetError(
            loaded.name, f"the recording holds no call of {kind} with such weights ({summary})"
        )
    return tuple(calls.values())


@contextmanager
def enter_recorded_modes(call: RecordedCall) -> Iterator[None]:
    """The modes of the recorded call, but for grad; the module is put back after."""
    module = call.loaded.module
    # Part by part: `train()` sets every submodule alike, and some may have been frozen in eval
    # mode.
    before = {part: part.training for part in module.modules()}
    # Not called without need: a user's `train` may do more than set the flag.
    if module.training != call.mode.training:
        module.train(call.mode.training)
    try:
        with ExitStack() as stack:
            for kind, name in call.mode.autocast:
                stack.enter_context(torch.autocast(kind, dtype=getattr(torch, name)))
            yield
    finally:
        for part, training in before.items():
            part.training = training


def _call_of_module(loaded: LoadedTarget, record: CallRecord) -> RecordedCall | None:
    """The call of a module's line; None if it is of another module."""
    for name, module in loaded.module.named_modules():
        # The name alone is not enough: two layers of one class have other weight shapes.
        if (
            type(module).__qualname__ == record.name
            and compute_module_identity(module) == record.identity
        ):
            # Only the target itself has example inputs; those of a submodule are not known.
            example: Any = (loaded.inputs, {}) if module is loaded.module else ((), {})
            target = replace(loaded, name=_format_label(loaded, name, record), module=module)
            try:
                args, kwargs = make_inputs(json.loads(record.form), _find_device(loaded), example)
                return RecordedCall(
                    replace(target, inputs=_name_arguments(module, args, kwargs)),
                    record.mode,
                    record.calls,
                )
            # The call is listed with its problem, so that a warm-up reports it instead of leaving
            # it out.
            except (FormError, TypeError, ValueError) as error:
                return RecordedCall(
                    target, record.mode, record.calls, f"the recorded form cannot be made: {error}"
                )
    return None


def _call_of_graph(loaded: LoadedTarget, record: CallRecord) -> RecordedCall | None:
    """The call of a graph's line, by the names of the function's arguments; None if those are not
    the target's.
    """
    form = json.loads(record.form).get("d")
    arguments = _name_arguments(loaded.module, loaded.inputs, {})
    if not isinstance(form, dict) or not form or not isinstance(arguments, dict):
        return None
    form = {
        name: part
        for name, part in form.items()
        if not _is_number(loaded.module, name, arguments, part)
    }
    if any(
        name not in arguments or not _could_match(part, arguments[name])
        for name, part in form.items()
    ):
        return None
    # A graph does not know the mode, so the target's own is taken.
    mode = replace(record.mode, training=loaded.module.training)
    target = replace(loaded, name=_format_label(loaded, "", record))
    try:
        recorded_inputs = {
            name: make_inputs(part, _find_device(loaded), arguments[name])
            for name, part in form.items()
        }
    except FormError as error:
        return RecordedCall(
            target, mode, record.calls, f"the recorded form cannot be made: {error}"
        )
    # What the recording left out, such as texts, comes from the target's own inputs.
    inputs: Any = arguments | recorded_inputs
    return RecordedCall(replace(target, inputs=inputs), mode, record.calls)


def _is_number(module: nn.Module, name: str, arguments: dict[str, Any], form: Any) -> bool:
    """Whether a recorded tensor is what Dynamo makes of a number that is an argument: then the
    target's own number is taken.
    """
    parameter = inspect.signature(module.forward).parameters.get(name)
    value = arguments.get(name, parameter.default if parameter is not None else None)
    # Dynamo makes a 0-dim tensor of a float argument that changed.
    return (
        isinstance(value, (int, float))
        and isinstance(form, dict)
        and "t" in form
        and form["t"][1] == []
    )


def _could_match(form: Any, value: Any) -> bool:
    """Whether a recorded form could be of the same argument as an example."""
    if not isinstance(value, torch.Tensor) or not isinstance(form, dict) or "t" not in form:
        return False
    dtype, shape = form["t"][0], form["t"][1]
    # Sizes and precision may differ from the example's: that is what a recording is for.
    return len(shape) == value.dim() and ("float" in dtype) == value.dtype.is_floating_point


def _name_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments by the names of the module's forward; as they are where that takes any number
    of them.
    """
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    kinds = {parameter.kind for parameter in bound.signature.parameters.values()}
    # Such arguments have no names by which a call could be repeated.
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        if kwargs:
            raise FormError(
                "its forward takes any number of arguments, and was called with named ones too"
            )
        return args
    by_name = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            by_name |= by_name.pop(parameter.name, {})
    return by_name


def _format_label(loaded: LoadedTarget, part: str, record: CallRecord) -> str:
    return f"{loaded.name}{':' + part if part else ''} ({_format_shapes(json.loads(record.form))}, {record.calls} calls)"


def _format_shapes(form: Any) -> str:
    """Shapes of the tensors in a form, for people: "32x128, 32"."""
    ((kind, body),) = form.items()
    if kind == "t":
        return "x".join(map(str, body[1])) or "scalar"
    parts = body.values() if kind == "d" else body if kind in ("l", "u") else ()
    return ", ".join(text for part in parts if (text := _format_shapes(part)))


def _find_device(loaded: LoadedTarget) -> torch.device:
    tensors = [*loaded.module.parameters(), *loaded.module.buffers()]
    return find_device(
        [*tensors, *(item for item in loaded.inputs if isinstance(item, torch.Tensor))]
    )
