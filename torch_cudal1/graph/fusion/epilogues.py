"""What follows into a fusion group without being element-wise, and what of it a fusion group lets
go of at its end.

bmm ── view ── permute ── mul ── clone            bmm ── view │ permute ── (another reader)
x ── slice ── neg ─┐
x ── slice ─────── cat ── * sin ── + ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from torch_cudal1.graph.fusion.uses import Uses
from torch_cudal1.ir.program import Aten, Step, TensorSpec

__all__ = ["drop_loose_ends", "find_costly_ends", "follows_product", "joins_halves"]

_RESHAPES = frozenset(f"aten.{name}.default" for name in ("view", "_unsafe_view", "unsqueeze"))
# Apart from reshapes: whether rows stay rows depends on the strides.
_PERMUTES = frozenset({"aten.permute.default", "aten.transpose.int"})
_CAT, _MOST_PIECES = "aten.cat.default", 4
# batch norm in inference: element by element, and after a convolution a pass over memory saved;
# alone Inductor does as well
_NORM_OF_CHANNELS = "aten._native_batch_norm_legit_no_training.default"


def follows_product(step: Step, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether the step may join a fusion group, of a product only: layout that leaves rows as they
    are, or batch norm in inference.

    `specs`: of all values.
    """
    return isinstance(step, Aten) and (
        step.target == _NORM_OF_CHANNELS or step.target in _RESHAPES or _keeps_rows(step, specs)
    )


def joins_halves(
    position: int, uses: Uses, specs: Mapping[int, TensorSpec], fusible: Callable[[Step], bool]
) -> bool:
    """Whether the step puts halves of rows together, as rotary embeddings do: some made for it
    alone by element-wise steps, and read by such steps again. A kernel then reads both halves where
    it writes one. `fusible`: says what is element-wise.
    """
    step = uses.steps[position]
    # `cat` is not element-wise: an element comes from one of several operands.
    if not isinstance(step, Aten) or step.target != _CAT:
        return False
    (result,) = step.writes
    spec, parts = specs[result], tuple(step.reads)
    dim = step.args[1] if len(step.args) > 1 else dict(step.kwargs).get("dim", 0)
    if (
        not spec.shape
        # Along another dim the pieces are whole rows, and nothing is gained by reading them
        # together.
        or dim not in (-1, len(spec.shape) - 1)
        or any(specs[part].dtype != spec.dtype for part in parts)
    ):
        return False
    if any(len(specs[part].shape) != len(spec.shape) for part in parts):
        return False
    # A kernel selects among pieces of one size.
    unit = math.gcd(*(specs[part].shape[-1] for part in parts))
    makers = [
        maker
        for part in parts
        if (maker := uses.maker.get(part)) is not None and fusible(uses.steps[maker])
    ]
    # -1 stands for the result of the whole Program.
    readers = [uses.steps[reader] for reader in uses.readers.get(result, ()) if reader >= 0]
    few = unit > 0 and spec.shape[-1] // unit <= _MOST_PIECES
    return (
        few
        and bool(makers)
        # A half that another step reads would have to be written too.
        and all(uses.is_used_only_in(maker, {position}) for maker in makers)
        and any(map(fusible, readers))
    )


def drop_loose_ends(steps: tuple[int, ...], uses: Uses) -> tuple[int, ...]:
    """The fusion group without layout steps at its end that no step of it reads, and without a
    second output that shares memory with the first.
    """
    # Second views first: what they leave may be bare layout.
    return _drop_bare_layout(_drop_second_views(steps, uses), uses)


def find_costly_ends(
    steps: Collection[int],
    uses: Uses,
    specs: Mapping[int, TensorSpec],
    fusible: Callable[[Step], bool],
) -> frozenset[int]:
    """The steps at the end of a product's fusion group without which it writes fewer bytes, and
    which the steps that read them can do as well: the square of an RMS norm, of which the norm's
    kernel needs no copy in memory. `fusible`: says what such a reader is.
    """
    remaining, fewest = set(steps), _count_output_bytes(steps, uses, specs)
    costly_ends: frozenset[int] = frozenset()
    # From the end, since dropping a step makes the one before it the last.
    for position in sorted(steps, reverse=True):
        step = uses.steps[position]
        readers = {reader for out in step.writes for reader in uses.readers.get(out, frozenset())}
        if (
            not fusible(step)
            or not readers
            or readers & remaining
            # -1 stands for the outputs of the whole Program.
            or not all(reader >= 0 and fusible(uses.steps[reader]) for reader in readers)
        ):
            continue
        output_bytes = _count_output_bytes(remaining - {position}, uses, specs)
        if output_bytes > fewest:
            continue
        # A square of a number in fp32 is as many bytes as the number; the half that both are made
        # of is fewer.
        remaining.discard(position)
        if output_bytes < fewest:
            fewest, costly_ends = output_bytes, frozenset(steps) - remaining
    return costly_ends


def _count_output_bytes(steps: Collection[int], uses: Uses, specs: Mapping[int, TensorSpec]) -> int:
    """What a kernel of these steps writes."""
    return sum(
        specs[out].size_bytes
        for position in steps
        for out in uses.steps[position].writes
        if uses.readers.get(out, frozenset()) - set(steps)
    )


def _keeps_rows(step: Aten, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether the step permutes dimensions but leaves the innermost one: the product's result stays
    in rows.
    """
    if step.target not in _PERMUTES:
        return False
    (source,), (result,) = step.reads, step.writes
    # The stride of the innermost dim that has more than one element: 1 means rows.
    last = next(
        (stride for size, stride in zip(*_reverse_dims(specs[source]), strict=True) if size > 1), 1
    )
    return last == next(
        (stride for size, stride in zip(*_reverse_dims(specs[result]), strict=True) if size > 1), 1
    )


def _reverse_dims(spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides, the last dimension first."""
    return spec.shape[::-1], spec.strides[::-1]


def _permutes(step: Step) -> bool:
    return isinstance(step, Aten) and step.target in _PERMUTES


def _drop_second_views(steps: tuple[int, ...], uses: Uses) -> tuple[int, ...]:
    """The fusion group without reshapes at its end whose operand is an output too: a kernel does
    not write two outputs to one memory.

    This occurs in training: the forward keeps for its backward the tensor that the next layer reads
    in another shape.
    """
    remaining = set(steps)
    # From the end, since dropping a step makes the one before it the last.
    for position in reversed(steps):
        step = uses.steps[position]
        if isinstance(step, Aten) and step.target in _RESHAPES | _PERMUTES:
            (source,), (result,) = step.reads, step.writes
            if (
                uses.readers.get(source, frozenset()) - remaining
                and not uses.readers.get(result, frozenset()) & remaining
            ):
                remaining.discard(position)
    return tuple(position for position in steps if position in remaining)


def _drop_bare_layout(steps: tuple[int, ...], uses: Uses) -> tuple[int, ...]:
    """The fusion group without permutations, and reshapes after them, that no step of it reads:
    such steps compute nothing.
    """
    remaining = set(steps)
    turned = {
        out
        for position in steps
        for out in uses.steps[position].writes
        if _permutes(uses.steps[position])
    }
    for position in steps:
        step = uses.steps[position]
        # A reshape of a permuted value is layout of it too.
        if isinstance(step, Aten) and step.target in _RESHAPES and turned & set(step.reads):
            turned |= set(step.writes)
    for position in reversed(steps):
        results = set(uses.steps[position].writes)
        if results <= turned and not any(
            uses.readers.get(out, frozenset()) & remaining for out in results
        ):
            remaining.discard(position)
    return tuple(position for position in steps if position in remaining)
