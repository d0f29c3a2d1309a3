"""The operations that programs implement: the text of their references, and the pieces of code that
renderers put into kernels.

Every operation is a function of its inputs, without parameters. A shape is a tuple of sizes, named
by `DIMS` of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_cudal1.core.refusal import Refusal
from torch_cudal1.judge.pool.measured import TrainingTask

__all__ = [
    "DIMS",
    "DTYPES",
    "OPS",
    "Argument",
    "Op",
    "make_task",
    "render_reference",
    "resolve_task",
]

# Products on a GPU are in float16, everything else in float32: `tasks` chooses.
DTYPES = {"float32": "f32", "float16": "f16"}
DIMS: Mapping[str, tuple[str, ...]] = {
    "chain": ("R", "C"),
    "row": ("R", "C"),
    "mm": ("M", "N", "K"),
    "diag": ("M", "N"),
    "scan": ("R", "C"),
    "pool": ("B", "C", "L"),
}


@dataclass(frozen=True)
class Argument:
    """An input: its name, its sizes by names of dimensions, and how it is drawn ("randn", "rand",
    or "labels": integers below C).
    """

    name: str
    sizes: tuple[str, ...]
    draw: str = "randn"


@dataclass(frozen=True)
class Op:
    """One operation. `graph`: its operators as a prompt shows them. `expression`: of the arguments,
    in PyTorch.

    `torch_steps`, `triton_steps` (chains): assignments to `v`, which is the first argument at the
    start and may be combined with the others by name. `pieces`: named fragments that the renderers
    of other kinds use.
    """

    name: str
    kind: str
    graph: tuple[str, ...]
    arguments: tuple[Argument, ...]
    expression: str
    torch_steps: tuple[str, ...] = ()
    triton_steps: tuple[str, ...] = ()
    pieces: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(argument.name for argument in self.arguments)


_X, _Y, _COL = Argument("x", ("R", "C")), Argument("y", ("R", "C")), Argument("b", ("C",))

_CHAINS = (
    Op(
        "silu_mul",
        "chain",
        ("sigmoid", "mul", "mul"),
        (_X, _Y),
        "torch.nn.functional.silu(x) * y",
        ("v = v * torch.sigmoid(v)", "v = v * y"),
        # libdevice's functions are as exact as CUDA's own, which eager uses; `tl.exp` is an
        # approximation (ex2.approx).
        ("v = v / (1.0 + libdevice.exp(-v))", "v = v * y"),
    ),
    Op(
        "scale_gelu_add",
        "chain",
        ("mul", "gelu", "add"),
        (_X, _Y),
        "torch.nn.functional.gelu(x * 1.5) + y",
        ("v = v * 1.5", "v = torch.nn.functional.gelu(v)", "v = v + y"),
        # The exact form with erf, which is PyTorch's default, and not the approximation by tanh.
        ("v = v * 1.5", "v = 0.5 * v * (1.0 + libdevice.erf(v * 0.7071067811865476))", "v = v + y"),
    ),
    Op(
        "bias_relu_scale",
        "chain",
        ("add", "relu", "mul"),
        (_X, _COL),
        "torch.relu(x + b) * 0.75",
        ("v = v + b", "v = torch.relu(v)", "v = v * 0.75"),
        # `tl.maximum` drops NaN by default (IEEE maxNum), `torch.relu` keeps it.
        ("v = v + b", "v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)", "v = v * 0.75"),
    ),
    Op(
        "add_tanh_mul",
        "chain",
        ("add", "tanh", "mul"),
        (_X, _Y),
        "torch.tanh(x + y) * 2.0",
        ("v = v + y", "v = torch.tanh(v)", "v = v * 2.0"),
        ("v = v + y", "v = libdevice.tanh(v)", "v = v * 2.0"),
    ),
    Op(
        "square_sum_sqrt",
        "chain",
        ("mul", "mul", "add", "sqrt"),
        (_X, _Y),
        "torch.sqrt(x * x + y * y + 1.0)",
        ("v = v * v", "v = v + y * y", "v = torch.sqrt(v + 1.0)"),
        # Correctly rounded, as PyTorch's square root; `tl.sqrt` is an approximation.
        ("v = v * v", "v = v + y * y", "v = tl.sqrt_rn(v + 1.0)"),
    ),
    Op(
        "hardswish_add",
        "chain",
        ("hardswish", "add"),
        (_X, _Y),
        "torch.nn.functional.hardswish(x) + y",
        ("v = torch.nn.functional.hardswish(v)", "v = v + y"),
        (
            "v = v * tl.minimum(tl.maximum(v + 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0,"
            " propagate_nan=tl.PropagateNan.ALL) / 6.0",
            "v = v + y",
        ),
    ),
    Op(
        "exp_bias_clamp",
        "chain",
        ("neg", "exp", "add", "relu"),
        (_X, _COL),
        "torch.relu(torch.exp(-x * x) - b)",
        ("v = torch.exp(-v * v)", "v = v - b", "v = torch.relu(v)"),
        (
            "v = libdevice.exp(-v * v)",
            "v = v - b",
            "v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        ),
    ),
    Op(
        "residual_scale",
        "chain",
        ("mul", "add", "mul"),
        (_X, _Y, _COL),
        "(x * b + y) * 0.5",
        ("v = v * b", "v = v + y", "v = v * 0.5"),
        ("v = v * b", "v = v + y", "v = v * 0.5"),
    ),
)
_ROWS = (
    Op("softmax", "row", ("max", "sub", "exp", "sum", "div"), (_X,), "torch.softmax(x, dim=-1)"),
    Op(
        "log_softmax",
        "row",
        ("max", "sub", "exp", "sum", "log", "sub"),
        (_X,),
        "torch.log_softmax(x, dim=-1)",
    ),
    Op(
        "rms_norm",
        "row",
        ("mul", "mean", "rsqrt", "mul", "mul"),
        (_X, _COL),
        "x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5) * b",
    ),
    Op(
        "layer_norm",
        "row",
        ("mean", "sub", "mul", "mean", "rsqrt", "mul", "mul", "add"),
        (_X, _COL, Argument("c", ("C",))),
        "torch.nn.functional.layer_norm(x, (x.shape[-1],), b, c, 1e-5)",
    ),
    Op(
        "l2_normalize",
        "row",
        ("mul", "sum", "sqrt", "div"),
        (_X,),
        "x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)",
    ),
    Op(
        "cross_entropy",
        "row",
        ("max", "sub", "exp", "sum", "log", "gather", "sub"),
        (_X, Argument("t", ("R",), "labels")),
        "torch.nn.functional.cross_entropy(x, t, reduction='none')",
    ),
)
_A, _B = Argument("x", ("M", "K")), Argument("w", ("K", "N"))
_MMS = (
    Op("matmul", "mm", ("mm",), (_A, _B), "torch.matmul(x, w)", pieces={"torch": "", "triton": ""}),
    Op(
        "linear_relu",
        "mm",
        ("mm", "add", "relu"),
        (_A, _B, Argument("b", ("N",))),
        "torch.relu(torch.matmul(x, w) + b)",
        pieces={
            "torch": "torch.relu(v + b)",
            "triton": "tl.maximum(v + b, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        },
    ),
    Op(
        "linear_gelu",
        "mm",
        ("mm", "add", "gelu"),
        (_A, _B, Argument("b", ("N",))),
        "torch.nn.functional.gelu(torch.matmul(x, w) + b)",
        pieces={
            "torch": "torch.nn.functional.gelu(v + b)",
            "triton": "0.5 * (v + b) * (1.0 + libdevice.erf((v + b) * 0.7071067811865476))",
        },
    ),
    Op(
        "matmul_scale_silu",
        "mm",
        ("mm", "mul", "sigmoid", "mul"),
        (_A, _B),
        "torch.nn.functional.silu(torch.matmul(x, w) * 0.5)",
        pieces={
            "torch": "torch.nn.functional.silu(v * 0.5)",
            "triton": "v * 0.5 / (1.0 + libdevice.exp(-0.5 * v))",
        },
    ),
)
_M, _D, _E = Argument("x", ("M", "N")), Argument("d", ("M",)), Argument("e", ("N",))
_DIAGS = (
    Op(
        "diag_left",
        "diag",
        ("diag", "mm"),
        (_D, _M),
        # Task 12 of KernelBench's level 1: a product with a diagonal is a broadcast (the paper
        # reports 64x).
        "torch.matmul(torch.diag(d), x)",
        pieces={"value": "d * x"},
    ),
    Op(
        "diag_right",
        "diag",
        ("mm", "diag"),
        (_M, _E),
        "torch.matmul(x, torch.diag(e))",
        pieces={"value": "x * e"},
    ),
    Op(
        "diag_both",
        "diag",
        ("diag", "mm", "mul"),
        (_D, _M, _E),
        "torch.matmul(torch.diag(d), x) * e",
        pieces={"value": "d * x * e"},
    ),
    Op(
        "tril_scale",
        "diag",
        ("ones", "tril", "mul", "mul"),
        (_M, _E),
        # A matrix of ones and a mask in memory, which a program saves: the triangle follows from
        # indices.
        "torch.tril(torch.ones(x.shape, dtype=x.dtype, device=x.device)) * x * e",
        pieces={"value": "x * e", "lower": "yes"},
    ),
)
_SCANS = (
    Op("cumsum", "scan", ("cumsum",), (_X,), "torch.cumsum(x, dim=-1)", pieces={"value": "x"}),
    Op(
        "reverse_cumsum",
        "scan",
        ("flip", "cumsum", "flip"),
        (_X,),
        # Two copies of the input, which a program saves by reading and writing its rows from the
        # end.
        "torch.flip(torch.cumsum(torch.flip(x, (-1,)), dim=-1), (-1,))",
        pieces={"value": "x", "reverse": "yes"},
    ),
    Op(
        "square_cumsum",
        "scan",
        ("mul", "cumsum"),
        (_X,),
        "torch.cumsum(x * x, dim=-1)",
        pieces={"value": "x * x"},
    ),
)
# All pools are without padding or dilation: windows lie inside their row, so a kernel needs no mask
# for their ends.
_POOLED = (Argument("x", ("B", "C", "L")),)
_POOLS = (
    Op(
        "max_pool1d",
        "pool",
        ("max_pool",),
        _POOLED,
        "torch.nn.functional.max_pool1d(x, 4, 2)",
        pieces={"size": "4", "step": "2"},
    ),
    Op(
        "avg_pool1d",
        "pool",
        ("avg_pool",),
        _POOLED,
        "torch.nn.functional.avg_pool1d(x, 4, 4)",
        pieces={"size": "4", "step": "4"},
    ),
    Op(
        "sum_pool1d",
        "pool",
        ("avg_pool", "mul"),
        _POOLED,
        "torch.nn.functional.avg_pool1d(x, 3, 1) * 3.0",
        pieces={"size": "3", "step": "1"},
    ),
    Op(
        "avg_pool_relu",
        "pool",
        ("avg_pool", "relu"),
        _POOLED,
        "torch.relu(torch.nn.functional.avg_pool1d(x, 8, 8))",
        pieces={"size": "8", "step": "8"},
    ),
)
OPS: Mapping[str, Op] = {
    op.name: op for group in (_CHAINS, _ROWS, _MMS, _DIAGS, _SCANS, _POOLS) for op in group
}


def resolve_task(task: TrainingTask) -> tuple[Op, dict[str, int]] | Refusal:
    """Return the operation of a task and its sizes by name, or a Refusal where the language has no
    words for it.
    """
    op = OPS.get(task.family)
    if op is None:
        return Refusal(
            f"{task.id}: {task.family!r} is no operation of the language; "
            f"expected one of {', '.join(sorted(OPS))}"
        )
    dims = DIMS[op.kind]
    # Sizes become numbers in rendered code, so nonsense is refused here and not by a kernel.
    if len(task.shape) != len(dims) or min(task.shape, default=0) < 1 or task.dtype not in DTYPES:
        return Refusal(
            f"{task.id}: expected sizes {dims} above 0 and a dtype of {sorted(DTYPES)}, "
            f"got {task.shape} and {task.dtype!r}"
        )
    return op, dict(zip(dims, task.shape, strict=True))


def make_task(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TrainingTask:
    """Make the task of an operation at a shape. Raises ValueError for one outside the language."""
    sizes = "x".join(map(str, shape))
    # Resolved before the reference is rendered, which would raise KeyError for an operation that
    # does not exist.
    task = TrainingTask(f"{name}/{sizes}/{DTYPES.get(dtype, dtype)}", "", name, shape, dtype)
    resolved = resolve_task(task)
    if isinstance(resolved, Refusal):
        raise ValueError(resolved.reason)
    return TrainingTask(task.id, render_reference(*resolved, dtype), name, shape, dtype)


def render_reference(op: Op, sizes: Mapping[str, int], dtype: str = "float32") -> str:
    """Render a KernelBench-style module that computes the operation with PyTorch's usual operators."""
    arguments = ", ".join(op.names)
    drawn = ", ".join(_render_input(argument, sizes, dtype) for argument in op.arguments)
    return (
        "import torch\n\n\nclass Model(torch.nn.Module):\n"
        f"    def forward(self, {arguments}):\n        return {op.expression}\n\n\n"
        f"def get_inputs():\n    return [{drawn}]\n\n\ndef get_init_inputs():\n    return []\n"
    )


def _render_input(argument: Argument, sizes: Mapping[str, int], dtype: str) -> str:
    shape = ", ".join(str(sizes[name]) for name in argument.sizes)
    if argument.draw == "labels":
        # Classes below the number of columns: a label beyond them reads outside the row.
        return f"torch.randint(0, {sizes['C']}, ({shape},))"
    cast = "" if dtype == "float32" else f".to(torch.{dtype})"
    return f"torch.{argument.draw}({shape}){cast}"
