"""How far results are from those expected: numbers, logits, masks, and results that do not fit."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from torch_cudal1.api.quantised.deviation import measure_deviation


def test_the_error_is_the_largest_of_all_outputs():
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([[1.0]])
    deviation = measure_deviation((x + torch.tensor([0.0, 0.5]), y), (x, y))
    assert deviation.relative_error == pytest.approx(0.1)
    assert (deviation.agreement, deviation.divergence) == (None, None)


def test_equal_results_deviate_by_nothing_whatever_they_hold():
    x = torch.tensor([1.0, float("inf"), -float("inf"), 0.0])
    assert measure_deviation(x, x.clone()).relative_error == 0.0
    assert measure_deviation(torch.zeros(3), torch.zeros(3)).relative_error == 0.0


def test_masks_do_not_hide_a_difference():
    lowest = torch.finfo(torch.float32).min
    expected = torch.tensor([1.0, lowest, -float("inf")])
    actual = torch.tensor([2.0, lowest, -float("inf")])
    assert measure_deviation(actual, expected).relative_error == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_result_that_is_no_number_is_no_small_deviation(wrong):
    deviation = measure_deviation(torch.tensor([1.0, wrong]), torch.tensor([1.0, 2.0]))
    assert not deviation.relative_error <= 1.0


def test_logits_are_compared_as_distributions():
    expected = torch.tensor([[[2.0, 0.0], [0.0, 2.0]]])
    actual = torch.tensor([[[2.0, 0.0], [2.0, 0.0]]])
    for wrap in (lambda t: CausalLMOutput(logits=t), lambda t: {"logits": t}):
        deviation = measure_deviation(wrap(actual), wrap(expected))
        assert deviation.agreement == 0.5
        # Half of the rows, of which the distributions (p, 1 - p) and (1 - p, p) differ by 2 (2 p - 1).
        p = float(torch.sigmoid(torch.tensor(2.0)))
        assert deviation.divergence == pytest.approx((2 * p - 1), rel=1e-6)


def test_one_matrix_is_what_a_classifier_yields_and_a_hidden_state_is_not():
    scores = torch.randn(4, 10)
    assert measure_deviation(scores, scores).agreement == 1.0
    hidden = BaseModelOutput(last_hidden_state=torch.randn(2, 3, 4))
    assert measure_deviation(hidden, hidden).agreement is None
    states = torch.randn(2, 3, 4)
    assert measure_deviation(states, states).agreement is None


def test_results_that_cannot_be_compared_are_an_error():
    with pytest.raises(ValueError, match="differ in form"):
        measure_deviation(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="no floating-point tensor"):
        measure_deviation(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
