"""Projections of attention: biases in the products, no copies before, between or after them, the
same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from torch_cudal1.graph.rewrite import RULES, rewrite
from torch_cudal1.graph.rewrite.projection_rules import PROJECTION_RULES

from .helpers import capture, close_to_float64, ops, run
from .test_reduction_rules import draw

aten = torch.ops.aten
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
ON_A_GPU = {
    "efficient": lambda q, k, v: EFFICIENT(q, k, v, None, False)[0],
    "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0],
    "cudnn": lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0],
}
Fn = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]
only = {rule.name: (rule,) for rule in PROJECTION_RULES}


@pytest.fixture
def slow_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


BIASED: list[tuple[str, Fn, Shapes]] = [
    ("a product", lambda x, w, b: x @ w + b, ((5, 7), (7, 3), (3,))),
    ("the bias first", lambda x, w, b: b + x @ w, ((5, 7), (7, 3), (3,))),
    ("a bias of one row", lambda x, w, b: x @ w + b, ((5, 7), (7, 3), (1, 3))),
    ("reshaped between", lambda x, w, b: (x @ w).view(5, 1, 3) + b, ((5, 7), (7, 3), (3,))),
    ("one column", lambda x, w, b: x @ w + b, ((5, 7), (7, 1), (1,))),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in BIASED], ids=[case[0] for case in BIASED]
)
def test_a_bias_is_added_by_the_product(fn: Fn, shapes: Shapes) -> None:
    rewritten = rewrite(capture(fn, *draw(*shapes)), only["bias_in_matmul"], assume_finite=False)
    assert rewritten.sites == {"bias_in_matmul": 1}
    assert ops(rewritten.gm)["addmm.default"] == 1
    assert not {"mm.default", "add.Tensor"} & set(ops(rewritten.gm))
    for place in range(len(shapes)):
        for value in (0.5, math.nan, math.inf, -math.inf):
            inputs = draw(*shapes, seed=1)
            inputs[place].view(-1)[0] = value
            close_to_float64(rewritten.gm, fn, *inputs)


UNBIASED: list[tuple[str, Fn, tuple[torch.Tensor, ...]]] = [
    (
        "the product is read elsewhere",
        lambda x, w, b: ((y := x @ w) + b, y.relu()),
        (*draw((5, 7), (7, 3), (3,)),),
    ),
    ("a matrix", lambda x, w, b: x @ w + b, (*draw((5, 7), (7, 3), (5, 3)),)),
    ("a number for each row", lambda x, w, b: x @ w + b, (*draw((5, 7), (7, 3), (5, 1)),)),
    ("one number", lambda x, w: x @ w + 2, (*draw((5, 7), (7, 3)),)),
    ("one element", lambda x, w, b: x @ w + b, (*draw((5, 7), (7, 3), (1,)),)),
    ("a multiple", lambda x, w, b: torch.add(x @ w, b, alpha=2), (*draw((5, 7), (7, 3), (3,)),)),
    ("a bias of more dims", lambda x, w, b: x @ w + b, (*draw((5, 7), (7, 3), (1, 1, 3)),)),
    (
        "columns that were reshaped",
        lambda x, w, b: (x @ w).view(5, 3, 2) + b,
        (*draw((5, 7), (7, 6), (2,)),),
    ),
    ("the product itself", lambda x, w: (y := x @ w) + y, (*draw((1, 7), (7, 3)),)),
    (
        "a bias of a wider type",
        lambda x, w, b: x @ w + b,
        (*(t.bfloat16() for t in draw((5, 7), (7, 3))), torch.ones(3)),
    ),
    (
        "integers",
        lambda x, w, b: x @ w + b,
        (torch.ones(5, 7).long(), torch.ones(7, 3).long(), torch.ones(3).long()),
    ),
]


@pytest.mark.parametrize(
    ("fn", "inputs"), [case[1:] for case in UNBIASED], ids=[case[0] for case in UNBIASED]
)
def test_what_is_no_bias_of_this_product_alone_is_added_after_it(
    fn: Fn, inputs: tuple[torch.Tensor, ...]
) -> None:
    assert rewrite(capture(fn, *inputs), only["bias_in_matmul"], assume_finite=False).sites == {}


def rows(x: torch.Tensor, *order: int) -> torch.Tensor:
    return x.permute(order).contiguous()


XW = ((3, 5, 4), (4, 6))
ORDERED: list[tuple[str, Fn, Shapes]] = [
    (
        "time and batch",
        lambda x, w: rows((rows(x, 1, 0, 2).view(15, 4) @ w).view(5, 3, 6), 1, 0, 2),
        XW,
    ),
    (
        "with a bias",
        lambda x, w, b: torch.addmm(b, rows(x, 1, 0, 2).view(15, 4), w).view(5, 3, 6).sum(0),
        ((3, 5, 4), (4, 6), (6,)),
    ),
    (
        "three dims of rows",
        lambda x, w: rows((rows(x, 2, 0, 1, 3).view(30, 4) @ w).view(5, 2, 3, 6), 1, 2, 0, 3),
        ((2, 3, 5, 4), (4, 6)),
    ),
    (
        "heads beside each other",
        lambda x, w: rows(
            (rows(x.view(3, 5, 2, 4), 1, 0, 2, 3).view(15, 8) @ w).view(5, 3, 6), 1, 0, 2
        ),
        ((3, 5, 8), (8, 6)),
    ),
    (
        "an activation between",
        lambda x, w: rows((rows(x, 1, 0, 2).view(15, 4) @ w).view(5, 3, 6).relu(), 1, 0, 2),
        XW,
    ),
    (
        "columns in pieces",
        lambda x, w: rows((rows(x, 1, 0, 2).view(15, 4) @ w).view(5, 3, 2, 3), 2, 1, 0, 3),
        XW,
    ),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in ORDERED], ids=[case[0] for case in ORDERED]
)
def test_rows_are_multiplied_in_the_order_they_lie_in(fn: Fn, shapes: Shapes) -> None:
    gm = capture(fn, *draw(*shapes))
    rewritten = rewrite(gm, only["rows_in_order"], assume_finite=False)
    assert rewritten.sites == {"rows_in_order": 1}
    assert ops(rewritten.gm)["clone.default"] == ops(gm)["clone.default"] - 1
    for place in range(len(shapes)):
        for value in (0.5, math.nan, math.inf):
            inputs = draw(*shapes, seed=1)
            inputs[place].view(-1)[4] = value
            close_to_float64(rewritten.gm, fn, *inputs)


def test_two_products_of_one_copy_both_leave_it() -> None:
    def fn(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        flat = rows(x, 1, 0, 2).view(15, 4)
        return [(flat @ w).view(5, 3, -1).transpose(0, 1).contiguous() for w in (a, b)]

    inputs = draw((3, 5, 4), (4, 6), (4, 7))
    rewritten = rewrite(capture(fn, *inputs), RULES, assume_finite=False)
    assert rewritten.sites["rows_in_order"] == 2
    assert ops(rewritten.gm)["clone.default"] == 0
    close_to_float64(rewritten.gm, fn, *inputs)


UNORDERED: list[tuple[str, Fn, Shapes]] = [
    (
        "the last dim moves",
        lambda x, w: (rows(x, 1, 2, 0).view(20, 3) @ w).view(5, 4, 6).relu(),
        ((3, 5, 4), (3, 6)),
    ),
    (
        "the copy is read too",
        lambda x, w: ((y := rows(x, 1, 0, 2)).view(15, 4) @ w).view(5, 3, 6).sum(0) + y.sum(),
        XW,
    ),
    ("the rows are returned", lambda x, w: (rows(x, 1, 0, 2).view(15, 4) @ w).view(5, 3, 6), XW),
    ("all rows are one dim afterwards", lambda x, w: (rows(x, 1, 0, 2).view(15, 4) @ w).relu(), XW),
    (
        "a later view needs the order",
        lambda x, w: (rows(x, 1, 0, 2).view(15, 4) @ w).view(5, 3, 6).view(-1).exp(),
        XW,
    ),
    (
        "what is returned would lie otherwise",
        lambda x, w: (rows(x, 1, 0, 2).view(15, 4) @ w).view(5, 3, 6).relu(),
        XW,
    ),
    (
        "rows of a part",
        lambda x, w: (x[:, 1:].contiguous().view(12, 4) @ w).view(3, 4, 6).relu(),
        XW,
    ),
    (
        "a bias for each row",
        lambda x, w, b: torch.addmm(b, rows(x, 1, 0, 2).view(15, 4), w).view(5, 3, 6).sum(0),
        ((3, 5, 4), (4, 6), (15, 6)),
    ),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in UNORDERED], ids=[case[0] for case in UNORDERED]
)
def test_a_copy_that_something_else_needs_stays(fn: Fn, shapes: Shapes) -> None:
    assert (
        rewrite(capture(fn, *draw(*shapes)), only["rows_in_order"], assume_finite=False).sites == {}
    )


def windows(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Windows of an image, as a Swin transformer has them: their rows cannot be joined while they
    lie as in the image.
    """
    cut = x.view(2, 2, 3, 2, 3, 8).permute(0, 1, 3, 2, 4, 5).reshape(8, 9, 8)
    return torch.softmax(torch.addmm(b, cut.reshape(72, 8), w).view(8, 9, 5), 1)


