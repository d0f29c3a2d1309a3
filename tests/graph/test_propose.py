"""A region's rewritten form and its product groups, as a search proposes them."""

from __future__ import annotations

import torch
from torch import nn

from tests.graph.regions import CPU, capture_region, make_inputs
from torch_cudal1.graph.propose import (
    Variant,
    find_minor_product_groups,
    find_product_groups,
    rewrite_region,
)
from torch_cudal1.ir.check import check_program
from torch_cudal1.runtime.executor import prepare


def test_a_rewritten_region_keeps_all_inputs_even_those_it_no_longer_reads():
    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 48), nn.Linear(64, 48)

        def forward(self, x):
            return self.first(x).sum(-1, keepdim=True) * 2 + 0 * 0

    region = capture_region(Wasteful(), torch.randn(16, 64))
    variant = rewrite_region(region, assume_finite=True)
    assert variant is not None
    check_program(variant.program)
    assert variant.program.inputs == region.program.inputs
    inputs = make_inputs(region)
    rewritten, plain = (
        prepare(program, CPU)(inputs)[0] for program in (variant.program, region.program)
    )
    torch.testing.assert_close(rewritten, plain, rtol=1e-4, atol=1e-4)


def test_a_region_that_no_rule_changes_or_that_draws_random_numbers_has_no_rewritten_form():
    assert rewrite_region(capture_region(nn.Tanh(), torch.randn(4, 4)), assume_finite=True) is None

    class Noisy(nn.Module):
        def forward(self, x):
            return (x.t().t() * 1).exp() + torch.rand_like(x)

    assert rewrite_region(capture_region(Noisy(), torch.randn(4, 4)), assume_finite=True) is None


def test_a_rule_can_be_left_out_by_its_name():
    class Floors(nn.Module):
        def forward(self, x):
            return x.floor().floor()

    region = capture_region(Floors(), torch.randn(4, 4))
    variant = rewrite_region(region, assume_finite=False)
    assert variant is not None
    assert variant.techniques == ("repeated",)
    assert rewrite_region(region, assume_finite=False, without=variant.techniques) is None


def test_a_variant_pays_only_where_its_estimated_time_is_clearly_lower():
    program = capture_region(nn.Tanh(), torch.randn(4, 4)).program
    assert Variant(program, ("repeated",), 1.5).pays
    assert not Variant(program, ("repeated",), 1.0).pays


class Products(nn.Module):
    """As many products of different widths as `widths` has."""

    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, width) for width in widths)

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers)


def test_groups_of_many_different_products_are_not_minor():
    few = capture_region(Products([32, 48, 48]), torch.randn(16, 64))
    assert len(find_minor_product_groups(few)) == 3
    many = capture_region(Products(range(32, 40)), torch.randn(16, 64))
    assert find_minor_product_groups(many) == ()


def test_products_are_searched_first_where_they_are_most_of_the_time():
    region = capture_region(Products([1024]), torch.randn(1024, 64))
    assert find_product_groups(capture_region(nn.Tanh(), torch.randn(8, 8))) == ()
    assert find_product_groups(capture_region(nn.Linear(512, 512), torch.randn(512, 512)))
    rows = nn.Sequential(nn.Linear(4, 4), *(nn.Softmax(-1) for _ in range(12)))
    assert find_product_groups(capture_region(rows, torch.randn(4096, 4))) == ()
    assert all(group.region.kind == region.kind for group in find_product_groups(region))
