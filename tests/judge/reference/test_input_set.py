"""What an input set computes is computed once, and again when it was forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from torch_cudal1.judge.reference.float64 import Infeasible
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Outputs, Result


def counted() -> tuple[InputSet, Counter[str]]:
    calls: Counter[str] = Counter()

    def eager(inputs: Sequence[torch.Tensor]) -> Result:
        calls["eager"] += 1
        return Result([inputs[0] * 2], [None])

    def exact(inputs: Sequence[torch.Tensor]) -> Outputs | Infeasible:
        calls["float64"] += 1
        return [inputs[0].double() * 2]

    return InputSet("s", "normal", [torch.ones(3)], eager, exact), calls


def test_results_are_computed_once_and_again_after_they_were_forgotten() -> None:
    sample, calls = counted()
    assert not sample.has_exact
    assert sample.computed_exact is None
    for _ in range(2):
        assert sample.expected.outputs[0] is not None
        assert sample.exact_at(0) is not None
    assert calls == {"eager": 1, "float64": 1}
    sample.forget_computed()
    assert not sample.has_exact
    assert sample.exact_at(0) is not None
    assert calls["float64"] == 2


def test_a_set_that_others_will_meet_keeps_its_float64_results() -> None:
    sample, _ = counted()
    assert sample.exact_at(0) is not None
    sample.is_shared = True
    sample.forget_exact()
    assert sample.has_exact
    sample.is_shared = False
    sample.forget_exact()
    assert not sample.has_exact


def test_equal_values_elsewhere_in_memory_take_the_results_over() -> None:
    first, _ = counted()
    assert first.exact_at(0) is not None
    other, calls = counted()
    other.copy_expected(first)
    assert other.exact_at(0) is first.exact_at(0)
    assert not calls
