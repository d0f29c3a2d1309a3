"""Asks a child for the Program of a published source, and fits it to the region of its reference.

The child has run the source, so all it says is checked: the Program by its rules, each input by
where it comes from. Whether the Program is right is for the judge to say; a child that lies about
it gains nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_cudal1.core.errors import ProgramError, SandboxError
from torch_cudal1.graph.fusion.partition import with_inputs
from torch_cudal1.ir.ops import attention_names
from torch_cudal1.ir.program import Aten, Call, Program
from torch_cudal1.ir.records import Region, Role
from torch_cudal1.judge.checks.static.contract import is_allowed
from torch_cudal1.judge.checks.static.triage import findings
from torch_cudal1.judge.evaluate.source_evaluator import PairJob
from torch_cudal1.judge.reference.region_reference import ReferenceFailure
from torch_cudal1.judge.reference.source_reference import read_reference
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child, limits_for
from torch_cudal1.judge.wire.channel import save_tensors
from torch_cudal1.judge.wire.transport import read_program
from torch_cudal1.judge.worker.modules import CallForm

__all__ = ["NotLowerable", "Reference", "lowered", "reference_of"]

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
class NotLowerable:
    """No Program can be had, and why."""

    reason: str


@dataclass(frozen=True)
class Reference:
    """A reference's region, and what a candidate needs to be traced beside it.

    `sources[i]`: the parameter, buffer or argument that the region's input i is; `examples` are all
    tensors in the order of `form`.
    """

    text: str
    region: Region
    sources: tuple[str | int, ...]
    form: CallForm
    examples: tuple[torch.Tensor, ...] = field(repr=False)
    same: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str | int, ...] = ()

    def inputs(self) -> tuple[torch.Tensor, ...] | None:
        """The examples in the order of the region's inputs; None where one of those is a buffer
        that is not part of the state.
        """
        count = len(self.form.names)
        known: dict[str | int, torch.Tensor] = dict(
            zip(self.form.names, self.examples, strict=False)
        )
        known |= dict(enumerate(self.examples[count:]))
        found = [known.get(source) for source in self.sources]
        return (
            None
            if any(tensor is None for tensor in found)
            else tuple(t for t in found if t is not None)
        )


@dataclass(frozen=True)
class _Answer:
    program: Program
    sources: tuple[str | int, ...]
    roles: tuple[Role, ...]
    same: Mapping[str, str]
    writes: tuple[str | int, ...]
    name: str


def reference_of(text: str, job: PairJob) -> Reference | NotLowerable:
    """The region of a reference's module in eval mode, captured in a process of its own.

    Raises ReferenceFailure for a reference that cannot be used, another SandboxError if no child
    can be had here.
    """
    with _child(job) as child:
        try:
            subject, examples = read_reference(child, text, job.device)
        except SandboxError as error:
            raise ReferenceFailure(error.stage, error.found) from error
        found = _asked(child, text, subject.form, examples, reference=True)
    if isinstance(found, NotLowerable):
        return NotLowerable(f"the reference: {found.reason}")
    said = {step.target for step in _aten(found.program)} - ALSO_IN_REFERENCES
    if strange := next((target for target in sorted(said) if not is_allowed(target)), None):
        return NotLowerable(
            f"the reference: {strange} is not on the list of operators that anybody may say in this process"
        )
    region = Region(found.program, found.roles, name=found.name)
    return Reference(
        text, region, found.sources, subject.form, tuple(examples), found.same, found.writes
    )


def lowered(text: str, entry: str, reference: Reference, job: PairJob) -> Program | NotLowerable:
    """A candidate's Program with the inputs of the reference's region. Raises SandboxError if no
    child can be had here.
    """
    with _child(job) as child:
        found = _asked(
            child, text, replace(reference.form, entry=entry), reference.examples, reference=False
        )
    if isinstance(found, NotLowerable):
        built = next((one for one in findings(text) if one.rule == "extension"), None)
        hint = (
            f"it builds an extension of its own ({built.what}, line {built.line}): "
            if built
            else ""
        )
        return NotLowerable(hint + found.reason)
    return fitted(found.program, found.sources, found.writes, reference)


def fitted(
    program: Program,
    sources: Sequence[str | int],
    writes: Sequence[str | int],
    reference: Reference,
) -> Program | NotLowerable:
    """`program` with the region's inputs, matched by the names of parameters and buffers and the
    numbers of arguments.
    """

    def known_as(source: str | int) -> str | int:
        return reference.same.get(source, source) if isinstance(source, str) else source

    if [known_as(source) for source in writes] != [known_as(source) for source in reference.writes]:
        return NotLowerable(
            f"a call writes to {_told(writes)}, the reference's to {_told(reference.writes)}"
        )
    places = {known_as(source): place for place, source in enumerate(reference.sources)}
    missing = [source for source in sources if known_as(source) not in places]
    if missing:
        return NotLowerable(f"it reads {_told(missing)}, which the reference's graph does not")
    order = [places[known_as(source)] for source in sources]
    inputs = reference.region.program.inputs
    for source, place, spec in zip(sources, order, program.inputs, strict=True):
        if inputs[place] != spec:
            return NotLowerable(f"{_told([source])} is {spec}, the reference's is {inputs[place]}")
    try:
        return with_inputs(program, order, inputs)
    except (TypeError, KeyError) as error:
        return NotLowerable(f"its steps cannot be given the reference's inputs: {error}")


def _aten(program: Program) -> Iterator[Aten]:
    """The operators of a Program, which the judge's oracle runs here: a functional one can still
    open a file (`from_file`).
    """
    for step in program.steps:
        if isinstance(step, Aten):
            yield step
        elif isinstance(step, Call):
            yield from _aten(step.program)


def _child(job: PairJob) -> Child:
    return Child(limits_for(job.settings, job.device, trust="foreign"), job.contract, worker=WORKER)


def _asked(
    child: Child, text: str, form: CallForm, tensors: Sequence[torch.Tensor], *, reference: bool
) -> _Answer | NotLowerable:
    given, path = child.new_file(), child.new_file()
    layout = save_tensors(tensors, given)
    try:
        what: dict[str, Any] = {"text": text, "form": form.to_json(), "reference": reference}
        answer = child.call("lower", **what, layout=layout, given=str(given), path=str(path))
        return _read(answer, path)
    except CandidateFailure as error:
        return NotLowerable(f"tracing it ended with: {error.found} ({error.detector})")
    except MISREAD as error:
        return NotLowerable(f"tracing it yielded no Program: {type(error).__name__}: {error}")


def _read(answer: Mapping[str, Any], path: Path) -> _Answer | NotLowerable:
    """The child's answer as values. Raises what reading nonsense raises."""
    if "not_lowerable" in answer:
        return NotLowerable(str(answer["not_lowerable"])[:2000])
    program = read_program(answer["program"], [*answer["payloads"][:2], str(path)])
    sources, roles = (
        tuple(map(_source, answer["sources"])),
        tuple(_ROLES[role] for role in answer["roles"]),
    )
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
        tuple(map(_source, answer["writes"])),
        str(answer["name"])[:200],
    )


def _source(data: Any) -> str | int:
    if type(data) not in (str, int):
        raise ValueError(f"a source {data!r}; expected a name or a number")
    return data  # type: ignore[no-any-return]


def _told(sources: Sequence[str | int]) -> str:
    named = [
        f"argument {source + 1}" if isinstance(source, int) else repr(source) for source in sources
    ]
    return ", ".join(named) or "nothing"
