"""Which candidates the search would try for each task, from shapes alone: needs no GPU and runs
nothing.

`covered` tells the kinds of candidates, `plan` the kernels for products. A task is captured on fake
tensors and looked at as if it were on a GPU. `us` are bounds by which candidates are ordered, not
measurements; `plain` is what the products take at cuBLAS's measured fp32 rate. A product that no
kernel serves says why.
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

from benchmarks.kernelbench.loading import fake_module, import_source
from benchmarks.kernelbench.tasks import Task
from torch_cudal1 import kernels
from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.graph.capture import trace
from torch_cudal1.graph.functional_module import FunctionalModule
from torch_cudal1.graph.fusion.partition import FusionGroup, is_product, partition
from torch_cudal1.graph.lower import lower
from torch_cudal1.graph.propose import rewrite_region
from torch_cudal1.ir.program import Aten, Program
from torch_cudal1.ir.records import Region
from torch_cudal1.kernels.registry import trace as expressions
from torch_cudal1.kernels.templates.gemm_tiled import read_parts
from torch_cudal1.kernels.templates.gemm_tiles import estimate_s, read_schedule
from torch_cudal1.search.group_kernels import list_proposals
from torch_cudal1.search.space import list_fusion_groups

__all__ = ["Covered", "Planned", "captured", "coverage_table", "covered", "plan", "table"]

_CUBLAS_FLOPS_PER_S = 5.1e13  # fp32 on one H200, benchmarks/results/h200-gemm.json
_SHOWN = 3


@dataclass(frozen=True)
class Planned:
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
        """A JSON value."""
        return asdict(self)


def plan(task: Task, *, sm: int = 90, compiling: bool = False) -> list[Planned]:
    """The products of a task; one line without sizes where it cannot be captured. `compiling`:
    build each best proposal.
    """
    try:
        return [
            _planned(task, islands, sm, compiling) for islands in _products(_tidied(captured(task)))
        ]
    except Exception as error:  # noqa: BLE001  whatever a task's own file raises is why there is no plan for it
        reason = f"not captured: {' '.join(str(error).split())[:160]}"
        return [Planned(task.key, task.name, 0, "", (), 0.0, (), reason)]


def table(planned: Sequence[Planned]) -> str:
    """Lines for a terminal, a product each."""
    lines = []
    for one in planned:
        tried = ", ".join(f"{label} {us:.0f}" for label, us in one.proposals[:_SHOWN]) or one.reason
        best = f"{one.plain_us / one.proposals[0][1]:4.1f}x" if one.proposals else "    -"
        built = "" if one.compile_s is None else f"; built in {one.compile_s:.1f} s"
        what = f"{one.count} x {one.sizes}" + (f" + {' '.join(one.tail)}" if one.tail else "")
        lines.append(
            f"{one.task:6} {one.name[:34]:34} {best} plain {one.plain_us:6.0f} us; {what}; {tried}{built}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Covered:
    """What a search has for a task beyond baselines: techniques of a rewrite that pays, families of
    kernels by count of islands.

    `left`: why nothing, where there is nothing.
    """

    task: str
    name: str
    rewrites: tuple[str, ...] = ()
    families: tuple[tuple[str, int], ...] = ()
    left: str = ""


def covered(task: Task, *, sm: int = 90, rights: Sequence[str] = ("conv",)) -> Covered:
    """Which candidates there are, from shapes alone. `rights`: op classes that may use TF32."""
    first = Covered(task.key, task.name)
    try:
        region = captured(task)
        variant = rewrite_region(region, assume_finite=False)
        islands = list_fusion_groups(region)
    except Exception as error:  # noqa: BLE001  as for `plan`
        return replace(first, left=f"not captured: {' '.join(str(error).split())[:160]}")
    found = {island.region.key: list_proposals(island.region, sm, rights) for island in islands}
    families = Counter(proposals[0].family for proposals in found.values() if proposals)
    rewrites = variant.techniques if variant is not None and variant.pays else ()
    left = (
        ""
        if rewrites or families
        else "; ".join(partition(region, products=True).reasons_left_out)
        or "no kernel for its islands"
    )
    return replace(first, rewrites=rewrites, families=tuple(sorted(families.items())), left=left)


def coverage_table(found: Sequence[Covered]) -> str:
    """Lines for a terminal: each task, then how many have nothing."""
    lines = []
    for one in found:
        what = (
            ", ".join([*(f"{count} x {family}" for family, count in one.families), *one.rewrites])
            or f"NOTHING: {one.left}"
        )
        lines.append(f"{one.task:6} {one.name[:40]:40} {what}")
    return "\n".join(
        [
            *lines,
            f"{sum(bool(one.left) for one in found)} of {len(found)} have nothing beyond baselines",
        ]
    )


def captured(task: Task) -> Region:
    """The task's inference graph with CUDA tensors, as a search on a GPU meets it. Raises whatever
    the task's own file raises.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"task_{task.level}_{task.number}.py"
        path.write_text(task.source, encoding="utf-8")
        made = import_source(path)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            flat = FunctionalModule(fake_module(made).eval(), tuple(made.source.get_inputs()), {})
            (graph,) = trace(flat, flat.tensors).graphs
            region = lower(graph.module, static=graph.static, kind=graph.kind, name=task.key).region
    return replace(region, program=_on_cuda(region.program))


