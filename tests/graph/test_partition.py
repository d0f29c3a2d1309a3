"""Fusion groups: convex, computing the same when spliced back, and every step left out has a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graph.test_lower import Flat
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.fusion.partition import partition, splice, with_inputs
from torch_cudal1.graph.lower import lower
from torch_cudal1.graph.propose import rewrite_region
from torch_cudal1.ir.check import check_program
from torch_cudal1.ir.value_specs import value_specs
from torch_cudal1.runtime.executor import prepare

CPU = torch.device("cpu")


def region_of(module, *inputs):
    with torch.no_grad():
        (graph,) = trace(Flat(module.eval()), list(inputs)).graphs
    return lower(graph.module, static=graph.static, name="net").region


def random_inputs(region):
    torch.manual_seed(0)
    return [
        torch.empty_strided(s.shape, s.strides, dtype=s.torch_dtype).uniform_(0.5, 1.5)
        for s in region.program.inputs
    ]


class Diamond(nn.Module):
    """A pointwise step on both sides of a matrix product: one group would not be convex."""

    def forward(self, x):
        y = torch.tanh(x) * 2
        return y @ y + torch.sigmoid(y)


class Chunk(nn.Module):
    """The states that a chunk of a state-space model leaves, and what they give to the next one;
    heads inside rows throughout.
    """

    def forward(self, x, b, c, decay):
        states = torch.einsum("blhn,blhp->bhpn", b * decay.unsqueeze(3), x)
        rows = torch.einsum("blhn,bhpn->blhp", c, states)
        return rows * decay.unsqueeze(3) + x


NORM = "_native_batch_norm_legit_no_training"
CHUNK = (*(torch.rand(2, 24, 3, width) for width in (20, 8, 8)), torch.rand(2, 24, 3))
NETS = {
    "chunk": (Chunk(), *CHUNK),
    "mlp": (
        nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.Softmax(-1)
        ),
        torch.randn(4, 8),
    ),
    "diamond": (Diamond(), torch.randn(8, 8)),
    "encoder": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 6, 16)),
    "conv": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
        torch.randn(2, 3, 9, 9),
    ),
}


@pytest.fixture(autouse=True)
def plain_attention():
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_splicing_every_fusion_group_back_changes_nothing(name, products):
    region = region_of(*NETS[name])
    fusion_groups = partition(region, products=products).groups
    spliced = splice(
        region.program,
        {fusion_group: fusion_group.region.program for fusion_group in fusion_groups},
    )
    check_program(spliced)
    inputs = random_inputs(region)
    for ours, plain in zip(
        prepare(spliced, CPU)(inputs), prepare(region.program, CPU)(inputs), strict=True
    ):
        assert torch.equal(ours, plain)
    assert len(spliced.steps) == len(region.program.steps) - sum(
        len(fusion_group.steps) - 1 for fusion_group in fusion_groups
    )


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_fusion_groups_are_convex_and_disjoint(name, products):
    region = region_of(*NETS[name])
    fusion_groups = partition(region, products=products).groups
    taken = [step for fusion_group in fusion_groups for step in fusion_group.steps]
    assert len(taken) == len(set(taken))
    for fusion_group in fusion_groups:
        tainted = set()  # values outside the fusion group that depend on it
        inside = set(fusion_group.steps)
        produced = {out for step in inside for out in region.program.steps[step].writes}
        for position, step in enumerate(region.program.steps):
            used = set(step.reads)
            if position in inside:
                assert not used & tainted, "a path leaves the fusion group and comes back"
            elif used & (produced | tainted):
                tainted |= set(step.writes)


def test_a_product_starts_its_own_fusion_group_and_takes_what_follows_it():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 32)

        def forward(self, x):
            return torch.tanh(self.inner(torch.sigmoid(x) * 2)).softmax(-1)

    region = region_of(Layer(), torch.randn(2, 6, 16))
    found = [
        [region.program.steps[s].target.split(".")[1] for s in i.steps]
        for i in partition(region, products=True).groups
    ]
    products = [names for names in found if "addmm" in names]
    assert products == [["addmm", "view", "tanh"]]
    assert ["_softmax"] in found
    assert not any(
        "addmm" in names
        for names in (
            [step.target for step in i.region.program.steps] for i in partition(region).groups
        )
    )


def test_equal_fusion_groups_of_different_models_share_a_key():
    norm = [nn.LayerNorm(16), nn.GELU()]
    one = region_of(nn.Sequential(nn.Linear(8, 16), *norm), torch.randn(4, 8))
    two = region_of(
        nn.Sequential(nn.Linear(32, 16, bias=False), *norm, nn.Linear(16, 2)), torch.randn(4, 32)
    )
    keys = [
        {fusion_group.region.key for fusion_group in partition(region).groups}
        for region in (one, two)
    ]
    assert keys[0] & keys[1]


def test_what_is_left_out_has_a_reason():
    region = region_of(*NETS["mlp"])
    left = partition(region).reasons_left_out
    assert any("addmm" in reason and "Inductor" in reason for reason in left)
    assert sum(left.values()) + sum(
        len(fusion_group.steps) for fusion_group in partition(region).groups
    ) == len(region.program.steps)


def test_a_rewritten_region_keeps_all_inputs_even_those_it_no_longer_reads():
    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 48), nn.Linear(64, 48)

        def forward(self, x):
            return self.first(x).sum(-1, keepdim=True) * 2 + 0 * 0

    region = region_of(Wasteful(), torch.randn(16, 64))
    variant = rewrite_region(region, assume_finite=True)
    assert variant is not None
    check_program(variant.program)
    assert variant.program.inputs == region.program.inputs
    inputs = random_inputs(region)
    ours, plain = (
        prepare(program, CPU)(inputs)[0] for program in (variant.program, region.program)
    )
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_inputs_can_be_put_in_another_order():
    region = region_of(nn.Linear(8, 4), torch.randn(2, 8))
    spec = region.program.inputs
    moved = with_inputs(region.program, (2, 0, 1), (spec[1], spec[2], spec[0]))
    a, b, c = random_inputs(region)
    assert torch.equal(
        prepare(moved, CPU)([b, c, a])[0], prepare(region.program, CPU)([a, b, c])[0]
    )


class Scans(nn.Module):
    """Exclusive sums, a masked sum from the end, and a slice that belongs to neither."""

    def forward(self, x, mask):
        before = torch.cat(
            (torch.zeros_like(x.select(1, 0).unsqueeze(1)), torch.cumsum(x.narrow(1, 0, 9), 1)), 1
        )
        after = (x * mask).flip(1).cumsum(1).flip(1)
        return before, after, x[:, 2:4].tanh()


class Losses(nn.Module):
    """A triplet's two distances in one mean, the cross entropy, and a mean of what is no result of
    rows.
    """

    def forward(self, a, p, n, target):
        triplet = nn.functional.triplet_margin_loss(a, p, n)
        return triplet, nn.functional.cross_entropy(a, target), (a.softmax(1) * p).mean()


def names_of(fusion_group):
    return [step.target.split(".")[1] for step in fusion_group.region.program.steps]


def test_layout_around_a_scan_is_in_its_fusion_group_and_nothing_else_is():
    region = region_of(Scans(), torch.randn(3, 10), torch.rand(3, 10))
    found = [names_of(fusion_group) for fusion_group in partition(region).groups]
    assert sorted(names for names in found if "cumsum" in names) == [
        ["mul", "flip", "cumsum", "flip"],
        ["select", "unsqueeze", "zeros_like", "slice", "cumsum", "cat"],
    ]
    assert all("tanh" not in names for names in found if "cumsum" in names)


def test_sums_of_what_rows_yield_are_in_the_rows_fusion_group():
    inputs = (*(torch.randn(6, 10) for _ in range(3)), torch.randint(0, 10, (6,)))
    found = [
        names_of(fusion_group) for fusion_group in partition(region_of(Losses(), *inputs)).groups
    ]
    assert sum(names.count("norm") == 2 and names[-1] == "mean" for names in found) == 1
    assert ["_log_softmax", "nll_loss_forward"] in found
    assert any(
        "_softmax" in names and "mean" not in names for names in found
    )  # it would be a sum over whole rows


class FourBits(nn.Module):
    """A linear layer whose weights are two to a byte, with a zero and a scale for each group of 32."""

    def __init__(self, rows: int = 48, columns: int = 64) -> None:
        super().__init__()
        self.register_buffer(
            "packed", torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        )
        self.register_buffer("zeros", torch.full((rows, columns // 32), 8.0))
        self.register_buffer("scales", torch.rand(rows, columns // 32))
        self.bias = nn.Parameter(torch.randn(rows))

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        rows, half = self.packed.shape
        bits = torch.stack((self.packed & 15, self.packed >> 4), -1).view(rows, 2 * half // 32, 32)
        return ((bits.to(dtype) - self.zeros[..., None]) * self.scales[..., None]).view(
            rows, 2 * half
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(nn.functional.linear(x, self.weight(x.dtype), self.bias))


class Twice(FourBits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight(x.dtype)
        return nn.functional.linear(x, weight) + weight.sum()


MAKING = [
    "bitwise_and",
    "__rshift__",
    "stack",
    "view",
    "_to_copy",
    "unsqueeze",
    "sub",
    "unsqueeze",
    "mul",
    "view",
    "t",
]


@pytest.mark.parametrize("rows", [1, 16, 256])
def test_a_product_takes_in_what_makes_numbers_of_its_weights_bits(rows):
    region = region_of(FourBits(), torch.randn(rows, 64))
    (found,) = partition(region, products=True).groups
    assert names_of(found) == [*MAKING, "addmm", "gelu"]
    assert all("addmm" not in names_of(fusion_group) for fusion_group in partition(region).groups)


@pytest.mark.parametrize(
    ("module", "rows"),
    [(FourBits(), 257), (Twice(), 1)],
    ids=["many rows", "weights of another use"],
)
def test_weights_that_are_better_made_once_stay_outside_of_the_product(module, rows):
    found = [
        names_of(fusion_group)
        for fusion_group in partition(
            region_of(module, torch.randn(rows, 64)), products=True
        ).groups
    ]
    assert all("stack" not in names or not {"mm", "addmm"} & set(names) for names in found)


def test_a_batched_product_reads_heads_inside_rows_and_writes_them_there():
    """Instead of copies before and after it; but for what is element-wise, which it reads."""
    found = [
        names_of(i)
        for i in partition(region_of(*NETS["chunk"]), products=True).groups
        if "bmm" in names_of(i)
    ]
    assert found == [
        [
            "clone",
            "_unsafe_view",
            "bmm",
            "view",
            "permute",
            "view",
            "mul",
            "add",
        ],  # states come as they are
        ["clone", "_unsafe_view", "clone", "_unsafe_view", "bmm", "view"],
    ]


@pytest.mark.parametrize(
    ("layers", "x", "names"),
    [
        (
            [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()],
            torch.randn(2, 3, 9, 9),
            ["convolution", NORM, "relu"],
        ),
        (
            [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU()],
            torch.randn(4, 8),
            ["addmm", NORM, "gelu"],
        ),
    ],
    ids=["convolution", "linear"],
)
def test_a_product_takes_the_batch_norm_of_inference_that_follows_it(layers, x, names):
    region = region_of(nn.Sequential(*layers), x)
    assert [names_of(fusion_group) for fusion_group in partition(region, products=True).groups] == [
        names
    ]
    assert all(
        NORM not in names_of(fusion_group) for fusion_group in partition(region).groups
    )  # Inductor does that as well


def test_copies_that_cost_little_beside_their_product_stay_outside():
    class Large(nn.Module):
        def forward(self, x, y):
            return torch.einsum("blhn,blhp->bhpn", x, y)

    found = partition(
        region_of(Large(), *[torch.rand(1, 2048, 2, 512) for _ in range(2)]), products=True
    ).groups
    assert [names_of(fusion_group)[0] for fusion_group in found] == ["bmm"]


def test_a_product_whose_rows_are_cut_by_a_copy_keeps_its_fusion_group_without_it():
    class Cut(nn.Module):
        def forward(self, x, y):
            rows = x.permute(0, 2, 1, 3).clone(memory_format=torch.contiguous_format)
            return torch.bmm(rows.view(2, 12, 10), y)

    found = partition(
        region_of(Cut(), torch.rand(2, 3, 4, 10), torch.rand(2, 10, 6)), products=True
    ).groups
    assert ["bmm"] in [names_of(fusion_group) for fusion_group in found]


def test_layout_after_a_product_that_nothing_of_its_fusion_group_reads_stays_outside():
    class Heads(nn.Module):
        def forward(self, x, y):
            return torch.bmm(x, y).view(2, 3, 4, 6).permute(0, 2, 1, 3), torch.bmm(x.tanh(), y)

    found = partition(
        region_of(Heads(), torch.rand(6, 4, 5), torch.rand(6, 5, 6)), products=True
    ).groups
    assert ["bmm", "view"] in [names_of(fusion_group) for fusion_group in found]
    assert all("permute" not in names_of(fusion_group) for fusion_group in found)


class Sliced(nn.Module):
    """What follows the product reads it from its second column, which kernels could not."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return torch.sigmoid(torch.tanh((x @ x)[:, self.first :]) * 2)


