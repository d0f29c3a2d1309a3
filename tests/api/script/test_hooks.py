"""Between a program and PyTorch: the modules that the program itself calls are accelerated,
torch.compile gets this package's backend, and afterwards PyTorch is as it was.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_cudal1.api.script import hooks as hooks_module
from torch_cudal1.api.script.hooks import AcceleratedModule, ScriptHooks
from torch_cudal1.core.report import Explanation, RegionReport
from torch_cudal1.core.settings import Settings

X = torch.randn(3, 4)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))


@pytest.fixture
def hooks(tmp_path: Path) -> ScriptHooks:
    return ScriptHooks(Settings(cache_dir=tmp_path, on_miss="baseline"))


def test_what_the_program_calls_is_counted_and_what_a_module_calls_inside_is_not(
    hooks: ScriptHooks, inference: None
) -> None:
    outer, alone, loss = Outer(), nn.Linear(4, 2), nn.MSELoss()
    expected = outer(X)
    with hooks.install():
        for _ in range(3):
            torch.testing.assert_close(outer(X), expected)
        alone(X)
        # It has no parameters, so there is nothing to gain.
        loss(X, X)
    assert [(module.name, module.calls) for module in hooks.modules] == [
        ("Outer", 3),
        ("Linear", 1),
    ]
    assert outer.inner._compiled_call_impl is None


def raise_between(own_compile: object) -> None:
    assert torch.compile is not own_compile
    raise ZeroDivisionError


def test_pytorch_is_as_it_was_afterwards_also_after_an_error(hooks: ScriptHooks) -> None:
    before = nn.Module.__call__, torch.compile
    with pytest.raises(ZeroDivisionError), hooks.install():
        raise_between(before[1])
    assert (nn.Module.__call__, torch.compile) == before


def test_a_module_that_raises_raises_its_own_error_and_later_calls_are_seen(
    hooks: ScriptHooks, inference: None
) -> None:
    outer = Outer()
    with hooks.install():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            outer(torch.randn(3, 5))
        outer(X)
    assert [module.calls for module in hooks.modules] == [1]


def test_a_dropped_module_does_not_live_on_and_stays_in_the_report(
    hooks: ScriptHooks, inference: None
) -> None:
    with hooks.install():
        outer = Outer()
        weight = torch.utils.weak.weakref.ref(outer.inner.weight)
        outer(X)
        del outer
        gc.collect()
        assert weight() is None
    assert [module.name for module in hooks.modules] == ["Outer"]


def test_a_program_that_makes_ever_new_modules_does_not_compile_for_ever(
    hooks: ScriptHooks, inference: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks_module, "MAX_MODULES_PER_CLASS", 2)
    with hooks.install():
        for _ in range(4):
            Outer()(X)
    assert [module.name for module in hooks.modules] == ["Outer", "Outer"]


@pytest.mark.parametrize(
    "has_setting",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not hooks_module._HAS_DEFAULT_BACKEND, reason="PyTorch 2.13 has the setting first"
            ),
        ),
    ],
)
def test_torch_compile_gets_the_backend_unless_the_program_names_one(
    has_setting: bool,
    hooks: ScriptHooks,
    dynamo: None,
    inference: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TORCH_CUDAL1_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hooks_module, "_HAS_DEFAULT_BACKEND", has_setting)
    backends: list[object] = []
    own_compile = torch.compile

    def note_backend(*args: object, backend: object = None, **options: object) -> object:
        backends.append(get_default() if backend is None else backend)
        return own_compile(*args, backend="eager", **options)

    def get_default() -> object:
        return torch.compiler.get_default_backend() if has_setting else "inductor"

    monkeypatch.setattr(torch, "compile", note_backend)
    outer = Outer()
    expected = outer(X)
    default = get_default()
    with hooks.install():
        assert torch.equal(torch.compile(outer)(X), expected)
        torch.compile(Outer(), backend="aot_eager")
        Outer().compile()
        if has_setting:
            # A name that the program took before is served too, but not counted.
            note_backend(Outer())
    assert backends == ["cudal1", "aot_eager", "cudal1", *["cudal1"] * has_setting]
    assert hooks.compilations == 3
    assert get_default() == default
    # What the program compiles itself is left to that.
    assert hooks.modules == []


def test_what_was_saved_is_the_own_forwards_time_less_that_of_what_runs() -> None:
    def region(runs_us: float | None) -> RegionReport:
        return RegionReport(
            name="forward",
            key="k",
            kind="inference",
            granularity="whole",
            runs="inductor",
            origin="baseline",
            techniques=(),
            baselines_us={"eager": 10.0, "inductor": 4.0},
            runs_us=runs_us,
        )

    explanation = Explanation(target="T", device="cpu", regions=(region(4.0), region(None)))
    assert AcceleratedModule("T", explanation).saved_us == 6.0
    assert AcceleratedModule("T", Explanation(target="T", device="cpu")).saved_us == 0.0
