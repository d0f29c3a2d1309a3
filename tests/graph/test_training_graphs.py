"""Graphs of a training step are searched for kernels as those of inference are: products dominate
forward and backward alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_cudal1 import judge
from torch_cudal1.core.settings import Settings
from torch_cudal1.graph.captured import capture_regions
from torch_cudal1.graph.fusion.partition import FusionGroup, partition
from torch_cudal1.ir.records import Region
from torch_cudal1.kernels import propose
from torch_cudal1.search import space as search_space
from torch_cudal1.store.context import TuneContext, make_context


class Block(nn.Module):
    """Half of a transformer's layer, with the activation and the norm whose gradients stand beside
    products.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(256), activation
        self.inner, self.outer = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.activation(self.inner(self.norm(x))))


class Recorder:
    """Stands for the search for kernels; what was begun is kept, nothing is compiled."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.groups: list[FusionGroup] = []

    def begin(self, fusion_groups: Sequence[FusionGroup]) -> None:
        self.groups += fusion_groups


def graphs(module: nn.Module, *inputs: torch.Tensor) -> dict[str, Region]:
    """By kind, as they would be on a GPU."""
    regions = {region.kind: region for region in capture_regions(module, inputs)}
    return {kind: replace(region, program=on_gpu(region)) for kind, region in regions.items()}


def on_gpu(region: Region) -> Any:
    return replace(
        region.program, inputs=tuple(replace(spec, device="cuda") for spec in region.program.inputs)
    )


def build_space(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> search_space.SearchSpace:
    monkeypatch.setattr(search_space, "GroupKernels", Recorder)
    settings = Settings(cache_dir=str(tmp_path))
    place: TuneContext = replace(
        make_context(torch.device("cpu"), settings), device=torch.device("cuda")
    )
    return search_space.build_search_space(
        region,
        place,
        judge.EvaluationConfig(settings, place.contract, place.device, None),
        lambda *_: None,
    )


@pytest.mark.parametrize(
    "activation",
    [nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU(), nn.ELU(), nn.LeakyReLU(0.1), nn.Tanh()],
)
def test_every_product_of_a_step_has_kernels(activation: nn.Module) -> None:
    step = graphs(Block(activation), torch.randn(8, 128, 256, requires_grad=True))
    for kind, products in (("forward", 2), ("backward", 4)):
        groups = [
            i
            for i in partition(step[kind], products=True).groups
            if "mm.default" in str(i.region.program.steps)
        ]
        assert len(groups) == products
        assert all(propose(fusion_group.region.program, 90) for fusion_group in groups)


def test_the_gradient_of_an_activation_is_taken_into_the_product_before_it() -> None:
    backward = graphs(Block(nn.GELU()), torch.randn(8, 128, 256, requires_grad=True))["backward"]
    targets = [
        [step.target for step in fusion_group.region.program.steps]
        for fusion_group in partition(backward, products=True).groups
    ]  # type: ignore[union-attr]
    assert [
        "aten.mm.default",
        "aten.view.default",
        "aten.gelu_backward.default",
        "aten.view.default",
    ] in targets


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_search_begins_with_the_products_of_a_training_graph(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = build_space(
        graphs(Block(nn.GELU()), torch.randn(64, 128, 256, requires_grad=True))[kind],
        tmp_path,
        monkeypatch,
    )
    assert not space.is_empty
    assert space.kernels is not None
    assert space.kernels.groups == list(space.dominant_groups)  # type: ignore[attr-defined]


def test_a_training_graph_without_products_is_left_to_inductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = graphs(
        nn.Sequential(nn.LayerNorm(64), nn.Softmax(-1)), torch.randn(512, 64, requires_grad=True)
    )
    for region in step.values():
        space = build_space(region, tmp_path, monkeypatch)
        assert space.kernels is None
        assert space.is_empty


def test_a_step_that_no_kernel_has_keeps_no_product_from_its_own() -> None:
    """As `sin` does, whose reduction of large arguments reads a table that the cubin scan refuses."""

    class Turned(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a @ b).sin() + 1

    with torch.no_grad():
        (region,) = graphs(Turned(), torch.randn(128, 64), torch.randn(64, 96)).values()
    (product, *_) = partition(region, products=True).groups
    assert [step.target for step in product.region.program.steps] == ["aten.mm.default"]  # type: ignore[union-attr]
    assert propose(product.region.program, 90)
