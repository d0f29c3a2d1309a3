"""Which candidates the search would try for each task, from shapes alone: needs no GPU and runs
nothing.

`find_coverage` lists the kinds of candidates, `plan_products` the kernels for products. A task is
captured on fake tensors and treated as if it were on a GPU. The microseconds are bounds by which
candidates are ordered, not measurements; `plain_us` is what the products take at cuBLAS's measured
fp32 rate. A product that no kernel serves has the reason.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernelbench.loading import import_source, make_fake_module
from benchmarks.kernelbench.tasks import Task
from torch_cudal1 import kernels
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.functional_module import FunctionalModule
from torch_cudal1.graph.fusion.fusible_ops import is_product
from torch_cudal1.graph.fusion.partition import FusionGroup, partition
from torch_cudal1.graph.lower import lower
from torch_cudal1.graph.propose import rewrite_region
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.records import Region
from torch_cudal1.kernels.registry import trace as expressions
from torch_cudal1.kernels.templates.gemm_tiled import read_parts
from torch_cudal1.kernels.templates.gemm_tiles import estimate_s, read_schedule
from torch_cudal1.search.group_kernels import list_proposals
from torch_cudal1.search.space import list_fusion_groups

__all__ = [
    "Coverage",
    "ProductPlan",
    "capture_task",
    "find_coverage",
    "format_coverage",
    "format_plan",
    "plan_products",
]

_CUBLAS_FLOPS_PER_S = 5.1e13  # fp32 on one H200, benchmarks/results/h200-gemm.json
_MAX_SHOWN_PROPOSALS = 3


@dataclass(frozen=True)
class ProductPlan:
    """One kind of product in a task: how often it is there, its sizes, the steps after it,
    proposals (best first) or why none.

    `compile_s` is None where nothing was compiled.
    """

    task: str
    name: str
    count: int
    sizes: str
    tail: tuple[str, ...]
    plain_us: float
    proposals: tuple[tuple[str, float], ...]
    reason: str = ""
    compile_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan as a JSON value."""
        return asdict(self)


def plan_products(task: Task, *, sm: int = 90, compiling: bool = False) -> list[ProductPlan]:
    """The products of a task; one line without sizes where it cannot be captured. `compiling`:
    build each best proposal.
    """
    try:
        return [
            _plan_product(task, groups, sm, compiling)
            for groups in _list_product_groups(_apply_rewrites(capture_task(task)))
        ]
    except Exception as error:  # noqa: BLE001
        # whatever a task's own file raises is why there is no plan for it
        reason = f"not captured: {' '.join(str(error).split())[:160]}"
        return [ProductPlan(task.key, task.name, 0, "", (), 0.0, (), reason)]


