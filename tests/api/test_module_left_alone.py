"""A module that is best as it is: nothing stands in its way, and `explain` still says why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_cudal1
from torch_cudal1.api import dispatcher as module_file
from torch_cudal1.api.bound import Unbound


@pytest.mark.parametrize(("missed", "left_alone"), [(False, True), (True, False)])
def test_only_a_final_decision_for_eager_leaves_the_module_untouched(
    missed, left_alone, monkeypatch, tmp_path
):
    decided = Unbound("eager is the fastest baseline and nothing beat it", missed=missed)
    monkeypatch.setattr(module_file, "bind", lambda *args, **kwargs: decided)
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    torch_cudal1.accelerate(net, x, cache_dir=tmp_path)
    assert (net._compiled_call_impl is None) == left_alone
    assert torch_cudal1.explain(net).target == "Linear"
    torch_cudal1.restore(net)
    with pytest.raises(TypeError, match="not accelerated"):
        torch_cudal1.explain(net)
