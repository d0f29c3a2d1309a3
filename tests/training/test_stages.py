"""Collect, learn, go on alone, in a synthetic world: what counts, what is on record, and what a
kill costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.training.stage_cases import CODEC, EVERY, SMALL, recorder, writer
from tests.training.world import TASKS, Rules, SyntheticEvaluator
from torch_cudal1.core.errors import TargetError
from torch_cudal1.ingest.llm.appraise import Appraiser
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.training.stages import (
    CollectConfig,
    RowConfig,
    SelfsupConfig,
    build_sft_rows,
    collect,
    count_outcomes,
    self_supervise,
)
from torch_cudal1.training.supervised import SftRow, fine_tune

pytestmark = pytest.mark.usefixtures("one_thread")


class Down:
    """An endpoint that does not answer for one task."""

    name = "down"

    def sample(
        self, prompts: Sequence[str], *, count: int, temperature: float, seed: int
    ) -> list[list[str]]:
        if any(prompt.startswith("t3") for prompt in prompts):
            raise ConnectionError("no route to host")
        return [["a0 b0"] for _ in prompts]


def test_collecting_stops_at_two_different_successes_and_keeps_every_attempt():
    evaluator, database = SyntheticEvaluator(), Database(None)
    problems = collect(
        Appraiser(CODEC, evaluator, database), TASKS, [Rules("rules", ["a0 b2", "junk", "a0 b0", "a0 b0", "a1 b0"])],
        CollectConfig(), seed=0,
    )  # fmt: skip
    counts = count_outcomes(database)["rules"]
    assert problems == []
    assert counts == {"attempts": 30, "wrong": 6, "undecodable": 6, "ok": 18}
    assert len(evaluator.asked) == 6 * 4, (
        "a success met again is measured a second time, a failure and a junk answer never"
    )


def test_collecting_gives_up_after_twenty_attempts():
    database = Database(None)
    collect(
        Appraiser(CODEC, SyntheticEvaluator(), database),
        TASKS[:1],
        [Rules("poor", ["junk"])],
        CollectConfig(),
        seed=0,
    )
    assert count_outcomes(database)["poor"] == {"attempts": 20, "undecodable": 20}


def test_an_endpoint_that_is_down_for_a_task_is_reported_by_name_and_the_run_goes_on():
    database = Database(None)
    config = CollectConfig(attempts=2, wanted=1)
    problems = collect(
        Appraiser(CODEC, SyntheticEvaluator(), database), TASKS, [Down()], config, seed=0
    )
    assert problems == ["down, task t3: no route to host"]
    assert count_outcomes(database)["down"] == {"attempts": 5, "ok": 5}


def test_a_second_collect_asks_nothing_again(tmp_path):
    generator = Rules("rules", ["a0 b0", "a1 b0"])
    for expected_calls in (2, 2):
        with Database(tmp_path / "samples.jsonl") as database:
            collect(
                Appraiser(CODEC, SyntheticEvaluator(), database),
                TASKS,
                [generator],
                CollectConfig(),
                seed=0,
            )
            assert generator.calls == expected_calls
            assert len(database) == 12


def test_rows_are_successes_plain_and_with_exemplars_worst_first():
    database = Database(None)
    generators = [Rules("one", ["a0 b0", "a1 b0"]), Rules("two", ["a2 b0", "a3 b2", "a3 b0"])]
    collect(
        Appraiser(CODEC, SyntheticEvaluator(), database),
        TASKS[:1],
        generators,
        CollectConfig(),
        seed=0,
    )
    rows = build_sft_rows(CODEC, TASKS[:1], database, seed=0)
    assert [row.prompt for row in rows].count("t0 <go>") == 4
    assert not any("b2" in row.answer for row in rows), "a failure is nothing to learn from"
    shown = [row for row in rows if "<ex>" in row.prompt]
    assert len(shown) == 4
    assert all(row.answer not in row.prompt for row in shown)
    best = build_sft_rows(CODEC, TASKS[:1], database, seed=0, config=RowConfig(improver=True))
    scores = {"a0 b0": 0.5, "a1 b0": 1.0, "a2 b0": 1.5, "a3 b0": 2.0}
    for row in best:
        shown_programs = [program for program in scores if program in row.prompt]
        assert all(scores[row.answer] > scores[shown_program] for shown_program in shown_programs)


def test_success_rises_over_the_rounds_of_self_supervision(start, tmp_path):
    model, stage_recorder = writer(start), recorder(tmp_path, SyntheticEvaluator(), "selfsup")
    fine_tune(
        model,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    config = SelfsupConfig(rounds=4, samples=16, fit=SMALL)
    facts = self_supervise(stage_recorder, CODEC, model, config, folder=tmp_path / "selfsup")
    assert facts[-1]["success"] > facts[0]["success"] + 0.1
    stage_recorder.appraiser.database.close()


@pytest.mark.parametrize("dies_after", [5, 40])
def test_self_supervision_that_was_killed_ends_as_if_it_had_not_been(start, tmp_path, dies_after):
    taught = writer(start)
    fine_tune(
        taught,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    taught.save(tmp_path / "sft")
    config = SelfsupConfig(rounds=3, samples=4, fit=replace(SMALL, steps=5))
    models = []
    for name, deaths in (("whole", (None,)), ("cut", (dies_after, None))):
        for death in deaths:
            model, stage_recorder = (
                writer(tmp_path / "sft"),
                recorder(tmp_path / name, SyntheticEvaluator(death), "selfsup"),
            )
            if death is not None:
                with pytest.raises(KeyboardInterrupt):
                    self_supervise(
                        stage_recorder, CODEC, model, config, folder=tmp_path / name / "selfsup"
                    )
            else:
                self_supervise(
                    stage_recorder, CODEC, model, config, folder=tmp_path / name / "selfsup"
                )
            stage_recorder.appraiser.database.close()
        models.append(model)
    for parameter, resumed_parameter in zip(
        *(model.model.parameters() for model in models), strict=True
    ):
        assert torch.equal(parameter, resumed_parameter)


def test_a_task_whose_reference_cannot_be_evaluated_is_reported_once_and_the_others_go_on(tmp_path):
    class Refusing(SyntheticEvaluator):
        def measure(self, task, programs):
            if task.id == TASKS[1].id:
                raise TargetError(task.id, "its reference cannot be used")
            return super().measure(task, programs)

    config = CollectConfig(attempts=2, wanted=1)
    with Database(tmp_path / "samples.jsonl") as database:
        generators = [Rules("one", EVERY), Rules("two", EVERY[1:])]
        problems = collect(
            Appraiser(CODEC, Refusing(), database), TASKS, generators, config, seed=0
        )
        assert problems == [f"task {TASKS[1].id}: its reference cannot be used"]
        assert {sample.measured.task for sample in database.samples()} == {
            task.id for task in TASKS
        } - {TASKS[1].id}