def _tidied(region: Region) -> Region:
    variant = rewrite_region(region, assume_finite=False)
    return region if variant is None else replace(region, program=variant.program)


def _on_cuda(program: Program) -> Program:
    steps = tuple(
        replace(
            step,
            args=_moved(step.args),
            kwargs=tuple((name, _moved(value)) for name, value in step.kwargs),
        )
        if isinstance(step, Aten)
        else step
        for step in program.steps
    )
    return replace(
        program, inputs=tuple(replace(spec, device="cuda") for spec in program.inputs), steps=steps
    )


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cuda")
    return tuple(_moved(item) for item in value) if isinstance(value, tuple) else value


def _products(region: Region) -> Iterator[list[FusionGroup]]:
    """Islands around matrix products, equal ones together."""
    found: dict[str, list[FusionGroup]] = {}
    for island in partition(region, products=True).groups:
        steps = island.region.program.steps
        if any(
            is_product(step)
            and isinstance(step, Aten)
            and step.target != "aten.convolution.default"
            for step in steps
        ):
            found.setdefault(island.region.key, []).append(island)
    yield from found.values()


def _planned(task: Task, islands: Sequence[FusionGroup], sm: int, compiling: bool) -> Planned:
    program = islands[0].region.program
    targets = [
        step.target.removeprefix("aten.").split(".")[0]
        for step in program.steps
        if isinstance(step, Aten)
    ]
    first = Planned(task.key, task.name, len(islands), "", tuple(targets[1:]), 0.0, ())
    try:
        product = read_parts(expressions(program)).product
    except NotLowerableError as reason:
        return replace(first, reason=str(reason))
    sizes = f"{f'{product.batch} x ' if product.batch > 1 else ''}{product.m} x {product.n} x {product.k}"
    proposals = kernels.propose(program, sm)
    labels = tuple(
        (_label(one.config), estimate_s(product, read_schedule(one)) * 1e6) for one in proposals
    )
    told = replace(
        first, sizes=sizes, plain_us=product.flops / _CUBLAS_FLOPS_PER_S * 1e6, proposals=labels
    )
    if not compiling or not proposals:
        return told
    begin = time.perf_counter()
    try:
        kernels.build(program, proposals[0], sm)
    except (NotLowerableError, ProgramError) as problem:
        return replace(told, reason=f"does not build: {problem}", proposals=())
    return replace(told, compile_s=time.perf_counter() - begin)


def _label(config: Any) -> str:
    split = f" split {config['split']}" if int(config.get("split", 1)) > 1 else ""
    return f"{config['method']} {config.get('columns', '')}{split}"
