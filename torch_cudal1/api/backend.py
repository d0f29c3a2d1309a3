"""`torch.compile(model, backend="cudal1")`: Dynamo's graphs in, the best known callable out.

Where nothing beats Inductor, Inductor compiles the user's graph exactly as `torch.compile` would,
with its own caches. Where an entry wins, the graph is captured with AOTAutograd and each ATen graph
gets its choice. Any failure of this package ends in plain Inductor, and where that cannot compile
(a machine without a compiler), in eager: a reason is recorded and logged either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import torch.fx as fx

from torch_cudal1.api import dynamo_rnn
from torch_cudal1.api.inductor import compile_with_inductor, run_graph
from torch_cudal1.core import telemetry
from torch_cudal1.core.errors import CacheMissError, SettingError
from torch_cudal1.core.inductor_start import hash_keys_ahead
from torch_cudal1.core.settings import Settings

__all__ = ["cudal1", "report_choices_to", "run_graph"]
# A context variable, because Dynamo calls a backend with the graph and its inputs only, and because
# two threads may bind two modules at the same time.
_ON_CHOICES: ContextVar[Callable[[Sequence[Any]], None] | None] = ContextVar(
    "cudal1_choices_told", default=None
)


def cudal1(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend. `options` may mix settings of this package and Inductor's; `mode` is
    Inductor's.

    Raises SettingError for an option neither knows, and CacheMissError under on_miss="error".
    """
    # torch.compile imports this file by its entry point inside `torch.compile(...)`, so the imports
    # at its top stay light.
    from torch_cudal1.api.recording import recorder
    from torch_cudal1.graph.dynamo_session import guard_environment

    # Dynamo forgets the name of an environment variable that a forward asked for and did not find.
    guard_environment()
    # `torch._dynamo.reset()` drops all callbacks, so they are registered again with every graph.
    dynamo_rnn.install(cudal1)
    settings, inductor_options = _split_options(options or {}, mode)
    if dynamo_rnn.must_restart_frame(gm.graph, enabled=settings.enabled):
        # This is the only restart that Dynamo lets a backend raise.
        from torch._dynamo.exc import TensorifyScalarRestartAnalysis

        raise TensorifyScalarRestartAnalysis(
            restart_reason="a recurrent layer that is no single step"
        )
    if not settings.enabled:
        telemetry.record("capture", "switched_off")
        return _compile(gm, example_inputs, inductor_options)
    # The recording must run before the graph is compiled: only graphs compiled while it runs are
    # counted.
    recorder.keep_recording(settings.record)
    hash_keys_ahead()
    call = _find_best(gm, example_inputs, settings, inductor_options)
    return recorder.count_graph(call, gm, example_inputs) if recorder.is_on() else call


@contextmanager
def report_choices_to(on_choices: Callable[[Sequence[Any]], None]) -> Iterator[None]:
    """Have the backend report the choices (`search.tune.Choice`) of each graph that it decides
    meanwhile, and compile backwards that may be repeated as eager's may, which torch.compile does
    not promise.
    """
    token = _ON_CHOICES.set(on_choices)
    try:
        yield
    finally:
        _ON_CHOICES.reset(token)


def _find_best(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    inductor_options: dict[str, Any],
) -> Callable[..., Any]:
    """The best known callable; plain Inductor where anything of this package fails, and eager where
    that fails too.
    """
    # The order is the promise of the package: its own decision, else exactly what torch.compile
    # would have run, else eager.
    attempts: tuple[tuple[str, Callable[[], Callable[..., Any] | None]], ...] = (
        ("backend", lambda: _decide(gm, example_inputs, settings, inductor_options)),
        ("inductor", lambda: _compile(gm, example_inputs, inductor_options)),
    )
    for stage, attempt in attempts:
        try:
            if (call := attempt()) is not None:
                return call
        # The user asked for this error with on_miss="error"; a fallback would hide the miss.
        except CacheMissError:
            raise
        # An exception here would reach the user as Dynamo's `BackendCompilerFailed`. Whatever fails
        # inside, the user gets the next callable, and the reason is recorded.
        except Exception as error:
            # Dynamo restarts its analysis by raising through the backend. Taken for a failure, the
            # restart would be lost.
            if _is_control_flow(error):
                raise
            telemetry.fallback(stage, error, strictness=settings.strictness)
    return gm.forward


def _decide(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    inductor_options: dict[str, Any],
) -> Callable[..., Any] | None:
    # Dynamo imports the backend by its entry point, for every process with a backend of that name:
    # the graph's modules are loaded with the first graph.
    from torch_cudal1.api.graphs.graph_decision import decide_graph

    return decide_graph(gm, example_inputs, settings, inductor_options, _ON_CHOICES.get())


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], inductor_options: dict[str, Any]
) -> Callable[..., Any]:
    return compile_with_inductor(
        gm, example_inputs, inductor_options, repeatable_backward=_ON_CHOICES.get() is not None
    )


def _is_control_flow(error: Exception) -> bool:
    """Whether this is Dynamo talking to itself, such as "start over with this number as a
    tensor".
    """
    # These exceptions' module loads Triton, so it is imported only where something was raised.
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        TorchDynamoException,
    )

    return isinstance(error, TorchDynamoException) and not isinstance(error, BackendCompilerFailed)


def _split_options(options: Mapping[str, Any], mode: str | None) -> tuple[Settings, dict[str, Any]]:
    """This package's settings, and Inductor's patches. Raises SettingError for a name that neither
    has.
    """
    import torch._inductor
    import torch._inductor.config as inductor_config

    own_names = {field.name for field in fields(Settings)}
    settings = Settings.from_env(
        **{name: value for name, value in options.items() if name in own_names}
    )
    patches: dict[str, Any] = {}
    if mode is not None:
        try:
            # torch.compile turns `mode` into patches for its own backend only; other backends get
            # the name.
            patches.update(torch._inductor.list_mode_options(mode))
        except RuntimeError as error:
            raise SettingError("mode", mode, "a mode of torch.compile") from error
    # torch.compile passes options to a backend unchecked. Without this check a misspelt name would
    # be ignored in silence.
    inductor_names = set(inductor_config.get_config_copy())
    for name, value in options.items():
        if name in own_names:
            continue
        # torch.compile accepts dashes in the names of Inductor's options, so they are accepted
        # here.
        if name.replace("-", "_") not in inductor_names:
            raise SettingError(
                name, value, "a setting of torch_cudal1 or an option of torch._inductor.config"
            )
        patches[name.replace("-", "_")] = value
    return settings, patches


# Dynamo traces its first frame before it calls the backend, so the callbacks must be there when
# Dynamo imports this file by its entry point.
dynamo_rnn.install(cudal1)
