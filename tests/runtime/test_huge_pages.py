"""Large CPU results of our calls lie in huge pages; whatever is allocated outside of them does not,
and all memory goes back.
"""

from __future__ import annotations

import mmap
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from torch_cudal1.core import native
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.runtime import runner
from torch_cudal1.runtime.executor import prepare
from torch_cudal1.runtime.huge_pages import use_huge_pages

CPU = torch.device("cpu")
LARGE = 9 << 20  # elements of float32: 36 MiB
SMALL = 1 << 20


def is_advised(address: int) -> bool:
    """Whether the kernel was advised to use huge pages at `address`: the flag `hg` of its mapping."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise ValueError(f"no flags of a mapping around {address:#x}")


def is_middle_advised(tensor: torch.Tensor) -> bool:
    return is_advised(tensor.data_ptr() + tensor.numel() * tensor.element_size() // 2)


def has_kernel_advice() -> bool:
    area = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
        return is_middle_advised(torch.frombuffer(area, dtype=torch.uint8))
    except (OSError, ValueError):
        return False


pytestmark = [
    pytest.mark.skipif(native.extension() is None, reason=f"no extension: {native.status()[1]}"),
    pytest.mark.skipif(
        not has_kernel_advice(), reason="this kernel has no huge pages, or does not tell of them"
    ),
]


def doubling(elements: int) -> Program:
    spec = TensorSpec.of(torch.empty(elements))
    return Program((spec,), (Aten("aten.mul.Tensor", (Value(0), 2.0), (), (1,), False),), (1,))


def allocate(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return [torch.empty_like(inputs[0])]


def get_only_result(results: Sequence[torch.Tensor | None]) -> torch.Tensor:
    (result,) = results
    assert result is not None
    return result


def test_results_of_both_schedules_lie_in_huge_pages() -> None:
    large_input = torch.ones(LARGE)
    for name in ("eager", "inductor"):
        result = get_only_result(runner.build_runner(doubling(LARGE), name, CPU)([large_input]))
        assert is_middle_advised(result), name
        assert result[0] == result[-1] == 2.0


def test_a_result_that_the_c_library_may_keep_is_left_alone() -> None:
    # An advice would stay on memory that later holds something of the user's.
    assert not is_middle_advised(
        get_only_result(prepare(doubling(SMALL), CPU)([torch.ones(SMALL)]))
    )


@pytest.mark.parametrize(
    "allocate_in_plan",
    [prepare(doubling(LARGE), CPU), use_huge_pages(allocate)],
    ids=["plan", "wrapped"],
)
def test_what_the_user_allocates_is_left_alone(
    allocate_in_plan: Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]],
) -> None:
    allocate_in_plan([torch.ones(LARGE)])
    assert not is_middle_advised(torch.empty(LARGE))


def test_a_call_that_raises_ends_the_advice() -> None:
    def fail(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        raise ValueError("no result")

    with pytest.raises(ValueError, match="no result"):
        use_huge_pages(fail)([])
    assert not is_middle_advised(torch.empty(LARGE))


def test_a_plan_inside_of_a_call_does_not_end_its_advice() -> None:
    plan = prepare(doubling(SMALL), CPU)

    def call_plan(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        plan(inputs)
        return [torch.empty(LARGE)]

    assert is_middle_advised(get_only_result(use_huge_pages(call_plan)([torch.ones(SMALL)])))


def test_other_threads_are_left_alone() -> None:
    answers = []

    def elsewhere(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        thread = threading.Thread(
            target=lambda: answers.append(is_middle_advised(torch.empty(LARGE)))
        )
        thread.start()
        thread.join()
        return allocate(inputs)

    assert is_middle_advised(get_only_result(use_huge_pages(elsewhere)([torch.ones(LARGE)])))
    assert answers == [False]


def test_held_results_stay_and_memory_goes_back() -> None:
    plan, before = prepare(doubling(LARGE), CPU), resident_bytes()
    kept_results = [get_only_result(plan([torch.full((LARGE,), float(turn))])) for turn in range(3)]
    for _ in range(10):
        plan([torch.ones(LARGE)])
    assert [(float(result.min()), float(result.max())) for result in kept_results] == [
        (0.0, 0.0),
        (2.0, 2.0),
        (4.0, 4.0),
    ]
    assert (
        resident_bytes() - before < 4 * 4 * LARGE
    )  # three results, and nothing of the ten that were let go
    del kept_results
    assert resident_bytes() - before < 4 * LARGE


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_a_storage_is_resized_and_copied_as_ever() -> None:
    # It remembers the allocator that it came from, and asks that one again.
    result = get_only_result(prepare(doubling(LARGE), CPU)([torch.ones(LARGE)]))
    lazily = torch._lazy_clone(result)
    result.add_(1.0)
    assert (float(lazily[0]), float(result[0])) == (2.0, 3.0)
    result.untyped_storage().resize_(8 * LARGE)
    assert float(result[-1]) == 3.0
    assert result.untyped_storage().nbytes() == 8 * LARGE
