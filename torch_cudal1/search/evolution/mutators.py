"""Crossover and mutation of kernel configs: each field comes from one of the parents, and one field
may move a step.

A config that cannot compute the fusion group, or needs more than the device has, is dropped before
it is compiled. A child takes its words (such as a method) from its family only, so it cannot use a
precision that the user has not allowed. Nothing is predicted here.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from torch_cudal1.core.errors import NotLowerableError, ProgramError
from torch_cudal1.device.specs import max_shared_bytes
from torch_cudal1.ir.program import Program
from torch_cudal1.kernels.lowering import lower
from torch_cudal1.kernels.proposal import Proposal
from torch_cudal1.kernels.registry import match_template

__all__ = ["filter_legal", "make_child"]

Field: TypeAlias = int | str | bool

_MUTATION_PROBABILITY = 0.5  # of the children have one field moved
# With 256 a thread has no registers left for anything else.
_MAX_ACCUMULATORS_PER_THREAD = 128


def make_child(
    parents: Sequence[Proposal], family: Collection[Proposal], dice: random.Random
) -> Proposal:
    """A child of `parents`: each field is taken from one of them. With _MUTATION_PROBABILITY one
    field moves to a neighbouring value of `family`, or is halved or doubled.
    """
    first = dice.choice(parents)
    # Configs with other fields, as of another method, do not mix.
    mates = [proposal for proposal in parents if proposal.config.keys() == first.config.keys()]
    config = {name: dice.choice(mates).config[name] for name in first.config}
    if config and dice.random() < _MUTATION_PROBABILITY:
        # Sorted: the draw must not depend on the order of a dict.
        name = dice.choice(sorted(config))
        config[name] = dice.choice(
            _list_neighbours(
                config[name],
                [proposal.config[name] for proposal in family if name in proposal.config],
            )
        )
    return Proposal(first.family, config)


def _list_neighbours(value: Field, family_values: Sequence[Field]) -> list[Field]:
    """Values beside `value`: of words and flags any that is known."""
    # Words only from the family: a method that none of them has may need a right that the user has
    # not given.
    if isinstance(value, (str, bool)):
        return sorted(
            {value, *(number for number in family_values if type(number) is type(value))}, key=str
        )
    # `type`, because a bool is an int too.
    numbers = sorted({number for number in family_values if type(number) is int})
    below, above = (
        [number for number in numbers if number < value][-1:],
        [number for number in numbers if number > value][:1],
    )
    return sorted({value, *below, *above, *([value // 2] if value % 2 == 0 else ()), 2 * value})


def filter_legal(program: Program, proposals: Iterable[Proposal], sm: int) -> tuple[Proposal, ...]:
    """The `proposals` that can compute a fusion group's `program` on `sm`, as far as lowering shows
    it without a compiler.
    """
    try:
        # Traced once for all proposals.
        template, workload = match_template(program)
        traced = workload.trace
    except NotLowerableError:
        return ()
    legal = []
    for proposal in proposals:
        try:
            lowered = lower(program, proposal, traced=traced)
        # An illegal config costs an exception here, and seconds in a compiler.
        except (NotLowerableError, ProgramError):
            continue
        resources = template.estimate_resources(proposal)
        shared = max((k.cuda.shared_bytes for k in lowered.kernels if k.cuda), default=0)
        if (
            # A launch with more shared memory than the device has fails.
            max(shared, resources.shared_bytes) <= max_shared_bytes(sm)
            and resources.accumulators_per_thread <= _MAX_ACCUMULATORS_PER_THREAD
        ):
            legal.append(proposal)
    return tuple(legal)