def test_windows_keep_their_copy() -> None:
    inputs = draw((2, 6, 6, 8), (8, 5), (5,))
    gm = capture(windows, *inputs)
    (rule,) = only["rows_in_order"]
    assert rule.rewrite(gm) == 0  # by itself: `rewrite` would undo a rule that raises
    close_to_float64(rewrite(gm, RULES, assume_finite=False).gm, windows, *inputs)


def test_one_factor_of_a_batch_is_one_product() -> None:
    fn: Fn = lambda x, w: (
        torch.bmm(x.transpose(0, 1), w.expand(5, 4, 6)).transpose(0, 1).contiguous()
    )
    inputs = draw((3, 5, 4), (4, 6))
    rewritten = rewrite(capture(fn, *inputs), RULES, assume_finite=False)
    assert ops(rewritten.gm) == {"view.default": 2, "mm.default": 1}
    for value in (0.5, math.nan, math.inf):
        inputs[0][1, 2, 3] = value
        close_to_float64(rewritten.gm, fn, *inputs)


BATCHES: list[tuple[str, Fn, Shapes]] = [
    ("a factor each", torch.bmm, ((5, 3, 4), (5, 4, 6))),
    ("a batch of one", lambda x, w: torch.bmm(x, w.expand(1, 4, 6)), ((1, 3, 4), (4, 6))),
    (
        "columns that lie apart",
        lambda x, w: torch.bmm(x.transpose(1, 2), w.expand(5, 4, 6)),
        ((5, 4, 3), (4, 6)),
    ),
    (
        "rows that would have to be put back",
        lambda x, w: torch.bmm(x.transpose(0, 1), w.expand(5, 4, 6)),
        ((3, 5, 4), (4, 6)),
    ),
]


