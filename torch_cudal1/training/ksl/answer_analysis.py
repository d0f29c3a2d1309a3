"""The analysis and design sections of an answer, in words that can be checked: which exemplar is
better, in which knobs the two differ, and from which of them each knob of the new program comes.

The true analysis is computed from exemplars and program, and a model's claims are compared with it.
It says nothing about speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_cudal1.training.ksl.grammar import KslProgram

__all__ = ["AnalysisMarks", "mark_analysis", "write_analysis"]

Shown = tuple[KslProgram, float]


@dataclass(frozen=True)
class AnalysisMarks:
    """How right an analysis is. `better`: whether it named the better exemplar. `differences`,
    `intents`: shares from 0 to 1. None where there is nothing to claim.
    """

    better: bool | None
    differences: float | None
    intents: float | None


def write_analysis(shown: Sequence[Shown], program: KslProgram) -> str:
    """Write the true analysis of a program that follows these exemplars: the words from <pa> to
    before <code>.
    """
    return " ".join(
        [
            "<pa>",
            # In the order of the paper's protocol: performance analysis, algorithm design, then
            # code.
            *_name_better(shown),
            *(f"diff={name}" for name in _list_differing_knobs(shown)),
            "<ad>",
            *_list_intents(shown, program),
        ]
    )


def mark_analysis(analysis: str, shown: Sequence[Shown], program: KslProgram) -> AnalysisMarks:
    """Compare a written analysis with the true one."""
    # A model may leave out either mark; what is missing counts as not claimed.
    first, _, second = analysis.removeprefix("<pa>").partition("<ad>")
    claimed, claimed_intents = first.split(), set(second.split())
    claimed_better, true_better = (
        [word for word in claimed if word.startswith("better=")],
        _name_better(shown),
    )
    claimed_differences, true_differences = (
        {word for word in claimed if word.startswith("diff=")},
        {f"diff={name}" for name in _list_differing_knobs(shown)},
    )
    true_intents = set(_list_intents(shown, program))
    return AnalysisMarks(
        # Lists, not membership: a model that claims both answers is wrong.
        better=claimed_better == true_better if true_better else None,
        differences=_compute_overlap(claimed_differences, true_differences),
        intents=_compute_overlap(claimed_intents, true_intents),
    )


def _compute_overlap(claimed: set[str], true: set[str]) -> float | None:
    together = claimed | true
    # Jaccard index: claiming every knob would otherwise be right always. Two empty sets say
    # nothing, which is not 1.
    return len(claimed & true) / len(together) if together else None


def _name_better(shown: Sequence[Shown]) -> list[str]:
    # With one exemplar there is nothing to compare.
    if len(shown) < 2:
        return []
    (_, first_score), (_, second_score) = shown[:2]
    return [
        "better=1"
        if first_score > second_score
        else "better=2"
        if second_score > first_score
        else "better=none"
    ]


def _list_differing_knobs(shown: Sequence[Shown]) -> list[str]:
    """Knobs in which two exemplars differ; only the template where that differs."""
    if len(shown) < 2:
        return []
    (first, _), (second, _) = shown[:2]
    # Knobs of two templates have other meanings, also where they share a name.
    if first.template != second.template:
        return ["tpl"]
    return [name for name in first.knobs if first[name] != second[name]]


def _list_intents(shown: Sequence[Shown], program: KslProgram) -> list[str]:
    """What the program does with each knob: kept from an exemplar (the better one first), raised,
    lowered, or new.
    """
    # A cheat runs on default knobs, so its knobs intend nothing.
    if not shown or program.hack:
        return []
    # The better exemplar first: where both have a value, it is kept from the better one.
    order = sorted(range(len(shown[:2])), key=lambda i: -shown[i][1])
    words = [_name_intent("tpl", program.template, [(i, shown[i][0].template) for i in order])]
    # Knobs are compared within a template only.
    alike = [(i, shown[i][0]) for i in order if shown[i][0].template == program.template]
    return words + [
        _name_intent(name, value, [(i, other[name]) for i, other in alike])
        for name, value in program.knobs.items()
    ]


def _name_intent(name: str, value: str, earlier: Sequence[tuple[int, str]]) -> str:
    for index, other in earlier:
        if other == value:
            return f"{name}:keep{index + 1}"
    # Against the better exemplar alone, or "up" and "down" could both be true.
    if earlier and value.isdigit() and earlier[0][1].isdigit():
        return f"{name}:{'up' if int(value) > int(earlier[0][1]) else 'down'}"
    return f"{name}:new"
