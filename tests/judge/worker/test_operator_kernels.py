"""A kernel that is registered for an operator of PyTorch shows, and what PyTorch registers late does
not.
"""

from __future__ import annotations

import torch

from torch_cudal1.judge.worker.operator_kernels import digest_operator_kernels


def test_a_kernel_shows_while_it_is_registered() -> None:
    before = digest_operator_kernels()
    assert digest_operator_kernels() == before
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("trace", lambda x: x.diagonal().sum(), "CPU")
        assert digest_operator_kernels() != before
    finally:
        library._destroy()
    assert digest_operator_kernels() == before


def test_rules_of_vmap_and_other_libraries_are_left_out() -> None:
    before = digest_operator_kernels()
    torch.func.vmap(torch.sin)(torch.ones(2, 3))
    library = torch.library.Library("cudal1_test_operators", "DEF")
    try:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x * 1, "CPU")
        assert digest_operator_kernels() == before
    finally:
        library._destroy()