@pytest.mark.parametrize(
    ("fn", "shapes"), [case[1:] for case in BATCHES], ids=[case[0] for case in BATCHES]
)
def test_other_batches_stay(fn: Fn, shapes: Shapes) -> None:
    assert (
        rewrite(capture(fn, *draw(*shapes)), only["one_factor_for_all"], assume_finite=False).sites
        == {}
    )


def project_packed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values (B, H, T, 4) of time before batch, as `nn.MultiheadAttention` packs
    them and takes them apart.
    """
    time, batch, _ = x.shape
    parts = (
        F.linear(x, w).unflatten(-1, (3, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    )
    return tuple(
        part.view(time, -1, 4).transpose(0, 1).view(batch, -1, time, 4)
        for part in (parts[0], parts[1], parts[2])
    )


def separate(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    parts = F.linear(x, w).view(*x.shape[:2], 3, -1, 4)
    return [parts[:, :, place].transpose(1, 2) for place in range(3)]


IN_PLACE: list[tuple[str, Fn, int]] = [
    ("packed", lambda x, w: F.scaled_dot_product_attention(*project_packed(x, w)), 1),
    (
        "causal",
        lambda x, w: F.scaled_dot_product_attention(*project_packed(x, w), is_causal=True),
        1,
    ),
    (
        "read twice",
        lambda x, w: F.scaled_dot_product_attention(*(p := project_packed(x, w))[:2], p[0]),
        1,
    ),
    (
        "copies of keys and values",
        lambda x, w: F.scaled_dot_product_attention(
            (q := separate(x, w))[0], q[1].contiguous(), q[2].contiguous()
        ),
        2,
    ),
]


@pytest.mark.parametrize(
    ("fn", "copies"), [case[1:] for case in IN_PLACE], ids=[case[0] for case in IN_PLACE]
)
def test_attention_reads_its_operands_where_the_product_wrote_them(fn: Fn, copies: int) -> None:
    inputs = draw((5, 3, 8), (24, 8))
    gm = capture(fn, *inputs)
    rewritten = rewrite(gm, only["attention_without_copy"], assume_finite=False)
    assert rewritten.sites == {"attention_without_copy": copies}
    saved_bytes = sum(
        node.meta["val"].numel()
        for node in rewritten.gm.graph.nodes
        if node.target is aten.clone.default
    )
    assert saved_bytes < sum(
        node.meta["val"].numel() for node in gm.graph.nodes if node.target is aten.clone.default
    )
    for value in (0.5, math.nan, math.inf):
        inputs[0][1, 2, 3] = value
        torch.testing.assert_close(
            run(rewritten.gm, *inputs), run(gm, *inputs), equal_nan=True, rtol=1e-5, atol=1e-6
        )


attend = F.scaled_dot_product_attention
NOT_IN_PLACE: list[tuple[str, Fn]] = [
    ("also returned", lambda x, w: (attend(*(p := project_packed(x, w))), p[1])),
    ("also multiplied", lambda x, w: (attend(*(p := project_packed(x, w))), p[1] @ p[1].mT)),
    (
        "copied for the layout of the result",
        lambda x, w: attend((p := separate(x, w))[0].contiguous(), *p[1:]),
    ),
    ("a mask", lambda x, w: attend(*separate(x, w), attn_mask=(x @ x.mT).mT.contiguous()[:, None])),
    ("an input", lambda x, w: attend(x[:, None], x[:, None, :, :].mT.contiguous().mT, x[:, None])),
    (
        "elements that lie apart",
        lambda x, w: attend(*separate(x, w)[:2], (x @ w.mT)[:, None, :, ::6].contiguous()),
    ),
]


@pytest.mark.parametrize(
    "fn", [case[1] for case in NOT_IN_PLACE], ids=[case[0] for case in NOT_IN_PLACE]
)
def test_a_copy_that_attention_does_not_read_alone_stays(fn: Fn) -> None:
    inputs = draw((5, 3, 8), (24, 8))
    assert (
        rewrite(capture(fn, *inputs), only["attention_without_copy"], assume_finite=False).sites
        == {}
    )


def test_rows_that_would_lie_at_odder_places_are_copied() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[..., 1:5].contiguous() for part in (x.exp(), x.sin(), x.cos()))
        return F.scaled_dot_product_attention(q, k, v)

    assert (
        rewrite(
            capture(fn, *draw((2, 3, 5, 8))), only["attention_without_copy"], assume_finite=False
        ).sites
        == {}
    )


def test_what_training_saves_stays_as_it_is() -> None:
    inputs = [x.requires_grad_() for x in draw((5, 3, 8), (24, 8))]
    gm = capture(
        lambda x, w: F.scaled_dot_product_attention(*project_packed(x.transpose(0, 1), w)),
        *inputs,
        grad=True,
    )
    assert "clone.default" in ops(gm)
    rewritten = rewrite(
        gm, [*only["rows_in_order"], *only["attention_without_copy"]], assume_finite=False
    )
    assert rewritten.sites == {}


def encoder(layers: int, *, width: int = 16, heads: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, heads, 24, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def capture_frozen(
    module: nn.Module,
    *inputs: torch.Tensor,
    frozen: bool = False,
    mode: FakeTensorMode | None = None,
) -> tuple[fx.GraphModule, Fn, list[torch.Tensor]]:
    """The inference graph of a module, the module as a function of weights and inputs, and those;
    under a `mode` nothing runs.
    """
    state = dict(module.named_parameters())

    def fn(*flat: torch.Tensor) -> Any:
        with torch.no_grad():
            return torch.func.functional_call(
                module, dict(zip(state, flat, strict=False)), flat[len(state) :]
            )

    flat = [*(value.detach().requires_grad_(not frozen) for value in state.values()), *inputs]
    with mode or nullcontext():
        return capture(fn, *(flat if mode is None else map(mode.from_tensor, flat))), fn, flat


OPTIONS: list[dict[str, Any]] = [{}, {"norm_first": True}, {"activation": "gelu"}, {"bias": False}]


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_no_copy_is_left_in_an_encoder(options: dict[str, Any], frozen: bool) -> None:
    gm, fn, flat = capture_frozen(encoder(2, **options), torch.randn(3, 5, 16), frozen=frozen)
    assert ops(gm)["clone.default"] > 2
    rewritten = rewrite(gm, RULES, assume_finite=False)
    assert not {
        "clone.default",
        "bmm.default",
        "mm.default" if options.get("bias", True) else "",
    } & set(ops(rewritten.gm))
    close_to_float64(rewritten.gm, fn, *flat)


@pytest.mark.usefixtures("slow_path")
@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 4),
    time=st.integers(1, 6),
    heads=st.integers(1, 3),
    depth=st.integers(1, 5),
    first=st.booleans(),
)
def test_encoders_of_any_shape_keep_their_values(
    batch: int, time: int, heads: int, depth: int, first: bool
) -> None:
    module = encoder(1, width=heads * depth, heads=heads, norm_first=first)
    gm, fn, flat = capture_frozen(module, torch.randn(batch, time, heads * depth))
    rewritten = rewrite(gm, RULES, assume_finite=False)
    assert ops(rewritten.gm)["clone.default"] == 0
    close_to_float64(rewritten.gm, fn, *flat, slack=8)


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("first", [False, True])
def test_time_before_batch_keeps_its_values(first: bool) -> None:
    torch.manual_seed(0)
    gm, fn, flat = capture_frozen(
        nn.TransformerEncoderLayer(16, 2, 24, norm_first=first).eval(), torch.randn(5, 3, 16)
    )
    rewritten = rewrite(gm, RULES, assume_finite=False)
    assert ops(rewritten.gm)["clone.default"] == 0
    close_to_float64(rewritten.gm, fn, *flat)


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_finite_comes_out_where_it_did(value: float) -> None:
    x = torch.randn(3, 5, 16)
    x[1, 2, 3] = value
    gm, _, flat = capture_frozen(encoder(2), x)
    rewritten = rewrite(gm, RULES, assume_finite=False)
    torch.testing.assert_close(
        run(rewritten.gm, *flat), run(gm, *flat), equal_nan=True, rtol=1e-5, atol=1e-5
    )


class Attended(nn.Module):
    def __init__(self, *, other: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)
        self.other = other

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        read = memory if self.other else x
        mixed: torch.Tensor = self.inner(x, read, read, need_weights=False)[0]
        return mixed.contiguous()


@pytest.mark.usefixtures("slow_path")
def test_attention_by_itself_loses_its_copies() -> None:
    gm, fn, flat = capture_frozen(
        Attended(other=False).eval(), torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    )
    rewritten = rewrite(gm, RULES, assume_finite=False)
    assert ops(rewritten.gm)["clone.default"] == 0
    close_to_float64(rewritten.gm, fn, *flat)


def move_to_gpu(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph as of tensors without memory on a GPU: its operators name no device."""
    mode = FakeTensorMode()
    inputs = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            fake = mode.from_tensor(
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            )
            fake.fake_device = torch.device("cuda", 0)
            inputs.append(fake)
    gm.graph.eliminate_dead_code()
    with torch.no_grad():
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return gm


