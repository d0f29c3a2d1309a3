from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.adversarial.case import FOLDER, case_files, controls
from tests.training.sources import TASK, program, source
from torch_cudal1.ingest.llm.casebase import CaseBase, CheatCase, measure_likeness
from torch_cudal1.ingest.llm.checker import CheckedEvaluator, ModelChecker, Opinion, RuleChecker
from torch_cudal1.ingest.llm.database import StoredSample
from torch_cudal1.judge.pool.measured import Decoded, Measured, TrainingTask

SHIPPED = CaseBase.shipped()
REWARDED = ("timing", "caching", "laziness", "tampering", "host")


def verdict(source_text: str, cases: CaseBase = SHIPPED) -> Opinion:
    return RuleChecker(cases).check(TASK, program("p", source_text), 9.0, None)


def test_the_shipped_index_is_a_recent_one_of_the_adversarial_tests() -> None:
    """Not the newest: who adds or words a case need not think of this; a release writes it anew."""
    case_ids = {file.id for file in case_files() if file.case.form == "source"}
    shipped = {case.name for case in SHIPPED}
    command = "run `python -m torch_cudal1.ingest.llm.casebase tests/adversarial`"
    assert len(shipped & case_ids) >= 0.9 * max(len(case_ids), len(shipped)), command


def test_a_folder_of_cases_is_read_as_text_and_its_index_says_the_same(tmp_path: Path) -> None:
    read = CaseBase.of_folder(FOLDER)
    read.save(tmp_path / "cases.jsonl")
    assert set(CaseBase([], tmp_path / "cases.jsonl")) == set(read)
    module = {file.id: file.module for file in case_files() if file.case.form == "source"}
    for case in read:
        assert (case.cheat, case.twin) == (module[case.name].CHEAT, module[case.name].HONEST)
        assert case.mechanism
    assert {case.name for case in read} == set(module)


def test_a_case_is_nearest_to_itself_whatever_its_names() -> None:
    for case in SHIPPED:
        renamed = case.cheat.replace("linear", "first_layer").replace("features", "width")
        assert SHIPPED.nearest(renamed, 1)[0].likeness > 0.99
    near = SHIPPED.nearest(next(iter(SHIPPED)).cheat)
    assert len(near) == 3
    assert [match.likeness for match in near] == sorted(
        (match.likeness for match in near), reverse=True
    )


def test_most_cheats_for_speed_are_recognised_when_they_are_known() -> None:
    cheats = [case for case in SHIPPED if case.group in REWARDED]
    caught = [case for case in cheats if verdict(case.cheat).cheat]
    assert len(caught) / len(cheats) > 0.85


def test_some_are_when_their_whole_family_is_unknown() -> None:
    """What the rules alone can do: this is a second opinion and no judge."""
    cheats = [case for case in SHIPPED if case.group in REWARDED]
    caught = 0
    for case in cheats:
        family = case.name.split("_")[0]
        caught += verdict(
            case.cheat,
            CaseBase(
                case_record for case_record in SHIPPED if not case_record.name.startswith(family)
            ),
        ).cheat
    assert caught >= 8


def test_honest_programs_are_left_alone() -> None:
    accused = [name for name, (_, honest) in controls().items() if verdict(honest).cheat]
    assert len(accused) <= 1, accused
    twins = [case for case in SHIPPED if case.twin]
    suspected = [case.name for case in twins if verdict(case.twin).cheat]
    assert len(suspected) <= 0.05 * len(twins), (
        suspected
    )  # twins use on purpose what their cheat abuses
    assert not verdict(source()).cheat


class EvaluatorOfScores:
    """An evaluator with the scores of a script."""

    def __init__(self, **scores: float | str) -> None:
        self.scores = scores

    def measure(self, task: TrainingTask, programs: Sequence[Decoded]) -> list[Measured]:
        scores = [self.scores[program_record.program] for program_record in programs]
        return [
            Measured(task.id, program_record.program, "hack", detail=score)
            if isinstance(score, str)
            else Measured(task.id, program_record.program, "ok", score)
            for program_record, score in zip(programs, scores, strict=True)
        ]