@pytest.mark.parametrize(("first", "fusion_groups"), [(1, 0), (4, 1)])
def test_what_reads_an_unaligned_view_is_no_fusion_group_and_says_so(first, fusion_groups):
    found = partition(region_of(Sliced(first), torch.randn(8, 8)))
    assert len(found.groups) == fusion_groups
    assert any(
        "begins at no multiple of 16 bytes" in reason for reason in found.reasons_left_out
    ) == (fusion_groups == 0)


class Rotary(nn.Module):
    """Queries and keys turned by their positions. `kept`: the turned halves are a result too."""

    def __init__(self, dim=-1, kept=False):
        super().__init__()
        self.dim, self.kept = dim, kept

    def forward(self, q, k, cos, sin):
        def half(x):
            first, second = x.chunk(2, self.dim)
            return torch.cat((-second, first), self.dim)

        q, k = q.transpose(1, 2), k.transpose(1, 2)
        turned = half(k)
        whole = q * cos + half(q) * sin, k * cos + turned * sin
        return (*whole, -k[..., 8:], turned) if self.kept else whole


ROTATED = torch.rand(2, 9, 4, 16), torch.rand(2, 9, 2, 16), torch.rand(9, 16), torch.rand(9, 16)


def test_a_rotary_embedding_is_one_fusion_group_a_tensor():
    region = region_of(Rotary(), *ROTATED)
    fusion_groups = partition(region).groups
    assert [
        sum(step.target == "aten.cat.default" for step in fusion_group.region.program.steps)
        for fusion_group in fusion_groups
    ] == [1, 1]
    assert all(
        len(fusion_group.outputs) == 1 and len(fusion_group.steps) == 5
        for fusion_group in fusion_groups
    )
    inputs = random_inputs(region)
    spliced = splice(
        region.program,
        {fusion_group: fusion_group.region.program for fusion_group in fusion_groups},
    )
    for new, old in zip(
        prepare(spliced, CPU)(inputs), prepare(region.program, CPU)(inputs), strict=True
    ):
        assert torch.equal(new, old)


def test_halves_that_others_read_or_that_are_no_part_of_a_row_stay_with_inductor():
    across = region_of(Rotary(dim=2), *ROTATED[:2], torch.rand(9, 16), torch.rand(9, 16))
    assert not [
        s
        for i in partition(across).groups
        for s in i.region.program.steps
        if s.target == "aten.cat.default"
    ]
    shared = region_of(Rotary(kept=True), *ROTATED)
    joined = [
        s
        for i in partition(shared).groups
        for s in i.region.program.steps
        if s.target == "aten.cat.default"
    ]
    assert (
        len(joined) >= 1
    )  # the queries' at least; whatever the keys' is, results of two sizes are never one fusion group's
    for fusion_group in partition(shared).groups:
        assert (
            len({s.shape for s in (value_specs(shared.program)[v] for v in fusion_group.outputs)})
            == 1
        )
