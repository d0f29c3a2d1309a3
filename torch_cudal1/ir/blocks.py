"""Finds repeated blocks: steps that stand in a Program several times, as the layers of a transformer
do.

        embedding ── layer ── layer ── layer ── layer ── norm ── out
              └─ rest ──┘└─ block ─┘└─ block ─┘└──── rest ────┘

Blocks are equal by structure: operators, arguments, shapes and wiring. Depth, names and weights are
no part of it, so a block of one model is that of another. Which step of a layer is its first is
free: a block begins where a cut costs Inductor no fusion, such as before a matrix product. Nothing
is run or decided here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch_cudal1.ir.block_layouts import insert_contiguous_copies, is_permuted
from torch_cudal1.ir.check import is_random_program
from torch_cudal1.ir.equal_steps import merge_equal_steps
from torch_cudal1.ir.fusible_pairs import FusiblePairs, is_library_call
from torch_cudal1.ir.program import (
    Aten,
    Call,
    Program,
    Step,
    TensorSpec,
    Value,
    renumber_step,
    renumber_steps,
)
from torch_cudal1.ir.value_specs import value_specs

__all__ = [
    "MIN_OCCURRENCES",
    "BlockPartition",
    "RepeatedBlock",
    "Segment",
    "compose_blocks",
    "extract_steps",
    "partition_blocks",
]

# The ends of a stack of layers are no occurrences: they are cut within a layer. With fewer than
# this, little would be compiled or searched for once in place of several times.
MIN_OCCURRENCES = 2
# In one layer.
_MAX_EQUAL_PRODUCTS = 8
# Distances between equal products that are tried as the length of a block, the most frequent first.
_MAX_LENGTHS = 32
# A lone product with what surrounds it is a fusion group, and stands several times in one layer.
_MIN_PRODUCTS = 2


@dataclass(frozen=True)
class Segment:
    """Steps of a whole Program as a Program of their own; `inputs[i]` is the whole's value for its
    input i, `outputs` likewise. `steps`: their positions.
    """

    program: Program
    steps: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @cached_property
    def digest(self) -> str:
        """Of its Program: equal segments have equal digests."""
        return self.program.digest


@dataclass(frozen=True)
class RepeatedBlock:
    """Equal segments of a Program, in step order. `lost_fusions`: how many pairs of steps a cut at
    the ends of a block parts that Inductor could fuse in the whole Program, and how many large values
    lie in memory between that it would compute in each block.
    """

    occurrences: tuple[Segment, ...]
    lost_fusions: int

    @property
    def program(self) -> Program:
        """What every occurrence computes."""
        return self.occurrences[0].program


@dataclass(frozen=True)
class BlockPartition:
    """The repeated blocks of a Program, and all of its steps as segments in step order: occurrences
    of blocks, and what lies between. `program`: the Program with equal steps merged and what enters
    blocks in a plain layout, whose steps and values the segments name.
    """

    program: Program
    blocks: tuple[RepeatedBlock, ...]
    segments: tuple[Segment, ...]

    @property
    def lost_fusions(self) -> int:
        """How many pairs of steps the cuts part, at one occurrence of each block."""
        return sum(block.lost_fusions for block in self.blocks)

    @property
    def copied_steps(self) -> int:
        """How many steps are left out when every block is counted once."""
        by_digest = {segment.digest: len(segment.steps) for segment in self.segments}
        return len(self.program.steps) - sum(by_digest.values()) if by_digest else 0

    @property
    def distinct_share(self) -> float:
        """The share of the steps that is left then; 1.0 without a block."""
        return 1 - self.copied_steps / max(1, len(self.program.steps))


def partition_blocks(program: Program) -> BlockPartition:
    """The repeated blocks of `program`, each with at least MIN_OCCURRENCES occurrences, and the
    segments that it is cut into by them. No blocks where random numbers are drawn, whose order is
    part of the result.
    """
    # Without two equal products there is no block, and shapes need not be worked out.
    if is_random_program(program) or not _has_equal_products(program):
        return BlockPartition(program, (), ())
    # What each layer derives from one mask would be derived once in the whole, and in each block.
    program = merge_equal_steps(program)
    finder = _BlockFinder(program)
    blocks = tuple(finder.find(0, len(program.steps)))
    if not blocks:
        return BlockPartition(program, (), ())
    if (other := _lay_out_contiguously(finder, blocks)) is not None:
        finder, blocks = other
        program = finder.program
    by_begin = {
        occurrence.steps[0]: occurrence for block in blocks for occurrence in block.occurrences
    }
    segments: list[Segment] = []
    position = 0
    for begin in sorted(by_begin):
        if position < begin:
            segments.append(extract_steps(program, range(position, begin), finder.specs))
        segments.append(by_begin[begin])
        position = by_begin[begin].steps[-1] + 1
    if position < len(program.steps):
        rest = range(position, len(program.steps))
        segments.append(extract_steps(program, rest, finder.specs))
    return BlockPartition(program, blocks, tuple(segments))


def _lay_out_contiguously(
    finder: _BlockFinder, blocks: Sequence[RepeatedBlock]
) -> tuple[_BlockFinder, tuple[RepeatedBlock, ...]] | None:
    """The Program with a plain layout of what enters its blocks, and its blocks; None where nothing is
    to be changed, or where blocks or strides of outputs would be lost.
    """
    program, specs = finder.program, finder.specs
    permuted = {
        value
        for block in blocks
        for value in block.occurrences[0].inputs
        if is_permuted(specs[value]) and finder.is_computed_by_kernel(value)
    }
    changed = insert_contiguous_copies(program, permuted) if permuted else None
    if changed is None:
        return None
    other = _BlockFinder(changed)
    other_blocks = tuple(other.find(0, len(changed.steps)))
    pairs = zip(program.outputs, changed.outputs, strict=True)
    has_same_outputs = all(
        before is None or after is None or specs[before] == other.specs[after]
        for before, after in pairs
    )
    is_as_good = _count_copied_steps(other_blocks) >= _count_copied_steps(blocks)
    return (other, other_blocks) if has_same_outputs and is_as_good else None


def _count_copied_steps(blocks: Iterable[RepeatedBlock]) -> int:
    return sum((len(block.occurrences) - 1) * len(block.program.steps) for block in blocks)


def compose_blocks(partition: BlockPartition, replacements: Mapping[str, Program]) -> Program:
    """The partition's Program with `replacements[digest]` in place of each segment of that digest.
    What holds constants or launches becomes one nested call.
    """
    program_before = partition.program
    numbers = {
        index: index for index in range(len(program_before.inputs) + len(program_before.constants))
    }
    steps: list[Step] = []
    upcoming = len(numbers)
    for segment in partition.segments:
        program = replacements.get(segment.digest, segment.program)
        if program.constants or not all(isinstance(step, (Aten, Call)) for step in program.steps):
            outs = tuple(range(upcoming, upcoming + len(segment.outputs)))
            operands = tuple(numbers[index] for index in segment.inputs)
            steps.append(Call(program, operands, outs))
            numbers.update(zip(segment.outputs, outs, strict=True))
            upcoming += len(outs)
            continue
        inner = {number: numbers[index] for number, index in enumerate(segment.inputs)}
        for step in program.steps:
            outs = tuple(range(upcoming, upcoming + len(step.writes)))
            steps.append(renumber_step(step, inner, outs))
            inner.update(zip(step.writes, outs, strict=True))
            upcoming += len(outs)
        numbers.update(
            (index, inner[result])
            for index, result in zip(segment.outputs, program.outputs, strict=True)
            # A region's output that is no tensor is not read by another step.
            if result is not None
        )
    outputs = tuple(None if index is None else numbers[index] for index in program_before.outputs)
    return Program(
        program_before.inputs,
        tuple(steps),
        outputs,
        program_before.constants,
        program_before.payloads,
    )


def extract_steps(
    program: Program, steps: Sequence[int], specs: Mapping[int, TensorSpec]
) -> Segment:
    """The steps at these positions as a Program of their own, inputs numbered by first use. A
    constant that they read is an input. `specs`: of the whole's values.
    """
    inner_values = {out for position in steps for out in program.steps[position].writes}
    inputs = list(
        dict.fromkeys(
            i for position in steps for i in program.steps[position].reads if i not in inner_values
        )
    )
    own_steps = set(steps)
    # A value that only these steps read is none of their results.
    read_outside = {
        i for q, step in enumerate(program.steps) if q not in own_steps for i in step.reads
    } | set(program.outputs)
    input_numbers = {index: number for number, index in enumerate(inputs)}
    body, numbers = renumber_steps((program.steps[position] for position in steps), input_numbers)
    outputs = tuple(sorted(inner_values & read_outside))
    # Numbered anew, so that equal parts of a Program are equal Programs.
    part = Program(
        tuple(specs[index] for index in inputs), body, tuple(numbers[index] for index in outputs)
    )
    return Segment(part, tuple(steps), tuple(inputs), outputs)


class _BlockFinder:
    """Finds the blocks of one Program. `specs`: of its values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.specs = value_specs(program)
        self._forms = self._write_forms()
        numbers: dict[str, int] = {}
        # Numbers are compared faster than texts.
        self._classes = [numbers.setdefault(form, len(numbers)) for form in self._forms]
        self._fusions = FusiblePairs(program)
        self._readers: dict[int, list[int]] = {}
        for position, step in enumerate(program.steps):
            for value in step.reads:
                self._readers.setdefault(value, []).append(position)

    def find(self, begin: int, end: int) -> Iterator[RepeatedBlock]:
        """The blocks of the steps from `begin` to `end`, in step order: the one that covers most,
        then those before and behind it.
        """
        run = self._find_longest_run(begin, end)
        if run is None:
            return
        start, length, stop = run
        block = self._cut_run(start, length, stop)
        if block is not None:
            start, stop = block.occurrences[0].steps[0], block.occurrences[-1].steps[-1] + 1
        yield from self.find(begin, start)
        if block is not None:
            yield block
        yield from self.find(stop, end)

    def is_computed_by_kernel(self, value: int) -> bool:
        """Whether a kernel that Inductor writes makes the value: no library, whose layout is its own."""
        maker = self._fusions.makers.get(value)
        return maker is not None and not is_library_call(self.program.steps[maker])

    def _write_forms(self) -> list[str]:
        """A text for each step, the same for steps that differ in nothing but the values they
        read.
        """
        forms = []
        for step in self.program.steps:
            operands = tuple(self.specs[index] for index in step.reads)
            # By its text: arguments may be of any type, and 1, 1.0 and True would be equal.
            operation = (
                (step.target, _blank(step.args), _blank(step.kwargs))
                if isinstance(step, Aten)
                else step.program.digest
                if isinstance(step, Call)
                else step
            )
            forms.append(repr((operation, operands)))
        return forms

    def _find_longest_run(self, begin: int, end: int) -> tuple[int, int, int] | None:
        """Start, length of a block, and end of the longest run of equal blocks; None where no run
        has enough of them.
        """
        classes, steps = self._classes, self.program.steps
        positions_of_class: dict[int, list[int]] = {}
        for position in range(begin, end):
            if is_library_call(steps[position]):
                positions_of_class.setdefault(classes[position], []).append(position)
        distances = Counter(
            later - earlier
            for positions in positions_of_class.values()
            for number, earlier in enumerate(positions)
            # A layer may have several equal products, such as those of attention.
            for later in positions[number + 1 : number + 1 + _MAX_EQUAL_PRODUCTS]
        )
        best: tuple[int, int, int] | None = None
        most_matches = 0
        # Of equally long runs the shorter block counts, which comes first.
        for length in sorted(distance for distance, _ in distances.most_common(_MAX_LENGTHS)):
            match_count = 0
            for position in range(begin, end - length + 1):
                if position < end - length and classes[position] == classes[position + length]:
                    match_count += 1
                    continue
                start = position - match_count
                if (
                    match_count >= (MIN_OCCURRENCES - 1) * length
                    and match_count > most_matches
                    and sum(map(is_library_call, steps[start : start + length])) >= _MIN_PRODUCTS
                ):
                    most_matches, best = match_count, (start, length, position + length)
                match_count = 0
        return best

    def _cut_run(self, start: int, length: int, stop: int) -> RepeatedBlock | None:
        """The block of a run, beginning at the step of a layer where a cut costs least; None where
        the wiring of its layers differs too much.
        """
        begins = [
            begin
            for begin in range(start, start + length)
            if (stop - begin) // length >= MIN_OCCURRENCES
        ]
        # By what the layers are, not by where they stand: the cut of a model with more layers, or
        # with another head, must be the same.
        begin = min(
            begins,
            key=lambda begin: (
                # At the first cut between two occurrences.
                self._fusions.count_parted(begin + length, length),
                self._fusions.count_parted_epilogues(begin + length, length),
                self._count_crossing(begin + length),
                self._forms[begin : begin + length],
            ),
        )
        segments = [
            extract_steps(self.program, range(first, first + length), self.specs)
            for first in range(begin, stop - length + 1, length)
        ]
        digest, count = Counter(segment.digest for segment in segments).most_common(1)[0]
        if count < MIN_OCCURRENCES:
            return None
        equal_segments = tuple(segment for segment in segments if segment.digest == digest)
        lost_fusions = self._fusions.count_parted(begin + length, length)
        return RepeatedBlock(
            equal_segments, lost_fusions + self._count_large_shared(equal_segments)
        )

    def _count_large_shared(self, segments: Sequence[Segment]) -> int:
        """How many values that all segments read are about as large as what a kernel computes with
        them, and made by a kernel: in the whole Inductor computes such a value anew in each layer,
        from less memory. The position bias of T5 is one.
        """
        shared = set.intersection(*(set(segment.inputs) for segment in segments))
        steps = set(segments[0].steps)
        return sum(
            2 * math.prod(self.specs[value].shape)
            > max(
                map(self._count_elements, steps & set(self._fusions.list_users(value))), default=0
            )
            > 0
            for value in shared
            if self.is_computed_by_kernel(value)
        )

    def _count_elements(self, position: int) -> int:
        """Elements that the step computes; 0 for a library call."""
        step = self.program.steps[position]
        if is_library_call(step):
            return 0
        return max(math.prod(self.specs[value].shape) for value in step.writes)

    def _count_crossing(self, cut: int) -> int:
        """How many values made before the step at `cut` are read from there on."""
        earlier_values = {value for step in self.program.steps[:cut] for value in step.writes}
        return sum(
            any(reader >= cut for reader in readers)
            for value, readers in self._readers.items()
            if value in earlier_values
        )


def _has_equal_products(program: Program) -> bool:
    products = Counter(
        step.target for step in program.steps if isinstance(step, Aten) and is_library_call(step)
    )
    return any(count >= MIN_OCCURRENCES for count in products.values())


def _blank(arg: Any) -> Any:
    """An argument with its values left out."""
    if isinstance(arg, Value):
        return "value"
    return tuple(_blank(item) for item in arg) if isinstance(arg, tuple) else arg