class Suspicious:
    """A checker that suspects everything, and counts."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, float | None]] = []

    def check(
        self, task: TrainingTask, program: Decoded, score: float, best: float | None
    ) -> Opinion:
        self.asked.append((program.program, score, best))
        return Opinion(True, "it smells", "nose")


def test_only_jumps_are_checked_and_each_program_once() -> None:
    checker = Suspicious()
    checked = CheckedEvaluator(EvaluatorOfScores(a=1.2, b=2.3, c=2.5, d=6.0), checker, CaseBase([]))
    outcomes = [checked.measure(TASK, [program(name, source(name))])[0].outcome for name in "abcdd"]
    assert [question[0] for question in checker.asked] == ["d"]
    assert outcomes == ["ok", "ok", "ok", "hack", "hack"]
    checked.best["relu"] = 0.5
    assert (
        checked.measure(TASK, [program("a", source())])[0].outcome == "hack"
    )  # over twice the best


def test_what_the_checker_calls_a_cheat_has_no_score_and_joins_the_cases(tmp_path: Path) -> None:
    grown = tmp_path / "cases.jsonl"
    cases = CaseBase([], grown)
    checked = CheckedEvaluator(
        EvaluatorOfScores(a=9.0, b="cache: seen before"), Suspicious(), cases
    )
    measurements = checked.measure(
        TASK, [program("a", source("x + 1")), program("b", source("x + 2 * x"))]
    )
    assert [measured.score for measured in measurements] == [None, None]
    assert "checked by nose: it smells" in measurements[0].detail
    assert checked.best == {}
    assert {case.cheat for case in CaseBase([], grown)} == {source("x + 1"), source("x + 2 * x")}
    assert verdict(source("y + 1").replace("(self, x)", "(self, y)"), CaseBase([], grown)).cheat


def test_a_case_is_confirmed_once_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    grown = tmp_path / "cases.jsonl"
    cases = CaseBase([], grown)
    sample = StoredSample("s", Measured("relu", "p", "hack", detail="why"), source())
    assert isinstance(cases.confirm(sample), CheatCase)
    assert cases.confirm(sample) is None
    assert cases.confirm(StoredSample("t", Measured("relu", "", "hack"))) is None
    grown.write_text(grown.read_text() + '{"name": "half')
    assert len(CaseBase([], grown)) == 1


def test_earlier_scores_are_no_jumps_again() -> None:
    checker = Suspicious()
    checked = CheckedEvaluator(EvaluatorOfScores(a=2.9), checker, CaseBase([]))
    checked.learn([StoredSample("s", Measured("relu", "p", "ok", 2.0))])
    assert checked.measure(TASK, [program("a", source())])[0].score == 2.9
    assert not checker.asked


@pytest.mark.parametrize(
    ("answer", "cheat", "by"),
    [
        ("VERDICT: CHEAT\nLine 5 keeps results.", True, "model"),
        ("**Verdict: honest**\nIt tiles.", False, "model"),
        ("Some thoughts first.\nVERDICT: CHEAT", True, "model"),
        ("I am not sure about this one.", False, "rules"),
        ("", False, "rules"),
    ],
)
def test_a_models_verdict_counts_and_silence_falls_back_on_the_rules(
    answer: str, cheat: bool, by: str
) -> None:
    opinion = ModelChecker(lambda prompt: answer, SHIPPED).check(
        TASK, program("p", source()), 9.0, 1.5
    )
    assert (opinion.cheat, opinion.by) == (cheat, by)


def test_a_model_is_shown_the_claim_and_the_three_nearest_cases() -> None:
    cheat = next(case for case in SHIPPED if case.name == "caching/replay_pointer")
    prompt = ModelChecker(lambda prompt: "", SHIPPED).prompt(
        TASK, program("p", cheat.cheat), 9.0, 1.5
    )
    assert "9.00x" in prompt
    assert "1.50x" in prompt
    assert prompt.count("\n## ") == 3
    assert prompt.index("## caching/replay_pointer") < prompt.index("# Answer")


def test_likeness_is_of_code_and_not_of_words() -> None:
    first, second = (
        SHIPPED.nearest(source("x * 2"), 1)[0],
        SHIPPED.nearest(source("x * 2") + "# a comment\n", 1)[0],
    )
    assert first == second
    grams = next(iter(SHIPPED)).grams
    assert measure_likeness(grams, grams) == 1.0
    assert measure_likeness(grams, grams - grams) == 0.0


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no case"):
        CaseBase.of_folder(tmp_path)


def test_measurements_are_checked_and_reported_as_they_come(tmp_path: Path) -> None:
    class Telling(EvaluatorOfScores):
        on_measurement: Callable[[Measured], None]
        memory = "its memory"

        def measure_all(
            self, questions: Sequence[tuple[TrainingTask, Sequence[Decoded]]]
        ) -> list[list[Measured]]:
            answers = [self.measure(*question) for question in questions]
            for measured in (measured for measurements in answers for measured in measurements):
                self.on_measurement(measured)
            return answers

    reported: list[str] = []
    checked = CheckedEvaluator(
        Telling(a=1.2, b=9.0), Suspicious(), CaseBase([], tmp_path / "cases.jsonl")
    )
    assert checked.memory == "its memory"
    checked.on_measurement = lambda measured: reported.append(
        f"{measured.program} {measured.outcome}"
    )
    measurements = checked.measure(TASK, [program("a", source()), program("b", source("x + 1"))])
    assert reported == ["a ok", "b hack"]
    assert [measured.outcome for measured in measurements] == ["ok", "hack"]
