"""What a candidate is judged against: the form of the inputs, and the truth about the outputs.

`Reference` is the protocol; `RegionReference` is a captured region, computed in this process. It
knows no candidate and judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch

from torch_cudal1.core.errors import SandboxError
from torch_cudal1.core.refusal import Refusal
from torch_cudal1.device.gpu_memory import release_cached_memory
from torch_cudal1.ir.interpreter import Runner, interpret
from torch_cudal1.ir.program import Aten, Program, TensorSpec, Value
from torch_cudal1.ir.records import Contract, Region, Role
from torch_cudal1.ir.value_specs import output_specs
from torch_cudal1.judge.reference.analysis import Facts, analyse, bound_arguments
from torch_cudal1.judge.reference.float64 import compute_exact_outputs
from torch_cudal1.judge.reference.inputs import find_unproven_integers
from torch_cudal1.judge.reference.tf32_policy import Tf32OperandRounding, uses_tf32
from torch_cudal1.judge.wire import precision_rights
from torch_cudal1.judge.wire.properties import describe
from torch_cudal1.runtime.executor import prepare

__all__ = ["Outputs", "Reference", "ReferenceFailure", "RegionReference", "Result"]

_CHOICES = frozenset({"argmax", "argmin", "max", "min", "topk", "sort", "kthvalue", "median"})
Outputs: TypeAlias = list[torch.Tensor | None]


class ReferenceFailure(SandboxError):
    """Eager itself could not run on inputs made for it."""


@dataclass(frozen=True)
class Result:
    """The outputs of one call, and what `properties.describe` says of each. `tree`: how a module's
    result holds them.
    """

    outputs: Outputs
    facts: list[dict[str, Any] | None]
    tree: str = ""


class Reference(Protocol):
    """What is to be computed. `outputs`: for each position whether a tensor is there;
    `output_bytes`: of all, 0 if not known.
    """

    @property
    def key(self) -> str: ...
    @property
    def specs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def roles(self) -> tuple[Role, ...]: ...
    @property
    def outputs(self) -> tuple[bool, ...]: ...
    @property
    def output_bytes(self) -> int: ...
    @property
    def facts(self) -> Facts: ...

    def eager(self, inputs: Sequence[torch.Tensor]) -> Result:
        """What the user has today, under the contract's rights. Raises ReferenceFailure when it
        refuses the inputs.
        """
        ...

    def eager_with_tf32(self, inputs: Sequence[torch.Tensor]) -> Outputs | None:
        """What eager yields if it makes use of all rights of the contract; None where none of them
        is of use here.
        """
        ...

    def exact(self, inputs: Sequence[torch.Tensor]) -> Outputs | Refusal:
        """The float64 outputs, or why there are none."""
        ...


@dataclass(frozen=True)
class RegionReference:
    """A region on a device under a contract. `proven`: the inputs are made from the user's own
    integers, so they are legal.
    """

    region: Region
    contract: Contract
    device: torch.device
    proven: bool = False

    @property
    def key(self) -> str:
        """The region's."""
        return self.region.key

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of the region's inputs."""
        return self.region.program.inputs

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of the region's inputs."""
        return self.region.roles

    @property
    def outputs(self) -> tuple[bool, ...]:
        """Where the region yields a tensor."""
        return tuple(out is not None for out in self.region.program.outputs)

    @cached_property
    def output_bytes(self) -> int:
        """Of all results of a call."""
        return sum(
            spec.size_bytes for spec in output_specs(self.region.program) if spec is not None
        )

    @cached_property
    def facts(self) -> Facts:
        """What the reference Program tells about its inputs."""
        return analyse(self.region.program)

    def eager(self, inputs: Sequence[torch.Tensor]) -> Result:
        """The reference Program, step by step. Raises ReferenceFailure."""
        try:
            # Before the call on the GPU: an index out of range is an exception on the CPU, and on
            # CUDA an assertion after which the context is lost.
            self._prove_legal(inputs)
            # The user's flags may change between two calls of this process.
            with precision_rights.enforce_rights(self.contract), torch.no_grad():
                outputs = self._reference(inputs)
        # Made-up inputs can be outside of what an operator takes: that says nothing of the
        # candidate.
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise ReferenceFailure(
                "running eager", f"{type(error).__name__}: {str(error)[:300]}"
            ) from error
        return Result(list(outputs), describe(outputs, inputs))

    def eager_with_tf32(self, inputs: Sequence[torch.Tensor]) -> Outputs | None:
        """The reference Program with operands rounded to TF32 wherever the contract allows TF32."""
        # `strict` switches TF32 off, and `kernelbench` compares with eager alone.
        allowed = self.contract.rights if self.contract.precision == "match" else ()
        names = (
            step.target.split(".")[1]
            for step in self.region.program.steps
            if isinstance(step, Aten)
        )
        if not any(uses_tf32(name, allowed) for name in names):
            return None
        try:
            with (
                precision_rights.enforce_rights(self.contract),
                torch.no_grad(),
                Tf32OperandRounding(allowed),
            ):
                return list(interpret(self.region.program, self.device)(inputs))
        except torch.OutOfMemoryError:  # for rounded copies
            return None

    def exact(self, inputs: Sequence[torch.Tensor]) -> Outputs | Refusal:
        """The reference Program in float64; tried again, where memory runs out, with what this
        process does not need given back.
        """
        outputs = compute_exact_outputs(self.region.program, inputs, self.device)
        # This process caches memory of earlier sets, which may be all that is missing.
        if isinstance(outputs, Refusal) and outputs.reason.startswith("OutOfMemoryError"):
            release_cached_memory(self.device)
            outputs = compute_exact_outputs(self.region.program, inputs, self.device)
        return outputs

    def values_chosen_from(
        self, inputs: Sequence[torch.Tensor], position: int
    ) -> tuple[torch.Tensor, int | None] | None:
        """For an output of indices: the float64 values that they choose among, and along which
        dimension (None: flattened).
        """
        value = self.region.program.outputs[position]
        steps = [
            step
            for step in self.region.program.steps
            if isinstance(step, Aten) and value in step.outs
        ]
        # Of the other operators it is not known which input an index points into.
        if not steps or steps[0].target.split(".")[1] not in _CHOICES:
            return None
        bound = bound_arguments(steps[0])
        source = next(value for value in bound.values() if isinstance(value, Value))
        exact = compute_exact_outputs(
            replace(self.region.program, outputs=(source.index,)), inputs, self.device
        )
        if isinstance(exact, Refusal) or exact[0] is None:
            return None
        # These two number the flattened tensor when they are given no dimension.
        flattened = steps[0].target.split(".")[1] in ("argmax", "argmin")
        return exact[0], bound.get("dim", None if flattened else -1)

    @cached_property
    def _reference(self) -> Runner:
        return prepare(self.region.program, self.device)

    def _prove_legal(self, inputs: Sequence[torch.Tensor]) -> None:
        """An index out of range is an exception on the CPU and a dead context on CUDA: try made-up
        integers on the CPU first.
        """
        # Only where integers were made up and their range is not known: the user's own are legal.
        if self.device.type == "cuda" and not self.proven and find_unproven_integers(self):
            host = torch.device("cpu")
            # The result is thrown away: it is the exception that is asked for.
            prepare(_on_host(self.region.program), host)([tensor.cpu() for tensor in inputs])


def _on_host(program: Program) -> Program:
    data = program.to_json()
    return Program.from_json(_host_json(data), program.all_payloads())


def _host_json(data: Any) -> Any:
    if isinstance(data, dict):
        return {
            key: "cpu" if key == "device" and value == "cuda" else _host_json(value)
            for key, value in data.items()
        }
    if isinstance(data, list):
        return ["cpu" if item == "cuda" else _host_json(item) for item in data]
    return data
