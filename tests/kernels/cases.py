"""The table of fusion groups whose emitted kernels are compared with float64: name -> (function, inputs).

Ragged sizes on purpose (1, 7, 1000, 1023, 4097), NaN and infinity, other layouts, every family and
dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.kernels.traced_programs import AtenStep
from torch_cudal1.api.special import log_bessel_i, log_bessel_k
from torch_cudal1.ir.program import Value

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def _draw(
    *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0
) -> torch.Tensor:
    return (torch.randn(*shape, generator=_generator) * scale + shift).to(dtype)


def _place_values(tensor: torch.Tensor, *marks: tuple[tuple[int, ...], float]) -> torch.Tensor:
    for position, value in marks:
        tensor[position] = value
    return tensor


def _method(name: str, *args: Any, **kwargs: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: getattr(x, name)(*args, **kwargs)


_generator = torch.Generator()
HALF, BF16 = torch.float16, torch.bfloat16


def softmax_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for rows, columns in ((7, 1), (3, 7), (5, 1000), (2, 1023), (2, 4097), (1, 16385)):
        cases[f"softmax {rows}x{columns}"] = (
            lambda x: x.softmax(-1),
            (_draw(rows, columns, scale=5),),
        )
        cases[f"log_softmax {rows}x{columns}"] = (
            lambda x: x.log_softmax(-1),
            (_draw(rows, columns, scale=5),),
        )
    for dtype in (HALF, BF16):
        cases[f"softmax {dtype}"] = (lambda x: x.softmax(-1), (_draw(5, 100, dtype=dtype),))
    special = _place_values(
        _draw(5, 40), ((0,), -INF), ((1, 3), NAN), ((2, 5), INF), ((3, 7), -INF)
    )
    cases["softmax of infinities and NaN"] = (lambda x: x.softmax(-1), (special,))
    long = _place_values(
        _draw(5, 20000), ((0,), -INF), ((1, 3), NAN), ((2, 15000), INF), ((3, 7), -INF)
    )
    cases["softmax of infinities and NaN, in a loop"] = (lambda x: x.softmax(-1), (long,))
    cases["softmax over the middle"] = (lambda x: x.softmax(1), (_draw(3, 33, 10),))
    cases["softmax over the first"] = (lambda x: x.softmax(0), (_draw(300, 7),))
    mask = torch.rand(12, 50, generator=_generator) > 0.5
    cases["scaled masked softmax"] = (
        lambda x, m: torch.where(m, x * 0.125, -INF).softmax(-1),
        (_draw(2, 12, 50, dtype=HALF), mask),
    )
    cases["softmax of a transpose"] = (lambda x: x.transpose(0, 1).softmax(-1), (_draw(30, 9),))
    cases["logsumexp"] = (
        lambda x: aten.logsumexp(x, [1]),
        (_place_values(_draw(6, 70, scale=30), ((1,), -INF), ((2, 3), INF)),),
    )
    pair = (_draw(4, 65), _draw(4, 65).softmax(-1))
    cases["softmax backward"] = (lambda g, o: aten._softmax_backward_data(g, o, -1, o.dtype), pair)
    return cases


def _in_their_places(
    optional: tuple[torch.Tensor | None, ...], tensors: tuple[torch.Tensor, ...]
) -> list[torch.Tensor | None]:
    """`tensors` where something is given."""
    waiting = iter(tensors)
    return [None if tensor is None else next(waiting) for tensor in optional]


def norm_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for columns in (1, 7, 1000, 1023, 4097):
        args = (_draw(3, columns), _draw(columns), _draw(columns))
        cases[f"layer_norm {columns}"] = (
            lambda x, w, b: aten.native_layer_norm(x, [x.shape[-1]], w, b, 1e-5),
            args,
        )
    cases["layer_norm far from zero"] = (
        lambda x: F.layer_norm(x, (1000,)),
        (_draw(3, 1000, shift=1000.0),),
    )
    cases["layer_norm over two dimensions"] = (
        lambda x, w: F.layer_norm(x, (6, 10), w),
        (_draw(5, 6, 10), _draw(6, 10)),
    )
    cases["layer_norm with NaN"] = (
        lambda x: F.layer_norm(x, (20,)),
        (_place_values(_draw(4, 20), ((1, 2), NAN), ((2, 3), INF)),),
    )
    far = _place_values(_draw(4, 9000, shift=1000.0), ((1, 8000), NAN), ((2, 30), INF))
    cases["layer_norm in a loop, far from zero, with NaN"] = (
        lambda x: F.layer_norm(x, (9000,)),
        (far,),
    )
    half = (
        _draw(6, 96, dtype=HALF),
        _draw(6, 96, dtype=HALF),
        _draw(96, dtype=HALF),
        _draw(96, dtype=HALF),
    )
    cases["residual layer_norm gelu, two outputs"] = (
        lambda x, r, w, b: (F.gelu(F.layer_norm(x + r, (96,), w, b)), (x + r) * 1),
        half,
    )
    cases["rms_norm"] = (lambda x, w: F.rms_norm(x, (300,), w, 1e-6), (_draw(4, 300), _draw(300)))
    cases["rms_norm by hand"] = (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        (_draw(4, 300, dtype=BF16), _draw(300, dtype=BF16)),
    )
    cases["fused rms_norm"] = (
        AtenStep(
            "aten._fused_rms_norm.default",
            (Value(0), (64,), Value(1), None),
            2,
            lambda x, w: F.rms_norm(x, (64,), w),
        ),
        (_draw(5, 64), _draw(64)),
    )
    cases[
        "fused rms_norm, half, small numbers under no epsilon"
    ] = (  # PyTorch's is float32's, not that of half precision
        AtenStep(
            "aten._fused_rms_norm.default",
            (Value(0), (64,), Value(1), None),
            2,
            lambda x, w: F.rms_norm(x, (64,), w),
        ),
        (
            (torch.arange(320.0).sin().view(5, 64) * 0.01).to(BF16),
            torch.arange(64.0).cos().to(BF16),
        ),
    )
    group = (_draw(2, 6, 5, 3), _draw(6), _draw(6))
    cases["group_norm"] = (
        lambda x, w, b: aten.native_group_norm(x, w, b, 2, 6, 15, 3, 1e-5),
        group,
    )
    cases["group_norm silu"] = (lambda x, w, b: F.silu(F.group_norm(x, 3, w, b)), group)
    heavy = _place_values(torch.arange(1.0, 7.0), ((1,), INF), ((4,), NAN))
    for name, vectors in {
        "weight": (heavy, None),
        "bias": (None, heavy),
        "weight and bias": (heavy, heavy.flip(0)),
    }.items():
        cases[f"group_norm, {name} of infinities"] = (
            lambda x, *v, optional=vectors: F.group_norm(x, 3, *_in_their_places(optional, v)),
            (group[0], *(vector for vector in vectors if vector is not None)),
        )
    cases["group_norm, a few long rows"] = (
        lambda x: F.group_norm(x, 2),
        (_draw(1, 4, 96, 100, shift=3.0),),
    )
    cases["instance_norm"] = (_instance_norm, group)
    cases["batch_norm of the batch"] = (
        lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
        (_draw(9, 6, 11), _draw(6), _draw(6)),
    )
    running = (_draw(3, 6, 7), _draw(6), _draw(6), _draw(6), _draw(6).abs())
    training_inputs = (_draw(9, 6, 11), *(_draw(6) for _ in range(3)), _draw(6).abs())
    cases["batch_norm in training"] = (_training_batch_norm, training_inputs)
    cases["batch_norm in training, split"] = (
        _training_batch_norm,
        (_draw(64, 2, 16, 32, shift=2.0), *(_draw(2).abs() for _ in range(4))),
    )
    cases["batch_norm of running statistics"] = (
        lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5)[
            0
        ],
        running,
    )
    return cases


def _training_batch_norm(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> Any:
    out, _, _, mean, variance = aten._native_batch_norm_legit_functional(
        x, w, b, m, v, True, 0.1, 1e-5
    )
    return out, mean, variance


def _instance_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    flat = x.view(1, -1, *x.shape[2:])
    out = aten._native_batch_norm_legit.no_stats(
        flat, w.repeat(x.shape[0]), b.repeat(x.shape[0]), True, 0.1, 1e-5
    )[0]
    return out.view(x.shape)


def reduction_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for columns in (1, 7, 1000, 1023, 4097):
        x = _draw(3, columns)
        cases[f"sum {columns}"] = (lambda x: x.sum(-1), (x,))
        cases[f"argmax {columns}"] = (lambda x: x.argmax(-1), (x,))
    special = _place_values(
        _draw(5, 33),
        ((0, 4), NAN),
        ((0, 9), NAN),
        ((1, 2), INF),
        ((2,), -INF),
        ((3,), 0.0),
        ((3, 5), -0.0),
    )
    for name in ("amax", "amin", "argmax", "argmin"):
        cases[f"{name} with NaN, infinity and ties"] = (_method(name, 1), (special,))
        cases[f"{name} half"] = (_method(name, 1), (special.half(),))
    cases["argmax of all"] = (lambda x: x.argmax(), (_draw(5, 33),))
    cases["argmin of the first"] = (lambda x: x.argmin(0), (_draw(40, 12),))
    cases["argmax of a transpose"] = (lambda x: x.t().argmax(), (_draw(9, 12).round(),))
    cases["argmax of int32"] = (
        lambda x: x.argmax(1),
        (torch.randint(-9, 9, (6, 40), dtype=torch.int32, generator=_generator),),
    )
    cases["max with index"] = (lambda x: tuple(x.max(1)), (special,))
    x4 = _draw(3, 4, 5, 6)
    for dims in ((0,), (1,), (2, 3), (0, 2, 3), (1, 3), ()):
        cases[f"mean over {dims}"] = (_method("mean", dims or None), (x4,))
        cases[f"sum keepdim over {dims}"] = (
            _method("sum", dims or (0, 1, 2, 3), keepdim=True),
            (x4,),
        )
    cases["prod"] = (lambda x: x.prod(1), (_draw(4, 9),))
    cases["var"] = (lambda x: x.var(1), (_draw(4, 90, shift=100.0),))
    cases["std without correction"] = (lambda x: x.std(1, correction=0), (_draw(4, 90),))
    cases["var_mean"] = (lambda x: tuple(torch.var_mean(x, 0)), (_draw(90, 5),))
    cases["sum of int64"] = (
        lambda x: x.sum(1),
        (torch.randint(-(2**40), 2**40, (4, 50), generator=_generator),),
    )
    cases["count of true"] = (lambda x: x.sum(1), (torch.rand(4, 50, generator=_generator) > 0.5,))
    flags = torch.zeros(3, 20, dtype=torch.bool)
    flags[0], flags[1, 3] = True, True
    cases["any and all"] = (lambda x: (x.any(1), x.all(1)), (flags,))
    cases["vector norms"] = (
        lambda x: (torch.linalg.vector_norm(x, 2, 1), torch.linalg.vector_norm(x, 1, 1)),
        (_draw(4, 30),),
    )
    cases["mean of squares of a difference"] = (
        lambda a, b: ((a - b) ** 2).mean(),
        (_draw(20, 30), _draw(20, 30)),
    )
    cases["sum of everything, split"] = (lambda x: (x * 2).sum(), (_draw(20480),))
    cases["amax per row, split, scaled"] = (
        lambda x: x.amax(1) * 0.5,
        (_place_values(_draw(2, 16384), ((1, 9), NAN)),),
    )
    cases["half sum beyond 65504"] = (
        lambda x: x.sum(1) * 0.001,
        (torch.full((2, 5000), 100.0, dtype=HALF),),
    )
    return cases


def scan_cases() -> dict[str, Case]:
    """Positive terms and factors of two: the CPU sums in float64, and sums of any signs come close
    to zero again.
    """
    cases: dict[str, Case] = {}
    for columns in (1, 7, 1000, 1023, 4097, 9000):
        x = _draw(3, columns).abs()
        cases[f"cumsum {columns}"] = (lambda x: x.cumsum(1), (x,))
        cases[f"cumsum reversed {columns}"] = (lambda x: x.flip(1).cumsum(1).flip(1), (x,))
        cases[f"cumsum exclusive {columns}"] = (_exclusive, (x,))
        cases[f"cumprod {columns}"] = (
            lambda x: x.cumprod(1),
            (_draw(3, columns).sign() * 2.0 ** _draw(3, columns, scale=0.5).round(),),
        )
    mask = torch.rand(5, 5000, generator=_generator) > 0.5
    cases["masked cumsum"] = (lambda x, m: (x * m).cumsum(1), (_draw(5, 5000).abs(), mask))
    cases["cumsum over the first"] = (lambda x: x.cumsum(0) * 2, (_draw(40, 12),))
    cases["cumsum over the middle"] = (lambda x: F.relu(x).cumsum(1), (_draw(3, 33, 10),))
    cases["cumsum half"] = (lambda x: x.cumsum(1), (_draw(3, 300, dtype=HALF).abs(),))
    cases["cumsum of flags"] = (lambda m: m.cumsum(1), (mask,))
    special = _place_values(
        _draw(4, 5000).abs(), ((0, 4), NAN), ((1, 4990), INF), ((2, 30), INF), ((2, 4500), -INF)
    )
    cases["cumsum with NaN and infinity"] = (lambda x: x.cumsum(1), (special,))
    cases["cumsum exclusive with infinity"] = (_exclusive, (special,))
    cases["normalised cumsum"] = (
        lambda x: x.cumsum(1) / x.sum(1, keepdim=True),
        (_draw(3, 70, scale=0.1, shift=1.0),),
    )
    return cases


def _exclusive(x: torch.Tensor) -> torch.Tensor:
    sums = torch.cumsum(x.narrow(1, 0, x.size(1) - 1), 1)
    return torch.cat((torch.zeros_like(x.select(1, 0).unsqueeze(1)), sums), 1)


def pooling_cases() -> dict[str, Case]:
    """The pooled values only: their places are not computed."""
    flat, deep = (
        _place_values(
            _draw(2, 3, 13, 17), ((0, 0, 0, 0), NAN), ((1, 2, 5, 5), INF), ((1, 1, 3, 3), -INF)
        ),
        _draw(2, 2, 9, 10, 11),
    )
    cases: dict[str, Case] = {}
    for name, settings in {
        "plain": (3,),
        "padded": (4, 1, 1),
        "dilated": (3, 2, 1, 2),
        "skewed": ((2, 5), (3, 2), (1, 2)),
    }.items():
        cases[f"max_pool2d {name}"] = (
            lambda x, s=settings: aten.max_pool2d_with_indices(x, *_lists(s))[0],
            (flat,),
        )
    for name, settings in {
        "plain": (2,),
        "padded": (3, 2, 1),
        "skewed": ((2, 5), (3, 2), (1, 2)),
    }.items():
        cases[f"avg_pool2d {name}"] = (
            lambda x, s=settings: aten.avg_pool2d(x, *_lists(s)),
            (flat,),
        )
    cases["max_pool3d"] = (
        lambda x: aten.max_pool3d_with_indices(x, [3, 3, 3], [2, 2, 2], [1, 1, 1], [3, 3, 3])[0],
        (deep,),
    )
    cases["avg_pool3d"] = (lambda x: aten.avg_pool3d(x, [3, 3, 3], [2, 2, 2], [1, 1, 1]), (deep,))
    cases["avg_pool with a divisor, then relu"] = (
        lambda x: F.relu(aten.avg_pool2d(x, [2, 2], [1, 1], [1, 1], False, False, 3)) * 2,
        (flat,),
    )
    cases["max_pool2d half, channels last"] = (
        lambda x: aten.max_pool2d_with_indices(x, [3, 3], [1, 1], [1, 1])[0],
        (flat.half().to(memory_format=torch.channels_last),),
    )
    return cases


def _lists(settings: tuple[Any, ...]) -> list[list[int]]:
    return [
        list(setting) if isinstance(setting, tuple) else [setting, setting] for setting in settings
    ]


def loss_cases() -> dict[str, Case]:
    pair, long = (_draw(20, 30), _draw(20, 30)), (_draw(8, 4096), _draw(8, 4096))
    cases: dict[str, Case] = {}
    for name, (x, y) in {"": pair, ", split": long}.items():
        cases[f"mse{name}"] = (F.mse_loss, (x, y))
        cases[f"smooth l1{name}"] = (F.smooth_l1_loss, (x, y))
        cases[f"huber{name}"] = (lambda x, y: F.huber_loss(x, y, delta=0.7), (x, y))
        cases[f"hinge{name}"] = (lambda x, y: (1 - x * y.sign()).clamp(min=0).mean(), (x, y))
        cases[f"kl divergence{name}"] = (
            lambda x, y: F.kl_div(x.log(), y, reduction="batchmean"),
            (x.softmax(-1), y.softmax(-1)),
        )
    cases["smooth l1 without a width"] = (
        lambda x, y: F.smooth_l1_loss(x, y, beta=0.0, reduction="sum"),
        pair,
    )
    cases["mse, each"] = (lambda x, y: F.mse_loss(x, y, reduction="none"), pair)
    cases["binary cross entropy"] = (
        F.binary_cross_entropy,
        (_place_values(pair[0].sigmoid(), ((0, 0), 0.0)), pair[1].sigmoid()),
    )
    cases["cosine embedding"] = (lambda x, y: 1 - F.cosine_similarity(x, y).mean(), pair)
    triple = (*pair, _draw(20, 30))
    cases["triplet margin"] = (lambda a, p, n: F.triplet_margin_loss(a, p, n), triple)
    for rows, classes in ((9, 7), (300, 1000), (5, 40000)):
        target = torch.randint(classes, (rows,), generator=_generator)
        cases[f"cross entropy {rows}x{classes}"] = (
            F.cross_entropy,
            (_draw(rows, classes, scale=3), target),
        )
    target = torch.tensor([1, -100, 3, 0, -100])
    cases["cross entropy, some ignored"] = (
        lambda x, t: F.cross_entropy(x, t),
        (_draw(5, 8), target),
    )
    cases["cross entropy, each"] = (
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        (_draw(5, 8), target),
    )
    return cases


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotary_cases() -> dict[str, Case]:
    """Rotary embeddings: halves of heads inside rows, of a part of each head, of half types."""

    def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + _rotate_half(x) * sin

    def apply_to_part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., :8], x[..., 8:]
        return torch.cat((apply_rotary(turned, cos, sin), rest), -1) * 2

    heads, tables = _draw(2, 9, 3, 16).transpose(1, 2), (_draw(9, 16), _draw(9, 16))
    marked = _place_values(
        _draw(2, 3, 9, 16), ((0, 0, 0, 0), NAN), ((0, 1, 1, 9), INF), ((1, 2, 8, 15), -INF)
    )
    cases: dict[str, Case] = {
        "rotary embedding": (apply_rotary, (heads, *tables)),
        "rotary embedding, NaN and infinity": (apply_rotary, (marked, *tables)),
        "rotary embedding of a part": (
            apply_to_part,
            (_draw(2, 3, 9, 16), _draw(9, 8), _draw(9, 8)),
        ),
        "three parts along columns": (
            lambda a, b: torch.cat((a, -b, a * b), 0) + 1,
            (_draw(4, 6), _draw(4, 6)),
        ),
    }
    for dtype in (HALF, BF16):
        cases[f"rotary embedding {dtype}"] = (
            apply_rotary,
            (_draw(1, 2, 9, 16, dtype=dtype), *(t.to(dtype) for t in tables)),
        )
    return cases


def elementwise_cases() -> dict[str, Case]:
    x = _place_values(
        _draw(7, 33, scale=3),
        ((0, 0), NAN),
        ((1, 1), INF),
        ((2, 2), -INF),
        ((3, 3), 0.0),
        ((4, 4), 30.0),
        ((4, 5), -30.0),
    )
    unary: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu": lambda x: F.gelu(x.clamp(-100, 100)),  # the CPU's gelu(inf) is NaN, CUDA's is inf
        "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
        **{
            f.__name__: f
            for f in (
                F.silu,
                F.mish,
                F.softplus,
                F.elu,
                F.hardswish,
                F.hardsigmoid,
                F.leaky_relu,
                F.relu,
                F.hardtanh,
            )
        },
        **{
            f.__name__: f
            for f in (
                torch.sigmoid,
                torch.tanh,
                torch.exp,
                torch.neg,
                torch.abs,
                torch.reciprocal,
                torch.square,
            )
        },
        **{
            f.__name__: f
            for f in (
                torch.floor,
                torch.ceil,
                torch.round,
                torch.trunc,
                torch.erf,
                torch.expm1,
                torch.isnan,
                torch.isinf,
            )
        },
        "sqrt and rsqrt of the size": lambda x: (
            x.abs().sqrt(),
            (x.abs() + 1).rsqrt(),
            (x.abs() + 1).log(),
        ),
        "clamp": lambda x: x.clamp(-1.5, 2.0),
        "powers": lambda x: (x**3, x**-1, x.abs() ** 0.5, x**0, x.abs() ** 2.5, x**-2),
        "comparisons": lambda x: (x > 0, x <= 1.5, x == x, (x > 0) & (x < 3), ~(x > 0)),
        "select": lambda x: torch.where(x > 0, x * 2, -1.0),
        "tiny and huge numbers": lambda x: (x * 1e-40, x * 3.4e38 * 10, x + 1e-30),
        "chain": lambda x: torch.tanh(x * 1.702 + 0.5) / (1 + x.abs()) - 2,
        "scalar arithmetic": lambda x: (
            3 - x,
            torch.rsub(x, 2.0, alpha=3),
            x / 7,
            1 / x,
            torch.add(x, x, alpha=0.3),
        ),
    }
    cases: dict[str, Case] = {name: (function, (x,)) for name, function in unary.items()}
    for dtype in (HALF, BF16):
        cases[f"chain {dtype}"] = (lambda x: F.silu(x) * 0.3 + x, (_draw(5, 77, dtype=dtype),))
    pair = (_draw(4, 1, 9), _draw(5, 1))
    cases["broadcast both ways"] = (lambda a, b: a * b + a, pair)
    cases["maximum and minimum with NaN"] = (
        lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)),
        (x, x.flip(0).clone()),
    )
    cases["input transposed"] = (lambda a, b: a.t() + b, (_draw(6, 9), _draw(9, 6)))
    last = _draw(2, 3, 4, 5).to(memory_format=torch.channels_last)
    cases["channels last"] = (lambda a, b: F.relu(a) + b, (last, _draw(3, 1, 1)))
    cases["strided input"] = (lambda a: a * 2, (_draw(8, 20)[::2, 1:18:3],))
    cases["swiglu from halves"] = (
        lambda a: F.silu(a.chunk(2, -1)[0]) * a.chunk(2, -1)[1],
        (_draw(5, 34),),
    )
    cases["glu"] = (lambda a: F.glu(a, 1), (_draw(5, 34),))
    cases["reshape, permute and slice"] = (
        lambda a: (a.view(6, 4, 5).permute(1, 0, 2)[:, 1:4] * 2).contiguous(),
        (_draw(24, 5),),
    )
    cases["addcmul and addcdiv"] = (
        lambda a, b, c: (
            torch.addcmul(a, b, c, value=0.5),
            torch.addcdiv(a, b, c.abs() + 1, value=-2),
        ),
        (_draw(50), _draw(50), _draw(50)),
    )
    numbers = torch.randint(-50, 50, (40,), generator=_generator)
    cases["int64"] = (
        lambda a: (a * 3 - 7, a > 5, a.to(torch.float32) / 3, -a, a.abs()),
        (numbers,),
    )
    cases["int32 and float promote"] = (
        lambda a, b: (a + b, a * 0.5),
        (numbers.to(torch.int32), _draw(40)),
    )
    cases["0-dim tensor operand"] = (lambda a, b: a * b, (_draw(40, dtype=HALF), torch.tensor(1.5)))
    cases["masked_fill"] = (
        lambda a, m: a.masked_fill(m, -INF),
        (_draw(4, 10), torch.rand(10, generator=_generator) > 0.5),
    )
    cases["backwards"] = (
        lambda g, y: (
            aten.sigmoid_backward(g, y),
            aten.tanh_backward(g, y),
            aten.threshold_backward(g, y, 0.1),
        ),
        (_draw(30), _draw(30)),
    )
    cases["one element"] = (lambda a: a.exp(), (_draw(1),))
    cases["no dimensions"] = (lambda a: a + 1, (torch.tensor(2.5),))
    return cases


def backward_cases() -> dict[str, Case]:
    """What the backward graphs of training hold besides products: gradients of activations, of
    softmax, and after a product.
    """
    cases: dict[str, Case] = {}
    special = torch.cat(
        [
            _draw(60) * 4,
            torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 90.0, -90.0, INF, -INF, NAN]),
        ]
    )
    for dtype in (torch.float32, HALF, BF16):
        cases[f"backwards of activations, {dtype}"] = (
            lambda g, y: (
                *(
                    aten.gelu_backward(g, y),
                    aten.gelu_backward(g, y, approximate="tanh"),
                    aten.silu_backward(g, y),
                ),
                *(
                    aten.elu_backward(g, 0.7, 1.5, 2.0, False, y),
                    aten.elu_backward(g, 0.7, 1.5, 2.0, True, y),
                ),
                *(
                    aten.leaky_relu_backward(g, y, 0.2, False),
                    aten.softplus_backward(g, y, 2.0, 9.0),
                ),
                *(aten.hardtanh_backward(g, y, -1.0, 1.0), aten.hardsigmoid_backward(g, y)),
            ),
            (_draw(71).to(dtype), special.to(dtype)),
        )
    cases["backward of dropout"] = (
        lambda g, mask: aten.native_dropout_backward(g, mask, 1.25),
        (_draw(50, dtype=HALF), torch.rand(50, generator=_generator) > 0.2),
    )
    cases["backward of softmax, scaled"] = (
        lambda g, y: aten._softmax_backward_data(g, y, -1, g.dtype) * 0.125,
        (_draw(3, 5, 37), _draw(3, 5, 37).softmax(-1)),
    )
    return cases


def bessel_cases() -> dict[str, Case]:
    orders = torch.tensor(
        [0.0, 0.3, 0.5, 2.5, 17.0, 300.0, 1e9, 1e20, 1e38]
    )  # the last three need a limit on the steps
    places = torch.cat([torch.logspace(-6, 3, 60), torch.tensor([0.0, 1e-38, INF, NAN, -1.0])])
    grid = (orders[:, None].expand(9, 65).contiguous(), places.expand(9, 65).contiguous())
    cases: dict[str, Case] = {
        "log of a Bessel function, first kind": (log_bessel_i, grid),
        "log of a Bessel function, second kind": (log_bessel_k, grid),
        "of one order, in a chain": (
            lambda x: torch.relu(x) - log_bessel_k(-2.5, x) * 0.5,
            (_draw(4, 33).abs() * 20 + 0.1,),
        ),
        "of a half type": (lambda x: log_bessel_i(1.0, x), ((_draw(3, 50).abs() * 30).to(BF16),)),
        "over rows": (
            lambda v, x: log_bessel_i(v, x).sum(-1),
            (
                torch.rand(5, 1, generator=_generator) * 9,
                torch.rand(5, 100, generator=_generator) * 40 + 0.01,
            ),
        ),
    }
    return cases


def _nibbles(
    x: torch.Tensor, packed: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Two weights of four bits in a byte, groups of 16 along k with a zero and a scale each."""
    rows, half = packed.shape
    bits = torch.stack((packed & 15, packed >> 4), -1).view(rows, 2 * half // 16, 16)
    weight = (bits.to(x.dtype) - zeros[..., None]) * scales[..., None]
    return x @ weight.view(rows, 2 * half).t()


def _words(
    x: torch.Tensor, packed: torch.Tensor, shifts: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Ten weights of three bits in an int32 (two bits are left over), a scale a row; eight as a
    signed number.
    """
    bits = torch.bitwise_right_shift(packed[:, :, None], shifts) & 7
    weight = (bits.to(torch.float32) - 4.0).flatten(1) * scales[:, None]
    return torch.relu(x @ weight.t())


def few_bits_cases() -> dict[str, Case]:
    byte = lambda *shape: torch.randint(0, 256, shape, dtype=torch.uint8, generator=_generator)
    signed = lambda *shape: torch.randint(-128, 128, shape, dtype=torch.int8, generator=_generator)
    cases: dict[str, Case] = {}
    for rows in (1, 3):
        for dtype in (torch.float32, HALF):
            inputs = (
                _draw(rows, 96, dtype=dtype),
                byte(33, 48),
                _draw(33, 6, dtype=dtype, shift=8),
                _draw(33, 6, dtype=dtype),
            )
            cases[f"{rows} x 4 bits {dtype}"] = (_nibbles, inputs)
    for rows, dtype in ((17, torch.float32), (45, HALF), (130, HALF)):
        inputs = (
            _draw(rows, 96, dtype=dtype),
            byte(33, 48),
            _draw(33, 6, dtype=dtype, shift=8),
            _draw(33, 6, dtype=dtype),
        )
        cases[f"{rows} x 4 bits {dtype}"] = (_nibbles, inputs)
    words = torch.randint(-(2**31), 2**31 - 1, (19, 7), generator=_generator).int()
    shifts = torch.arange(0, 30, 3, dtype=torch.int32)
    cases["3 bits in words"] = (_words, (_draw(2, 70), words, shifts, _draw(19)))
    cases["3 bits in words, many rows"] = (_words, (_draw(33, 70), words, shifts, _draw(19)))
    cases["8 bits, many rows"] = (
        lambda b, x, w, s: torch.addmm(b, x, (w.to(x.dtype) * s[:, None]).t()).relu(),
        (_draw(30), _draw(65, 1030), signed(30, 1030), _draw(30)),
    )
    cases["8 bits"] = (
        lambda x, w, s: x @ (w.to(x.dtype) * s[:, None]).t(),
        (_draw(1, 100), signed(30, 100), _draw(30)),
    )
    cases["bytes that begin anew"] = (
        lambda w, v: (w - v).float() + (w * 2 + v).float() * 256.0 - (v << 3).float(),
        (signed(5, 77), signed(5, 77)),
    )
    cases["bytes above zero"] = (
        lambda w, v: (w + v).float() - (w >> 3).float() * 2,
        (byte(5, 77), byte(5, 77)),
    )
    return cases


def safe_softmax_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    hidden = _place_values(
        _draw(5, 300), ((0,), -INF), ((1, 3), NAN), ((2, 5), INF), ((4, 7), -INF)
    )
    cases["safe softmax, a row of minus infinity"] = (
        lambda x: aten._safe_softmax(x, -1),
        (hidden,),
    )
    cases["safe softmax over the first"] = (lambda x: aten._safe_softmax(x, 0), (hidden.t(),))
    lone = _place_values(_draw(3, 20000), ((0,), -INF), ((2, 15000), -INF))
    cases["safe softmax, in a loop"] = (lambda x: aten._safe_softmax(x, -1), (lone,))
    return cases


def team_cases() -> dict[str, Case]:
    """Rows that programs share and read once: longer than a tile, with a last piece that is
    shorter.
    """
    special = _place_values(
        _draw(5, 40000), ((0,), -INF), ((1, 3), NAN), ((2, 39999), INF), ((3, slice(16384)), -INF)
    )
    far = _place_values(_draw(2, 40000, shift=1000.0), ((1, 33000), NAN))
    sizes = torch.tensor([1e-36, 1e-44, 1e30, 3e38, 0.0, 1.0, 1.0])
    extremes = _place_values(
        _draw(7, 33000).clamp(-1, 1) * sizes[:, None], ((5, 7), INF), ((6, 8), NAN), ((6, 9), -0.0)
    )
    return {
        "softmax of a team": (lambda x: x.softmax(-1), (special,)),
        "log_softmax of a team, bf16": (
            lambda x: x.log_softmax(-1),
            (_draw(2, 33000, dtype=BF16, scale=5),),
        ),
        "layer_norm of a team, far from zero": (
            lambda x, w, b: F.layer_norm(x, (40000,), w, b),
            (far, _draw(40000), _draw(40000)),
        ),
        "group_norm of a team": (
            lambda x, w: F.group_norm(x, 2, w),
            (_draw(2, 4, 130, 150), _draw(4)),
        ),
        "L1 norm of a team, whole pieces": (
            lambda x: x / x.abs().mean(1, keepdim=True),
            (_draw(3, 49152),),
        ),
        "L1 norm of a team, of extremes": (
            lambda x: x / x.abs().mean(1, keepdim=True),
            (extremes,),
        ),
        "a team that meets twice": (
            lambda x: (x - x.amax(1, keepdim=True)).square().sum(1, keepdim=True) * x,
            (_draw(2, 35000),),
        ),
        "a team that meets twice, with exponentials of the first time": (
            lambda x: (x.softmax(-1), (x - x.mean(1, keepdim=True)).abs().sum(1)),
            (_draw(2, 35000),),
        ),
        "a team of integers": (
            lambda x: x - x.amax(1, keepdim=True),
            ((_draw(2, 35000) * 1e6).long(),),
        ),
        "a team with results of rows": (
            lambda x, w, b: aten.native_layer_norm(x, (33001,), w, b, 1e-5),
            (_draw(3, 33001, shift=1.0), _draw(33001), _draw(33001)),
        ),
        "group_norm, each tile within a channel": (
            lambda x, w, b: F.group_norm(x, 2, w, b),
            (_draw(2, 10, 64, 128, shift=2.0), _draw(10), _draw(10)),
        ),
    }


def all_cases() -> dict[str, Case]:
    """Every case; the same numbers each time."""
    _generator.manual_seed(7)
    families = (
        softmax_cases()
        | norm_cases()
        | reduction_cases()
        | scan_cases()
        | loss_cases()
        | pooling_cases()
    )
    return (
        families
        | elementwise_cases()
        | rotary_cases()
        | bessel_cases()
        | few_bits_cases()
        | backward_cases()
        | safe_softmax_cases()
        | team_cases()
    )
