"""Indices as affine forms over the atoms of an iteration space: how views and broadcasts vanish
into address arithmetic.

An atom is one loop variable; a form is `offset + sum(coefficient * atom)`, exact for every reshape,
permutation, slice or expand that the kernels accept. A reshape that cuts an atom in two raises
`AtomSplit`: the caller splits that atom and starts over with the finer space. Nothing here knows about
tensors, memory or Triton.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_cudal1.core.errors import NotLowerableError

__all__ = [
    "ZERO",
    "AffineExpr",
    "Atom",
    "AtomSplit",
    "Index",
    "flatten",
    "linear_index",
    "next_power_of_two",
    "row_major",
    "unflatten",
]


@dataclass(frozen=True, slots=True)
class Atom:
    """Loop variable number `id`, running over `extent` values. `column`: it runs inside a
    reduction.
    """

    id: int
    extent: int
    column: bool = False


@dataclass(frozen=True, slots=True)
class AffineExpr:
    """`offset + sum(c * atom)` over `terms`, at most one term an atom, no zero coefficient, sorted
    by atom.
    """

    offset: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    def __add__(self, other: AffineExpr) -> AffineExpr:
        sums: dict[Atom, int] = dict(self.terms)
        for atom, coefficient in other.terms:
            sums[atom] = sums.get(atom, 0) + coefficient
        # Sorted and without zeros: equal forms are equal values, which memo tables rely on.
        terms = sorted(((a, c) for a, c in sums.items() if c), key=lambda term: term[0].id)
        return AffineExpr(self.offset + other.offset, tuple(terms))

    def scale(self, by: int) -> AffineExpr:
        """The form times a number."""
        return (
            AffineExpr(self.offset * by, tuple((a, c * by) for a, c in self.terms)) if by else ZERO
        )

    def shift(self, by: int) -> AffineExpr:
        """The form plus a number."""
        return AffineExpr(self.offset + by, self.terms)

    def coefficient(self, atom: Atom) -> int:
        """What one step of `atom` adds."""
        return dict(self.terms).get(atom, 0)

    @property
    def columns(self) -> bool:
        """Whether it varies inside a reduction."""
        return any(atom.column for atom, _ in self.terms)

    @property
    def rows(self) -> bool:
        """Whether it varies between rows."""
        return any(not atom.column for atom, _ in self.terms)

    @property
    def largest(self) -> int:
        """The largest value it takes (every coefficient here is positive)."""
        # Coefficients are positive: flips are no views here, and a scan's negative step is in the
        # offset.
        return self.offset + sum(c * (atom.extent - 1) for atom, c in self.terms)


Index = tuple[AffineExpr, ...]
ZERO = AffineExpr()


class AtomSplit(Exception):
    """Atom `atom` must become two: an outer one and an inner one of extent `inner`. A signal; it
    never leaves this package.
    """

    def __init__(self, atom: Atom, inner: int) -> None:
        self.atom, self.inner = atom, inner
        super().__init__(atom, inner)


def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense row-major tensor: `row_major((2, 3)) == (3, 1)`."""
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def linear_index(atoms: tuple[Atom, ...]) -> AffineExpr:
    """The row-major position over `atoms`, first one outermost."""
    total = ZERO
    for atom, stride in zip(atoms, row_major(tuple(a.extent for a in atoms)), strict=True):
        # A variable of a single value adds nothing; without it equal forms stay equal.
        if atom.extent > 1:
            total = total + AffineExpr(0, ((atom, stride),))
    return total


def flatten(index: Index, strides: tuple[int, ...]) -> AffineExpr:
    """The dot product of an index with strides."""
    total = ZERO
    for form, stride in zip(index, strides, strict=True):
        total = total + form.scale(stride)
    return total


def unflatten(form: AffineExpr, sizes: tuple[int, ...]) -> Index:
    """The digits of `form` in the mixed radix `sizes`: digit i is `(form // stride_i) % size_i`.

    Raises AtomSplit when an atom spans two digits and can be split there, NotLowerableError when
    the digits are not affine.
    """
    return tuple(
        _take_digit(form, stride, size)
        for size, stride in zip(sizes, row_major(sizes), strict=True)
    )


def _take_digit(form: AffineExpr, stride: int, size: int) -> AffineExpr:
    upper = stride * size
    terms: list[tuple[Atom, int]] = []
    # The largest value that the digits up to this one take: it must not carry.
    reach = form.offset % upper
    for atom, coefficient in form.terms:
        # Whole multiples of the digit's range leave the digit as it is.
        if coefficient >= upper:
            if coefficient % upper:
                raise NotLowerableError(
                    f"a reshape is not affine: step {coefficient} against {upper}"
                )
            continue
        # The variable's values lie on both sides of the digit's border: an outer and an inner
        # variable would each lie on one.
        for bound in (upper, stride):
            if coefficient < bound < coefficient * atom.extent:
                _split_atom(atom, coefficient, bound)
        reach += coefficient * (atom.extent - 1)
        if coefficient >= stride:
            if coefficient % stride:
                raise NotLowerableError(
                    f"a reshape is not affine: step {coefficient} against {stride}"
                )
            terms.append((atom, coefficient // stride))
    lower = form.offset % stride + sum(c * (a.extent - 1) for a, c in form.terms if c < stride)
    # A carry would make a digit depend on two variables at once, which no affine form can say.
    if reach >= upper or lower >= stride:
        raise NotLowerableError("a reshape carries from one digit to the next")
    return AffineExpr(form.offset % upper // stride, tuple(terms))


def _split_atom(atom: Atom, coefficient: int, bound: int) -> None:
    inner = bound // coefficient
    if bound % coefficient or atom.extent % inner:
        raise NotLowerableError(
            f"a reshape cuts a dimension of {atom.extent} at {bound}/{coefficient}"
        )
    # A signal, no refusal: the caller starts over with the finer space.
    raise AtomSplit(atom, inner)
