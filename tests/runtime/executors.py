"""The two executors side by side: inputs for a Program, what "the same results" means, and calls
from several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torch_cudal1.ir.program import Aten, Call, Program, TensorSpec, Value

__all__ = [
    "MIXED_STEPS",
    "SPEC",
    "TANH",
    "assert_same",
    "bits",
    "compute_mixed_steps",
    "draw_inputs",
    "in_threads",
    "outcome",
]

SPEC = TensorSpec("float32", (6, 6), (6, 1), "cpu")
TANH = Program((SPEC,), (Aten("aten.tanh.default", (Value(0),), (), (1,)),), (1,))
# A constant, a nested Program, a step with several results, and an output that is absent.
MIXED_STEPS = Program(
    (SPEC, SPEC),
    (
        Aten("aten.mm.default", (Value(0), Value(1)), (), (3,)),
        Call(TANH, (3,), (4,)),
        Aten("aten.split.Tensor", (Value(4), 3), (), (5, 6), many=True),
        Aten("aten.cat.default", ((Value(6), Value(5), Value(2)),), (), (7,)),
    ),
    (7, 5, None),
    constants=("c",),
    payloads={"c": torch.full((1, 6), 2.0)},
)


def compute_mixed_steps(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What MIXED_STEPS computes, by eager calls."""
    top, bottom = torch.tanh(x @ y).split(3)
    return torch.cat([bottom, top, torch.full((1, 6), 2.0)]), top


def draw_inputs(program: Program, device: torch.device, integer_bound: int) -> list[torch.Tensor]:
    """Tensors of the Program's specs: numbers in [0, 1), integers below `integer_bound` (they may be
    indices), truth at random.

    Some of PyTorch's kernels take probabilities only, and one that meets anything else on a GPU
    ends the process's use of it.
    """
    return [
        _tensor(spec, torch.device(spec.device) if spec.device == "cpu" else device, integer_bound)
        for spec in program.inputs
    ]


def _tensor(spec: TensorSpec, device: torch.device, integer_bound: int) -> torch.Tensor:
    extent = (
        1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True))
        if spec.numel
        else 0
    )
    dtype = spec.torch_dtype
    if dtype.is_floating_point or dtype.is_complex:
        flat = torch.rand(extent, dtype=dtype if dtype.is_complex else torch.float32).to(dtype)
    else:
        flat = torch.randint(integer_bound, (extent,)).to(dtype)
    return flat.to(device).as_strided(spec.shape, spec.strides)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements in order, on the CPU: equal exactly if the values are, NaN
    included.
    """
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .cpu()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
    )


def assert_same(
    results: Sequence[Any],
    expected_results: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    values: bool = True,
) -> None:
    """Kind, dtype, layout, place, identity with the inputs and (if `values`) every bit of each
    result are the same.
    """
    assert len(results) == len(expected_results)
    for result, expected in zip(results, expected_results, strict=True):
        assert type(result) is type(expected)
        if not isinstance(result, torch.Tensor):
            assert result == expected
            continue
        assert (result.dtype, result.shape, result.stride(), result.device) == (
            expected.dtype,
            expected.shape,
            expected.stride(),
            expected.device,
        )
        assert [result is t for t in inputs] == [expected is t for t in inputs]
        some = [t for t in inputs if t.numel()]
        assert [result.data_ptr() == t.data_ptr() for t in some] == [
            expected.data_ptr() == t.data_ptr() for t in some
        ]
        assert not values or torch.equal(bits(result), bits(expected)), "the values differ"


def outcome(
    run: Callable[[Sequence[torch.Tensor]], list[Any]], inputs: Sequence[torch.Tensor]
) -> list[Any] | type[Exception]:
    """The results of a seeded call without gradients, or the type of what it raised."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            return run(inputs)
    except Exception as error:  # noqa: BLE001  whatever it is, the other executor must raise it too
        return type(error)


def in_threads(work: Callable[[], None], count: int = 4) -> None:
    """`work` in `count` threads at once. What it raises is raised here: a thread of its own would
    swallow it.
    """
    with ThreadPoolExecutor(count) as threads:
        for running in [threads.submit(work) for _ in range(count)]:
            running.result()
