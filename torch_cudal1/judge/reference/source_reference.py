"""References and candidates that are Python sources (KernelBench style: `Model` with its inputs,
and `ModelNew`).

The reference runs in one child, the oracle, the candidate in another; this process imports neither.
This module describes what the reference computes and loads candidates; checks and verdict are the
same as for Programs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.ir.program import TensorSpec
from torch_cudal1.ir.records import Role
from torch_cudal1.ir.schedule import EAGER, Schedule
from torch_cudal1.judge.reference.analysis import Facts
from torch_cudal1.judge.reference.inputs import make_inputs
from torch_cudal1.judge.reference.region_reference import Outputs, ReferenceFailure, Result
from torch_cudal1.judge.sandbox.child import CandidateFailure, Child
from torch_cudal1.judge.wire.call_spec import CallSpec, RunMode, count_tensors
from torch_cudal1.judge.wire.channel import load_tensors, message_bytes
from torch_cudal1.judge.wire.tensor_bits import same_bits

__all__ = ["SourceCandidate", "SourceReference", "read_reference"]

EVAL = RunMode()
# examples and constructors are the same at every load; the inputs of the judge come from secret
# seeds
_SEED = 0
_FURTHER_SEEDS = (1, 2)
_INDEX_DTYPES = ("int", "uint")
# How PyTorch's operators for a CPU say that an index, a target or a class does not exist.
_OUT_OF_RANGE = re.compile(r"out of (range|bounds)|Class values must be smaller")


@dataclass(frozen=True)
class SourceCandidate:
    """Untrusted Python source that defines `entry`, a drop-in for the reference's module."""

    text: str
    entry: str = "ModelNew"
    origin: str = "source"
    techniques: tuple[str, ...] = ()
    schedule: Schedule = EAGER

    @cached_property
    def digest(self) -> str:
        """sha256 of text and entry."""
        return hashlib.sha256(f"{self.entry}\n{self.text}".encode()).hexdigest()

    @property
    def label(self) -> str:
        """For tables."""
        return "+".join(self.techniques) or f"{self.entry} {self.digest[:8]}"


