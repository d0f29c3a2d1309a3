"""Asks a child for the Program of a published source, and fits it to the region of its reference.

The child has run the source, so everything in its answer is checked: the Program by its rules, each
input by where it comes from. The judge finds out whether the Program is right; a child that lies
about it gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.core.errors import ProgramError, SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.graph.fusion.partition import rebase_on_inputs
from torch_cudal1.ir.ops import attention_names
from torch_cudal1.ir.program import Aten, Call, Program
from torch_cudal1.ir.records import Region, Role
from torch_cudal1.judge.checks.static.allowed_operators import is_allowed
from torch_cudal1.judge.checks.static.triage import find_suspicious_text
from torch_cudal1.judge.evaluate.source_evaluator import SourceEvaluationConfig
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import read_reference
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, make_limits
from torch_cudal1.judge.wire.call_spec import CallSpec
from torch_cudal1.judge.wire.channel import save_tensors
from torch_cudal1.judge.wire.transport import read_program

__all__ = ["CapturedReference", "capture_reference", "lower_candidate"]

WORKER = "torch_cudal1.ingest.published.source_worker"
# What references are also traced to, and no candidate may say on its own: attention and recurrent
# layers, pure arithmetic all.
ALSO_IN_REFERENCES = frozenset(
    f"aten.{name}.default"
    for name in (
        *attention_names.FORWARDS,
        *attention_names.FORWARDS_ELSEWHERE,
        *("mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    )
)
# What reading an answer that is none can raise.
MISREAD = (
    ProgramError,
    SandboxError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    RecursionError,
)
_ROLES: Mapping[str, Role] = {"parameter": "parameter", "buffer": "buffer", "input": "input"}


@dataclass(frozen=True)
class CapturedReference:
    """A reference's region, and what a candidate needs to be traced beside it.

    `sources[i]`: the parameter, buffer or argument that the region's input i is; `examples` are all
    tensors in the order of `form`.
    """

    text: str
    region: Region
    sources: tuple[str | int, ...]
    form: CallSpec
    examples: tuple[torch.Tensor, ...] = field(repr=False)
    same: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str | int, ...] = ()

    def inputs(self) -> tuple[torch.Tensor, ...] | None:
        """The examples in the order of the region's inputs; None where one of those is a buffer
        that is not part of the state.
        """
        count = len(self.form.names)
        tensors: dict[str | int, torch.Tensor] = dict(
            zip(self.form.names, self.examples, strict=False)
        )
        tensors |= dict(enumerate(self.examples[count:]))
        inputs = [tensors.get(source) for source in self.sources]
        return (
            None
            if any(tensor is None for tensor in inputs)
            else tuple(t for t in inputs if t is not None)
        )


@dataclass(frozen=True)
class _Answer:
    program: Program
    sources: tuple[str | int, ...]
    roles: tuple[Role, ...]
    same: Mapping[str, str]
    writes: tuple[str | int, ...]
    name: str


def capture_reference(text: str, job: SourceEvaluationConfig) -> CapturedReference | Refusal:
    """The region of a reference's module in eval mode, captured in a process of its own.

    Raises ReferenceFailure for a reference that cannot be used, another SandboxError if no child
    can be had here.
    """
    with _start_child(job) as child:
        try:
            # In the child: reading a reference runs its `get_inputs`.
            source_reference, examples = read_reference(child, text, job.device)
        except SandboxError as error:
            # Only references run here, so a fault is never the candidate's.
            raise ReferenceFailure(error.stage, error.found) from error
        traced = _lower_in_child(child, text, source_reference.form, examples, reference=True)
    if isinstance(traced, Refusal):
        return Refusal(f"the reference: {traced.reason}")
    # The judge runs the reference's graph in this process: a functional operator can still open a
    # file.
    operators = {step.target for step in _iter_aten_steps(traced.program)} - ALSO_IN_REFERENCES
    if forbidden := next((target for target in sorted(operators) if not is_allowed(target)), None):
        return Refusal(
            f"the reference: {forbidden} is not on the list of operators that anybody may say in "
            f"this process"
        )
    region = Region(traced.program, traced.roles, name=traced.name)
    return CapturedReference(
        text,
        region,
        traced.sources,
        source_reference.form,
        tuple(examples),
        traced.same,
        traced.writes,
    )


def lower_candidate(
    text: str, entry: str, reference: CapturedReference, job: SourceEvaluationConfig
) -> Program | Refusal:
    """A candidate's Program with the inputs of the reference's region. Raises SandboxError if no
    child can be had here.
    """
    with _start_child(job) as child:
        traced = _lower_in_child(
            child, text, replace(reference.form, entry=entry), reference.examples, reference=False
        )
    if isinstance(traced, Refusal):
        # A source that compiles its own extension fails somewhere in tracing: the cause is put in
        # front.
        extension = next(
            (finding for finding in find_suspicious_text(text) if finding.rule == "extension"), None
        )
        hint = (
            f"it builds an extension of its own ({extension.text}, line {extension.line}): "
            if extension
            else ""
        )
        return Refusal(hint + traced.reason)
    return fit_to_reference(traced.program, traced.sources, traced.writes, reference)


def fit_to_reference(
    program: Program,
    sources: Sequence[str | int],
    writes: Sequence[str | int],
    reference: CapturedReference,
) -> Program | Refusal:
    """`program` with the region's inputs, matched by the names of parameters and buffers and the
    numbers of arguments.
    """

    def canonical_source(source: str | int) -> str | int:
        # A tied parameter has two names, and the candidate may read the other one.
        return reference.same.get(source, source) if isinstance(source, str) else source

    # A buffer that only one of the two updates would drift from the module's own with every call.
    if [canonical_source(source) for source in writes] != [
        canonical_source(source) for source in reference.writes
    ]:
        return Refusal(
            f"a call writes to {_name_sources(writes)}, the reference's to "
            f"{_name_sources(reference.writes)}"
        )
    positions = {
        canonical_source(source): position for position, source in enumerate(reference.sources)
    }
    missing = [source for source in sources if canonical_source(source) not in positions]
    # The region has no input that could carry such a tensor.
    if missing:
        return Refusal(f"it reads {_name_sources(missing)}, which the reference's graph does not")
    # By source and not by position: a candidate may hold its parameters in another order.
    order = [positions[canonical_source(source)] for source in sources]
    inputs = reference.region.program.inputs
    for source, position, spec in zip(sources, order, program.inputs, strict=True):
        # The child says what its inputs are; a Program for other shapes would read beyond the
        # tensors.
        if inputs[position] != spec:
            return Refusal(
                f"{_name_sources([source])} is {spec}, the reference's is {inputs[position]}"
            )
    try:
        return rebase_on_inputs(program, order, inputs)
    except (TypeError, KeyError) as error:
        return Refusal(f"its steps cannot be given the reference's inputs: {error}")


def _iter_aten_steps(program: Program) -> Iterator[Aten]:
    """The operators of a Program, which the judge's oracle runs here: a functional one can still
    open a file (`from_file`).
    """
    for step in program.steps:
        if isinstance(step, Aten):
            yield step
        elif isinstance(step, Call):
            # A nested Program runs too, so its operators are checked too.
            yield from _iter_aten_steps(step.program)


def _start_child(job: SourceEvaluationConfig) -> Child:
    return Child(
        make_limits(job.settings, job.device, trust="foreign"), job.contract, worker=WORKER
    )


def _lower_in_child(
    child: Child, text: str, form: CallSpec, tensors: Sequence[torch.Tensor], *, reference: bool
) -> _Answer | Refusal:
    given_file, payload_file = child.reserve_file(), child.reserve_file()
    layout = save_tensors(tensors, given_file)
    try:
        request: dict[str, Any] = {"text": text, "form": form.to_json(), "reference": reference}
        answer = child.call(
            "lower", **request, layout=layout, given=str(given_file), path=str(payload_file)
        )
        return _read(answer, payload_file)
    except CandidateFailure as error:
        # The source crashed or broke a limit in its own process, which is a reason and no fault of
        # this one.
        return Refusal(f"tracing it ended with: {error.found} ({error.detector})")
    except MISREAD as error:
        return Refusal(f"tracing it yielded no Program: {type(error).__name__}: {error}")


def _read(answer: Mapping[str, Any], path: Path) -> _Answer | Refusal:
    """The child's answer as values. Raises what reading nonsense raises."""
    if "not_lowerable" in answer:
        # Cut, because the text comes from a process that runs foreign code.
        return Refusal(str(answer["not_lowerable"])[:2000])
    # The source ran in the child, so the answer is read by the rules of any Program from outside.
    program = read_program(answer["program"], [*answer["payloads"][:2], str(path)])
    sources, roles = (
        tuple(map(_check_source, answer["sources"])),
        tuple(_ROLES[role] for role in answer["roles"]),
    )
    # The three are one list by position, and the child may answer anything.
    if not len(sources) == len(roles) == len(program.inputs):
        raise ValueError(
            f"{len(sources)} sources and {len(roles)} roles for {len(program.inputs)} inputs"
        )
    same = {str(name): str(other) for name, other in answer["same"].items()}
    return _Answer(
        program,
        sources,
        roles,
        same,
        tuple(map(_check_source, answer["writes"])),
        str(answer["name"])[:200],
    )


def _check_source(data: Any) -> str | int:
    # `type` and not `isinstance`: `True` is an int in Python and would stand for argument 1.
    if type(data) not in (str, int):
        raise ValueError(f"a source {data!r}; expected a name or a number")
    return data  # type: ignore[no-any-return]


def _name_sources(sources: Sequence[str | int]) -> str:
    named = [
        f"argument {source + 1}" if isinstance(source, int) else repr(source) for source in sources
    ]
    return ", ".join(named) or "nothing"
