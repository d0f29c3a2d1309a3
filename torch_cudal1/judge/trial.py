"""One candidate on trial: its child, the input sets drawn for it, and what the reference yields on them.

Seeds are drawn here from the operating system, inputs, reference and float64 results are made in this process; the child is handed
inputs only. It holds evidence and judges none of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch

from torch_cudal1.errors import SandboxError
from torch_cudal1.judge import rights
from torch_cudal1.judge.analysis import Facts
from torch_cudal1.judge.channel import load_tensors, save_tensors
from torch_cudal1.judge.inputs import clone_strided, make_inputs, unproven_integers
from torch_cudal1.judge.oracle import Infeasible, exact_outputs
from torch_cudal1.judge.properties import describe
from torch_cudal1.judge.sandbox import CandidateFailure, Child
from torch_cudal1.judge.transport import write_payloads
from torch_cudal1.program.execute import Runner, prepare
from torch_cudal1.program.model import Program
from torch_cudal1.records import Candidate, Contract, Region, Schedule

__all__ = ["Book", "Outputs", "ReferenceFailure", "Result", "Sample", "Trial"]

Outputs = list[torch.Tensor | None]


class ReferenceFailure(SandboxError):
    """Eager itself could not run the region on inputs made for it."""


@dataclass(frozen=True)
class Result:
    """What the candidate answered on a sample."""

    outputs: Outputs
    facts: list[dict[str, Any] | None]


@dataclass
class Sample:
    """One input set: the tensors in this process, and the reference's outputs (computed when first asked for).

    `kept`: every candidate of the region meets this set, so what was computed for one stays for the next.
    """

    name: str
    distribution: str
    inputs: list[torch.Tensor]
    eager: Callable[[Sequence[torch.Tensor]], Result] = field(repr=False)
    oracle: Callable[[Sequence[torch.Tensor]], Outputs | Infeasible] = field(repr=False)
    kept: bool = False

    @cached_property
    def reference(self) -> Result:
        """Eager's outputs and their properties. Raises ReferenceFailure when eager refuses the inputs."""
        return self.eager(self.inputs)

    @cached_property
    def exact(self) -> Outputs | Infeasible:
        """The float64 outputs."""
        return self.oracle(self.inputs)

    def exact_at(self, position: int) -> torch.Tensor | None:
        """The float64 value of one output, None where there is none."""
        return None if isinstance(self.exact, Infeasible) else self.exact[position]

    def forget_exact(self) -> None:
        """Free the float64 outputs, unless another candidate will need them."""
        if not self.kept:
            self.__dict__.pop("exact", None)


Book: TypeAlias = dict[tuple[str, str, int], Sample]  # (region key, distribution, n-th of it)
_KEPT_BYTES = 1 << 30  # larger input sets are drawn anew for each candidate


