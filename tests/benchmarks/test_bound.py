"""A bound module answers through the C++ dispatch table while its guards hold."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bound
from benchmarks.bench_overhead import (
    ThreeOperators,
)
from torch_cudal1.core import native


@pytest.mark.skipif(native.extension() is None, reason="the quick way needs the C++ extension")
@pytest.mark.parametrize("schedule", ["eager", "python"])
def test_a_bound_module_answers_through_the_dispatch_table(schedule):
    module, x = ThreeOperators(8), torch.randn(3, 8)
    with torch.inference_mode():
        plain = module(x)
        bound.bind_module(module, (x,), schedule)
        for _ in range(3):
            assert torch.equal(module(x), plain)
        assert module._compiled_call_impl._table.served == 2  # the first call fills the table
        module.w = torch.nn.Parameter(torch.zeros(8, 8))  # and what is bound no longer holds
        assert not torch.equal(module(x), plain)