def format_plan(planned: Sequence[ProductPlan]) -> str:
    """Lines for a terminal, a product each."""
    lines = []
    for product in planned:
        labels = (
            ", ".join(f"{label} {us:.0f}" for label, us in product.proposals[:_MAX_SHOWN_PROPOSALS])
            or product.reason
        )
        best = (
            f"{product.plain_us / product.proposals[0][1]:4.1f}x" if product.proposals else "    -"
        )
        built = "" if product.compile_s is None else f"; built in {product.compile_s:.1f} s"
        description = f"{product.count} x {product.sizes}" + (
            f" + {' '.join(product.tail)}" if product.tail else ""
        )
        lines.append(
            f"{product.task:6} {product.name[:34]:34} {best} plain {product.plain_us:6.0f} us; {description}; {labels}{built}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Coverage:
    """What a search has for a task beyond baselines: techniques of a rewrite that pays, families of
    kernels by count of fusion groups.

    `left`: why nothing, where there is nothing.
    """

    task: str
    name: str
    rewrites: tuple[str, ...] = ()
    families: tuple[tuple[str, int], ...] = ()
    left: str = ""


def find_coverage(task: Task, *, sm: int = 90, rights: Sequence[str] = ("conv",)) -> Coverage:
    """Which candidates there are, from shapes alone. `rights`: op classes that may use TF32."""
    empty = Coverage(task.key, task.name)
    try:
        region = capture_task(task)
        variant = rewrite_region(region, assume_finite=False)
        groups = list_fusion_groups(region)
    except Exception as error:  # noqa: BLE001  as for `plan_products`
        return replace(empty, left=f"not captured: {' '.join(str(error).split())[:160]}")
    proposals_by_group = {
        group.region.key: list_proposals(group.region, sm, rights) for group in groups
    }
    families = Counter(
        proposals[0].family for proposals in proposals_by_group.values() if proposals
    )
    rewrites = variant.techniques if variant is not None and variant.pays else ()
    reason = (
        ""
        if rewrites or families
        else "; ".join(partition(region, products=True).reasons_left_out)
        or "no kernel for its fusion groups"
    )
    return replace(empty, rewrites=rewrites, families=tuple(sorted(families.items())), left=reason)


def format_coverage(coverages: Sequence[Coverage]) -> str:
    """Lines for a terminal: one a task, then how many tasks have nothing."""
    lines = []
    for coverage in coverages:
        candidates = (
            ", ".join(
                [
                    *(f"{count} x {family}" for family, count in coverage.families),
                    *coverage.rewrites,
                ]
            )
            or f"NOTHING: {coverage.left}"
        )
        lines.append(f"{coverage.task:6} {coverage.name[:40]:40} {candidates}")
    return "\n".join(
        [
            *lines,
            f"{sum(bool(coverage.left) for coverage in coverages)} of {len(coverages)} have nothing beyond baselines",
        ]
    )


def capture_task(task: Task, dtype: torch.dtype | None = None) -> Region:
    """The task's inference graph with CUDA tensors, as a search on a GPU meets it; `dtype` as for
    `TaskSource`. Raises whatever the task's own file raises.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"task_{task.level}_{task.number}.py"
        path.write_text(task.source, encoding="utf-8")
        source = import_source(path, dtype)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            functional = FunctionalModule(
                make_fake_module(source).eval(), tuple(source.inputs()), {}
            )
            (graph,) = trace(functional, functional.tensors).graphs
            region = lower(graph.module, static=graph.static, kind=graph.kind, name=task.key).region
    return replace(region, program=_on_cuda(region.program))


def _apply_rewrites(region: Region) -> Region:
    variant = rewrite_region(region, assume_finite=False)
    return region if variant is None else replace(region, program=variant.program)


def _on_cuda(program: Program) -> Program:
    steps = tuple(
        replace(
            step,
            args=_move_to_cuda(step.args),
            kwargs=tuple((name, _move_to_cuda(value)) for name, value in step.kwargs),
        )
        if isinstance(step, Aten)
        else step
        for step in program.steps
    )
    return replace(
        program, inputs=tuple(replace(spec, device="cuda") for spec in program.inputs), steps=steps
    )


def _move_to_cuda(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cuda")
    return tuple(_move_to_cuda(item) for item in value) if isinstance(value, tuple) else value


def _list_product_groups(region: Region) -> Iterator[list[FusionGroup]]:
    """Fusion groups around matrix products, equal ones together."""
    groups_by_key: dict[str, list[FusionGroup]] = {}
    for group in partition(region, products=True).groups:
        steps = group.region.program.steps
        if any(
            is_product(step)
            and isinstance(step, Aten)
            and step.target != "aten.convolution.default"
            for step in steps
        ):
            groups_by_key.setdefault(group.region.key, []).append(group)
    yield from groups_by_key.values()


def _plan_product(
    task: Task, groups: Sequence[FusionGroup], sm: int, compiling: bool
) -> ProductPlan:
    program = groups[0].region.program
    targets = [
        step.target.removeprefix("aten.").split(".")[0]
        for step in program.steps
        if isinstance(step, Aten)
    ]
    without_sizes = ProductPlan(task.key, task.name, len(groups), "", tuple(targets[1:]), 0.0, ())
    try:
        product = read_parts(expressions(program)).product
    except NotLowerableError as reason:
        return replace(without_sizes, reason=str(reason))
    sizes = f"{f'{product.batch} x ' if product.batch > 1 else ''}{product.m} x {product.n} x {product.k}"
    proposals = kernels.propose(program, sm)
    labels = tuple(
        (_format_config(proposal.config), estimate_s(product, read_schedule(proposal)) * 1e6)
        for proposal in proposals
    )
    planned = replace(
        without_sizes,
        sizes=sizes,
        plain_us=product.flops / _CUBLAS_FLOPS_PER_S * 1e6,
        proposals=labels,
    )
    if not compiling or not proposals:
        return planned
    begin = time.perf_counter()
    try:
        kernels.build(program, proposals[0], sm)
    except (NotLowerableError, ProgramError) as problem:
        return replace(planned, reason=f"does not build: {problem}", proposals=())
    return replace(planned, compile_s=time.perf_counter() - begin)


def _format_config(config: Any) -> str:
    split = f" split {config['split']}" if int(config.get("split", 1)) > 1 else ""
    return f"{config['method']} {config.get('columns', '')}{split}"