@dataclass
class Trial:
    """`profile` and `contract` say how; `child` runs the candidate, which sits in slot "candidate"."""

    region: Region
    candidate: Candidate
    contract: Contract
    device: torch.device
    facts: Facts
    child: Child
    examples: Sequence[torch.Tensor] | None = None
    samples: dict[str, Sample] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    references: set[Schedule] = field(default_factory=set)
    book: Book = field(default_factory=dict)

    def draw(self, distribution: str) -> Sample:
        """An input set under a secret seed, or the user's own examples ("examples"); the child gets a copy.

        The n-th set of a distribution is the same for every candidate of a region: drawn once, its float64 results computed once.
        """
        count = sum(sample.distribution == distribution for sample in self.samples.values())
        known = self.book.get((self.region.key, distribution, count))
        if known is not None:
            return self._hand_over(known, base="", given=known.inputs)
        sample = self._drawn(distribution)
        if sum(tensor.numel() * tensor.element_size() for tensor in sample.inputs) <= _KEPT_BYTES:
            sample.kept = True
            self.book[self.region.key, distribution, count] = sample
        return self._hand_over(sample, base="", given=sample.inputs)

    def _drawn(self, distribution: str) -> Sample:
        if distribution == "examples":
            assert self.examples is not None
            inputs = [clone_strided(t).to(self.device if t.device.type == self.device.type else t.device) for t in self.examples]
        else:
            seed = secrets.randbits(62)
            inputs = make_inputs(self.region, seed, distribution, self.device, examples=self.examples, facts=self.facts)
        return self._sample(distribution, inputs)

    def _sample(self, what: str, inputs: list[torch.Tensor]) -> Sample:
        return Sample(secrets.token_hex(4), what, inputs, self.eager, self._exact)

    def _exact(self, inputs: Sequence[torch.Tensor]) -> Outputs | Infeasible:
        return exact_outputs(self.region.program, inputs, self.device)

    def variant(self, sample: Sample, position: int, replacement: torch.Tensor, what: str) -> Sample:
        """`sample` with one input replaced."""
        inputs = [replacement if index == position else tensor for index, tensor in enumerate(sample.inputs)]
        given = [replacement if index == position else None for index in range(len(inputs))]
        return self._hand_over(self._sample(what, inputs), base=sample.name, given=given)

    def run(self, sample: Sample, *, hold: bool = False, deadline_s: float | None = None) -> Result:
        """Call the candidate in the child. Raises CandidateFailure."""
        return self.call_slot("candidate", sample.name, hold=hold, deadline_s=deadline_s)

    def load(self, slot: str, candidate: Candidate) -> None:
        """Put a Program under a schedule into a slot of the child. Raises CandidateFailure."""
        self.child.call(
            "load",
            slot=slot,
            program=candidate.program.to_json(),
            payloads=write_payloads(candidate.program, self.child.new_file()),
            schedule=candidate.schedule,
            static=[index for index, role in enumerate(self.region.roles) if role != "input"],
        )

    def reference_in_child(self, schedule: Schedule, sample: Sample) -> Outputs:
        """The reference Program under a schedule, run in the child. Raises CandidateFailure."""
        if schedule not in self.references:
            self.load(f"reference {schedule}", Candidate(self.region.program, schedule, "baseline"))
            self.references.add(schedule)
        return self.call_slot(f"reference {schedule}", sample.name).outputs

    def call_slot(self, slot: str, inputs: str, *, hold: bool = False, deadline_s: float | None = None) -> Result:
        """Call what is in a slot of the child on an input set. Raises CandidateFailure."""
        path = self.child.new_file()
        answer = self.child.call("run", slot=slot, inputs=inputs, path=str(path), hold=hold, deadline_s=deadline_s)
        outputs = self._read(answer, path)
        facts = answer.get("facts")
        if not isinstance(facts, list) or len(facts) != len(outputs):
            raise CandidateFailure("run", "an answer without the properties of its outputs", "protocol")
        return Result(outputs, facts)

    def reread(self, index: int) -> Outputs:
        """Held outputs number `index` as they are now in the child."""
        path = self.child.new_file()
        return self._read(self.child.call("reread", index=index, path=str(path)), path)

    def drop(self, *samples: Sample) -> None:
        """Free input sets here and in the child."""
        self.child.call("drop", names=[sample.name for sample in samples])
        for sample in samples:
            self.samples.pop(sample.name, None)

    def eager(self, inputs: Sequence[torch.Tensor]) -> Result:
        """The reference Program, step by step, under the contract's rights. Raises ReferenceFailure."""
        try:
            self._prove_legal(inputs)
            with rights.under(self.contract), torch.no_grad():
                outputs = self._reference(inputs)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise ReferenceFailure("running eager", f"{type(error).__name__}: {str(error)[:300]}") from error
        return Result(outputs, describe(outputs, inputs))

    @cached_property
    def _reference(self) -> Runner:
        return prepare(self.region.program, self.device)

    def _prove_legal(self, inputs: Sequence[torch.Tensor]) -> None:
        """An index out of range is an exception on the CPU and a dead context on CUDA: try made-up integers on the CPU first."""
        if self.device.type == "cuda" and self.examples is None and unproven_integers(self.region, self.facts):
            host = torch.device("cpu")
            prepare(_on_host(self.region.program), host)([tensor.cpu() for tensor in inputs])

    def _hand_over(self, sample: Sample, *, base: str, given: Sequence[torch.Tensor | None]) -> Sample:
        path = self.child.new_file()
        layout = save_tensors(given, path)
        self.child.call("put", name=sample.name, layout=layout, path=str(path), base=base)
        self.samples[sample.name] = sample
        return sample

    def _read(self, answer: dict[str, Any], path: Any) -> Outputs:
        try:
            outputs = load_tensors(answer.get("layout") or [], path, self.device)
        except SandboxError as error:
            raise CandidateFailure("run", f"unreadable outputs: {error.found}", "protocol") from error
        finally:
            path.unlink(missing_ok=True)
        expected = len(self.region.program.outputs)
        if len(outputs) != expected:
            raise CandidateFailure("run", f"{len(outputs)} outputs, expected {expected}", "fresh_output")
        return outputs


def _on_host(program: Program) -> Program:
    data = program.to_json()
    return Program.from_json(_host_json(data), program.all_payloads())


def _host_json(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: "cpu" if key == "device" and value == "cuda" else _host_json(value) for key, value in data.items()}
    if isinstance(data, list):
        return ["cpu" if item == "cuda" else _host_json(item) for item in data]
    return data
