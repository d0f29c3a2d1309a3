"""One candidate on trial: its child, the input sets drawn for it, and what the reference yields on
them.

Seeds are drawn here from the operating system, inputs, reference and float64 results are made in
this process; the child is handed inputs only. It holds evidence and judges none of it.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch

from torch_cudal1.device.gpu_memory import is_memory_short, max_cached_bytes, release_cached_memory
from torch_cudal1.device.specs import CHECK_RATES
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.judge.profiles import PROFILES, Profile
from torch_cudal1.judge.reference.analysis import Facts
from torch_cudal1.judge.reference.candidate_calls import CandidateCalls
from torch_cudal1.judge.reference.input_cache import count_tensor_bytes
from torch_cudal1.judge.reference.input_set import InputSet, ReferenceCache
from torch_cudal1.judge.reference.inputs import clone_strided, make_inputs
from torch_cudal1.judge.reference.region_reference import Reference, RegionReference, Result
from torch_cudal1.judge.sandbox.child import Child
from torch_cudal1.judge.wire.call_spec import RunMode
from torch_cudal1.judge.wire.channel import message_bytes

__all__ = ["Trial"]


@dataclass
class Trial(CandidateCalls):
    """A candidate's calls with the input sets that were drawn for it.

    `contract` says how accurate, `profile` how much is tested. `drawn`: how many sets of each
    distribution there were, dropped ones too. `gradients`: a source must have the reference's
    gradients too. `is_alone_on_device`: whether no other process of this package allocates on the
    device meanwhile.
    """

    drawn: dict[str, int] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    reference_cache: ReferenceCache = field(default_factory=dict)
    profile: Profile = PROFILES["fast"]
    gradients: bool = True
    is_alone_on_device: bool = True

    def count_affordable_sets(self, count: int, share: float = 0.1) -> int:
        """How many of the wanted input sets fit into a share of the profile's time; at least one.

        What a set costs is estimated from operations and bytes, so the same is tested on a busy
        machine.
        """
        # Estimated and not measured, so that a busy machine tests as much as an idle one.
        moved = sum(spec.size_bytes for spec in self.reference.specs)
        rates = CHECK_RATES[self.device.type]
        # each step of a recurrent layer has to wait for the one before
        chain_s = self.facts.sequential_steps * (1e-5 if self.device.type == "cuda" else 1e-4)
        cost_s = 2e-3 + self.facts.flops / rates.flops_per_s + moved / rates.bytes_per_s + chain_s
        return max(1, min(count, int(share * self.profile.budget_s / cost_s)))

    @property
    def facts(self) -> Facts:
        """What is known about the subject's inputs."""
        return self.reference.facts

    @property
    def first_two(self) -> tuple[InputSet, InputSet]:
        """The sets that `numerics` drew first, which all checks after it start from."""
        first, second = list(self.samples.values())[:2]
        return first, second

    def draw(self, distribution: str) -> InputSet:
        """An input set under a secret seed, or the user's own examples ("examples"); the child gets
        a copy.

        The n-th set of a distribution is the same for every candidate of a region: drawn once, its
        float64 results computed once.
        """
        count = self.drawn[distribution] = self.drawn.get(distribution, -1) + 1
        # Drawn once for all candidates of a region: float64 results cost more than anything else
        # here.
        shared = self.reference_cache.get((self.reference.key, distribution, count))
        if shared is not None:
            return self._send(shared, base="", values=shared.inputs)
        sample = self._draw_new(distribution)
        self._remember((self.reference.key, distribution, count), sample)
        return self._send(sample, base="", values=sample.inputs)

    def _remember(self, key: tuple[str, str, int], sample: InputSet) -> None:
        """Keep it for the next candidate while there is room: for all that is held, the inputs,
        eager's outputs and twice that.
        """
        tensors = {
            id(tensor): tensor
            for shared in self.reference_cache.values()
            for tensor in shared.tensors()
        }
        new_tensors = {id(tensor): tensor for tensor in sample.inputs if id(tensor) not in tensors}
        # Three times the inputs or outputs: inputs, eager's outputs, and float64's, which are twice
        # as large.
        coming = 3 * max(count_tensor_bytes(new_tensors.values()), self.reference.output_bytes)
        if count_tensor_bytes(tensors.values()) + count_tensor_bytes(
            new_tensors.values()
        ) + coming <= max_cached_bytes(self.device.type):
            # Without room the set serves this candidate only.
            sample.is_shared = True
            self.reference_cache[key] = sample

    def free_memory(self) -> None:
        """`forget_computed`, and give back what this process holds of a GPU and does not use."""
        self.forget_computed()
        release_cached_memory(self.device)

    def free_memory_if_short(self) -> None:
        """`free_memory` where memory is short for the next call."""
        if is_memory_short(
            self.device,
            max(
                self.reference.output_bytes, *(spec.size_bytes for spec in self.reference.specs), 0
            ),
        ):
            self.free_memory()

    def drop_large_sets(self) -> None:
        """Drop all sets where they are large; no later check uses them."""
        samples = list(self.samples.values())
        if sum(message_bytes(sample.inputs) for sample in samples) > max_cached_bytes(
            self.device.type
        ):
            self.drop(*samples)

    def forget_computed(self) -> None:
        """Free what was computed of a region's sets, where it takes more memory than is worth the
        time to compute it again.
        """
        samples = {
            id(sample): sample
            for sample in (*self.samples.values(), *self.reference_cache.values())
        }
        tensors = {id(tensor): tensor for sample in samples.values() for tensor in sample.tensors()}
        tensors |= {id(tensor): tensor for tensor, _ in self.accepted_outputs.values()}
        # a module need not answer the same again
        region = isinstance(self.reference, RegionReference)
        if region and count_tensor_bytes(tensors.values()) > max_cached_bytes(self.device.type):
            for sample in samples.values():
                # With the float64 results of two sets kept, this process held up to 18 times a
                # tensor of 8 GB (counted on a CPU, sizes scaled down).
                sample.forget_computed()
            self.accepted_outputs.clear()

    def _draw_new(self, distribution: str) -> InputSet:
        if distribution == "examples":
            assert self.examples is not None
            examples = [t for t in self.examples if t is not None]
            inputs = [
                clone_strided(t).to(self.device if t.device.type == self.device.type else t.device)
                for t in examples
            ]
        else:
            # From the operating system: the seeds are secret until the inputs arrive.
            seed = secrets.randbits(62)
            inputs = make_inputs(
                self.reference, seed, distribution, self.device, examples=self._pick_examples()
            )
        return self._make_set(distribution, inputs)

    def _pick_examples(
        self, other_than: Sequence[torch.Tensor] = ()
    ) -> Sequence[torch.Tensor | None] | None:
        """The examples that lend a set their integers and booleans: those of one of the reference's
        seeds, drawn in secret; for a set `other_than` these inputs with other integers, where there
        are any.
        """
        if self.examples is None:
            return None
        picks = [
            list(self.examples),
            *(
                [
                    other
                    if old is not None
                    and other is not None
                    and TensorSpec.of(other) == TensorSpec.of(old)
                    else old
                    for old, other in zip_longest(self.examples, further)
                ]
                for further in getattr(self.reference, "further_examples", ())
            ),
        ]
        random.SystemRandom().shuffle(picks)
        return next(
            (pick for pick in picks if other_than and _differ_in_integers(pick, other_than)),
            picks[0],
        )

    def _make_set(self, kind: str, inputs: list[torch.Tensor]) -> InputSet:
        return InputSet(
            # A random name: the process must not see by it which distribution or which check is at
            # work.
            secrets.token_hex(4),
            kind,
            inputs,
            self.reference.eager,
            self.reference.exact,
        )

    def derive(
        self,
        base: InputSet,
        kind: str,
        make: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]],
    ) -> InputSet:
        """`base` with what `make` yields in place of its inputs (None: as they are), in the same
        memory where nothing changed.

        The set of a name `kind` is made once and met by every candidate of the region.
        """
        # The kind alone would mix up sets that were derived from different bases.
        key = (self.reference.key, f"{base.name} {kind}", 0)
        sample = self.reference_cache.get(key)
        if sample is None:
            replacements = make(base.inputs)
            sample = self._make_set(
                kind,
                [
                    old if new is None else new
                    for old, new in zip(base.inputs, replacements, strict=True)
                ],
            )
            self._remember(key, sample)
        # Unchanged inputs share memory with the base, also in the child.
        changes = [
            None if new is old else new for old, new in zip(base.inputs, sample.inputs, strict=True)
        ]
        return self._send(sample, base=base.name, values=changes)

    def derive_sibling(
        self, base: InputSet, distribution: str = "normal", number: int = 0
    ) -> InputSet:
        """New plain inputs for the same parameters and buffers, so that the same instance of a
        module is called again.
        """

        def make(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            new_inputs = make_inputs(
                self.reference,
                secrets.randbits(62),
                distribution,
                self.device,
                examples=self._pick_examples(other_than=base.inputs),
            )
            return [
                # Parameters and buffers stay in place: the module in the child is met again with
                # other inputs.
                new if role == "input" else None
                for new, role in zip(new_inputs, self.reference.roles, strict=True)
            ]

        return self.derive(base, f"sibling {distribution} {number}", make)

    def load_in_slot(self, reference: Reference, slot: str, way: RunMode | None = None) -> Trial:
        """The candidate in another slot, against the same reference in another way or form. Raises
        CandidateFailure.

        `way`: the candidate's, where it is not the reference's.
        """
        # Examples of another form are of no use to a reference that is called with other shapes.
        pairs = zip_longest(self.examples or (), reference.specs)
        fitting = [
            t if t is not None and spec is not None and TensorSpec.of(t) == spec else None
            for t, spec in pairs
        ]
        examples = fitting[: len(reference.specs)]
        # Nothing that was found of one slot holds for another.
        other = replace(self._forget_results(), reference=reference, slot=slot, examples=examples)
        other.load(slot, self.candidate, way)
        return other

    def _forget_results(self) -> Trial:
        """The same question, with nothing of what was run."""
        return replace(
            self, samples={}, drawn={}, results={}, accepted_outputs={}, references=set(), state=[]
        )

    @contextmanager
    def open_in_new_process(self, child: Child | None = None) -> Iterator[Trial]:
        """The candidate in a new process, or in `child`, which stays its owner's. Raises
        SandboxError, CandidateFailure.
        """
        # A process made here ends here; `child` belongs to the caller.
        with nullcontext(child) if child else Child(self.child.limits, self.contract) as fresh:
            # The time that a verdict may take goes on; a child of the caller has its own.
            if child is None:
                fresh.given_up_at = self.child.given_up_at
            other = replace(self._forget_results(), child=fresh)
            other.load(other.slot, other.candidate)
            yield other

    def hand_over(self, sample: InputSet) -> InputSet:
        """Give a set that another trial drew to this one's child, parameters in memory of their
        own.
        """
        # No base: parameters arrive in memory of their own, as they do in another program.
        return self._send(sample, base="", values=sample.inputs)

    def replace_inputs(
        self, sample: InputSet, replacements: Mapping[int, torch.Tensor], kind: str
    ) -> InputSet:
        """`sample` with some inputs replaced, for this candidate only."""
        inputs = [replacements.get(index, tensor) for index, tensor in enumerate(sample.inputs)]
        changes = [replacements.get(index) for index in range(len(inputs))]
        return self._send(self._make_set(kind, inputs), base=sample.name, values=changes)


def _differ_in_integers(
    pick: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> bool:
    return any(
        tensor is not None
        and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        and tensor.shape == old.shape
        and not torch.equal(tensor.to(old.device), old)
        for tensor, old in zip(pick, inputs, strict=False)
    )
