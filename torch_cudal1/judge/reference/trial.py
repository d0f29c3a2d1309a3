"""One candidate on trial: its child, the input sets drawn for it, and what the reference yields on
them.

Seeds are drawn here from the operating system, inputs, reference and float64 results are made in
this process; the child is handed inputs only. It holds evidence and judges none of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.device.gpu_memory import give_back, is_short, kept_bytes
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.ir.records import Candidate, Contract, Schedule
from torch_cudal1.judge.checks.profiles import PROFILES, Profile
from torch_cudal1.judge.reference.analysis import Facts
from torch_cudal1.judge.reference.compare import Comparison
from torch_cudal1.judge.reference.input_cache import (
    ALIGNED_BYTES,
    Residents,
    message_bytes,
    own_bytes,
)
from torch_cudal1.judge.reference.input_set import Book, Sample
from torch_cudal1.judge.reference.inputs import clone_strided, make_inputs
from torch_cudal1.judge.reference.region_reference import Outputs, RegionSubject, Result, Subject
from torch_cudal1.judge.reference.source_reference import PairSubject, SourceCandidate, load_module
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.wire.channel import load_tensors
from torch_cudal1.judge.wire.transport import write_payloads
from torch_cudal1.judge.worker.modules import Way

__all__ = ["Trial"]


@dataclass
class Trial:
    """`contract` says how accurate, `profile` how much is tested; `child` runs the candidate, which
    sits in slot `slot`.

    `gradients`: a source must have the reference's gradients too. `state`: name, dtype and shape of
    each tensor that a source's module held when it had been constructed. `proven`: the last right
    outputs of each set, by its name and their position: whoever yields the same bits again is as
    right. `alone`: whether nobody else of ours allocates on the device meanwhile.
    """

    subject: Subject
    candidate: Candidate | SourceCandidate
    contract: Contract
    device: torch.device
    child: Child
    examples: Sequence[torch.Tensor | None] | None = None
    samples: dict[str, Sample] = field(default_factory=dict)
    drawn: dict[str, int] = field(
        default_factory=dict
    )  # sets of each distribution, dropped ones too
    results: dict[str, Result] = field(default_factory=dict)
    proven: dict[tuple[str, int], tuple[torch.Tensor, Comparison]] = field(default_factory=dict)
    references: set[Schedule] = field(default_factory=set)
    book: Book = field(default_factory=dict)
    profile: Profile = PROFILES["fast"]
    slot: str = "candidate"
    gradients: bool = True
    alone: bool = True
    state: list[Any] = field(default_factory=list)
    residents: Residents = field(init=False)

    def __post_init__(self) -> None:
        self.residents = Residents(self.device.type)

    def rounds(self, wanted: int, share: float = 0.1) -> int:
        """How many of the wanted input sets fit into a share of the profile's time; at least one.

        What a set costs is estimated from operations and bytes, so the same is tested on a busy
        machine.
        """
        moved = sum(spec.size_bytes for spec in self.subject.specs)
        flops_per_s, bytes_per_s = (1e13, 1e9) if self.device.type == "cuda" else (1e10, 2e8)
        chain_s = self.facts.chain * (
            1e-5 if self.device.type == "cuda" else 1e-4
        )  # each has to wait for the one before
        cost_s = 2e-3 + self.facts.flops / flops_per_s + moved / bytes_per_s + chain_s
        return max(1, min(wanted, int(share * self.profile.budget_s / cost_s)))

    @property
    def facts(self) -> Facts:
        """What is known about the subject's inputs."""
        return self.subject.facts

    def draw(self, distribution: str) -> Sample:
        """An input set under a secret seed, or the user's own examples ("examples"); the child gets
        a copy.

        The n-th set of a distribution is the same for every candidate of a region: drawn once, its
        float64 results computed once.
        """
        count = self.drawn[distribution] = self.drawn.get(distribution, -1) + 1
        known = self.book.get((self.subject.key, distribution, count))
        if known is not None:
            return self._hand_over(known, base="", given=known.inputs)
        sample = self._drawn(distribution)
        self._remember((self.subject.key, distribution, count), sample)
        return self._hand_over(sample, base="", given=sample.inputs)

    def _remember(self, key: tuple[str, str, int], sample: Sample) -> None:
        """Keep it for the next candidate while there is room: for all that is held, the inputs,
        eager's outputs and twice that.
        """
        held = {id(tensor): tensor for kept in self.book.values() for tensor in kept.tensors()}
        own = {id(tensor): tensor for tensor in sample.inputs if id(tensor) not in held}
        coming = 3 * max(own_bytes(own.values()), self.subject.output_bytes)
        if own_bytes(held.values()) + own_bytes(own.values()) + coming <= kept_bytes(
            self.device.type
        ):
            sample.kept = True
            self.book[key] = sample

    def relieve(self) -> None:
        """`forget`, and give back what this process holds of a GPU and does not use."""
        self.forget()
        give_back(self.device)

    def ease(self) -> None:
        """`relieve` where memory is short for the next call."""
        if is_short(
            self.device,
            max(self.subject.output_bytes, *(spec.size_bytes for spec in self.subject.specs), 0),
        ):
            self.relieve()

    def let_go(self) -> None:
        """Drop all sets where they are large, since nothing will be asked of them again."""
        samples = list(self.samples.values())
        if sum(message_bytes(sample.inputs) for sample in samples) > kept_bytes(self.device.type):
            self.drop(*samples)

    def forget(self) -> None:
        """Free what was computed of a region's sets, where it takes more memory than is worth the
        time to compute it again.
        """
        samples = {id(sample): sample for sample in (*self.samples.values(), *self.book.values())}
        held = {id(tensor): tensor for sample in samples.values() for tensor in sample.tensors()}
        held |= {id(tensor): tensor for tensor, _ in self.proven.values()}
        region = isinstance(self.subject, RegionSubject)  # a module need not answer the same again
        if region and own_bytes(held.values()) > kept_bytes(self.device.type):
            for sample in samples.values():
                sample.forget()
            self.proven.clear()

    def _drawn(self, distribution: str) -> Sample:
        if distribution == "examples":
            assert self.examples is not None
            given = [t for t in self.examples if t is not None]
            inputs = [
                clone_strided(t).to(self.device if t.device.type == self.device.type else t.device)
                for t in given
            ]
        else:
            seed = secrets.randbits(62)
            inputs = make_inputs(
                self.subject, seed, distribution, self.device, examples=self.examples
            )
        return self._sample(distribution, inputs)

    def _sample(self, what: str, inputs: list[torch.Tensor]) -> Sample:
        return Sample(secrets.token_hex(4), what, inputs, self.subject.eager, self.subject.exact)

    def derive(
        self,
        base: Sample,
        what: str,
        make: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    ) -> Sample:
        """`base` with what `make` yields in place of its inputs (None: as they are), in the same
        memory where nothing changed.

        The set of a name `what` is made once and met by every candidate of the region.
        """
        key = (self.subject.key, f"{base.name} {what}", 0)
        sample = self.book.get(key)
        if sample is None:
            made = make(base.inputs)
            sample = self._sample(
                what,
                [old if new is None else new for old, new in zip(base.inputs, made, strict=True)],
            )
            self._remember(key, sample)
        given = [
            None if new is old else new for old, new in zip(base.inputs, sample.inputs, strict=True)
        ]
        return self._hand_over(sample, base=base.name, given=given)

    def sibling(self, base: Sample, distribution: str = "normal", number: int = 0) -> Sample:
        """New plain inputs for the same parameters and buffers: a living instance of a module is
        met again.
        """

        def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            fresh = make_inputs(
                self.subject,
                secrets.randbits(62),
                distribution,
                self.device,
                examples=self.examples,
            )
            return [
                new if role == "input" else None
                for new, role in zip(fresh, self.subject.roles, strict=True)
            ]

        return self.derive(base, f"sibling {distribution} {number}", make)

    def aside(self, subject: Subject, slot: str, way: Way | None = None) -> Trial:
        """The candidate in another slot, against the same reference in another way or form. Raises
        CandidateFailure.

        `way`: the candidate's, where it is not the reference's.
        """
        shown = zip_longest(self.examples or (), subject.specs)
        fitting = [
            t if t is not None and spec is not None and TensorSpec.of(t) == spec else None
            for t, spec in shown
        ]
        examples = fitting[: len(subject.specs)]
        other = replace(self._unrun(), subject=subject, slot=slot, examples=examples)
        other.load(slot, self.candidate, way)
        return other

    def _unrun(self) -> Trial:
        """The same question, with nothing of what was run."""
        return replace(
            self, samples={}, drawn={}, results={}, proven={}, references=set(), state=[]
        )

    @contextmanager
    def elsewhere(self, child: Child | None = None) -> Iterator[Trial]:
        """The candidate in a new process, or in `child`, which stays its owner's. Raises
        SandboxError, CandidateFailure.
        """
        with nullcontext(child) if child else Child(self.child.limits, self.contract) as fresh:
            other = replace(self._unrun(), child=fresh)
            other.load(other.slot, other.candidate)
            yield other

    def hand(self, sample: Sample) -> Sample:
        """Give a set that another trial drew to this one's child, parameters in memory of their
        own.
        """
        return self._hand_over(sample, base="", given=sample.inputs)

    def changed(
        self, sample: Sample, replacements: Mapping[int, torch.Tensor], what: str
    ) -> Sample:
        """`sample` with some inputs replaced; no other candidate will meet it."""
        inputs = [replacements.get(index, tensor) for index, tensor in enumerate(sample.inputs)]
        given = [replacements.get(index) for index in range(len(inputs))]
        return self._hand_over(self._sample(what, inputs), base=sample.name, given=given)

    def run(self, sample: Sample, *, hold: bool = False, deadline_s: float | None = None) -> Result:
        """Call the candidate in the child. Raises CandidateFailure."""
        self.present(sample)
        return self.call_slot(self.slot, sample.name, hold=hold, deadline_s=deadline_s)

    def load(
        self, slot: str, candidate: Candidate | SourceCandidate, way: Way | None = None
    ) -> None:
        """Put a Program under a schedule, or the module of a source, into a slot of the child.
        Raises CandidateFailure.
        """
        if isinstance(candidate, SourceCandidate):
            assert isinstance(self.subject, PairSubject)  # a source is judged against a source
            form = replace(self.subject.form, entry=candidate.entry)
            self.state = load_module(
                self.child, slot, candidate.text, form, way or self.subject.way
            )
            return
        self.child.call(
            "load",
            slot=slot,
            program=candidate.program.to_json(),
            payloads=write_payloads(candidate.program, self.child.new_file()),
            schedule=candidate.schedule,
            static=[index for index, role in enumerate(self.subject.roles) if role != "input"],
        )

    def reference_in_child(self, schedule: Schedule, sample: Sample) -> Outputs:
        """The reference Program under a schedule, run in the child. Raises CandidateFailure."""
        if schedule not in self.references:
            assert isinstance(self.subject, RegionSubject)  # only a Program runs under a schedule
            self.load(
                f"reference {schedule}",
                Candidate(self.subject.region.program, schedule, "baseline"),
            )
            self.references.add(schedule)
        self.present(sample)
        return self.call_slot(f"reference {schedule}", sample.name).outputs

    def call_slot(
        self, slot: str, inputs: str, *, hold: bool = False, deadline_s: float | None = None
    ) -> Result:
        """Call what is in a slot of the child on an input set. Raises CandidateFailure."""
        path = self.child.new_file()
        with self.child.room(self._room):
            answer = self.child.call(
                "run", slot=slot, inputs=inputs, path=str(path), hold=hold, deadline_s=deadline_s
            )
            outputs = self._read(answer, path)
        facts = answer.get("facts")
        if not isinstance(facts, list) or len(facts) != len(outputs):
            raise CandidateFailure(
                "run", "an answer without the properties of its outputs", "protocol"
            )
        return Result(outputs, facts, str(answer.get("tree", "")))

    def told(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask the child something about what sits in this trial's slot. Raises CandidateFailure."""
        return self.child.call(verb, slot=self.slot, **fields)

    def fetched(
        self, verb: str, *, slot: str = "", **fields: Any
    ) -> tuple[dict[str, Any], Outputs]:
        """As `told` (or of another slot), for a verb that writes tensors. Raises CandidateFailure."""
        path = self.child.new_file()
        with self.child.room(self._room):
            answer = self.child.call(verb, slot=slot or self.slot, path=str(path), **fields)
            try:
                return answer, load_tensors(answer.get("layout") or [], path, self.device)
            except SandboxError as error:
                raise CandidateFailure(
                    verb, f"unreadable outputs: {error.found}", "protocol"
                ) from error
            finally:
                path.unlink(missing_ok=True)

    def rewrite(self, sample: Sample, values: Sequence[torch.Tensor | None]) -> None:
        """Put other values (None: as they are) into the memory of a set in the child; here the set
        stays as it was.
        """
        with self.child.room(message_bytes(values)):
            path, layout = self.child.message(values)
            self.child.call("rewrite", name=sample.name, layout=layout, path=str(path))
        path.unlink(missing_ok=True)

    def reread(self, index: int) -> Outputs:
        """Held outputs number `index` as they are now in the child."""
        path = self.child.new_file()
        with self.child.room(self._room):
            return self._read(self.child.call("reread", index=index, path=str(path)), path)

    def changed_inputs(self, sample: Sample) -> list[int] | None:
        """Positions of the inputs of a set that are no longer in the child what they were; None for
        an answer that is none.
        """
        told: Any = self.child.call("unchanged", name=sample.name, slot="candidate").get(
            "changed", ""
        )
        if told is None:
            with self.child.room(message_bytes(sample.inputs)):
                path, layout = self.child.message(sample.inputs)
                answer = self.child.call(
                    "unchanged", name=sample.name, slot="candidate", layout=layout, path=str(path)
                )
                told = answer.get("changed")
            path.unlink(missing_ok=True)
        return told if isinstance(told, list) else None

    def present(self, *samples: Sample) -> None:
        """Have the child hold these sets, all at once: what it let go of is handed over again.
        Raises CandidateFailure.
        """
        together = [sample.name for sample in samples]
        for sample in samples:
            if not self.residents.meets(sample.name):
                base = self.samples.get(self.residents.bases.get(sample.name, ""))
                shared = base.inputs if base is not None else [None] * len(sample.inputs)
                given = [
                    None if new is old else new
                    for new, old in zip(sample.inputs, shared, strict=True)
                ]
                self._hand_over(
                    sample, base=base.name if base is not None else "", given=given, beside=together
                )

    def drop(self, *samples: Sample) -> None:
        """Free input sets here and in the child, there with the next request where they are small."""
        held = sum(message_bytes(sample.inputs) for sample in samples) + self.subject.output_bytes
        self.child.drop([sample.name for sample in samples], held)
        for sample in samples:
            self.residents.forget(sample.name)
            self._lose(sample.name)

    def _lose(self, name: str) -> None:
        self.samples.pop(name, None)
        for position in range(len(self.subject.outputs)):
            self.proven.pop((name, position), None)

    def _hand_over(
        self,
        sample: Sample,
        *,
        base: str,
        given: Sequence[torch.Tensor | None],
        beside: Sequence[str] = (),
    ) -> Sample:
        if base and not self.residents.meets(base):
            base, given = "", sample.inputs
        gone = self.residents.admit(
            sample.name, message_bytes(given), base, [*beside, *list(self.samples)[:2]]
        )
        if gone:
            self.child.call("drop", names=gone, held=True)
            for name in gone:
                self._lose(name)
        with self.child.room(message_bytes(given)):
            self.child.put(sample.name, given, base=base)
        self.samples[sample.name] = sample
        return sample

    @property
    def _room(self) -> int:
        """What a message with the results of a call takes, as far as that is known."""
        return self.subject.output_bytes + ALIGNED_BYTES * len(self.subject.outputs)

    def _read(self, answer: dict[str, Any], path: Any) -> Outputs:
        try:
            outputs = load_tensors(answer.get("layout") or [], path, self.device)
        except SandboxError as error:
            raise CandidateFailure(
                "run", f"unreadable outputs: {error.found}", "protocol"
            ) from error
        finally:
            path.unlink(missing_ok=True)
        expected = len(self.subject.outputs)
        if len(outputs) != expected:
            raise CandidateFailure(
                "run", f"{len(outputs)} outputs, expected {expected}", "fresh_output"
            )
        return outputs
