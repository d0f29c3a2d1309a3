"""What a kernel template is: a value that says what it serves, proposes ways to compute it and
lowers them to kernel sources.

A template's file ends with `TEMPLATE = ...`, a `Template` or for a loop nest the result of
`loop_nest_template.make_template`, and one line of `registry.TEMPLATES` names it. Search, fusion,
the cost model and `docs/kernel-templates.md` read the value; none of them names a family. An
operator that only one template expresses may have its handler in the template's file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.ir.program import Program, TensorSpec
from torch_cudal1.kernels.expr.from_program import TracedProgram
from torch_cudal1.kernels.expr.nodes import Node
from torch_cudal1.kernels.ops.handlers import Handler
from torch_cudal1.kernels.proposal import KernelSource, Proposal

__all__ = [
    "FusionRules",
    "KernelResources",
    "LoweredKernels",
    "ProblemModel",
    "ProposalRequest",
    "Template",
    "TemplateInput",
    "keep_lowerable",
    "target_names",
]

FusionKind: TypeAlias = Literal["elementwise", "row", "window", "product", "sequence"]
# Operators whose names begin so are not ATen's.
_LIBRARIES = ("prims.", "cudal1.")


@dataclass(frozen=True)
class LoweredKernels:
    """The kernels in launch order, and the spec of every value they write (outputs and scratch) by
    value number.
    """

    kernels: tuple[KernelSource, ...]
    written: Mapping[int, TensorSpec]


@dataclass(frozen=True)
class ProposalRequest:
    """What proposals are asked for: the compute capability `sm` (90 for sm_90), the op classes that
    may use TF32 ("matmul", "conv"), and how many proposals at most.
    """

    sm: int
    tf32_ops: Collection[str] = ()
    limit: int = 8


@dataclass(frozen=True)
class TemplateInput:
    """A fusion group's reference Program, and its tensor expressions; None for a template that reads
    the Program's step itself.
    """

    program: Program
    expressions: TracedProgram | None = None

    @property
    def trace(self) -> TracedProgram:
        """The expressions. Raises NotLowerableError where the Program was not traced."""
        # A template of whole Programs must not reach for expressions: none were traced for it.
        if self.expressions is None:
            raise NotLowerableError("a Program that was not read as tensor expressions")
        return self.expressions

    @property
    def output_specs(self) -> dict[int, TensorSpec]:
        """The specs of the outputs by value number."""
        return {output.value: output.spec for output in self.trace.outputs}


@dataclass(frozen=True)
class FusionRules:
    """How fusion groups are made around a template's operators (`graph.fusion`).

    `anchors`: operators that are worth a kernel alone; `kind`: what a group around one is
    ("window": operands are read from memory, each element several times). `row_results`: anchors
    that yield one value a row, which a sum may follow. `partial_reads`: anchors that need not read
    every element of their operands.
    """

    kind: FusionKind
    anchors: frozenset[str] = frozenset()
    takes_epilogue: bool = True
    row_results: frozenset[str] = frozenset()
    partial_reads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ProblemModel:
    """What a template tells the cost model: `read` takes the problem (a product, a convolution)
    from the expressions, `sizes` names its numbers, `lower_bound_s` bounds a proposal's seconds, or
    None where this template has no bound of its own for it.
    """

    read: Callable[[TracedProgram], Any]
    sizes: Callable[[Any], Mapping[str, int]]
    lower_bound_s: Callable[[Any, Proposal], float | None]


@dataclass(frozen=True)
class KernelResources:
    """What a proposal's kernel needs, where that is known before it is compiled."""

    shared_bytes: int = 0
    accumulators_per_thread: int = 0


def _estimate_nothing(proposal: Proposal) -> KernelResources:
    return KernelResources()


@dataclass(frozen=True, eq=False)
class Template:
    """A family of kernels.

    `propose` may raise NotLowerableError for a workload it does not serve, `lower` too, and
    ProgramError for a proposal that is nonsense. `handlers` express ATen operators, by name without
    "aten.". A template serves whole Programs of one step (`matches_program`), or expressions: those
    with an operator of its `handlers`, or where `matches_expressions` says so of the families of
    the operators and the output nodes. `is_shortlisted`: several of its kernels are timed side by
    side, since the time of one alone is its time inside a model. `summary`, `architectures` and
    `dtypes` are for `docs/kernel-templates.md`.
    """

    family: str
    summary: str
    architectures: str
    dtypes: str
    propose: Callable[[TemplateInput, ProposalRequest], tuple[Proposal, ...]]
    lower: Callable[[TemplateInput, Proposal], LoweredKernels]
    fusion: FusionRules
    handlers: Mapping[str, Handler] = field(default_factory=lambda: MappingProxyType({}))
    matches_program: Callable[[Program], bool] | None = None
    matches_expressions: Callable[[Collection[str], tuple[Node, ...]], bool] | None = None
    problem: ProblemModel | None = None
    estimate_resources: Callable[[Proposal], KernelResources] = _estimate_nothing
    is_shortlisted: bool = False

    def matches(self, families: Collection[str], nodes: tuple[Node, ...]) -> bool:
        """Whether it serves expressions whose operators are of `families` and yield `nodes`."""
        if self.matches_expressions is not None:
            return self.matches_expressions(families, nodes)
        return self.family in families

    @property
    def operators(self) -> frozenset[str]:
        """The operators it has an expression for, as a Program's steps name them."""
        return target_names(self.handlers)


def target_names(names: Iterable[str]) -> frozenset[str]:
    """Operators as a Program's steps name them, of the names without "aten."."""
    # Prims and the package's own operators have their namespace in the name already.
    return frozenset(name if name.startswith(_LIBRARIES) else f"aten.{name}" for name in names)


def keep_lowerable(
    lower: Callable[[TemplateInput, Proposal], LoweredKernels],
    workload: TemplateInput,
    proposals: Iterable[Proposal],
) -> tuple[Proposal, ...]:
    """The proposals that can be lowered: some need fp32 outputs, or operators with a C++ form."""
    return tuple(proposal for proposal in proposals if _is_lowerable(lower, workload, proposal))


def _is_lowerable(
    lower: Callable[[TemplateInput, Proposal], LoweredKernels],
    workload: TemplateInput,
    proposal: Proposal,
) -> bool:
    try:
        # Lowering is cheap beside compiling: a proposal that cannot be lowered would take the place
        # of one that can.
        lower(workload, proposal)
    except NotLowerableError:
        return False
    return True