class _OnTheCpu(fx.Interpreter):
    """Runs a graph of a GPU: attention there yields (B, T, H, D) seen as (B, H, T, D)."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not EFFICIENT:
            return super().call_function(target, args, kwargs)
        return (
            F.scaled_dot_product_attention(*args[:3]).transpose(1, 2).contiguous().transpose(1, 2),
        )


# What is left of a layer on CUDA, and of one whose norms come first.
NORM = ["native_layer_norm", "getitem"]
ATTENDED = [
    "t",
    "view",
    "addmm",
    "view",
    *["select", "permute"] * 3,
    "attention",
    "getitem",
    "t",
    "permute",
    "view",
    "addmm",
    "view",
]
FED = ["view", "t", "addmm", "view", "relu", "view", "t", "addmm", "view"]
LEFT = {
    False: [*ATTENDED, "add", *NORM, *FED, "add", *NORM],
    True: [*NORM, *ATTENDED, "add", *NORM, *FED, "add"],
}


def short(gm: fx.GraphModule) -> list[str]:
    names = [
        getattr(node.target, "_opname", "getitem")
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]
    return ["attention" if "attention" in name else name for name in names]


@pytest.mark.usefixtures("slow_path")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ON_A_GPU)
def test_a_layer_on_a_gpu_is_products_attention_and_norms(
    kind: str, frozen: bool, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = encoder(1, norm_first=first), torch.randn(3, 5, 16)
    expected = module(x).detach()
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, *_: ON_A_GPU[kind](q, k, v)
    )
    gm, _, flat = capture_frozen(module, x, frozen=frozen, mode=FakeTensorMode())
    monkeypatch.undo()
    rewritten = rewrite(move_to_gpu(gm), RULES, assume_finite=False)
    assert sorted(short(rewritten.gm)) == sorted(LEFT[first])
    assert ops(rewritten.gm)["clone.default"] == 0
    if kind == "efficient":
        with torch.no_grad():
            torch.testing.assert_close(
                _OnTheCpu(rewritten.gm).run(*flat)[0], expected, rtol=1e-5, atol=1e-5
            )


@pytest.mark.usefixtures("slow_path")
def test_attention_to_another_sequence_loses_its_copies_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, inputs = Attended(other=True).eval(), (torch.randn(3, 5, 16), torch.randn(3, 7, 16))
    expected = module(*inputs).detach()
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, *_: ON_A_GPU["efficient"](q, k, v)
    )
    gm, _, flat = capture_frozen(module, *inputs, mode=FakeTensorMode())
    monkeypatch.undo()
    assert ops(gm)["clone.default"] == 5
    rewritten = rewrite(move_to_gpu(gm), RULES, assume_finite=False)
    assert ops(rewritten.gm)["clone.default"] == 0
    with torch.no_grad():
        torch.testing.assert_close(
            _OnTheCpu(rewritten.gm).run(*flat)[0], expected, rtol=1e-5, atol=1e-5
        )
