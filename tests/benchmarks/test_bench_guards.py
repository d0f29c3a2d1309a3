"""Both checks of a module hold while it is unchanged, and see that a parameter was replaced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.bench_guards import make_checks
from torch_cudal1.core.refusal import Refusal


class Scale(nn.Module):
    """Takes its input by name, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * self.weight)


def test_both_checks_hold_until_something_changes() -> None:
    module = Scale().eval()
    inputs = {"x": torch.ones(4)}
    with torch.no_grad():
        dynamo_check, package_check, guard_count, remaining = make_checks(module, inputs)
        assert dynamo_check()
        assert package_check()
        assert 0 <= remaining < guard_count
        module.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        assert not (dynamo_check() and package_check())


def test_a_module_that_cannot_be_recorded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal("it has a __getattr__ of its own")
    monkeypatch.setattr("benchmarks.bench_guards.record_module", lambda module: refusal)
    with pytest.raises(ValueError, match="__getattr__"):
        make_checks(Scale(), {"x": torch.ones(4)})
