"""Dynamo is entered and left without a trace: its errors are this package's, its warnings stay away,
and its guards know the environment.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import pytest
import torch

from tests.entries import Calls
from torch_cudal1.core.errors import GraphBreakError, NotLowerableError
from torch_cudal1.graph.dynamo import capture_call
from torch_cudal1.graph.dynamo_session import (
    convert_dynamo_errors,
    enter_compilation,
    guard_environment,
    settle_dynamo,
    silence_dynamo,
)

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
LOGGER = logging.getLogger("torch._dynamo")


def test_an_error_that_the_users_code_causes_is_a_graph_break_and_others_are_not() -> None:
    from torch._dynamo.exc import InternalTorchDynamoError, UserError, UserErrorType

    with (
        pytest.raises(GraphBreakError, match="UserError: no such thing: because"),
        convert_dynamo_errors(),
    ):
        raise UserError(UserErrorType.DYNAMIC_CONTROL_FLOW, "no such thing\nExplanation: because")
    with pytest.raises(NotLowerableError, match="a bug") as caught, convert_dynamo_errors():
        raise InternalTorchDynamoError("a bug")
    assert not isinstance(caught.value, GraphBreakError)
    assert isinstance(caught.value.__cause__, InternalTorchDynamoError)


def test_an_error_that_is_not_dynamos_passes() -> None:
    with pytest.raises(KeyError), convert_dynamo_errors():
        raise KeyError("users")


def fail_quietly() -> None:
    with silence_dynamo():
        warnings.warn("graph break", stacklevel=1)
        assert not LOGGER.isEnabledFor(logging.ERROR)
        raise ZeroDivisionError


def test_warnings_and_logs_are_silent_inside_only(recwarn: pytest.WarningsRecorder) -> None:
    before = LOGGER.level
    with pytest.raises(ZeroDivisionError):
        fail_quietly()
    assert LOGGER.level == before
    assert len(recwarn) == 0
    warnings.warn("afterwards", UserWarning, stacklevel=1)
    assert len(recwarn) == 1


def test_a_level_that_the_user_asked_for_stays() -> None:
    before = LOGGER.level
    LOGGER.setLevel(logging.DEBUG)
    try:
        with silence_dynamo():
            assert LOGGER.level == logging.DEBUG
    finally:
        LOGGER.setLevel(before)


def test_a_compilation_has_an_id_inside_and_none_afterwards() -> None:
    from torch._guards import CompileContext

    with enter_compilation():
        assert CompileContext.current_compile_id() is not None
    assert CompileContext.current_compile_id() is None


def test_guards_on_the_environment_are_asked_for_in_a_compilation_only() -> None:
    guard_environment()  # no compilation: nothing to guard, and no error


@torch.no_grad()
def test_a_variable_that_appears_later_fails_the_guards(
    dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(m: Calls, x: torch.Tensor) -> Any:
        return m.linear(x) * (2 if os.environ.get("CUDAL1_TEST_SCALE") else 1)

    monkeypatch.delenv("CUDAL1_TEST_SCALE", raising=False)
    module = Calls(forward)
    check = capture_call(module, (X,), {}).guards()
    call = {"module": module, "args": (X,), "kwargs": {}}
    assert check(call)
    monkeypatch.setenv("CUDAL1_TEST_SCALE", "1")
    assert not check(call)


@torch.no_grad()
@pytest.mark.parametrize("read", [lambda name: os.environ.get(name), lambda name: os.getenv(name)])
def test_the_backend_compiles_anew_for_a_variable_that_appears_and_for_none_of_inductors(
    read: Any, dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        guard_environment()
        compiled.append("once")
        return gm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if read("CUDAL1_TEST_SCALE") else 1)

    monkeypatch.delenv("CUDAL1_TEST_SCALE", raising=False)
    monkeypatch.delenv("_TORCHINDUCTOR_CUDAL1_TEST", raising=False)
    call = torch.compile(forward, backend=backend)
    assert torch.equal(call(X), X)
    monkeypatch.setenv("_TORCHINDUCTOR_CUDAL1_TEST", "1")
    assert torch.equal(call(X), X)
    assert len(compiled) == 1
    monkeypatch.setenv("CUDAL1_TEST_SCALE", "1")
    assert torch.equal(call(X), X * 2)
    assert len(compiled) == 2


def test_settled_dynamo_has_replaced_the_modules_init_for_good() -> None:
    settle_dynamo()
    before = torch.nn.Module.__init__
    settle_dynamo()
    assert torch.nn.Module.__init__ is before
