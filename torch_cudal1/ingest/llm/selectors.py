"""Which earlier programs a prompt shows: pure functions of a seed, a task and a view of the
database.

So all members of a group and all ranks show the same programs without communicating. Programs are
shown worst to best. `Buckets` is the paper's rule (section 2.4.3, equation 1), `Islands` its
alternative; the paper compares them with `Uniform` and `Nothing`. `search.evolution.buckets` makes
the buckets and draws from them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from torch_cudal1.ingest.llm.database import DatabaseView, Success
from torch_cudal1.ingest.llm.records import Exemplar
from torch_cudal1.search.evolution.buckets import (
    draw_by_softmax,
    draw_contrasting,
    group_by_score,
    standardise_scores,
)

__all__ = [
    "SELECTORS",
    "Best",
    "Buckets",
    "Islands",
    "Nothing",
    "Selector",
    "SelectorName",
    "Uniform",
    "make_selector",
    "select_exemplars",
]

SelectorName: TypeAlias = Literal["none", "random", "bucket", "island", "top"]


class Selector(Protocol):
    """Draws programs of a task from a view."""

    def draw(self, seed: int, task: str, view: DatabaseView) -> list[Success]:
        """The programs to show, in any order; fewer than asked for where there are fewer. A pure
        function.
        """
        ...


@dataclass(frozen=True)
class Nothing:
    """No exemplars: the same prompt for ever."""

    def draw(self, seed: int, task: str, view: DatabaseView) -> list[Success]:
        """None."""
        return []


@dataclass(frozen=True)
class Uniform:
    """`count` different successes, all equally likely."""

    count: int = 2

    def draw(self, seed: int, task: str, view: DatabaseView) -> list[Success]:
        """Without regard to scores."""
        entries = view.entries(task)
        return _make_random("random", seed, task, view).sample(
            list(entries), min(self.count, len(entries))
        )


@dataclass(frozen=True)
class Best:
    """The `count` fastest."""

    count: int = 2

    def draw(self, seed: int, task: str, view: DatabaseView) -> list[Success]:
        """The end of the list; one score is as good as another equal one."""
        # A view is sorted from worst to best.
        return list(view.entries(task)[-self.count :])


@dataclass(frozen=True)
class Buckets:
    """`count` distinct score buckets, drawn with probability ~ exp(mean score / tau), then one
    program of each, uniformly.

    `width` of a bucket and `tau` are in standard deviations of the task's log-scores. Where a task
    has fewer buckets, fewer programs are shown: two of one speed are no contrast.
    """

    count: int = 2
    tau: float = 1.0
    width: float = 0.5

    def __post_init__(self) -> None:
        if not (self.count >= 1 and self.tau > 0 and self.width > 0):
            raise ValueError(f"expected count of at least 1, tau and width above 0; came {self}")

    def draw(self, seed: int, task: str, view: DatabaseView) -> list[Success]:
        """Equation 1."""
        entries = view.entries(task)
        dice = _make_random("bucket", seed, task, view)
        drawn = draw_contrasting(
            [entry.score for entry in entries],
            dice,
            count=self.count,
            tau=self.tau,
            width=self.width,
        )
        return [entries[index] for index in drawn]

    def buckets(self, entries: Sequence[Success]) -> list[tuple[float, list[Success]]]:
        """The buckets of a task, slowest first: mean standard score, programs."""
        groups = group_by_score([entry.score for entry in entries], self.width)
        return [(mean, [entries[index] for index in members]) for mean, members in groups]


@dataclass(frozen=True)
class Islands:
    """Islands that evolve apart (FunSearch): an island is drawn uniformly, then `count` of its
    programs by softmax.

    A program lives on the island that its digest says. Every `period` generations the weaker half
    of the islands loses what it had and starts again from the best program of a stronger one; only
    the last such event is looked at, so a view suffices.
    """

    count: int = 2
    islands: int = 4
    period: int = 16
    tau: float = 1.0

    def __post_init__(self) -> None:
        if not (min(self.count, self.islands, self.period) >= 1 and self.tau > 0):
            raise ValueError(f"expected counts of at least 1 and tau above 0; came {self}")

    def draw(self, seed: int, task: str, view: DatabaseView) -> list[Success]:
        """Programs of one island."""
        dice = _make_random("island", seed, task, view)
        # Without the empty islands: a draw of one would show no exemplar.
        inhabited = [entries for entries in self.population(task, view) if entries]
        if not inhabited:
            return []
        entries = dice.choice(inhabited)
        # Standardised, so that `tau` means the same for tasks with small and large speed-ups.
        scores = standardise_scores([entry.score for entry in entries])
        return [entries[index] for index in draw_by_softmax(scores, self.tau, self.count, dice)]

    def population(self, task: str, view: DatabaseView) -> list[list[Success]]:
        """The programs of each island at the view's generation."""
        homes: list[list[Success]] = [[] for _ in range(self.islands)]
        for entry in view.entries(task):
            # By digest: a program has the same home on every rank, without a record of where it was
            # made.
            homes[int(entry.digest, 16) % self.islands].append(entry)
        # Only the last such event counts, so a view is enough to place every program.
        reset = view.generation // self.period * self.period
        # Islands are compared by what they had at the event, so later successes do not move it.
        before = [[entry for entry in home if entry.since <= reset] for home in homes]
        # Before the first event nothing is lost, and one island has no stronger neighbour.
        if not reset or self.islands < 2 or not any(before):
            return homes
        ranked = sorted(
            # The index second, so that all ranks agree on the weaker half.
            range(self.islands),
            key=lambda i: (before[i][-1].score if before[i] else 0.0, i),
        )
        weak, strong = (
            ranked[: self.islands // 2],
            # An empty island has no founder to give.
            [i for i in ranked[self.islands // 2 :] if before[i]],
        )
        for rank, island in enumerate(weak):
            # In turn, since there may be fewer strong islands than weak ones.
            founder = before[strong[rank % len(strong)]][-1]
            # What came to the island after the event stays.
            settlers = [entry for entry in homes[island] if entry.since > reset]
            homes[island] = sorted(
                [founder, *settlers], key=lambda entry: (entry.score, entry.digest)
            )
        return homes


SELECTORS: Mapping[str, type[Selector]] = {
    "none": Nothing,
    "random": Uniform,
    "bucket": Buckets,
    "island": Islands,
    "top": Best,
}


def make_selector(name: str, **options: float) -> Selector:
    """The selector of that name. Raises ValueError for an unknown name or option."""
    if name not in SELECTORS:
        raise ValueError(f"selector {name!r}; expected one of {', '.join(SELECTORS)}")
    try:
        return SELECTORS[name](**options)
    except TypeError as error:
        raise ValueError(f"selector {name!r}: {error}") from error


def select_exemplars(
    chosen: Selector, seed: int, task: str, view: DatabaseView, *, shuffled: bool = False
) -> tuple[Exemplar, ...]:
    """What a prompt shows, worst to best. `shuffled`: in an order that tells nothing, for
    comparison.
    """
    # Worst to best, as the paper's prompt shows them; the digest orders equal scores the same on
    # every rank.
    drawn = sorted(chosen.draw(seed, task, view), key=lambda entry: (entry.score, entry.digest))
    if shuffled:
        _make_random("order", seed, task, view).shuffle(drawn)
    return tuple(Exemplar(entry.program, entry.score) for entry in drawn)


def _make_random(purpose: str, seed: int, task: str, view: DatabaseView) -> random.Random:
    """A generator for one purpose, the same on every machine."""
    # A digest, not hash(): Python salts that, and all ranks must draw the same.
    key = hashlib.sha256(f"{purpose}\0{seed}\0{task}\0{view.generation}".encode()).digest()
    return random.Random(int.from_bytes(key[:8], "big"))
