"""Calls of a candidate in its own process, and the input sets which that process holds.

The process is handed inputs only and answers with outputs and properties; nothing here weighs them.
`Trial` adds how inputs are drawn and what the reference yields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.ir.records import Candidate, Contract
from torch_cudal1.ir.schedule import Schedule
from torch_cudal1.judge.reference.compare import Comparison
from torch_cudal1.judge.reference.input_cache import InputCache
from torch_cudal1.judge.reference.input_set import InputSet
from torch_cudal1.judge.reference.region_reference import (
    Outputs,
    Reference,
    RegionReference,
    Result,
)
from torch_cudal1.judge.reference.source_reference import (
    SourceCandidate,
    SourceReference,
    load_module,
)
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.wire.arena import ALIGNMENT_BYTES
from torch_cudal1.judge.wire.call_spec import RunMode
from torch_cudal1.judge.wire.channel import load_tensors, message_bytes
from torch_cudal1.judge.wire.tensor_bits import same_storage
from torch_cudal1.judge.wire.transport import write_payloads

__all__ = ["CandidateCalls"]


@dataclass
class CandidateCalls:
    """A candidate in slot `slot` of a child process.

    `samples`: the input sets that were handed over, by name. `state`: name, dtype and shape of each
    tensor that a source's module held when it had been constructed. `references`: the schedules
    under which the reference Program was loaded beside it. `accepted_outputs`: the last right
    outputs of each set, by its name and their position: a call that yields the same bits again is
    as right.
    """

    reference: Reference
    candidate: Candidate | SourceCandidate
    contract: Contract
    device: torch.device
    child: Child
    examples: Sequence[torch.Tensor | None] | None = None
    samples: dict[str, InputSet] = field(default_factory=dict)
    slot: str = "candidate"
    state: list[Any] = field(default_factory=list)
    references: set[Schedule] = field(default_factory=set)
    accepted_outputs: dict[tuple[str, int], tuple[torch.Tensor, Comparison]] = field(
        default_factory=dict
    )
    input_cache: InputCache = field(init=False)
    # positions of the inputs that a set brought along, by its name: others are its base's
    handed: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.input_cache = InputCache(self.device.type)
        self.handed = {}

    def run(
        self, sample: InputSet, *, hold: bool = False, deadline_s: float | None = None
    ) -> Result:
        """Call the candidate in the child. Raises CandidateFailure."""
        self.ensure_present(sample)
        return self.call_slot(self.slot, sample.name, hold=hold, deadline_s=deadline_s)

    def load(
        self, slot: str, candidate: Candidate | SourceCandidate, way: RunMode | None = None
    ) -> None:
        """Put a Program under a schedule, or the module of a source, into a slot of the child.
        Raises CandidateFailure.
        """
        if isinstance(candidate, SourceCandidate):
            assert isinstance(
                self.reference, SourceReference
            )  # a source is judged against a source
            form = replace(self.reference.form, entry=candidate.entry)
            self.state = load_module(
                self.child, slot, candidate.text, form, way or self.reference.way
            )
            return
        self.child.call(
            "load",
            slot=slot,
            program=candidate.program.to_json(),
            payloads=write_payloads(candidate.program, self.child.reserve_file()),
            schedule=candidate.schedule,
            # Parameters and buffers: a schedule may keep what it derives from these between calls.
            static=[index for index, role in enumerate(self.reference.roles) if role != "input"],
        )

    def run_reference_in_child(self, schedule: Schedule, sample: InputSet) -> Outputs:
        """The reference Program under a schedule, run in the child. Raises CandidateFailure."""
        if schedule not in self.references:
            assert isinstance(
                self.reference, RegionReference
            )  # only a Program runs under a schedule
            self.load(
                f"reference {schedule}",
                Candidate(self.reference.region.program, schedule, "baseline"),
            )
            self.references.add(schedule)
        self.ensure_present(sample)
        return self.call_slot(f"reference {schedule}", sample.name).outputs

    def call_slot(
        self, slot: str, inputs: str, *, hold: bool = False, deadline_s: float | None = None
    ) -> Result:
        """Call what is in a slot of the child on an input set. Raises CandidateFailure."""
        path = self.child.reserve_file()
        # Results of this size travel through GPU memory that both processes share, where there is
        # room; else through files.
        with self.child.enlarge_arena(self._room):
            answer = self.child.call(
                "run", slot=slot, inputs=inputs, path=str(path), hold=hold, deadline_s=deadline_s
            )
            outputs = self._read(answer, path)
        # Properties tell whether outputs share memory: without them aliasing would go unseen.
        facts = answer.get("facts")
        if not isinstance(facts, list) or len(facts) != len(outputs):
            raise CandidateFailure(
                "run", "an answer without the properties of its outputs", "protocol"
            )
        return Result(outputs, facts, str(answer.get("tree", "")))

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask the child something about what sits in this trial's slot. Raises CandidateFailure."""
        return self.child.call(verb, slot=self.slot, **fields)

    def fetch(self, verb: str, *, slot: str = "", **fields: Any) -> tuple[dict[str, Any], Outputs]:
        """As `ask` (or of another slot), for a verb that writes tensors. Raises CandidateFailure."""
        path = self.child.reserve_file()
        with self.child.enlarge_arena(self._room):
            answer = self.child.call(verb, slot=slot or self.slot, path=str(path), **fields)
            try:
                return answer, load_tensors(answer.get("layout") or [], path, self.device)
            except SandboxError as error:
                raise CandidateFailure(
                    verb, f"unreadable outputs: {error.found}", "protocol"
                ) from error
            finally:
                # Also after a failure: these files are memory of the host.
                path.unlink(missing_ok=True)

    def rewrite(self, sample: InputSet, values: Sequence[torch.Tensor | None]) -> None:
        """Put other values (None: as they are) into the memory of a set in the child; here the set
        stays as it was.
        """
        with self.child.enlarge_arena(message_bytes(values)):
            path, layout = self.child.write_message(values)
            self.child.call("rewrite", name=sample.name, layout=layout, path=str(path))
        path.unlink(missing_ok=True)

    def reread(self, index: int) -> Outputs:
        """Held outputs number `index` as they are now in the child."""
        path = self.child.reserve_file()
        with self.child.enlarge_arena(self._room):
            return self._read(self.child.call("reread", index=index, path=str(path)), path)

    def read_copied(self) -> tuple[int, Outputs]:
        """Of the last timed batch the number of a call, drawn by the child, and its outputs as they
        were when the clock stopped. Raises CandidateFailure.
        """
        answer, outputs = self.fetch("copied")
        if type(answer.get("index")) is not int:
            raise CandidateFailure("timing", "copied outputs without a number", "protocol")
        return answer["index"], outputs

    def find_changed_inputs(self, sample: InputSet, *, parameters: bool = True) -> list[int] | None:
        """Positions of the inputs of a set, with the `parameters` and buffers, that are no longer in
        the child what they were; None for an answer that is none.
        """
        # A set that was derived shares the memory of its base: only what it brought along is its
        # own.
        roles = self.reference.roles
        positions = [i for i in self.handed[sample.name] if parameters or roles[i] == "input"]
        path = self.child.reserve_file()
        with self.child.enlarge_arena(message_bytes(sample.inputs)):
            answer = self.child.call(
                "reread",
                name=sample.name,
                slot=self.slot,
                positions=positions,
                path=str(path),
            )
            try:
                current = load_tensors(answer.get("layout") or [], path, self.device)
            except SandboxError:
                return None
            finally:
                path.unlink(missing_ok=True)
        # Another count is no answer about these inputs.
        if len(current) != len(positions):
            return None
        return [
            index
            for index, tensor in zip(positions, current, strict=True)
            if tensor is None or not same_storage(sample.inputs[index], tensor)
        ]

    def ensure_present(self, *samples: InputSet) -> None:
        """Have the child hold these sets, all at once: sets that were evicted are sent again.
        Raises CandidateFailure.
        """
        together = [sample.name for sample in samples]
        for sample in samples:
            if not self.input_cache.mark_used(sample.name):
                base = self.samples.get(self.input_cache.bases.get(sample.name, ""))
                shared = base.inputs if base is not None else [None] * len(sample.inputs)
                # Only what is new travels: a set of gigabytes with one changed element would be
                # sent again.
                changes = [
                    None if new is old else new
                    for new, old in zip(sample.inputs, shared, strict=True)
                ]
                self._send(
                    sample,
                    base=base.name if base is not None else "",
                    values=changes,
                    pinned=together,
                )

    def drop(self, *samples: InputSet) -> None:
        """Free input sets here and in the child, there with the next request where they are small."""
        size_bytes = (
            # Large sets at once: their memory may be needed by the next request.
            sum(message_bytes(sample.inputs) for sample in samples) + self.reference.output_bytes
        )
        self.child.drop([sample.name for sample in samples], size_bytes)
        for sample in samples:
            self.input_cache.forget(sample.name)
            self._forget_set(sample.name)

    def _forget_set(self, name: str) -> None:
        self.samples.pop(name, None)
        for position in range(len(self.reference.outputs)):
            self.accepted_outputs.pop((name, position), None)

    def _send(
        self,
        sample: InputSet,
        *,
        base: str,
        values: Sequence[torch.Tensor | None],
        pinned: Sequence[str] = (),
    ) -> InputSet:
        # The child has let go of the base, so there is nothing left to share.
        if base and not self.input_cache.mark_used(base):
            base, values = "", sample.inputs
        evicted = self.input_cache.admit(
            # The first two sets are what all later checks and the timing start from.
            sample.name,
            message_bytes(values),
            base,
            [*pinned, *list(self.samples)[:2]],
        )
        # Evicted sets are freed before the new one arrives, or both would have to fit.
        if evicted:
            self.child.call("drop", names=evicted, held=True)
            for name in evicted:
                self._forget_set(name)
        with self.child.enlarge_arena(message_bytes(values)):
            self.child.put(sample.name, values, base=base)
        # Positions whose memory belongs to this set; the others are the base's.
        self.handed[sample.name] = [i for i, new in enumerate(values) if new is not None]
        self.samples[sample.name] = sample
        return sample

    @property
    def _room(self) -> int:
        """What a message with the results of a call takes, as far as that is known."""
        return self.reference.output_bytes + ALIGNMENT_BYTES * len(self.reference.outputs)

    def _read(self, answer: dict[str, Any], path: Any) -> Outputs:
        try:
            outputs = load_tensors(answer.get("layout") or [], path, self.device)
        except SandboxError as error:
            # Bytes that are no tensors are a protocol failure of the process, not a wrong number.
            raise CandidateFailure(
                "run", f"unreadable outputs: {error.found}", "protocol"
            ) from error
        finally:
            path.unlink(missing_ok=True)
        expected = len(self.reference.outputs)
        # Positions are compared one by one, so a missing output would shift all others.
        if len(outputs) != expected:
            raise CandidateFailure(
                "run", f"{len(outputs)} outputs, expected {expected}", "fresh_output"
            )
        return outputs
