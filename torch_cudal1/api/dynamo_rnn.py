"""Lets Dynamo trace through `nn.LSTM`, `nn.GRU` and `nn.RNN` where it compiles for this backend, in
inference.

Dynamo breaks a graph at each of them, because what Inductor makes of their time steps is slow, and
skips a frame that holds little else: a backend never sees such a model, and the caller pays for
Dynamo alone. Here a layer is one step (`ir.ops.recurrent_ops.OneStepRecurrence`), so its frame is worth a
graph. `torch._dynamo.config.allow_rnn` is true only while Dynamo traces a frame for
`backend.cudal1`, never for another backend of the same process. Dynamo's callbacks do not get the
backend's name, so it is read from the locals of Dynamo's own frame. Where that fails, Dynamo behaves
as it does without this file.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.nn.utils.rnn import PackedSequence

from torch_cudal1.ir.ops.recurrent_ops import find_one_step_layers

__all__ = ["install", "must_restart_frame"]

# The function of Dynamo whose locals hold the backend and the locals of the user's frame.
_TRACER = (
    "torch._dynamo.convert_frame",
    "_compile",
)
_BACKEND, _FRAME_LOCALS = "compiler_fn", "locals"
_backend: Callable[..., Any] | None = None
# Whether this file set `allow_rnn` to true. A global is enough: Dynamo compiles under one lock.
_allowed_here = False


def install(backend: Callable[..., Any]) -> None:
    """Register callbacks with Dynamo that allow recurrent layers while it compiles for `backend`.

    May be called any number of times, and must be: `torch._dynamo.reset()` drops callbacks. Does
    nothing where Dynamo is not loaded.
    """
    global _backend
    _backend = backend
    # Importing Dynamo takes seconds. Its first graph for this backend calls `install` again.
    dynamo = sys.modules.get("torch._dynamo.callback")
    if dynamo is not None and _allow_rnn not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(_allow_rnn)
        dynamo.callback_handler.register_end_callback(_disallow_rnn)


def must_restart_frame(graph: fx.Graph, *, enabled: bool) -> bool:
    """Whether recurrent layers are in `graph` only through us and should not be: then the caller
    lets Dynamo start over.

    Ends what was opened for this frame either way, so that nothing that compiles on our behalf is
    traced otherwise than usual.
    """
    # What compiles inside the backend on behalf of this frame must be traced as usual.
    allowed_here = _allowed_here
    _disallow_rnn()
    layers = find_one_step_layers(graph) if allowed_here else []
    # A layer that is not one step would go to Inductor as its time steps, unrolled, which is slow.
    # Dynamo breaks the graph there for that reason.
    return bool(layers) and not (enabled and all(layers))


def _allow_rnn(_: Any = None) -> None:
    global _allowed_here
    from torch._dynamo import config

    if torch.is_grad_enabled() or _is_autocast_enabled() or config.allow_rnn:
        return
    tracer = _find_tracer_locals(sys._getframe(1))
    # Another backend of the process must get the graphs that it gets without this package.
    if _is_this_backend(tracer.get(_BACKEND)) and not _holds_packed(
        dict(tracer.get(_FRAME_LOCALS, {}))
    ):
        config.allow_rnn = _allowed_here = True


def _disallow_rnn(_: Any = None) -> None:
    global _allowed_here
    if _allowed_here:
        from torch._dynamo import config

        config.allow_rnn = _allowed_here = False


def _is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _find_tracer_locals(frame: types.FrameType | None) -> Mapping[str, Any]:
    """The locals of the innermost of Dynamo's tracing functions among `frame` and those that called
    it; {} if there is none.
    """
    # Innermost first: a backend that compiles another frame is itself called inside a compilation.
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _TRACER:
            return frame.f_locals
        frame = frame.f_back
    return {}


def _is_this_backend(compiler: Any) -> bool:
    # Dynamo wraps a backend in `WrapBackendDebug`, which keeps the original under this name.
    compiler = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    # torch.compile wraps a backend together with its options, and keeps it under this name.
    function = getattr(compiler, "compiler_fn", compiler)
    return function is not None and function is _backend


def _holds_packed(value: Any, depth: int = 3) -> bool:
    """Whether a packed sequence is among a frame's locals or in their containers: PyTorch before
    2.13 cannot trace what follows.
    """
    if isinstance(value, PackedSequence):
        return True
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (tuple, list))
        else ()
    )
    return depth > 0 and any(_holds_packed(part, depth - 1) for part in parts)
