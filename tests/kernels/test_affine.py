"""Affine index forms are exact: every reshape is compared with numpy's own index arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from torch_cudal1.core.errors import NotLowerableError
from torch_cudal1.kernels.expr.affine import (
    AffineExpr,
    Atom,
    AtomSplit,
    flatten,
    linear_index,
    row_major,
    unflatten,
)

# atoms of the iteration space -> sizes it is read as
AFFINE = [
    ((6, 4), (6, 4)),
    ((6, 4), (24,)),
    ((2, 3, 4), (6, 4)),
    ((2, 3, 4), (2, 12)),
    ((5,), (1, 5, 1)),
    ((2, 3, 4), (2, 3, 2, 2)),
]


def settle(
    sizes: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[Atom, ...], tuple[AffineExpr, ...]]:
    """Refine the atoms until the target's digits are affine, as the scheduler does."""
    parts = list(sizes)
    for _ in range(8):
        atoms = tuple(Atom(i, size) for i, size in enumerate(parts))
        try:
            return atoms, unflatten(linear_index(atoms), target)
        except AtomSplit as cut:
            parts[cut.atom.id : cut.atom.id + 1] = [parts[cut.atom.id] // cut.inner, cut.inner]
    raise AssertionError("never settles")


def value(form: AffineExpr, at: dict[Atom, int]) -> int:
    return form.offset + sum(c * at[a] for a, c in form.terms)


@pytest.mark.parametrize(
    ("sizes", "target"),
    [*AFFINE, ((24,), (2, 3, 4)), ((6, 4), (3, 8)), ((4, 6), (2, 12)), ((12, 2), (2, 3, 4))],
)
def test_a_reshape_reads_every_element_at_numpys_index(
    sizes: tuple[int, ...], target: tuple[int, ...]
) -> None:
    atoms, digits = settle(sizes, target)
    for flat, point in enumerate(itertools.product(*(range(a.extent) for a in atoms))):
        at = dict(zip(atoms, point, strict=True))
        assert tuple(value(d, at) for d in digits) == tuple(
            int(i) for i in np.unravel_index(flat, target)
        )


def test_flatten_undoes_unflatten() -> None:
    form = linear_index((Atom(0, 6), Atom(1, 2), Atom(2, 2)))
    for sizes in ((6, 2, 2), (6, 4), (12, 2), (24,)):
        assert flatten(unflatten(form, sizes), row_major(sizes)) == form


@pytest.mark.parametrize(("sizes", "target"), [((6,), (4,)), ((5, 5), (2, 2))])
def test_digits_that_are_not_affine_are_refused(
    sizes: tuple[int, ...], target: tuple[int, ...]
) -> None:
    with pytest.raises((NotLowerableError, AtomSplit)):
        unflatten(linear_index(tuple(Atom(i, size) for i, size in enumerate(sizes))), target)


def test_a_shifted_slice_that_would_carry_is_refused() -> None:
    """x[:, 2:5] of width 6, read as (.., 2, 3): position 2 + j crosses a digit, which no affine
    form says.
    """
    atom = Atom(0, 3)
    with pytest.raises(NotLowerableError, match="carries"):
        unflatten(AffineExpr(2, ((atom, 1),)), (2, 3))
    assert unflatten(AffineExpr(3, ((atom, 1),)), (2, 3)) == (
        AffineExpr(1),
        AffineExpr(0, ((atom, 1),)),
    )


def test_row_major_strides() -> None:
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major(()) == ()
    assert math.prod((2, 3, 4)) == row_major((9, 2, 3, 4))[0]
