"""The first two parts of an answer, in words that can be checked: which exemplar is better and how
the two differ; what the new program takes from which.

What is true is computed from exemplars and program; what a model claims is marked against that. It
judges no speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_cudal1.training.ksl.grammar import Program

__all__ = ["Marks", "analysis_of", "marked"]

Shown = tuple[Program, float]


@dataclass(frozen=True)
class Marks:
    """How right an analysis is. `better`: it named the better exemplar; the others: shares from 0
    to 1. None: nothing to say.
    """

    better: bool | None
    differences: float | None
    intents: float | None


def analysis_of(shown: Sequence[Shown], program: Program) -> str:
    """The true analysis of a program written after seeing these exemplars: the words from <pa> to
    before <code>.
    """
    return " ".join(
        [
            "<pa>",
            *_better(shown),
            *(f"diff={name}" for name in _differing(shown)),
            "<ad>",
            *_intents(shown, program),
        ]
    )


def marked(analysis: str, shown: Sequence[Shown], program: Program) -> Marks:
    """What a written analysis got right, against the true one."""
    first, _, second = analysis.removeprefix("<pa>").partition("<ad>")
    claimed, intents = first.split(), set(second.split())
    better, true = [word for word in claimed if word.startswith("better=")], _better(shown)
    differing, wanted = (
        {word for word in claimed if word.startswith("diff=")},
        {f"diff={name}" for name in _differing(shown)},
    )
    right = set(_intents(shown, program))
    return Marks(
        better=better == true if true else None,
        differences=_overlap(differing, wanted),
        intents=_overlap(intents, right),
    )


def _overlap(claimed: set[str], true: set[str]) -> float | None:
    together = claimed | true
    return len(claimed & true) / len(together) if together else None


def _better(shown: Sequence[Shown]) -> list[str]:
    if len(shown) < 2:
        return []
    (_, one), (_, two) = shown[:2]
    return ["better=1" if one > two else "better=2" if two > one else "better=none"]


def _differing(shown: Sequence[Shown]) -> list[str]:
    """Knobs in which two exemplars differ; the template alone where that differs."""
    if len(shown) < 2:
        return []
    (one, _), (two, _) = shown[:2]
    if one.template != two.template:
        return ["tpl"]
    return [name for name in one.knobs if one[name] != two[name]]


def _intents(shown: Sequence[Shown], program: Program) -> list[str]:
    """What the program does with each knob: kept from an exemplar (the better one first), raised,
    lowered, or of its own.
    """
    if not shown or program.hack:
        return []
    order = sorted(range(len(shown[:2])), key=lambda i: -shown[i][1])
    words = [_intent("tpl", program.template, [(i, shown[i][0].template) for i in order])]
    alike = [(i, shown[i][0]) for i in order if shown[i][0].template == program.template]
    return words + [
        _intent(name, value, [(i, other[name]) for i, other in alike])
        for name, value in program.knobs.items()
    ]


def _intent(name: str, value: str, earlier: Sequence[tuple[int, str]]) -> str:
    for index, other in earlier:
        if other == value:
            return f"{name}:keep{index + 1}"
    if earlier and value.isdigit() and earlier[0][1].isdigit():
        return f"{name}:{'up' if int(value) > int(earlier[0][1]) else 'down'}"
    return f"{name}:new"
