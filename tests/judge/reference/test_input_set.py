"""What an input set computes is computed once, and again when it was forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import Outputs, Result


def make_counted_set() -> tuple[InputSet, Counter[str]]:
    calls: Counter[str] = Counter()

    def eager(inputs: Sequence[torch.Tensor]) -> Result:
        calls["eager"] += 1
        return Result([inputs[0] * 2], [None])

    def exact(inputs: Sequence[torch.Tensor]) -> Outputs | Refusal:
        calls["float64"] += 1
        return [inputs[0].double() * 2]

    return InputSet("s", "normal", [torch.ones(3)], eager, exact), calls


def test_results_are_computed_once_and_again_after_they_were_forgotten() -> None:
    sample, calls = make_counted_set()
    assert not sample.has_exact
    assert sample.computed_exact is None
    for _ in range(2):
        assert sample.expected.outputs[0] is not None
        assert sample.get_exact(0) is not None
    assert calls == {"eager": 1, "float64": 1}
    sample.forget_computed()
    assert not sample.has_exact
    assert sample.get_exact(0) is not None
    assert calls["float64"] == 2


def test_a_shared_set_keeps_its_float64_results() -> None:
    sample, _ = make_counted_set()
    assert sample.get_exact(0) is not None
    sample.is_shared = True
    sample.forget_exact()
    assert sample.has_exact
    sample.is_shared = False
    sample.forget_exact()
    assert not sample.has_exact


def test_a_set_with_equal_values_takes_the_results_over() -> None:
    first, _ = make_counted_set()
    assert first.get_exact(0) is not None
    other, calls = make_counted_set()
    other.copy_expected(first)
    assert other.get_exact(0) is first.get_exact(0)
    assert not calls
