"""A convolution of windows side by side on a GPU: the product that takes its place is as exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudal1
from tests.kernels.traced_programs import trace_program
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.search.convolution_choice import choose_convolutions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_patches_of_an_image_are_a_product() -> None:
    device = torch.device("cuda", 0)
    image = torch.randn(1, 3, 224, 224, device=device).half()
    weight = (torch.randn(768, 3, 32, 32, device=device) / 55).half()
    program = trace_program(
        lambda x, w: F.conv2d(x, w, stride=32), (image.to("meta"), weight.to("meta"))
    )
    choice = choose_convolutions(program, device)
    (result,) = prepare(choice.program, device)([image, weight])
    exact = F.conv2d(image.double(), weight.double(), stride=32)
    eager = F.conv2d(image, weight, stride=32)
    assert result is not None
    assert (result - exact).norm() <= 1.1 * (eager - exact).norm()
    # cuDNN takes 300 us for this on an H200.
    if torch.cuda.get_device_capability() == (9, 0):
        assert choice.techniques == ("convolution as product",)


def test_a_model_with_patches_answers_as_eager_does(tmp_path: Path) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.mix = nn.Conv2d(3, 64, 16, 16), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.mix(self.cut(x).flatten(2).transpose(1, 2)))

    model = Patches().cuda().half().eval()
    image = torch.randn(2, 3, 64, 96, device="cuda").half()
    with torch.no_grad():
        fast = cudal1.accelerate(model, cache_dir=tmp_path)
        for _ in range(3):
            torch.testing.assert_close(fast(image), model(image), rtol=2e-2, atol=2e-3)
        # A weight that changes in place is what the next call reads.
        model.cut.weight.mul_(2)
        torch.testing.assert_close(fast(image), model(image), rtol=2e-2, atol=2e-3)
