"""Enters Dynamo outside torch.compile: its locks and contexts, its errors, its warnings.

Also what a backend has to add to Dynamo's own guards (`guard_environment`).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch_cudal1.core.errors import GraphBreakError, NotLowerableError
from torch_cudal1.core.settings import INDUCTOR_PREFIX, environment_table

__all__ = [
    "convert_dynamo_errors",
    "enter_compilation",
    "guard_environment",
    "settle_dynamo",
    "silence_dynamo",
]

# Dynamo's name for the module, among the globals, where a function of it is traced
_OS_GLOBAL = "__import_os"
_LOGGERS = ("torch._dynamo", "torch._subclasses", "torch.fx")


@contextmanager
def enter_compilation() -> Iterator[None]:
    """What Dynamo expects around the work on a frame."""
    # What Dynamo itself enters around a frame. The names are private.
    from torch._dynamo.convert_frame import compile_lock, get_compile_id
    from torch._dynamo.utils import get_metrics_context
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr
    from torch._guards import CompileContext, compile_context
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as stack:
        # First: Dynamo's state is one for the process, and a thread of the user's may be compiling.
        stack.enter_context(compile_lock)
        stack.enter_context(silence_dynamo())
        # A TorchDispatchMode of the caller would see the fake tensors of the compilation.
        stack.enter_context(_disable_current_modes())
        # Dynamo simulates the stack of torch function modes, and this puts the real one back.
        stack.enter_context(torch_function_mode_stack_state_mgr)
        # `dynamo_timed` needs an open metrics context.
        stack.enter_context(get_metrics_context())
        stack.enter_context(compile_context(CompileContext(get_compile_id({}))))
        yield


@contextmanager
def silence_dynamo() -> Iterator[None]:
    """Keep Dynamo's warnings from the user's terminal, unless `TORCH_LOGS` asks for more. The
    user did not ask for a compilation, and finds the reason of a refusal in `explain`.
    """
    # Dynamo logs as well as warns.
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                # A lower level was set by `TORCH_LOGS` or by the user, who wants to read it.
                if logger.getEffectiveLevel() >= logging.WARNING:
                    logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


@contextmanager
def convert_dynamo_errors() -> Iterator[None]:
    """Turn Dynamo's errors into this package's: GraphBreakError where the user's code cannot be one
    graph, NotLowerableError for the rest.
    """
    from torch._dynamo.exc import TorchDynamoException, Unsupported, UserError

    try:
        yield
    # These two say that the user's code cannot be one graph; the others that Dynamo failed.
    except (Unsupported, UserError) as error:
        raise GraphBreakError(
            f"Dynamo cannot capture it in one graph: {_summarise(error)}"
        ) from error
    except (TorchDynamoException, AssertionError, RuntimeError, NotImplementedError) as error:
        raise NotLowerableError(
            f"Dynamo cannot capture it in one graph: {_summarise(error)}"
        ) from error


def _summarise(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Dynamo's messages have many paragraphs: the first line and the explanation say what happened.
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    summary = ": ".join(
        [*lines[:1], *([explained.removeprefix("Explanation:").strip()] if explained else [])]
    )
    return f"{type(error).__name__}: {summary}"


def settle_dynamo() -> None:
    """Install Dynamo's `nn.Module.__init__` now, which it would otherwise do at the first
    compilation: a guard record of the class that was taken before would no longer match.
    """
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()


def guard_environment(*, as_keys: bool = False) -> None:
    """Add a guard on the names of the environment variables where the frame reads `os.environ`:
    Dynamo does not guard the absence of a variable. Names that Inductor sets for itself do not
    count.

    A backend calls it while Dynamo compiles. `as_keys`: as Dynamo's own guard on the keys of a dict,
    for a caller that reads the guards instead of having Dynamo check them.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._guards import TracingContext

    # None where the backend is called outside of a compilation.
    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    sources = {guard.originating_source for guard in guards}
    # `os.environ` read directly.
    reads = {source for source in sources if getattr(source, "member", "") == "environ"}
    # `os.getenv` reads it through the module, of which Dynamo names only the global.
    reads |= {
        AttrSource(source, "environ")
        for source in sources
        if getattr(source, "global_name", "") == _OS_GLOBAL
    }
    for source in reads:
        output = InstructionTranslator.current_tx().output
        scope = {"L": output.local_scope, "G": output.global_scope}
        # Some other object may have an attribute of that name.
        if isinstance(source.get_value(scope, {}, {}), os._Environ):
            # `_data` is the dict behind os.environ: its keys are the variables that there are.
            keys = AttrSource(source, "_data").make_guard(GuardBuilder.DICT_KEYS_MATCH)
            guards.add(keys if as_keys else source.make_guard(_guard_variable_names))


def _guard_variable_names(builder: Any, guard: Any) -> None:
    """Guard that the process has the variables that it has now. Dynamo's own guard on the keys of a
    dict would fail at the call after the first: Inductor sets variables while it compiles.
    """
    from torch._dynamo.guards import get_verbose_code_parts

    table = environment_table()
    all_names = frozenset(table)
    names = _without_inductors(all_names)

    def check(_: object) -> bool:
        present = table.keys()
        return present == all_names or _without_inductors(present) == names

    code = get_verbose_code_parts(f"names of environment variables == {len(names)} names", guard)
    builder.get_guard_manager(guard).add_lambda_guard(check, code, guard.user_stack)


def _without_inductors(names: Iterable[bytes]) -> frozenset[bytes]:
    return frozenset(name for name in names if not name.startswith(INDUCTOR_PREFIX))
