"""Check `contract`: a candidate against the form of what it replaces, with the other static checks.
Nothing is run.

For a Program: size limits, the region's inputs and outputs, outputs that this call computed,
operators from an allow-list, no constant that the reference does not hold, nothing carried along
unused. For a source: it parses and defines its entry; inputs, sizes and tolerances are never taken
from it, so functions of its own for them are ignored. It reads no machine code itself (`cubin_scan`
does) and knows no rules of style (`triage` does). A Program has no rules for derived constants yet,
so every derived constant is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from torch_cudal1.core.errors import ProgramError
from torch_cudal1.ir.check import check_program, is_random_program
from torch_cudal1.ir.program import Alloc, Aten, Call, Launch, Program, Value, tensor_digest
from torch_cudal1.ir.records import Candidate, CheckResult, Region
from torch_cudal1.judge.checks.spec import CheckName
from torch_cudal1.judge.checks.static.allowed_operators import is_allowed
from torch_cudal1.judge.checks.static.cubin_scan import cubin_scan
from torch_cudal1.judge.checks.static.output_outline import find_difference, outline_outputs
from torch_cudal1.judge.checks.static.source_syntax import SOURCE_BYTES, parse_source
from torch_cudal1.judge.checks.static.triage import triage
from torch_cudal1.judge.reference.source_reference import SourceCandidate

__all__ = ["CONTRACT", "check_source_contract", "contract"]

_MAX_STEPS = 100_000  # over all nested Programs
_MAX_NESTING = 16
_MAX_KERNELS_BYTES = 256 << 20
_MAX_LAUNCH_ARGS = 1024  # 4 KiB of parameters; a launch with more does not exist on our targets


def contract(region: Region, candidate: Candidate) -> list[CheckResult]:
    """Well formed and bounded, the region's inputs and outputs, computed by this call from allowed
    operators, nothing unused.

    Then `cubin_scan`, where there is machine code.
    """
    program, reference = candidate.program, region.program
    try:
        # First, because everything after it walks all steps.
        _check_size(program)
        check_program(program)
        if program.inputs != reference.inputs:
            raise ProgramError("inputs", "the inputs are not the region's")
        # Eager's random stream depends on its kernels' own use of the generator.
        if is_random_program(program) or is_random_program(reference):
            raise ProgramError(
                "random",
                "random numbers would have to follow eager's stream; such regions are not judged",
            )
        # Outputs are compared by position, so a tensor must be where the region has one.
        if [out is None for out in program.outputs] != [out is None for out in reference.outputs]:
            raise ProgramError("outputs", "the outputs are not the region's")
        _check_operators(program, reference)
        _check_payloads(program, reference)
        _check_outputs(program, reference)
    except ProgramError as error:
        return [CheckResult("contract", False, detail=str(error))]
    steps = sum(len(nested.steps) for nested in _iter_programs(program))
    passed = CheckResult(
        "contract",
        True,
        float(steps),
        float(_MAX_STEPS),
        "steps; form, operators, payloads and outputs",
    )
    # A Program without machine code has nothing to scan.
    return [passed, *(cubin_scan(program) if program.launches else ())]


def check_source_contract(candidate: SourceCandidate) -> list[CheckResult]:
    """The text is bounded, parses, and binds its entry at the top level; its own `get_inputs` and
    the like are ignored.

    Then `triage`, which only records.
    """
    # Parsed and never run here: this process holds the reference and the secrets.
    tree = parse_source(candidate.text)
    if isinstance(tree, str):
        return [CheckResult("contract", False, detail=tree)]
    bound = set(_bound_names(tree.body))
    if candidate.entry not in bound:
        return [
            CheckResult(
                "contract",
                False,
                detail=f"the source defines no {candidate.entry!r} at its top level",
            )
        ]
    # Inputs, sizes and tolerances come from the reference only: a source could choose easy ones.
    ignored = sorted(bound & {"get_inputs", "get_init_inputs", "Model"} - {candidate.entry})
    detail = f"parses; defines {candidate.entry}" + (
        f"; its own {', '.join(ignored)} ignored" if ignored else ""
    )
    return [
        CheckResult("contract", True, float(len(candidate.text)), float(SOURCE_BYTES), detail),
        *triage(candidate),
    ]


def _bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that the statements of a module can bind, those under if, try and with included."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                inner.id
                for target in targets
                for inner in ast.walk(target)
                if isinstance(inner, ast.Name)
            )
        # A class defined under `if` or `try` is a definition as well.
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from _bound_names(getattr(node, name, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _bound_names(handler.body)


def _iter_programs(program: Program, depth: int = 0) -> Iterator[Program]:
    # Programs come from strangers: a deep one would end this process's recursion.
    if depth > _MAX_NESTING:
        raise ProgramError("size", f"Programs nested more than {_MAX_NESTING} deep")
    yield program
    for step in program.steps:
        if isinstance(step, Call):
            yield from _iter_programs(step.program, depth + 1)


def _check_size(program: Program) -> None:
    steps = 0
    for nested in _iter_programs(program):
        steps += len(nested.steps)
        # Counted while walking, so that the walk itself is bounded.
        if steps > _MAX_STEPS:
            raise ProgramError("size", f"more than {_MAX_STEPS} steps, nested ones included")
        for step in nested.steps:
            if isinstance(step, Launch) and len(step.args) > _MAX_LAUNCH_ARGS:
                raise ProgramError(
                    "size",
                    f"launch of {step.symbol!r}: {len(step.args)} arguments, at most {_MAX_LAUNCH_ARGS}",
                )
    kernels = {
        step.payload: nested
        for nested in _iter_programs(program)
        for step in nested.steps
        if isinstance(step, Launch)
    }
    total = sum(
        nested.payloads[name].nbytes for name, nested in kernels.items() if name in nested.payloads
    )
    if total > _MAX_KERNELS_BYTES:
        raise ProgramError("size", f"{total} bytes of machine code, at most {_MAX_KERNELS_BYTES}")


def _check_operators(program: Program, reference: Program) -> None:
    reference_targets = {
        step.target
        for nested in _iter_programs(reference)
        for step in nested.steps
        if isinstance(step, Aten)
    }
    for nested in _iter_programs(program):
        for position, step in enumerate(nested.steps):
            if (
                isinstance(step, Aten)
                # What the reference calls the user has today, so a candidate may call it too.
                and step.target not in reference_targets
                and not is_allowed(step.target)
            ):
                problem = f"step {position}: {step.target} is neither the reference's nor on the list of operators for candidates"
                raise ProgramError("aten", problem)


def _check_payloads(program: Program, reference: Program) -> None:
    """Constants are the reference's own, bit for bit; every payload is a constant in use or the
    code of a launch.
    """
    reference_digests = _digest_constants(reference)
    for nested in _iter_programs(program):
        launched = {step.payload for step in nested.steps if isinstance(step, Launch)}
        # A payload without use could carry code or answers.
        unused = set(nested.payloads) - launched - set(nested.constants)
        if unused:
            raise ProgramError("payload", f"payload {min(unused)!r} is used by nothing")
        read = {index for step in nested.steps for index in step.reads} | set(nested.outputs)
        for position, name in enumerate(nested.constants):
            # A constant that nothing reads could carry them as well.
            if len(nested.inputs) + position not in read:
                raise ProgramError("payload", f"constant {name!r} is read by nothing")
            # Bit for bit: a changed weight would be part of the candidate and not of the model.
            if tensor_digest(nested.payloads[name]) not in reference_digests:
                raise ProgramError(
                    "payload",
                    f"constant {name!r} is not the reference's and has no rule that recomputes it",
                )


def _digest_constants(program: Program) -> frozenset[str]:
    return frozenset(
        tensor_digest(nested.payloads[name])
        for nested in _iter_programs(program)
        for name in nested.constants
    )


def _check_outputs(program: Program, reference: Program) -> None:
    actual, expected = outline_outputs(program), outline_outputs(reference)
    # A constant outlives the call: a caller that writes into the result would change the next one.
    for nested in list(_iter_programs(program))[1:]:
        if any(out is not None and out.constant for out in outline_outputs(nested)):
            raise ProgramError(
                "outputs", "a nested Program returns memory of a constant, which outlives the call"
            )
    for position, (output, reference_output) in enumerate(zip(actual, expected, strict=True)):
        problem = (
            ""
            if output is None or reference_output is None
            else find_difference(output, reference_output)
        )
        if problem:
            raise ProgramError("outputs", f"output {position} {problem}")
    _check_written(program)


def _check_written(program: Program) -> None:
    """No step reads memory of an Alloc, and no output returns it, before a launch was given it."""
    for nested in _iter_programs(program):
        unwritten: set[int] = set()
        for position, step in enumerate(nested.steps):
            if isinstance(step, Alloc):
                unwritten.add(step.out)
            elif isinstance(step, Launch):
                # A launch that gets the memory may write it: whether it does is `poison`'s
                # question.
                unwritten -= {arg.value.index for arg in step.args if isinstance(arg.value, Value)}
            elif unwritten & set(step.reads):
                raise ProgramError(
                    "order", f"step {position} reads memory that nothing has written"
                )
        if unwritten & set(nested.outputs):
            raise ProgramError(
                "outputs",
                f"value {min(unwritten & set(nested.outputs))} is returned and nothing has written it",
            )


CONTRACT = CheckName(
    name="contract",
    module=__name__,
    failure="compile",
    asks=(
        "does the source parse, import, define `ModelNew` and make a module; of a Program: form, "
        "operators, constants, memory of its outputs"
    ),
)
