"""Collect, learn, go on alone, in a synthetic world: what counts, what is on record, and what a
kill costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.world import (
    FIRST,
    SECOND,
    TASKS,
    WORDS,
    Rules,
    SyntheticCodec,
    SyntheticEvaluator,
)
from torch_cudal1.core.errors import TargetError
from torch_cudal1.ingest.llm.appraise import Appraiser
from torch_cudal1.ingest.llm.database import Database
from torch_cudal1.ingest.llm.journal import SampleJournal
from torch_cudal1.ingest.llm.policy import LanguageModel, TinySpec, create_tiny
from torch_cudal1.ingest.llm.selectors import selector
from torch_cudal1.training.contrastive import ContrastiveStep
from torch_cudal1.training.grpo import GrpoConfig, train_policy
from torch_cudal1.training.recorder import Recorder
from torch_cudal1.training.stages import (
    CollectConfig,
    RowConfig,
    SelfsupConfig,
    build_sft_rows,
    collect,
    count_outcomes,
    self_supervise,
)
from torch_cudal1.training.supervised import FitConfig, SftRow, fine_tune

CODEC = SyntheticCodec()
EVERY = [f"{first} {second}" for first in FIRST for second in SECOND]
SMALL = FitConfig(steps=60, batch=16, learning_rate=1e-2)
RL = GrpoConfig(steps=3, group=4, groups=3, epochs=1, save_every=2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return create_tiny(folder, WORDS, TinySpec(hidden=32, layers=2, heads=2, context=64))


def writer(folder: Path) -> LanguageModel:
    return LanguageModel.load(folder, max_new_tokens=4)


def recorder(folder: Path, evaluator: SyntheticEvaluator, stage: str) -> Recorder:
    """Of a run in `folder`; call `database.close()` on it before the next one."""
    appraiser = Appraiser(CODEC, evaluator, Database(folder / "samples.jsonl"))
    return Recorder(appraiser, TASKS, SampleJournal(folder / f"{stage}.jsonl"), stage, seed=0)


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


def test_an_endpoint_that_is_down_for_a_task_is_told_with_its_name_and_the_run_goes_on():
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
    found = build_sft_rows(CODEC, TASKS[:1], database, seed=0)
    assert [row.prompt for row in found].count("t0 <go>") == 4
    assert not any("b2" in row.answer for row in found), "a failure is nothing to learn from"
    shown = [row for row in found if "<ex>" in row.prompt]
    assert len(shown) == 4
    assert all(row.answer not in row.prompt for row in shown)
    best = build_sft_rows(CODEC, TASKS[:1], database, seed=0, config=RowConfig(improver=True))
    scores = {"a0 b0": 0.5, "a1 b0": 1.0, "a2 b0": 1.5, "a3 b0": 2.0}
    for row in best:
        others = [program for program in scores if program in row.prompt]
        assert all(scores[row.answer] > scores[other] for other in others)


def test_fitting_teaches_the_answers_and_nothing_else(start):
    model = writer(start)
    losses = fine_tune(
        model, [SftRow("t0 <go>", "a1 b3"), SftRow("t1 <go>", "a2 b0")], SMALL, seed=0
    )
    assert losses[-1] < 0.1 < losses[0]
    texts = model.sample(["t0 <go>", "t1 <go>"], count=4, temperature=0.3, seed=0)
    assert texts == [["a1 b3"] * 4, ["a2 b0"] * 4], "the end token is learned too"


def test_an_answer_with_an_unknown_word_is_refused_by_name(start):
    with pytest.raises(ValueError, match="'c9'"):
        fine_tune(writer(start), [SftRow("t0 <go>", "a1 c9")], SMALL, seed=0)


def test_nothing_to_learn_from_is_said(start):
    with pytest.raises(ValueError, match="no sample succeeded"):
        fine_tune(writer(start), [], SMALL, seed=0)


def test_success_rises_over_the_rounds_of_self_supervision(start, tmp_path):
    model, made = writer(start), recorder(tmp_path, SyntheticEvaluator(), "selfsup")
    fine_tune(
        model,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    config = SelfsupConfig(rounds=4, samples=16, fit=SMALL)
    facts = self_supervise(made, CODEC, model, config, folder=tmp_path / "selfsup")
    assert facts[-1]["success"] > facts[0]["success"] + 0.1
    made.appraiser.database.close()


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
            model, made = (
                writer(tmp_path / "sft"),
                recorder(tmp_path / name, SyntheticEvaluator(death), "selfsup"),
            )
            if death is not None:
                with pytest.raises(KeyboardInterrupt):
                    self_supervise(made, CODEC, model, config, folder=tmp_path / name / "selfsup")
            else:
                self_supervise(made, CODEC, model, config, folder=tmp_path / name / "selfsup")
            made.appraiser.database.close()
        models.append(model)
    for one, other in zip(*(model.model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def run_rl(start: Path, folder: Path, evaluator: SyntheticEvaluator) -> tuple[LanguageModel, int]:
    made = recorder(folder, evaluator, "rl")
    try:
        step = ContrastiveStep(made, RL, selector("bucket"))
        return train_policy(writer(start), step, RL, folder=folder / "rl", seed=0), len(
            made.appraiser.database
        )
    finally:
        made.appraiser.database.close()


def test_reinforcement_that_was_killed_loses_no_sample_and_counts_none_twice(start, tmp_path):
    taught = writer(start)
    fine_tune(
        taught,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    taught.save(tmp_path / "sft")
    whole, samples = run_rl(tmp_path / "sft", tmp_path / "whole", SyntheticEvaluator())
    asked = []
    for dies_after in (3, 12, 8):
        evaluator = SyntheticEvaluator(dies_after)
        with pytest.raises(KeyboardInterrupt):
            run_rl(tmp_path / "sft", tmp_path / "cut", evaluator)
        asked += evaluator.asked
    evaluator = SyntheticEvaluator()
    resumed, count = run_rl(tmp_path / "sft", tmp_path / "cut", evaluator)
    assert count == samples == 3 * 3 * 4
    assert max((asked + evaluator.asked).count(one) for one in asked) <= 2 + 3, (
        "each death may lose only what it was measuring"
    )
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_group_shares_one_draw_of_exemplars(start, tmp_path):
    made = recorder(tmp_path, SyntheticEvaluator(), "rl")
    step = ContrastiveStep(made, RL, selector("random"))
    model = writer(start)
    fine_tune(
        model,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    for number in range(3):
        step(model, number)
    found = list(made.appraiser.database.samples())
    assert any(sample.exemplars for sample in found)
    for group in range(0, len(found), RL.group):
        assert len({sample.exemplars for sample in found[group : group + RL.group]}) == 1
    made.appraiser.database.close()


def test_reinforcement_raises_the_speed_up(start, tmp_path):
    model, made = (
        writer(start),
        replace(recorder(tmp_path, SyntheticEvaluator(), "rl"), tasks=TASKS[:2]),
    )
    fine_tune(
        model,
        [SftRow(CODEC.prompt(task), program) for task in TASKS for program in EVERY],
        SMALL,
        seed=0,
    )
    config = GrpoConfig(steps=40, group=8, groups=6, epochs=2, learning_rate=1e-3, save_every=40)
    told: list[float] = []
    train_policy(
        model,
        ContrastiveStep(made, config),
        config,
        folder=tmp_path / "rl",
        seed=0,
        log=lambda _, facts: told.append(facts["speedup"]),
    )
    assert sum(told[-5:]) / 5 > sum(told[:5]) / 5 + 0.3
    made.appraiser.database.close()


def test_a_task_whose_reference_cannot_be_judged_is_told_once_and_the_others_go_on(tmp_path):
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


def test_a_step_with_split_credit_tells_which_samples_are_right_and_trains(start, tmp_path):
    model, made = writer(start), recorder(tmp_path, SyntheticEvaluator(), "rl")
    config = replace(RL, credit="split")
    step = ContrastiveStep(made, config)
    found = step(model, 0)
    assert found is not None
    known = made.read_measurements("0", prompts=RL.groups, count=RL.group)
    assert found.is_correct.tolist() == [float(one.score is not None) for one in known]
    assert found.program_mask.shape == found.rollout.ids.shape
    train_policy(model, step, config, folder=tmp_path / "rl", seed=0)
    made.appraiser.database.close()
