"""Lets Dynamo trace through `nn.LSTM`, `nn.GRU` and `nn.RNN` where it compiles for this backend, in
inference.

Dynamo breaks a graph at each of them, because what Inductor makes of their time steps is slow, and
skips a frame that holds little else: a backend never sees such a model, and the caller pays for
Dynamo alone. Here a layer is one step (`ir.ops.recurrent_ops.whole`), so its frame is worth a
graph. `torch._dynamo.config.allow_rnn` is true only while Dynamo traces a frame for
`backend.cudal1`, never for another backend of the same process. Dynamo tells its callbacks not for
whom it compiles, so that is read from its own frame; where it cannot be read, all is as without
this file.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.nn.utils.rnn import PackedSequence

from torch_cudal1.ir.ops.recurrent_ops import served

__all__ = ["install", "left_to_dynamo"]

_TRACER = (
    "torch._dynamo.convert_frame",
    "_compile",
)  # the function whose locals are the backend and what the user's frame holds
_BACKEND, _HELD = "compiler_fn", "locals"
_backend: Callable[..., Any] | None = None
_opened = False  # whether allow_rnn is true through us; Dynamo compiles under one lock


def install(backend: Callable[..., Any]) -> None:
    """Have Dynamo tell when it compiles for `backend`. Any number of times: `torch._dynamo.reset()`
    forgets it.

    Where Dynamo is not loaded yet, nothing is done: importing it takes seconds, and its first graph
    for us comes here again.
    """
    global _backend
    _backend = backend
    dynamo = sys.modules.get("torch._dynamo.callback")
    if dynamo is not None and _open not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(_open)
        dynamo.callback_handler.register_end_callback(_close)


def left_to_dynamo(graph: fx.Graph, *, enabled: bool) -> bool:
    """Whether recurrent layers are in `graph` only through us and should not be: then the caller
    lets Dynamo start over.

    Ends what was opened for this frame either way, so that nothing that compiles on our behalf is
    traced otherwise than usual.
    """
    ours = _opened
    _close()
    found = served(graph) if ours else []
    return bool(found) and not (enabled and all(found))


def _open(_: Any = None) -> None:
    global _opened
    from torch._dynamo import config

    if torch.is_grad_enabled() or _autocasts() or config.allow_rnn:
        return
    tracer = _tracer(sys._getframe(1))
    if _is_ours(tracer.get(_BACKEND)) and not _holds_packed(dict(tracer.get(_HELD, {}))):
        config.allow_rnn = _opened = True


def _close(_: Any = None) -> None:
    global _opened
    if _opened:
        from torch._dynamo import config

        config.allow_rnn = _opened = False


def _autocasts() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _tracer(frame: types.FrameType | None) -> Mapping[str, Any]:
    """The locals of the innermost of Dynamo's tracing functions among `frame` and those that called
    it; {} if there is none.
    """
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _TRACER:
            return frame.f_locals
        frame = frame.f_back
    return {}


def _is_ours(compiler: Any) -> bool:
    compiler = getattr(compiler, "_torchdynamo_orig_backend", compiler)
    found = getattr(
        compiler, "compiler_fn", compiler
    )  # torch.compile wraps it, together with its options
    return found is not None and found is _backend


def _holds_packed(held: Any, depth: int = 3) -> bool:
    """Whether a packed sequence is among a frame's locals or in their containers: PyTorch before
    2.13 cannot trace what follows.
    """
    if isinstance(held, PackedSequence):
        return True
    parts = (
        held.values() if isinstance(held, dict) else held if isinstance(held, (tuple, list)) else ()
    )
    return depth > 0 and any(_holds_packed(part, depth - 1) for part in parts)
