"""A training step on a GPU runs kernels in forward and backward, and its gradients are eager's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cudal1
from benchmarks.nets import FeedForward
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.store.cache.resolve import resolve
from torch_cudal1.store.context import make_context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def gradients(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad(set_to_none=True)
    module(x).square().mean().backward()
    return [
        parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None
    ]


def test_both_graphs_of_a_step_are_searched_for_kernels_and_gradients_are_eagers(
    tmp_path: Path,
) -> None:
    module, x = FeedForward(1024, 4096, 1).cuda(), torch.randn(4096, 1024, device="cuda")
    expected = gradients(module, x)
    settings = Settings(cache_dir=tmp_path, on_miss="tune", budget_s=20.0, strictness="error")
    served = cudal1.accelerate(module, (x,), settings=settings)
    gradients_served = gradients(served, x)
    for gradient, other in zip(gradients_served, expected, strict=True):
        assert (gradient - other).norm() <= 1e-5 * other.norm()
    place = make_context(x.device, settings)
    for region in capture_regions(cudal1.restore(served), (x,)):
        hit = resolve(region, place.sources, place.target, place.contract).hit
        assert hit is not None
        techniques = [
            *hit.entry.choice.techniques,
            *(str(gradient) for gradient in hit.entry.tried),
        ]
        assert any("gemm" in gradient for gradient in techniques), f"{region.kind}: {techniques}"