@dataclass(frozen=True)
class SourceReference:
    """The reference's module in one way of running it, asked in the oracle's process. Flat order:
    see `modules`.
    """

    # A process is not part of what is computed, and cannot be compared.
    oracle: Child = field(repr=False, compare=False)
    text: str
    form: CallSpec
    specs: tuple[TensorSpec, ...]
    roles: tuple[Role, ...]
    device: torch.device
    way: RunMode = EVAL
    bounds: Mapping[int, int] = field(default_factory=dict, compare=False)
    structural: frozenset[int] = frozenset()
    flops: int = 0
    # Of other seeds, in flat order, the integers and booleans of the call, which are legal too.
    further_examples: tuple[tuple[torch.Tensor | None, ...], ...] = field(
        default=(), compare=False, repr=False
    )
    trees: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    # Whether shapes or integers are not the examples', so that indices may lie out of range.
    is_unproven: bool = False

    @cached_property
    def key(self) -> str:
        """sha256 over the reference's text, the way and the form of the inputs."""
        # Inputs and results are cached under this key, so it holds all that they depend on.
        return hashlib.sha256(
            repr((self.text, self.way, self.specs, self.form.init, self.form.call)).encode()
        ).hexdigest()

    @cached_property
    def outputs(self) -> tuple[bool, ...]:
        """Where the reference yields a tensor, as one call on made-up inputs shows."""
        return self._example_result[0]

    @property
    def output_bytes(self) -> int:
        """Unknown before a call."""
        return 0

    @property
    def tree(self) -> str:
        """The structure of the reference's result."""
        return self._example_result[1]

    @cached_property
    def facts(self) -> Facts:
        """By the names of buffers, by the largest dimension and by the examples: nothing is traced."""
        # A variance below 0 gives NaN in every normalisation; the names are PyTorch's own.
        positive = frozenset(
            i
            for i, name in enumerate(self.form.names)
            if name.rpartition(".")[2] in ("running_var", "var")
        )
        # Nothing is traced, so the largest dimension is the longest reduction that there can be.
        longest = max((max(spec.shape, default=1) for spec in self.specs), default=1)
        return Facts(
            longest_reduction=longest,
            flops=self.flops,
            bounds=self.bounds,
            positive=positive,
            structural=self.structural,
        )

    def eager(self, inputs: Sequence[torch.Tensor]) -> Result:
        """The reference's own module. Raises ReferenceFailure."""
        return self._ask_oracle(self.way, inputs)[0]

    def eager_with_tf32(self, inputs: Sequence[torch.Tensor]) -> Outputs | None:
        """Nothing: a source is held to what eager does."""
        return None

    def exact(self, inputs: Sequence[torch.Tensor]) -> Outputs | Refusal:
        """The reference's module in float64."""
        try:
            # Under autocast a float64 run would round to half types.
            return self._ask_oracle(replace(self.way, double=True, autocast=""), inputs)[0].outputs
        except ReferenceFailure as error:
            return Refusal(error.found)

    def in_way(self, way: RunMode) -> SourceReference:
        """The same reference, run in another way."""
        # What is loaded is remembered by slot, and another way has slots of its own.
        return replace(self, way=way, trees={})

    def with_specs(self, specs: Sequence[TensorSpec]) -> SourceReference:
        """The same reference, called with tensors of another form."""
        resized = [spec.shape for spec in specs] != [spec.shape for spec in self.specs]
        is_unproven = self.is_unproven or resized
        return replace(self, specs=tuple(specs), trees={}, is_unproven=is_unproven)

    def with_unproven_indices(self) -> SourceReference:
        """The same reference, called with integers that may index out of range."""
        return replace(self, is_unproven=True)

    def with_init(self, init: Any) -> SourceReference:
        """The reference constructed with other (packed) arguments."""
        return replace(self, form=replace(self.form, init=init), trees={})

    def with_call(self, call: Any) -> SourceReference:
        """The reference called with other (packed) arguments."""
        return replace(self, form=replace(self.form, call=call), trees={})

    def survives(self, how: str, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a used instance of the reference can be copied, by "deepcopy" or "pickle"."""
        # A used instance: state that comes with the first call must survive as well.
        self.eager(inputs)
        try:
            self.oracle.call("transform", slot=self._slot(self.way), how=how)
        except CandidateFailure:
            return False
        return True

    def run_in_turn(
        self, sets: Sequence[Sequence[torch.Tensor]], update: str = ""
    ) -> list[Outputs] | None:
        """What one instance of the reference yields on sets of the same state, call after call; None
        where it raises. `update`: the way in which each set's own state gets into the instance.
        """
        self.eager(sets[0])
        answered, slot = self.oracle.reserve_file(), self._slot(self.way)
        names = [f"turn {number}" for number in range(len(sets))]
        results = []
        try:
            for name, inputs in zip(names, sets, strict=True):
                # The same state in the same memory, or the next call would make a new instance.
                pairs = zip(inputs, sets[0], strict=True)
                values = [None if name != names[0] and new is old else new for new, old in pairs]
                self.oracle.put(name, values, base="" if name == names[0] else names[0])
                if update and name != names[0]:
                    self.oracle.call("update", slot=slot, way=update, name=name)
                answer = self.oracle.call("run", slot=slot, inputs=name, path=str(answered))
                results.append(load_tensors(answer["layout"], answered, self.device))
            return results
        except CandidateFailure:
            return None
        finally:
            self.oracle.drop(names, sum(map(message_bytes, sets)))
            answered.unlink(missing_ok=True)

    def can_be_captured(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a call of the reference can be captured in a CUDA graph. Tried in the oracle,
        which survives a refusal.
        """
        # The first call may allocate and initialise, which cannot be captured.
        self.eager(inputs)
        answered = self.oracle.reserve_file()
        try:
            self.oracle.put("captured", inputs)
            self.oracle.call(
                "capture", slot=self._slot(self.way), sets=["captured"], path=str(answered)
            )
        except CandidateFailure:
            return False
        finally:
            answered.unlink(missing_ok=True)
        return True

    def find_written_inputs(self) -> list[int]:
        """Which tensors among the arguments a call of the reference writes to. Raises
        ReferenceFailure.
        """
        # The instance is loaded by asking for the form of the result.
        inputs, _ = self._make_examples(), self.outputs
        answered, slot = self.oracle.reserve_file(), self._slot(self.way)
        plain = [position for position, role in enumerate(self.roles) if role == "input"]
        self.oracle.put("written", inputs)
        try:
            self.oracle.call("run", slot=slot, inputs="written", path=str(answered))
            answer = self.oracle.call(
                "reread", name="written", slot=slot, positions=plain, path=str(answered)
            )
            current = load_tensors(answer["layout"], answered, self.device)
        except CandidateFailure as error:
            raise ReferenceFailure("running the reference", error.found) from error
        finally:
            self.oracle.drop(["written"], message_bytes(inputs))
            answered.unlink(missing_ok=True)
        before = [inputs[position] for position in plain]
        return [
            number
            for number, (was, now) in enumerate(zip(before, current, strict=True))
            if not same_bits(was, now)
        ]

    def run_int64_pieces(
        self, inputs: Sequence[torch.Tensor], fields: Mapping[str, Any]
    ) -> tuple[Outputs, list[Any]] | None:
        """Pieces and properties of the outputs for inputs made in the oracle (see `int64_indexing`); None
        where it refuses them.
        """
        self.eager(inputs)
        answered = self.oracle.reserve_file()
        try:
            self.oracle.put("vast", inputs)
            answer = self.oracle.call(
                "vast", slot=self._slot(self.way), inputs="vast", path=str(answered), **fields
            )
            # Inputs of gigabytes must not stay in the oracle beside the candidate's own call.
            self.oracle.drop(["vast"], message_bytes(inputs))
            return load_tensors(answer["layout"], answered, self.device), answer["facts"]
        except CandidateFailure as error:
            # A lost oracle is a failure of the reference, no refusal of these inputs.
            if not self.oracle.usable:
                raise ReferenceFailure("running the reference", error.found) from error
            return None
        finally:
            answered.unlink(missing_ok=True)

    @property
    def cotangents(self) -> int:
        """Where the cotangents begin among the inputs."""
        return len(self.form.names) + count_tensors(self.form.call)

    def with_gradients(self, way: RunMode) -> SourceReference:
        """The same reference, asked for gradients: after the tensors of the call comes one
        cotangent per output.
        """
        # The form of the results is known only from a call.
        facts = [
            each
            for each in self._ask_oracle(self.way, self._make_examples())[0].facts
            if each is not None
        ]
        # A gradient of integers does not exist: their cotangents are placeholders.
        floating = ("float64", "float32", "float16", "bfloat16")
        kinds = [each["dtype"] if each["dtype"] in floating else "float32" for each in facts]
        cotangents = tuple(
            TensorSpec.of(
                torch.empty(each["shape"], dtype=getattr(torch, kind), device=self.device)
            )
            for each, kind in zip(facts, kinds, strict=True)
        )
        plain: Role = "input"
        roles = (*self.roles, *[plain] * len(cotangents))
        return replace(self, way=way, specs=self.specs + cotangents, roles=roles, trees={})

    @cached_property
    def _example_result(self) -> tuple[tuple[bool, ...], str]:
        result, tree = self._ask_oracle(self.way, self._make_examples())
        return tuple(out is not None for out in result.outputs), tree

    @contextmanager
    def open_used_instance(self, inputs: Sequence[torch.Tensor]) -> Iterator[Callable[[], object]]:
        """A way to call one used instance of the reference again, in the oracle. Raises
        ReferenceFailure.
        """
        # The instance is loaded by an ordinary call first.
        self.eager(inputs)
        answered = self.oracle.reserve_file()
        self.oracle.put("living", inputs)

        def call() -> object:
            return self.oracle.call(
                "run", slot=self._slot(self.way), inputs="living", path=str(answered)
            )

        try:
            # What an instance sets up in its first call is none of what later calls do.
            call()
            yield call
        except CandidateFailure as error:
            raise ReferenceFailure("running the reference", error.found) from error
        finally:
            self.oracle.drop(["living"], message_bytes(inputs))
            answered.unlink(missing_ok=True)

    def _slot(self, way: RunMode) -> str:
        return f"reference {self.key[:16]} {way}"  # one oracle may serve several references

    def _make_examples(self) -> list[torch.Tensor]:
        # Any fixed seed: only form and structure of the result are read.
        return make_inputs(self, 1, "normal", self.device)

    def _ask_oracle(self, way: RunMode, inputs: Sequence[torch.Tensor]) -> tuple[Result, str]:
        if self._may_index_beyond(way):
            self._require_indices_within(inputs)
        slot = self._slot(way)
        try:
            if slot not in self.trees:
                load_module(self.oracle, slot, self.text, self.form, way)
                self.trees[slot] = ""
            answered = self.oracle.reserve_file()
            self.oracle.put("asked", inputs)
            answer = self.oracle.call("run", slot=slot, inputs="asked", path=str(answered))
            outputs = load_tensors(answer["layout"], answered, self.device)
            self.oracle.drop(["asked"], message_bytes(inputs))
            answered.unlink(missing_ok=True)
        except CandidateFailure as error:
            raise ReferenceFailure("running the reference", error.found) from error
        return Result(outputs, answer["facts"], str(answer["tree"])), str(answer["tree"])

    def _may_index_beyond(self, way: RunMode) -> bool:
        """Whether this way could lose the oracle: on a GPU an index out of range is no exception, it
        ends the CUDA context.
        """
        is_possible = self.is_unproven and self.device.type == "cuda" and not way.on_host
        plain = self.specs[len(self.form.names) :]
        return is_possible and any(spec.dtype.startswith(_INDEX_DTYPES) for spec in plain)

    def _require_indices_within(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raises ReferenceFailure where the host finds an index out of range."""
        try:
            self._ask_oracle(RunMode(on_host=True), inputs[: self.cotangents])
        except ReferenceFailure as error:
            # What else the host refuses, such as an operator that it lacks, a GPU may take.
            if _OUT_OF_RANGE.search(error.found):
                raise


def read_reference(
    oracle: Child, text: str, device: torch.device, entry: str = "Model"
) -> tuple[SourceReference, list[torch.Tensor]]:
    """The reference's subject in eval mode, and its example tensors in flat order. Raises
    SandboxError for an unusable file.
    """
    answer, examples = _read_examples(oracle, text, device, entry, _SEED)
    specs = tuple(TensorSpec.of(tensor) for tensor in examples)
    roles: tuple[Role, ...] = tuple(answer["roles"])
    # The consumers of a module's integers are not known: what the examples hold is legal.
    bounds = {
        i: int(t.max()) + 1
        for i, t in enumerate(examples)
        if _is_integer(t) and t.numel() and int(t.min()) >= 0
    }
    structural = frozenset(
        # A random mask would be another computation: buffers of zeros and ones stay.
        i
        for i, t in enumerate(examples)
        if roles[i] == "buffer" and _is_mask(t)
    )
    form, flops = CallSpec.from_json(answer["form"]), int(answer["flops"])
    further_examples = _read_further_examples(oracle, text, device, form, specs)
    return SourceReference(
        oracle,
        text,
        form,
        specs,
        roles,
        device,
        EVAL,
        bounds,
        structural,
        flops,
        further_examples,
    ), examples


def _read_examples(
    oracle: Child, text: str, device: torch.device, entry: str, seed: int
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    path = oracle.reserve_file()
    try:
        answer = oracle.call("read_source", text=text, entry=entry, seed=seed, path=str(path))
    except CandidateFailure as error:
        raise SandboxError("reading the reference", error.found) from error
    tensors = load_tensors(answer["layout"], path, device)
    return answer, [tensor for tensor in tensors if tensor is not None]


def _read_further_examples(
    oracle: Child,
    text: str,
    device: torch.device,
    form: CallSpec,
    specs: Sequence[TensorSpec],
) -> tuple[tuple[torch.Tensor | None, ...], ...]:
    """The integers and booleans of calls by other seeds, None for all else."""
    positions = {
        position
        for position, spec in enumerate(specs)
        if position >= len(form.names)
        and not (spec.torch_dtype.is_floating_point or spec.torch_dtype.is_complex)
    }
    further_examples = []
    for seed in _FURTHER_SEEDS if positions else ():
        _, examples = _read_examples(oracle, text, device, form.entry, seed)
        # A reference may make other shapes from another seed.
        if tuple(map(TensorSpec.of, examples)) == tuple(specs):
            # The rest is left: a module's weights once more for each seed.
            further_examples.append(
                tuple(
                    tensor if position in positions else None
                    for position, tensor in enumerate(examples)
                )
            )
    return tuple(further_examples)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (
        tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool
    )


def _is_mask(tensor: torch.Tensor) -> bool:
    """Zeros and ones, and both: the structure of a computation rather than a quantity in it."""
    return (
        tensor.dim() >= 2
        and bool(((tensor == 0) | (tensor == 1)).all())
        and 0 < int((tensor == 1).sum()) < tensor.numel()
    )


def load_module(child: Child, slot: str, text: str, form: CallSpec, way: RunMode) -> list[Any]:
    """Put a source's module into a slot of a child: name, dtype and shape of each tensor of its
    state. Raises CandidateFailure.
    """
    state: list[Any] = child.call(
        "load_source", slot=slot, text=text, form=form.to_json(), way=way.to_json()
    )["state"]
    return state
